"""Peers that die or stop while a reshard is on the device: every survivor raises, names them, and ends with 0."""

from __future__ import annotations

import datetime
import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from device_cases import another_group
from device_ranks import on_device, start
from faults import leave, strike
from layouts import Layout, expected_of, source_of
from torch.distributed.tensor import Replicate, Shard

import torch_xmesh as xm
from torch_xmesh.backend import backend_of
from torch_xmesh.testing import World, mark

pytestmark = pytest.mark.timeout(900)  # the first test builds the device
FOUR = Layout((1 << 10, 64), torch.float32, xm.Mesh([0, 1]), (Shard(0),), xm.Mesh([2, 3]), (Replicate(),))
TIMEOUT = 4.0
HELD_MS = 120_000
"""A stream does not move for longer than a test waits: it is released once the call has raised."""


def until_it_fails(rank: int, world_size: int, is_held: bool) -> str:
    """Reshards for ever; in one of two cases what it has enqueued waits for a stream that does not move."""
    start(TIMEOUT)
    import emu_device

    source = source_of(FOUR)
    xm.reshard(source, FOUR.dst_mesh, FOUR.dst).to_local().cpu()
    gate = emu_device.hold(max_ms=HELD_MS) if is_held and rank == 0 else None
    if is_held:
        xm.reshard(source, FOUR.dst_mesh, FOUR.dst)
    mark("running")
    with pytest.raises(xm.PeerError) as caught:  # noqa: PT012
        while True:
            work = xm.reshard(source, FOUR.dst_mesh, FOUR.dst, strategy="broadcast", async_op=True)[1]
            work.wait(datetime.timedelta(seconds=60))
    if gate is not None:
        gate.release()
    leave()
    return f"{caught.value.ranks}: {caught.value}"


def name_it(world: World, victim: int, number: int) -> None:
    """One is struck: the others name it and the tensor."""
    for value in strike(world, victim, number):
        assert value.startswith(f"({victim},)"), value
        assert "float32" in value  # the tensor


@pytest.mark.parametrize("is_held", [False, True])
@pytest.mark.parametrize(("victim", "number"), [(3, signal.SIGKILL), (0, signal.SIGKILL), (2, signal.SIGSTOP)])
def test_peer_dies_or_stops(victim: int, number: int, is_held: bool) -> None:
    with World(until_it_fails, 4, is_held, backend=None) as world:
        name_it(world, victim, number)


def until_it_fails_through_the_host(rank: int, world_size: int, src: str, is_held: bool) -> str:
    """From cpu to the device or back; in one of two cases a copy to the host waits for a stream that does not move."""
    start(TIMEOUT)
    import emu_device

    dst = "cpu" if src == "emu" else "emu"
    target = xm.Mesh(FOUR.dst_mesh, device_type=dst)
    with torch.device(src):
        source = source_of(FOUR)
    xm.reshard(source, target, FOUR.dst).to_local().cpu()
    mark("running")
    gate = emu_device.hold(max_ms=20_000) if is_held and rank == 1 else None
    with pytest.raises(xm.PeerError) as caught:  # noqa: PT012
        while True:
            xm.reshard(source, target, FOUR.dst)
            torch.accelerator.synchronize()
    if gate is not None:
        gate.release()
    leave()
    return f"{caught.value.ranks}: {caught.value}"


@pytest.mark.parametrize(
    ("src", "victim", "number", "is_held"),
    [
        ("cpu", 0, signal.SIGKILL, False),
        ("cpu", 3, signal.SIGKILL, False),
        ("emu", 0, signal.SIGKILL, True),
        ("emu", 2, signal.SIGKILL, False),
        ("emu", 2, signal.SIGSTOP, True),
    ],
)
def test_peer_dies_or_stops_through_the_host(src: str, victim: int, number: int, is_held: bool) -> None:
    with World(until_it_fails_through_the_host, 4, src, is_held, backend=None) as world:
        name_it(world, victim, number)


def again(rank: int, first: int, second: int) -> None:
    """Two survivors reshard."""
    pair = Layout(FOUR.shape, FOUR.dtype, xm.Mesh([first]), (Replicate(),), xm.Mesh([second]), (Replicate(),))
    if rank in (first, second):
        y = xm.reshard(source_of(pair), pair.dst_mesh, pair.dst)
        assert rank == first or torch.equal(y.to_local().cpu(), expected_of(pair).cpu())


