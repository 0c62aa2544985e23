"""Parameters that are in parts at all times (ZeRO-3): each microbatch fetches them before they are read, lets go of
them, and fetches them once more where backward reads them; those of a layer together, while the layer before is
computed.

forward   parts --> wholes --> operators that read them; what they save of them is noted, not kept
backward            wholes, fetched anew by the first that reads one --> their gradients --> gradients of the parts
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from torch_xmesh.parallelism.conversions import AxisMove
from torch_xmesh.parallelism.running.collectives import Moves
from torch_xmesh.parallelism.running.parcels import Member, Parcel, Sent, parcels_of
from torch_xmesh.pipeline.ranks.transfers import Transfers
from torch_xmesh.spec import Mesh


@dataclasses.dataclass(frozen=True)
class InTurn:
    """A parameter, as each microbatch fetches it.

    Attributes:
        shape: of this device's part.
        there: from its parts to the whole; `back`: from the whole's gradient to those of the parts.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    there: tuple[AxisMove, ...]
    back: tuple[AxisMove, ...]


class Underway:
    """Tensors of a layer that were started together.

    Args:
        here: those that nothing is sent for, by number.
        numbers: of the others, by name.
    """

    def __init__(self, here: dict[int, torch.Tensor | None], sent: Sequence[Sent], numbers: Mapping[str, int]) -> None:
        self._here, self._sent, self._numbers = here, list(sent), numbers

    def wait(self) -> dict[int, torch.Tensor | None]:
        """All of them, by number."""
        while self._sent:
            sent = self._sent.pop()
            for member, part in zip(sent.parcel.members, sent.wait(), strict=True):
                self._here[self._numbers[member.name]] = part
        return self._here


class FetchedLayer:
    """Parameters of a layer, which each microbatch fetches.

    Args:
        lane: what its transfers are called, alike on all devices.
    """

    def __init__(self, parameters: Sequence[InTurn], moves: Moves, mesh: Mesh, transfers: Transfers, lane: str) -> None:
        self.parameters = list(parameters)
        self._moves, self._mesh, self._transfers, self._lane = moves, mesh, transfers, lane
        self._parcels: dict[tuple[tuple[int, ...], bool], list[Parcel]] = {}

    def _parcels_of(self, numbers: tuple[int, ...], is_back: bool) -> list[Parcel]:
        if (numbers, is_back) not in self._parcels:
            members = []
            for one in (self.parameters[number] for number in numbers):
                shape = self._moves.shape_after(one.shape, one.there) if is_back else one.shape
                members.append(Member(one.name, shape, one.dtype, one.back if is_back else one.there))
            self._parcels[numbers, is_back] = parcels_of(members, self._moves, self._mesh)
        return self._parcels[numbers, is_back]

    def start(self, parts: Mapping[int, torch.Tensor | None], why: str, *, is_back: bool = False) -> Underway:
        """Some parameters, by number, on their way to be whole, or their gradients on theirs back."""
        numbers = tuple(sorted(parts))
        place = {self.parameters[number].name: number for number in numbers}
        lane = f"{self._lane}/{why} of {numbers}{' back' if is_back else ''}"
        sent = [
            parcel.start(self._transfers, f"{lane}/{at}", [parts[place[one.name]] for one in parcel.members], why)
            for at, parcel in enumerate(self._parcels_of(numbers, is_back))
        ]
        here: dict[int, torch.Tensor | None] = {}
        for number in {*numbers} - {place[one.name] for some in sent for one in some.parcel.members}:
            part, one = parts[number], self.parameters[number]
            way = one.back if is_back else one.there
            here[number] = None if part is None else self._moves.run(part, way, one.name, why)
        return Underway(here, sent, place)


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
        leaves: this device's parts, to which gradients come.
        before: what the microbatch has fetched before, whose parameters backward reads next.
        ahead: where it is while it is on its way and not yet needed.
        send_back: is given it and the gradients of the wholes.
    """

    def __init__(
        self,
        layer: FetchedLayer,
        leaves: Sequence[torch.Tensor],
        before: "Fetch | None",
        ahead: "set[Fetch]",
        send_back: "Callable[[Fetch, Sequence[torch.Tensor | None]], None]",
    ) -> None:
        self.layer, self.leaves = layer, list(leaves)
        self._before, self._ahead, self._send_back = before, ahead, send_back
        self._underway: Underway | None = None
        self._saved: set[int] = set()
        self._again: dict[int, torch.Tensor | None] = {}

    def start(self) -> None:
        """All leave for this device."""
        self._start(range(len(self.leaves)), "forward")

    def _start(self, numbers: Iterable[int], why: str) -> None:
        if self._underway is None:
            self._underway = self.layer.start({number: self.leaves[number].detach() for number in numbers}, why)
            self._ahead.add(self)

    def _arrived(self) -> dict[int, torch.Tensor | None]:
        assert self._underway is not None
        self._ahead.discard(self)
        underway, self._underway = self._underway, None
        return underway.wait()

    def drop(self) -> None:
        """What was on its way is not needed."""
        self._arrived()

    def whole(self) -> list[torch.Tensor]:
        """All of them, of the parts that autograd knows."""
        return list(_Whole.apply(self, *self.leaves))  # type: ignore[no-untyped-call]

    def fetched(self) -> list[torch.Tensor]:
        """All of them, whole, without a graph."""
        self.start()
        return [whole for _, whole in sorted(self._arrived().items()) if whole is not None]

    def save(self, number: int) -> None:
        """Backward reads it."""
        self._saved.add(number)

    def again(self, number: int) -> torch.Tensor:
        """In backward, which fetches all that it reads of the layer at once; those that it reads next leave then."""
        if not self._again:
            self._start(self._saved, "backward")
            self._again = self._arrived()
            before, self._before = self._before, None
            while before is not None and not before._saved:
                before = before._before
            if before is not None and not before._again:
                before._start(before._saved, "backward")
        whole = self._again[number]
        assert whole is not None
        return whole

    def send_back(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Those of the wholes leave. Nothing reads the parameters anymore."""
        self._again = {}
        self._send_back(self, gradients)


class _Whole(torch.autograd.Function):
    """Whole parameters, of the parts that autograd knows. Gradients of these are added to them later."""

    @staticmethod
    def forward(ctx: Any, fetch: Fetch, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.fetch = fetch
        ctx.set_materialize_grads(False)
        return tuple(whole.contiguous() for whole in fetch.fetched())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.fetch.send_back(gradients)
        return (None,) * (1 + len(gradients))


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
