"""Pipelines on a device whose ranks die, stop or fail at any of their actions: every survivor raises, and can leave; a
mistake leaves the ranks as they were."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from device_ranks import on_device, start
from faults import leave, strike, survive
from torch import nn
from torch.nn import functional as F

import torch_xmesh as xm
from torch_xmesh.testing import World, mark

pytestmark = pytest.mark.timeout(900)  # the first test builds the device
MICROBATCHES, TIMEOUT, HELD_MS = 3, 4.0, 120_000


class Struck(nn.Module):
    """The identity, which counts forwards and backwards; something happens in one of them."""

    __module__ = "torch.nn.struck"  # not looked into

    def __init__(self) -> None:
        super().__init__()
        self.count, self.at = 0, -1
        self.strike: Any = None

    def passes(self) -> None:
        if self.at >= 0:
            self.count += 1
            if self.count - 1 == self.at:
                self.strike()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes()
        return _Passed.apply(x, self)  # type: ignore[no-any-return, no-untyped-call]


class _Passed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, struck: Struck) -> torch.Tensor:
        ctx.struck = struck
        return x + 0

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.struck.passes()
        return gradients[0], None


def made(kinds: tuple[str, str, str] = ("emu",) * 3, schedule: str = "zb_h1") -> tuple[xm.PipelineEngine, nn.Module]:
    torch.set_default_device("cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Struck(), nn.Linear(4, 4), Struck(), nn.Linear(4, 4), Struck())
    for stage, kind in enumerate(kinds):
        model[2 * stage].to(kind)
    engine = xm.PipelineEngine(
        model,
        (torch.zeros(2, 4),),
        meshes=[xm.Mesh([rank], device_type=kind) for rank, kind in enumerate(kinds)],
        split=xm.split_at("2", "4"),
        num_microbatches=MICROBATCHES,
        loss_fn=F.mse_loss,
        schedule=schedule,
    )
    return engine, model


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(2 * MICROBATCHES, 4), torch.ones(2 * MICROBATCHES, 4)


def trains(rank: int, world_size: int, victim: int, at: int, number: int) -> str:
    """One is struck in its action number `at`."""
    start(TIMEOUT if number == signal.SIGSTOP else None)
    engine, model = made()
    x, y = batch()
    engine.step(x, target=y)
    struck = model.get_submodule(str(2 * rank + 1))
    assert isinstance(struck, Struck)
    if rank == victim:
        struck.at, struck.strike = at, lambda: os.kill(os.getpid(), number)
    return until_it_fails(engine)


def until_it_fails(engine: xm.PipelineEngine, gate: Any = None) -> str:
    x, y = batch()
    with pytest.raises(xm.PeerError) as caught:  # noqa: PT012
        while True:
            engine.step(x, target=y)
    if gate is not None:
        gate.release()
    engine.close()
    leave()
    return f"{caught.value.ranks}: {caught.value}"


ALL = [
    (victim, at, number)
    for victim in range(3)
    for at in range(2 * MICROBATCHES)
    for number in (signal.SIGKILL, signal.SIGSTOP)
]


@pytest.mark.in_turn(6)
@pytest.mark.parametrize("part", range(6))
def test_rank_dies_or_stops_at_any_action(part: int) -> None:
    for victim, at, number in ALL[part::6]:
        with World(trains, 3, victim, at, number, backend=None) as world:
            for value in survive(world, victim):
                assert value.startswith(f"({victim},)"), (value, victim, at, number)


def trains_beside_a_held_device(rank: int, world_size: int, held: int) -> str:
    """A device that does not move keeps its rank from nothing but its own values."""
    start()
    import emu_device

    engine, _ = made()
    x, y = batch()
    engine.step(x, target=y)
    gate = emu_device.hold(max_ms=HELD_MS) if rank == held else None
    mark("running")
    return until_it_fails(engine, gate)


@pytest.mark.parametrize(("victim", "held"), [(0, 1), (2, 0), (1, 2)])
def test_rank_dies_beside_a_held_device(victim: int, held: int) -> None:
    with World(trains_beside_a_held_device, 3, held, backend=None) as world:
        for value in strike(world, victim, signal.SIGKILL):
            assert value.startswith(f"({victim},)"), value


def raises(rank: int, world_size: int) -> None:
    """A stage raises in each of its actions: a StageError on all ranks, and a new engine on them trains."""
    x, y = batch()
    for failing in range(3):
        for at in range(2 * MICROBATCHES):
            engine, model = made(("emu", "cpu", "emu"))
            engine.step(x, target=y)
            dist.barrier()  # a failure ends what others are still at
            struck = model.get_submodule(str(2 * rank + 1))
            assert isinstance(struck, Struck)
            if rank == failing:

                def fail() -> None:
                    raise FileNotFoundError("no such file")

                struck.at, struck.strike = at, fail
            with pytest.raises(xm.StageError, match=f"stage {failing} failed on rank {failing} in microbatch"):  # noqa: PT012
                engine.step(x, target=y)
                engine.step(x, target=y)  # a rank may have ended its step before another fails in its last action
            engine.close()
    engine, _ = made()
    engine.step(x, target=y)
    engine.close()


def test_stage_raises_at_any_action() -> None:
    on_device(raises, 3)


class Lookup(nn.Module):
    """Its kernel fails, later, for a number that is not in the table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.table(x)
        return y


def fails_on_the_device(rank: int, world_size: int) -> str:
    """Only the device notices, once the host is elsewhere."""
    torch.set_default_device("cpu")
    torch.manual_seed(0)
    model = nn.Sequential(Lookup(), nn.Linear(4, 4)).to("emu")
    engine = xm.PipelineEngine(
        model,
        (torch.zeros(2, dtype=torch.int64),),
        meshes=[xm.Mesh([rank], device_type="emu") for rank in range(2)],
        split=xm.split_at("1"),
        num_microbatches=MICROBATCHES,
        loss_fn=F.mse_loss,
    )
    x, y = torch.arange(6), torch.zeros(6, 4)
    engine.step(x, target=y)
    dist.barrier()
    x[3] = 100
    with pytest.raises((xm.StageError, xm.PeerError, RuntimeError)) as caught:  # noqa: PT012
        for _ in range(2):
            engine.step(x, target=y)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_kernel_fails() -> None:
    for text in on_device(fails_on_the_device, 2):
        assert "out of range" in text, text
