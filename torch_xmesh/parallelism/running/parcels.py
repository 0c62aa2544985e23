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
from torch_xmesh.parallelism.loops import REPLICATED
from torch_xmesh.parallelism.running.collectives import Moves, kind_of
from torch_xmesh.pipeline.ranks.transfers import Pending, Transfers
from torch_xmesh.plan_cache import Move
from torch_xmesh.spec import Mesh

_PARCEL_BYTES = 4 << 20
"""The most that share a parcel, if it is not one tensor: soon enough full, so that much of a backward is left when the
first ones leave."""
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
        kinds = [kind_of(step) for step in self._steps[0]]
        self.is_sum = set(kinds) <= _SUMS
        self._is_packed = self.is_sum or set(kinds) == {"all-gather"}
        self._blocks = [moves.shape[step.axis] for step in self._steps[0] if kind_of(step) != "all-reduce"]
        self.move = self._packed_move() if self._is_packed else self._own_move()

    @staticmethod
    def key(member: Member, shape: Sequence[int]) -> tuple[Any, ...]:
        """Equal for members that may share a parcel."""
        kinds = tuple((step.axis, kind_of(step)) for step in _sent(member.way, shape))
        names = {kind for _, kind in kinds}
        alone = () if names <= _SUMS or names == {"all-gather"} else (member.name,)
        return (member.dtype, kinds, *alone)

    def _packed_move(self) -> Move:
        steps, shape = self._steps[0], self._moves.shape
        moving = [step.axis for step in steps]
        still = [axis for axis in range(len(shape)) if axis not in moving and shape[axis] > 1]
        numel = sum(math.prod(member.shape) for member in self.members)
        if self.is_sum:
            numel = numel // math.prod(self._blocks) + len(self.members)
        src: list[Placement] = [Replicate()] * len(shape)
        dst: list[Placement] = [Replicate()] * len(shape)
        for place, axis in enumerate(still):
            src[axis] = dst[axis] = Shard(place)
        place = len(still)
        for step in steps:
            kind = kind_of(step)
            if kind == "all-reduce":
                src[step.axis] = Partial("sum")
                continue
            src[step.axis] = Partial("sum") if self.is_sum else Shard(place)
            dst[step.axis] = Shard(place) if self.is_sum else Replicate()
            place += 1
        whole = (*(shape[axis] for axis in still), *self._blocks, numel)
        self._lead = len(still)
        return Move.of(whole, self.members[0].dtype, (self._mesh, src), (self._mesh, dst))

    def _own_move(self) -> Move:
        (member,), shape = self.members, self._moves.shape
        before = [REPLICATED] * len(shape)
        after, seen = list(before), set[int]()
        for step in self._steps[0]:
            before[step.axis] = before[step.axis] if step.axis in seen else step.before
            after[step.axis] = step.after
            seen.add(step.axis)
        still = [axis for axis in range(len(shape)) if axis not in seen and shape[axis] > 1]
        self._lead = len(still)
        whole = [*(shape[axis] for axis in still), *member.shape]
        ends: list[list[Placement]] = [[], []]
        for axis, size in enumerate(shape):
            if before[axis] >= 0:
                whole[before[axis] + self._lead] *= size
            for placements, state in zip(ends, (before, after), strict=True):
                if axis in still:
                    placements.append(Shard(still.index(axis)))
                elif state[axis] >= 0:
                    placements.append(Shard(state[axis] + self._lead))
                else:
                    placements.append(Replicate() if state[axis] == REPLICATED else Partial("sum"))
        return Move.of(whole, member.dtype, (self._mesh, ends[0]), (self._mesh, ends[1]))

    def start(self, transfers: Transfers, lane: str, parts: Sequence[torch.Tensor | None], why: str) -> "Sent":
        """Its members' parts leave, in order; None of a sum is zero, and None of all devices comes as None."""
        for member, steps in zip(self.members, self._steps, strict=True):
            self._moves.tell(steps, math.prod(member.shape) * member.dtype.itemsize, member.name, why)
        return Sent(self, transfers.start(lane, [self.move], [self._pack(parts)]))

    def _pack(self, parts: Sequence[torch.Tensor | None]) -> torch.Tensor:
        lead = (1,) * self._lead
        if not self._is_packed:
            (part,), (member,) = parts, self.members
            return (torch.zeros(member.shape, dtype=member.dtype) if part is None else part).reshape(
                *lead, *member.shape
            )
        if not self.is_sum:
            flat = [part.reshape(-1) for part in parts if part is not None]
            return (flat[0] if len(flat) == 1 else torch.cat(flat)).view(*lead, *(1 for _ in self._blocks), -1)
        pieces = [
            torch.zeros(math.prod(member.shape), dtype=member.dtype).view(*self._blocks, -1)
            if part is None
            else self._in_blocks(part, steps)
            for part, member, steps in zip(parts, self.members, self._steps, strict=True)
        ]
        has = torch.tensor([part is not None for part in parts], dtype=self.members[0].dtype)
        return torch.cat([*pieces, has.expand(*self._blocks, len(parts))], -1).view(*lead, *self._blocks, -1)

    def _in_blocks(self, part: torch.Tensor, steps: Sequence[AxisMove]) -> torch.Tensor:
        """One of a sum with an axis for each of its moves to parts."""
        depth = 0
        for step in steps:
            if kind_of(step) == "reduce-scatter":
                dim = step.after + depth
                sizes = self._moves.shape[step.axis], part.shape[dim] // self._moves.shape[step.axis]
                part = part.reshape(*part.shape[:dim], *sizes, *part.shape[dim + 1 :]).movedim(dim, depth)
                depth += 1
        return part.reshape(*self._blocks, -1)

    def unpack(self, received: torch.Tensor) -> list[torch.Tensor | None]:
        """The members' parts; memory of a sum's is shared among them."""
        received = received.flatten(0, self._lead - 1).squeeze(0) if self._lead else received
        if not self._is_packed:
            return [received]
        if self.is_sum:
            flat = received.reshape(-1)
            has = flat[-len(self.members) :].tolist()
            shapes = [self._moves.shape_after(member.shape, member.way) for member in self.members]
            sums = torch.split(flat[: -len(self.members)], [math.prod(shape) for shape in shapes])
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


