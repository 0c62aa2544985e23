"""What operators are taken to compute and to read and write."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torch_xmesh.parallelism.compute import Compute, ComputeSeconds, compute_seconds
from torch_xmesh.parallelism.loops import whole_choice
from torch_xmesh.parallelism.recorded_forwards import forward_of

RATES = Compute(flops=1e12, bytes_per_s=1e9)


def seconds_of(model: nn.Module, x: torch.Tensor, number: int = 0) -> ComputeSeconds:
    operator = forward_of(model, (x,)).operators[number]
    return compute_seconds(operator, whole_choice(operator.loops, 1), (1,), RATES)


def test_a_product() -> None:
    found = seconds_of(nn.Sequential(nn.ReLU(), nn.Linear(512, 512, bias=False)), torch.zeros(4096, 512), 1)
    moved = 4 * (2 * 4096 * 512 + 512 * 512)
    once = max(2 * 4096 * 512 * 512 / 1e12, moved / 1e9)
    assert found.forward == pytest.approx(once)
    assert found.backward_input == pytest.approx(0.0)  # the arguments have no gradients
    assert found.backward_weight == pytest.approx(once)


def test_a_table_is_looked_into_and_its_gradient_written() -> None:
    found = seconds_of(nn.Embedding(10_000, 64), torch.zeros(8, 16, dtype=torch.int64))
    made = 8 * 16 * 64 * 4
    assert found.forward == pytest.approx((2 * made + 8 * 16 * 8) / 1e9)
    assert found.backward_weight == pytest.approx(10_000 * 64 * 4 / 1e9)
    assert found.backward_input == 0


def test_a_scale_takes_its_gradient_to_be_written() -> None:
    found = seconds_of(nn.LayerNorm(64), torch.zeros(1024, 64))
    assert found.backward_weight == pytest.approx(2 * 64 * 4 / 1e9)


def test_measured_rates() -> None:
    found = Compute.measured()
    assert 1e7 < found.flops < 1e15
    assert 1e7 < found.bytes_per_s < 1e14
