"""Plans whose stages are on a device, on the emulated one: to the last bit what they give on cpu."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import device_plans
import pytest
import torch
from device_ranks import on_device
from planned_cases import PLANS

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
    (device_plans.used, (0,)),
    (device_plans.used, (3,)),
    (device_plans.norm_and_dropout, ("data",)),
    (device_plans.norm_and_dropout, ("megatron",)),
    (device_plans.autocast, ("ZeRO-3",)),
    (device_plans.autocast, ("megatron",)),
    (device_plans.compiled, ("megatron",)),
    (device_plans.compiled, ("pipeline with ZeRO-3",)),
]


@pytest.mark.parametrize("call", FEATURES, ids=lambda call: f"{call[0].__name__}{call[1]}")
def test_features(call: Call) -> None:
    on_device(runs, 4, [call], timeout=800)


@pytest.mark.in_turn(10)
@pytest.mark.parametrize("first", range(0, 200, 20))
def test_random_plans(first: int) -> None:
    """200 of them with --soak."""
    on_device(runs, 4, [(device_plans.drawn, (seed,)) for seed in range(first, first + 20)], timeout=800)
