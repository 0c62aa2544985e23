"""Where a stage's program is divided into segments, between which values go by transfers."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from torch import fx

from torch_xmesh.parallelism.bound_program import BoundProgram
from torch_xmesh.parallelism.operators import Recorded
from torch_xmesh.parallelism.plan import PlannedParameter, PlannedStage
from torch_xmesh.parallelism.program import PlannedProgram, core_programs
from torch_xmesh.parallelism.segment_layout import SegmentLayout


def divided(
    programs: Sequence[PlannedProgram],
    recordings: Sequence[Recorded],
    stage: PlannedStage,
    parameters: Sequence[PlannedParameter],
) -> list[PlannedProgram]:
    """The programs of a stage, one for each mode, with their segments. They have none where they would pass on other
    values in one mode than in the other."""
    out, texts = [], []
    for program, recorded in zip(programs, recordings, strict=False):
        bound = BoundProgram(recorded, program)
        found = core_programs(program, stage.mesh_shape, parameters)
        may_begin = _may_begin(program, bound, recorded, stage)
        begins = max((core.segments(may_begin) for core in found), key=len)
        out.append(dataclasses.replace(program, segments=tuple(begins) if len(begins) > 1 else ()))
        layouts = [SegmentLayout(bound, out[-1], core, is_whole=at > 0) for at, core in enumerate(found)]
        texts.append([layout.text for layout in layouts])
    return out if all(text == texts[0] for text in texts) else list(programs)


def check_divided(stage: PlannedStage, number: int, recordings: Mapping[str, Recorded]) -> None:
    """Raises ValueError where a stage that was read is divided at an operator with which no segment may begin;
    `recordings`: by mode."""
    for program in stage.programs:
        recorded = next((recorded for mode, recorded in recordings.items() if program.does(mode)), None)
        if recorded is None or not program.segments:
            continue
        may_begin = _may_begin(program, BoundProgram(recorded, program), recorded, stage)
        for begin in program.segments:
            if begin < len(may_begin) and not may_begin[begin]:
                raise ValueError(
                    f"stage {number} of the plan has a segment that begins with {program.operators[begin].name}, which "
                    "must be in one with what is before: a checkpoint, a layer that is fetched or memory that is "
                    "changed would be divided"
                )


def _may_begin(program: PlannedProgram, bound: BoundProgram, recorded: Recorded, stage: PlannedStage) -> list[bool]:
    """By operator whether a segment may begin with it."""
    out = [True] * len(program.operators)
    for first, last in _together(program, bound, recorded, stage):
        out[first + 1 : last + 1] = [False] * (last - first)
    return out


def _together(
    program: PlannedProgram, bound: BoundProgram, recorded: Recorded, stage: PlannedStage
) -> Iterator[tuple[int, int]]:
    """Operators, the first one and the last one, that are in one segment: of an activation checkpoint, those that read
    what each microbatch fetches of a layer, or the same such parameter, and from the first one that has a memory to the
    last one that changes it."""
    facts, sites = recorded.recording.facts, recorded.sites
    layer_of = {operator.name: operator.layer for operator in stage.operators}
    fetched = {parameter.name for parameter in stage.parameters if parameter.zero_level == 3}
    groups: dict[tuple[str, int | str | None], list[int]] = {}
    memories: dict[int, list[int]] = {}  # operators that have it
    changes: dict[int, int] = {}  # the last one that changes it
    mutations = recorded.recording.mutations
    changed = {memory for memory, _, _ in mutations}
    changed_by: dict[fx.Node, set[int]] = {}
    for memory, _, changer in mutations:
        changed_by.setdefault(changer, set()).add(memory)
    for place, number in enumerate(bound.operators):
        operator, node = recorded.forward.operators[number], sites[number].node
        if operator.checkpoint is not None:
            groups.setdefault(("checkpoint", operator.checkpoint), []).append(place)
        for name in {value.name for value in operator.reads if value.is_parameter} & fetched:
            groups.setdefault(("layer", layer_of.get(operator.name)), []).append(place)
            groups.setdefault(("parameter", name), []).append(place)
        own = changed_by.get(node, set())  # what is called whole may change a buffer that no other operator has
        touched = own.union(facts[node].memory, *(facts[source].memory for source in node.all_input_nodes))
        for memory in touched & changed:
            memories.setdefault(memory, []).append(place)
        changes.update(dict.fromkeys(own, place))
    for places in groups.values():
        yield places[0], places[-1]
    for memory, place in changes.items():
        yield memories[memory][0], place
