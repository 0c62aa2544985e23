"""Ranks that die, stop, abort or leave at any moment of reshards on the device: the others hear of it, and go on."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from device_ranks import start
from layouts import Layout, expected_of, source_of
from torch.distributed.tensor import Replicate, Shard

import torch_xmesh as xm
from torch_xmesh.backend import backend_of
from torch_xmesh.testing import World, mark

pytestmark = pytest.mark.timeout(900)  # the first test builds the device
SIZE = 4
TIMEOUT = 10.0  # for what a stopped rank does not say; ranks hear of it seconds apart on a busy machine
LAYOUTS = [
    Layout((1 << 9, 64), torch.float32, xm.Mesh([0, 1]), (Shard(0),), xm.Mesh([2, 3]), (Replicate(),)),
    Layout((64, 300), torch.float32, xm.Mesh([0, 1, 2, 3]), (Shard(1),), xm.Mesh([0, 1, 2, 3]), (Shard(0),)),
    Layout((7, 5), torch.float32, xm.Mesh([3]), (Replicate(),), xm.Mesh([0, 1, 2]), (Shard(0),)),
    Layout((1 << 18,), torch.float32, xm.Mesh([1, 2]), (Replicate(),), xm.Mesh([0, 3]), (Replicate(),)),
]
STRATEGIES = ["auto", "broadcast", "striped", "alpa", "send_recv"]
HOW = ["kill", "stop", "abort", "destroy", "exit"]


def survivors_go_on(rank: int, victim: int) -> None:
    left = [other for other in range(SIZE) if other != victim]
    ring = Layout((30, 4), torch.float32, xm.Mesh(left), (Shard(0),), xm.Mesh(left[::-1]), (Shard(1),))
    y = xm.reshard(source_of(ring), ring.dst_mesh, ring.dst)
    assert torch.equal(y.to_local().cpu(), expected_of(ring).cpu())


def reshards_for_ever(seed: int, is_over: Callable[[], bool]) -> None:
    """The same random calls on all ranks."""
    draw = random.Random(seed)
    while not is_over():
        layout, strategy, waits = draw.choice(LAYOUTS), draw.choice(STRATEGIES), draw.random() < 0.5
        work = xm.reshard(source_of(layout), layout.dst_mesh, layout.dst, strategy=strategy, async_op=True)[1]
        if waits:
            work.wait()


def until_one_is_gone(rank: int, world_size: int, seed: int, victim: int, how: str, after: float) -> str:
    """One goes ``after`` so many seconds: whoever does not go by itself is struck by the test."""
    start(TIMEOUT)
    mark("running")
    if rank == victim:
        end = time.monotonic() + after
        if how == "abort":
            threading.Timer(after, backend_of().abort).start()
        with contextlib.suppress(RuntimeError):
            reshards_for_ever(seed, lambda: how in ("destroy", "exit") and time.monotonic() > end)
        if how != "exit":
            dist.destroy_process_group()
        return "gone"
    with pytest.raises(xm.PeerError) as caught:
        reshards_for_ever(seed, lambda: False)
    assert caught.value.ranks == (victim,), caught.value
    survivors_go_on(rank, victim)
    dist.destroy_process_group()
    return "went on"


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("seed", [*range(8), *[pytest.param(seed, marks=pytest.mark.soak) for seed in range(8, 200)]])
def test_the_others_go_on(seed: int) -> None:
    draw = random.Random(1000 + seed)  # rank 0 has the store, without which no communicator can be made
    victim, how, after = draw.randrange(1, SIZE), HOW[seed % len(HOW)], draw.random() ** 2 * 1.5
    with World(until_one_is_gone, SIZE, seed, victim, how, after, backend=None) as world:
        for rank in range(SIZE):
            world.wait_mark(rank, "running")
        if how in ("kill", "stop"):
            time.sleep(after)
            world.signal(victim, signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        for rank in set(range(SIZE)) - {victim}:
            outcome = world.wait(rank, 60)
            assert outcome.error is None, outcome.error
            assert outcome.value == "went on"
        if how == "stop":
            world.signal(victim, signal.SIGKILL)
        for outcome in world.join():
            assert outcome.rank == victim or outcome.exitcode == 0, outcome
