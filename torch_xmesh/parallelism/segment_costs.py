"""What a planned stage's segments take, and what goes between them, for the simulator of schedules.

programs with segments, what was found for operators --> PlannedSegment, PlannedEdge --> Costs of segments
"""

import dataclasses
from collections.abc import Callable, Sequence

from torch_xmesh.parallelism.bound_program import BoundProgram
from torch_xmesh.parallelism.judge import is_never_split
from torch_xmesh.parallelism.loops import State
from torch_xmesh.parallelism.objective import Seconds
from torch_xmesh.parallelism.operators import Recorded, Value
from torch_xmesh.parallelism.plan import ParallelPlan, PlannedEdge, PlannedSegment, PlannedStage
from torch_xmesh.parallelism.program import PlannedProgram, core_programs
from torch_xmesh.parallelism.segment_layout import SegmentLayout
from torch_xmesh.parallelism.stages import FoundStage
from torch_xmesh.pipeline.schedule.simulation import Costs, EdgeCosts, StageCosts

Moved = Callable[[Value, FoundStage, State, State], float]
"""Seconds that a value takes from one sharding to another among a stage's devices."""


def with_segment_costs(
    plan: ParallelPlan, recorded: Recorded, found: Sequence[FoundStage], moved: Moved
) -> ParallelPlan:
    """The plan with what its stages' segments take. `recorded`: the forward that was planned; `found`: by stage."""
    stages = tuple(
        _with_costs(planned, *_Stage(planned, recorded, stage, moved).costs())
        for planned, stage in zip(plan.stages, found, strict=True)
    )
    return dataclasses.replace(plan, stages=stages)


def _with_costs(
    stage: PlannedStage, segments: tuple[PlannedSegment, ...], edges: tuple[PlannedEdge, ...]
) -> PlannedStage:
    """The stage's collectives take what those of its segments and its transfers do."""
    inside = sum((segment.seconds for segment in segments), Seconds())
    seconds = dataclasses.replace(
        stage.seconds,
        forward_collectives=inside.forward_collectives + sum(edge.forward_seconds for edge in edges),
        backward_collectives=inside.backward_collectives + sum(edge.backward_seconds for edge in edges),
    )
    return dataclasses.replace(stage, seconds=seconds, segments=segments, edges=edges)


class _Stage:
    def __init__(self, planned: PlannedStage, recorded: Recorded, stage: FoundStage, moved: Moved) -> None:
        self._planned, self._stage, self._moved = planned, stage, moved
        self._program: PlannedProgram = planned.programs[0]
        self._forward = recorded.forward
        self._bound = BoundProgram(recorded, self._program)
        core = core_programs(self._program, planned.mesh_shape, planned.parameters)[0]
        self._layout = SegmentLayout(self._bound, self._program, core, is_whole=False)
        self._seconds = [Seconds() for _ in range(self._layout.count)]
        self._is_whole = [False] * self._layout.count

    def costs(self) -> tuple[tuple[PlannedSegment, ...], tuple[PlannedEdge, ...]]:
        segment_of = {
            self._forward.operators[number].name: segment
            for segment, numbers in enumerate(self._layout.operators)
            for number in numbers
        }
        self._add_computed(segment_of)
        self._add_collectives()
        segments = tuple(map(PlannedSegment, map(_rounded, self._seconds), self._is_whole))
        return segments, self._edges()

    def _add(self, segment: int, seconds: Seconds) -> None:
        self._seconds[segment] += seconds

    def _add_computed(self, segment_of: dict[str, int]) -> None:
        """What operators compute, the collectives that they run by themselves, and those on parameters."""
        sharded, space = self._stage.sharded, self._stage.space
        fetched = {name for name, level in sharded.zero_levels.items() if level == 3}
        for operator, choice, spent in zip(sharded.operators, sharded.choices, sharded.spent, strict=True):
            segment = segment_of.get(operator.name, 0)
            within = {"forward": 0.0, "backward": 0.0}
            for use in space.within(operator, choice):
                within[use.why] += space.collective_seconds(use)
            own = dataclasses.replace(
                spent, forward_collectives=within["forward"], backward_collectives=within["backward"]
            )
            self._add(segment, own)
            reads_fetched = any(value.is_parameter and value.name in fetched for value in operator.reads)
            self._is_whole[segment] = self._is_whole[segment] or reads_fetched or is_never_split(operator)
        for name, parts in sharded.in_parts.items():
            reader = sharded.operators[sharded.graph.stretch.parameters[name][1]]
            self._add(segment_of.get(reader.name, 0), dataclasses.replace(parts.seconds, step_collectives=0.0))

    def _add_collectives(self) -> None:
        """Those that bring values from one sharding to another within a segment."""
        program, layout = self._program, self._layout
        for number, operator in enumerate(program.operators):
            segment = layout.segment_of(number)
            is_again = self._forward.operators[self._bound.operators[number]].is_given_again
            for place, read in enumerate(operator.reads):
                if (number, place) not in layout.taken:
                    held = program.values[read.value]
                    back = (read.gradient, held.gradient) if read.gives_gradient else None
                    self._convert(segment, read.value, (held.state, read.state), back, is_again=is_again)
            for place, result in enumerate(operator.results):
                if (number, place) not in layout.sent:
                    held = program.values[result.value]
                    back = (held.gradient, result.gradient) if held.has_gradient else None
                    self._convert(segment, result.value, (result.state, held.state), back, is_again=is_again)
        for place, read in enumerate(program.leaving):
            if place not in layout.left:
                held = program.values[read.value]
                back = (read.gradient, held.gradient) if read.gives_gradient else None
                self._convert(layout.count - 1, read.value, (held.state, read.state), back, is_again=False)

    def _convert(
        self, segment: int, number: int, there: tuple[State, State], back: tuple[State, State] | None, *, is_again: bool
    ) -> None:
        value = self._bound.values[number]
        forward = self._priced(value, *there)
        backward = (0.0 if back is None else self._priced(value, *back)) + (forward if is_again else 0.0)
        if forward or backward:
            self._add(segment, Seconds(forward_collectives=forward, backward_collectives=backward))

    def _priced(self, value: Value, before: State, after: State) -> float:
        space = self._stage.space
        return sum(space.collective_seconds(use) for use in space.steps(value, "forward", before, after))

    def _edges(self) -> tuple[PlannedEdge, ...]:
        sums: dict[tuple[int, int], list[float]] = {}
        has_gradient: dict[tuple[int, int], bool] = {}
        for one in self._layout.passed:
            if one.is_sent:
                src, dst, gradient_src, gradient_dst = one.ends
                own = sums.setdefault((one.from_segment, one.to_segment), [0.0, 0.0])
                own[0] += self._moved(one.source, self._stage, src, dst)
                if one.has_gradient:
                    own[1] += self._moved(one.source, self._stage, gradient_src, gradient_dst)
                ends = one.from_segment, one.to_segment
                has_gradient[ends] = has_gradient.get(ends, False) or one.has_gradient
        return tuple(
            PlannedEdge(start, stop, forward, backward, has_gradient[start, stop])
            for (start, stop), (forward, backward) in sums.items()
        )


