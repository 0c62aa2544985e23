"""Waits of several kinds, graphs that are captured meanwhile, and what communicators cost."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from device_cases import keep_busy, meshes
from layouts import dtensor_of, local_part, whole_tensor
from ranks import Case, run_cases
from torch.distributed.tensor import DTensor, Replicate, Shard

import torch_xmesh as xm


def rows(rank: int, world_size: int) -> tuple[DTensor, xm.Mesh, torch.Tensor]:
    source, target = meshes(world_size)
    whole = whole_tensor((1024, 1024), torch.float32)
    x = dtensor_of(local_part(whole, source, (Shard(0),), rank), whole.shape, source, (Shard(0),))
    return x, target, local_part(whole, target, (Shard(1),), rank)


def blocks_when_told(rank: int, world_size: int) -> None:
    """wait() returns when the device is done: nothing is left on the stream that it orders."""
    x, target, _ = rows(rank, world_size)
    for _ in range(5):
        keep_busy()
        _, work = xm.reshard(x, target, (Shard(1),), async_op=True)
        work.wait()
        assert work.is_completed()


def refused_while_capturing(rank: int, world_size: int) -> None:
    """What is refused leaves the group as it was."""
    x, target, wanted = rows(rank, world_size)
    other = dist.new_group(backend="cpu:xmesh,cuda:xmesh")  # without options: NCCL carries cuda
    assert torch.equal(xm.reshard(x, target, (Shard(1),), group=other).to_local(), wanted)
    torch.cuda.synchronize()
    capture = torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local")
    with capture, pytest.raises(NotImplementedError, match="cannot be captured in a graph"):
        xm.reshard(x, target, (Shard(1),))
    assert torch.equal(xm.reshard(x, target, (Shard(1),)).to_local(), wanted)


def captures_beside(rank: int, world_size: int, mode: str) -> None:
    """A graph is captured while a reshard is on its way; both are right."""
    x, target, wanted = rows(rank, world_size)
    a = torch.randn(256, 256)
    b = a @ a
    torch.cuda.synchronize()
    for _ in range(3):
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        keep_busy()
        y, work = xm.reshard(x, target, (Shard(1),), async_op=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side, capture_error_mode=mode):
            c = a @ a
            time.sleep(0.02)  # the library looks at what the device has passed meanwhile
        graph.replay()
        work.wait()
        torch.cuda.synchronize()
        assert torch.equal(c, b)
        assert torch.equal(y.to_local(), wanted)


def communicators(rank: int, world_size: int) -> str:
    """Seconds of the first call of a set of ranks and of the second, and memory."""
    first: list[float] = []
    second: list[float] = []
    for other in range(1, world_size):
        if rank in (0, other):
            x = dtensor_of(torch.ones(16), (16,), xm.Mesh([0, other]), (Replicate(),))
            for seconds in (first, second):
                began = time.monotonic()
                xm.reshard(x, xm.Mesh([other, 0]), (Shard(0),))
                torch.accelerator.synchronize()
                seconds.append(time.monotonic() - began)
    return (
        f"first calls {[round(one, 3) for one in first]} s, second {[round(1e3 * one, 2) for one in second]} ms, "
        f"{xm.about().device_communicators} communicators"
    )


def cases() -> list[Case]:
    return [
        Case("what a communicator costs", communicators),
        Case("blocking waits", blocks_when_told),
        Case("refused while capturing", refused_while_capturing),
        *(
            Case(f"captures beside a reshard, {mode}", captures_beside, (mode,))
            for mode in ("thread_local", "relaxed", "global")
        ),
    ]


def prepare() -> None:
    cases()


def run(device: str) -> bool:
    every = cases()
    if device != "cuda":
        every = [every[0]]
    is_well = run_cases(device, 4, [every[0]], case_s=30)
    is_well &= device != "cuda" or run_cases(device, 2, [every[1]], case_s=20, env={"TORCH_NCCL_BLOCKING_WAIT": "1"})
    return run_cases(device, 2, every[2:], case_s=20) and is_well
