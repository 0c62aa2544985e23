"""Whether a plan fits together: what devices could run, field by field."""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from torch_xmesh import _C
from torch_xmesh.parallelism.loops import COLLECTIVES, LATER, PARTIAL, PASS, REPLICATED, WHOLE
from torch_xmesh.parallelism.program import BOTH, EVALUATION, SOURCES, STAGE, TRAINING, validate
from torch_xmesh.pipeline.schedule.schedule import Schedule

if TYPE_CHECKING:
    from torch_xmesh.parallelism.plan import ParallelPlan, PlannedOperator, PlannedParameter, PlannedStage
    from torch_xmesh.parallelism.program import PlannedProgram, ProgramRead, ProgramResult, ProgramValue

_COLLECTIVES_FOR = ("forward", "backward", "gradient", "parameter")
_MODES = ((BOTH,), (TRAINING,), (EVALUATION,), (TRAINING, EVALUATION), (EVALUATION, TRAINING))
_HELD_FOR = ("readers", "entering", "leaving", "parameter")


def check_plan(plan: "ParallelPlan") -> None:
    """Raises ValueError for a plan that no devices could run."""
    if not plan.stages:
        raise ValueError("plan: no stages")
    _check_least("plan.num_microbatches", plan.num_microbatches, 1)
    _check_least("plan.parts", plan.parts, 1)
    if plan.num_microbatches % plan.parts:
        raise ValueError(
            f"plan.num_microbatches: {plan.num_microbatches} are none of whole microbatches in {plan.parts}"
        )
    used = Counter(rank for stage in plan.stages for rank in stage.ranks)
    twice = sorted(rank for rank, count in used.items() if count > 1)
    if twice:
        raise ValueError(f"plan: device {twice[0]} is in two stages")
    if min(used, default=-1) < 0:
        raise ValueError("plan: a stage without devices, or a device below 0")
    if len(used) != plan.devices:
        raise ValueError(f"plan.devices: {plan.devices}, the stages have {len(used)}")
    _check_one_of("plan.collectives", plan.collectives, [name for name, _ in _C.collective_cost_models()])
    ends = [0, *(stage.layers[1] for stage in plan.stages)]
    are_in_order = [stage.layers for stage in plan.stages] == list(itertools.pairwise(ends))
    if not are_in_order or ends[-1] != len(plan.layers):
        raise ValueError(f"plan: stages do not follow one another through the {len(plan.layers)} layers")
    for number, stage in enumerate(plan.stages):
        _check_stage(stage, plan.num_microbatches, f"plan.stages[{number}]")
    _check_values(plan)
    _check_ties(plan)
    _check_schedule(plan)
    if any(stage.programs for stage in plan.stages):
        check_programs(plan)
    _check_segments(plan)


def check_programs(plan: "ParallelPlan") -> None:
    """Raises ValueError for programs that do not fit: themselves, the plan's tables, or each other."""
    modes = [tuple(program.mode for program in stage.programs) for stage in plan.stages]
    if modes[0] not in _MODES or any(other != modes[0] for other in modes):
        raise ValueError(f"plan: programs of {modes}, expected of every stage one of both modes, or one of each")
    for number, stage in enumerate(plan.stages):
        for program in stage.programs:
            where = f"plan.stages[{number}]: program of {program.mode}"
            _check_program(program, stage, where)
            try:
                validate(program, stage.mesh_shape, stage.parameters)
            except (ValueError, TypeError) as error:
                raise ValueError(f"{where}: {error}") from None
    for at in range(len(modes[0])):
        _check_crossing(plan, [stage.programs[at] for stage in plan.stages])


