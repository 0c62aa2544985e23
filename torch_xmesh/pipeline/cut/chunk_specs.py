"""How one tensor of a batch or an output is cut into microbatches, or merged: torch.distributed.pipelining's specs in a
form of our own, so that nobody imports that package who does not use it."""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Cut, or concatenated, along a dim."""

    split_dim: int


@dataclasses.dataclass(frozen=True)
class Whole:
    """The same in every microbatch."""


@dataclasses.dataclass(frozen=True)
class Stack:
    """Merged to one entry for each tensor without dims."""


@dataclasses.dataclass(frozen=True)
class Fold:
    """Merged by a function of the value so far and the next part."""

    init_value: Any
    reduce_fn: Callable[[Any, Any], Any]


ChunkSpec = Chunk | Whole | Stack | Fold


def own_spec(given: Any) -> ChunkSpec | None:
    """torch's spec, or its Replicate as a class, in our form; None for anything else."""
    if isinstance(given, Chunk | Whole | Stack | Fold):
        return given
    torchs = sys.modules.get("torch.distributed.pipelining.microbatch")
    if torchs is None:  # then nobody has made one
        return None
    if isinstance(given, torchs.TensorChunkSpec):
        return Chunk(given.split_dim)
    if isinstance(given, torchs._CustomReducer):
        return Fold(given.init_value, given.reduce_fn)
    is_replicate = (
        issubclass(given, torchs._Replicate) if isinstance(given, type) else isinstance(given, torchs._Replicate)
    )
    return Whole() if is_replicate else None
