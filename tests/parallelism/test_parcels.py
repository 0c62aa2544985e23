"""Tensors that share a transfer arrive as each does alone, by collectives."""

from __future__ import annotations

import math
from collections import Counter
from random import Random

import torch
from torch.distributed.device_mesh import init_device_mesh

from torch_xmesh.group import reshards_of
from torch_xmesh.parallelism.conversions import AxisMove
from torch_xmesh.parallelism.loops import PARTIAL, REPLICATED
from torch_xmesh.parallelism.running.collectives import Moves
from torch_xmesh.parallelism.running.parcels import Member, parcels_of
from torch_xmesh.parallelism.space import CollectiveUse
from torch_xmesh.pipeline.ranks.transfers import Transfers
from torch_xmesh.spec import mesh_grid
from torch_xmesh.testing import spawn


def some_way(random: Random, num_dims: int) -> tuple[AxisMove, ...]:
    """Moves along one axis or both, of gradients to parameters, of parameters to who reads them, or any; moves along
    both keep their dims, so that each may come first."""
    axes = random.sample(range(2), random.choice([0, 1, 1, 2, 2]))
    kind = random.choice(["sum", "sum", "gather", "any"])
    out = []
    for axis in axes:
        dim = random.randrange(num_dims)
        if kind == "sum":
            out.append(AxisMove(axis, PARTIAL, random.choice([REPLICATED, dim])))
        elif kind == "gather":
            out.append(AxisMove(axis, dim, REPLICATED))
        else:
            out.append(AxisMove(axis, *random.choice([(dim, (dim + 1) % num_dims), (PARTIAL, dim)])))
    held = [dim for step in out for dim in {step.before, step.after} if dim >= 0]
    return tuple(out) if kind != "any" or len(held) == len(set(held)) else tuple(out[:1])


def arrive(rank: int, world_size: int, shape: tuple[int, int]) -> None:
    mesh = init_device_mesh("cpu", shape)
    seen: list[CollectiveUse] = []
    grid, moves = mesh_grid(mesh), Moves(mesh, seen.append)
    transfers = Transfers(reshards_of(None), grid.ranks)
    transfers.traffic.meet([])
    shared: Counter[bool] = Counter()
    for seed in range(40):
        random = Random(seed)
        own = torch.Generator().manual_seed(100 * seed + rank)
        members, parts = [], []
        for number in range(random.randrange(4, 16)):
            dims = tuple(4 * random.randrange(1, 4) for _ in range(random.randrange(2, 4)))
            dtype = random.choice([torch.float64, torch.float32])
            way = some_way(random, len(dims))
            members.append(Member(str(number), dims, dtype, way))
            parts.append(torch.randint(-9, 9, dims, generator=own).to(dtype))
        found = parcels_of(members, moves, grid)
        by_name = dict(zip((member.name for member in members), parts, strict=True))
        sent = [
            parcel.start(transfers, f"{seed}/{number}", [by_name[member.name] for member in parcel.members], "gradient")
            for number, parcel in enumerate(found)
        ]
        moved: dict[str, torch.Tensor | None] = {}
        for one in sent:
            moved.update(zip((member.name for member in one.parcel.members), one.wait(), strict=True))
        told = Counter(seen)
        seen.clear()
        for parcel in found:
            stacked = math.prod(moves.shape) // math.prod(moves.shape[step.axis] for step in parcel.members[0].way)
            num_held = sum(math.prod(member.shape) for member in parcel.members)
            if not parcel.is_sum:
                num_held *= math.prod(moves.shape) // stacked
            if not parcel.is_packed:
                continue
            (move,) = parcel.moves
            flags = math.prod(move.src.shape[:-1]) * len(parcel.members) * parcel.is_sum
            assert move.src.shape.numel() == stacked * num_held + flags
        alone: Counter[CollectiveUse] = Counter()
        for member, part in zip(members, parts, strict=True):
            expected = moves.run(part, member.way, member.name, "gradient")
            if member.name in moved:
                alone.update(seen)
                assert tuple(expected.shape) == moves.shape_after(member.shape, member.way)
                torch.testing.assert_close(moved[member.name], expected, rtol=0, atol=0, msg=f"{seed}: {member}")
            else:
                assert not seen, "what is in no parcel leaves no device"
            seen.clear()
        assert told == alone
        shared.update(len(parcel.members) > 1 for parcel in found)
    assert min(shared[True], shared[False]) > 10, shared


def test_arrive_as_by_collectives() -> None:
    spawn(arrive, 4, (2, 2))
    spawn(arrive, 4, (1, 4))


def sum_some(rank: int, world_size: int) -> None:
    """A gradient that no device has is None, one that some have is their sum."""
    mesh = init_device_mesh("cpu", (world_size,))
    grid, moves = mesh_grid(mesh), Moves(mesh)
    transfers = Transfers(reshards_of(None), grid.ranks)
    transfers.traffic.meet([])
    for kept in (torch.ones(2, 4), None):
        (alone,) = parcels_of([Member("alone", (2, 4), torch.float32, (AxisMove(0, 0, 1),))], moves, grid)
        (found,) = alone.start(transfers, "alone", [kept if rank == 2 else None], "gradient").wait()
        assert (found is None) is (kept is None)
        assert found is None or found.tolist() == [[0.0]] * 4 + [[1.0]] * 2 + [[0.0]] * 2
    for after in (REPLICATED, 0):
        way = (AxisMove(0, PARTIAL, after),)
        (parcel,) = parcels_of([Member(name, (4,), torch.float32, way) for name in "abc"], moves, grid)
        part = torch.full((4,), 1.0 + rank)
        sent = parcel.start(transfers, f"to {after}", [part, None, part if rank == 1 else None], "gradient")
        everywhere, nowhere, somewhere = sent.wait()
        length = 4 if after == REPLICATED else 4 // world_size
        assert nowhere is None
        torch.testing.assert_close(everywhere, torch.full((length,), float(math.comb(world_size + 1, 2))))
        torch.testing.assert_close(somewhere, torch.full((length,), 2.0))


def test_sums_of_what_some_have() -> None:
    spawn(sum_some, 4)


def is_filled(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    way = (AxisMove(0, PARTIAL, REPLICATED),)
    for numel, count, filled in (
        (1 << 18, 65, [*(16 * [4]), 1]),  # 1 MiB each: 4 MiB
        (1 << 18, 9, 9 * [1]),  # an eighth of all
        (1 << 10, 40, [32, 8]),  # no less than 128 KiB
    ):
        members = [Member(str(number), (numel,), torch.float32, way) for number in range(count)]
        found = parcels_of(members, Moves(mesh), mesh_grid(mesh))
        assert [len(parcel.members) for parcel in found] == filled
        assert [member for parcel in found for member in parcel.members] == members


def test_a_parcel_is_filled_in_order() -> None:
    spawn(is_filled, 2)
