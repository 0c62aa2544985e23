"""The order of segments: one microbatch's are computed while what another's have made is on its way among a stage's
devices (HiDup's Duplex, S. Zhang et al., SoCC 2022, as a schedule).

plan, its schedule of whole stages --> segments' costs --> orders, simulated --> the plan with the fastest
"""

import dataclasses
from collections.abc import Sequence

from torch_xmesh import _C
from torch_xmesh.parallelism.judge import edges_between, spare_of
from torch_xmesh.parallelism.plan import ParallelPlan, PlannedStage, PredictedStep
from torch_xmesh.parallelism.segment_costs import costs_of_segments
from torch_xmesh.parallelism.stages import NoPlan
from torch_xmesh.pipeline.schedule.choice import best_schedule
from torch_xmesh.pipeline.schedule.schedule import Schedule
from torch_xmesh.pipeline.schedule.simulation import Costs, Simulation, simulate

AUTO, DUPLEX = "auto", "duplex"
_MOST_ORDERED_ACTIONS = 40_000
"""For a step with more actions of segments no order is searched for."""
_NO_ORDER_FITS = "no order of segments keeps the limit of memory"
LEAST_GAIN = 0.99
"""An order of segments is taken if a step takes at most this part of what it takes in the order of whole stages."""


def with_order(
    plan: ParallelPlan, *, schedule: str = AUTO, overlap: str | bool = AUTO, limits: Sequence[int | None] = ()
) -> ParallelPlan:
    """The plan with its segments in the order that is predicted to be the fastest, if that is faster than its schedule
    of whole stages.

    Args:
        plan: with its segments' costs.
        schedule: "duplex": HiDup's order, whatever it takes; "auto": any; else that of the plan is kept.
        overlap: False: the plan's schedule is kept; True: an order of segments, whatever it takes.
        limits: by stage the bytes that a device may hold.
    """
    serial = _played(plan, _schedule_of(plan), limits)
    kept = dataclasses.replace(plan, step=_step(plan, serial, serial))
    if schedule == DUPLEX:
        return _duplex(plan, serial, limits)
    if overlap is False or schedule != AUTO:
        return kept
    reason = _why_no_order(plan)
    found = None if reason else _found(plan, limits)
    if found is not None:
        ordered = _ordered(plan, found, serial, limits)
        if overlap is True or ordered.step.total <= LEAST_GAIN * kept.step.total:
            return ordered
    return with_note(kept, f"overlap=True: {reason or _NO_ORDER_FITS}") if overlap is True else kept


def with_note(plan: ParallelPlan, note: str) -> ParallelPlan:
    """The same with a note more."""
    return dataclasses.replace(plan, notes=(*plan.notes, note))


def orders_segments(plan: ParallelPlan) -> bool:
    """Whether the plan's schedule is one of segments, not of whole stages."""
    return max(_schedule_of(plan).num_segments) > 1


def _why_nothing_hides(plan: ParallelPlan) -> str:
    """Why no order of segments hides anything; empty where one may."""
    if plan.num_microbatches == 1:
        return "nothing is hidden, since a step has one microbatch"
    if not any(stage.edges for stage in plan.stages):
        return "nothing is hidden, since nothing is moved among a stage's devices but what is moved once a step"
    return ""


def _why_no_order(plan: ParallelPlan) -> str:
    """Why no order of segments is searched for; empty where one is."""
    num_segments = sum(len(stage.segments) for stage in plan.stages)
    if 3 * num_segments * plan.num_microbatches > _MOST_ORDERED_ACTIONS:
        return f"no order is searched for more than {_MOST_ORDERED_ACTIONS} actions of segments"
    return _why_nothing_hides(plan)


def _duplex(plan: ParallelPlan, serial: Simulation, limits: Sequence[int | None]) -> ParallelPlan:
    """Raises ValueError where it does not keep the limits."""
    counts = [len(stage.segments) for stage in plan.stages]
    ordered = _ordered(plan, Schedule(_C.duplex(range(len(counts)), plan.num_microbatches, counts)), serial, limits)
    for number, (stage, limit) in enumerate(zip(ordered.stages, limits, strict=False)):
        if limit is not None and stage.peak_bytes > limit:
            raise NoPlan(
                f"schedule='duplex' does not keep memory_limit_bytes={limit}: a device of stage {number} would hold "
                f"{stage.peak_bytes} bytes",
                stage.peak_bytes,
            )
    reason = _why_nothing_hides(plan)
    return with_note(ordered, f"schedule='duplex': {reason}") if reason else ordered


