"""Random models with random skips, cut at random, on random meshes and schedules, against one process."""

from __future__ import annotations

import pytest
from pipeline_random import train_random

from torch_xmesh.testing import spawn


def train_many(rank: int, world_size: int, first: int, count: int, is_delayed: bool) -> None:
    for seed in range(first, first + count):
        train_random(seed, rank, world_size, is_delayed)


def test_random_pipelines() -> None:
    spawn(train_many, 4, 0, 16, False, timeout=240)


@pytest.mark.soak
@pytest.mark.timeout(1900)
def test_many_random_pipelines() -> None:
    spawn(train_many, 4, 1000, 400, False, timeout=1800)


@pytest.mark.soak
@pytest.mark.timeout(1900)
def test_many_delayed_random_pipelines() -> None:
    spawn(train_many, 4, 5000, 100, True, timeout=1800)
