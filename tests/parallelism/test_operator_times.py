"""What operators take, each measured by itself: with the sizes of a device's part, once, and kept in files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from library_arguments import made
from small_models import Gpt
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import torch_xmesh as xm
from torch_xmesh.parallelism import operator_times
from torch_xmesh.parallelism.compute import Compute
from torch_xmesh.parallelism.loops import choices_of, num_devices_used, whole_choice
from torch_xmesh.parallelism.recorded_forwards import forward_of

RATES = Compute(1e12, 1e11)


def counting(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A second is an operation of a product; a list that grows by one with each measurement."""
    calls: list[int] = []

    def count(call: Callable[[], object], *_: Any) -> float:
        with FlopCounterMode(display=False) as counted:
            call()
        calls.append(counted.get_total_flops())
        return float(calls[-1])

    monkeypatch.setattr(operator_times, "least_seconds", count)
    return calls


@pytest.mark.parametrize("name", ["GPT-2", "Llama", "BERT", "ViT", "T5", "ResNet-50", "nn.TransformerEncoder"])
def test_products_are_run_with_the_sizes_of_a_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations of each sharding of each product, forward and backward, are those of the row."""
    counting(monkeypatch)
    model, args, kwargs = made(name)
    times = xm.OperatorTimes(1e12, 1e11, "cpu")
    operators = [one for one in forward_of(model, args, kwargs).operators if one.loops.is_heavy and one.is_known]
    assert operators
    for operator in {(one.kind, one.call.text if one.call else ""): one for one in operators}.values():
        for choice in choices_of(operator.loops, (2, 2)):
            found = times.of_operator(operator, choice, (2, 2))
            own = operator.loops.flops / num_devices_used(choice, (2, 2))
            if operator.kind != "scaled_dot_product_attention":  # torch counts a causal one whole
                assert found.forward == pytest.approx(own), (operator, choice)
                num_inputs = sum(value.requires_grad and not value.is_parameter for value in operator.reads)
                assert found.backward_input == pytest.approx(own * num_inputs), (operator, choice)
            assert found.backward_weight in (0, pytest.approx(own))


def test_equal_operators_are_measured_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And not again for the next plan, nor of more layers, nor with what was saved; the plan is the same."""
    calls = counting(monkeypatch)
    times = xm.OperatorTimes(1e12, 1e11, "cpu")
    tokens = torch.zeros(8, 16, dtype=torch.int64)
    options: dict[str, Any] = {"devices": xm.Mesh([[0, 1], [2, 3]]), "num_microbatches": 4}
    plan = xm.plan_parallel(Gpt(num_layers=2), (tokens,), compute=times, **options)
    measured = len(calls)
    assert measured >= len(times.table)
    for depth in (2, 6):
        again = xm.plan_parallel(Gpt(num_layers=depth), (tokens,), compute=times, **options)
        assert depth != 2 or again.to_json() == plan.to_json()
    assert len(calls) == measured
    times.save(tmp_path / "times.json")
    loaded = xm.OperatorTimes.load(tmp_path / "times.json")
    again = xm.plan_parallel(Gpt(num_layers=2), (tokens,), compute=loaded, **options)
    assert again.to_json() == plan.to_json()
    assert len(calls) == measured
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == (tmp_path / "times.json").read_text()


class Odd(nn.Module):
    """What cannot be measured by itself, and what is measured whole."""

    def __init__(self) -> None:
        super().__init__()
        self.grouped = nn.Conv1d(8, 8, 1, groups=8)
        self.inner, self.under = nn.Linear(4, 4), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(self.grouped(x)) * 2
        x[:, :2] = 0.0
        x = F.relu(x.relu_(), inplace=True).transpose(1, 2).contiguous()
        with torch.autocast("cpu", torch.bfloat16):
            out: torch.Tensor = self.under(x)
        return torch.igamma(out, torch.ones_like(out))  # its backward raises


def test_what_cannot_be_measured_by_itself_takes_what_rates_say(monkeypatch: pytest.MonkeyPatch) -> None:
    counting(monkeypatch)
    times = xm.OperatorTimes(1e12, 1e11, "cpu")
    by_name = {one.name: one for one in forward_of(Odd(), (torch.zeros(4, 8, 4),)).operators}
    for name in ("__setitem__", "relu_", "relu", "contiguous", "under.linear", "igamma"):
        choice = whole_choice(by_name[name].loops, 1)
        assert times.of_operator(by_name[name], choice, (2,)) == RATES.of_operator(by_name[name], choice, (2,)), name
    grouped = by_name["grouped.conv1d"]
    choice = next(one for one in choices_of(grouped.loops, (2,)) if one.axes == ("g",))
    assert times.of_operator(grouped, choice, (2,)).forward == grouped.loops.flops / 2
    unknown = xm.OperatorTimes(1e12, 1e11)
    linear = by_name["inner.linear"]
    choice = whole_choice(linear.loops, 1)
    assert unknown.of_operator(linear, choice, (2,)) == RATES.of_operator(linear, choice, (2,))
    assert unknown.table == {}


class Scales(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return F.dropout(x * 1.1 + x * 1.2, 0.3) ** 2 - x**3


def test_keys_and_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What scales by another number takes as long, another power does not; nobody's random numbers are drawn."""
    counting(monkeypatch)
    times, operators = xm.OperatorTimes(1e12, 1e11, "cpu"), forward_of(Scales(4, 4), (torch.zeros(8, 4),)).operators
    before = torch.get_rng_state()
    for operator in operators:
        times.of_operator(operator, whole_choice(operator.loops, 1), (1,))
    kinds = sorted(key.partition("(")[0] for key in times.table)
    assert kinds == ["__pow__", "__pow__", "add", "dropout", "linear", "mul", "sub"]
    assert torch.equal(torch.get_rng_state(), before)


def test_times_are_of_this_machine() -> None:
    """Really measured: positive, and those of what has no gradient 0."""
    times = xm.OperatorTimes.measured()
    (linear,) = forward_of(nn.Linear(64, 64), (torch.zeros(128, 64),)).operators
    found = times.of_operator(linear, whole_choice(linear.loops, 1), (1,))
    assert found.forward > 0
    assert found.backward_input == 0
    assert found.backward_weight > 0
    assert list(times.table) == ['linear(float32[128, 64], float32[64, 64]", float32[64]") -> float32']


def test_files_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    good: dict[str, Any] = {"version": 1, "flops": 1.0, "bytes_per_s": 1.0, "machine": "", "operators": {}}
    odd: list[Any] = [[], {}, {**good, "operators": {"a": [1, 2]}}, {**good, "operators": [1]}, {**good, "version": 2}]
    for fields in odd:
        path.write_text(json.dumps(fields))
        with pytest.raises(ValueError, match="has no times of operators"):
            xm.OperatorTimes.load(path)
    for fields in ({**good, "operators": {"a": [-1, 0, 0]}}, {**good, "flops": 0}):
        path.write_text(json.dumps(fields))
        with pytest.raises(ValueError, match="seconds are positive numbers|flops is a positive number"):
            xm.OperatorTimes.load(path)
    path.write_text(json.dumps({**good, "machine": "another"}))
    assert xm.OperatorTimes.load(path).machine == "another"
    with pytest.raises(ValueError, match="was measured on another, this is cpu"):
        xm.OperatorTimes.load(path, "cpu")
