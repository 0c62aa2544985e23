"""The cheapest sharding of operators on one mesh: L. Zheng et al., Alpa (OSDI 2022), section 4, eq. 1.

operators --> choices of each --> StrategyGraph --> least cost --> a choice per operator, and its collectives
                                  nodes: operators (gradients of their parameters), values that several read, outputs
                                  edges: a value on its way, and its gradient back
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence

from torch_xmesh import _C
from torch_xmesh.parallelism.loops import Choice, End, State
from torch_xmesh.parallelism.memory import Bytes, Kept, bytes_of, fixed_bytes, kept_by
from torch_xmesh.parallelism.objective import Seconds
from torch_xmesh.parallelism.operators import Forward, Operator, Value
from torch_xmesh.parallelism.space import Allowed, CollectiveUse, Links, Space

__all__ = ["Allowed", "Links", "Prices", "Sharded", "Stretch", "shard", "shard_stretch"]


@dataclasses.dataclass(frozen=True)
class Prices:
    """What a byte of a device's memory is taken to cost, in the unit of the objective: the more, the less is held.

    Attributes:
        fixed: of parameters and what belongs to them.
        per_microbatch: of what backward needs.
    """

    fixed: float = 0.0
    per_microbatch: float = 0.0


FREE = Prices()


@dataclasses.dataclass(frozen=True)
class Sharded:
    """Operators, each with the choice that was found for it.

    Attributes:
        parameters: how each that they read is kept, by name.
        gradients: how those of trained parameters are made, by name; along axes where they are in summands and the
            parameter is not they are added up, once a step.
        entering: how values that others make are taken from these; their gradients are sent back so too.
        leaving: how values are left for others.
        collectives: that they run.
        spent: what each operator spends, with what brings it its tensors.
        kept: what backward needs.
        bytes: what a device holds.
        cost: the objective's, without prices of memory.
        zero_levels: of parameters that are in parts (see zero.py), by name.
        zero_states: how these parts lie.
    """

    operators: tuple[Operator, ...]
    choices: tuple[Choice, ...]
    parameters: dict[str, tuple[Value, State]]
    gradients: dict[str, State]
    entering: dict[Value, State]
    leaving: dict[Value, State]
    collectives: tuple[CollectiveUse, ...]
    spent: tuple[Seconds, ...]
    kept: tuple[Kept, ...]
    bytes: Bytes
    cost: float
    zero_levels: dict[str, int] = dataclasses.field(default_factory=dict)
    zero_states: dict[str, State] = dataclasses.field(default_factory=dict)

    @property
    def seconds(self) -> Seconds:
        return sum(self.spent, Seconds())


@dataclasses.dataclass(frozen=True)
class Stretch:
    """Operators that run together, in order, with what is around them.

    Attributes:
        entering: values that they read and others make.
        leaving: values that they make and others read, or that are the model's outputs.
        kept: what backward needs.
    """

    operators: tuple[Operator, ...]
    entering: tuple[Value, ...]
    leaving: tuple[Value, ...]
    kept: tuple[Kept, ...]

    @staticmethod
    def of(forward: Forward, numbers: Sequence[int] | None = None) -> "Stretch":
        """Those of the operators with these numbers, ascending; by default all. Of constants each stretch has its
        own: they are no values on the way."""
        chosen = set(range(len(forward.operators)) if numbers is None else numbers)
        operators = tuple(one for number, one in enumerate(forward.operators) if number in chosen)
        makers = {one.makes[0].maker for one in operators}
        constant = {one.makes[0].maker for one in forward.operators if one.is_constant}
        entering = {
            value: None
            for one in operators
            for value in one.reads
            if value.maker is not None and value.maker not in makers and value.maker not in constant
        }
        outside = (one for number, one in enumerate(forward.operators) if number not in chosen)
        wanted = {value for one in outside for value in one.reads} | set(forward.outputs)
        made = (value for one in operators if not one.is_constant for value in one.makes)
        leaving = tuple(value for value in made if value in wanted)
        return Stretch(operators, tuple(entering), leaving, tuple(kept_by(operators)))


def shard(
    forward: Forward,
    axes: Sequence[Links],
    model: str,
    *,
    allowed: Allowed | None = None,
    is_direct: bool = False,
) -> Sharded:
    """The cheapest choices for a model where only collectives cost anything: see Space and shard_stretch."""
    space = Space(axes, model, allowed=allowed, is_direct=is_direct)
    return shard_stretch(Stretch.of(forward), space)


def shard_stretch(
    stretch: Stretch, space: Space, prices: Prices = FREE, *, only: Mapping[int, int] | None = None
) -> Sharded:
    """The cheapest choices for some operators on a mesh; `only`: of those at these places the choices of these numbers.

    Raises:
        ValueError: no choice of an operator is left.
    """
    return _Search(stretch, space, prices, only or {}).run()


@dataclasses.dataclass(frozen=True)
class _Edge:
    """A value between two nodes of the graph; `owner`: the operator whose expense that is."""

    value: Value
    node: int
    made: list[End]
    reader: int
    taken: list[End]
    has_gradient: bool
    owner: int


@dataclasses.dataclass(frozen=True)
class _Hub:
    """A node that is a value, or a parameter, held in one way."""

    node: int
    ends: list[End]
    owner: int


class _Search:
    """One graph; nodes are numbered as the operators, then come values."""

    def __init__(self, stretch: Stretch, space: Space, prices: Prices, only: Mapping[int, int]) -> None:
        self._only = only
        self._stretch, self._space, self._prices = stretch, space, prices
        self._operators = stretch.operators
        self._graph = _C.StrategyGraph()
        self._edges: list[_Edge] = []
        self._choices = [space.choices(operator) for operator in self._operators]
        self._tied: dict[Value, _Hub] = {}
        self._entering: dict[Value, _Hub] = {}
        self._leaving: dict[Value, _Hub] = {}
        self._readers: dict[Value, list[tuple[int, int]]] = {}
        for number, operator in enumerate(self._operators):
            for place, value in enumerate(operator.reads):
                self._readers.setdefault(value, []).append((number, place))
        self._charges = self._charge_kept()

    def run(self) -> Sharded:
        tied = {value for value, places in self._readers.items() if value.is_trained and len(places) > 1}
        summed = [
            [place for place, value in enumerate(one.reads) if value.is_trained and value not in tied]
            for one in self._operators
        ]
        for number, operator in enumerate(self._operators):
            costs = self._node_costs(number, summed[number], tied)
            if number in self._only:
                costs = [cost if i == self._only[number] else math.inf for i, cost in enumerate(costs)]
            self._graph.add_node(operator.name, costs)
        leaving = set(self._stretch.leaving)
        for maker, operator in enumerate(self._operators):
            if not operator.is_constant:
                for number, value in enumerate(operator.makes):
                    self._join(maker, number, self._readers.get(value, []), is_leaving=value in leaving)
        for value in self._stretch.entering:
            self._enter(value, self._readers[value])
        for value in self._readers:  # in the order of their first reader
            if value in tied:
                self._keep(value, self._readers[value])
        chosen, _ = self._graph.least_cost()
        choices = tuple(self._choices[i][chosen[i]] for i in range(len(self._operators)))
        return self._found(choices, chosen, summed)

    # Nodes and edges.

    def _charge_kept(self) -> dict[int, list[tuple[Kept, float]]]:
        """What of backward's tensors each operator pays: where several need one they share its price."""
        out: dict[int, list[tuple[Kept, float]]] = {}
        if self._prices.per_microbatch:
            count = Counter(one.memory for one in self._stretch.kept)
            for one in self._stretch.kept:
                out.setdefault(one.operator, []).append((one, 1 / count[one.memory]))
        return out

    def _node_costs(self, number: int, summed: Sequence[int], tied: set[Value]) -> list[float]:
        operator, choices = self._operators[number], self._choices[number]
        costs = self._space.node_costs(operator, choices, summed)
        kept = self._charges.get(number, ())
        if self._prices.fixed == 0 and not kept:
            return costs
        places = tuple(i for i, value in enumerate(operator.reads) if value.is_parameter and value not in tied)
        held = self._space.held_bytes(operator, choices, places)
        rows = [self._space.part_bytes(one, choices) for one, _ in kept]
        prices = [self._prices.per_microbatch * share for _, share in kept]
        return [
            cost + self._prices.fixed * held[i] + sum(price * row[i] for price, row in zip(prices, rows, strict=True))
            for i, cost in enumerate(costs)
        ]

    def _add_hub(self, name: str, ends: list[End], owner: int) -> _Hub:
        return _Hub(self._graph.add_node(name, [0.0] * len(ends)), ends, owner)

    def _keep(self, value: Value, places: Sequence[tuple[int, int]]) -> None:
        """A parameter that several operators read: it is kept in one way, and its gradients are added up once."""
        ends = self._space.hub(value)
        sums = [self._space.conversions(value).cost(end.gradient, end.value) for end in ends]
        costs = [self._space.cost(Seconds(step_collectives=seconds)) for seconds in sums]
        if self._prices.fixed:
            held = [self._prices.fixed * fixed_bytes(value, end.value, self._space.shape) for end in ends]
            costs = [cost + price for cost, price in zip(costs, held, strict=True)]
        hub = self._tied[value] = _Hub(self._graph.add_node(f"parameter {value.name}", costs), ends, places[0][0])
        for reader, place in places:
            self._edge(value, hub.node, ends, reader, self._taken(reader, place), reader)

    def _enter(self, value: Value, places: Sequence[tuple[int, int]]) -> None:
        """Others make it: it comes as it is wanted, and its gradient goes back added up."""
        hub = self._add_hub(f"entering {value.name}", self._space.hub(value, is_whole=True), places[0][0])
        self._entering[value] = hub
        for reader, place in places:
            self._edge(value, hub.node, hub.ends, reader, self._taken(reader, place), reader)

    def _join(self, maker: int, number: int, places: Sequence[tuple[int, int]], *, is_leaving: bool) -> None:
        """From who makes a value to who reads it; over a node of its own where these are several, and for others."""
        value = self._operators[maker].makes[number]
        node, made = maker, self._space.made_ends(self._choices[maker], number)
        if len(places) > 1 or is_leaving:
            hub = self._add_hub(f"value of {value.name}", self._space.hub(value), maker)
            self._edge(value, node, made, hub.node, hub.ends, maker)
            node, made = hub.node, hub.ends
        for reader, place in places:
            self._edge(value, node, made, reader, self._taken(reader, place), reader)
        if is_leaving:  # others give gradients that are added up
            hub = self._add_hub(f"leaving {value.name}", self._space.hub(value, is_whole=True), maker)
            self._leaving[value] = hub
            self._edge(value, node, made, hub.node, hub.ends, maker)

    def _taken(self, reader: int, place: int) -> list[End]:
        return self._space.taken_ends(self._choices[reader], place)

    def _edge(self, value: Value, node: int, made: list[End], reader: int, taken: list[End], owner: int) -> None:
        gives_gradient = reader >= len(self._operators) or self._operators[reader].requires_grad
        has_gradient = value.requires_grad and gives_gradient
        self._graph.add_edge(node, reader, self._space.table(value, made, taken, has_gradient))
        self._edges.append(_Edge(value, node, made, reader, taken, has_gradient, owner))

    # What was found.

    def _found(self, choices: tuple[Choice, ...], chosen: Sequence[int], summed: Sequence[Sequence[int]]) -> Sharded:
        space = self._space
        collectives: list[CollectiveUse] = []
        spent = [
            space.all_seconds(operator, self._choices[number], summed[number])[chosen[number]]
            for number, operator in enumerate(self._operators)
        ]
        for edge in self._edges:
            left, right = edge.made[chosen[edge.node]], edge.taken[chosen[edge.reader]]
            ways = [space.steps(edge.value, "forward", left.value, right.value)]
            ways.append(space.steps(edge.value, "backward", right.gradient, left.gradient) if edge.has_gradient else [])
            collectives += [use for way in ways for use in way]
            forward, backward = (sum(map(space.collective_seconds, way)) for way in ways)
            spent[edge.owner] += Seconds(forward_collectives=forward, backward_collectives=backward)
        for value, hub in self._tied.items():
            end = hub.ends[chosen[hub.node]]
            sums = space.steps(value, "gradient", end.gradient, end.value)
            collectives += sums
            spent[hub.owner] += Seconds(step_collectives=sum(map(space.collective_seconds, sums)))
        for operator, choice, places in zip(self._operators, choices, summed, strict=True):
            collectives += space.within(operator, choice)
            for place in places:
                end = choice.inputs[place]
                collectives += space.steps(operator.reads[place], "gradient", end.gradient, end.value)
        parameters, gradients = self._parameters(choices, chosen)
        held = bytes_of(self._stretch.kept, choices, list(parameters.values()), space.shape)
        cost = space.cost(sum(spent, Seconds()))
        entering, leaving = (
            {value: hub.ends[chosen[hub.node]].value for value, hub in hubs.items()}
            for hubs in (self._entering, self._leaving)
        )
        return Sharded(
            self._operators,
            choices,
            parameters,
            gradients,
            entering,
            leaving,
            tuple(collectives),
            tuple(spent),
            self._stretch.kept,
            held,
            cost,
        )

    def _parameters(
        self, choices: Sequence[Choice], chosen: Sequence[int]
    ) -> tuple[dict[str, tuple[Value, State]], dict[str, State]]:
        ends = {value: hub.ends[chosen[hub.node]] for value, hub in self._tied.items()}
        for operator, choice in zip(self._operators, choices, strict=True):
            for value, end in zip(operator.reads, choice.inputs, strict=True):
                if value.is_parameter:
                    ends.setdefault(value, end)
        states = {value.name: (value, end.value) for value, end in ends.items()}
        return states, {value.name: end.gradient for value, end in ends.items() if value.is_trained}
