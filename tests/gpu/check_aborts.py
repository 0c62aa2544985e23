"""Communicators that are aborted while the device is busy: the call raises, and the next one is right."""

from __future__ import annotations

import datetime
import threading
import time

import pytest
import torch
import torch.distributed as dist
from layouts import Layout, expected_of, source_of
from ranks import Case, meet, run_cases
from torch.distributed.tensor import Replicate, Shard

import torch_xmesh as xm

GROUP_S = 2.5
PAIR = Layout((1 << 12, 64), torch.float32, xm.Mesh([0]), (Replicate(),), xm.Mesh([1, 0]), (Shard(0),))


def busy_for(seconds: float) -> None:
    """The current stream."""
    if torch.get_default_device().type == "cuda":
        torch.cuda._sleep(int(seconds * 1.7e9))  # type: ignore[no-untyped-call]
    else:
        import emu_device

        emu_device.hold(max_ms=int(1000 * seconds))


def turns(rank: int, world_size: int, count: int) -> str:
    """Rank 0's stream is busy for longer than the group waits."""
    dist.all_reduce(torch.ones(1))  # what is made once per process takes its time
    source = source_of(PAIR)
    said = []
    for number in range(count):
        y = xm.reshard(source, PAIR.dst_mesh, PAIR.dst)
        assert torch.equal(y.to_local(), expected_of(PAIR))
        meet(f"abort {number}", rank, world_size, 30)
        if rank == 0:
            busy_for(2 * GROUP_S)
        began = time.monotonic()
        _, work = xm.reshard(source, PAIR.dst_mesh, PAIR.dst, async_op=True)
        with pytest.raises(xm.PeerError):
            work.wait(datetime.timedelta(seconds=60))
        said.append(time.monotonic() - began)
        torch.accelerator.synchronize()
        meet(f"aborted {number}", rank, world_size, 30)
    return f"raised after {min(said):.2f} to {max(said):.2f} s"


def one(device: str, outcomes: list[bool]) -> None:
    outcomes.append(run_cases(device, 2, [Case("5 aborts", turns, (5,))], case_s=50, group_s=GROUP_S))


def run(device: str) -> bool:
    """Four pairs of ranks at once."""
    outcomes: list[bool] = []
    threads = [threading.Thread(target=one, args=(device, outcomes)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes == 4 * [True]
