"""A stage that raises, a rank that dies or stops, mistakes: every rank gets the right error, and can leave."""

from __future__ import annotations

import datetime
import re
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from faults import leave, strike, timeout_of
from torch import nn
from torch.nn import functional as F
from wait_until import wait_until

import torch_xmesh as xm
from torch_xmesh.testing import World, mark, spawn

TWO, THREE = ([0], [1]), ([0], [1], [2])


class Trap(nn.Module):
    """The identity, until it is set to raise in forward or backward."""

    def __init__(self) -> None:
        super().__init__()
        self.fails = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sprung.apply(x, self)  # type: ignore[no-any-return, no-untyped-call]


class _Sprung(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, trap: Trap) -> torch.Tensor:
        ctx.trap = trap
        if trap.fails == "forward":
            raise FileNotFoundError("no such trap")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if ctx.trap.fails == "backward":
            raise FileNotFoundError("no such trap")
        return gradients[0], None


class Leafy(Trap):
    """A module that tracing does not look into."""

    __module__ = "torch.nn.trap"


class Undecided(nn.Module):
    """Looks at its data."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.second(x if x.sum() > 0 else -x)  # type: ignore[no-any-return]


def make(meshes: Any, model: Any = None, **options: Any) -> tuple[xm.PipelineEngine, nn.Module]:
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(4, 4), Leafy(), nn.Linear(4, 4), Leafy(), nn.Linear(4, 4), Leafy())
    names = {1: (), 2: ("2",), 3: ("2", "4")}[len(meshes)]
    settings: dict[str, Any] = {"num_microbatches": 4, "loss_fn": F.mse_loss, "split": xm.split_at(*names)}
    engine = xm.PipelineEngine(
        model, (torch.empty(2, 4),), meshes=[xm.Mesh(mesh) for mesh in meshes], **{**settings, **options}
    )
    return engine, model


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(8, 4), torch.ones(8, 4)


def stage_raises(rank: int, world_size: int, failing: int, phase: str) -> tuple[int, int, str]:
    engine, model = make(THREE)
    x, y = batch()
    engine.step(x, target=y)
    dist.barrier()  # a failure ends what others are still at
    if rank == failing:
        trap = model.get_submodule(str(2 * failing + 1))
        assert isinstance(trap, Trap)
        trap.fails = phase
    with pytest.raises(xm.StageError) as caught:
        engine.step(x, target=y)
    with pytest.raises(xm.StageError):
        engine.step(x, target=y)
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.step(x, target=y)
    return caught.value.stage, caught.value.microbatch, str(caught.value)


@pytest.mark.parametrize(("failing", "phase"), [(0, "forward"), (1, "backward"), (2, "forward"), (2, "backward")])
def test_stage_raises(failing: int, phase: str) -> None:
    for stage, microbatch, text in spawn(stage_raises, 3, failing, phase, timeout=60):
        assert stage == failing
        assert microbatch == 0
        assert f"stage {failing} failed on rank {failing} in microbatch 0" in text
        assert "FileNotFoundError: no such trap" in text


class Lingering(nn.Module):
    """The identity, which from its second forward in a step on lets its rank hear of a failure first."""

    __module__ = "torch.nn.lingering"

    def __init__(self) -> None:
        super().__init__()
        self.engine: xm.PipelineEngine | None = None
        self.forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.engine is not None:
            self.forwards += 1
            traffic = self.engine._transfers.traffic
            wait_until(lambda: self.forwards == 1 or traffic.has_failed)
        return x.clone()


def computes_after_a_failure(rank: int, world_size: int) -> int:
    lingering = Lingering()
    engine, model = make(TWO, nn.Sequential(nn.Linear(4, 4), lingering, nn.Linear(4, 4), Leafy()), schedule="gpipe")
    trap = model[3]  # type: ignore[index]
    lingering.engine, trap.fails = engine, "forward"
    x, y = batch()
    with pytest.raises(xm.StageError, match="stage 1 failed on rank 1 in microbatch 0"):
        engine.step(x, target=y)
    lingering.engine = None
    engine.close()
    return lingering.forwards


def test_no_action_begins_after_a_failure() -> None:
    """Its first forward may end before or after the failure; a second one lasts until then, and there is no third."""
    assert spawn(computes_after_a_failure, 2, timeout=60)[0] in (1, 2)


def loss_raises(rank: int, world_size: int) -> tuple[int, str]:
    """What the user gave as loss_fn belongs to the last stage."""
    broken: list[bool] = []

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if broken:
            return (output - target).square()
        return F.mse_loss(output, target)

    engine, _ = make(THREE, loss_fn=loss)
    x, y = batch()
    engine.step(x, target=y)
    dist.barrier()
    broken.append(True)
    with pytest.raises(xm.StageError) as caught:
        engine.step(x, target=y)
    engine.close()
    return caught.value.stage, str(caught.value)


def test_loss_raises() -> None:
    for stage, text in spawn(loss_raises, 3, timeout=60):
        assert stage == 2
        assert "loss_fn must return a scalar tensor, got a tensor of shape (2, 4)" in text


class Fickle(nn.Module):
    """Returns another shape where its data is large."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        return y[:, :3] if x.max() > 1 else y


