"""Which values go from stage to stage, and which operators are whose."""

import dataclasses
import weakref
from collections.abc import Sequence

from torch import fx
from torch.utils import _pytree as pytree

from torch_xmesh.parallelism.operators import Recorded, Value
from torch_xmesh.parallelism.plan import ParallelPlan


@dataclasses.dataclass(frozen=True)
class StagePart:
    """What a stage has and is given.

    Attributes:
        operators: their numbers, in order. Constants are in each stage that reads them.
        arguments: the model's arguments that it reads.
        entering: values that it reads and earlier stages make; on the last stage also those that the model returns.
        leaving: what it makes for later stages; on the last stage what the model returns, each once.
    """

    operators: tuple[int, ...]
    arguments: tuple[Value, ...]
    entering: tuple[Value, ...]
    leaving: tuple[Value, ...]


_known: "weakref.WeakKeyDictionary[Recorded, tuple[ParallelPlan, tuple[StagePart, ...]]]" = weakref.WeakKeyDictionary()
"""What was found last for a recording: all of a rank's stages ask for it."""


def stage_parts(recorded: Recorded, plan: ParallelPlan) -> tuple[StagePart, ...]:
    """By stage. Raises ValueError for a plan of another model."""
    known = _known.get(recorded)
    if known is None or known[0] is not plan:
        known = _known[recorded] = plan, _found(recorded, plan)
    return known[1]


def _found(recorded: Recorded, plan: ParallelPlan) -> tuple[StagePart, ...]:
    named = [{operator.name for operator in stage.operators} for stage in plan.stages]
    own = [{operator.name for operator in stage.operators if operator.layer is not None} for stage in plan.stages]
    operators = recorded.forward.operators
    missing = [
        operator.name
        for operator in operators
        if not any(operator.name in names for names in named) and not operator.is_constant
    ]
    if missing:
        raise ValueError(f"the plan does not know operator {missing[0]}: it is for another model")
    numbers = [tuple(i for i, operator in enumerate(operators) if operator.name in names) for names in named]
    arguments = [value for node, value in recorded.given.items() if node.op == "placeholder"]
    maker: dict[Value, int] = {}
    for stage, names in enumerate(own):
        for operator in operators:
            if operator.name in names and not operator.is_constant:
                maker.update(dict.fromkeys(operator.makes, stage))
    outputs = outputs_of(recorded)
    numbers[-1] = tuple(sorted({*numbers[-1], *_constants(recorded, plan, outputs)}))
    numbers = [_with_constants(recorded, of_stage) for of_stage in numbers]
    read = [_read(recorded, of_stage) for of_stage in numbers]
    read[-1].update(dict.fromkeys(outputs))
    out, last = [], len(numbers) - 1
    for stage, of_stage in enumerate(numbers):
        entering = tuple(value for value in maker if value in read[stage] and maker[value] < stage)
        leaving = tuple(
            value
            for value, source in maker.items()
            if source == stage and any(value in later for later in read[stage + 1 :])
        )
        taken = tuple(value for value in arguments if value in read[stage])
        out.append(StagePart(of_stage, taken, entering, outputs if stage == last else leaving))
    return tuple(out)


def _constants(recorded: Recorded, plan: ParallelPlan, outputs: Sequence[Value]) -> set[int]:
    """The operators of outputs that follow from arguments alone: the last stage has them, whole."""
    operators, found = recorded.forward.operators, set[int]()
    held = {parameter.name for parameter in plan.stages[-1].parameters}
    wanted = [(output, output) for output in outputs]  # a parameter alone is one that a device has a part of
    while wanted:
        value, output = wanted.pop()
        if value.is_parameter and (value is output or value.name not in held):
            raise ValueError(f"output {output.name} follows from {value.name} alone: that cannot be run")
        if value.maker is not None and operators[value.maker].is_constant and value.maker not in found:
            found.add(value.maker)
            wanted += [(source, output) for source in recorded.sites[value.maker].sources]
    return found


def _with_constants(recorded: Recorded, numbers: Sequence[int]) -> tuple[int, ...]:
    """With the constants that these operators read and the plan, which is of another mode, does not know."""
    operators, found = recorded.forward.operators, {*numbers}
    rest = [*numbers]
    while rest:
        makers = {value.maker for value in _read(recorded, [rest.pop()]) if value.maker is not None}
        more = [maker for maker in makers if maker not in found and operators[maker].is_constant]
        found.update(more)
        rest += more
    return tuple(sorted(found))


def _read(recorded: Recorded, operators: Sequence[int]) -> dict[Value, None]:
    sites = (recorded.sites[number] for number in operators)
    return {value: None for site in sites for value, is_read in zip(site.sources, site.is_read, strict=True) if is_read}


def outputs_of(recorded: Recorded) -> tuple[Value, ...]:
    """What the model returns, each value once."""
    leaves = pytree.tree_leaves(recorded.recording.output)
    values = (recorded.values.get(leaf) for leaf in leaves if isinstance(leaf, fx.Node))
    return tuple(dict.fromkeys(value for value in values if value is not None))
