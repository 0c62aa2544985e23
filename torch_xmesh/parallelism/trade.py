"""Shardings that take longer and hold less: what a memory limit is met with."""

from collections.abc import Callable

from torch_xmesh.parallelism.graph import Prices, ShardingGraph
from torch_xmesh.parallelism.sharded import Sharded
from torch_xmesh.parallelism.zero import LEVELS, with_zero

_MOST_POINTS = 6
_LARGE = 1e3
"""Times what all costs for what all weighs: at such a price only memory counts."""


def trade_offs(graph: ShardingGraph, in_flight: int) -> list[Sharded]:
    """Shardings by what a device holds with so many microbatches in flight: the fastest first, each later one holds
    less. They are the corners of the convex hull of (cost, bytes), found with prices of memory, at most six."""

    def at(price: float) -> Sharded:
        return graph.least(Prices(price, price * in_flight))

    fastest = graph.least()
    weight = fastest.bytes.total(in_flight)
    if weight <= 0:
        return [fastest]
    smallest = at(_LARGE * max(fastest.cost, 1e-9) / weight)
    found = [fastest]
    if smallest.bytes.total(in_flight) < weight * (1 - 1e-9):
        found.append(smallest)
        _between(found, 0, at, in_flight)
    return found


def _between(found: list[Sharded], place: int, at: Callable[[float], Sharded], in_flight: int) -> None:
    """Corners between two neighbours, at the price at which these are equal."""
    left, right = found[place], found[place + 1]
    saved = left.bytes.total(in_flight) - right.bytes.total(in_flight)
    more = right.cost - left.cost
    if len(found) >= _MOST_POINTS or saved <= 0 or more <= 0:
        return
    middle = at(more / saved)
    value = middle.cost + more / saved * middle.bytes.total(in_flight)
    known = left.cost + more / saved * left.bytes.total(in_flight)
    if value < known * (1 - 1e-9):
        found.insert(place + 1, middle)
        _between(found, place + 1, at, in_flight)
        _between(found, place, at, in_flight)


def variants(graph: ShardingGraph, in_flight: int) -> list[Sharded]:
    """Trade-offs, each also with parameters in parts where that holds less, and what holds least of all: of equal ones
    the faster."""
    out: list[Sharded] = []
    for sharded in trade_offs(graph, in_flight):
        plain = with_zero(sharded, 1)
        out.append(plain)
        for level in (2, 3):
            other = with_zero(sharded, level)
            if other.bytes.total(in_flight) < plain.bytes.total(in_flight) * (1 - 1e-9):
                out.append(other)
    out.append(ShardingGraph(graph.stretch, graph.space, LEVELS[-1]).least(Prices(1.0, float(in_flight))))
    return [
        way
        for way in out
        if not any(
            other is not way
            and other.cost <= way.cost
            and other.bytes.fixed <= way.bytes.fixed
            and other.bytes.per_microbatch <= way.bytes.per_microbatch
            and (other.cost, other.bytes) != (way.cost, way.bytes)
            for other in out
        )
    ]
