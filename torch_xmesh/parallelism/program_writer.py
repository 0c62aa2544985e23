"""The programs of a plan's stages, written down from what was found for operators and values.

choices of operators, values that are held otherwise, links --> ends of every value --> moves between them (Conversions)
"""

import dataclasses
from collections.abc import Iterable, Sequence

from torch_xmesh.parallelism.conversions import Conversions
from torch_xmesh.parallelism.dividing import divided
from torch_xmesh.parallelism.forward_modes import ForwardModes
from torch_xmesh.parallelism.loops import PARTIAL, REPLICATED, WHOLE, Choice, End, Loops, choice_along
from torch_xmesh.parallelism.operators import Operator, Recorded, Value
from torch_xmesh.parallelism.plan import ParallelPlan, PlannedParameter, PlannedStage
from torch_xmesh.parallelism.program import (
    ARGUMENT,
    BOTH,
    CONSTANT,
    OPERATOR,
    PARAMETER,
    STAGE,
    PlannedProgram,
    ProgramLoops,
    ProgramOperator,
    ProgramRead,
    ProgramResult,
    ProgramValue,
)
from torch_xmesh.parallelism.stage_parts import StagePart, stage_parts


def with_programs(plan: ParallelPlan, modes: ForwardModes, num_samples: int | None) -> ParallelPlan:
    """The plan with its stages' programs.

    Args:
        plan: without programs, of the model whose forwards these are.
        num_samples: samples of a microbatch, where the model's outputs go to a loss that each device computes on some
            of them; 0: there are none; None: outputs stay as the plan leaves them.

    Raises:
        ValueError: the plan is of another model, or that cannot be run in such stages.
    """
    first = _Writers(plan, modes.recorded, num_samples)
    programs = [[program] for program in first.programs(modes.mode)]
    because = str(modes.other) if isinstance(modes.other, ValueError) else ""
    if isinstance(modes.other, Recorded):
        try:
            others = _Writers(plan, modes.other, num_samples).programs(modes.other_mode)
            _check_alike([of_stage[0] for of_stage in programs], others)
        except ValueError as error:
            because = str(error)
        else:
            programs = [[*of_stage, other] for of_stage, other in zip(programs, others, strict=True)]
    kept = first.parameters()
    for number, of_stage in enumerate(programs):
        programs[number] = divided(of_stage, modes.runnable, plan.stages[number], kept[number])
    is_same = all(_does_the_same(of_stage) for of_stage in programs)
    stages = tuple(
        dataclasses.replace(
            stage,
            parameters=parameters,
            links=(),
            held=(),
            programs=(dataclasses.replace(of_stage[0], mode=BOTH),) if is_same else tuple(of_stage),
        )
        for stage, parameters, of_stage in zip(plan.stages, kept, programs, strict=True)
    )
    return dataclasses.replace(plan, stages=stages, one_mode_because=because)


def _does_the_same(programs: Sequence[PlannedProgram]) -> bool:
    """In both modes."""
    (first, *others) = programs
    return first.mode == BOTH or (bool(others) and dataclasses.replace(others[0], mode=first.mode) == first)


def _check_alike(first: Sequence[PlannedProgram], others: Sequence[PlannedProgram]) -> None:
    """Raises ValueError where more than what is done between differs from another mode's."""
    for mine, theirs in zip(others, first, strict=True):
        if any(_ends(mine.given(source)) != _ends(theirs.given(source)) for source in (ARGUMENT, STAGE)):
            raise ValueError("in the other a stage is given other values")
        if _left(mine) != _left(theirs):
            raise ValueError("in the other a stage leaves other values")
        own = {value.name: value.gradient for value in theirs.given(PARAMETER)}
        if any(own.get(value.name, value.gradient) != value.gradient for value in mine.given(PARAMETER)):
            raise ValueError("in the other gradients of parameters lie otherwise")


def _ends(values: Iterable[ProgramValue]) -> list[tuple[object, ...]]:
    return [(value.name, value.state, value.gradient) for value in values]


def _left(program: PlannedProgram) -> list[tuple[object, ...]]:
    return [(program.values[read.value].name, read.state, read.gradient) for read in program.leaving]


