"""The cheapest sharding of a model's operators on one mesh: L. Zheng et al., Alpa (OSDI 2022), section 4, eq. 1.

operators --> choices of each --> StrategyGraph --> least cost --> a choice per operator, and its collectives
                                  nodes: operators (gradients of their parameters), values that several read, outputs
                                  edges: a value on its way, and its gradient back
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

from torch_xmesh import _C
from torch_xmesh.parallelism.loops import PARTIAL, REPLICATED, Choice, End, State, choices_of, num_parts, whole_choice
from torch_xmesh.parallelism.operators import Forward, Operator, Value

Links = tuple[int, float, float]
"""Of a mesh axis: its size, the latency of a message, what a byte takes."""
Allowed = Callable[[Operator, Choice], bool]


@dataclasses.dataclass(frozen=True)
class CollectiveUse:
    """A collective that a plan runs.

    Attributes:
        value: what it moves.
        why: "forward", "backward", or "gradient", of a parameter, once a step.
        axis: of the mesh.
        num_bytes: see the C++ CollectiveCostModel.
    """

    value: str
    why: str
    collective: str
    axis: int
    num_bytes: float


@dataclasses.dataclass(frozen=True)
class Sharded:
    """A model's operators, each with the choice that was found for it.

    Attributes:
        parameters: how each of those that are trained is kept, by name.
        cost: of all collectives together, in the unit of the links.
    """

    operators: tuple[Operator, ...]
    choices: tuple[Choice, ...]
    parameters: dict[str, tuple[Value, State]]
    collectives: tuple[CollectiveUse, ...]
    cost: float


def shard(
    forward: Forward,
    axes: Sequence[Links],
    model: str,
    *,
    allowed: Allowed = lambda operator, choice: True,
    is_direct: bool = False,
) -> Sharded:
    """The cheapest choices.

    Args:
        forward: the model's operators.
        axes: of the mesh, one or two.
        model: of what collectives cost.
        allowed: leaves choices of operators out.
        is_direct: values are brought from one sharding to another axis by axis, as in Alpa, not over a third one.

    Raises:
        ValueError: no choice of an operator is left, or an unknown model.
    """
    return _Search(forward, axes, model, allowed, is_direct).run()


@dataclasses.dataclass(frozen=True)
class _Edge:
    """A value between two nodes of the graph."""

    value: Value
    node: int
    made: list[End]
    reader: int
    taken: list[End]
    has_gradient: bool


class _Search:
    def __init__(self, forward: Forward, axes: Sequence[Links], model: str, allowed: Allowed, is_direct: bool) -> None:
        self._forward, self._axes, self._model, self._is_direct = forward, list(axes), model, is_direct
        self._operators = forward.operators
        self._shape = [size for size, _, _ in axes]
        self._costs: dict[tuple[tuple[int, ...], int], _C.ConversionCosts] = {}
        self._tables: dict[object, _C.CostTable] = {}
        self._graph = _C.StrategyGraph()
        self._edges: list[_Edge] = []
        self._choices: list[list[Choice]] = []
        self._kept: dict[Value, tuple[int, list[End]]] = {}
        self._allowed = allowed

    def run(self) -> Sharded:
        readers: dict[Value, list[tuple[int, int]]] = {}
        for number, operator in enumerate(self._operators):
            for place, value in enumerate(operator.reads):
                readers.setdefault(value, []).append((number, place))
        tied = {value for value, places in readers.items() if value.is_trained and len(places) > 1}
        for operator in self._operators:
            found = self._choices_of(operator)
            if not found:
                raise ValueError(f"no sharding of {operator.name} is left")
            self._choices.append(found)
            self._graph.add_node(operator.name, [self._own_cost(operator, choice, tied) for choice in found])
        outputs = set(self._forward.outputs)
        for maker, operator in enumerate(self._operators):
            for number, value in enumerate(operator.makes):
                if not operator.is_constant:
                    self._join(maker, number, readers.get(value, []), is_output=value in outputs)
        for value in readers:  # in the order of their first reader
            if value in tied:
                self._keep(value, readers[value])
        chosen, cost = self._graph.least_cost()
        choices = tuple(self._choices[i][chosen[i]] for i in range(len(self._operators)))
        collectives = tuple(self._uses(choices, chosen))
        return Sharded(self._operators, choices, self._parameters(choices, chosen), collectives, cost)

    def _keep(self, value: Value, places: Sequence[tuple[int, int]]) -> None:
        """A parameter that several operators read: it is kept in one way, and its gradients are added up once."""
        hub = self._hub(value)
        number = self._graph.add_node(
            f"parameter {value.name}", [self._conversions(value).cost(end.gradient, end.value) for end in hub]
        )
        self._kept[value] = number, hub
        for reader, place in places:
            self._edge(value, number, hub, reader, [choice.inputs[place] for choice in self._choices[reader]])

    def _choices_of(self, operator: Operator) -> list[Choice]:
        if operator.is_constant:
            return [whole_choice(operator.loops, len(self._shape))]
        return [choice for choice in choices_of(operator.loops, self._shape) if self._allowed(operator, choice)]

    def _join(self, maker: int, number: int, places: Sequence[tuple[int, int]], is_output: bool) -> None:
        """From who makes a value to who reads it; over a node of its own where these are several, and for the loss."""
        value = self._operators[maker].makes[number]
        node, made = maker, [choice.outputs[number] for choice in self._choices[maker]]
        if len(places) > 1 or is_output:
            hub = self._hub(value)
            number = self._graph.add_node(f"value of {value.name}", [0.0] * len(hub))
            self._edge(value, node, made, number, hub)
            node, made = number, hub
        for reader, place in places:
            self._edge(value, node, made, reader, [choice.inputs[place] for choice in self._choices[reader]])
        if is_output:
            self._add_output(value, node, made)

    def _add_output(self, value: Value, node: int, made: list[End]) -> None:
        """The loss takes whole elements, and gives gradients where they are."""
        taken = [end for end in self._hub(value) if PARTIAL not in end.gradient]
        number = self._graph.add_node(f"output {value.name}", [0.0] * len(taken))
        self._edge(value, node, made, number, taken)

    def _hub(self, value: Value) -> list[End]:
        """How a value that several read may be held: whole, with its gradient whole or in summands; or sharded."""
        summands = [(REPLICATED, PARTIAL)] if value.requires_grad else []
        per_axis = [(REPLICATED, REPLICATED), *summands, *((dim, dim) for dim in range(len(value.shape)))]
        ends = (
            End(tuple(held for held, _ in pairs), tuple(gradient for _, gradient in pairs))
            for pairs in itertools.product(per_axis, repeat=len(self._shape))
        )
        return [end for end in ends if self._divides(value, end.value)]

    def _divides(self, value: Value, state: State) -> bool:
        parts: dict[int, int] = {}
        for held, size in zip(state, self._shape, strict=True):
            if held >= 0:
                parts[held] = parts.get(held, 1) * size
        return all(value.shape[dim] % count == 0 for dim, count in parts.items())

    def _edge(self, value: Value, node: int, made: list[End], reader: int, taken: list[End]) -> None:
        gives_gradient = reader >= len(self._operators) or self._operators[reader].requires_grad
        has_gradient = value.requires_grad and gives_gradient
        key = (value.shape, value.num_bytes, has_gradient, tuple(made), tuple(taken))
        if key not in self._tables:
            self._tables[key] = _C.conversion_table(
                self._conversions(value),
                [(end.value, end.gradient) for end in made],
                [(end.value, end.gradient) for end in taken],
                has_gradient,
            )
        self._graph.add_edge(node, reader, self._tables[key])
        self._edges.append(_Edge(value, node, made, reader, taken, has_gradient))

    def _conversions(self, value: Value) -> _C.ConversionCosts:
        key = (value.shape, value.num_bytes)
        if key not in self._costs:
            self._costs[key] = _C.ConversionCosts(*key, self._axes, self._model, self._is_direct)
        return self._costs[key]

    def _own_cost(self, operator: Operator, choice: Choice, tied: set[Value]) -> float:
        """Of its own collectives, and of adding up the gradients of its parameters, which lie as the parameters do
        then."""
        within = sum(
            _C.collective_cost(self._model, use.collective, use.num_bytes, self._axes[use.axis])
            for use in self._within(operator, choice)
        )
        return within + sum(
            self._conversions(value).cost(end.gradient, end.value)
            for value, end in zip(operator.reads, choice.inputs, strict=True)
            if value.is_trained and value not in tied
        )

    def _within(self, operator: Operator, choice: Choice) -> list[CollectiveUse]:
        """The collectives that an operator runs by itself."""
        out: list[CollectiveUse] = []
        name = operator.makes[0].name
        for axis, label in enumerate(choice.axes):
            for own in operator.loops.within:
                if own.label != label:
                    continue
                others = zip(choice.axes, self._shape, strict=True)
                cuts = math.prod(
                    size for place, (other, size) in enumerate(others) if place != axis and other in own.cut_by
                )
                once = CollectiveUse(name, "forward", own.collective, axis, own.num_bytes / cuts)
                out += [once] * own.num_forward
                if operator.requires_grad:
                    out += [dataclasses.replace(once, why="backward")] * own.num_backward
        return out

    def _uses(self, choices: Sequence[Choice], chosen: Sequence[int]) -> list[CollectiveUse]:
        out: list[CollectiveUse] = []

        def add(value: Value, why: str, before: State, after: State) -> None:
            for axis, _, collective, num_bytes in self._conversions(value).steps(before, after):
                if collective is not None and self._shape[axis] > 1:
                    out.append(CollectiveUse(value.name, why, collective, axis, num_bytes))

        for edge in self._edges:
            left, right = edge.made[chosen[edge.node]], edge.taken[chosen[edge.reader]]
            add(edge.value, "forward", left.value, right.value)
            if edge.has_gradient:
                add(edge.value, "backward", right.gradient, left.gradient)
        for value, (number, hub) in self._kept.items():
            add(value, "gradient", hub[chosen[number]].gradient, hub[chosen[number]].value)
        for operator, choice in zip(self._operators, choices, strict=True):
            out += self._within(operator, choice)
            for value, end in zip(operator.reads, choice.inputs, strict=True):
                if value.is_trained and value not in self._kept:
                    add(value, "gradient", end.gradient, end.value)
        return out

    def _parameters(self, choices: Sequence[Choice], chosen: Sequence[int]) -> dict[str, tuple[Value, State]]:
        out = {value.name: (value, hub[chosen[number]].value) for value, (number, hub) in self._kept.items()}
        for operator, choice in zip(self._operators, choices, strict=True):
            for value, end in zip(operator.reads, choice.inputs, strict=True):
                if value.is_trained:
                    out.setdefault(value.name, (value, end.value))
        return out


def bytes_of_parameters(sharded: Sharded, mesh_shape: Sequence[int]) -> float:
    """What each device of the mesh holds of them; of an empty mesh shape, what there is."""
    return sum(
        value.num_bytes / (num_parts(state, mesh_shape) if mesh_shape else 1)
        for value, state in sharded.parameters.values()
    )
