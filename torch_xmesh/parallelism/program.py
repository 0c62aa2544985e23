"""What the devices of a stage do with a microbatch, as data: operators in order, and how each value and its gradient
lie where they are made, in between, and where they are read.

ParallelPlan --> PlannedProgram, one per stage and mode --> the runner, which follows it
                                                        --> C++, which validates it apart from the search
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch_xmesh import _C
from torch_xmesh.parallelism.conversions import AxisMove
from torch_xmesh.parallelism.loops import LATER, PASS, WHOLE, State

if TYPE_CHECKING:
    from torch_xmesh.parallelism.plan import PlannedParameter

BOTH, TRAINING, EVALUATION = "both", "training", "evaluation"
MODES = (BOTH, TRAINING, EVALUATION)
ARGUMENT, STAGE, PARAMETER, CONSTANT, OPERATOR = "argument", "stage", "parameter", "constant", "operator"
SOURCES = (ARGUMENT, STAGE, PARAMETER, CONSTANT, OPERATOR)

Moves = tuple[AxisMove, ...]
_CHOICES = {WHOLE: -1, PASS: -2, LATER: -3}


@dataclasses.dataclass(frozen=True)
class ProgramValue:
    """A tensor that flows through a stage.

    Attributes:
        source: where it comes from: "argument" of the model, another "stage", "parameter" (or buffer) of the model, a
            "constant" of its forward, or an "operator" of the stage.
        state, gradient: how its readers find it, and how the sum of their gradients lies.
    """

    name: str
    source: str
    shape: tuple[int, ...]
    state: State
    gradient: State
    has_gradient: bool


@dataclasses.dataclass(frozen=True)
class ProgramRead:
    """A value as a reader takes it.

    Attributes:
        value: its number among the program's.
        state, gradient: how it is taken, and how the gradient lies that the reader gives for it.
        there, back: the moves from where it is held to where it is taken, and the gradient's back.
    """

    value: int
    state: State
    gradient: State
    gives_gradient: bool
    there: Moves = ()
    back: Moves = ()


@dataclasses.dataclass(frozen=True)
class ProgramResult:
    """A value as its operator leaves it.

    Attributes:
        state, gradient: how it is made, and how its gradient is wanted.
        there, back: the moves to where it is held, and the gradient's from there.
    """

    value: int
    state: State
    gradient: State
    there: Moves = ()
    back: Moves = ()


@dataclasses.dataclass(frozen=True)
class ProgramLoops:
    """An operator's loops, as it was planned: see :class:`~torch_xmesh.parallelism.loops.Loops`.

    Attributes:
        extents: the loops by name, with the size that a mesh axis sharding one must divide.
        inputs, outputs: by tensor that it reads, and makes, the loop over each dim; None where each device needs all of
            a dim.
        once: numbers of inputs that stand outside of the loops that add up.
        within: loops over which it runs collectives of its own.
    """

    extents: tuple[tuple[str, int], ...]
    inputs: tuple[tuple[str | None, ...], ...]
    outputs: tuple[tuple[str | None, ...], ...]
    is_linear: bool = False
    once: tuple[int, ...] = ()
    within: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class ProgramOperator:
    """An operator. `axes`: as :class:`PlannedOperator` has them."""

    name: str
    axes: tuple[str, ...]
    loops: ProgramLoops
    reads: tuple[ProgramRead, ...]
    results: tuple[ProgramResult, ...]


@dataclasses.dataclass(frozen=True)
class PlannedProgram:
    """What a stage does with a microbatch.

    Attributes:
        mode: of the model: "training", "evaluation", or "both" where they do the same.
        values: those that are given come first: the model's arguments, then other stages'.
        leaving: what goes to other stages; on the last one what the model returns. Where the engine's loss is a mean
            over samples each device is left those on which it computes it.
        leaving_whole: the last stage's, where each device is left all of the outputs.
        segments: the operators with which segments begin, parts between which values go by transfers; a segment may
            have none. Empty: it is not divided.
    """

    mode: str
    values: tuple[ProgramValue, ...]
    operators: tuple[ProgramOperator, ...]
    leaving: tuple[ProgramRead, ...]
    leaving_whole: tuple[ProgramRead, ...] = ()
    segments: tuple[int, ...] = ()

    def given(self, source: str) -> list[ProgramValue]:
        """The values of a source, in order."""
        return [value for value in self.values if value.source == source]

    def does(self, mode: str) -> bool:
        """Whether it is that of a mode of the model."""
        return self.mode in (BOTH, mode)


def validate(
    program: PlannedProgram, mesh_shape: Sequence[int], parameters: "Sequence[PlannedParameter]"
) -> tuple["_C.Program", "_C.Program"]:
    """Follows every value and its gradient through the program. It is given back as C++ has it: once with `leaving`,
    once with `leaving_whole`.

    Args:
        parameters: those of the stage, whose ways to and from the microbatches are followed, too.

    Raises:
        ValueError: something of it does not fit; the operator and the value are named.
    """
    found = core_programs(program, mesh_shape, parameters)
    for core in found:
        core.validate()
    return found


def core_programs(
    program: PlannedProgram, mesh_shape: Sequence[int], parameters: "Sequence[PlannedParameter]"
) -> tuple["_C.Program", "_C.Program"]:
    """The program as C++ has it: with `leaving`, and with `leaving_whole`, or the same where that is as much."""
    first = _core(program, mesh_shape, program.leaving, parameters)
    return first, _core(program, mesh_shape, program.leaving_whole, parameters) if program.leaving_whole else first


def _core(
    program: PlannedProgram,
    mesh_shape: Sequence[int],
    leaving: Sequence[ProgramRead],
    parameters: "Sequence[PlannedParameter]",
) -> "_C.Program":
    out = _C.Program(mesh_shape)
    numbers: dict[str, int] = {}
    for value in program.values:
        enters = value.source != OPERATOR
        ends = value.state, value.gradient
        number = out.add_value(value.name, value.shape, ends, has_gradient=value.has_gradient, enters=enters)
        if value.source == PARAMETER:
            numbers[value.name] = number
    for operator in program.operators:
        names = [name for name, _ in operator.loops.extents]
        axes = [_number_of(label, names, operator.name) for label in operator.axes]
        results = [
            (result.value, (result.state, result.gradient), _moves(result.there), _moves(result.back))
            for result in operator.results
        ]
        out.add_operator(operator.name, _nest(operator.loops, names), axes, list(map(_read, operator.reads)), results)
    for read in leaving:
        out.add_leaving(_read(read))
    kept = {parameter.name: parameter for parameter in parameters}
    for name, number in numbers.items():
        if name not in kept:
            raise ValueError(f"parameter {name} is read, and the stage does not keep it")
        parameter = kept[name]
        out.add_fetch(number, parameter.kept_state, _moves(parameter.fetch), _moves(parameter.sum))
    return out


def _read(read: ProgramRead) -> tuple[Any, ...]:
    return read.value, (read.state, read.gradient), _moves(read.there), _moves(read.back), read.gives_gradient


def _moves(moves: Sequence[AxisMove]) -> list[tuple[int, int, int]]:
    return [(move.axis, move.before, move.after) for move in moves]


def _number_of(label: str, names: Sequence[str], operator: str) -> int:
    if label in _CHOICES:
        return _CHOICES[label]
    if label not in names:
        raise ValueError(
            f"operator {operator}: an axis shards {label!r}: expected one of its loops ({', '.join(names) or 'none'}), "
            "- + or ~"
        )
    return names.index(label)


def _nest(loops: ProgramLoops, names: Sequence[str]) -> tuple[Any, ...]:
    """Loops by number. A dim that no loop runs over has none, nor has one whose loop has no extent: it is never
    sharded."""
    number = {name: at for at, name in enumerate(names)}

    def dims(labels: Sequence[str | None]) -> list[list[int]]:
        return [[number[name] for name in (own or "").split("|") if name in number] for own in labels]

    extents = [extent for _, extent in loops.extents]
    return names, extents, list(map(dims, loops.inputs)), list(map(dims, loops.outputs)), loops.is_linear, loops.once