def returns_another_shape(rank: int, world_size: int, meshes: Any) -> tuple[int, int, str]:
    stages = [Fickle(), nn.Linear(4, 4), nn.Linear(4, 4)][: len(meshes)]
    engine, _ = make(meshes, model=stages, split=None)
    x, y = batch()
    engine.step(x, target=y)
    dist.barrier()  # a failure ends what others are still at
    x[5] = 2
    with pytest.raises(xm.StageError) as caught:
        engine.step(x, target=y)
    engine.close()
    return caught.value.stage, caught.value.microbatch, str(caught.value)


@pytest.mark.parametrize(("meshes", "failing", "rows"), [(THREE, 0, 2), (([0, 1], [2]), 1, 1)])
def test_stage_returns_another_shape(meshes: Any, failing: int, rows: int) -> None:
    for stage, microbatch, text in spawn(returns_another_shape, 3, meshes, timeout=60):
        assert (stage, microbatch) == (0, 2)
        assert f"stage 0 failed on rank {failing} in microbatch 2 of step 1: ValueError: value" in text
        assert f"of stage 0 has shape [{rows}, 3] in microbatch 2, expected [{rows}, 4] on rank {failing}" in text


class HeldLosses(list[torch.Tensor]):
    """Holds its rank inside the step until rank 0 is about to refuse the next one."""

    def append(self, loss: torch.Tensor) -> None:
        if not self:
            store().get("refusing")
        super().append(loss)


def store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def refuses_the_next_step(rank: int, world_size: int) -> int:
    engine, _ = make(([0], [1, 2]), schedule="1f1b")  # "auto" ends its first step on all ranks together
    x, y = batch()
    losses = HeldLosses()
    output = engine.step(x, target=y, losses=losses)  # the last stage's ranks exchange their parts after the losses
    if rank == 0:
        store().set("refusing", "")
        with pytest.raises(ValueError, match="the batch is missing on rank 0"):
            engine.step(target=y)
    else:
        assert output.shape == (8, 4)
        with pytest.raises(ValueError, match="the batch is missing on rank 0"):
            engine.step(x, target=y)
    engine.close()
    return len(losses)


def test_a_refused_step_leaves_the_step_before_it() -> None:
    assert spawn(refuses_the_next_step, 3, timeout=60) == [0, 4, 4]


def train_for_ever(rank: int, world_size: int) -> str:
    engine, _ = make(THREE)
    x, y = batch()
    engine.step(x, target=y)
    mark("running")
    with pytest.raises(xm.PeerError) as caught:  # noqa: PT012  # the step in which it happens
        while True:
            engine.step(x, target=y)
    engine.close()
    leave()
    return f"{caught.value.ranks}: {caught.value}"


