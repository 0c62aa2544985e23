"""What a segment fetches in one microbatch (ZeRO-3): each layer's parameters while the layer before is computed."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch_xmesh.parallelism.operators import Value
from torch_xmesh.parallelism.running.fetching import Fetch
from torch_xmesh.parallelism.running.parameters import StageParameters


class SegmentFetches:
    """Layers in the order in which the operators of a segment, or of an activation checkpoint, need them.

    Args:
        layers: by operator the parameters that are whole from there on.
    """

    def __init__(self, own: StageParameters, segment: int, layers: Mapping[int, Sequence[Value]]) -> None:
        self._own, self._segment, self._layers = own, segment, layers
        self._left: list[int] = []
        self._next: Fetch | None = None  # on its way
        self._last: Fetch | None = None  # made
        self._known: dict[Value, tuple[Fetch, int]] = {}

    def expect(self, numbers: Sequence[int]) -> None:
        """These operators are run next, one after the other."""
        self._left = [number for number in reversed(numbers) if number in self._layers] if self._layers else []
        self._last = None

    def before(self, number: int, parts: dict[Value, Any]) -> None:
        """An operator is run next: what is fetched before it is put into `parts`, and what comes behind that leaves."""
        if not self._left or self._left[-1] != number:
            return
        values = self._layers[self._left.pop()]
        fetch = self._next or self._of(values)
        parts.update(zip(values, fetch.whole(), strict=True))
        self._known.update((value, (fetch, place)) for place, value in enumerate(values))
        self._next = None
        if self._left:
            self._next = self._of(self._layers[self._left[-1]])
            self._next.start()

    def of(self, value: Value) -> tuple[Fetch, int]:
        """What has fetched a parameter, and its number there."""
        return self._known[value]

    def _of(self, values: Sequence[Value]) -> Fetch:
        self._last = self._own.fetch_of(values, self._segment, self._last)
        return self._last
