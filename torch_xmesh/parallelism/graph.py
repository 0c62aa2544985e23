"""The sharding choices of operators on one mesh as a graph, whose least cost is found exactly: L. Zheng et al., Alpa
(OSDI 2022), section 4, eq. 1.

operators --> choices of each --> StrategyGraph --> least cost --> a choice per node
                                  nodes: operators (gradients of their parameters), values that several read, outputs
                                  edges: a value on its way, and its gradient back
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from torch_xmesh import _C
from torch_xmesh.parallelism.loops import REPLICATED, Choice, End, State
from torch_xmesh.parallelism.memory import STATES, Bytes, Kept, fixed_bytes
from torch_xmesh.parallelism.objective import Seconds
from torch_xmesh.parallelism.operators import Value
from torch_xmesh.parallelism.sharded import Sharded
from torch_xmesh.parallelism.space import Array, CollectiveUse, Numbers, Space, sums_by
from torch_xmesh.parallelism.stretch import Stretch
from torch_xmesh.parallelism.zero import in_parts_of, level_of, with_zero


@dataclasses.dataclass(frozen=True)
class Prices:
    """What a byte of a device's memory is taken to cost, in the unit of the objective: the more, the less is held.

    Attributes:
        fixed: price of a byte of parameters, their gradients and optimizer states.
        per_microbatch: price of a byte that backward needs of one microbatch.
    """

    fixed: float = 0.0
    per_microbatch: float = 0.0


FREE = Prices()


@dataclasses.dataclass(frozen=True)
class _Edge:
    """A value between two nodes of the graph; `owner`: the operator whose expense that is. `is_again`: backward brings
    it once more."""

    value: Value
    node: int
    made: list[End]
    reader: int
    taken: list[End]
    has_gradient: bool
    owner: int
    is_again: bool


@dataclasses.dataclass(frozen=True)
class _Hub:
    """A node that is a value, or a parameter, held in one way."""

    node: int
    ends: list[End]
    owner: int


class ShardingGraph:
    """Made once for some operators on a mesh, and asked at any prices. Nodes are numbered as the operators, then come
    values; choices of all nodes are numbered on end, in arrays.

    Args:
        zero: the level at which parameters are in parts (see zero.py); 0: they are whole.

    Raises:
        ValueError: no choice of an operator is left.
    """

    def __init__(self, stretch: Stretch, space: Space, zero: int = 0) -> None:
        self.stretch, self.space, self.zero = stretch, space, zero
        self._choices = [space.choices(operator) for operator in stretch.operators]
        self._graph = _C.StrategyGraph()
        self._edges: list[_Edge] = []
        self._tied: dict[Value, _Hub] = {}
        self._read: dict[Value, _Hub] = {}
        self._entering: dict[Value, _Hub] = {}
        self._leaving: dict[Value, _Hub] = {}
        self._costs: list[Array] = []
        self._fixed: list[Array] = []
        self._per_microbatch: list[Array] = []
        self._build()
        self._sizes = [len(costs) for costs in self._costs]
        self._begins: Numbers = np.cumsum([0, *self._sizes[:-1]])
        self._all_costs = np.concatenate(self._costs)
        self._all_fixed, self._all_per_microbatch = np.concatenate(self._fixed), np.concatenate(self._per_microbatch)
        self._owners: Numbers = np.array(
            [*range(len(self._choices)), *(edge.owner for edge in self._edges), *(h.owner for h in self._tied.values())]
        )
        self._tied_nodes: Numbers = np.array([hub.node for hub in self._tied.values()], np.int64)
        self._zero_costs, self._zero_fixed = self._all_costs, self._all_fixed
        if zero:
            self._zero_costs, self._zero_fixed = self._with_zero()
        self._kept = _KeptArrays(stretch.kept, space, self._choices)
        self._again = _KeptArrays(stretch.again, space, self._choices)

    def least(self, prices: Prices = FREE, allowed: Numbers | None = None) -> Sharded:
        """The cheapest choices; of a graph in which many nodes have many neighbors, choices that none of these nodes
        can better by itself. `allowed`: of all nodes' choices those that are not 0.

        Raises:
            ValueError: nothing can be chosen.
        """
        costs = self._zero_costs
        if prices != FREE:
            costs = costs + prices.fixed * self._zero_fixed + prices.per_microbatch * self._all_per_microbatch
        if allowed is not None:
            costs = np.where(allowed != 0, costs, math.inf)
        self._graph.set_costs(costs)
        chosen, _, is_exact = self._graph.least_cost()
        cost = math.fsum(self.operator_costs(chosen))
        found = Sharded(self, tuple(chosen), self._held(chosen), cost, is_exact=is_exact)
        found = dataclasses.replace(found, bytes=dataclasses.replace(found.bytes, again=found.again_bytes))
        return with_zero(found, self.zero) if self.zero else found

    def everything(self) -> Numbers:
        """All choices of all nodes are allowed."""
        return np.ones(len(self._all_costs), np.int64)

    def narrowed(self, allowed: Numbers, node: int, choice: int, *, is_taken: bool) -> Numbers:
        """Where a node takes this choice, or does not."""
        out: Numbers = allowed.copy()
        at = int(self._begins[node])
        if is_taken:
            out[at : at + self._sizes[node]] = 0
        out[at + choice] = int(is_taken)
        return out

    def charged(self, chosen: Sequence[int], in_flight: int) -> Array:
        """By node the bytes that it is charged for, of so many microbatches; together at most what a device holds."""
        at = self._begins + np.asarray(chosen)
        out: Array = self._zero_fixed[at] + in_flight * self._all_per_microbatch[at]
        return out

    # Nodes and edges.

    def _build(self) -> None:
        stretch, space = self.stretch, self.space
        charges, charges_again = self._charges(stretch.kept), self._charges(stretch.again)
        num_again = len({stretch.operators[number].checkpoint for number in charges_again})
        for number, operator in enumerate(stretch.operators):
            choices, summed = self._choices[number], stretch.summed[number]
            held = tuple(
                i for i, value in enumerate(operator.reads) if value.is_parameter and value not in stretch.tied
            )
            kept = space.nothing(len(choices))
            for needed, share in charges.get(number, ()):
                kept = kept + share * space.part_bytes(needed, choices)
            fixed = space.held_bytes(operator, choices, held)
            for needed, share in charges_again.get(number, ()):  # their mean is at most the largest
                fixed = fixed + share / num_again * space.part_bytes(needed, choices)
            self._add_node(operator.name, space.node_costs(operator, choices, summed), fixed, kept)
        leaving = set(stretch.leaving)
        for maker, operator in enumerate(stretch.operators):
            if not operator.is_constant:
                for number, value in enumerate(operator.makes):
                    self._join(maker, number, stretch.readers.get(value, []), is_leaving=value in leaving)
        for value in stretch.entering:
            self._enter(value, stretch.readers[value])
        for value in stretch.readers:  # in the order of their first reader
            if value in stretch.tied:
                self._keep(value, stretch.readers[value])

    def _charges(self, kept: Sequence[Kept]) -> dict[int, list[tuple[Kept, float]]]:
        """What of backward's tensors each operator pays: where several need one they share its price."""
        out: dict[int, list[tuple[Kept, float]]] = {}
        count = Counter(needed.memory for needed in kept)
        for needed in kept:
            out.setdefault(needed.operator, []).append((needed, 1 / count[needed.memory]))
        return out

    def _add_node(self, name: str, costs: Array, fixed: Array, per_microbatch: Array) -> int:
        self._costs.append(costs)
        self._fixed.append(fixed)
        self._per_microbatch.append(per_microbatch)
        return self._graph.add_node(name, costs.tolist())

    def _add_hub(self, name: str, ends: list[End], owner: int) -> _Hub:
        nothing = self.space.nothing(len(ends))
        return _Hub(self._add_node(name, nothing, nothing, nothing), ends, owner)

    def _keep(self, value: Value, places: Sequence[tuple[int, int]]) -> None:
        """A parameter that several operators read: it is kept in one way, and its gradients, if it is trained, are
        added up once."""
        ends = self.space.hub(value)
        sums = [sum(map(self.space.shared_seconds, self._sums(value, end))) for end in ends]
        costs = np.array([self.space.cost(Seconds(step_collectives=seconds)) for seconds in sums])
        held = np.array([fixed_bytes(value, end.value, self.space.shape) for end in ends])
        node = self._add_node(f"parameter {value.name}", costs, held, self.space.nothing(len(ends)))
        hub = self._tied[value] = _Hub(node, ends, places[0][0])
        for reader, place in places:
            self._edge(value, hub.node, ends, reader, self._taken(reader, place), reader)

    def _enter(self, value: Value, places: Sequence[tuple[int, int]]) -> None:
        """Others make it: it comes as it is wanted, and its gradient goes back added up."""
        hub = self._add_hub(f"entering {value.name}", self.space.hub(value, is_whole=True), places[0][0])
        self._entering[value] = hub
        for reader, place in places:
            self._edge(value, hub.node, hub.ends, reader, self._taken(reader, place), reader)

    def _join(self, maker: int, number: int, places: Sequence[tuple[int, int]], *, is_leaving: bool) -> None:
        """From who makes a value to who reads it; over a node of its own where these are several, and for others."""
        value = self.stretch.operators[maker].makes[number]
        node, made = maker, self.space.made_ends(self._choices[maker], number)
        if len(places) > 1 or is_leaving:
            hub = self._read[value] = self._add_hub(f"value of {value.name}", self.space.hub(value), maker)
            self._edge(value, node, made, hub.node, hub.ends, maker)
            node, made = hub.node, hub.ends
        for reader, place in places:
            self._edge(value, node, made, reader, self._taken(reader, place), reader)
        if is_leaving:  # others give gradients that are added up
            ends = self.space.hub(value, is_whole=True)
            if value in self.stretch.by_samples:
                most = 0 if self.stretch.by_samples[value] else REPLICATED
                ends = [end for end in ends if max(end.value) <= most]
            hub = self._add_hub(f"leaving {value.name}", ends, maker)
            self._leaving[value] = hub
            self._edge(value, node, made, hub.node, hub.ends, maker, is_outside=True)

    def _taken(self, reader: int, place: int) -> list[End]:
        return self.space.taken_ends(self._choices[reader], place)

    def _edge(
        self,
        value: Value,
        node: int,
        made: list[End],
        reader: int,
        taken: list[End],
        owner: int,
        *,
        is_outside: bool = False,
    ) -> None:
        """`is_outside`: it is brought there behind all checkpoints."""
        operators = self.stretch.operators
        gives_gradient = reader >= len(operators) or operators[reader].requires_grad
        has_gradient = value.requires_grad and gives_gradient
        is_again = operators[owner].is_given_again if reader == owner else operators[owner].is_computed_again
        is_again = is_again and not is_outside
        self._graph.add_edge(node, reader, self.space.table(value, made, taken, has_gradient, 1 + is_again))
        self._edges.append(_Edge(value, node, made, reader, taken, has_gradient, owner, is_again))

    def _with_zero(self) -> tuple[Array, Array]:
        """Costs and bytes of parameters in parts."""
        costs, fixed = self._all_costs.copy(), self._all_fixed.copy()

        def add(value: Value, node: int, ends: Sequence[End]) -> None:
            level = level_of(self.zero, value, self.stretch)
            is_read_back = value in self.stretch.read_back
            for number, end in enumerate(ends):
                found = in_parts_of(self.space, value, end.value, end.gradient, level, is_read_back)
                if found is not None:
                    costs[self._begins[node] + number] += found.cost
                    fixed[self._begins[node] + number] += found.bytes.fixed

        for number, operator in enumerate(self.stretch.operators):
            for place in self.stretch.summed[number]:
                add(operator.reads[place], number, self._taken(number, place))
        for value, hub in self._tied.items():
            if value.is_trained:
                add(value, hub.node, hub.ends)
        return costs, fixed

    # What follows from choices.

    def operator_costs(self, chosen: Sequence[int]) -> Array:
        """By operator, with what brings it its tensors."""
        at = self._begins + np.asarray(chosen)
        nodes = self._all_costs[at]
        parts = (nodes[: len(self._choices)], self._graph.edge_costs(chosen), nodes[self._tied_nodes])
        return sums_by(self._owners, np.concatenate(parts), len(self._choices))

    def kept_bytes(self, chosen: Sequence[int]) -> tuple[Numbers, Array]:
        """What a device keeps for backward: tensors' first operators, and bytes."""
        return self._kept.held(chosen)

    def again_bytes(self, chosen: Sequence[int]) -> dict[int, tuple[Numbers, Array]]:
        """By checkpoint what a device holds while backward computes it anew: tensors' first operators, and bytes."""
        operators, num_bytes = self._again.held(chosen)
        checkpoints = np.array([self.stretch.operators[number].checkpoint for number in operators], np.int64)
        return {
            int(checkpoint): (operators[checkpoints == checkpoint], num_bytes[checkpoints == checkpoint])
            for checkpoint in np.unique(checkpoints)
        }

    def choices_of(self, chosen: Sequence[int]) -> tuple[Choice, ...]:
        return tuple(choices[chosen[number]] for number, choices in enumerate(self._choices))

    def parameter_ends(self, chosen: Sequence[int]) -> dict[str, tuple[Value, End]]:
        """How each parameter is kept, by name."""
        out = {}
        for name, (value, reader, place) in self.stretch.parameters.items():
            hub = self._tied.get(value) if value in self.stretch.tied else None
            if hub is not None:
                out[name] = value, hub.ends[chosen[hub.node]]
            else:
                out[name] = value, self._choices[reader][chosen[reader]].inputs[place]
        return out

    def entering(self, chosen: Sequence[int]) -> dict[Value, State]:
        return {value: hub.ends[chosen[hub.node]].value for value, hub in self._entering.items()}

    def held(self, chosen: Sequence[int]) -> tuple[tuple[str, Value, End], ...]:
        """Values that have a node of their own: why, and how they are held."""
        kinds = (
            ("readers", self._read),
            ("entering", self._entering),
            ("leaving", self._leaving),
            ("parameter", self._tied),
        )
        return tuple((why, value, hub.ends[chosen[hub.node]]) for why, hubs in kinds for value, hub in hubs.items())

    def leaving(self, chosen: Sequence[int]) -> dict[Value, State]:
        return {value: hub.ends[chosen[hub.node]].value for value, hub in self._leaving.items()}

    def _held(self, chosen: Sequence[int]) -> Bytes:
        trained = whole = 0.0
        for value, end in self.parameter_ends(chosen).values():
            num_bytes = value.num_bytes / self.space.num_parts(end.value)
            if value.is_trained:
                trained += num_bytes
            else:
                whole += num_bytes
        kept = math.fsum(self._kept.held(chosen)[1])
        return Bytes(trained + whole, trained, STATES * trained, kept)

    def spent(self, chosen: Sequence[int]) -> list[Seconds]:
        """By operator, as its costs."""
        space = self.space
        out = [
            space.all_seconds(operator, self._choices[number], self.stretch.summed[number])[chosen[number]]
            for number, operator in enumerate(self.stretch.operators)
        ]
        for edge in self._edges:
            forward, backward = (sum(map(space.collective_seconds, way)) for way in self._ways(edge, chosen))
            if forward or backward:
                out[edge.owner] += Seconds(forward_collectives=forward, backward_collectives=backward)
        for value, hub in self._tied.items():
            sums = self._sums(value, hub.ends[chosen[hub.node]])
            out[hub.owner] += Seconds(step_collectives=sum(map(space.shared_seconds, sums)))
        return out

    def collectives(self, chosen: Sequence[int]) -> list[CollectiveUse]:
        space = self.space
        out = [use for edge in self._edges for way in self._ways(edge, chosen) for use in way]
        for value, hub in self._tied.items():
            out += self._sums(value, hub.ends[chosen[hub.node]])
        choices = self.choices_of(chosen)
        for operator, choice, places in zip(self.stretch.operators, choices, self.stretch.summed, strict=True):
            out += space.within(operator, choice)
            for place in places:
                end = choice.inputs[place]
                out += space.steps(operator.reads[place], "gradient", end.gradient, end.value)
        return out

    def _sums(self, value: Value, end: End) -> list[CollectiveUse]:
        """The collectives that sum a parameter's gradient, where the parameter is held as `end` says; none if it is not
        trained."""
        return self.space.steps(value, "gradient", end.gradient, end.value) if value.is_trained else []

    def _ways(self, edge: _Edge, chosen: Sequence[int]) -> tuple[list[CollectiveUse], list[CollectiveUse]]:
        """Forward and backward."""
        left, right = edge.made[chosen[edge.node]], edge.taken[chosen[edge.reader]]
        steps = self.space.steps
        backward = steps(edge.value, "backward", right.gradient, left.gradient) if edge.has_gradient else []
        if edge.is_again:
            backward = steps(edge.value, "backward", left.value, right.value) + backward
        return steps(edge.value, "forward", left.value, right.value), backward


