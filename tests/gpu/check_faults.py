"""Ranks that are killed or stopped at several moments: survivors raise, name them, live on and reshard again."""

from __future__ import annotations

import datetime
import random
import signal
import threading
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from device_cases import keep_busy
from layouts import Layout, expected_of, source_of
from ranks import start, world
from report import found
from torch.distributed.tensor import Replicate, Shard

import torch_xmesh as xm
from torch_xmesh.testing import mark

SHAPE = (1 << 14, 64)
FOUR = Layout(SHAPE, torch.float32, xm.Mesh([0, 1]), (Shard(0),), xm.Mesh([2, 3]), (Replicate(),))
GROUP_S = 6.0
LONG_S = 70.0
"""NCCL's watchdog ends a process a minute after it has seen an error."""


@dataclass(frozen=True)
class Fault:
    """Rank `victim` gets signal `number` once all ranks have reached `mark`, and `delay_s` later."""

    name: str
    victim: int
    number: int
    mark: str = "running"
    delay_s: float = 0.0
    is_held: bool = False
    live_s: float = 0.0


def faults() -> list[Fault]:
    rng = random.Random(time.time_ns())
    return [
        Fault("SIGKILL in flight", 3, signal.SIGKILL, live_s=LONG_S),
        Fault("SIGSTOP in flight", 2, signal.SIGSTOP, live_s=LONG_S),
        Fault("SIGKILL behind a busy stream", 3, signal.SIGKILL, is_held=True),
        Fault("SIGKILL before the first call", 3, signal.SIGKILL, mark="here"),
        *(
            Fault(f"SIGKILL {delay:.2f} s after the first call", 3, signal.SIGKILL, mark="calls", delay_s=delay)
            for delay in (rng.uniform(0, 0.3), rng.uniform(0.3, 1.5))
        ),
    ]


def body(rank: int, world_size: int, device: str, fault: Fault) -> str:
    start(rank, world_size, device, GROUP_S)
    source = source_of(FOUR)
    torch.accelerator.synchronize()
    mark("here")
    if fault.mark == "here" and rank == fault.victim:
        threading.Event().wait()
    mark("calls")
    try:
        xm.reshard(source, FOUR.dst_mesh, FOUR.dst).to_local().cpu()
        mark("running")
        if fault.is_held and rank == 0:
            for _ in range(20):
                keep_busy()
        while True:
            _, work = xm.reshard(source, FOUR.dst_mesh, FOUR.dst, strategy="broadcast", async_op=True)
            work.wait(datetime.timedelta(seconds=60))
    except xm.PeerError as error:
        caught = f"{error.ranks}: {error}"
    raised = time.monotonic()
    again(rank, fault.victim)
    while time.monotonic() < raised + fault.live_s:
        time.sleep(1)
    again(rank, fault.victim)
    dist.destroy_process_group()
    return caught


def again(rank: int, victim: int) -> None:
    """Two survivors reshard."""
    first, second = [one for one in range(4) if one != victim][:2]
    layout = Layout(SHAPE, torch.float32, xm.Mesh([first]), (Replicate(),), xm.Mesh([second]), (Replicate(),))
    while rank in (first, second):
        try:
            y = xm.reshard(source_of(layout), layout.dst_mesh, layout.dst)
        except xm.PeerError as error:  # an earlier call failed after it had returned
            if error.ranks != (victim,):
                raise
        else:
            assert torch.equal(y.to_local(), expected_of(layout))
            return


def strike(device: str, fault: Fault, outcomes: dict[str, bool]) -> None:
    said: list[str] = []
    with world(body, 4, device, fault) as running:
        try:
            for rank in range(4):
                running.wait_mark(rank, fault.mark, 60)
            time.sleep(fault.delay_s)
            running.signal(fault.victim, fault.number)
            since = time.monotonic()
            for rank in sorted(set(range(4)) - {fault.victim}):
                outcome = running.wait(rank, fault.live_s + 45)
                if outcome.error is not None or outcome.value is None:
                    said.append(
                        f"rank {rank}: exit code {outcome.exitcode}, {(outcome.error or outcome.output)[-1500:]}"
                    )
                elif not outcome.value.startswith(f"({fault.victim},)"):
                    said.append(f"rank {rank} says {outcome.value}")
            took = time.monotonic() - since - fault.live_s
            running.signal(fault.victim, signal.SIGKILL)
            if not said:
                codes = [one.exitcode for one in running.join(30) if one.rank != fault.victim]
                if any(codes):
                    said.append(f"survivors end with {codes}")
        except Exception as error:
            said.append(str(error)[-2500:])
    outcomes[fault.name] = not said
    if said:
        found(f"{fault.name}: {said[0].strip().splitlines()[-1][:200]}", trace="\n".join(said)[-5000:])
    else:
        found(f"{fault.name}: survivors raised, lived {fault.live_s:.0f} s and resharded again, {took:.1f} s besides")


def prepare() -> None:
    faults()


def run(device: str) -> bool:
    """All at once, since most of the time is waiting."""
    outcomes: dict[str, bool] = {}
    every = faults()
    threads = [threading.Thread(target=strike, args=(device, fault, outcomes)) for fault in every]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(outcomes) == len(every) and all(outcomes.values())
