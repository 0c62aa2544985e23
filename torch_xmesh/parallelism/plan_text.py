"""Plans as text: for a person, and what differs between two."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_xmesh.parallelism.plan import ParallelPlan, PlannedOperator, PlannedParameter, PlannedStage

_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def seconds_text(seconds: float) -> str:
    """With a unit that suits."""
    for scale, unit in _UNITS:
        if seconds >= scale:
            return f"{seconds / scale:.4g} {unit}"
    return f"{seconds / 1e-6:.4g} us" if seconds >= 1e-12 else "0"


def bytes_text(num_bytes: float) -> str:
    """With a unit that suits."""
    for scale, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.4g} {unit}"
    return f"{num_bytes:.0f} B"


def plan_text(plan: ParallelPlan) -> str:
    """Stages, submeshes, a line for each layer, and the predicted step."""
    step = plan.step
    lines = [
        f"{plan.model} on {plan.devices} devices ({plan.title}): {len(plan.stages)} "
        f"stage{'s' if len(plan.stages) > 1 else ''}, {plan.num_microbatches} microbatches, {plan.schedule}, "
        f"predicted {seconds_text(step.total)} a step",
        f"  compute {seconds_text(step.compute)}, collectives {seconds_text(step.collectives)}, at the end "
        f"{seconds_text(step.sums)}, bubble {seconds_text(step.bubble)} of the stage that works longest; transfers "
        f"{seconds_text(step.transfers)}",
    ]
    if step.hidden:
        lines.append(f"  {seconds_text(step.hidden)} of its collectives are under computation")
    if step.serial > step.total:
        serial = seconds_text(step.serial)
        lines.append(f"  one microbatch computes while another communicates; without that a step takes {serial}")
    for number, stage in enumerate(plan.stages):
        lines += _stage_lines(plan, number, stage)
    for tie in plan.ties:
        stages = ", ".join(map(str, tie.stages))
        lines.append(f"{tie.name} is on stages {stages}: its gradients take {seconds_text(tie.seconds)} at the end")
    lines += [f"note: {note}" for note in plan.notes]
    return "\n".join(lines)


def _stage_lines(plan: ParallelPlan, number: int, stage: PlannedStage) -> list[str]:
    mesh = " x ".join(map(str, stage.mesh_shape))
    seconds = stage.seconds
    lines = [
        f"stage {number} on {mesh} devices {_ranks_text(stage.ranks)}: forward {seconds_text(seconds.forward)} + "
        f"{seconds_text(seconds.forward_collectives)}, backward {seconds_text(seconds.backward)} + "
        f"{seconds_text(seconds.backward_collectives)}, at the end {seconds_text(seconds.step_collectives)}",
        f"  a device holds at most {bytes_text(stage.peak_bytes)}: parameters {bytes_text(stage.bytes.parameters)}, "
        f"gradients {bytes_text(stage.bytes.gradients)}, states {bytes_text(stage.bytes.states)}, "
        f"{bytes_text(stage.bytes.per_microbatch)} for each of {stage.in_flight} in flight"
        + (f", {bytes_text(stage.bytes.again)} of a checkpoint computed anew" if stage.bytes.again else ""),
    ]
    if 0 < stage.gap < 1:
        lines.append(f"  no other sharding that fits is more than {100 * stage.gap:.2g} % faster")
    layers = [(plan.layers[layer], parallelism_of(stage, layer)) for layer in range(*stage.layers)]
    start = 0
    for end in range(1, len(layers) + 1):
        if end == len(layers) or layers[end][1] != layers[start][1]:
            span = layers[start][0] if end - start == 1 else f"{layers[start][0]} ... {layers[end - 1][0]}"
            lines.append(f"  {span}: {layers[start][1]}")
            start = end
    for use in stage.collectives:
        often = "a step" if use.why in ("gradient", "parameter") else "a microbatch"
        lines.append(
            f"    {use.why:9} {use.collective:14} axis {use.axis}: {use.count} of {bytes_text(use.num_bytes)} {often}"
        )
    for value in plan.values:
        if value.from_stage == number:
            lines.append(
                f"    to stage {value.to_stage}: {value.name} {list(value.shape)}, "
                f"{seconds_text(value.forward_seconds)} and back {seconds_text(value.backward_seconds)}"
            )
    return lines


def _ranks_text(ranks: tuple[int, ...]) -> str:
    ordered = list(ranks)
    if ordered == list(range(ordered[0], ordered[0] + len(ordered))) and len(ordered) > 2:
        return f"{ordered[0]}-{ordered[-1]}"
    return ",".join(map(str, ordered))


def parallelism_of(stage: PlannedStage, layer: int) -> str:
    """How the products of a layer are sharded, in a few words: per axis what most of them do."""
    operators = [operator for operator in stage.operators if operator.layer == layer]
    chosen = [operator for operator in operators if operator.is_heavy] or operators
    parts = []
    for axis, size in enumerate(stage.mesh_shape):
        if size == 1:
            continue
        counted = Counter(axis_word(operator, axis) for operator in chosen)
        words = [word for word, _ in sorted(counted.items(), key=lambda item: (-item[1], item[0]))]
        parts.append(f"{'+'.join(words[:2])} / {size}")
    levels = sorted({parameter.zero_level for parameter in _parameters_of(stage, operators)} - {0})
    zero = [f"ZeRO-{'/'.join(map(str, levels))}"] if levels else []
    return ", ".join([*(parts or ["one device"]), *zero])


def _parameters_of(stage: PlannedStage, operators: list[PlannedOperator]) -> list[PlannedParameter]:
    modules = tuple({f"{operator.module}." for operator in operators if operator.module})
    return [parameter for parameter in stage.parameters if parameter.name.startswith(modules)] if modules else []


def axis_word(operator: PlannedOperator, axis: int) -> str:
    """What an axis does with an operator: its batch, another dim that it makes, what it adds up, or nothing."""
    label = operator.axes[axis]
    if label in ("-", "~"):
        return "whole"
    if label == "+":
        return "sums"
    held = operator.outputs[0][axis] if operator.outputs else -1
    if held == 0 and len(operator.shape) > 0:
        return "batch"
    if held < 0:
        return "rows"
    return "columns" if held == len(operator.shape) - 1 else f"dim {held}"


def diff_text(plan: ParallelPlan, other: ParallelPlan) -> str:
    """What differs, line by line: - is `plan`, + is `other`."""
    out: list[str] = []

    def differs(what: str, mine: object, theirs: object) -> None:
        if mine != theirs:
            out.extend([f"- {what}: {mine}", f"+ {what}: {theirs}"])

    differs("model", f"{plan.model} {plan.fingerprint}", f"{other.model} {other.fingerprint}")
    differs("schedule", plan.schedule, other.schedule)
    differs("microbatches", plan.num_microbatches, other.num_microbatches)
    differs("stages", _meshes(plan), _meshes(other))
    for name, mine, theirs in _pairs(_operators(plan), _operators(other)):
        differs(name, mine, theirs)
    for name, mine, theirs in _pairs(_parameters(plan), _parameters(other)):
        differs(name, mine, theirs)
    differs("predicted step", seconds_text(plan.step.total), seconds_text(other.step.total))
    differs("most bytes of a device", _most_bytes(plan), _most_bytes(other))
    return "\n".join(out)


def _meshes(plan: ParallelPlan) -> str:
    return " | ".join(
        f"{' x '.join(map(str, stage.mesh_shape))} (devices {_ranks_text(stage.ranks)}) for "
        f"{plan.layers[stage.layers[0]]} ... {plan.layers[stage.layers[1] - 1]}"
        for stage in plan.stages
    )


def _operators(plan: ParallelPlan) -> dict[str, str]:
    return {
        operator.name: " ".join(operator.axes)
        for stage in plan.stages
        for operator in stage.operators
        if operator.layer is not None
    }


def _parameters(plan: ParallelPlan) -> dict[str, str]:
    out: dict[str, str] = {}
    for stage in plan.stages:
        for parameter in stage.parameters:
            name = f"parameter {parameter.name}"
            state = f"{list(parameter.state)}{f' ZeRO-{parameter.zero_level}' if parameter.zero_level else ''}"
            out[name] = f"{out[name]} and {state}" if name in out else state
    return out


def _pairs(mine: dict[str, str], other: dict[str, str]) -> list[tuple[str, str, str]]:
    names = dict.fromkeys([*mine, *other])
    return [(name, mine.get(name, "absent"), other.get(name, "absent")) for name in names]


def _most_bytes(plan: ParallelPlan) -> str:
    return bytes_text(max(stage.peak_bytes for stage in plan.stages))
