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
from torch_xmesh.parallelism.rows.registry import CallForm, rows

__all__ = [
    "CallForm",
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
