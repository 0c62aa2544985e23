"""The cases of reshards on cpu, on the emulated accelerator: the same oracle, and what cpu gives."""

from __future__ import annotations

import device_cases
import device_collectives
import mixed_cases
import pytest
import test_reshard_autograd
from device_cases import each
from device_ranks import on_device

pytestmark = pytest.mark.timeout(900)  # the first test builds the device


def late_random_layouts(rank: int, world_size: int, seed: int, count: int) -> None:
    """Every stream is late at random."""
    import emu_device

    emu_device.delays(0.3, 300, seed + rank)
    device_cases.random_layouts(rank, world_size, seed, count)


@pytest.mark.parametrize(("world_size", "count"), [(4, 200), (2, 50), (3, 50)])
def test_random_layouts(world_size: int, count: int) -> None:
    on_device(late_random_layouts, world_size, 1, count)


@pytest.mark.parametrize("world_size", [4, 2, 1])
def test_cases_of_every_accelerator(world_size: int) -> None:
    on_device(each, world_size, [device_collectives.collectives, *device_cases.CALLS])


def late_mixed_layouts(rank: int, world_size: int, seed: int, count: int) -> None:
    import emu_device

    emu_device.delays(0.3, 300, seed + rank)
    mixed_cases.random_layouts(rank, world_size, seed, count)


@pytest.mark.parametrize(("world_size", "count"), [(4, 100), (2, 50)])
def test_mixed_layouts(world_size: int, count: int) -> None:
    on_device(late_mixed_layouts, world_size, 2, count)


@pytest.mark.parametrize("world_size", [4, 1])
def test_mixed(world_size: int) -> None:
    on_device(each, world_size, mixed_cases.CASES)


def test_calls() -> None:
    on_device(each, 4, device_cases.CALLS_OF_CPU)


def test_gradients() -> None:
    on_device(test_reshard_autograd.everything, 6)
