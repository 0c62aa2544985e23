"""The cheapest sharding of operators on one mesh, in one call."""

from __future__ import annotations

from collections.abc import Sequence

from torch_xmesh.parallelism.graph import FREE, Prices, ShardingGraph
from torch_xmesh.parallelism.operators import Forward
from torch_xmesh.parallelism.sharded import Sharded
from torch_xmesh.parallelism.space import Allowed, Links, Space
from torch_xmesh.parallelism.stretch import Stretch


def shard(
    forward: Forward,
    axes: Sequence[Links],
    model: str,
    *,
    allowed: Allowed | None = None,
    is_direct: bool = False,
) -> Sharded:
    """The cheapest choices for a model where only collectives cost anything: see Space and ShardingGraph."""
    space = Space(axes, model, allowed=allowed, is_direct=is_direct)
    return shard_stretch(Stretch.of(forward), space)


def shard_stretch(stretch: Stretch, space: Space, prices: Prices = FREE) -> Sharded:
    """The cheapest choices for some operators on a mesh.

    Raises:
        ValueError: no choice of an operator is left.
    """
    return ShardingGraph(stretch, space).least(prices)
