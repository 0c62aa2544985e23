"""What brings a device's part of a value from one sharding to another, and its gradient back."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from torch_xmesh.devices import device_here
from torch_xmesh.parallelism.conversions import AxisMove
from torch_xmesh.parallelism.loops import PARTIAL, REPLICATED
from torch_xmesh.parallelism.running.stage_groups import StageGroups
from torch_xmesh.parallelism.space import CollectiveUse

Seen = Callable[[CollectiveUse], None]


@dataclasses.dataclass(frozen=True)
class Hop:
    """Rows that devices along a mesh axis send each other.

    Attributes:
        sent: how many rows this device sends to each of them; `received`: how many it has from each.
    """

    axis: int
    sent: tuple[int, ...]
    received: tuple[int, ...]


def kind_of(step: AxisMove) -> str:
    """The collective that a move is, or \"local\"."""
    if step.before == PARTIAL:
        return "all-reduce" if step.after == REPLICATED else "reduce-scatter"
    if step.before >= 0 and step.after != PARTIAL:
        return "all-gather" if step.after == REPLICATED else "all-to-all"
    return "local"


class Moves:
    """Moves of values on one mesh, planned as the search has priced them.

    Attributes:
        device: this process's, of the mesh's kind.

    Args:
        mesh: a mesh of one or two axes.
        on_collective: told of each collective that moves values.
        groups: which carry the collectives; None: the mesh's own.
    """

    def __init__(self, mesh: DeviceMesh, on_collective: Seen | None = None, groups: StageGroups | None = None) -> None:
        self.shape = tuple(mesh.shape)
        self.device = device_here(mesh.device_type)
        self._groups = groups or StageGroups.of_mesh(mesh)
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        self.coordinate = tuple(coordinate)
        self._on_collective, self._is_again = on_collective, False

    def run(self, part: torch.Tensor, steps: Sequence[AxisMove], name: str, why: str) -> torch.Tensor:
        """The device's part afterwards; without a graph."""
        for step in steps:
            part = self._run(part, step, name, why)
        return part

    def _run(self, part: torch.Tensor, step: AxisMove, name: str, why: str) -> torch.Tensor:
        size, at = self.shape[step.axis], self.coordinate[step.axis]
        before, after = step.before, step.after
        if size == 1 or before == after:
            return part
        if before == REPLICATED:
            if after == PARTIAL:  # one device's summand is all of it
                return part if at == 0 else torch.zeros_like(part)
            return part.chunk(size, after)[at]
        if after == PARTIAL:  # a shard becomes a summand: zeros outside of it
            extents = list(part.shape)
            extents[before] *= size
            out = part.new_zeros(extents)
            out.narrow(before, at * part.shape[before], part.shape[before]).copy_(part)
            return out
        if before == PARTIAL and after == REPLICATED:
            return self.all_reduce(part, step.axis, name, why)
        if before == PARTIAL:
            self._tell(name, why, "reduce-scatter", step.axis, part.nbytes)
            summands = torch.cat(part.chunk(size, after))
            out = summands.new_empty((len(summands) // size, *summands.shape[1:]))
            self._groups.run(step.axis, dist.reduce_scatter_tensor, out, summands)
            return out
        if after == REPLICATED:
            self._tell(name, why, "all-gather", step.axis, size * part.nbytes)
            gathered = part.new_empty((size * len(part), *part.shape[1:]))
            self._groups.run(step.axis, dist.all_gather_into_tensor, gathered, part.contiguous())
            return gathered if before == 0 else torch.cat(gathered.chunk(size), before)
        self._tell(name, why, "all-to-all", step.axis, size * part.nbytes)
        sent = torch.cat(part.chunk(size, after))
        received = torch.empty_like(sent)
        self._groups.run(step.axis, dist.all_to_all_single, received, sent)
        return torch.cat(received.chunk(size), before)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """What is moved inside is moved for backward, which computes a part of the forward once more."""
        self._is_again = True
        try:
            yield
        finally:
            self._is_again = False

    def __deepcopy__(self, memo: Any) -> "Moves":
        return self  # groups are what they are

    def all_reduce(self, part: torch.Tensor, axis: int, name: str, why: str, *, is_max: bool = False) -> torch.Tensor:
        """The sum over all devices along an axis, or with `is_max` the elementwise maximum, as a new tensor."""
        self._tell(name, why, "all-reduce", axis, part.nbytes)
        out = part.contiguous().clone()
        self.add_up(out, axis, is_max=is_max)
        return out

    def add_up(self, part: torch.Tensor, axis: int, *, is_max: bool = False) -> None:
        """The same in place, and nobody is told."""
        if self.shape[axis] > 1:
            self._groups.run(axis, dist.all_reduce, part, dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM)

    def swapped(self, counts: torch.Tensor, axis: int) -> torch.Tensor:
        """An all-to-all of rows along an axis: row i goes to the axis's device i, and the result has the rows that
        these devices have for this one. It moves counts and no values, so `on_collective` is not called."""
        if self.shape[axis] == 1:
            return counts
        received = torch.empty_like(counts, memory_format=torch.contiguous_format)
        self._groups.run(axis, dist.all_to_all_single, received, counts.contiguous())
        return received

    def exchange(self, rows: torch.Tensor, hop: Hop, name: str, why: str, *, is_back: bool) -> torch.Tensor:
        """The rows that come to this device by a hop, or, of rows that came by it, those that come back. Either way as
        many bytes are told as there are rows where the hop begins, on as many devices."""
        sent, received = (hop.received, hop.sent) if is_back else (hop.sent, hop.received)
        out = rows.new_empty((sum(received), *rows.shape[1:]))
        num_bytes = math.prod(rows.shape[1:]) * rows.itemsize * sum(hop.sent)
        self._tell(name, why, "all-to-all", hop.axis, self.shape[hop.axis] * num_bytes)
        if self.shape[hop.axis] == 1:
            return out.copy_(rows)
        self._groups.run(hop.axis, dist.all_to_all_single, out, rows.contiguous(), [*received], [*sent])
        return out

    def shape_after(self, shape: Sequence[int], steps: Sequence[AxisMove]) -> tuple[int, ...]:
        """The shape of a device's part behind some moves."""
        out = list(shape)
        for step in steps:
            if step.before >= 0:
                out[step.before] *= self.shape[step.axis]
            if step.after >= 0:
                out[step.after] //= self.shape[step.axis]
        return tuple(out)

    def tell(self, steps: Sequence[AxisMove], num_bytes: int, name: str, why: str) -> None:
        """The collectives that these moves are to a plan, of a part of so many bytes, which something else carries."""
        for step in steps:
            size, kind = self.shape[step.axis], kind_of(step)
            if kind == "local":
                num_bytes = num_bytes * (size if step.before >= 0 else 1) // (size if step.after >= 0 else 1)
                continue
            self._tell(name, why, kind, step.axis, num_bytes * (size if kind in {"all-gather", "all-to-all"} else 1))
            num_bytes = num_bytes * size if kind == "all-gather" else num_bytes
            num_bytes = num_bytes // size if kind == "reduce-scatter" else num_bytes

    def _tell(self, name: str, why: str, kind: str, axis: int, num_bytes: int) -> None:
        """Bytes as CollectiveUse counts them."""
        if self._on_collective is not None:
            why = "backward" if self._is_again else why
            self._on_collective(CollectiveUse(name, why, kind, axis, float(num_bytes)))


class Moved(torch.autograd.Function):
    """A value on its way, its gradient back by steps of its own."""

    @staticmethod
    def forward(
        ctx: Any, part: torch.Tensor, moves: Moves, there: Sequence[AxisMove], back: Sequence[AxisMove], name: str
    ) -> torch.Tensor:
        ctx.moves, ctx.back, ctx.name = moves, back, name
        out = moves.run(part, there, name, "forward")
        return part.view_as(part) if out is part else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        return ctx.moves.run(gradient, ctx.back, ctx.name, "backward"), None, None, None, None


class Summed(torch.autograd.Function):
    """What devices along an axis have, added up: for all to go on with, so that its gradient is added up, too."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, moves: Moves, axis: int, name: str) -> torch.Tensor:
        ctx.moves, ctx.axis, ctx.name = moves, axis, name
        return moves.all_reduce(part, axis, name, "forward")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.moves.all_reduce(gradients[0], ctx.axis, ctx.name, "backward"), None, None, None
