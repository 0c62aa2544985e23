"""Plans on a device whose ranks die, stop or fail at any collective, segment or parcel: every survivor raises, and can
leave; also where the collective is the device's own, which then never ends by itself."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from device_ranks import on_device, start
from faults import leave, survive
from small_models import Mlp
from test_planned_faults import PLANS, at_places, number_of_places, raises_everywhere
from torch import nn
from torch.nn import functional as F

import torch_xmesh as xm
from torch_xmesh.parallelism.running import stage_groups
from torch_xmesh.testing import World, mark

pytestmark = pytest.mark.timeout(900)  # the first test builds the device
TIMEOUT = 4.0


class Normed(nn.Module):
    """Batch norm over devices: its moments are added up by the device's backend."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x)
        return y


def make(name: str) -> tuple[xm.PipelineEngine, torch.Tensor]:
    torch.set_default_device("cpu")
    torch.manual_seed(1)
    is_normed = name == "batch norm"
    model, x = (Normed() if is_normed else Mlp(64, 4)).double(), torch.randn(16, 64, dtype=torch.float64)
    plan = PLANS["data" if is_normed else name][1](model, (x,))
    return xm.PipelineEngine(model.to("emu"), (x,), plan=plan, loss_fn=F.mse_loss), torch.cat([x, x])


NAMES = ["batch norm", "megatron", "ZeRO-3", "2x2"]
RANKS = {"batch norm": 2, **{name: count for name, (count, _) in PLANS.items()}}


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("name", NAMES)
def test_a_rank_raises_anywhere(name: str) -> None:
    for rank, told in enumerate(on_device(raises_everywhere, RANKS[name], name, make)):
        assert told
        for text in told:
            assert "no such shard" in text, (rank, text)
            assert rank == 1 or (text.startswith("StageError") and "rank 1" in text), (rank, text)


def struck(rank: int, world_size: int, name: str, part: float, number: int) -> Any:
    """Rank 1 gets a signal at a place, which lies at that part of a step."""
    start(TIMEOUT if number == signal.SIGSTOP else None)
    turn = int(part * (number_of_places(name, make) - 1))
    engine, batch = make(name)
    engine.step(batch, target=batch)

    def ends(count: int) -> None:
        if count == turn and rank == 1:
            mark("there")
            os.kill(os.getpid(), number)

    with at_places(ends), pytest.raises(xm.PeerError) as caught:  # noqa: PT012
        engine.step(batch, target=batch)
        engine.step(batch, target=batch)  # another stage may be through with the first
    engine.close()
    leave()
    return caught.value.ranks, str(caught.value)


@pytest.mark.in_turn(8)
@pytest.mark.parametrize("part", [0.0, 0.25, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("name", NAMES)
def test_a_rank_dies_or_stops_anywhere(name: str, number: int, part: float) -> None:
    with World(struck, RANKS[name], name, part, number, backend=None) as world:
        world.wait_mark(1, "there", 60)
        for value in survive(world, 1):
            assert value[0] == (1,), value


def waits_for_a_collective(rank: int, world_size: int, number: int) -> Any:
    """The loss reads a value on the host, which waits for the device, and that for a collective with rank 1."""
    start(TIMEOUT if number == signal.SIGSTOP else None)
    torch.set_default_device("cpu")
    torch.manual_seed(1)
    model, x = Normed().double(), torch.randn(16, 64, dtype=torch.float64)
    plan = PLANS["data"][1](model, (x,))

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        output.sum().item()
        return F.mse_loss(output, target)

    engine, batch = xm.PipelineEngine(model.to("emu"), (x,), plan=plan, loss_fn=loss_fn), torch.cat([x, x])
    engine.step(batch, target=batch)

    def ends(count: int) -> None:
        if count == 1 and rank == 1:  # a collective: the segment was 0
            mark("there")
            os.kill(os.getpid(), number)

    with at_places(ends), pytest.raises(xm.PeerError) as caught:
        engine.step(batch, target=batch)
    engine.close()
    leave()
    return caught.value.ranks, str(caught.value)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_host_waits_for_a_collective_with_the_dead(number: int) -> None:
    with World(waits_for_a_collective, 2, number, backend=None) as world:
        world.wait_mark(1, "there", 60)
        for value in survive(world, 1):
            assert value[0] == (1,), value


def dies_while_groups_are_connected(rank: int, world_size: int, number: int) -> Any:
    """Rank 1, whom the others wait for to make a communicator with, which nothing aborts."""
    start(TIMEOUT if number == signal.SIGSTOP else None)
    connect = stage_groups._connect

    def struck(*args: Any) -> None:
        if rank == 1:
            mark("there")
            os.kill(os.getpid(), number)
        connect(*args)

    stage_groups._connect = struck  # type: ignore[assignment]
    with pytest.raises(xm.PeerError) as caught:
        make("megatron")
    return caught.value.ranks


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_dies_while_groups_are_connected(number: int) -> None:
    with World(dies_while_groups_are_connected, 2, number, backend=None) as world:
        world.wait_mark(1, "there", 60)
        outcome = world.wait(0, 60)
        assert outcome.error is None, outcome.error
        assert outcome.value == (1,)
        world.signal(1, signal.SIGKILL)


def on_other_kinds(rank: int, world_size: int) -> str:
    """A forgotten model.to() on one rank."""
    torch.set_default_device("cpu")
    torch.manual_seed(1)
    model, x = Mlp(64, 4).double(), torch.randn(16, 64, dtype=torch.float64)
    plan = PLANS["megatron"][1](model, (x,))
    with pytest.raises(ValueError, match="disagree") as caught:
        xm.PipelineEngine(model.to("emu") if rank == 1 else model, (x,), plan=plan, loss_fn=F.mse_loss)
    return str(caught.value)


def test_models_on_other_kinds_of_device() -> None:
    for text in on_device(on_other_kinds, 2):
        assert "the model's type of device" in text
        assert "emu" in text