@pytest.mark.parametrize(
    ("victim", "number"), [(1, signal.SIGKILL), (0, signal.SIGKILL), (2, signal.SIGSTOP), (0, signal.SIGSTOP)]
)
def test_rank_dies_or_stops(victim: int, number: int) -> None:
    with World(train_for_ever, 3, init_kwargs=timeout_of(number)) as world:
        for value in strike(world, victim, number):
            assert value.startswith(f"({victim},)"), value


def mistake(rank: int, world_size: int, which: str) -> str:
    x, y = batch()
    with pytest.raises(ValueError) as caught:  # noqa: PT012  # the caller looks at the text
        if which == "untraceable":
            make(TWO, model=Undecided(), split=xm.split_at("second"))
        elif which == "microbatches":
            make(TWO, num_microbatches=4 + rank)
        elif which == "split":
            make(TWO, split=xm.split_at("9"))
        elif which == "meshes":
            make(THREE[:2], split=xm.split_at("2", "4"))
        elif which == "schedule":
            make(TWO, schedule="0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3\n1B0,1F0,1F1,1B1,1F2,1B2,1F3,1B3\n")
        elif which == "weights":
            make(TWO, schedule="0F0,0F1,0F2,0F3,0B0,0I1,0B2,0B3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n")
        elif which == "one rank":
            make(TWO, boundary_placements={"nothing": ((), False)} if rank == 1 else None)
        else:
            engine, _ = make(TWO, loss_fn=None if which == "loss" else F.mse_loss)
            if which == "target":
                engine.step(x)
            elif which == "batch":
                engine.step(target=y)
            elif which == "small":
                engine.step(x[:3], target=y[:3])
            elif which == "sizes":
                engine.step(x, target=y[:6])
            elif which == "shape":
                engine.step(torch.ones(8, 5), target=y)
            elif which == "loss":
                engine.step(x, target=y)
    dist.barrier()
    return str(caught.value)


@pytest.mark.parametrize(
    ("which", "text"),
    [
        ("microbatches", "ranks disagree on number of microbatches: rank . has ., rank . has ."),
        ("untraceable", r"reads values.*test_pipeline_faults.py:\d+ in forward"),
        ("split", "split point '9' is no module"),
        ("meshes", "makes 3 stages, but there are 2 meshes"),
        ("schedule", ">.*<"),
        ("weights", r"0W1 is missing(.|\n)*>B3<"),
        ("one rank", "names value 'nothing'"),
        ("target", "target is missing on rank 1, which has the last stage"),
        ("batch", "the batch is missing on rank 0: its stage 0 takes"),
        ("small", "a batch of 3 samples cannot be split into 4 microbatches"),
        ("sizes", "the target has 6 samples on rank 1, the arguments have 8 on rank 0"),
        ("shape", r"has shape \(2, 5\), the example had \(2, 4\)"),
        ("loss", "loss_fn is missing"),
    ],
)
def test_mistakes(which: str, text: str) -> None:
    for value in spawn(mistake, 2, which, timeout=60):
        assert re.search(text, value), value


def stays_away(rank: int, world_size: int, has_used: bool) -> str:
    if has_used:
        make(THREE)
    if rank == 1:
        signal.pause()
    with pytest.raises(xm.PeerError) as caught:
        make(THREE)
    assert caught.value.ranks == (1,), caught.value
    return str(caught.value)


@pytest.mark.parametrize("has_used", [False, True])
def test_a_rank_stays_away_from_the_constructor(has_used: bool) -> None:
    with World(stays_away, 3, has_used, init_kwargs={"timeout": datetime.timedelta(seconds=2)}) as world:
        for rank in (0, 2):
            outcome = world.wait(rank, 40)
            assert outcome.error is None, outcome.error
            assert re.search(
                r"rank \[1\] has not made the pipeline|pipeline .* not called by rank \[1\]", outcome.value
            )
