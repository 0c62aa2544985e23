"""Peers that die, stop, or call something else: every survivor raises, names them, and can leave."""

from __future__ import annotations

import datetime
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from faults import leave, strike, timeout_of
from layouts import Layout, source_of
from own_threads import own_threads
from torch.distributed.tensor import DTensor, Replicate, Shard
from wait_until import wait_until

import torch_xmesh as xm
from torch_xmesh.plan_cache import MAX_PLANS
from torch_xmesh.testing import World, mark, spawn

TIMEOUT = {"timeout": datetime.timedelta(seconds=4)}
FOUR = Layout((1 << 12, 64), torch.float32, xm.Mesh([0, 1]), (Shard(0),), xm.Mesh([2, 3]), (Replicate(),))


def meet(rank: int, world_size: int) -> None:
    """A barrier with a timeout of its own: a rank that leaves early would be the error that the others see."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"meet/{rank}", "here")
    store.wait([f"meet/{other}" for other in range(world_size)], datetime.timedelta(seconds=60))


def survivor_error() -> str:
    """Reshards until that fails, and returns the text."""
    with pytest.raises(xm.PeerError) as caught:  # noqa: PT012
        while True:
            xm.reshard(source_of(FOUR), FOUR.dst_mesh, FOUR.dst, strategy="broadcast")
    return f"{caught.value.ranks}: {caught.value}"


def reshard_for_ever(rank: int, world_size: int, victim: int) -> str:
    xm.reshard(source_of(FOUR), FOUR.dst_mesh, FOUR.dst)
    mark("running")
    if rank == victim:
        while True:
            xm.reshard(source_of(FOUR), FOUR.dst_mesh, FOUR.dst, strategy="broadcast")
    text = survivor_error()
    leave()
    return text


@pytest.mark.parametrize(
    ("victim", "number"), [(3, signal.SIGKILL), (0, signal.SIGKILL), (2, signal.SIGSTOP), (0, signal.SIGSTOP)]
)
def test_peer_dies_or_stops(victim: int, number: int) -> None:
    with World(reshard_for_ever, 4, victim, init_kwargs=timeout_of(number)) as world:
        for value in strike(world, victim, number):
            assert value.startswith(f"({victim},)"), value
            assert f"rank {victim}" in value or f"rank [{victim}]" in value
            assert "float32" in value  # the tensor


def kill_at_random(rank: int, world_size: int, delay: float) -> str | None:
    """Rank 3 kills itself from a thread, somewhere in the stream of reshards."""
    if rank == 3:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    return survivor_error()


@pytest.mark.parametrize(
    "turn", [pytest.param(turn, marks=[] if turn < 3 else [pytest.mark.soak]) for turn in range(20)]
)
def test_receiver_killed_at_random(turn: int) -> None:
    delay = 0.05 + 0.037 * turn
    with World(kill_at_random, 4, delay) as world:
        for rank in range(3):
            outcome = world.wait(rank, 60)
            assert outcome.error is None, outcome.error
            assert outcome.value.startswith("(3,)"), outcome.value
        world.join()


BULK = Layout((1 << 22,), torch.int32, xm.Mesh([0]), (Replicate(),), xm.Mesh([1]), (Replicate(),))  # 16 MiB

RING_BYTES = 1 << 20  # kRingBytes in csrc/transport/tcp/shared_ring.h; a page before them says whose they are


def rings() -> list[range]:
    """Where rings in shared memory are mapped into this process."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "torch_xmesh-ring" in line]
    return [range(*(int(end, 16) for end in line[0].split("-"))) for line in lines]


