"""Parameters that are in parts at all times (ZeRO-3): each microbatch fetches them before they are read, lets go of
them, and fetches them once more where backward reads them; those of a layer together.

forward   parts --> wholes --> operators that read them; what they save of them is noted, not kept
backward            wholes, fetched anew by the first that reads one --> their gradients --> gradients of the parts
"""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from torch_xmesh.parallelism.conversions import AxisMove
from torch_xmesh.parallelism.running.collectives import Moves


@dataclasses.dataclass(frozen=True)
class InTurn:
    """A parameter, as each microbatch fetches it.

    Attributes:
        there: from its parts to the whole; `back`: from the whole's gradient to those of the parts.
    """

    name: str
    there: tuple[AxisMove, ...]
    back: tuple[AxisMove, ...]


@dataclasses.dataclass(frozen=True)
class _View:
    """Stands for a whole parameter, or a view of it, among what an operator saves for backward: its layout, and where
    to fetch the parameter again."""

    fetch: "Fetch"
    number: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Fetch:
    """Parameters of a layer in one microbatch.

    Args:
        parts: this device's, without a graph.
    """

    def __init__(self, moves: Moves, parameters: Sequence[InTurn], parts: Sequence[torch.Tensor]) -> None:
        self._moves, self._parameters, self._parts = moves, parameters, parts
        self._saved: set[int] = set()
        self._again: dict[int, torch.Tensor] = {}

    def fetched(self, numbers: Sequence[int], why: str) -> list[torch.Tensor]:
        """Some of them, whole."""
        there = [self._parameters[number].there for number in numbers]
        names = [self._parameters[number].name for number in numbers]
        return self._moves.run_together([self._parts[number] for number in numbers], there, names, why)

    def save(self, number: int) -> None:
        """Backward reads it."""
        self._saved.add(number)

    def again(self, number: int) -> torch.Tensor:
        """In backward, which fetches all that it reads of the layer at once."""
        if not self._again:
            numbers = sorted(self._saved)
            self._again = dict(zip(numbers, self.fetched(numbers, "backward"), strict=True))
        return self._again[number]

    def gradients(self, wholes: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Those of the parts. Nothing reads the parameters anymore."""
        self._again = {}
        out: list[torch.Tensor | None] = [None] * len(wholes)
        numbers = [number for number, gradient in enumerate(wholes) if gradient is not None]
        back = [self._parameters[number].back for number in numbers]
        names = [self._parameters[number].name for number in numbers]
        given = [gradient for gradient in wholes if gradient is not None]
        for number, part in zip(numbers, self._moves.run_together(given, back, names, "backward"), strict=True):
            out[number] = part
        return out


class Fetched(torch.autograd.Function):
    """Whole parameters, of the parts that autograd knows."""

    @staticmethod
    def forward(ctx: Any, fetch: Fetch, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.fetch = fetch
        ctx.set_materialize_grads(False)
        return tuple(whole.contiguous() for whole in fetch.fetched(range(len(parts)), "forward"))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, *ctx.fetch.gradients(gradients)


_CAST = frozenset(
    "linear bilinear matmul __matmul__ __rmatmul__ mm bmm mv addmm addmv addbmm baddbmm einsum conv1d conv2d conv3d "
    "conv_transpose1d conv_transpose2d conv_transpose3d scaled_dot_product_attention".split()
)
"""Kinds of operators that compute in autocast's type, whatever they are given in single precision."""


def cast_for(kind: str, whole: torch.Tensor) -> torch.Tensor:
    """A parameter as an operator takes it under the autocast that is on, which would cast it to the same."""
    device = whole.device.type
    if kind not in _CAST or whole.dtype != torch.float32 or not torch.is_autocast_enabled(device):
        return whole
    return whole.to(torch.get_autocast_dtype(device))


@contextmanager
def not_kept(fetched: Sequence[tuple[Fetch, int, torch.Tensor]]) -> Iterator[None]:
    """Operators inside do not keep these parameters for backward: each with its number in what fetches it, as they take
    it."""
    if not fetched:
        yield
        return
    known = {whole.untyped_storage().data_ptr(): (fetch, number) for fetch, number, whole in fetched}

    def pack(tensor: torch.Tensor) -> Any:
        found = known.get(tensor.untyped_storage().data_ptr()) if type(tensor) is torch.Tensor else None
        if found is None:
            return tensor
        fetch, number = found
        fetch.save(number)
        return _View(fetch, number, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def unpack(packed: Any) -> torch.Tensor:
        if not isinstance(packed, _View):
            out: torch.Tensor = packed
            return out
        whole = packed.fetch.again(packed.number).contiguous().to(packed.dtype)
        return whole.as_strided(packed.size, packed.stride, packed.offset)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
