"""I and W in the engine: what cannot be split is said, a failure in either names its stage, and memory stays
bounded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import torch_xmesh as xm
from torch_xmesh.testing import serial_step, spawn


class Recomputed(nn.Module):
    """A layer behind a checkpoint."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(checkpoint(self.layer, x, use_reentrant=self.use_reentrant))


def make(rank: int, model: list[nn.Module], **options: Any) -> xm.PipelineEngine:
    stages = [stage if rank == k else None for k, stage in enumerate(model)]
    return xm.PipelineEngine(
        stages,
        (torch.empty(2, 4),),
        meshes=[xm.Mesh([k]) for k in range(len(model))],
        **{"split": None, "num_microbatches": 6, "loss_fn": F.mse_loss, "schedule": "eager_split", **options},
    )


def whole_and_said(rank: int, world_size: int) -> str:
    """Stage 1 is checkpointed reentrantly, stage 2 not."""
    torch.manual_seed(0)
    model = [nn.Linear(4, 4), Recomputed(True), Recomputed(False)]
    reference = copy.deepcopy(nn.Sequential(*model))
    engine = make(rank, model)
    x, y = torch.randn(12, 4), torch.randn(12, 4)
    for _ in range(2):
        engine.step(x, target=y)
        serial_step(reference, (x,), target=y, loss_fn=F.mse_loss, num_microbatches=6)
    for parameter, expected in zip(model[rank].parameters(), reference[rank].parameters(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, expected.grad)
    text = engine.summary()
    engine.close()
    return text


def test_what_cannot_be_split_is_said() -> None:
    summaries = spawn(whole_and_said, 3, timeout=60)
    assert summaries[0] == summaries[1] == summaries[2]
    *_, last = summaries[0].splitlines()
    assert last.startswith("stage 1: I is the whole backward and W nothing, since CheckpointFunctionBackward")
    assert summaries[0].count("I is the whole backward") == 1


class Shifted(nn.Module):
    """Its input's gradient is its parameter's, where a microbatch is one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table


def shared_gradients(rank: int, world_size: int, schedule: str) -> None:
    torch.manual_seed(0)
    model = [Shifted() for _ in range(4)]
    reference = copy.deepcopy(nn.Sequential(*model))
    places = [0, 1, 1, 0]
    engine = xm.PipelineEngine(
        [stage if rank == place else None for stage, place in zip(model, places, strict=True)],
        (torch.empty(1, 4),),
        meshes=[xm.Mesh([place]) for place in places],
        split=None,
        num_microbatches=8,
        loss_fn=F.mse_loss,
        schedule=schedule,
    )
    for step in range(3):
        torch.manual_seed(step)
        x, y = torch.randn(8, 4), torch.randn(8, 4)
        engine.step(x, target=y)
        serial_step(reference, (x,), target=y, loss_fn=F.mse_loss, num_microbatches=8)
        for stage, place in enumerate(places):
            if rank == place:
                assert model[stage].table.grad is not None
                torch.testing.assert_close(model[stage].table.grad, reference[stage].table.grad)
    engine.close()


@pytest.mark.parametrize("schedule", ["zb_v", "eager_split", "zb_h1"])
def test_a_gradient_that_is_a_weights_too(schedule: str) -> None:
    spawn(shared_gradients, 2, schedule, timeout=60)


def reasons_change(rank: int, world_size: int) -> None:
    model: list[nn.Module] = [nn.Linear(4, 4), Recomputed(True)]
    engine = make(rank, model)
    for use_reentrant in (True, False):
        model[1].use_reentrant = use_reentrant  # type: ignore[assignment]
        engine.step(torch.randn(12, 4), target=torch.randn(12, 4))
        assert ("I is the whole backward" in engine.summary()) is use_reentrant
    engine.close()


def test_reasons_are_of_the_last_step() -> None:
    spawn(reasons_change, 2, timeout=60)


def scaled_and_autocast(rank: int, world_size: int) -> None:
    """A GradScaler, autocast around the step, and accumulation over two steps."""
    torch.manual_seed(0)
    model: list[nn.Module] = [
        nn.Sequential(nn.Linear(4, 8), nn.ReLU()),
        nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4)),
    ]
    x, y = torch.randn(12, 4), torch.randn(12, 4)
    found = []
    for schedule in ("1f1b", "eager_split"):
        mine = copy.deepcopy(model)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            engine = make(rank, mine, schedule=schedule, loss_fn=lambda o, t: F.mse_loss(o.float(), t))
            scaler = engine.scaler(torch.amp.GradScaler("cpu", init_scale=64.0))
            optimizer = torch.optim.SGD(engine.parameters(), 0.1)
            with engine.no_sync():
                engine.step(x, target=y)
            engine.step(x, target=y)
        scaler.step(optimizer)
        scaler.update()
        found.append([parameter.detach() for parameter in engine.parameters()])
        engine.close()
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_scaled_and_autocast() -> None:
    spawn(scaled_and_autocast, 2, timeout=60)


def failing_weight(rank: int, world_size: int, where: str) -> str:
    torch.manual_seed(0)
    model: list[nn.Module] = [nn.Linear(4, 4) for _ in range(3)]
    calls = []

    def fail(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise KeyError("mine")

    if rank == 1:
        if where == "W":
            next(model[1].parameters()).register_hook(fail)  # type: ignore[no-untyped-call]
        else:
            model[1].register_full_backward_hook(fail)
    engine = make(rank, model)
    with pytest.raises(xm.StageError) as caught:
        engine.step(torch.randn(12, 4), target=torch.randn(12, 4))
    assert (caught.value.stage, caught.value.microbatch) == (1, 2)
    engine.close()
    return str(caught.value)


@pytest.mark.parametrize("where", ["I", "W"])
def test_a_failure_names_its_stage(where: str) -> None:
    for text in spawn(failing_weight, 3, where, timeout=60):
        assert "stage 1 failed on rank 1 in microbatch 2 of step 0: KeyError" in text


def buffers(rank: int, world_size: int) -> None:
    model: list[nn.Module] = [nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(3)]
    engine = make(rank, model)
    counts = []
    for _ in range(6):
        engine.zero_grad()
        engine.step(torch.randn(12, 4), target=torch.randn(12, 4))
        counts.append(engine.buffer_counts)
    assert counts[1:] == [counts[1]] * 5
    engine.close()


def test_buffers_are_used_again() -> None:
    spawn(buffers, 3, timeout=60)
