"""The loops of each operator that is known: one row per operator, a file per family."""

from torch_xmesh.parallelism.rows import lookups, matmuls, norms, pointwise, views
from torch_xmesh.parallelism.rows.registry import Call, rows

__all__ = ["Call", "lookups", "matmuls", "norms", "pointwise", "rows", "views"]