def dies_in_the_making(rank: int, world_size: int) -> str | None:
    """Rank 1 has agreed to the first call, and ends before it makes its communicator. The others' makings never end."""
    start(TIMEOUT)
    if rank == 1:
        plugins = dist.Backend._plugins
        die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
        plugins["EMUNCCL"] = plugins["EMUNCCL"]._replace(creator_fn=die)
    with pytest.raises(xm.PeerError) as caught:  # noqa: PT012
        xm.reshard(source_of(FOUR), FOUR.dst_mesh, FOUR.dst)
        while True:
            xm.reshard(source_of(FOUR), FOUR.dst_mesh, FOUR.dst)
    again(rank, 0, 2)
    again(rank, 3, 2)
    dist.destroy_process_group()
    return f"{caught.value.ranks}"


def test_peer_dies_in_the_making_of_a_communicator() -> None:
    with World(dies_in_the_making, 4, backend=None) as world:
        for rank in (0, 2, 3):
            outcome = world.wait(rank, 60)
            assert outcome.error is None, outcome.error
            assert outcome.value == "(1,)"
        for outcome in world.join():
            assert outcome.rank == 1 or outcome.exitcode == 0, outcome


def aborts_with_a_call_in_flight(rank: int, world_size: int) -> str:
    """Rank 1 leaves while its part of a call has yet to move. The group's timeout is half an hour."""
    start()
    import emu_device

    source = source_of(FOUR)
    xm.reshard(source, FOUR.dst_mesh, FOUR.dst).to_local().cpu()
    gate = emu_device.hold(max_ms=HELD_MS) if rank == 1 else None
    work = xm.reshard(source, FOUR.dst_mesh, FOUR.dst, async_op=True)[1]
    work.wait()  # it is enqueued everywhere
    mark("running")
    store = dist.distributed_c10d._get_default_store()
    if gate is not None:
        store.wait(["waiting"])
        backend_of().abort()
        gate.release()
        return "gone"
    blamed: tuple[int, ...] = ()
    if rank == 0:
        store.set("waiting", "")
    try:
        work.wait(datetime.timedelta(seconds=60))
    except xm.PeerError as error:
        blamed = error.ranks
    again(rank, 0, 2)
    again(rank, 3, 2)
    leave()
    return f"{blamed}"


def test_a_rank_aborts_with_a_call_in_flight() -> None:
    with World(aborts_with_a_call_in_flight, 4, backend=None) as world:
        outcomes = world.join(60)
        assert [outcome.error for outcome in outcomes] == [None] * 4
        assert [outcome.value for outcome in outcomes][1:] == ["gone", "(1,)", "(1,)"]  # rank 0's own part has moved


def one_group_aborts_before_another(rank: int, world_size: int) -> str:
    """On the stream that both share, the other group's call is behind the one that is aborted."""
    start()
    import emu_device

    group = another_group()
    source = source_of(FOUR)
    wanted: Any = xm.reshard(source, FOUR.dst_mesh, FOUR.dst)
    xm.reshard(source, FOUR.dst_mesh, FOUR.dst, group=group)
    gate = emu_device.hold(max_ms=HELD_MS)
    aborted = xm.reshard(source, FOUR.dst_mesh, FOUR.dst, group=group, async_op=True)[1]
    y: Any
    y, work = xm.reshard(source, FOUR.dst_mesh, FOUR.dst, async_op=True)
    aborted.wait()
    work.wait()  # both are enqueued here
    store = dist.distributed_c10d._get_default_store()
    store.set(f"enqueued/{rank}", "")
    store.wait([f"enqueued/{other}" for other in range(world_size)])
    if rank == 1:
        backend_of(group).abort()
    else:
        with pytest.raises(xm.PeerError, match="rank 1"):
            aborted.wait(datetime.timedelta(seconds=60))
    gate.release()
    work.wait(datetime.timedelta(seconds=60))
    is_same = bool(torch.equal(y.to_local().cpu(), wanted.to_local().cpu()))
    leave()
    return f"{is_same}"


def test_one_group_aborts_before_another() -> None:
    with World(one_group_aborts_before_another, 4, backend=None) as world:
        outcomes = world.join(60)
        assert [outcome.error for outcome in outcomes] == [None] * 4
        assert [outcome.value for outcome in outcomes] == ["True"] * 4


def goes_on_after_a_mistake(rank: int, world_size: int) -> None:
    """A call that the ranks disagree on moves nothing, and leaves the communicator to the next."""
    for turn in range(20):
        wanted = Shard(turn % 2) if rank == turn % 4 else Replicate()
        with pytest.raises(ValueError, match="ranks disagree on destination placements"):
            xm.reshard(source_of(FOUR), FOUR.dst_mesh, (wanted,))
        y: Any = xm.reshard(source_of(FOUR), FOUR.dst_mesh, FOUR.dst)
        assert rank < 2 or y.to_local().shape == (1 << 10, 64)


def test_mistakes() -> None:
    on_device(goes_on_after_a_mistake, 4)
