"""An optimizer of the model's own parameters trains nothing of a planned engine: it says so."""

from __future__ import annotations

import warnings

import torch
from planned_cases import PLANS
from small_models import Mlp
from torch.nn import functional as F

import torch_xmesh as xm
from torch_xmesh.testing import spawn


def texts_of(engine: xm.PipelineEngine, optimizer: torch.optim.Optimizer | None, x: torch.Tensor) -> list[str]:
    """What is said in three steps."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            engine.step(x, target=x)
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
    return [str(one.message) for one in caught if "an optimizer has stepped" in str(one.message)]


def optimizes(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model, x = Mlp(64, 4).double(), torch.randn(16, 64, dtype=torch.float64)
    plan = PLANS["pipeline"](model, (x[:8],))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = xm.PipelineEngine(model, (x[:8],), plan=plan, loss_fn=F.mse_loss)
    said = [
        str(one.message) for one in caught if "the model that was given keeps its initial values" in str(one.message)
    ]
    assert len(said) == (1 if rank == 0 else 0)
    before = torch.optim.SGD(model.parameters(), 0.1)
    own = torch.optim.SGD(engine.parameters(), 0.1)
    assert texts_of(engine, None, x) == []  # gradients may be meant to add up
    assert texts_of(engine, own, x) == []
    (text,) = texts_of(engine, before, x)
    assert "Make the optimizer of engine.parameters(), not of the model's" in text
    assert texts_of(engine, before, x) == []  # once
    engine.close()


def test_an_optimizer_of_others_is_noticed() -> None:
    spawn(optimizes, 4)