def _check_program(program: "PlannedProgram", stage: "PlannedStage", where: str) -> None:
    """Operators are sharded as the plan's tables say, every tensor has a source, and states are states."""
    for value in program.values:
        at = f"{where}: value {value.name}"
        _check_one_of(f"{at}: source", value.source, SOURCES)
        _check_shape(f"{at}: shape", value.shape)
        _check_ends(value, value.shape, stage, at)
    left = [[read.value for read in leaving] for leaving in (program.leaving, program.leaving_whole)]
    if left[1] and left[0] != left[1]:
        raise ValueError(f"{where}: values {left[0]} leave, and values {left[1]} whole")
    begins = list(program.segments)
    if begins and (begins != sorted(begins) or begins[0] != 0 or begins[-1] > len(program.operators)):
        raise ValueError(f"{where}: segments begin with operators {begins} of {len(program.operators)}")
    ends: list[ProgramRead | ProgramResult] = [*program.leaving, *program.leaving_whole]
    for operator in program.operators:
        ends += [*operator.reads, *operator.results]
    for end in ends:
        if not 0 <= end.value < len(program.values):
            raise ValueError(f"{where}: value number {end.value} of {len(program.values)}")
        value = program.values[end.value]
        _check_ends(end, value.shape, stage, f"{where}: value {value.name}")
    axes = {operator.name: operator.axes for operator in stage.operators}
    for operator in program.operators:
        if operator.axes != axes.get(operator.name, operator.axes):
            raise ValueError(
                f"{where}: operator {operator.name} shards {operator.axes}, the plan's {axes[operator.name]}"
            )
        for label in operator.loops.within:
            _check_one_of(f"{where}: operator {operator.name}: within", label, [*dict(operator.loops.extents)])
    _check_distinct(f"{where}.operators", (operator.name for operator in program.operators))
    for source in SOURCES:
        _check_distinct(f"{where}: values of source {source}", (value.name for value in program.given(source)))


def _check_ends(
    end: "ProgramValue | ProgramRead | ProgramResult", shape: Sequence[int], stage: "PlannedStage", where: str
) -> None:
    for state in (end.state, end.gradient):
        _check_state(state, shape, stage.mesh_shape, where)


def _check_crossing(plan: "ParallelPlan", programs: "Sequence[PlannedProgram]") -> None:
    """What enters a stage leaves an earlier one, each as the plan says that it crosses."""
    left: dict[str, int] = {}
    ends = {(value.name, value.to_stage): (value.src, value.dst) for value in plan.values}
    for number, program in enumerate(programs):
        for value in program.given(STAGE):
            where = f"plan.stages[{number}]: value {value.name}"
            if value.name not in left:
                raise ValueError(f"{where} enters, and leaves no stage before")
            before = programs[left[value.name]]
            src = next(read.state for read in before.leaving if before.values[read.value].name == value.name)
            if (value.name, number) in ends and ends[value.name, number] != (src, value.state):
                raise ValueError(
                    f"{where} comes as {list(src)} and is taken as {list(value.state)}, the plan's as "
                    f"{list(ends[value.name, number][0])} and {list(ends[value.name, number][1])}"
                )
        if program is not programs[-1]:
            left.update((program.values[read.value].name, number) for read in program.leaving)


def _check_least(where: str, number: int, least: int) -> None:
    if number < least:
        raise ValueError(f"{where}: expected at least {least}, got {number}")


def _check_one_of(where: str, given: str, known: Iterable[str]) -> None:
    if given not in known:
        raise ValueError(f"{where}: expected one of {', '.join(known)}, got {given!r}")


def _check_distinct(where: str, names: Iterable[str]) -> None:
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise ValueError(f"{where}: {twice[0]!r} is there twice")


def _check_shape(where: str, shape: Sequence[int]) -> None:
    if any(extent < 0 for extent in shape):
        raise ValueError(f"{where}: expected extents of at least 0, got {list(shape)}")


def _check_values(plan: "ParallelPlan") -> None:
    for i, value in enumerate(plan.values):
        where = f"plan.values[{i}]"
        if not 0 <= value.from_stage < value.to_stage < len(plan.stages):
            raise ValueError(f"{where}: from stage {value.from_stage} to stage {value.to_stage}")
        if not isinstance(getattr(torch, value.dtype, None), torch.dtype):
            raise ValueError(f"{where}.dtype: expected the name of a torch.dtype, got {value.dtype!r}")
        _check_shape(f"{where}.shape", value.shape)
        _check_state(value.src, value.shape, plan.stages[value.from_stage].mesh_shape, where)
        _check_state(value.dst, value.shape, plan.stages[value.to_stage].mesh_shape, where, is_whole=True)
    _check_distinct("plan.values", (f"{planned.name} to stage {planned.to_stage}" for planned in plan.values))


