"""What a segment fetches in one microbatch (ZeRO-3): each layer's parameters while the layer before is computed."""

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from torch_xmesh.parallelism.operators import Value
from torch_xmesh.parallelism.running.fetching import Fetch
from torch_xmesh.parallelism.running.parameters import StageParameters


class SegmentFetches:
    """Layers in the order in which the operators of a segment, or of an activation checkpoint, need them.

    Args:
        numbers: the operators, in order.
        layers: by operator the parameters that are whole from there on.
        again: operators that backward runs again, which then fetch by themselves.
    """

    def __init__(
        self,
        own: StageParameters,
        segment: int,
        numbers: Iterable[int],
        layers: Mapping[int, Sequence[Value]],
        again: Container[int],
    ) -> None:
        self._own, self._segment, self._layers, self._again = own, segment, layers, again
        self._left = [number for number in numbers if number in layers][::-1] if layers else []
        self._next: Fetch | None = None  # on its way
        self._last: Fetch | None = None  # made, of those whose parameters backward fetches by it
        self._known: dict[Value, tuple[Fetch, int]] = {}

    def before(self, number: int, parts: dict[Value, Any]) -> None:
        """An operator is run next: what is fetched before it is put into `parts`, and what comes behind that leaves."""
        if not self._left or self._left[-1] != number:
            return
        fetch, values = self._next or self._of(number), self._layers[self._left.pop()]
        parts.update(zip(values, fetch.whole(), strict=True))
        self._known.update((value, (fetch, place)) for place, value in enumerate(values))
        self._next = None
        if self._left:
            self._next = self._of(self._left[-1])
            self._next.start()

    def of(self, value: Value) -> tuple[Fetch, int]:
        """What has fetched a parameter, and its number there."""
        return self._known[value]

    def _of(self, number: int) -> Fetch:
        is_again = number in self._again
        fetch = self._own.fetch_of(self._layers[number], self._segment, None if is_again else self._last)
        self._last = None if is_again else fetch
        return fetch
