"""How an operator could be sharded otherwise, and what that would cost."""

import dataclasses

from torch_xmesh.parallelism.judge import Judged
from torch_xmesh.parallelism.layers import Layers
from torch_xmesh.parallelism.limit import within_limit
from torch_xmesh.parallelism.plan import ParallelPlan
from torch_xmesh.parallelism.plan_text import bytes_text, seconds_text
from torch_xmesh.parallelism.sharded import Sharded
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
        parameters = {parameter.name for parameter in plan.stages[number].parameters}
        if name in parameters:
            chosen = [i for i, operator in enumerate(operators) if any(value.name == name for value in operator.reads)]
        else:
            chosen = [i for i, operator in enumerate(operators) if name in (operator.name, operator.module)]
            chosen = chosen or [
                i for i, operator in enumerate(operators) if f"{operator.module}.".startswith(f"{name}.")
            ]
        return "\n".join(self._explained(plan, number, i) for i in chosen if not operators[i].is_constant)

    def _explained(self, plan: ParallelPlan, number: int, place: int) -> str:
        stage = self.judged.plan.stages[number]
        sharded = stage.sharded
        operator = sharded.operators[place]
        loops = ", ".join(f"{label} {extent}" for label, extent in operator.loops.extents.items()) or "none"
        lines = [
            f"{operator.name} {list(operator.makes[0].shape)} on stage {number}, mesh "
            f"{' x '.join(map(str, stage.space.shape))}; loops: {loops}"
        ]
        in_flight = plan.stages[number].in_flight
        rows = []
        for index, choice in enumerate(stage.space.choices(operator)):
            is_own = index == sharded.chosen[place]
            found = sharded if is_own else _with_choice(stage, place, index)
            if found is not None:
                rows.append((not is_own, found.cost, found.bytes.total(in_flight), choice))
        rows.sort(key=lambda row: (*row[:3], row[3].axes))
        own_cost = rows[0][1]
        for is_other, cost, held, choice in rows[:_MOST_LINES]:
            lines.append(
                f"{' ' if is_other else '>'} {' '.join(choice.axes):20} stage takes {seconds_text(cost):>10} a "
                f"microbatch (+{seconds_text(max(cost - own_cost, 0.0))}), holds {bytes_text(held)}"
            )
        if len(rows) > _MOST_LINES:
            lines.append(f"  and {len(rows) - _MOST_LINES} more, up to {seconds_text(rows[-1][1])}")
        return "\n".join(lines)


def _with_choice(stage: FoundStage, place: int, choice: int) -> Sharded | None:
    """The stage's cheapest sharding with this choice of the operator at this place; None where none fits."""
    graph = stage.sharded.graph
    allowed = graph.narrowed(graph.everything(), place, choice, is_taken=True)
    found = within_limit([graph], stage.in_flight, stage.shape.memory_bytes, allowed=allowed)
    return None if found is None else found.sharded
