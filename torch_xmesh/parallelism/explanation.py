"""How an operator could be sharded otherwise, and what that would cost."""

import dataclasses

from torch_xmesh.parallelism.judge import Judged
from torch_xmesh.parallelism.layers import Layers
from torch_xmesh.parallelism.plan import ParallelPlan
from torch_xmesh.parallelism.plan_text import bytes_text, seconds_text
from torch_xmesh.parallelism.stages import FoundStage

_MOST_LINES = 12


@dataclasses.dataclass(frozen=True)
class Explainer:
    """Knows where a plan comes from; called with the plan and a name."""

    layers: Layers
    judged: Judged

    def __call__(self, plan: ParallelPlan, name: str) -> str:
        number = plan.stage_of(name)
        stage = self.judged.plan.stages[number]
        operators = stage.sharded.operators
        parameters = {one.name for one in plan.stages[number].parameters}
        if name in parameters:
            chosen = [i for i, one in enumerate(operators) if any(value.name == name for value in one.reads)]
        else:
            chosen = [i for i, one in enumerate(operators) if name in (one.name, one.module)]
            chosen = chosen or [i for i, one in enumerate(operators) if f"{one.module}.".startswith(f"{name}.")]
        return "\n".join(self._explained(stage, number, i) for i in chosen if not operators[i].is_constant)

    def _explained(self, stage: FoundStage, number: int, place: int) -> str:
        sharded = stage.sharded
        operator, own = sharded.operators[place], sharded.choices[place]
        choices = stage.space.choices(operator)
        loops = ", ".join(f"{label} {extent}" for label, extent in operator.loops.extents.items()) or "none"
        lines = [
            f"{operator.name} {list(operator.makes[0].shape)} on stage {number}, mesh "
            f"{' x '.join(map(str, stage.space.shape))}; loops: {loops}"
        ]
        rows = []
        for index, choice in enumerate(choices):
            found = sharded.graph.least(only={place: index})
            rows.append((found.cost, found.bytes.total(stage.in_flight), choice))
        rows.sort(key=lambda row: (row[0], row[1], row[2].axes))
        least = rows[0][0]
        for cost, held, choice in rows[:_MOST_LINES]:
            mark = ">" if choice.axes == own.axes else " "
            lines.append(
                f"{mark} {' '.join(choice.axes):20} stage takes {seconds_text(cost):>10} a microbatch "
                f"(+{seconds_text(cost - least)}), holds {bytes_text(held)}"
            )
        if len(rows) > _MOST_LINES:
            lines.append(f"  and {len(rows) - _MOST_LINES} more, up to {seconds_text(rows[-1][0])}")
        return "\n".join(lines)
