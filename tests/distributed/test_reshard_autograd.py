"""Gradients through reshards: the identity on the global tensor."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from layouts import Placements, assert_same_bytes, dtensor_of, local_part
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import torch_xmesh as xm
from torch_xmesh.group import reshards_of
from torch_xmesh.testing import spawn

FRONT, BACK = xm.Mesh([[0, 1], [2, 3]]), xm.Mesh([3, 4, 5])


def with_grad(x: DTensor) -> DTensor:
    x.requires_grad_()
    return x


def gradient_of(x: DTensor) -> DTensor:
    assert isinstance(x.grad, DTensor)
    return x.grad


def leaf(whole: torch.Tensor, mesh: xm.Mesh, placements: Placements, rank: int) -> DTensor:
    return with_grad(dtensor_of(local_part(whole, mesh, placements, rank), tuple(whole.shape), mesh, placements))


def check_gradient(x: DTensor, whole: torch.Tensor, mesh: xm.Mesh, placements: Placements, rank: int) -> None:
    gradient = gradient_of(x)
    if rank in mesh.ranks:
        assert_same_bytes(gradient.to_local(), local_part(whole, mesh, placements, rank), "gradient")


def gradient_comes_home(rank: int, world_size: int) -> None:
    whole = torch.arange(42.0).reshape(6, 7)
    x = leaf(whole, FRONT, (Shard(0), Shard(1)), rank)
    y = xm.reshard(x, BACK, (Shard(1),))
    assert y.requires_grad
    assert_same_bytes(y.to_local().detach(), local_part(whole, BACK, (Shard(1),), rank), "forward")
    weight = local_part(whole.square() + 1, BACK, (Shard(1),), rank)
    (y.to_local() * weight).sum().backward()
    assert gradient_of(x).placements == (Shard(0), Shard(1))
    check_gradient(x, whole.square() + 1, FRONT, (Shard(0), Shard(1)), rank)


def spec_on_ranks_without_data(rank: int, world_size: int) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    source = xm.Mesh([0, 1], device_type=whole.device.type)
    x = (
        leaf(whole, source, (Shard(0),), rank)
        if rank in source.ranks
        else xm.Spec((3, 4), torch.float32, source, (Shard(0),), requires_grad=True)
    )
    y = xm.reshard(x, BACK, (Replicate(),))
    y.to_local().sum().backward()
    if isinstance(x, DTensor) and rank in source.ranks:
        check_gradient(x, torch.ones(3, 4), source, (Shard(0),), rank)


def partial_source_and_partial_gradient(rank: int, world_size: int) -> None:
    """A Partial source's gradient comes as Replicate; a Partial gradient is reduced on the way."""
    source = xm.Mesh([0, 1])
    local = torch.full((4,), float(rank + 1)) if rank < 2 else torch.empty(0)
    x = with_grad(dtensor_of(local, (4,), source, (Partial("sum"),)))
    y = xm.reshard(x, BACK, (Replicate(),))
    if rank in BACK.ranks:
        assert torch.equal(y.to_local(), torch.full((4,), 3.0))
    scale = BACK.ranks.index(rank) + 1.0 if rank in BACK.ranks else 0.0
    (y.to_local(grad_placements=(Partial("sum"),)) * scale).sum().backward()
    assert gradient_of(x).placements == (Replicate(),)
    if rank in source.ranks:
        assert torch.equal(gradient_of(x).to_local(), torch.full((4,), 6.0))


ORDERS = [
    # Ranks that only receive, and only give; a graph that goes on behind the sources.
    (xm.Mesh([0, 1]), (Shard(0),), xm.Mesh([2, 3, 4, 5]), (Shard(0),), False),
    (xm.Mesh([0, 1]), (Shard(0),), xm.Mesh([2, 3, 4, 5]), (Shard(0),), True),
    # Ranks that do both, and pass on what others receive.
    (xm.Mesh([0, 1, 2, 3]), (Replicate(),), xm.Mesh([2, 3, 4, 5]), (Shard(0),), False),
    (xm.Mesh([[0, 1, 2], [3, 4, 5]]), (Replicate(), Shard(0)), xm.Mesh([5, 4, 3, 2, 1, 0]), (Shard(0),), False),
]


def backwards_in_any_order(rank: int, world_size: int) -> None:
    """Every rank runs the backwards of several calls in an order of its own.

    On a device only what ends with its source: what goes on there waits on the host for all ranks to make the call.
    """
    whole = torch.arange(24.0)
    for case, (source, src, target, dst, goes_on) in enumerate(ORDERS):
        if goes_on and whole.device.type != "cpu":
            continue
        xs = [leaf(whole + i, source, src, rank) for i in range(6)]
        ys = [xm.reshard(cast(DTensor, 3 * x) if goes_on else x, target, dst) for x in xs]
        order = list(range(6))
        random.Random(rank + 10 * case).shuffle(order)
        for i in order:
            (ys[i].to_local() * (i + 1)).sum().backward()
        for i, x in enumerate(xs):
            check_gradient(x, torch.full((24,), (i + 1.0) * (3 if goes_on else 1)), source, src, rank)


