"""Tensors that move among a stage's devices by one transfer: parameters before operators read them, gradients behind.

parts of many tensors --> one flat tensor per parcel --> transfer among the stage's devices --> parts of many tensors
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from torch_xmesh.parallelism.conversions import AxisMove
from torch_xmesh.parallelism.loops import PARTIAL, REPLICATED
from torch_xmesh.parallelism.running.collectives import Moves, kind_of
from torch_xmesh.pipeline.ranks.transfers import Pending, Transfers
from torch_xmesh.plan_cache import Move
from torch_xmesh.spec import Mesh

_PARCEL_BYTES = 4 << 20
"""The most that share a parcel, if it is not one tensor, of the larger of what leaves and what comes: soon enough full,
so that much of a backward is left when the first ones leave, and soon there for who waits for one of them."""
_LEAST_PARCELS, _LEAST_BYTES = 8, 1 << 17
"""Of small tensors so many parcels, for the same reason, unless these were smaller than that: then a transfer takes
about as long as a message."""
_SUMS = {"all-reduce", "reduce-scatter"}


@dataclasses.dataclass(frozen=True)
class Member:
    """A tensor that moves.

    Attributes:
        shape: of this device's part.
        way: the moves, as the plan has them.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    way: tuple[AxisMove, ...]


class Parcel:
    """Tensors that share a transfer: all are added up along the same mesh axes, to be whole or in parts, or all are
    gathered along the same ones. Or one tensor whose way is another.

    Packed, a tensor has an axis for each of its moves along which it is in parts, of the number of devices there, and
    all else is flat; axes of the mesh along which nothing moves are stacked before.
    """

    def __init__(self, members: Sequence[Member], moves: Moves, mesh: Mesh) -> None:
        self.members, self._moves, self._mesh = list(members), moves, mesh
        self._steps = [_sent(member.way, moves.shape) for member in members]
        self.is_sum = _is_sum(self._steps[0])
        self._blocks = [moves.shape[step.axis] for step in self._steps[0] if kind_of(step) != "all-reduce"]
        moving = [step.axis for step in self._steps[0]]
        self._still = [axis for axis, size in enumerate(moves.shape) if axis not in moving and size > 1]
        self.is_packed = self.is_sum or _is_gather(self._steps[0])
        # Who has a gradient is read by the host: from a device it goes beside the values, on cpu.
        self._has_flags = not self.is_packed or (self.is_sum and moves.device.type != "cpu")
        self.moves = [self._packed() if self.is_packed else self._alone()]
        if self._has_flags:
            self.moves.append(self._flags())

    def _packed(self) -> Move:
        shape = self._moves.shape
        numel = sum(math.prod(member.shape) for member in self.members)
        if self.is_sum:
            numel = numel // math.prod(self._blocks) + (0 if self._has_flags else len(self.members))
        src: list[Placement] = [Replicate()] * len(shape)
        dst: list[Placement] = [Replicate()] * len(shape)
        for place, axis in enumerate(self._still):
            src[axis] = dst[axis] = Shard(place)
        place = len(self._still)
        for step in self._steps[0]:
            if kind_of(step) == "all-reduce":
                src[step.axis] = Partial("sum")
                continue
            src[step.axis] = Partial("sum") if self.is_sum else Shard(place)
            dst[step.axis] = Shard(place) if self.is_sum else Replicate()
            place += 1
        whole = (*(shape[axis] for axis in self._still), *self._blocks, numel)
        return Move.of(whole, self.members[0].dtype, (self._mesh, src), (self._mesh, dst))

    def _alone(self) -> Move:
        """Of one tensor, from how the devices have it to how they want it."""
        (member,), shape = self.members, self._moves.shape
        before: dict[int, int] = {}
        after: dict[int, int] = {}
        for step in self._steps[0]:
            before.setdefault(step.axis, step.before)
            after[step.axis] = step.after
        lead = len(self._still)
        whole = [*(shape[axis] for axis in self._still), *member.shape]
        ends: list[list[Placement]] = [[], []]
        for axis, size in enumerate(shape):
            if before.get(axis, REPLICATED) >= 0:
                whole[before[axis] + lead] *= size
            for placements, states in zip(ends, (before, after), strict=True):
                state = states.get(axis, REPLICATED)
                if axis in self._still:
                    placements.append(Shard(self._still.index(axis)))
                elif state >= 0:
                    placements.append(Shard(state + lead))
                else:
                    placements.append(Partial("sum") if state == PARTIAL else Replicate())
        return Move.of(whole, member.dtype, (self._mesh, ends[0]), (self._mesh, ends[1]))

    def _flags(self) -> Move:
        """How many devices have each."""
        mesh = Mesh(self._mesh, device_type="cpu")
        shape, lead = self._moves.shape, [self._moves.shape[axis] for axis in self._still]
        src: list[Placement] = [Partial("sum") if size > 1 else Replicate() for size in shape]
        dst: list[Placement] = [Replicate()] * len(shape)
        for place, axis in enumerate(self._still):
            src[axis] = dst[axis] = Shard(place)
        return Move.of((*lead, len(self.members)), torch.int32, (mesh, src), (mesh, dst))

    def start(self, transfers: Transfers, lane: str, parts: Sequence[torch.Tensor | None], why: str) -> "Sent":
        """Its members' parts leave, in order. None is zero, and None of all devices comes as None; what is gathered is
        there."""
        for member, steps in zip(self.members, self._steps, strict=True):
            self._moves.tell(steps, math.prod(member.shape) * member.dtype.itemsize, member.name, why)
        return Sent(self, transfers.start(lane, self.moves, self._pack(parts)))

    def _pack(self, parts: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        still = (1,) * len(self._still)
        if not self.is_packed:
            (part,), (member,) = parts, self.members
            return [self._given(part, member).reshape(*still, *member.shape), *self._packed_flags(parts)]
        if not self.is_sum:
            flat = [part.reshape(-1) for part in parts if part is not None]
            assert len(flat) == len(parts)
            return [(flat[0] if len(flat) == 1 else torch.cat(flat)).view(*still, *(1 for _ in self._blocks), -1)]
        pieces = [
            self._in_blocks(self._given(part, member), steps)
            for part, member, steps in zip(parts, self.members, self._steps, strict=True)
        ]
        if not self._has_flags:
            has = torch.tensor([part is not None for part in parts], dtype=self.members[0].dtype)
            pieces.append(has.expand(*self._blocks, len(parts)))
        return [torch.cat(pieces, -1).view(*still, *self._blocks, -1), *self._packed_flags(parts)]

    def _given(self, part: torch.Tensor | None, member: Member) -> torch.Tensor:
        return torch.zeros(member.shape, dtype=member.dtype, device=self._moves.device) if part is None else part

    def _packed_flags(self, parts: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        if not self._has_flags:
            return []
        flags = torch.tensor([part is not None for part in parts], dtype=torch.int32, device="cpu")
        return [flags.view(*(1 for _ in self._still), -1)]

    def _in_blocks(self, part: torch.Tensor, steps: Sequence[AxisMove]) -> torch.Tensor:
        """One of a sum with an axis for each of its moves to parts."""
        depth = 0
        for step in steps:
            if kind_of(step) == "reduce-scatter":
                dim = step.after + depth
                sizes = self._moves.shape[step.axis], part.shape[dim] // self._moves.shape[step.axis]
                part = part.reshape(*part.shape[:dim], *sizes, *part.shape[dim + 1 :]).movedim(dim, depth)
                depth += 1
        return part.reshape(*self._blocks, part.numel() // math.prod(self._blocks))

    def unpack(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """The members' parts; memory of a sum's is shared among them."""
        received = tensors[0].reshape(tensors[0].shape[len(self._still) :])
        if not self.is_packed:
            return [received if int(tensors[1]) else None]
        if self.is_sum:
            flat = received.reshape(-1)
            end = flat.numel() if self._has_flags else flat.numel() - len(self.members)
            has = (tensors[1].reshape(-1) if self._has_flags else flat[end:]).tolist()
            shapes = [self._moves.shape_after(member.shape, member.way) for member in self.members]
            sums = torch.split(flat[:end], [math.prod(shape) for shape in shapes])
            return [one.view(shape) if held else None for one, shape, held in zip(sums, shapes, has, strict=True)]
        pieces = torch.split(received, [math.prod(member.shape) for member in self.members], -1)
        return [self._whole(*one) for one in zip(pieces, self.members, self._steps, strict=True)]

    def _whole(self, piece: torch.Tensor, member: Member, steps: Sequence[AxisMove]) -> torch.Tensor:
        """One that was gathered: the first move's parts are within the later ones'."""
        piece = piece.reshape(*self._blocks, *member.shape)
        for number, step in enumerate(steps, 1):
            place = len(steps) - number + step.before
            piece = piece.movedim(0, place).flatten(place, place + 1)
        return piece


@dataclasses.dataclass(eq=False)
class Sent:
    """A parcel on its way."""

    parcel: Parcel
    pending: Pending

    def wait(self) -> list[torch.Tensor | None]:
        """Its members' parts afterwards, in order."""
        return self.parcel.unpack(self.pending.wait())


def parcels_of(members: Sequence[Member], moves: Moves, mesh: Mesh) -> list[Parcel]:
    """Parcels of those that have to leave a device; a parcel is full before the next one of its kind begins. What moves
    within each device alone is in none."""
    moving: list[tuple[Member, Any, int]] = []
    total: dict[Any, int] = {}
    for member in members:
        steps = _sent(member.way, moves.shape)
        if not steps:
            continue
        shapes = member.shape, moves.shape_after(member.shape, member.way)
        num_bytes = max(map(math.prod, shapes)) * member.dtype.itemsize
        is_packed = _is_sum(steps) or _is_gather(steps)
        key = (member.dtype, *((step.axis, kind_of(step)) for step in steps), *(() if is_packed else (member.name,)))
        moving.append((member, key, num_bytes))
        total[key] = total.get(key, 0) + num_bytes
    open_ones: dict[Any, list[Member]] = {}
    filled: dict[Any, int] = {}
    bundles: list[list[Member]] = []
    for member, key, num_bytes in moving:
        most = min(_PARCEL_BYTES, max(total[key] // _LEAST_PARCELS, _LEAST_BYTES))
        if key not in open_ones or filled[key] + num_bytes > most:
            open_ones[key], filled[key] = [], 0
            bundles.append(open_ones[key])
        open_ones[key].append(member)
        filled[key] += num_bytes
    return [Parcel(bundle, moves, mesh) for bundle in bundles]


def _sent(way: Sequence[AxisMove], shape: Sequence[int]) -> list[AxisMove]:
    """The moves between several devices; none where all of them are within each."""
    steps = [step for step in way if shape[step.axis] > 1 and step.before != step.after]
    return steps if any(kind_of(step) != "local" for step in steps) else []


def _is_sum(steps: Sequence[AxisMove]) -> bool:
    """Whether all of them add up, each along another axis."""
    return {kind_of(step) for step in steps} <= _SUMS and len({step.axis for step in steps}) == len(steps)


def _is_gather(steps: Sequence[AxisMove]) -> bool:
    return {kind_of(step) for step in steps} == {"all-gather"} and len({step.axis for step in steps}) == len(steps)
