"""A plan as a picture: devices over the time of a step, each layer colored by how it is sharded."""

from pathlib import Path

from torch_xmesh.palette import colors_of, new_figure
from torch_xmesh.parallelism.judge import edges_between
from torch_xmesh.parallelism.plan import ParallelPlan, PlannedStage
from torch_xmesh.parallelism.plan_text import parallelism_of, seconds_text
from torch_xmesh.pipeline.schedule.schedule import Schedule
from torch_xmesh.pipeline.schedule.simulation import Costs, Simulation, StageCosts, simulate


def simulated(plan: ParallelPlan) -> Simulation:
    """The plan's schedule, played again with what the plan says that stages and values take."""
    moves = [
        (value.from_stage, value.to_stage, (value.forward_seconds, value.backward_seconds), value.has_gradient)
        for value in plan.values
    ]
    stages = [
        StageCosts(
            forward_seconds=stage.seconds.forward + stage.seconds.forward_collectives,
            backward_input_seconds=stage.seconds.backward_input + stage.seconds.backward_collectives,
            backward_weight_seconds=stage.seconds.backward_weight,
        )
        for stage in plan.stages
    ]
    schedule = Schedule.from_csv(plan.schedule_csv, name=plan.schedule)
    return simulate(schedule, Costs(stages=stages, edges=edges_between(len(stages), moves), blocks_receiver=False))


def plot_plan(plan: ParallelPlan, path: Path) -> None:
    """Draws it (format by suffix). Forwards are light, backwards dark; each action is divided among its stage's layers.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = new_figure(12, 1.5 + 0.9 * len(plan.stages))
    from matplotlib.patches import Patch

    kinds = list(dict.fromkeys(parallelism_of(stage, layer) for stage in plan.stages for layer in range(*stage.layers)))
    colors = dict(zip(kinds, colors_of(kinds), strict=True))
    axes = figure.subplots()
    for action in simulated(plan).actions:
        stage, is_forward = plan.stages[action.place], "F" in action.action
        width = (action.end_seconds - action.start_seconds) / max(stage.layers[1] - stage.layers[0], 1)
        order = range(*stage.layers) if is_forward else reversed(range(*stage.layers))
        for number, layer in enumerate(order):
            axes.barh(
                _place(plan, stage),
                width,
                left=action.start_seconds + number * width,
                height=0.8 * _height(plan, stage),
                color=colors[parallelism_of(stage, layer)],
                alpha=0.45 if is_forward else 0.9,
                linewidth=0,
            )
    axes.set_yticks([_place(plan, stage) for stage in plan.stages])
    axes.set_yticklabels(
        [f"stage {i}: {' x '.join(map(str, stage.mesh_shape))}" for i, stage in enumerate(plan.stages)]
    )
    axes.invert_yaxis()
    axes.set_xlim(0, plan.predicted_seconds)
    axes.set_xlabel("seconds")
    axes.set_title(f"{plan.model} on {plan.devices} devices, {plan.schedule}: {seconds_text(plan.step.total)} a step")
    axes.legend(
        handles=[Patch(color=color, label=kind) for kind, color in colors.items()],
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
        fontsize="small",
    )
    figure.savefig(path, bbox_inches="tight")


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