class _KeptArrays:
    """What backward needs as arrays: a tensor that is held in several ways is held several times."""

    def __init__(self, kept: Sequence[Kept], space: Space, choices: Sequence[list[Choice]]) -> None:
        numbers: dict[Value, int] = {}
        self._operators: Numbers = np.array([needed.operator for needed in kept], np.int64)
        self._memories: Numbers = np.array(
            [numbers.setdefault(needed.memory, len(numbers)) for needed in kept], np.int64
        )
        states = [space.part_states(needed, choices[needed.operator]) for needed in kept]
        num_bytes = [space.part_bytes(needed, choices[needed.operator]) for needed in kept]
        self._begins: Numbers = np.cumsum([0, *(len(by_choice) for by_choice in states)], dtype=np.int64)[:-1]
        self._states: Numbers = np.concatenate([np.zeros(0, np.int64), *states])
        self._bytes = np.concatenate([np.zeros(0), *num_bytes])

    def held(self, chosen: Sequence[int]) -> tuple[Numbers, Array]:
        """Who needs each first, and its bytes on a device."""
        at = self._begins + np.asarray(chosen, np.int64)[self._operators]
        states = self._states[at]
        keys = self._memories * (int(states.max(initial=0)) + 1) + states
        _, first = np.unique(keys, return_index=True)
        return self._operators[first], self._bytes[at[first]]
