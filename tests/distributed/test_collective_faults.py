"""A rank that dies, leaves or aborts while others are in a collective on cpu: all hear who it was, and go on."""

from __future__ import annotations

import datetime
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from faults import leave
from torch.distributed.tensor import DTensor, Replicate, Shard
from wait_until import wait_until

import torch_xmesh as xm
from torch_xmesh.backend import backend_of
from torch_xmesh.testing import World, mark, spawn

SIZE = 4

# By name: calls in which every other rank needs the last one. They return a Work.
CALLS: dict[str, Callable[[Any], Any]] = {
    "all_reduce": lambda group: dist.all_reduce(torch.ones(8), group=group, async_op=True),
    "all_reduce of much": lambda group: dist.all_reduce(torch.ones(1 << 20), group=group, async_op=True),
    "all_gather": lambda group: dist.all_gather(parts(), torch.ones(2), group=group, async_op=True),
    "all_gather_into_tensor": lambda group: dist.all_gather_into_tensor(
        torch.ones(2 * SIZE), torch.ones(2), group=group, async_op=True
    ),
    "broadcast": lambda group: dist.broadcast(torch.ones(8), SIZE - 1, group=group, async_op=True),
    "scatter": lambda group: dist.scatter(torch.ones(2), None, SIZE - 1, group=group, async_op=True),
    "reduce_scatter_tensor": lambda group: dist.reduce_scatter_tensor(
        torch.ones(2), torch.ones(2 * SIZE), group=group, async_op=True
    ),
    "all_to_all_single": lambda group: dist.all_to_all_single(
        torch.ones(SIZE), torch.ones(SIZE), group=group, async_op=True
    ),
    "barrier": lambda group: dist.barrier(group=group, async_op=True),
    "recv": lambda group: dist.irecv(torch.ones(8), SIZE - 1, group=group),
}


def parts() -> list[torch.Tensor]:
    return [torch.ones(2) for _ in range(SIZE)]


def peer_error(call: Callable[[], Any]) -> tuple[int, ...]:
    """The ranks that it blames."""
    with pytest.raises(xm.PeerError) as caught:
        call()
    assert all(f"{rank}" in str(caught.value) for rank in caught.value.ranks)
    return caught.value.ranks


def reshards_without(lost: set[int]) -> None:
    """The group's reshards go on among the ranks that are left."""
    left = sorted(set(range(SIZE)) - lost)
    source = xm.Mesh(left[:1])
    spec = xm.Spec((12, 2), torch.float32, source, (Replicate(),))
    if dist.get_rank() in source.ranks:
        x: Any = DTensor.from_local(torch.arange(24.0).view(12, 2), xm.device_mesh(source), (Replicate(),))
    else:
        x = spec
    y = xm.reshard(x, xm.Mesh(left), [Shard(0)])
    if dist.get_rank() in left:
        whole = torch.arange(24.0).view(12, 2).chunk(len(left))
        at = left.index(dist.get_rank())
        torch.testing.assert_close(y.to_local(), whole[at])


def in_a_call(rank: int, world_size: int, name: str, has_reshards: bool, of_subgroup: bool) -> Any:
    group = dist.new_group(range(world_size)) if of_subgroup else None
    dist.all_reduce(torch.ones(1), group=group)
    if has_reshards:
        reshards_without(set())
    if rank == world_size - 1:
        mark("inside")
        signal.pause()
    work = CALLS[name](group)
    mark("inside")
    blamed = peer_error(work.wait)
    if name != "recv":
        assert peer_error(lambda: dist.all_reduce(torch.ones(1), group=group)) == blamed
    reshards_without({world_size - 1})
    leave()
    return blamed


def killed(victims: list[int], fn: Any, *args: Any) -> list[Any]:
    """What the other ranks return, once all are inside and the victims dead. The group's timeout is half an hour."""
    with World(fn, SIZE, *args) as world:
        for rank in range(SIZE):
            world.wait_mark(rank, "inside")
        for victim in victims:
            world.signal(victim, signal.SIGKILL)
        outcomes = world.join(30)
        for outcome in outcomes:
            if outcome.rank not in victims:
                assert outcome.error is None, outcome.error
                assert outcome.exitcode == 0, outcome.output
        return [outcome.value for outcome in outcomes if outcome.rank not in victims]


@pytest.mark.parametrize("name", CALLS)
def test_all_hear_of_a_death(name: str) -> None:
    assert killed([3], in_a_call, name, True, False) == [(3,)] * 3


@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter_tensor", "barrier"])
def test_of_a_subgroup_that_has_not_resharded(name: str) -> None:
    assert killed([3], in_a_call, name, False, True) == [(3,)] * 3


def beside_a_death(rank: int, world_size: int, victims: list[int]) -> Any:
    dist.all_reduce(torch.ones(1))
    reshards_without(set())
    mark("inside")
    if rank in victims:
        signal.pause()
    blamed = peer_error(lambda: dist.all_reduce(torch.ones(8)))
    reshards_without(set(victims))
    return blamed


