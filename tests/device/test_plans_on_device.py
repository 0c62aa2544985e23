"""Plans whose stages are on a device, on the emulated one: to the last bit what they give on cpu."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from typing import Any

import device_plans
import pytest
import torch
from device_ranks import on_device
from planned_cases import PLANS
from small_models import Gpt

import torch_xmesh as xm
from torch_xmesh.calibration import calibrate

pytestmark = pytest.mark.timeout(900)  # the first test builds the device
Call = tuple[Callable[..., None], tuple[Any, ...]]


def runs(rank: int, world_size: int, calls: Sequence[Call]) -> None:
    import emu_device

    emu_device.delays(0.3, 300, rank)
    torch.set_default_device("cpu")
    torch.backends.cuda.enable_flash_sdp(False)  # the CPU's, too: the device has none
    for body, args in calls:
        try:
            body(*args)
        except Exception as error:
            raise AssertionError(f"{body.__name__}{args}: {error}") from error


def test_presets() -> None:
    on_device(runs, 4, [(device_plans.preset, (name,)) for name in PLANS], timeout=800)


FEATURES: list[Call] = [
    (device_plans.overlapped, ()),
    (device_plans.on_meta, ()),
    (device_plans.used, (0,)),
    (device_plans.used, (3,)),
    (device_plans.norm_and_dropout, ("data",)),
    (device_plans.norm_and_dropout, ("megatron",)),
    (device_plans.autocast, ("ZeRO-3",)),
    (device_plans.autocast, ("megatron",)),
    (device_plans.compiled, ("megatron",)),
    (device_plans.compiled, ("pipeline with ZeRO-3",)),
]


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("call", FEATURES, ids=lambda call: f"{call[0].__name__}{call[1]}")
def test_features(call: Call) -> None:
    on_device(runs, 4, [call], timeout=800)


@pytest.mark.in_turn(10)
@pytest.mark.parametrize("first", range(0, 200, 20))
def test_random_plans(first: int) -> None:
    """200 of them with --soak."""
    on_device(runs, 4, [(device_plans.drawn, (seed,)) for seed in range(first, first + 20)], timeout=800)


def measures(rank: int, world_size: int) -> tuple[str, int]:
    """What a search is told of this device: operators' times there, links by way of host memory."""
    torch.set_default_device("cpu")
    times = xm.OperatorTimes(1e11, 1e10, "emu:0")
    torch.manual_seed(1)
    model, tokens = Gpt(num_layers=1).to("emu"), torch.zeros(8, 16, dtype=torch.int64)
    topology = calibrate(num_bytes=1 << 20, repeats=1, device="emu")
    plan = xm.presets.megatron(
        model, (tokens,), tensor_parallel=2, num_microbatches=2, devices=xm.Mesh([[0, 1]]), compute=times
    )
    assert len(times.table) > 5
    assert any(not math.isnan(seconds) for of_operator in times.table.values() for seconds in of_operator)
    return topology.to_json(), len(plan.stages)


def test_measured_on_the_device() -> None:
    found = on_device(measures, 2)
    assert found[0] == found[1]
    assert xm.Topology.from_json(found[0][0]).links.is_measured


WORKLOADS = [
    ("ResNet-50", "found", 1e9),
    ("BERT", "Megatron", 1e11),
    ("Llama", "pipeline with ZeRO-3", 1e11),
    ("Llama with checkpoints", "Megatron", 1e11),
    ("GPT-2", "found", 1e9),
    ("T5", "found", 1e11),
    ("ViT", "Megatron", 1e11),
    ("nn.TransformerEncoder", "pipeline with ZeRO-3", 1e11),
]


@pytest.mark.in_turn(4)
@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="runs on any machine with the extra `models`"
)
@pytest.mark.parametrize("part", range(4))
def test_workloads(part: int) -> None:
    on_device(runs, 4, [(device_plans.workload, case) for case in WORKLOADS[part::4]], timeout=800)


@pytest.mark.in_turn(2)
@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="runs on any machine with the extra `models`"
)
@pytest.mark.parametrize("first", [0, 4])
def test_experts(first: int) -> None:
    on_device(runs, 4, [(device_plans.of_experts, (seed,)) for seed in range(first, first + 4)], timeout=800)
