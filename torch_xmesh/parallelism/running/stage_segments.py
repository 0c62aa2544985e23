"""The segments of a planned stage as the engine takes them."""

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from torch_xmesh.parallelism.judge import placements_of
from torch_xmesh.parallelism.operators import Recorded
from torch_xmesh.parallelism.running.stage import ShardedStage
from torch_xmesh.parallelism.segment_layout import Passed, SegmentLayout
from torch_xmesh.pipeline.cut.stage_segments import PassedValue, SegmentEdge, StageSegment, StageSegments


def stage_segments(
    stage: ShardedStage, recorded: Recorded, inputs: Sequence[str], outputs: Sequence[str]
) -> StageSegments | None:
    """None where the stage is not divided. `inputs`, `outputs`: the engine's names of the stage's."""
    layout, types = stage.first.segments, _types(recorded)
    if layout.count == 1:
        return None
    segments = []
    for number in range(layout.count):
        own = layout.arguments[number]
        given = [inputs[place] for place in own] + (list(inputs[stage.first.num_arguments :]) if number == 0 else [])
        passed = [value.name for value in layout.inputs[number][len(given) :]]
        left = [value.name for value in layout.outputs[number]] if number + 1 < layout.count else outputs
        reason = stage.whole_because[number]
        waits = number in stage.own.waiting
        segments.append(StageSegment((*given, *passed), tuple(left), tuple(own), reason, waits))
    by_ends: dict[tuple[int, int, bool], list[PassedValue]] = {}
    for one in layout.passed:
        ends = one.from_segment, one.to_segment, one.is_sent
        by_ends.setdefault(ends, []).append(_passed(one, layout, types))
    edges = tuple(SegmentEdge(*ends, tuple(values)) for ends, values in by_ends.items())
    return StageSegments(tuple(segments), edges, lambda number, given: stage.run_segment(number, given))


def with_types(segments: StageSegments, recorded: Recorded) -> StageSegments:
    """The same of values of other types: those of a forward recorded under another autocast."""
    types = _types(recorded)
    edges = tuple(
        dataclasses.replace(
            edge, values=tuple(dataclasses.replace(value, dtype=types[value.name]) for value in edge.values)
        )
        for edge in segments.edges
    )
    return dataclasses.replace(segments, edges=edges)


def _types(recorded: Recorded) -> dict[str, torch.dtype]:
    return {value.name: value.dtype for operator in recorded.forward.operators for value in operator.makes}


def _passed(one: Passed, layout: SegmentLayout, types: Mapping[str, torch.dtype]) -> PassedValue:
    src, dst, gradient_src, gradient_dst = (tuple(placements_of(state)) for state in one.ends)
    return PassedValue(
        name=one.name,
        output=layout.outputs[one.from_segment].index(one.source),
        input=layout.inputs[one.to_segment].index(one.key),
        shape=one.key.shape,
        dtype=types[one.name],
        is_differentiable=one.has_gradient,
        src=src,
        dst=dst,
        gradient_src=gradient_src,
        gradient_dst=gradient_dst,
    )
