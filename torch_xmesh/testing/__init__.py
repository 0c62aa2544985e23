"""Tools for tests on real processes: :func:`spawn`, :class:`World` and :func:`mark`."""

from torch_xmesh.testing.spawn import RankError, RankOutcome, World, mark, spawn

__all__ = ["RankError", "RankOutcome", "World", "mark", "spawn"]
