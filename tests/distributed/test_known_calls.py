"""Calls whose arguments were seen before: new data each time, and whatever differs from the call before is seen."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from layouts import assert_same_bytes, dtensor_of, expected_of, random_layout, source_of
from torch.distributed.tensor import DTensor, Replicate, Shard

import torch_xmesh as xm
from torch_xmesh import resharding
from torch_xmesh.group import reshards_of
from torch_xmesh.testing import spawn

FRONT, BACK = xm.Mesh([0, 1]), xm.Mesh([2, 3])


def tensor(rank: int, value: float, shape: tuple[int, ...] = (4, 3), requires_grad: bool = False) -> DTensor:
    rows = shape[0] // 2 if rank in FRONT.ranks else 0
    local = torch.full((rows, *shape[1:]) if rows else [0] * len(shape), value)
    made = dtensor_of(local, shape, FRONT, (Shard(0),))
    made.requires_grad_(requires_grad)
    return made


def expect(y: Any, rank: int, value: float, shape: tuple[int, ...] = (4, 3)) -> None:
    if rank in BACK.ranks:
        assert torch.equal(y.to_local(), torch.full(shape, value))


def one_by_one_and_many(rank: int, world_size: int) -> None:
    """Few layouts in random order, alone and in dicts of changing order, into new and into given tensors."""
    rng = random.Random(11)
    layouts = [random_layout(rng, world_size) for _ in range(8)]
    held: dict[tuple[int, ...], Any] = {}
    for _ in range(60):
        chosen = tuple(sorted(rng.sample(range(len(layouts)), rng.choice([1, 1, 2, 3]))))
        names = list(chosen)
        random.Random(rng.random() + rank).shuffle(names)  # on each rank in another order
        sources = {f"layer {i}": source_of(layouts[i], as_spec=True) for i in names}
        meshes = {f"layer {i}": layouts[i].dst_mesh for i in names}
        placements = {f"layer {i}": layouts[i].dst for i in names}
        out = held.get(chosen) if rng.random() < 0.4 else None
        if len(chosen) == 1:
            (name,) = sources
            given = None if out is None else out[name]
            moved = {name: xm.reshard(sources[name], meshes[name], placements[name], out=given)}
        else:
            moved = xm.reshard_many(sources, meshes, placements, out=out)
            assert list(moved) == list(sources)
        for i in chosen:
            assert_same_bytes(moved[f"layer {i}"].to_local(), expected_of(layouts[i]), layouts[i])
        if out is not None:
            assert all(moved[name] is out[name] for name in moved)
        else:
            held[chosen] = {f"layer {i}": moved[f"layer {i}"] for i in reversed(chosen)}


def are_not_checked_twice(rank: int, world_size: int) -> None:
    def no_more(*arguments: Any) -> Any:
        raise AssertionError("the arguments were looked at one by one")

    def calls(value: float) -> list[Any]:
        xs = {"a": tensor(rank, value), "b": tensor(rank, value + 1)}
        into = dtensor_of(torch.zeros((4, 3) if rank in BACK.ranks else (0, 0)), (4, 3), BACK, (Replicate(),))
        with_grad = tensor(rank, value, requires_grad=True)
        done = [
            xm.reshard(tensor(rank, value), BACK, [Replicate()]),
            *xm.reshard_many(xs, {"a": xm.Mesh([2, 3]), "b": BACK}, (Replicate(),)).values(),
            xm.reshard(tensor(rank, value), BACK, [Replicate()], out=into),
            xm.reshard(with_grad, BACK, [Replicate()]),
            xm.reshard_many([tensor(rank, value)], BACK, [Replicate()], async_op=True)[0][0],
        ]
        (done[4].to_local().sum() * value).backward()
        if rank in FRONT.ranks:
            assert isinstance(with_grad.grad, DTensor)
            assert torch.equal(with_grad.grad.to_local(), torch.full((2, 3), value))
        dist.barrier()
        return done

    calls(1.0)
    with mock.patch.object(resharding, "TensorTree", no_more):
        for value in (5.0, 9.0):
            for y, wanted in zip(calls(value), (0, 0, 1, 0, 0, 0), strict=True):
                expect(y, rank, value + wanted)


def changes_are_seen(rank: int, world_size: int) -> None:
    """Every call differs from the one before in one respect."""
    xm.reshard(tensor(rank, 1.0), BACK, [Replicate()])
    assert xm.reshard(tensor(rank, 2.0), BACK, [Replicate()]).requires_grad is False
    y = xm.reshard(tensor(rank, 3.0, requires_grad=True), BACK, [Replicate()])
    assert y.requires_grad
    with torch.no_grad():
        assert not xm.reshard(tensor(rank, 3.0, requires_grad=True), BACK, [Replicate()]).requires_grad
    expect(xm.reshard(tensor(rank, 4.0, (8, 3)), BACK, [Replicate()]), rank, 4.0, (8, 3))
    y = xm.reshard(tensor(rank, 5.0), BACK, [Shard(-1)])
    assert y.placements == (Shard(1),)
    y = xm.reshard(tensor(rank, 6.0), BACK, [Replicate()], strategy="broadcast", topology=xm.Topology(latency_us=3))
    expect(y, rank, 6.0)
    for n in (1, 2):
        xm.reshard_many({"a": tensor(rank, 1.0), "n": n}, BACK, [Replicate()])
    with pytest.raises(ValueError, match=r"ranks disagree on entry \['n'\]"):
        xm.reshard_many({"a": tensor(rank, 1.0), "n": "1" if rank == 2 else 2}, BACK, [Replicate()])
    into = xm.reshard(tensor(rank, 1.0), BACK, [Replicate()])
    xm.reshard(tensor(rank, 1.0), BACK, [Replicate()], out=into)
    with pytest.raises(ValueError, match="requires grad: detach it first"):
        xm.reshard(tensor(rank, 1.0), BACK, [Replicate()], out=into.requires_grad_())
    expect(xm.reshard(tensor(rank, 7.0), BACK, [Replicate()]), rank, 7.0)


def results_lie_on_the_mesh_that_was_given(rank: int, world_size: int) -> None:
    first, second = (dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")) for _ in range(2))
    for mesh in (first, second, first, second):
        y = xm.reshard(tensor(rank, 1.0), mesh, [Replicate(), Shard(0)])
        assert y.device_mesh is mesh
        assert torch.equal(y.full_tensor(), torch.ones(4, 3))
        x = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0), Replicate()], run_check=False)
        x.requires_grad_()
        (gradient,) = torch.autograd.grad(xm.reshard(x, BACK, [Replicate()]).to_local().sum(), x)
        assert isinstance(gradient, DTensor)
        assert gradient.device_mesh is mesh


def memory_is_looked_at_each_time(rank: int, world_size: int) -> None:
    """On the ranks of one mesh: rows 0 to 3 go to other rows of the same tensor."""
    if rank not in FRONT.ranks:
        return
    whole = torch.arange(24.0).reshape(8, 3)

    def rows(first: int) -> DTensor:
        return dtensor_of(whole[first : first + 4], (4, 3), FRONT, (Replicate(),))

    xm.reshard(rows(0), FRONT, [Replicate()], out=rows(4))
    with pytest.raises(ValueError, match="shares memory with a source"):
        xm.reshard(rows(0), FRONT, [Replicate()], out=rows(2))
    whole[:4] += 1
    xm.reshard(rows(0), FRONT, [Replicate()], out=rows(4))
    assert torch.equal(whole[4:], whole[:4])


def what_differs_in_containers_is_seen(rank: int, world_size: int) -> None:
    """One object given twice, one call for a list and one for a tensor, equal meshes that are ever other objects."""
    a, b = tensor(rank, 1.0), tensor(rank, 2.0)
    first, second = (xm.reshard(x, BACK, [Replicate()]) for x in (a, b))
    if rank in BACK.ranks:
        with pytest.raises(ValueError, match="shares memory with out= of tensor 1"):
            xm.reshard_many([a, b], BACK, [Replicate()], out=[first, first])
    else:
        with pytest.raises(ValueError, match="shares memory"):
            xm.reshard_many([a, b], BACK, [Replicate()], out=[first, second])
    y, z = xm.reshard_many([a, b], BACK, [Replicate()], out=[first, second])
    assert y is first
    assert z is second
    expect(y, rank, 1.0)
    expect(z, rank, 2.0)
    xm.reshard_many([[a, b]], BACK, [Replicate()])
    with pytest.raises(ValueError, match="expected a DTensor or an xm.Spec, got list"):
        xm.reshard([a, b], BACK, [Replicate()])  # type: ignore[arg-type]
    world = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    known = len(reshards_of(None).calls._calls)
    for value in range(5):
        mesh = world["b"]
        if rank in FRONT.ranks:
            x = DTensor.from_local(torch.full((2,), float(value)), mesh, [Shard(0)], run_check=False)
            y = xm.reshard(x, mesh, [Replicate()])
            assert y.device_mesh is mesh
            assert torch.equal(y.to_local(), torch.full((4,), float(value)))
    assert len(reshards_of(None).calls._calls) <= known + 1


def everything(rank: int, world_size: int) -> None:
    one_by_one_and_many(rank, world_size)
    are_not_checked_twice(rank, world_size)
    changes_are_seen(rank, world_size)
    results_lie_on_the_mesh_that_was_given(rank, world_size)
    memory_is_looked_at_each_time(rank, world_size)
    what_differs_in_containers_is_seen(rank, world_size)


def test_calls_seen_before() -> None:
    spawn(everything, 4)