def fill_a_ring(rank: int, world_size: int, go: Path) -> str | None:
    """Rank 1 is stopped once its receives are posted; then rank 0 sends sevens, and says when the ring holds them."""
    source = source_of(BULK)
    xm.reshard(source, BULK.dst_mesh, BULK.dst)
    assert len(rings()) == 1, Path("/proc/self/maps").read_text()
    if rank == 1:
        _, work = xm.reshard(source, BULK.dst_mesh, BULK.dst, async_op=True)
        (network,) = (task for task, name in own_threads().items() if name == "xmesh_network")
        wait_until(lambda: "(sleeping)" in (network / "status").read_text())  # it has nothing left to do
        mark("posted")
        work.wait()
    go.read_text()  # a pipe, opened by the test
    source.to_local().fill_(7)
    _, work = xm.reshard(source, BULK.dst_mesh, BULK.dst, async_op=True)
    (ring,) = rings()
    sevens = b"\x07\0\0\0" * (RING_BYTES // 4)
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        wait_until(lambda: os.pread(memory.fileno(), RING_BYTES, ring.stop - RING_BYTES) == sevens)
    assert not work.is_completed()
    mark("full")
    with pytest.raises(xm.PeerError) as caught:
        work.wait()
    leave()
    assert rings() == []
    assert not [fd for fd in os.listdir("/proc/self/fd") if "torch_xmesh" in os.path.realpath(f"/proc/self/fd/{fd}")]
    return f"{caught.value.ranks}: {caught.value}"


def test_receiver_killed_behind_a_full_ring(tmp_path: Path) -> None:
    go = tmp_path / "go"
    os.mkfifo(go)
    with World(fill_a_ring, 2, go, init_kwargs={"timeout": datetime.timedelta(seconds=60)}) as world:
        world.wait_mark(1, "posted")
        world.signal(1, signal.SIGSTOP)
        wait_until(lambda: "(stopped)" in Path(f"/proc/{world.pids[1]}/status").read_text())
        go.write_text("")
        world.wait_mark(0, "full")
        world.signal(1, signal.SIGKILL)
        outcome = world.wait(0, 60)
        assert outcome.error is None, outcome.error
        assert outcome.value.startswith("(1,)"), outcome.value
        assert [outcome.exitcode for outcome in world.join()] == [0, -signal.SIGKILL]


def crossed_calls(rank: int, world_size: int) -> None:
    """Two plans in different order: told apart at once with equal participants, at the timeout with others."""
    one = (xm.Spec((4, 4), torch.float32, xm.Mesh([0]), (Replicate(),)), xm.Mesh([1]))
    other = (xm.Spec((9,), torch.int64, xm.Mesh([1]), (Replicate(),)), xm.Mesh([0]))
    if rank < 2:
        mine = one if rank == 0 else other
        with pytest.raises(ValueError, match=r"ranks disagree on shape: rank \d has .*rank \d has"):
            xm.reshard(with_data(mine[0], rank), mine[1], (Replicate(),))
    dist.barrier()
    wide = (xm.Spec((4, 4), torch.float32, xm.Mesh([0]), (Replicate(),)), xm.Mesh([1, 2]))
    narrow = (xm.Spec((5,), torch.float32, xm.Mesh([0]), (Replicate(),)), xm.Mesh([1]))
    if rank < 2:
        mine = wide if rank == 0 else narrow
        with pytest.raises(
            xm.PeerError,
            match="(?s)has not made this call; it last called reshard call|does not answer|has not called any",
        ) as caught:
            xm.reshard(with_data(mine[0], rank), mine[1], (Replicate(),))
        assert "float32" in str(caught.value) or "has not called" in str(caught.value)
    meet(rank, world_size)
    leave()


def with_data(spec: xm.Spec, rank: int) -> DTensor | xm.Spec:
    if rank not in spec.mesh.ranks:  # type: ignore[union-attr]
        return spec
    local = torch.zeros(spec.shape, dtype=spec.dtype)
    return DTensor.from_local(local, xm.device_mesh(spec.mesh), spec.placements, run_check=False)


def test_crossed_calls() -> None:
    spawn(crossed_calls, 3, init_kwargs=TIMEOUT)


def never_called(rank: int, world_size: int) -> None:
    xm.reshard(source_of(FOUR), FOUR.dst_mesh, FOUR.dst)
    if rank != 3:
        with pytest.raises(
            xm.PeerError, match=r"rank 3 has not made this call; it last called reshard call 0"
        ) as caught:
            xm.reshard(source_of(FOUR), FOUR.dst_mesh, FOUR.dst)
        assert caught.value.ranks == (3,)
    meet(rank, world_size)
    leave()


def test_peer_that_never_calls() -> None:
    spawn(never_called, 4, init_kwargs=TIMEOUT)


def forked_child(rank: int, world_size: int) -> None:
    """What needs the parent's threads is an error in the child at once, also a wait for what was begun before; a group
    of its own works there."""
    xm.reshard(source_of(FOUR), FOUR.dst_mesh, FOUR.dst)
    engine = xm.PipelineEngine(
        [torch.nn.Linear(2, 2) for _ in range(4)],
        (torch.empty(1, 2),),
        meshes=[xm.Mesh([one]) for one in range(4)],
        num_microbatches=1,
        loss_fn=torch.nn.functional.mse_loss,
    )
    engine.step(torch.ones(1, 2), target=torch.ones(1, 2))
    if rank > 0:
        dist.barrier()  # with rank 0, which forks while the others have not called
    begun = xm.reshard(source_of(FOUR), FOUR.dst_mesh, FOUR.dst, async_op=True)[1]
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = _in_forked_child(engine, begun, rank)
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    if rank == 0:
        dist.barrier()
    begun.wait()
    xm.reshard(source_of(FOUR), FOUR.dst_mesh, FOUR.dst)
    engine.step(torch.ones(1, 2), target=torch.ones(1, 2))
    engine.close()
    dist.barrier()
    leave()


def _in_forked_child(engine: xm.PipelineEngine, begun: Any, rank: int) -> int:
    import gc

    calls: list[Callable[[], Any]] = [
        lambda: xm.reshard(source_of(FOUR), FOUR.dst_mesh, FOUR.dst),
        lambda: dist.all_reduce(torch.ones(1)),
        lambda: dist.barrier(),
        lambda: engine.step(torch.ones(1, 2), target=torch.ones(1, 2)),
        lambda: engine.summary(),
    ]
    if rank == 0:
        calls.append(begun.wait)
    for call in calls:
        with pytest.raises(RuntimeError, match="this process was forked from the one that made the process group"):
            call()
    engine.close()
    dist.destroy_process_group()
    gc.collect()
    dist.init_process_group("xmesh", store=dist.HashStore(), rank=0, world_size=1)
    total = torch.ones(1)
    dist.all_reduce(total)
    return 0 if total.item() == 1.0 else 1


def test_forked_child_leaves_the_group_alone() -> None:
    spawn(forked_child, 4)


def many_reshards(rank: int, world_size: int, count: int, is_fresh: bool, max_plans: int) -> None:
    """No growth of threads, descriptors or memory over many calls. Fresh layouts drive plans out of a full cache."""
    import random

    from layouts import assert_same_bytes, expected_of, random_layout

    from torch_xmesh import plan_cache
    from torch_xmesh.group import reshards_of

    plan_cache.MAX_PLANS = max_plans
    rng = random.Random(5)
    layouts = [random_layout(rng, world_size) for _ in range(50)]

    def once(i: int) -> None:
        layout = random_layout(rng, world_size) if is_fresh else layouts[i % len(layouts)]
        y = xm.reshard(source_of(layout), layout.dst_mesh, layout.dst)
        if i % 10 == 0:
            assert_same_bytes(y.to_local(), expected_of(layout), layout)

    def usage() -> tuple[int, int, int]:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), pages * 4096

    for i in range(len(layouts) * 4):
        once(i)
    plans = reshards_of(None).plans.prepared
    while is_fresh and len(plans) < max_plans:
        once(1)
    first = next(iter(plans))
    dist.barrier()
    before = usage()
    for i in range(count):
        once(i)
    dist.barrier()
    after = usage()
    assert len(plans) == max_plans if is_fresh else len(plans) <= len(layouts)
    assert (first in list(plans)) != is_fresh
    assert after[0] <= before[0], (before, after)
    assert after[1] <= before[1], (before, after)
    assert after[2] - before[2] < 16 << 20, (before, after)
    leave()


def test_no_growth() -> None:
    spawn(many_reshards, 4, 1000, False, MAX_PLANS)


def test_no_growth_where_plans_are_dropped() -> None:
    spawn(many_reshards, 4, 500, True, 64)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("is_fresh", [False, True], ids=["cached", "dropped"])
def test_no_growth_over_ten_thousand(is_fresh: bool) -> None:
    spawn(many_reshards, 4, 10_000, is_fresh, MAX_PLANS, timeout=1100)
