"""Collectives and reshards of cuda tensors on real GPUs: the bytes that cpu gives. Ranks that are more than the GPUs
share them.

Where there is no GPU, all are skipped. `bash tests/run.sh --gpu` runs these alone, and fails without a GPU.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from typing import Any

import device_cases
import mixed_cases
import pytest
import test_reshard_autograd
import torch
import torch.distributed as dist
from device_cases import each, meshes
from layouts import dtensor_of, local_part, whole_tensor
from torch.distributed.tensor import Replicate, Shard

import torch_xmesh as xm
from torch_xmesh import _C
from torch_xmesh.testing import spawn

NUM_GPUS = torch.cuda.device_count() if dist.is_nccl_available() else 0
pytestmark = [
    pytest.mark.timeout(900),  # NCCL takes a second or more to connect each set of ranks
    pytest.mark.skipif(NUM_GPUS == 0, reason="runs on machines with a GPU, with a torch that has NCCL"),
]


def on_gpus(body: Callable[..., Any], world_size: int, *args: Any, env: dict[str, str] | None = None) -> list[Any]:
    """``body(rank, world_size, *args)`` on each rank; in interpreters of their own: CUDA does not outlive a fork."""
    return spawn(_run, world_size, body, *args, backend=None, timeout=600, env=env, fresh=True)


def _run(rank: int, world_size: int, body: Callable[..., Any], *args: Any) -> Any:
    if world_size > NUM_GPUS:
        os.environ["NCCL_HOSTID"] = str(rank)  # NCCL refuses two ranks of one host on one GPU
    torch.cuda.set_device(rank % NUM_GPUS)
    options = xm.Options()
    options.inner = {"cuda": "nccl"}
    dist.init_process_group("cpu:xmesh,cuda:xmesh", pg_options=options, timeout=datetime.timedelta(seconds=120))
    torch.set_default_device("cuda")
    value = body(rank, world_size, *args)
    torch.cuda.synchronize()
    dist.destroy_process_group()
    return value


@pytest.mark.parametrize("world_size", [1, 2])
def test_collectives(world_size: int) -> None:
    on_gpus(device_cases.collectives, world_size)


def test_collectives_on_all() -> None:
    on_gpus(device_cases.collectives, max(NUM_GPUS, 3))


@pytest.mark.parametrize("world_size", [1, 4])
def test_mixed(world_size: int) -> None:
    on_gpus(each, world_size, mixed_cases.CASES)


def test_mixed_layouts() -> None:
    on_gpus(mixed_cases.random_layouts, 4, 2, 50)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_reshards(world_size: int) -> None:
    on_gpus(each, world_size, device_cases.CALLS)


@pytest.mark.parametrize(("world_size", "count"), [(1, 50), (2, 100), (4, 60)])
def test_random_layouts(world_size: int, count: int) -> None:
    on_gpus(device_cases.random_layouts, world_size, 1, count)


def test_calls_of_the_tests_on_cpu() -> None:
    on_gpus(each, 4, device_cases.CALLS_OF_CPU)


def test_gradients_of_the_tests_on_cpu() -> None:
    on_gpus(test_reshard_autograd.everything, 6)


def blocks_when_told(rank: int, world_size: int) -> None:
    """wait() returns when the device is done: nothing is left on the stream that it orders."""
    source, target = meshes(world_size)
    whole = whole_tensor((1024, 1024), torch.float32)
    x = dtensor_of(local_part(whole, source, (Shard(0),), rank), whole.shape, source, (Shard(0),))
    for _ in range(5):
        device_cases.keep_busy()
        _, work = xm.reshard(x, target, (Shard(1),), async_op=True)
        work.wait()
        assert work.is_completed()


@pytest.mark.parametrize("world_size", [1, 2])
def test_blocking_wait(world_size: int) -> None:
    on_gpus(blocks_when_told, world_size, env={"TORCH_NCCL_BLOCKING_WAIT": "1"})


def refusals(rank: int, world_size: int) -> None:
    """What is refused leaves the group as it was."""
    source, target = meshes(world_size)
    whole = whole_tensor((8, 4), torch.float32)
    x = dtensor_of(local_part(whole, source, (Shard(0),), rank), (8, 4), source, (Shard(0),))
    other = dist.new_group(backend="cpu:xmesh,cuda:xmesh")  # without options: NCCL carries cuda
    assert torch.equal(xm.reshard(x, target, (Replicate(),), group=other).to_local(), whole)
    dist.barrier()
    torch.cuda.synchronize()
    capture = torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local")
    with capture, pytest.raises(NotImplementedError, match="cannot be captured in a graph"):
        xm.reshard(x, target, (Replicate(),))
    y = xm.reshard(x, target, (Replicate(),))
    assert torch.equal(y.to_local(), whole)


@pytest.mark.parametrize("world_size", [1, 2])
def test_refusals(world_size: int) -> None:
    on_gpus(refusals, world_size)


def test_the_kernels_run_here() -> None:
    """Where the library was built, nothing keeps it from running."""
    architectures, obstacle = _C.cuda_kernels()
    if architectures is None:
        pytest.skip(f"runs on machines with a GPU and nvcc: {obstacle}")
    assert obstacle is None
