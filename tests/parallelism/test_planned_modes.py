"""Planned models in both modes, of training and evaluation, and with frozen parameters."""

from __future__ import annotations

import copy

import pytest
import torch
from planned_cases import OPTIONS, whole_of
from small_models import Mlp
from torch import nn
from torch.nn import functional as F

import torch_xmesh as xm
from torch_xmesh.testing import spawn


class Drops(nn.Module):
    """What it does in training it does not in evaluation, and a counter goes on in one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.b(F.dropout(self.norm(self.a(x)), training=self.training))
        return out


def runs_in_both_modes(rank: int, world_size: int, zero: int, is_first: bool) -> None:
    """Evaluated in evaluation mode between steps in training mode, whichever the model came in."""
    torch.manual_seed(0)
    model, x = Drops().train(is_first).double(), torch.randn(16, 64, dtype=torch.float64)
    whole = copy.deepcopy(model)
    plan = xm.presets.pipeline(model, (x,), num_stages=2, tensor_parallel=1, zero=zero, **OPTIONS)
    engine = xm.PipelineEngine(model, (x,), plan=plan, loss_fn=F.mse_loss)
    optimizer, reference = (torch.optim.SGD(one.parameters(), 0.1) for one in (engine, whole))
    batch, target = torch.cat([x, x.flip(0)]), torch.ones(32, 64, dtype=torch.float64)
    drawn = []
    for _ in range(2):
        engine.eval()
        whole.eval()
        engine.evaluate(batch, target=target)
        loss = sum(F.mse_loss(whole(half), part) for half, part in zip(batch.chunk(2), target.chunk(2), strict=True))
        assert engine.last_loss() == pytest.approx(float(loss) / 2, rel=1e-9)
        engine.step(batch, target=target)  # trained as it is evaluated
        loss.backward()  # type: ignore[union-attr]
        assert engine.last_loss() == pytest.approx(float(loss) / 2, rel=1e-9)
        for parameter in whole.parameters():
            assert parameter.grad is not None
            parameter.grad /= 2
        optimizer.step()
        reference.step()
        engine.zero_grad()
        reference.zero_grad()
        engine.train()
        engine.step(batch, target=target)  # masks are the engine's
        engine.zero_grad()
        drawn.append(engine.last_loss())
        whole.train()
        for half in batch.chunk(2):
            whole(half)  # statistics
    assert drawn[0] is None or drawn[0] != drawn[1]
    engine.close()


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("zero", [0, 3])
def test_training_and_evaluation(zero: int, is_first: bool) -> None:
    spawn(runs_in_both_modes, 4, zero, is_first, timeout=120)


def trains_frozen(rank: int, world_size: int, zero: int, frozen: str) -> None:
    """Frozen parameters stay, the others' gradients are one process's; a stage may have no other."""
    torch.manual_seed(2)
    model, x = Mlp(64, 4).double(), torch.randn(16, 64, dtype=torch.float64)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(name.startswith(f"layers.{layer}") for layer in frozen))
    whole = copy.deepcopy(model)
    plan = xm.presets.pipeline(model, (x,), num_stages=2, zero=zero, **OPTIONS)
    engine = xm.PipelineEngine(model, (x,), plan=plan, loss_fn=F.mse_loss)
    trained = [parameter for parameter in engine.parameters() if parameter.requires_grad]
    optimizers = [torch.optim.SGD(one, 0.1) for one in (trained, whole.parameters()) if one]
    batch, target = torch.cat([x, x.flip(0)]), torch.ones(32, 64, dtype=torch.float64)
    for _ in range(2):
        engine.step(batch, target=target)
        F.mse_loss(whole(batch), target).backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        assert engine.clip_grad_norm_(0.5).item() == pytest.approx(norm.item(), rel=1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        engine.zero_grad()
    for name, parameter in engine.named_parameters():
        expected = whole.get_parameter(name)
        assert parameter.requires_grad == expected.requires_grad
        torch.testing.assert_close(whole_of(parameter).detach(), expected.detach(), rtol=1e-6, atol=1e-8, msg=name)
    engine.close()


@pytest.mark.parametrize("frozen", ["0", "13", "01", "23"])
@pytest.mark.parametrize("zero", [0, 3])
def test_frozen_parameters(zero: int, frozen: str) -> None:
    spawn(trains_frozen, 4, zero, frozen, timeout=60)
