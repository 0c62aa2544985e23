"""Parameters that are in parts at all times (ZeRO-3): each microbatch fetches them before they are read, lets go of
them, and fetches them once more where backward reads them.

forward   part --> whole --> operators that read it; what they save of it is noted, not kept
backward           whole, fetched anew by the first that reads it --> gradient of the whole --> gradient of the part
"""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from torch_xmesh.parallelism.running.collectives import Moves, Step


@dataclasses.dataclass(frozen=True)
class _View:
    """Of a whole parameter, as an operator has saved it."""

    fetch: "Fetch"
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Fetch:
    """A parameter in one microbatch.

    Args:
        part: this device's, without a graph.
        there: from the parts to the whole; `back`: from the whole's gradient to the part's.
    """

    def __init__(
        self, part: torch.Tensor, moves: Moves, there: Sequence[Step], back: Sequence[Step], name: str
    ) -> None:
        self._part, self._moves, self._there, self._back, self._name = part, moves, there, back, name
        self._again: torch.Tensor | None = None

    def fetched(self, why: str) -> torch.Tensor:
        """The whole."""
        return self._moves.run(self._part, self._there, self._name, why)

    def again(self) -> torch.Tensor:
        """The whole in backward; fetched once."""
        if self._again is None:
            self._again = self.fetched("backward")
        return self._again

    def gradient(self, whole: torch.Tensor) -> torch.Tensor:
        """That of the part. Nothing reads the parameter anymore."""
        self._again = None
        return self._moves.run(whole, self._back, self._name, "backward")


class Fetched(torch.autograd.Function):
    """The whole parameter, of the part that autograd knows."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, fetch: Fetch) -> torch.Tensor:
        ctx.fetch = fetch
        return fetch.fetched("forward")

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.fetch.gradient(gradients[0]), None


@contextmanager
def not_kept(fetched: Sequence[tuple[Fetch, torch.Tensor]]) -> Iterator[None]:
    """Operators inside do not keep these parameters for backward."""
    if not fetched:
        yield
        return
    known = {whole.untyped_storage().data_ptr(): fetch for fetch, whole in fetched}

    def pack(tensor: torch.Tensor) -> Any:
        fetch = known.get(tensor.untyped_storage().data_ptr()) if type(tensor) is torch.Tensor else None
        if fetch is None:
            return tensor
        return _View(fetch, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def unpack(packed: Any) -> torch.Tensor:
        if not isinstance(packed, _View):
            out: torch.Tensor = packed
            return out
        return packed.fetch.again().as_strided(packed.size, packed.stride, packed.offset)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
