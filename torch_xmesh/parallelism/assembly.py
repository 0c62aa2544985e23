"""From what was found to a ParallelPlan."""

import dataclasses
from collections import Counter

from torch_xmesh.parallelism.cluster import Cluster
from torch_xmesh.parallelism.forward_modes import ForwardModes
from torch_xmesh.parallelism.judge import Judge, Judged, is_whole
from torch_xmesh.parallelism.layers import Layers
from torch_xmesh.parallelism.overlap import AUTO, DUPLEX, with_order
from torch_xmesh.parallelism.plan import (
    ParallelPlan,
    PlannedCollective,
    PlannedHeld,
    PlannedOperator,
    PlannedParameter,
    PlannedStage,
    PlannedTie,
    PlannedValue,
    PredictedStep,
    fingerprint_of,
)
from torch_xmesh.parallelism.plan_checks import check_programs
from torch_xmesh.parallelism.program_writer import with_programs
from torch_xmesh.parallelism.segment_costs import with_segment_costs
from torch_xmesh.parallelism.stages import FoundStage


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is planned.

    Attributes:
        modes: the model's forward; that in the mode in which it came is what `layers` are of.
        schedule: its name, or "auto".
        overlap: whether one microbatch's segments are computed while another communicates: "auto" where that is faster.
        title: what kind of plan it is.
        parts: into how many microbatches each one that is asked for is cut.
    """

    model: str
    modes: ForwardModes
    layers: Layers
    cluster: Cluster
    num_microbatches: int
    collectives: str
    schedule: str = AUTO
    overlap: str | bool = AUTO
    title: str = "found"
    parts: int = 1

    @property
    def stage_schedule(self) -> str:
        """That of whole stages, with which plans are compared: its name, or "auto"."""
        return "1f1b" if self.schedule == DUPLEX else self.schedule

    @property
    def may_overlap(self) -> bool:
        """Whether one microbatch may compute while another communicates."""
        return self.overlap is not False and self.schedule in (AUTO, DUPLEX) and self.num_microbatches > 1


def assembled(subject: Subject, judged: Judged, judge: Judge) -> ParallelPlan:
    """The plan as data, its segments in the order that is asked for.

    Raises:
        ValueError: the model cannot be run in such stages.
        RuntimeError: a value would lie otherwise than its reader takes it: a fault of the search.
    """
    layers = subject.layers
    operators = layers.forward.operators
    stages = tuple(
        dataclasses.replace(
            planned_stage(layers, stage, judged.simulation.peak_in_flight[number], judged.peak_bytes[number]),
            is_on_one_host=any(set(stage.ranks) <= set(host.ranks) for host in subject.cluster.hosts),
        )
        for number, stage in enumerate(judged.plan.stages)
    )
    values = tuple(
        PlannedValue(
            transfer.value.name,
            transfer.value.shape,
            str(transfer.value.dtype).removeprefix("torch."),
            transfer.from_stage,
            transfer.to_stage,
            transfer.src,
            transfer.dst,
            *transfer.seconds,
            transfer.value.requires_grad,
        )
        for transfer in judged.transfers
    )
    plan = ParallelPlan(
        model=subject.model,
        fingerprint=fingerprint_of(
            [operator.name for operator in operators], [operator.makes[0].shape for operator in operators]
        ),
        stages=stages,
        layers=tuple(layers.name(layer) for layer in range(len(layers))),
        values=values,
        num_microbatches=subject.num_microbatches,
        schedule=judged.schedule.name,
        schedule_csv=judged.schedule.to_csv(),
        step=PredictedStep(judged.step_seconds, 0.0, 0.0, 0.0, 0.0, 0.0),  # with_order() knows it by segments
        devices=subject.cluster.num_devices,
        collectives=subject.collectives,
        title=subject.title,
        ties=tuple(PlannedTie(tie.name, tie.stages, tie.seconds) for tie in judged.ties),
        notes=_notes(subject, judged),
        parts=subject.parts,
        device_type=subject.cluster.device_type,
    )
    out = with_programs(plan, subject.modes, layers.forward.num_samples)
    try:
        check_programs(out)
    except ValueError as error:
        raise RuntimeError(
            f"the plan that was found does not fit together, which is a fault of the search: {error}"
        ) from error
    found = judged.plan.stages
    costs = with_segment_costs(out, subject.modes.recorded, found, judge.moved_within)
    limits = [stage.shape.kind.memory_bytes for stage in found]
    return with_order(costs, schedule=subject.schedule, overlap=subject.overlap, limits=limits)


def planned_stage(layers: Layers, stage: FoundStage, in_flight: int, peak_bytes: int) -> PlannedStage:
    """A stage as data."""
    layer_of = layers.layer_of()
    sharded = stage.sharded
    operators = tuple(
        PlannedOperator(
            operator.name,
            operator.kind,
            operator.module,
            choice.axes,
            tuple(end.value for end in choice.outputs),
            operator.makes[0].shape,
            layer_of.get(-1 if operator.makes[0].maker is None else operator.makes[0].maker),
            operator.loops.is_heavy,
            operator.is_known,
            tuple(operator.loops.extents.items()),
        )
        for operator, choice in zip(sharded.operators, sharded.choices, strict=True)
    )
    parameters = tuple(
        PlannedParameter(name, value.shape, state, sharded.zero_levels.get(name, 0), sharded.zero_states.get(name))
        for name, (value, state) in sorted(sharded.parameters.items())
    )
    counted: dict[tuple[str, str, int], list[float]] = {}
    for use in sharded.collectives:
        counted.setdefault((use.why, use.collective, use.axis), []).append(use.num_bytes)
    collectives = tuple(PlannedCollective(*kind, len(sizes), sum(sizes)) for kind, sizes in sorted(counted.items()))
    return PlannedStage(
        stage.ranks,
        stage.space.shape,
        (stage.first, stage.end),
        operators,
        parameters,
        collectives,
        sharded.seconds,
        sharded.bytes,
        in_flight,
        peak_bytes,
        tuple(axis[1:] for axis in stage.space.axes),
        tuple(PlannedHeld(value.name, why, end.value, end.gradient) for why, value, end in sharded.held),
        stage.gap,
        is_whole(stage),
    )


def _notes(subject: Subject, judged: Judged) -> tuple[str, ...]:
    out = []
    if subject.cluster.is_assumed:
        rates = subject.cluster.hosts[0].kind.compute
        out.append(
            f"devices are assumed to do {rates.flops:.3g} FLOP/s and {rates.bytes_per_s:.3g} bytes/s: pass compute="
        )
    if subject.parts > 1:
        out.append(
            f"each microbatch is computed in {subject.parts} parts, which are microbatches: a step has as many losses, "
            "and what depends on a microbatch's other samples (batch norm, experts' places by batch, a loss over "
            "tokens that count) is of a part"
        )
    operators = [operator for operator in subject.layers.forward.operators if not operator.is_constant]
    unknown = Counter(operator.kind for operator in operators if not operator.is_known)
    if unknown:
        counted = ", ".join(f"{kind} ({count})" for kind, count in sorted(unknown.items()))
        out.append(f"operators without a row, which every device of a stage computes whole: {counted}")
    read = {value.name for operator in operators for value in operator.reads if value.is_parameter}
    unread = [value.name for value in subject.layers.forward.parameters if value.name not in read]
    if unread:
        out.append(f"parameters that the forward does not read: {', '.join(unread[:5])}{' ...' if unread[5:] else ''}")
    if not judged.plan.is_proven:
        out.append(
            "not proven to be the best by its tables: the search ended early, too many placements failed, or operators "
            "are connected in too many ways for an exact search"
        )
    return tuple(out)
