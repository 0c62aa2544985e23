"""Costs of microbatches of any size, from those of the sizes that were measured."""

import dataclasses
from collections.abc import Sequence

from torch_xmesh.pipeline.schedule.simulation import Costs, EdgeCosts, StageCosts


def costs_at(measured: Sequence[tuple[int, Costs]], size: int) -> Costs:
    """Costs of a microbatch of `size` samples.

    Every time and number of bytes is taken for a + b * samples by least squares over what was measured; of one size
    alone for b * samples. Edges have seconds only.

    Args:
        measured: (samples, costs of a microbatch of so many), not empty; the last counts where a size comes twice.
    """
    known = dict(measured)
    if size in known:
        return known[size]
    sizes, rows = list(known), list(known.values())

    def seconds(values: Sequence[float]) -> float:
        return _line(sizes, values, size)

    def num_bytes(values: Sequence[float]) -> int:
        return round(_line(sizes, values, size))

    def stage(index: int) -> StageCosts:
        found = [costs.stages[index] for costs in rows]
        return StageCosts(
            forward_seconds=seconds([taken.forward_seconds for taken in found]),
            backward_input_seconds=seconds([taken.backward_input_seconds for taken in found]),
            backward_weight_seconds=seconds([taken.backward_weight_seconds for taken in found]),
            activation_bytes=num_bytes([taken.activation_bytes for taken in found]),
            weight_bytes=num_bytes([taken.weight_bytes or 0 for taken in found]),
            fixed_bytes=num_bytes([taken.fixed_bytes for taken in found]),
        )

    last = rows[-1]
    edges: dict[tuple[int, int], EdgeCosts | float] = {}
    for ends, cost in (last.edges or {}).items():
        assert isinstance(cost, EdgeCosts)
        ways = [costs.edges[ends] for costs in rows if costs.edges is not None]
        both = [way for way in ways if isinstance(way, EdgeCosts)]
        edges[ends] = EdgeCosts(
            forward_seconds=seconds([edge.forward_seconds for edge in both]),
            backward_seconds=seconds([edge.backward_seconds or 0.0 for edge in both]),
            has_gradient=cost.has_gradient,
        )
    return dataclasses.replace(last, stages=[stage(index) for index in range(len(last.stages))], edges=edges)


def _line(sizes: Sequence[int], values: Sequence[float], size: int) -> float:
    """At `size` on the line through the points; below them on one that does not start below 0."""
    count = len(sizes)
    mean_size, mean = sum(sizes) / count, sum(values) / count
    spread = sum((a - mean_size) ** 2 for a in sizes)
    through_zero = sum(a * b for a, b in zip(sizes, values, strict=True)) / sum(a * a for a in sizes)
    if spread == 0:
        return through_zero * size
    slope = sum((a - mean_size) * (b - mean) for a, b in zip(sizes, values, strict=True)) / spread
    if slope < 0:
        return mean
    start = mean - slope * mean_size
    return start + slope * size if start >= 0 or size > max(sizes) else through_zero * size
