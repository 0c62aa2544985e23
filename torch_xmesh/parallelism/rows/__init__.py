"""The loops of each operator that is known: one row per operator, a file per family."""

from torch_xmesh.parallelism.rows import (
    attention,
    convolutions,
    experts,
    lookups,
    matmuls,
    norms,
    pieces,
    pointwise,
    reductions,
    views,
)
from torch_xmesh.parallelism.rows.registry import Call, rows

__all__ = [
    "Call",
    "attention",
    "convolutions",
    "experts",
    "lookups",
    "matmuls",
    "norms",
    "pieces",
    "pointwise",
    "reductions",
    "rows",
    "views",
]
