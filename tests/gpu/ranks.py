"""Ranks on a device, and cases that they run one after another, each reported by name."""

from __future__ import annotations

import datetime
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from report import found

import torch_xmesh as xm
from torch_xmesh.testing import RankError, World, mark


def start(rank: int, world_size: int, device: str, seconds: float | None = None) -> None:
    """Makes the default group, for tensors on cpu and on the device, which becomes torch's default."""
    options = xm.Options()
    if device == "cuda":
        num_gpus = torch.cuda.device_count()
        if world_size > num_gpus:
            os.environ["NCCL_HOSTID"] = str(rank)  # NCCL refuses two ranks of one host on one GPU
        torch.cuda.set_device(rank % num_gpus)
        options.inner = {"cuda": "nccl"}
    else:
        import emu_device  # noqa: F401  # registers the backend

        options.inner = {"emu": "emunccl"}
    timeout = None if seconds is None else datetime.timedelta(seconds=seconds)
    store, rank, world_size = next(dist.rendezvous("env://"))
    store.set(f"started/{rank}", "")
    store.wait(
        [f"started/{other}" for other in range(world_size)]
    )  # however short the group's timeout, they may start late
    kinds = f"cpu:xmesh,{device}:xmesh"
    dist.init_process_group(kinds, store=store, rank=rank, world_size=world_size, pg_options=options, timeout=timeout)
    torch.set_default_device(device)


def world(body: Callable[..., Any], size: int, *args: Any, env: Mapping[str, str] | None = None) -> World:
    """Ranks in interpreters of their own: CUDA does not outlive a fork."""
    return World(body, size, *args, backend=None, env=env, fresh=True)


def meet(key: str, rank: int, world_size: int, seconds: float) -> None:
    """All ranks come here, whatever has become of their groups."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{key}/{rank}", "here")
    store.wait([f"{key}/{other}" for other in range(world_size)], datetime.timedelta(seconds=seconds))


@dataclass(frozen=True)
class Case:
    """``body(rank, world_size, *args)``, of a module; what it returns on rank 0 is reported."""

    name: str
    body: Callable[..., Any]
    args: tuple[Any, ...] = ()


def run_cases(
    device: str,
    size: int,
    cases: list[Case],
    *,
    case_s: float,
    group_s: float = 10.0,
    env: Mapping[str, str] | None = None,
) -> bool:
    """On `size` ranks; a case that fails, or has not ended after `case_s`, is named, and the next one runs."""
    first, bad = 0, 0
    with tempfile.TemporaryDirectory() as folder:
        while first < len(cases):
            began = first
            with world(_ranks, size, device, cases, first, group_s, case_s, folder, env=env) as running:
                try:
                    running.wait_mark(0, "connected", 60)
                except RankError as error:
                    found(f"{size} ranks did not start: {_last(str(error))}", trace=str(error)[-3000:])
                    return False
                while first < len(cases):
                    since = time.monotonic()
                    text = _ended(running, size, first, case_s, Path(folder))
                    took = time.monotonic() - since
                    bad += text is not None
                    _say(cases[first].name, text, took, Path(folder) / f"{first}.value")
                    first += 1
                    if text is not None and text.startswith("HANGS"):
                        break
            if first == began:
                return False
    found(f"{len(cases) - bad} of {len(cases)} cases of {size} ranks passed", passed=len(cases) - bad, cases=len(cases))
    return bad == 0


def _say(name: str, text: str | None, took: float, value: Path) -> None:
    said = value.read_text() if value.exists() else ""
    if text is None:
        found(f"{name}: ok, {took:.1f} s{said and '; ' + said}", seconds=round(took, 3))
    else:
        found(f"{name}: {_last(text)}", seconds=round(took, 3), trace=text[-3000:])


def _ended(running: World, size: int, index: int, seconds: float, folder: Path) -> str | None:
    """None if the case passed on all ranks, else what was seen."""
    deadline = time.monotonic() + seconds
    try:
        for rank in range(size):
            running.wait_mark(rank, f"ended {index}", max(0.1, deadline - time.monotonic()))
    except RankError as error:
        codes = [outcome.exitcode for outcome in running.outcomes()]
        said = f"HANGS or ends its ranks (exit codes {codes})"
        return f"{said}\n{str(error)[-2000:]}\n{said}"
    texts = [path.read_text() for path in sorted(folder.glob(f"{index}.failed.*"))]
    return "\n".join(texts) if texts else None


def _last(text: str) -> str:
    return text.rstrip().splitlines()[-1][:300]


def _ranks(
    rank: int, world_size: int, device: str, cases: list[Case], first: int, group_s: float, case_s: float, folder: str
) -> None:
    start(rank, world_size, device, group_s)
    mark("connected")
    for index, case in enumerate(cases[first:], first):
        try:
            value = case.body(rank, world_size, *case.args)
            torch.accelerator.synchronize()
            if rank == 0 and value is not None:
                Path(folder, f"{index}.value").write_text(str(value))
        except BaseException:
            Path(folder, f"{index}.failed.{rank}").write_text(f"rank {rank}\n{traceback.format_exc()}")
        mark(f"ended {index}")
        meet(f"case {index}", rank, world_size, case_s + 10)
    dist.destroy_process_group()