def _check_ties(plan: "ParallelPlan") -> None:
    names = [{parameter.name for parameter in stage.parameters} for stage in plan.stages]
    for i, tie in enumerate(plan.ties):
        stages = list(tie.stages)
        if len(stages) < 2 or stages != sorted(set(stages)) or stages[0] < 0 or stages[-1] >= len(names):
            raise ValueError(f"plan.ties[{i}]: stages {stages}, expected two or more of {len(names)}, ascending")
        without = [stage for stage in stages if tie.name not in names[stage]]
        if without:
            raise ValueError(f"plan.ties[{i}]: stage {without[0]} has no parameter {tie.name!r}")
    _check_distinct("plan.ties", (tie.name for tie in plan.ties))


def _check_schedule(plan: "ParallelPlan") -> None:
    try:
        schedule = Schedule.from_csv(plan.schedule_csv, name=plan.schedule)
        schedule.validate()
    except ValueError as error:
        raise ValueError(f"plan.schedule_csv: {error}") from None
    if (schedule.num_stages, schedule.num_microbatches) != (len(plan.stages), plan.num_microbatches):
        raise ValueError(
            f"plan.schedule_csv: of {schedule.num_stages} stages and {schedule.num_microbatches} microbatches, "
            f"the plan has {len(plan.stages)} and {plan.num_microbatches}"
        )
    if schedule.num_places != len(plan.stages):
        raise ValueError(
            f"plan.schedule_csv: {schedule.num_places} places for {len(plan.stages)} stages, expected one for each: "
            "they have devices of their own"
        )
    if max(schedule.num_segments) > 1 and not all(stage.segments for stage in plan.stages):
        raise ValueError("plan.schedule_csv: an order of segments, of which the plan does not say what they take")
    for number, stage in enumerate(plan.stages):
        counts = {max(1, len(program.segments)) for program in stage.programs}
        if max(schedule.num_segments) > 1 and counts - {schedule.num_segments[number]}:
            raise ValueError(
                f"plan.schedule_csv: {schedule.num_segments[number]} segments of stage {number}, its programs have "
                f"{sorted(counts)}"
            )


def _check_segments(plan: "ParallelPlan") -> None:
    """What segments take is said of all or of none, and edges are between them."""
    if len({bool(stage.segments) for stage in plan.stages}) > 1:
        raise ValueError("plan: some stages say what their segments take, and some do not")
    for number, stage in enumerate(plan.stages):
        where, count = f"plan.stages[{number}]", len(stage.segments)
        for program in stage.programs:
            if count and count != max(1, len(program.segments)):
                raise ValueError(f"{where}: {count} segments, its program has {max(1, len(program.segments))}")
        for edge in stage.edges:
            if not 0 <= edge.from_segment < edge.to_segment < count:
                raise ValueError(
                    f"{where}: an edge from segment {edge.from_segment} to {edge.to_segment} of {count} segments"
                )
        _check_distinct(f"{where}.edges", (f"{edge.from_segment}>{edge.to_segment}" for edge in stage.edges))


def _check_stage(stage: "PlannedStage", num_microbatches: int, where: str) -> None:
    mesh = stage.mesh_shape
    if len(mesh) not in (1, 2) or min(mesh) < 1 or math.prod(mesh) != len(stage.ranks):
        raise ValueError(f"{where}: {len(stage.ranks)} ranks in a mesh of {list(mesh)}")
    for operator in stage.operators:
        _check_operator(operator, stage, f"{where}: operator {operator.name}")
    for parameter in stage.parameters:
        _check_parameter(parameter, mesh, f"{where}: parameter {parameter.name}")
    for i, use in enumerate(stage.collectives):
        at = f"{where}.collectives[{i}]"
        _check_one_of(f"{at}.why", use.why, _COLLECTIVES_FOR)
        _check_one_of(f"{at}.collective", use.collective, COLLECTIVES)
        _check_least(f"{at}.count", use.count, 1)
        if not 0 <= use.axis < len(mesh):
            raise ValueError(f"{at}.axis: expected one of {len(mesh)}, got {use.axis}")
    if not 1 <= stage.in_flight <= num_microbatches:
        raise ValueError(f"{where}.in_flight: expected 1 to {num_microbatches} microbatches, got {stage.in_flight}")
    _check_least(f"{where}.peak_bytes", stage.peak_bytes, 0)
    has_links = len(stage.links) == len(mesh) and all(len(links) in (2, 3) for links in stage.links)
    if not has_links and not stage.programs:
        raise ValueError(f"{where}: links of {len(stage.links)} axes on a mesh of {len(mesh)}")
    for held in stage.held:
        at = f"{where}: value {held.name}"
        _check_one_of(f"{at}: why", held.why, _HELD_FOR)
        for state in (held.state, held.gradient):
            _check_state(state, None, mesh, at)
    _check_distinct(f"{where}.operators", (operator.name for operator in stage.operators))
    _check_distinct(f"{where}.parameters", (planned.name for planned in stage.parameters))
    _check_distinct(f"{where}.held", (f"{planned.name} for {planned.why}" for planned in stage.held))


