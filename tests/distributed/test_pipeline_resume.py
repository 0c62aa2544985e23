"""A run that ends and goes on from its checkpoint, in other stages: as if it had never ended."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from pipeline_cases import about
from torch import nn
from torch.nn import functional as F

import torch_xmesh as xm
from torch_xmesh.testing import serial_step, spawn


class Layers(nn.Module):
    """One layer is never called."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second, self.third, self.idle = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))  # type: ignore[no-any-return]


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(10 + step)
    return torch.randn(8, 4), torch.randn(8, 4)


def make_engine(seed: int, split: tuple[str, ...], meshes: tuple[list[int], ...]) -> xm.PipelineEngine:
    return xm.PipelineEngine(
        Layers(seed),
        (torch.empty(2, 4),),
        meshes=[xm.Mesh(mesh) for mesh in meshes],
        split=xm.split_at(*split),
        num_microbatches=4,
        loss_fn=F.mse_loss,
    )


def make_optimizer(named: Any, rate: float, decay: float) -> tuple[torch.optim.Optimizer, Any]:
    """Biases have a group of their own; StepLR lowers both groups' rates after every second step."""
    parameters = dict(named)
    biases = [parameter for name, parameter in parameters.items() if name.endswith("bias")]
    weights = [parameter for name, parameter in parameters.items() if name.endswith("weight")]
    groups = [{"params": weights, "weight_decay": decay}, {"params": biases, "lr": rate / 2}]
    optimizer = torch.optim.AdamW(groups, rate, betas=(decay, 0.99), eps=1e-2)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)


def save(rank: int, world_size: int, folder: str) -> None:
    engine = make_engine(0, ("third",), ([0, 1], [2]))
    optimizer, rate = make_optimizer(engine.named_parameters(), 0.1, 0.5)
    for step in range(3):
        optimizer.zero_grad()
        x, y = batch(step)
        engine.step(x, target=y)
        optimizer.step()
        rate.step()
    dcp.save(engine.state_dict(optimizer), checkpoint_id=folder)
    engine.close()


def resume(rank: int, world_size: int, folder: str) -> None:
    """The optimizer is made with other options; the checkpoint's count, and the next step is the serial run's."""
    engine = make_engine(1, ("second",), ([0], [1]))
    optimizer, rate = make_optimizer(engine.named_parameters(), 7.0, 0.25)
    state = engine.state_dict(optimizer)
    dcp.load(state, checkpoint_id=folder)
    engine.load_state_dict(state, optimizer)
    rate.last_epoch = 3
    reference = Layers(0)
    used = [(name, parameter) for name, parameter in reference.named_parameters() if "idle" not in name]
    other, other_rate = make_optimizer(used, 0.1, 0.5)
    for step in range(5):
        other.zero_grad()
        x, y = batch(step)
        serial_step(reference, (x,), target=y, loss_fn=F.mse_loss, num_microbatches=4)
        other.step()
        other_rate.step()
        if step >= 3:
            optimizer.zero_grad()
            engine.step(x, target=y)
            optimizer.step()
            rate.step()
    for mine, theirs in zip(optimizer.param_groups, other.param_groups, strict=True):
        for key in theirs.keys() - {"params"}:
            assert mine[key] == pytest.approx(theirs[key]) if key == "lr" else mine[key] == theirs[key], key
    expected = dict(reference.named_parameters())
    for name, parameter in engine.named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-4, atol=2e-5, msg=about(name))
    idle = {name: one.to_local() for name, one in engine.state_dict().items() if name.startswith("idle.")}
    assert set(idle) == ({"idle.weight", "idle.bias"} if rank == 0 else set())
    for name, value in idle.items():
        torch.testing.assert_close(value, expected[name].detach(), rtol=0, atol=0)
    engine.close()


def test_resume_in_other_stages(tmp_path: Path) -> None:
    spawn(save, 3, str(tmp_path / "saved"), timeout=60)
    spawn(resume, 2, str(tmp_path / "saved"), timeout=60)


def incomplete(rank: int, world_size: int) -> None:
    engine = make_engine(0, (), ([0],))
    optimizer, _ = make_optimizer(engine.named_parameters(), 0.1, 0.5)
    state = engine.state_dict(optimizer)
    for key, value, text in (
        ("first.weight/param_groups.lr", None, "the optimizer's state has no first.weight/param_groups.lr"),
        ("second.bias/param_groups.lr", 3.0, "first.bias and second.bias are in one group .* had lr 0.05 and 3.0"),
    ):
        changed = copy.copy(state["optimizer"])
        changed[key] = value
        if value is None:
            del changed[key]
        with pytest.raises(ValueError, match=text):
            engine.load_state_dict({"model": state["model"], "optimizer": changed}, optimizer)
    engine.close()


def test_options_that_do_not_fit() -> None:
    spawn(incomplete, 1, timeout=60)