@dataclasses.dataclass
class Sent:
    """A parcel on its way."""

    parcel: Parcel
    pending: Pending

    def wait(self) -> list[torch.Tensor | None]:
        """Its members' parts afterwards, in order."""
        (received,) = self.pending.wait()
        return self.parcel.unpack(received)


def parcels_of(members: Sequence[Member], moves: Moves, mesh: Mesh) -> list[Parcel]:
    """Those that have to leave a device, in order; what moves within each device alone is in none. A parcel is full
    before the next one of its kind begins."""
    open_ones: dict[Any, list[Member]] = {}
    filled: dict[Any, int] = {}
    bundles: list[list[Member]] = []
    for member in members:
        if not _sent(member.way, moves.shape):
            continue
        key, num_bytes = Parcel.key(member, moves.shape), math.prod(member.shape) * member.dtype.itemsize
        if key not in open_ones or filled[key] + num_bytes > _PARCEL_BYTES:
            open_ones[key], filled[key] = [], 0
            bundles.append(open_ones[key])
        open_ones[key].append(member)
        filled[key] += num_bytes
    return [Parcel(bundle, moves, mesh) for bundle in bundles]


def _sent(way: Sequence[AxisMove], shape: Sequence[int]) -> list[AxisMove]:
    """The moves between several devices; none where all of them are within each."""
    steps = [step for step in way if shape[step.axis] > 1 and step.before != step.after]
    return steps if any(kind_of(step) != "local" for step in steps) else []
