"""States of planned engines, into and from engines of any other plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from planned_cases import PLANS
from small_models import Gpt
from torch import nn
from torch.nn import functional as F

import torch_xmesh as xm
from torch_xmesh.testing import spawn


class Convolutions(nn.Module):
    """Statistics of channels, which devices share where they share the channels; what nobody reads; another name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(4, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.last, self.unread = nn.Conv2d(16, 4, 3, padding=1), nn.Linear(3, 3)
        self.again = self.norm
        self.table: torch.Tensor
        self.register_buffer("table", torch.arange(5.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.norm(self.first(x)).relu())
        return out


def gpt() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    model = Gpt(num_layers=2)
    model.head.weight = model.tokens.weight
    return model, torch.randint(0, 96, (16, 16)), torch.randn(16, 16, 96)


def convolutions() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    return Convolutions(), torch.randn(16, 4, 8, 8), torch.randn(16, 4, 8, 8)


MODELS = {"gpt": gpt, "convolutions": convolutions}


def engine_of(name: str, plan: str) -> tuple[xm.PipelineEngine, torch.optim.Optimizer]:
    model, x, _ = MODELS[name]()
    engine = xm.PipelineEngine(model, (x[:8],), plan=PLANS[plan](model, (x[:8],)), loss_fn=F.mse_loss)
    return engine, torch.optim.Adam(engine.parameters(), 0.01, eps=1e-3)


def saves(rank: int, world_size: int, name: str, plan: str, folder: str) -> None:
    engine, optimizer = engine_of(name, plan)
    _, x, y = MODELS[name]()
    for _ in range(2):
        engine.step(x, target=y)
        optimizer.step()
        engine.zero_grad()
    dcp.save(engine.state_dict(optimizer), checkpoint_id=folder)
    engine.close()


def passes_on(rank: int, world_size: int, name: str, plan: str, source: str, target: str) -> None:
    """Takes a state that another plan has saved, and saves it again."""
    engine, optimizer = engine_of(name, plan)
    state = engine.state_dict(optimizer)
    dcp.load(state, checkpoint_id=source)
    engine.load_state_dict(state, optimizer)
    dcp.save(engine.state_dict(optimizer), checkpoint_id=target)
    engine.close()


def alone(rank: int, world_size: int, name: str, paths: list[str]) -> None:
    """One process reads what plans have saved, bitwise the same, and has trained to the same."""
    found: list[dict[str, torch.Tensor]] = []
    for path in paths:
        model, x, y = MODELS[name]()
        optimizer = torch.optim.Adam(model.parameters(), 0.01, eps=1e-3)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        states: dict[str, torch.Tensor] = {
            f"{name}/{key}": value
            for name, one in model.named_parameters()
            for key, value in optimizer.state[one].items()
        }
        values = model.state_dict()
        whole: dict[str, Any] = {"model": values, "optimizer": states, "step": 0}
        dcp.load(whole, checkpoint_id=path)
        assert whole["step"] == 2
        found.append({**values, **states})
    for other in found[1:]:
        assert {*other} == {*found[0]}
        for key, value in other.items():
            assert torch.equal(value, found[0][key]), key
    fresh = MODELS[name]()[0].state_dict()
    changed = {key for key, value in fresh.items() if not torch.equal(value, found[0][key])}
    assert changed
    assert not {key for key in changed if key.startswith(("unread", "table"))}
    reference, x, y = MODELS[name]()
    optimizer = torch.optim.Adam(reference.parameters(), 0.01, eps=1e-3)
    for _ in range(2):
        for half, part in zip(x.chunk(2), y.chunk(2), strict=True):
            (F.mse_loss(reference(half), part) / 2).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    for key, value in reference.state_dict().items():
        if not key.endswith("num_batches_tracked"):
            torch.testing.assert_close(found[0][key], value, rtol=1e-3, atol=1e-3, msg=key)


@pytest.mark.parametrize("name", [*MODELS])
def test_states_go_from_plan_to_plan(name: str, tmp_path: Path) -> None:
    """Saved under one plan, loaded and saved under each other one in turn, and read by one process: bitwise the same,
    optimizer's states too."""
    paths = [str(tmp_path / plan) for plan in PLANS]
    first, *others = PLANS
    spawn(saves, 4, name, first, paths[0], timeout=120)
    for plan, source, target in zip(others, paths, paths[1:], strict=False):
        spawn(passes_on, 4, name, plan, source, target, timeout=120)
    spawn(alone, 1, name, paths, timeout=120)