def test_of_the_rank_that_has_the_store() -> None:
    assert killed([0], beside_a_death, [0]) == [(0,)] * 3


def test_of_two_ranks() -> None:
    for blamed in killed([1, 3], beside_a_death, [1, 3]):
        assert blamed
        assert set(blamed) <= {1, 3}


# By name: calls of 64 MB with the last rank, one after the other.
STREAMS: dict[str, Callable[[torch.Tensor, int], Any]] = {
    "broadcast": lambda x, rank: dist.broadcast(x, SIZE - 1),
    "broadcast's future": lambda x, rank: dist.broadcast(x, SIZE - 1, async_op=True).get_future().wait(),
    "all_gather": lambda x, rank: dist.all_gather_into_tensor(x, x[: len(x) // SIZE].clone()),
    "send": lambda x, rank: dist.send(x, SIZE - 1 - rank) if rank == 0 else dist.recv(x, SIZE - 1 - rank),
    "recv": lambda x, rank: dist.recv(x, SIZE - 1 - rank) if rank == 0 else dist.send(x, SIZE - 1 - rank),
}


def in_the_midst(rank: int, world_size: int, name: str) -> Any:
    x = torch.ones(1 << 24)
    dist.barrier()
    if name in ("send", "recv") and 0 < rank < world_size - 1:
        mark("inside")
        return (world_size - 1,)

    def calls_for_ever() -> None:
        for number in itertools.count():
            STREAMS[name](x, rank)
            if number == 0:
                mark("inside")

    blamed = peer_error(calls_for_ever)
    leave()
    return blamed


@pytest.mark.parametrize("name", STREAMS)
def test_of_a_message_of_which_a_part_has_come(name: str) -> None:
    """gloo itself leaves such a call to its timeout."""
    try:
        blamed = killed([3], in_the_midst, name)
    except AssertionError as error:
        # After a failed all_gather gloo's thread may still send from memory that is gone, which ends the process.
        if name != "all_gather" or "Bad address" not in str(error):
            raise
        blamed = killed([3], in_the_midst, name)
    assert blamed == [(3,)] * 3


def raises_in_the_midst(rank: int, world_size: int) -> Any:
    """The last rank ends with an error of its own, and what it has begun is not done."""
    x = torch.ones(1 << 24)
    dist.barrier()
    if rank == world_size - 1:
        dist.broadcast(x, rank, async_op=True)
        mark("inside")
        sys.exit(1)
    mark("inside")
    return peer_error(lambda: [dist.broadcast(x, world_size - 1) for _ in itertools.count()])


def test_of_a_rank_that_ends_with_an_error() -> None:
    with World(raises_in_the_midst, SIZE, fresh=True) as world:
        for rank in range(SIZE - 1):
            outcome = world.wait(rank, 60)
            assert outcome.error is None, outcome.error
            assert outcome.value == (SIZE - 1,)


def gives_up_in_the_midst(rank: int, world_size: int, how: str) -> Any:
    """Two broadcasts are under way when the last rank dies; rank 0 has another thread abort them, or destroys the group
    when the first has failed."""
    x, y = torch.ones(1 << 24), torch.ones(1 << 24)
    dist.barrier()
    if rank == world_size - 1:
        mark("inside")
        for _ in itertools.count():
            works = [dist.broadcast(tensor, rank, async_op=True) for tensor in (x, y)]
            for work in works:
                work.wait()

    def calls_for_ever() -> None:
        for number in itertools.count():
            works = [dist.broadcast(tensor, world_size - 1, async_op=True) for tensor in (x, y)]
            if number == 0:
                mark("inside")
                if how == "abort" and rank == 0:
                    threading.Thread(target=backend_of().abort).start()
            for work in works:
                work.wait()

    with pytest.raises((xm.PeerError, RuntimeError)):
        calls_for_ever()
    dist.destroy_process_group()
    return "free"


@pytest.mark.parametrize("how", ["abort", "destroy"])
def test_who_gives_up_is_free(how: str) -> None:
    assert killed([3], gives_up_in_the_midst, how) == ["free"] * 3


def in_many_calls(rank: int, world_size: int) -> Any:
    """Works that nobody waits for, futures, two groups of the same ranks, a thread for each."""
    groups = [dist.group.WORLD, dist.new_group(range(world_size))]
    for group in groups:
        dist.all_reduce(torch.ones(1), group=group)
    if rank == world_size - 1:
        mark("inside")
        signal.pause()
    found: list[Any] = []

    def wait(group: Any) -> None:
        found.append(peer_error(lambda: dist.all_reduce(torch.ones(4), group=group)))

    works = [dist.all_reduce(torch.ones(8), group=group, async_op=True) for group in groups]
    future = dist.all_gather(parts(), torch.ones(2), async_op=True).get_future()
    threads = [threading.Thread(target=wait, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    mark("inside")
    found.append(peer_error(future.wait))
    for thread in threads:
        thread.join()
    wait_until(lambda: all(work.is_completed() for work in works))
    found += [peer_error(work.wait) for work in works]
    reshards_without({world_size - 1})
    leave()
    return found


def test_in_many_calls_at_once() -> None:
    assert killed([3], in_many_calls) == [[(3,)] * 5] * 3


def in_a_monitored_barrier(rank: int, world_size: int) -> Any:
    dist.all_reduce(torch.ones(1))
    mark("inside")
    if rank == world_size - 1:
        signal.pause()
    barrier: Any = dist.group.WORLD.monitored_barrier  # type: ignore[union-attr]  # dist.monitored_barrier asks for gloo by name
    return peer_error(lambda: barrier(datetime.timedelta(seconds=60), False))


def test_in_a_monitored_barrier() -> None:
    assert killed([3], in_a_monitored_barrier) == [(3,)] * 3


def leaves(rank: int, world_size: int, how: str) -> Any:
    """A rank that goes on living is named as one that has died is."""
    dist.all_reduce(torch.ones(1))
    if rank == world_size - 1:
        if how == "abort":
            backend_of().abort()
        else:
            dist.destroy_process_group()
        return (world_size - 1,)
    return peer_error(lambda: dist.all_reduce(torch.ones(8)))


@pytest.mark.parametrize("how", ["abort", "destroy"])
def test_a_rank_that_leaves(how: str) -> None:
    assert spawn(leaves, SIZE, how, timeout=30) == [(3,)] * 4


def aborted(rank: int, world_size: int, how: str) -> None:
    """Rank 1 never comes; whoever waits for it on the others is freed by them themselves."""
    group = dist.new_group(range(world_size))
    dist.all_reduce(torch.ones(1), group=group)
    store = dist.distributed_c10d._get_default_store()
    errors: list[BaseException] = []

    def wait(call: Callable[[], Any]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    if rank == 1:
        store.wait(["freed"], datetime.timedelta(seconds=60))
        return
    works = [
        dist.all_reduce(torch.ones(8), group=group, async_op=True),
        dist.irecv(torch.ones(8), 1, group=group),
        dist.all_reduce(torch.ones(8), async_op=True),
    ]
    threads = [threading.Thread(target=wait, args=(work.wait,)) for work in works]
    for thread in threads:
        thread.start()
    own = [backend_of(one) for one in (group, dist.group.WORLD)]
    if how == "backend":
        for backend in own:
            backend.abort()
    else:
        dist.distributed_c10d._abort_process_group()
    for thread in threads:
        thread.join()
    assert [type(error) for error in errors] == [RuntimeError] * 3, errors
    assert all("the process group was aborted on this rank" in str(error) for error in errors), errors
    store.set("freed", "")


@pytest.mark.parametrize("how", ["backend", "all"])
def test_abort_frees_who_waits(how: str) -> None:
    spawn(aborted, 2, how, timeout=30)


def goes_on_after_a_mistake(rank: int, world_size: int) -> None:
    """What is no sign of a death ends nothing: arguments that gloo refuses, a wait that its caller gives up."""
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(4), dist.ReduceOp.BAND)
    if rank == 0:
        work = dist.all_reduce(torch.ones(4), async_op=True)
        with pytest.raises(RuntimeError, match="timed out"):
            work.wait(datetime.timedelta(milliseconds=50))
        dist.distributed_c10d._get_default_store().set("given up", "")
    else:
        dist.distributed_c10d._get_default_store().wait(["given up"])
        work = dist.all_reduce(torch.ones(4), async_op=True)
    work.wait()
    total = torch.ones(4)
    dist.all_reduce(total)
    assert total.tolist() == [2.0] * 4


def test_goes_on_after_a_mistake() -> None:
    spawn(goes_on_after_a_mistake, 2, timeout=30)


def comes_too_late(rank: int, world_size: int) -> None:
    """Nobody has died: the error is gloo's own, at the timeout, with a type that says what it is about."""
    if rank == 0:
        with pytest.raises(dist.DistNetworkError, match="imed out"):
            dist.all_reduce(torch.ones(4))
        dist.distributed_c10d._get_default_store().set("given up", "")
    else:
        dist.distributed_c10d._get_default_store().wait(["given up"])


def test_comes_too_late() -> None:
    spawn(comes_too_late, 2, init_kwargs={"timeout": datetime.timedelta(seconds=1)}, timeout=30)


def made_and_aborted(rank: int, world_size: int) -> None:
    def usage() -> tuple[int, int]:
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    def once() -> None:
        group = dist.new_group(range(world_size))
        work = dist.all_reduce(torch.ones(4), group=group, async_op=True) if rank == 0 else None
        dist.barrier()
        backend_of(group).abort()
        if work is not None:
            with pytest.raises((RuntimeError, xm.PeerError)):
                work.wait()
        dist.destroy_process_group(group)
        dist.barrier()

    once()
    before = usage()
    for _ in range(8):
        once()
    assert usage() == before, (before, usage())


def test_aborted_groups_leave_nothing() -> None:
    spawn(made_and_aborted, 2, timeout=60)