def gradients_are_ordinary_tensors(rank: int, world_size: int) -> None:
    """What is waited for late takes part in all that a gradient does."""
    mesh = xm.Mesh([0, 1, 2])
    x = leaf(torch.arange(12.0), mesh, (Shard(0),), rank)
    for _ in range(2):  # the second adds to the first
        xm.reshard(x, BACK, (Shard(0),)).to_local().sum().backward()
    gradient = gradient_of(x)
    back = xm.reshard(gradient, BACK, (Replicate(),))
    if rank in BACK.ranks:
        assert torch.equal(back.to_local(), torch.full((12,), 2.0))
    with torch.no_grad():
        torch.optim.SGD([x], lr=1.0).step()
    if rank in mesh.ranks:
        assert torch.equal(x.to_local(), local_part(torch.arange(12.0) - 2, mesh, (Shard(0),), rank))


def lists_with_integers(rank: int, world_size: int) -> None:
    """Only the tensors that require grad take part in backward; unused results count as zero gradient."""
    source, target = xm.Mesh([0]), xm.Mesh([1, 2])
    whole = torch.arange(6.0)
    a, b = (leaf(whole, source, (Replicate(),), rank) for _ in range(2))
    index = dtensor_of(local_part(torch.arange(6), source, (Replicate(),), rank), (6,), source, (Replicate(),))
    ya, yi, _ = xm.reshard_many([a, index, b], target, (Shard(0),))
    assert not yi.requires_grad
    ya.to_local().sum().backward()
    check_gradient(a, torch.ones(6), source, (Replicate(),), rank)
    check_gradient(b, torch.zeros(6), source, (Replicate(),), rank)


def asynchronous(rank: int, world_size: int) -> None:
    """Two in flight at once, waited for in the other order; one call's gradient stays in the graph before it."""
    whole = torch.arange(42.0).reshape(6, 7)
    x = leaf(whole, FRONT, (Shard(0), Shard(1)), rank)
    doubled: Any = 2 * x
    first, first_work = xm.reshard(doubled, BACK, (Shard(1),), async_op=True)
    second, second_work = xm.reshard(x, BACK, (Replicate(),), async_op=True)
    second_work.wait()
    first_work.wait()
    assert first.requires_grad
    assert second.grad_fn is not None
    assert_same_bytes(first.to_local().detach(), 2 * local_part(whole, BACK, (Shard(1),), rank), "first")
    assert_same_bytes(second.to_local().detach(), local_part(whole, BACK, (Replicate(),), rank), "second")
    (first.to_local() * local_part(whole, BACK, (Shard(1),), rank)).sum().backward()
    check_gradient(x, 2 * whole, FRONT, (Shard(0), Shard(1)), rank)
    with torch.no_grad():
        third, third_work = xm.reshard(x, BACK, (Shard(0),), async_op=True)
    third_work.wait()
    assert not third.requires_grad
    second.to_local(grad_placements=(Partial("sum"),)).sum().backward()
    check_gradient(x, 2 * whole + 3, FRONT, (Shard(0), Shard(1)), rank)


def refusals(rank: int, world_size: int) -> None:
    x = leaf(torch.ones(4), xm.Mesh([0, 1]), (Shard(0),), rank)
    out = dtensor_of(local_part(torch.zeros(4), BACK, (Shard(0),), rank), (4,), BACK, (Shard(0),))
    with pytest.raises(ValueError, match="out="):
        xm.reshard(x, BACK, (Shard(0),), out=out)
    with torch.no_grad():
        y = xm.reshard(x, BACK, (Shard(0),), out=out)
    assert not y.requires_grad
    y = xm.reshard(x, BACK, (Shard(0),))
    (gradient,) = torch.autograd.grad(y.to_local().square().sum(), x, create_graph=True)
    with pytest.raises(
        RuntimeError, match="once_differentiable|opt_ready_stream"
    ):  # the second by torch 2.15, on a device
        gradient.to_local().sum().backward()  # type: ignore[attr-defined]


def everything(rank: int, world_size: int) -> None:
    for check in (
        gradient_comes_home,
        spec_on_ranks_without_data,
        partial_source_and_partial_gradient,
        backwards_in_any_order,
        gradients_are_ordinary_tensors,
        lists_with_integers,
        asynchronous,
        refusals,
    ):
        check(rank, world_size)


def test_gradients() -> None:
    spawn(everything, 6)


def one_rank_runs_no_backward(rank: int, world_size: int) -> None:
    """The others do their part; what became of the call is told at the next one."""
    store: Any = dist.distributed_c10d._get_default_store()
    x = leaf(torch.ones(4), xm.Mesh([0, 1]), (Shard(0),), rank)
    y = xm.reshard(x, xm.Mesh([2]), (Shard(0),))
    if rank != 1:
        y.to_local().sum().backward()
        ((work, _),) = reshards_of(None).unwatched
        while not work.is_completed():
            pass
        with pytest.raises(xm.PeerError, match=r"(?s)backward of a reshard .*gradient of .*not called by rank \[1\]"):
            xm.reshard(cast(DTensor, x.detach()), xm.Mesh([2]), (Shard(0),))
    store.set(f"done{rank}", "")
    store.wait([f"done{other}" for other in range(world_size)], timedelta(seconds=60))


def test_a_backward_that_one_rank_does_not_run() -> None:
    spawn(one_rank_runs_no_backward, 3, init_kwargs={"timeout": timedelta(seconds=4)})
