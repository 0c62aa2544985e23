"""What any stretch of layers takes and holds, with a sharding of the whole model."""

import itertools

import numpy as np

from torch_xmesh.parallelism.layers import Layers
from torch_xmesh.parallelism.loops import State
from torch_xmesh.parallelism.memory import STATES
from torch_xmesh.parallelism.operators import Value
from torch_xmesh.parallelism.sharded import InParts, Sharded
from torch_xmesh.parallelism.space import Array, Numbers, Space, sums_by
from torch_xmesh.parallelism.stretch import Stretch

Table = tuple[list[float], list[int], list[int]]
"""By first and last layer: seconds of a microbatch, bytes however many are in flight, bytes of each of these."""


class StretchTables:
    """Tables of shardings of one model: who reads what, in which layer, is looked up once.

    Args:
        whole: all operators of the layers' forward.
    """

    def __init__(self, layers: Layers, whole: Stretch) -> None:
        layer_of = layers.layer_of()
        self._count = len(layers)
        self._at: Numbers = np.array([layer_of.get(number, 0) for number in range(len(whole.operators))])
        # Of a constant each stage that reads it makes its own.
        self._varies = np.array([not operator.is_constant for operator in whole.operators])
        self._readers: list[list[int]] = []
        self._first: list[int] = []
        for value, reader, _ in whole.parameters.values():
            self._readers.append(sorted({int(self._at[number]) for number, _ in whole.readers[value]}))
            self._first.append(int(self._at[reader]))

    def of(self, sharded: Sharded) -> Table:
        """With one sharding of all operators."""
        graph, count = sharded.graph, self._count
        costs = np.where(self._varies, graph.operator_costs(sharded.chosen), 0.0)
        seconds = sums_by(self._at, costs, count)
        fixed = np.zeros(count)
        shared: list[tuple[int, int, float]] = []
        for (name, (value, state)), layers, first in zip(
            sharded.parameters.items(), self._readers, self._first, strict=True
        ):
            found = sharded.in_parts.get(name)
            if found is not None:
                seconds[first] += found.cost
            num_bytes = parameter_bytes(graph.space, value, state, found)
            for layer in layers:
                fixed[layer] += num_bytes
            shared += [(before, after, num_bytes) for before, after in itertools.pairwise(layers)]
        operators, num_bytes_of = graph.kept_bytes(sharded.chosen)
        kept = sums_by(self._at[operators], num_bytes_of, count)
        whole = _stretches(fixed)
        for one_layer, other_layer, num_bytes in shared:
            whole[: one_layer + 1, other_layer:] -= num_bytes
        again = np.zeros((count, count))
        for operators, num_bytes_of in sharded.again.values():
            again = np.maximum(again, _stretches(sums_by(self._at[operators], num_bytes_of, count)))
        whole += again
        return (
            _stretches(seconds).ravel().tolist(),
            np.ceil(whole).astype(np.int64).ravel().tolist(),
            np.ceil(_stretches(kept)).astype(np.int64).ravel().tolist(),
        )


def _stretches(of_layer: Array) -> Array:
    """Sums over layers [first, last]."""
    upto = np.concatenate([[0.0], np.cumsum(of_layer)])
    out: Array = np.maximum(upto[None, 1:] - upto[:-1, None], 0.0)
    return out


def parameter_bytes(space: Space, value: Value, state: State, in_parts: InParts | None = None) -> float:
    """Bytes of one parameter on a device, with its gradient and the optimizer's states if it is trained."""
    whole = value.num_bytes / space.num_parts(state)
    if not value.is_trained:
        return whole
    level = 0 if in_parts is None else in_parts.level
    parts = whole if in_parts is None else value.num_bytes / space.num_parts(in_parts.state)
    return (parts if level == 3 else whole) + (parts if level >= 2 else whole) + STATES * parts
