"""The cases of reshards on cpu, on the emulated accelerator: the same oracle, and what cpu gives."""

from __future__ import annotations

import device_cases
import pytest
import test_reshard
import test_reshard_autograd
import test_reshard_many
from device_cases import Case
from device_ranks import on_device

pytestmark = pytest.mark.timeout(900)  # the first test builds the device


def late_random_layouts(rank: int, world_size: int, seed: int, count: int) -> None:
    """Every stream is late at random."""
    import emu_device

    emu_device.delays(0.3, 300, seed + rank)
    device_cases.random_layouts(rank, world_size, seed, count)


def _each(rank: int, world_size: int, cases: list[Case]) -> None:
    for case in cases:
        case(rank, world_size)


@pytest.mark.parametrize(("world_size", "count"), [(4, 200), (2, 50), (3, 50)])
def test_random_layouts(world_size: int, count: int) -> None:
    on_device(late_random_layouts, world_size, 1, count)


@pytest.mark.parametrize("world_size", [4, 2, 1])
def test_cases_of_every_accelerator(world_size: int) -> None:
    on_device(_each, world_size, [device_cases.collectives, *device_cases.CALLS])


def test_calls() -> None:
    cases = [
        test_reshard.every_dtype,
        test_reshard.many_in_flight,
        test_reshard.into_out,
        test_reshard.strided_sources,
        test_reshard.lists_and_dicts,
        test_reshard_many.order_of_a_dict_does_not_matter,
        test_reshard_many.nested_with_other_entries,
    ]
    on_device(_each, 4, cases)


def test_gradients() -> None:
    on_device(test_reshard_autograd.everything, 6)
