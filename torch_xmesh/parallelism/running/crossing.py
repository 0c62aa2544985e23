"""Which values go from stage to stage, and which operators are whose."""

import dataclasses

from torch import fx
from torch.utils import _pytree as pytree

from torch_xmesh.parallelism.operators import Recorded, Value
from torch_xmesh.parallelism.plan import ParallelPlan


@dataclasses.dataclass(frozen=True)
class Crossing:
    """How a forward is cut.

    Attributes:
        operators: by stage the numbers of its operators, in order. Constants are in each stage that reads them.
        entering: by stage the values that it is given: of the first the model's arguments, of others what earlier
            stages make and it or later ones need. Each stage hands on what later ones need.
    """

    operators: tuple[tuple[int, ...], ...]
    entering: tuple[tuple[Value, ...], ...]


def crossing_of(recorded: Recorded, plan: ParallelPlan) -> Crossing:
    """Raises ValueError for a plan of another model."""
    named = [{one.name for one in stage.operators} for stage in plan.stages]
    own = [{one.name for one in stage.operators if one.layer is not None} for stage in plan.stages]
    operators = recorded.forward.operators
    missing = [one.name for one in operators if not any(one.name in names for names in named) and not one.is_constant]
    if missing:
        raise ValueError(f"the plan does not know operator {missing[0]}: it is for another model")
    numbers = tuple(tuple(i for i, one in enumerate(operators) if one.name in names) for names in named)
    origin: dict[Value, int] = {}
    for node, value in recorded.given.items():
        if node.op == "placeholder":
            origin[value] = 0
    for stage, names in enumerate(own):
        for one in operators:
            if one.name in names and not one.is_constant:
                origin.update(dict.fromkeys(one.makes, stage))
    last: dict[Value, int] = {}
    for stage, of_stage in enumerate(numbers):
        for number in of_stage:
            for value in recorded.sites[number].sources:
                if value in origin:
                    last[value] = max(stage, last.get(value, 0))
    for leaf in pytree.tree_leaves(recorded.recording.output):
        output = recorded.values.get(leaf) if isinstance(leaf, fx.Node) else None
        if output is not None and output not in origin:
            raise ValueError(f"output {output.name} follows from no argument and no parameter: that cannot be run")
        if output is not None:
            last[output] = len(plan.stages) - 1
    entering = [tuple(value for node, value in recorded.given.items() if node.op == "placeholder")]
    for stage in range(1, len(plan.stages)):
        entering.append(tuple(value for value in origin if origin[value] < stage <= last.get(value, -1)))
    return Crossing(numbers, tuple(entering))
