"""Runs a function on ranks whose default device is the emulated accelerator."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import torch_xmesh as xm
from torch_xmesh.testing import spawn


def on_device(body: Callable[..., Any], world_size: int, *args: Any, timeout: float = 240) -> list[Any]:
    """``body(rank, world_size, *args)`` on each rank; what it returned."""
    # Whatever memory matrices lie in, the CPU's products of them have the same bits.
    environment = {"MKL_CBWR": "AVX2,STRICT"}
    return spawn(run, world_size, body, *args, backend=None, timeout=timeout, env=environment)


def run(rank: int, world_size: int, body: Callable[..., Any], *args: Any) -> Any:
    """What a rank does: the group, the default device, the body, the end of the group unless the body has ended it."""
    start()
    value = body(rank, world_size, *args)
    if dist.is_initialized():
        dist.destroy_process_group()
    return value


def start(seconds: float | None = None) -> None:
    """Makes the default group, for tensors on both devices, and the emulated device torch's default."""
    import emu_device  # noqa: F401  # registers the backend

    options = xm.Options()
    options.inner = {"emu": "emunccl"}
    timeout = None if seconds is None else datetime.timedelta(seconds=seconds)
    store, rank, world_size = next(dist.rendezvous("env://"))
    store.set(f"started/{rank}", "")
    store.wait(
        [f"started/{other}" for other in range(world_size)]
    )  # however short the group's timeout, they may start late
    kinds = "cpu:xmesh,emu:xmesh"
    dist.init_process_group(kinds, store=store, rank=rank, world_size=world_size, pg_options=options, timeout=timeout)
    torch.set_default_device("emu")
