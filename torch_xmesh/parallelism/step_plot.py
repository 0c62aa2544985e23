"""A plan as a picture: devices over the time of a step, each layer colored by how it is sharded."""

import re
from pathlib import Path

from torch_xmesh.palette import ACTIONS, colors_of, new_figure, time_unit
from torch_xmesh.parallelism.overlap import simulated
from torch_xmesh.parallelism.plan import ParallelPlan, PlannedStage
from torch_xmesh.parallelism.plan_text import parallelism_of, seconds_text


def at_end_of(plan: ParallelPlan, number: int) -> float:
    """Seconds that a stage spends on gradients and parameters when a simulated step has ended: those that it shares
    with others, and of a plan without segments its own."""
    shared = sum(tie.seconds for tie in plan.ties if number in tie.stages)
    stage = plan.stages[number]
    return shared + (0.0 if stage.segments else stage.seconds.step_collectives)


_ALPHA = {True: 0.45, False: 0.9}
"""Of forwards, and of backwards."""
_LEAST_LABELLED = 0.01
"""The part of a step that an action takes at least that is marked with its microbatch's number."""


def plot_plan(plan: ParallelPlan, path: Path) -> None:
    """Draws it (format by suffix). Forwards are light, backwards dark; each action is divided among its layers. What is
    on its way among a stage's devices stands below, thinner. What comes when all else is done stands behind a stage's
    last action.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = new_figure(12, 1.5 + 0.9 * len(plan.stages))
    from matplotlib.patches import Patch

    kinds = list(dict.fromkeys(parallelism_of(stage, layer) for stage in plan.stages for layer in range(*stage.layers)))
    colors = dict(zip(kinds, colors_of(kinds), strict=True))
    axes = figure.subplots()
    scale, unit = time_unit(plan.predicted_seconds)
    played = simulated(plan)
    ends = dict.fromkeys(range(len(plan.stages)), 0.0)
    for action in played.actions:
        ends[action.place] = max(ends[action.place], action.end_seconds)
        stage, is_forward = plan.stages[action.place], "F" in action.action
        layers = _layers_of(stage, action.action)
        width = (action.end_seconds - action.start_seconds) * scale / len(layers)
        for number, layer in enumerate(layers if is_forward else reversed(layers)):
            axes.barh(
                _place(plan, stage),
                width,
                left=action.start_seconds * scale + number * width,
                height=0.7 * _height(plan, stage),
                color=colors[parallelism_of(stage, layer)],
                alpha=_ALPHA[is_forward],
                linewidth=0,
            )
        if action.end_seconds - action.start_seconds >= _LEAST_LABELLED * plan.predicted_seconds:
            at = (action.start_seconds + action.end_seconds) / 2 * scale
            text = re.split("[FBIW]", action.action)[1]
            axes.text(at, _place(plan, stage), text, ha="center", va="center", fontsize=7, color="white")
    moved, at_end = ACTIONS["send"][1], ACTIONS["gradients"][1]
    for transfer in played.transfers:
        stage, is_sum = plan.stages[transfer.from_stage], transfer.microbatch < 0
        if transfer.from_stage == transfer.to_stage:
            ends[transfer.from_stage] = max(ends[transfer.from_stage], transfer.end_seconds)
            axes.barh(
                _place(plan, stage) + 0.41 * _height(plan, stage),
                (transfer.end_seconds - transfer.start_seconds) * scale,
                left=transfer.start_seconds * scale,
                height=0.1 * _height(plan, stage),
                color=at_end if is_sum else moved,
                linewidth=0,
            )
    for number, stage in enumerate(plan.stages):
        width, left = at_end_of(plan, number) * scale, ends[number] * scale
        axes.barh(_place(plan, stage), width, left=left, height=0.7 * _height(plan, stage), color=at_end, linewidth=0)
    axes.set_yticks([_place(plan, stage) for stage in plan.stages])
    axes.set_yticklabels([f"stage {i}, on\n{_devices(stage)}" for i, stage in enumerate(plan.stages)])
    axes.invert_yaxis()
    axes.set_xlim(0, plan.predicted_seconds * scale)
    axes.set_xlabel(f"{unit}, predicted; a stage with more devices has a taller row")
    axes.set_title(f"{plan.model} on {plan.devices} devices, {plan.schedule}: {seconds_text(plan.step.total)} a step")
    passes = {"light: forward": _ALPHA[True], "dark: backward": _ALPHA[False]}
    axes.legend(
        handles=[
            *(Patch(color=color, label=kind) for kind, color in colors.items()),
            *(Patch(facecolor="#444444", alpha=alpha, label=text) for text, alpha in passes.items()),
            Patch(facecolor=moved, label="thin: among a stage's devices"),
            Patch(visible=False, label="0, 1, ...: microbatches"),
            Patch(facecolor=at_end, label="gradients and parameters, once a step"),
        ],
        title="layers, by how they are sharded",
        title_fontsize="small",
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
        fontsize="small",
    )
    figure.savefig(path, bbox_inches="tight")


def _layers_of(stage: PlannedStage, action: str) -> list[int]:
    """The layers of which an action, "1F0" or "1.14F0", computes something."""
    found = re.match(r"\d+\.(\d+)", action)
    whole = list(range(*stage.layers)) or [stage.layers[0]]
    if found is None:
        return whole
    program, segment = stage.programs[0], int(found[1])
    ends = [*program.segments[1:], len(program.operators)]
    names = {operator.name for operator in program.operators[program.segments[segment] : ends[segment]]}
    own = {operator.layer for operator in stage.operators if operator.name in names and operator.layer is not None}
    return sorted(own) or whole[:1]


def _devices(stage: PlannedStage) -> str:
    shape = " x ".join(map(str, stage.mesh_shape))
    return f"{shape} device{'s' if len(stage.ranks) > 1 else ''}"


def _height(plan: ParallelPlan, stage: PlannedStage) -> float:
    """As a stage has devices."""
    return len(stage.ranks) / plan.devices * len(plan.stages)


def _place(plan: ParallelPlan, stage: PlannedStage) -> float:
    before = 0.0
    for earlier in plan.stages:
        if earlier is stage:
            break
        before += _height(plan, earlier)
    return before + _height(plan, stage) / 2
