"""How values come from one sharding to another on a mesh."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch_xmesh import _C
from torch_xmesh.parallelism.loops import State
from torch_xmesh.parallelism.operators import Value


@dataclasses.dataclass(frozen=True)
class AxisMove:
    """One move along one mesh axis: how the axis holds the value before and afterwards."""

    axis: int
    before: int
    after: int


class Conversions:
    """How values come from one sharding to another: by the way that the plan has priced, which costs least.

    Args:
        links: links of each mesh axis, as a planned stage has them.
        collectives: the cost model's name.
    """

    def __init__(self, shape: Sequence[int], links: Sequence[tuple[float, ...]], collectives: str) -> None:
        self._axes: list[Any] = [(size, *link) for size, link in zip(shape, links, strict=True)]
        self._collectives = collectives
        self._costs: dict[tuple[Any, ...], _C.ConversionCosts] = {}
        self._steps: dict[tuple[Any, ...], tuple[AxisMove, ...]] = {}

    def steps(self, value: Value, before: State, after: State) -> tuple[AxisMove, ...]:
        """The moves that bring a value from one state to another; none where both are the same."""
        if before == after:
            return ()
        key = (value.shape, value.num_bytes)
        found = self._steps.get((*key, before, after))
        if found is None:
            if key not in self._costs:
                self._costs[key] = _C.ConversionCosts(value.shape, value.num_bytes, self._axes, self._collectives)
            out, state = [], before
            for axis, afterwards, _, _ in self._costs[key].steps(before, after):
                held = tuple(afterwards)
                out.append(AxisMove(axis, state[axis], held[axis]))
                state = held
            found = self._steps[(*key, before, after)] = tuple(out)
        return found