def simulated(plan: ParallelPlan) -> Simulation:
    """The plan's schedule, played as it was when the plan was judged."""
    return _played(plan, _schedule_of(plan), ())


def _schedule_of(plan: ParallelPlan) -> Schedule:
    return Schedule.from_csv(plan.schedule_csv, name=plan.schedule)


def _played(plan: ParallelPlan, schedule: Schedule, limits: Sequence[int | None]) -> Simulation:
    counts = [len(stage.segments) for stage in plan.stages]
    if min(counts) > 0:
        return simulate(Schedule(schedule.core.divided(counts)), costs_of_segments(plan, spare_of(limits)[1]))
    moves = [
        (value.from_stage, value.to_stage, (value.forward_seconds, value.backward_seconds), value.has_gradient)
        for value in plan.values
    ]
    stages = [stage.seconds.costs(is_whole=stage.is_whole) for stage in plan.stages]
    return simulate(schedule, Costs(stages=stages, edges=edges_between(len(stages), moves), blocks_receiver=False))


def _found(plan: ParallelPlan, limits: Sequence[int | None]) -> Schedule | None:
    """None where none keeps the limits."""
    most, spare = spare_of(limits)
    costs = costs_of_segments(plan, spare)
    counts = [len(stage.segments) for stage in plan.stages]
    best = best_schedule(costs, range(len(counts)), plan.num_microbatches, most, counts)
    return None if best is None else best.schedule


def _ordered(plan: ParallelPlan, schedule: Schedule, serial: Simulation, limits: Sequence[int | None]) -> ParallelPlan:
    simulation = _played(plan, schedule, limits)
    stages = tuple(
        _with_in_flight(stage, in_flight)
        for stage, in_flight in zip(plan.stages, simulation.peak_in_flight, strict=True)
    )
    return dataclasses.replace(
        plan,
        stages=stages,
        schedule=schedule.name,
        schedule_csv=schedule.to_csv(),
        step=_step(plan, simulation, serial),
    )


def _with_in_flight(stage: PlannedStage, in_flight: int) -> PlannedStage:
    return dataclasses.replace(stage, in_flight=in_flight, peak_bytes=round(stage.bytes.total(in_flight)))


def _step(plan: ParallelPlan, simulation: Simulation, serial: Simulation) -> PredictedStep:
    """Of the stage that works longest: what it computes and communicates, and what of that is at the same time;
    transfers are those of all stages."""

    def work(stage: PlannedStage) -> tuple[float, float, float]:
        seconds, count = stage.seconds, plan.num_microbatches
        collectives = seconds.forward_collectives + seconds.backward_collectives
        return count * (seconds.forward + seconds.backward), count * collectives, seconds.step_collectives

    works = [work(stage) for stage in plan.stages]
    longest = max(range(len(works)), key=lambda number: sum(works[number]))
    compute, collectives, sums = works[longest]
    transfers = plan.num_microbatches * sum(value.forward_seconds + value.backward_seconds for value in plan.values)
    shared = [sum(tie.seconds for tie in plan.ties if number in tie.stages) for number in range(len(works))]
    total = simulation.makespan_seconds + max(shared)
    before = serial.makespan_seconds + max(shared)
    hidden = _hidden(plan, simulation, longest)
    bubble = max(total - (compute + collectives + sums - hidden), 0.0)
    return PredictedStep(total, compute, collectives, sums, transfers, bubble, hidden, before)


def _hidden(plan: ParallelPlan, simulation: Simulation, stage: int) -> float:
    """Seconds for which a stage's devices compute and communicate among themselves at once."""
    computed = sorted(
        (action.start_seconds, action.end_seconds) for action in simulation.actions if action.place == stage
    )
    moved = sorted(
        (transfer.start_seconds, transfer.end_seconds)
        for transfer in simulation.transfers
        if transfer.from_stage == transfer.to_stage == stage
    )
    out, at = 0.0, 0
    for start, end in moved:
        while at < len(computed) and computed[at][1] <= start:
            at += 1
        later = at
        while later < len(computed) and computed[later][0] < end:
            out += max(0.0, min(end, computed[later][1]) - max(start, computed[later][0]))
            later += 1
    return out
