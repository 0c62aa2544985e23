"""The cheapest sharding that fits a memory limit, with what is proven of it.

At a price of memory the graph's least cost, less the price of the limit, bounds what any sharding that fits costs
(Lagrange). The best such bound is found between two shardings, one that fits and one that does not. Where the one that
fits costs more than the bound, choices of the nodes in which the two differ are tried: branch and bound.
"""

import dataclasses
import heapq
import itertools
from collections.abc import Sequence

from torch_xmesh.parallelism.graph import FREE, Prices, ShardingGraph
from torch_xmesh.parallelism.sharded import Sharded
from torch_xmesh.parallelism.space import Numbers

_MOST_PRICES = 8
_LARGE = 1e3
"""Times what all costs for what all weighs: at such a price only memory counts."""
_CLOSE = 1e-3
"""What costs at most so much more than the bound is good enough."""


@dataclasses.dataclass(frozen=True)
class Fitting:
    """What was found.

    Attributes:
        bound: no sharding that fits costs less; 0 where nothing is known.
    """

    sharded: Sharded
    bound: float

    @property
    def gap(self) -> float:
        """By which part of its cost another may be cheaper."""
        return max(0.0, 1 - self.bound / self.sharded.cost) if self.sharded.cost > 0 else 0.0


@dataclasses.dataclass(frozen=True)
class _Branch:
    graph: ShardingGraph
    allowed: Numbers
    bound: float
    over: Sharded
    fits: Sharded


def within_limit(
    graphs: Sequence[ShardingGraph],
    in_flight: int,
    memory_bytes: int,
    most_branches: int = 0,
    allowed: Numbers | None = None,
) -> Fitting | None:
    """The cheapest of the shardings of some graphs, levels of ZeRO for example, that a device can hold with so many
    microbatches in flight; None where none was found. More branches find cheaper ones, or prove more. The graphs come
    in the order in which what is cheapest without a limit costs more; `allowed`: of all nodes' choices those that are
    not 0."""
    search = _Search(in_flight, memory_bytes)
    for graph in graphs:
        if search.is_over(search.begin(graph, allowed)):
            break  # nothing is cheaper, and it fits
    for _ in range(most_branches):
        if not search.go_on():
            break
    return search.found()


class _Search:
    def __init__(self, in_flight: int, memory_bytes: int) -> None:
        self._in_flight, self._limit = in_flight, memory_bytes
        self._best: Sharded | None = None
        self._open: list[tuple[float, int, _Branch]] = []
        self._numbers = itertools.count()
        self._is_exact = True  # each search has found the cheapest sharding
        self._closed: float | None = None  # the least bound of what cannot be divided further, and does not fit

    def found(self) -> Fitting | None:
        if self._best is None:
            return None
        if not self._is_exact:
            return Fitting(self._best, 0.0)
        bounds = [self._best.cost, *(bound for bound, _, _ in self._open[:1])]
        return Fitting(self._best, min([*bounds, *([] if self._closed is None else [self._closed])]))

    def is_over(self, first: Sharded | None) -> bool:
        return first is not None and first is self._best

    def begin(self, graph: ShardingGraph, allowed: Numbers | None) -> Sharded | None:
        """Its cheapest sharding; nothing where it has none."""
        return self._divide(graph, graph.everything() if allowed is None else allowed)

    def go_on(self) -> bool:
        """Divides the branch that may be the cheapest; False where that cannot help."""
        if not self._open:
            return False
        bound, _, branch = heapq.heappop(self._open)
        if self._best is not None and bound >= self._best.cost * (1 - _CLOSE):
            heapq.heappush(self._open, (bound, next(self._numbers), branch))
            return False
        graph, over, fits = branch.graph, branch.over, branch.fits
        saved = graph.charged(over.chosen, self._in_flight) - graph.charged(fits.chosen, self._in_flight)
        differ = [node for node, pair in enumerate(zip(over.chosen, fits.chosen, strict=True)) if pair[0] != pair[1]]
        if not differ:  # what it is charged for fits, what it holds does not
            self._close(bound)
            return True
        node = max(differ, key=lambda candidate: (abs(saved[candidate]), -candidate))
        for is_taken in (True, False):
            self._divide(graph, graph.narrowed(branch.allowed, node, fits.chosen[node], is_taken=is_taken))
        return True

    def _close(self, bound: float) -> None:
        self._closed = bound if self._closed is None else min(self._closed, bound)

    def _note(self, sharded: Sharded) -> Sharded:
        self._is_exact = self._is_exact and sharded.is_exact
        if sharded.bytes.total(self._in_flight) <= self._limit:
            better = self._best is None or (sharded.cost, sharded.bytes.total(self._in_flight)) < (
                self._best.cost,
                self._best.bytes.total(self._in_flight),
            )
            self._best = sharded if better else self._best
        return sharded

    def _charged(self, sharded: Sharded) -> float:
        return float(sharded.graph.charged(sharded.chosen, self._in_flight).cumsum()[-1])

    def _divide(self, graph: ShardingGraph, allowed: Numbers) -> Sharded | None:
        """What is allowed becomes a branch, if something that fits may be in it; its cheapest sharding."""

        def at(price: float) -> Sharded:
            return self._note(graph.least(Prices(price, price * self._in_flight) if price else FREE, allowed))

        try:
            first = over = fits = at(0.0)
        except ValueError:
            return None
        bound, weight = first.cost, self._charged(first)
        if weight > self._limit:
            dear = _LARGE * max(first.cost, 1e-9) / weight
            fits = at(dear)
            if self._charged(fits) > self._limit:  # nothing was found to divide, and this much is proven
                self._close(fits.cost + dear * (self._charged(fits) - self._limit))
                return first
            for _ in range(_MOST_PRICES):
                saved, more = self._charged(over) - self._charged(fits), fits.cost - over.cost
                if saved <= 0 or more <= 0:
                    break
                price = more / saved
                middle = at(price)
                held = self._charged(middle)
                bound = max(bound, middle.cost + price * (held - self._limit))
                if middle.cost + price * held >= over.cost + price * self._charged(over) - 1e-12 * abs(over.cost):
                    break
                over, fits = (over, middle) if held <= self._limit else (middle, fits)
        is_whole = fits is first and first.bytes.total(self._in_flight) <= self._limit
        if not is_whole and (self._best is None or bound < self._best.cost):
            branch = _Branch(graph, allowed, bound, over, fits)
            heapq.heappush(self._open, (bound, next(self._numbers), branch))
        return first
