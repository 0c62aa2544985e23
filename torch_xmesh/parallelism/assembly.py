"""From what was found to a ParallelPlan."""

import dataclasses
from collections import Counter

from torch_xmesh.parallelism.cluster import Cluster
from torch_xmesh.parallelism.judge import Judged
from torch_xmesh.parallelism.layers import Layers
from torch_xmesh.parallelism.plan import (
    ParallelPlan,
    PlannedCollective,
    PlannedHeld,
    PlannedOperator,
    PlannedParameter,
    PlannedStage,
    PlannedTie,
    PlannedValue,
    Step,
    fingerprint_of,
)
from torch_xmesh.parallelism.stages import FoundStage


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is planned.

    Attributes:
        title: what kind of plan it is.
    """

    model: str
    layers: Layers
    cluster: Cluster
    num_microbatches: int
    collectives: str
    title: str = "found"


def assembled(subject: Subject, judged: Judged) -> ParallelPlan:
    """The plan as data."""
    layers = subject.layers
    operators = layers.forward.operators
    stages = tuple(
        planned_stage(layers, stage, judged.simulation.peak_in_flight[number], judged.peak_bytes[number])
        for number, stage in enumerate(judged.plan.stages)
    )
    values = tuple(
        PlannedValue(
            one.value.name,
            one.value.shape,
            str(one.value.dtype).removeprefix("torch."),
            one.from_stage,
            one.to_stage,
            one.src,
            one.dst,
            *one.seconds,
            one.value.requires_grad,
        )
        for one in judged.transfers
    )
    return ParallelPlan(
        model=subject.model,
        fingerprint=fingerprint_of([one.name for one in operators], [one.makes[0].shape for one in operators]),
        stages=stages,
        layers=tuple(layers.name(layer) for layer in range(len(layers))),
        values=values,
        num_microbatches=subject.num_microbatches,
        schedule=judged.schedule.name,
        schedule_csv=judged.schedule.to_csv(),
        step=_step(subject, judged),
        devices=subject.cluster.num_devices,
        collectives=subject.collectives,
        title=subject.title,
        ties=tuple(PlannedTie(one.name, one.stages, one.seconds) for one in judged.ties),
        notes=_notes(subject, judged),
    )


def planned_stage(layers: Layers, stage: FoundStage, in_flight: int, peak_bytes: int) -> PlannedStage:
    """A stage as data."""
    layer_of = layers.layer_of()
    sharded = stage.sharded
    operators = tuple(
        PlannedOperator(
            one.name,
            one.kind,
            one.module,
            choice.axes,
            tuple(end.value for end in choice.outputs),
            one.makes[0].shape,
            layer_of.get(-1 if one.makes[0].maker is None else one.makes[0].maker),
            one.loops.is_heavy,
            one.is_known,
            tuple(one.loops.extents.items()),
        )
        for one, choice in zip(sharded.operators, sharded.choices, strict=True)
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
    )


def _step(subject: Subject, judged: Judged) -> Step:
    """What a step's time consists of: computation, collectives and sums of gradients are those of the stage that works
    longest, transfers those of all stages."""

    def work(stage: FoundStage) -> tuple[float, float, float]:
        one, count = stage.sharded.seconds, subject.num_microbatches
        collectives = one.forward_collectives + one.backward_collectives
        return count * (one.forward + one.backward), count * collectives, one.step_collectives

    compute, collectives, sums = max(map(work, judged.plan.stages), key=sum)
    transfers = subject.num_microbatches * sum(sum(one.seconds) for one in judged.transfers)
    bubble = max(judged.step_seconds - compute - collectives - sums, 0.0)
    return Step(judged.step_seconds, compute, collectives, sums, transfers, bubble)


def _notes(subject: Subject, judged: Judged) -> tuple[str, ...]:
    out = []
    if subject.cluster.is_assumed:
        rates = subject.cluster.hosts[0].kind.compute
        out.append(
            f"devices are assumed to do {rates.flops:.3g} FLOP/s and {rates.bytes_per_s:.3g} bytes/s: pass compute="
        )
    operators = [one for one in subject.layers.forward.operators if not one.is_constant]
    unknown = Counter(one.kind for one in operators if not one.is_known)
    if unknown:
        counted = ", ".join(f"{kind} ({count})" for kind, count in sorted(unknown.items()))
        out.append(f"operators without a row, which every device of a stage computes whole: {counted}")
    read = {value.name for one in operators for value in one.reads if value.is_parameter}
    unread = [value.name for value in subject.layers.forward.parameters if value.name not in read]
    if unread:
        out.append(f"parameters that the forward does not read: {', '.join(unread[:5])}{' ...' if unread[5:] else ''}")
    if not judged.plan.is_proven:
        out.append(
            "not proven to be the best by its tables: the search ended early, too many placements failed, or operators "
            "are connected in too many ways for an exact search"
        )
    return tuple(out)
