"""The backend ``emunccl`` of the emulated device, between processes. Each test's body runs in ranks of its own."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from torch_xmesh.testing import World, mark, spawn

pytestmark = pytest.mark.timeout(900)  # the first test builds the device
REPETITIONS = 30
NUM_ELEMENTS = 100_000  # more than a lane's ring holds


def on_ranks(body: Callable[[int, int], None], world_size: int, **options: Any) -> None:
    spawn(_run, world_size, body, backend=None, timeout=60, **options)


def _run(rank: int, world_size: int, body: Callable[[int, int], None]) -> None:
    _join(rank, world_size)
    body(rank, world_size)
    dist.destroy_process_group()
    import emu_device

    assert emu_device.communicators() == 0


def _join(rank: int, world_size: int, seconds: float = 60) -> None:
    import emu_device  # noqa: F401  # registers the backend

    dist.init_process_group("cpu:gloo,emu:emunccl", timeout=timedelta(seconds=seconds))


def _backend() -> Any:
    return dist.group.WORLD._get_backend(torch.device("emu"))  # type: ignore[union-attr]


def _produced(value: float) -> torch.Tensor:
    return torch.full((NUM_ELEMENTS,), float(value), device="emu")


def _exchange(rank: int, world_size: int, turn: int, waits: bool) -> bool:
    """All ranks exchange what a gated producer makes; whether what was received is right."""
    import emu_device

    received = [_produced(-1) for _ in range(world_size)]
    sent = _produced(-2)
    torch.accelerator.synchronize()
    gate = emu_device.hold()
    sent.fill_(100 * turn + rank)
    operations = []
    for peer in range(world_size):
        if peer != rank:
            operations += [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received[peer], peer)]
    (work,) = dist.batch_isend_irecv(operations)
    assert not work.is_completed()
    if waits:
        work.wait()
        gate.release()
        seen = [tensor * 1 for tensor in received]
    else:
        reader = emu_device.own_stream()
        with reader:
            seen = [tensor * 1 for tensor in received]
        reader.synchronize()
        gate.release()
        work.wait()
    right = all(bool(seen[peer].cpu().eq(100 * turn + peer).all()) for peer in range(world_size) if peer != rank)
    torch.accelerator.synchronize()
    assert work.is_completed()
    return right


def gated_exchanges(rank: int, world_size: int) -> None:
    for waits in (True, False):
        results = [_exchange(rank, world_size, turn, waits) for turn in range(REPETITIONS)]
        assert results == [waits] * REPETITIONS, (waits, results)


@pytest.mark.parametrize("world_size", [2, 4])
def test_an_exchange_is_right_with_wait_and_wrong_without(world_size: int) -> None:
    on_ranks(gated_exchanges, world_size)


def collectives(rank: int, world_size: int) -> None:
    import emu_device

    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        x = torch.full((NUM_ELEMENTS,), rank + 1, device="emu", dtype=dtype)
        dist.all_reduce(x)
        assert x.eq(world_size * (world_size + 1) // 2).all().item()
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    y = torch.full((7,), float(rank), device="emu")
    work = dist.broadcast(y, world_size - 1, async_op=True)
    assert work is not None
    work.wait()
    assert y.eq(world_size - 1).all().item()
    parts = [torch.empty(3, device="emu") for _ in range(world_size)]
    dist.all_gather(parts, torch.full((3,), float(rank), device="emu"))
    assert [int(part[0].item()) for part in parts] == list(range(world_size))
    whole = torch.empty(2 * world_size, device="emu")
    dist.all_gather_into_tensor(whole, torch.full((2,), float(rank), device="emu"))
    assert whole[::2].tolist() == list(range(world_size))
    many = torch.arange(2.0 * world_size, device="emu") + rank
    own = torch.empty(2, device="emu")
    dist.reduce_scatter_tensor(own, many)
    ranks = world_size * (world_size - 1) // 2
    assert own.tolist() == [world_size * (2 * rank + i) + ranks for i in range(2)]
    dist.reduce_scatter(own, list(many.view(world_size, 2)), op=dist.ReduceOp.AVG)
    assert own.tolist() == [2 * rank + i + ranks / world_size for i in range(2)]
    turned = torch.empty_like(many)
    dist.all_to_all_single(turned, many)
    assert turned.tolist() == [2 * rank + i + peer for peer in range(world_size) for i in range(2)]
    dist.all_to_all(list(turned.view(world_size, 2)), list(many.view(world_size, 2)))
    assert turned.tolist() == [2 * rank + i + peer for peer in range(world_size) for i in range(2)]
    uneven = torch.full((world_size * (world_size + 1) // 2,), float(rank), device="emu")
    splits = list(range(1, world_size + 1))
    found = torch.empty(world_size * (rank + 1), device="emu")
    dist.all_to_all_single(found, uneven, [rank + 1] * world_size, splits)
    assert found.tolist() == [float(peer) for peer in range(world_size) for _ in range(rank + 1)]
    assert emu_device.communicators() == 1
    dist.barrier()
    neighbour = rank ^ 1
    first, second = (dist.send, dist.recv) if rank < neighbour else (dist.recv, dist.send)
    z = torch.full((9,), float(rank), device="emu")
    first(z, neighbour)
    second(z, neighbour)
    assert z.eq(min(rank, neighbour)).all().item()
    assert emu_device.communicators() == 2  # a lone send or recv has a communicator for its two ranks
    work = dist.all_reduce(torch.ones(5, device="emu"), async_op=True)
    assert work is not None
    future = work.get_future()
    future.wait()
    assert future.value()[0].eq(world_size).all().item()


def test_collectives() -> None:
    on_ranks(collectives, 2)


def null_work(rank: int, world_size: int) -> None:
    options = dist.BroadcastOptions()
    options.rootRank, options.asyncOp = 0, False
    x = torch.full((8,), float(rank + 5), device="emu")
    assert _backend().broadcast([x], options) is None
    assert x.eq(5).all().item()


def test_synchronous_collectives_have_no_work() -> None:
    on_ranks(null_work, 2)


def stash(rank: int, world_size: int) -> None:
    import emu_device

    _backend().eager_connect_single_device(torch.device("emu:0"))
    assert emu_device.communicators() == 1
    before = emu_device.memory()["live"]
    gate = emu_device.hold()
    work = dist.all_reduce(_produced(1.0), async_op=True)
    assert work is not None
    assert emu_device.memory()["live"] >= before + NUM_ELEMENTS * 4  # the work keeps it
    gate.release()
    work.wait()
    assert emu_device.memory()["live"] == before
    transposed = torch.ones(4, 8, device="emu")[:, ::2]
    with pytest.raises(RuntimeError, match="non-overlapping and dense"):
        dist.send(transposed, 1 - rank)


def test_a_work_keeps_its_tensors_until_it_is_waited_for() -> None:
    on_ranks(stash, 2)


def independent(rank: int, world_size: int) -> None:
    # Both ranks of a group post messages of both directions; another order on either side does not matter.
    sent = [_produced(10.0 * rank + i) for i in range(2)]
    received = [_produced(-1) for _ in range(2)]
    sends = [dist.P2POp(dist.isend, tensor, 1 - rank) for tensor in sent]
    receives = [dist.P2POp(dist.irecv, tensor, 1 - rank) for tensor in received]
    for work in dist.batch_isend_irecv(sends + receives if rank == 0 else receives + sends):
        work.wait()
    for i, tensor in enumerate(received):
        assert tensor.eq(10 * (1 - rank) + i).all().item()


def test_messages_of_a_group_are_independent() -> None:
    on_ranks(independent, 2)


def triangle(rank: int, world_size: int, times: int) -> None:
    """Rank 0 sends to 1 and receives from 2 in one group; 1 sends to 2, and 2 to 0, after each has received."""
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    sends = [dist.P2POp(dist.isend, _produced(1.0), after) for _ in range(times if rank == 0 else 1)]
    receives = [dist.P2POp(dist.irecv, _produced(-1.0), before) for _ in range(times if rank == 1 else 1)]
    works = []
    for group in [sends + receives] if rank == 0 else [receives, sends]:
        works += dist.batch_isend_irecv(group)
    if times == 1:
        for work in works:
            work.wait()
        assert all(receive.tensor.eq(1).all().item() for receive in receives)
        return
    with pytest.raises(RuntimeError, match="timed out"):
        works[-1].wait(timedelta(milliseconds=300))
    store = dist.distributed_c10d._get_default_store()
    store.set(f"stuck {rank}", "")
    store.wait([f"stuck {other}" for other in range(world_size)])
    _backend().abort()


@pytest.mark.parametrize("times", [1, 2])
def test_the_second_message_of_a_pair_waits_for_all_first_ones(times: int) -> None:
    on_ranks(partial(triangle, times=times), 3)


def deadlock(rank: int, world_size: int) -> None:
    import emu_device

    # Both send first: a rendezvous without buffering never comes, however small the messages.
    x = torch.ones(1, device="emu")
    y = torch.ones(1, device="emu")
    works = [_backend().send([x], 1 - rank, 0), _backend().recv([y], 1 - rank, 0)]
    time.sleep(0.3)
    assert not any(work.is_completed() for work in works)
    aborter = threading.Thread(target=_backend().abort)
    aborter.start()
    torch.accelerator.synchronize()
    aborter.join()
    assert all(work.is_completed() for work in works)
    assert f"rank {rank} waited for rank {1 - rank}" in (emu_device.work_error(works[0]) or "")
    works[0].wait()
    with pytest.raises(RuntimeError, match="has been aborted"):
        _backend().send([x], 1 - rank, 0)


def test_abort_ends_a_deadlock() -> None:
    on_ranks(deadlock, 2)


def sizes_differ(rank: int, world_size: int) -> None:
    import emu_device

    x = torch.ones(10 + rank, device="emu")
    work = (_backend().send if rank == 0 else _backend().recv)([x], 1 - rank, 0)
    with pytest.raises(RuntimeError, match="rank 0 sends 40 bytes"):
        torch.accelerator.synchronize()
    assert work.is_completed()
    error = emu_device.work_error(work) or ""
    assert "rank 0 sends 40 bytes where rank 1 receives 44 bytes" in error, error


def test_different_sizes_are_named() -> None:
    on_ranks(sizes_differ, 2)


def timeouts(rank: int, world_size: int) -> None:
    _backend().eager_connect_single_device(torch.device("emu:0"))
    if rank == 0:
        work = _backend().allreduce([torch.ones(3, device="emu")])
        with pytest.raises(RuntimeError, match="timed out after 200 ms on rank 0"):
            work.wait(timedelta(milliseconds=200))


def test_a_wait_with_a_timeout_blocks_and_raises() -> None:
    on_ranks(timeouts, 2)


def creation_times_out(rank: int, world_size: int) -> None:
    _join(rank, world_size, seconds=1)
    if rank == 0:
        with pytest.raises(RuntimeError, match="making a communicator of ranks 0, 1 on rank 0 timed out"):
            _backend().allreduce([torch.ones(3, device="emu")])


def test_making_a_communicator_times_out() -> None:
    spawn(creation_times_out, 2, backend=None, timeout=60)


def plain_thread(rank: int, world_size: int) -> None:
    import emu_device

    assert emu_device.exchange_on_plain_thread(_backend()) == ""


def test_a_plain_thread_needs_no_python() -> None:
    on_ranks(plain_thread, 2)


def leaves(rank: int, world_size: int, how: str) -> None:
    import emu_device

    _join(rank, world_size, seconds=2)  # what leaving may wait for
    x = _produced(1.0)
    dist.all_reduce(x)
    torch.accelerator.synchronize()
    if how == "held":
        emu_device.hold(max_ms=600_000)
        _backend().allreduce([x])
    elif how == "waiting":
        _backend().recv([x], 1 - rank, 0)
    elif rank == 0:
        _backend().allreduce([x])
    else:
        mark("dies")
        os._exit(9)


@pytest.mark.parametrize("how", ["held", "waiting"])
def test_ranks_end_whatever_waits(how: str) -> None:
    spawn(leaves, 2, how, backend=None, timeout=60)


def test_a_rank_ends_though_its_peer_has_died() -> None:
    with World(leaves, 2, "killed", backend=None) as world:
        outcomes = world.join(timeout=30)
    assert [outcome.exitcode for outcome in outcomes] == [0, 9], outcomes
