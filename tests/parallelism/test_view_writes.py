"""Writes into memory that a forward has made train under every plan as in one process."""

from __future__ import annotations

from random import Random

import pytest
import torch
from planned_cases import PLANS, train_alike
from random_plans import random_plan
from slice_models import WRITES, Slices

from torch_xmesh.testing import spawn


def trains(rank: int, world_size: int, name: str) -> None:
    torch.manual_seed(0)
    model = Slices(WRITES[name]).double()
    x, target = torch.randn(2, 32, 8, dtype=torch.float64)
    example = (x[:16],)
    plans = {key: make(model, example) for key, make in PLANS.items() if "ZeRO" not in key}
    plans |= {f"random {seed}": random_plan(model, example, {}, Random(seed)) for seed in range(4)}
    for key, plan in plans.items():
        try:
            train_alike(model, x, target, plan, 1)
        except Exception as error:
            raise AssertionError(f"{key}: {error}") from error


@pytest.mark.parametrize("name", WRITES)
def test_writes_train(name: str) -> None:
    spawn(trains, 4, name)
