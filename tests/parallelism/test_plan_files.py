"""Plans that were saved: by earlier versions, and by this one."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from planned_cases import PLANS, whole_of
from small_models import Gpt
from torch import nn
from torch.nn import functional as F

import torch_xmesh as xm
from torch_xmesh.testing import spawn

FOLDER = Path(__file__).parent / "version1"


class AddsPositions(nn.Module):
    """Partial sums of a layer could pass through the addition of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64, bias=False))
        self.positions = nn.Parameter(torch.linspace(-1, 1, 16 * 64).view(16, 64))
        self.register_buffer("shift", torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layers(x) + self.positions + self.shift).mean(1)  # type: ignore[no-any-return]


def train_with_adamw(rank: int, world_size: int, name: str) -> None:
    torch.manual_seed(2)
    model = AddsPositions().double()
    whole, x = copy.deepcopy(model), torch.randn(8, 16, 64, dtype=torch.float64)
    plan = xm.ParallelPlan.from_json(PLANS[name](model, (x[:4],)).to_json())
    assert all(-2 not in one.state for stage in plan.stages for one in stage.parameters)
    engine = xm.PipelineEngine(model, (x[:4],), plan=plan, loss_fn=F.mse_loss)
    optimizers = [torch.optim.AdamW(one.parameters(), 0.01) for one in (engine, whole)]
    for _ in range(3):
        engine.step(x, target=torch.ones(8, 64, dtype=torch.float64))
        F.mse_loss(whole(x), torch.ones(8, 64, dtype=torch.float64)).backward()  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for key, parameter in engine.named_parameters():
        torch.testing.assert_close(whole_of(parameter.detach()), whole.get_parameter(key).detach())
    engine.close()


@pytest.mark.parametrize("name", PLANS)
def test_no_plan_holds_a_parameter_as_a_partial_sum(name: str) -> None:
    spawn(train_with_adamw, 4, name)


def train_saved(rank: int, world_size: int, path: str) -> None:
    torch.manual_seed(2)
    model = Gpt(num_layers=2).double()
    whole = copy.deepcopy(model)
    tokens, target = torch.randint(0, 16, (8, 8)), torch.randn(8, 8, 96, dtype=torch.float64)
    engine = xm.PipelineEngine(model, (tokens[:4],), plan=xm.ParallelPlan.load(path), loss_fn=F.mse_loss)
    engine.step(tokens, target=target)
    F.mse_loss(whole(tokens), target).backward()  # type: ignore[no-untyped-call]
    for name, parameter in engine.named_parameters():
        torch.testing.assert_close(whole_of(parameter.grad), whole.get_parameter(name).grad)
    engine.close()


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.stem)
def test_a_file_of_version_1_runs(path: Path) -> None:
    spawn(train_saved, 4, str(path))