class _Writers:
    """One per stage, of a forward in one mode."""

    def __init__(self, plan: ParallelPlan, recorded: Recorded, num_samples: int | None) -> None:
        parts = stage_parts(recorded, plan)
        self._writers = [
            _Writer(recorded, stage, part, plan.collectives, num_samples if number + 1 == len(parts) else None)
            for number, (stage, part) in enumerate(zip(plan.stages, parts, strict=True))
        ]

    def programs(self, mode: str) -> list[PlannedProgram]:
        return [writer.program(mode) for writer in self._writers]

    def parameters(self) -> list[tuple[PlannedParameter, ...]]:
        """Once programs are written."""
        return [writer.parameters() for writer in self._writers]


class _Writer:
    """One stage. `num_samples`: on the last stage; None: outputs stay as the plan leaves them."""

    def __init__(
        self, recorded: Recorded, planned: PlannedStage, part: StagePart, collectives: str, num_samples: int | None
    ) -> None:
        self._recorded, self._planned, self._part, self._num_samples = recorded, planned, part, num_samples
        self._conversions = Conversions(planned.mesh_shape, planned.links, collectives)
        whole = (REPLICATED,) * len(planned.mesh_shape)
        self._whole = End(whole, whole)
        self._held = {(held.why, held.name): End(held.state, held.gradient) for held in planned.held}
        self._axes = {operator.name: operator.axes for operator in planned.operators}
        self._kept = {parameter.name for parameter in planned.parameters}
        self._values: list[ProgramValue] = []
        self._numbers: dict[Value, int] = {}

    def program(self, mode: str) -> PlannedProgram:
        operators = [self._recorded.forward.operators[number] for number in self._part.operators]
        choices = [self._choice(operator) for operator in operators]
        self._enter(operators, choices)
        written = tuple(map(self._operator, operators, choices))
        leaving, leaving_whole = self._leaving()
        return PlannedProgram(mode, tuple(self._values), written, leaving, leaving_whole)

    def parameters(self) -> tuple[PlannedParameter, ...]:
        """The stage's, with their ways to microbatches and their gradients' from there."""
        by_name = {value.name: value for value in self._numbers if value.is_parameter}
        out = []
        for parameter in self._planned.parameters:
            value = by_name.get(parameter.name)
            if value is None:
                raise ValueError(f"the plan has parameter {parameter.name} in a stage that does not read it")
            held, kept = self._end(value), parameter.kept_state
            fetch = self._conversions.steps(value, kept, parameter.state)
            back = self._conversions.steps(value, held.gradient, kept) if value.requires_grad else ()
            out.append(dataclasses.replace(parameter, fetch=fetch, sum=back))
        return tuple(out)

    def _choice(self, operator: Operator) -> Choice:
        return choice_along(operator.loops, self._axes.get(operator.name, self._whole_axes))

    @property
    def _whole_axes(self) -> tuple[str, ...]:
        return (WHOLE,) * len(self._planned.mesh_shape)

    def _enter(self, operators: Sequence[Operator], choices: Sequence[Choice]) -> None:
        """What is there from the beginning. A parameter that one operator alone reads lies as that takes it."""
        for value in self._part.arguments:
            self._add(value, self._held_for_all(value), ARGUMENT)
        for value in self._part.entering:
            self._add(value, self._held_for_all(value), STAGE)
        for operator, choice in zip(operators, choices, strict=True):
            for value, end in zip(operator.reads, choice.inputs, strict=True):
                if value in self._numbers or value.maker is not None:
                    continue
                if value.is_parameter:
                    if value.name not in self._kept:
                        raise ValueError(f"{operator.name} reads {value.name}, which its stage does not keep")
                    self._add(value, self._held.get(("parameter", value.name), end), PARAMETER)
                else:
                    self._add(value, self._held_for_all(value), CONSTANT)
        made = {value for operator in operators for value in operator.makes}
        for value in self._part.leaving:  # outputs that no operator makes or reads
            if value not in self._numbers and value not in made:
                self._add(value, self._held_for_all(value), PARAMETER if value.is_parameter else CONSTANT)

    def _held_for_all(self, value: Value) -> End:
        found = (self._held.get((why, value.name)) for why in ("readers", "entering", "parameter"))
        return next(filter(None, found), self._whole)

    def _add(self, value: Value, held: End, source: str) -> None:
        self._numbers[value] = len(self._values)
        self._values.append(
            ProgramValue(value.name, source, value.shape, held.value, held.gradient, value.requires_grad)
        )

    def _end(self, value: Value) -> End:
        added = self._values[self._numbers[value]]
        return End(added.state, added.gradient)

    def _operator(self, operator: Operator, choice: Choice) -> ProgramOperator:
        reads = tuple(
            self._read(value, end, has_gradient=value.requires_grad and operator.requires_grad)
            for value, end in zip(operator.reads, choice.inputs, strict=True)
        )
        results = tuple(
            self._result(value, end, operator) for value, end in zip(operator.makes, choice.outputs, strict=True)
        )
        return ProgramOperator(operator.name, choice.axes, _loops(operator.loops), reads, results)

    def _read(self, value: Value, end: End, *, has_gradient: bool) -> ProgramRead:
        held = self._end(value)
        there = self._conversions.steps(value, held.value, end.value)
        back = self._conversions.steps(value, end.gradient, held.gradient) if has_gradient else ()
        return ProgramRead(self._numbers[value], end.value, end.gradient, has_gradient, there, back)

    def _result(self, value: Value, made: End, operator: Operator) -> ProgramResult:
        held = made if operator.is_constant else self._held.get(("readers", value.name), made)
        self._add(value, held, OPERATOR)
        there = self._conversions.steps(value, made.value, held.value)
        back = self._conversions.steps(value, held.gradient, made.gradient) if value.requires_grad else ()
        return ProgramResult(self._numbers[value], made.value, made.gradient, there, back)

    def _leaving(self) -> tuple[tuple[ProgramRead, ...], tuple[ProgramRead, ...]]:
        """How what leaves is left; and how it is where every device is left all of it."""
        planned = [self._held.get(("leaving", value.name), self._end(value)) for value in self._part.leaving]
        if self._num_samples is None:
            return self._left(planned), ()
        axes = self._sample_axes(planned)
        state = tuple(0 if axis in axes else REPLICATED for axis in range(len(self._planned.mesh_shape)))
        added_up = tuple(PARTIAL if held == 0 else REPLICATED for held in state)
        by_samples, whole = End(state, state), End(self._whole.value, added_up)  # each device's loss adds to gradients
        ends = [by_samples if self._has_samples(value) else whole for value in self._part.leaving]
        return self._left(ends), self._left([self._whole] * len(ends)) if axes else ()

    def _left(self, ends: Sequence[End]) -> tuple[ProgramRead, ...]:
        return tuple(
            self._read(value, end, has_gradient=value.requires_grad)
            for value, end in zip(self._part.leaving, ends, strict=True)
        )

    def _sample_axes(self, planned: Sequence[End]) -> list[int]:
        """The mesh axes over which the plan leaves the samples of all outputs that have some and are made here."""
        own = {value for value in self._numbers if self._values[self._numbers[value]].source == OPERATOR}
        states = [
            end.value
            for value, end in zip(self._part.leaving, planned, strict=True)
            if value in own and self._has_samples(value)
        ]
        axes = range(len(self._planned.mesh_shape))
        return [axis for axis in axes if states and all(state[axis] == 0 for state in states)]

    def _has_samples(self, value: Value) -> bool:
        """Whether a value's first dim is taken for that of the samples."""
        return bool(value.shape) and value.shape[0] == self._num_samples


def _loops(loops: Loops) -> ProgramLoops:
    read = [at for at, labels in enumerate(loops.inputs) if labels is not None]
    return ProgramLoops(
        tuple(loops.extents.items()),
        tuple(labels for labels in loops.inputs if labels is not None),
        loops.outputs,
        loops.is_linear,
        tuple(place for place, at in enumerate(read) if at in loops.once),
        tuple(dict.fromkeys(within.label for within in loops.within if within.label in loops.extents)),
    )
