"""Tests on real processes: :func:`spawn`, :class:`World`, :func:`mark`; a pipeline's oracle: :func:`serial_step`."""

from torch_xmesh.testing.serial import SerialResult, serial_step
from torch_xmesh.testing.spawn import RankError, RankOutcome, World, mark, spawn

__all__ = ["RankError", "RankOutcome", "SerialResult", "World", "mark", "serial_step", "spawn"]