def _rounded(seconds: Seconds) -> Seconds:
    """Without what differences of sums leave below 0."""
    fields = dataclasses.asdict(seconds)
    return Seconds(**{name: max(value, 0.0) for name, value in fields.items()})


def costs_of_segments(plan: ParallelPlan, spare: Sequence[int] = ()) -> Costs:
    """Of all stages' segments, numbered through. What backward needs of a microbatch is counted from the first
    segment's forward to its backward. `spare`: bytes by stage that are counted as held."""
    stages: list[StageCosts] = []
    first: list[int] = []
    edges: dict[tuple[int, int], EdgeCosts | float] = {}
    for number, stage in enumerate(plan.stages):
        first.append(len(stages))
        held = round(stage.bytes.per_microbatch), round(stage.bytes.fixed) + (spare[number] if spare else 0)
        for at, segment in enumerate(stage.segments):
            costs = segment.seconds.costs(
                is_whole=segment.is_whole,
                activation_bytes=held[0] if at == 0 else 0,
                fixed_bytes=held[1] if at == 0 else 0,
            )
            stages.append(dataclasses.replace(costs, sums_seconds=segment.seconds.step_collectives))
        for at in range(len(stage.segments) - 1):
            edges[first[-1] + at, first[-1] + at + 1] = 0.0
        for edge in stage.edges:
            edges[first[-1] + edge.from_segment, first[-1] + edge.to_segment] = EdgeCosts(
                forward_seconds=edge.forward_seconds,
                backward_seconds=edge.backward_seconds,
                has_gradient=edge.has_gradient or edge.from_segment + 1 == edge.to_segment,
                is_resharded=True,
            )
    last = [*(start - 1 for start in first[1:]), len(stages) - 1]
    for number in range(len(plan.stages) - 1):
        edges.setdefault((last[number], first[number + 1]), 0.0)
    between: dict[tuple[int, int], list[float]] = {}
    with_gradient: set[tuple[int, int]] = set()
    for value in plan.values:
        ends = last[value.from_stage], first[value.to_stage]
        seconds = between.setdefault(ends, [0.0, 0.0])
        seconds[0] += value.forward_seconds
        seconds[1] += value.backward_seconds
        if value.has_gradient:
            with_gradient.add(ends)
    for ends, (forward, backward) in between.items():
        edges[ends] = EdgeCosts(forward_seconds=forward, backward_seconds=backward, has_gradient=ends in with_gradient)
    inside = [
        start + at
        for start, stage in zip(first, plan.stages, strict=True)
        if stage.is_on_one_host
        for at in range(len(stage.segments))
    ]
    groups = range(len(stages))
    return Costs(
        stages=stages, edges=edges, blocks_receiver=False, weights_groups=groups, on_one_host=frozenset(inside)
    )
