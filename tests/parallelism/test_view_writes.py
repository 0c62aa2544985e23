"""Writes into memory that a forward has made train under every plan as in one process."""

from __future__ import annotations

import copy
from random import Random

import pytest
import torch
from planned_cases import PLANS, whole_of
from random_plans import random_plan
from slice_models import WRITES, Slices
from torch.nn import functional as F

import torch_xmesh as xm
from torch_xmesh.testing import serial_step, spawn


def trains(rank: int, world_size: int, name: str) -> None:
    torch.manual_seed(0)
    model = Slices(WRITES[name]).double()
    x, target = torch.randn(2, 32, 8, dtype=torch.float64)
    example = (x[:16],)
    plans = {key: make(model, example) for key, make in PLANS.items() if "ZeRO" not in key}
    plans |= {f"random {seed}": random_plan(model, example, {}, Random(seed)) for seed in range(4)}
    for key, plan in plans.items():
        whole, own = copy.deepcopy(model), copy.deepcopy(model)
        with xm.PipelineEngine(own, example, plan=plan, loss_fn=F.mse_loss) as engine:
            engine.step(x, target=target)
            expected = serial_step(whole, (x,), target=target, loss_fn=F.mse_loss, num_microbatches=2)
            if engine.last_loss() is not None:
                assert engine.last_loss() == pytest.approx(expected.loss.item(), rel=1e-9), key
            for path, parameter in engine.named_parameters():
                wanted = whole.get_parameter(path).grad
                torch.testing.assert_close(whole_of(parameter.grad), wanted, msg=f"{key}: {path}")


@pytest.mark.parametrize("name", WRITES)
def test_writes_train(name: str) -> None:
    spawn(trains, 4, name)
