"""Writes into memory that a forward has made train under every plan as in one process."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
import torch
from planned_cases import OPTIONS, PLANS, train_alike
from random_plans import random_plan
from slice_models import WRITES, Slices, Write

import torch_xmesh as xm
from torch_xmesh.testing import spawn

TOGETHER = 5
"""Writes in one world of processes."""


def trains(rank: int, world_size: int, names: Sequence[str], num_samples: int) -> None:
    for name in names:
        train_write(name, num_samples)


def train_write(name: str, num_samples: int) -> None:
    """Under plans found, written by hand and made at random. Those with ZeRO differ in parameters only, which are not
    written to here."""
    torch.manual_seed(0)
    model = Slices(WRITES[name]).double()
    x, target = torch.randn(2, 2 * num_samples, 8, dtype=torch.float64)
    example = (x[:num_samples],)
    plans = {key: make(model, example) for key, make in PLANS.items() if key in ("found", "megatron", "pipeline")}
    plans |= {f"random {seed}": random_plan(model, example, {}, Random(seed)) for seed in range(3)}
    for key, plan in plans.items():
        try:
            train_alike(model, x, target, plan, 1)
        except Exception as error:
            raise AssertionError(f"{name}, {key}: {error}") from error


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("first", range(0, len(WRITES), TOGETHER))
def test_writes_train(first: int) -> None:
    spawn(trains, 4, [*WRITES][first : first + TOGETHER], 16, timeout=150)


def test_writes_with_a_sample_per_device_train() -> None:
    spawn(trains, 4, ["copies of some", "by positions", "through views", "two parts"], 4, timeout=150)


def _transposed(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    h = (a + b)[:8].clone()
    part = h[:, :4]
    h.t_()
    return torch.cat([part, h[:, :4]], 1)


def _detached(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    h = a + b
    part = h[:, :4]
    h.detach_()
    return torch.cat([part, h[:, 4:]], 1)


def _drawn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    h = b.detach() * 2
    h[:, :4].normal_()
    return h * a


@pytest.mark.parametrize(("write", "named"), [(_transposed, "t_"), (_detached, "detach_"), (_drawn, "normal_")])
def test_what_writes_otherwise_is_refused(write: Write, named: str) -> None:
    """What changes the tensor, and not its memory; what draws into a part."""
    with pytest.raises(ValueError, match=f"{named} in the model itself changes memory in place that is read under"):
        xm.plan_parallel(Slices(write).double(), (torch.randn(16, 8, dtype=torch.float64),), **OPTIONS)