def _check_operator(operator: "PlannedOperator", stage: "PlannedStage", where: str) -> None:
    """What an axis does is a loop of the operator, or none, and its outputs are held as follows from that."""
    mesh = stage.mesh_shape
    if len(operator.axes) != len(mesh):
        raise ValueError(f"{where} has {len(operator.axes)} axes on a mesh of {len(mesh)}")
    if operator.layer is not None and not stage.layers[0] <= operator.layer < stage.layers[1]:
        raise ValueError(f"{where} is of layer {operator.layer}")
    _check_shape(f"{where}: shape", operator.shape)
    if operator.loops is not None:  # else a file of before they were said
        _check_distinct(f"{where}: loops", (name for name, _ in operator.loops))
        _check_axes(operator, dict(operator.loops), mesh, where)
    for number, state in enumerate(operator.outputs):
        _check_state(state, operator.shape if number == 0 else None, mesh, where)


def _check_axes(operator: "PlannedOperator", loops: Mapping[str, int], mesh: Sequence[int], where: str) -> None:
    parts = dict.fromkeys(loops, 1)
    for axis, (label, size) in enumerate(zip(operator.axes, mesh, strict=True)):
        if label not in (WHOLE, PASS, LATER, *loops):
            known = ", ".join(loops) or "none"
            raise ValueError(f"{where} has axis {axis} shard {label!r}: expected one of its loops ({known}), - + or ~")
        if label in loops:
            parts[label] *= size
        for number, state in enumerate(operator.outputs):
            if axis < len(state) and not _follows(label, state[axis]):
                raise ValueError(
                    f"{where}: output {number} is held as {state[axis]} along axis {axis}, whose choice is {label!r}"
                )
    for label, count in parts.items():
        if loops[label] < 1 or loops[label] % count != 0:
            raise ValueError(f"{where}: loop {label} of {loops[label]} in {count} parts")


def _follows(label: str, held: int) -> bool:
    if label in (WHOLE, LATER):
        return held == REPLICATED
    return held == PARTIAL or (label != PASS and held >= 0)


def _check_parameter(parameter: "PlannedParameter", mesh: Sequence[int], where: str) -> None:
    _check_shape(f"{where}: shape", parameter.shape)
    _check_state(parameter.state, parameter.shape, mesh, where, is_whole=True)
    if parameter.zero_level not in (0, 1, 2, 3) or (parameter.zero_level > 0) != (parameter.zero_state is not None):
        raise ValueError(f"{where} has ZeRO level {parameter.zero_level} and parts {parameter.zero_state}")
    if parameter.zero_state is not None:
        _check_state(parameter.zero_state, parameter.shape, mesh, where, is_whole=True)
        pairs = zip(parameter.state, parameter.zero_state, strict=True)
        if any(held not in (REPLICATED, part) for held, part in pairs):
            raise ValueError(f"{where}: parts {list(parameter.zero_state)} of what lies as {list(parameter.state)}")


def _check_state(
    state: Sequence[int],
    shape: Sequence[int] | None,
    mesh: Sequence[int],
    where: str,
    *,
    is_whole: bool = False,
) -> None:
    """Raises ValueError where a state fits neither the mesh nor a value of this shape (None: not known). `is_whole`:
    partial sums are refused, too."""
    if len(state) != len(mesh):
        raise ValueError(f"{where} has {len(state)} states on a mesh of {len(mesh)} axes")
    parts: dict[int, int] = {}
    for held, size in zip(state, mesh, strict=True):
        if held < (REPLICATED if is_whole else PARTIAL) or (shape is not None and held >= len(shape)):
            raise ValueError(f"{where} has no dim {held}")
        if held >= 0:
            parts[held] = parts.get(held, 1) * size
    for dim, count in parts.items():
        if shape is not None and shape[dim] % count != 0:
            raise ValueError(f"{where}: dim {dim} of {shape[dim]} in {count} parts")
