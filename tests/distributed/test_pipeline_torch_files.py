"""Schedule files that torch's own classes write run on our engine, to the losses and gradients of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from pipeline_cases import Run, train_and_compare
from test_schedule import TORCHS, torch_csv

import torch_xmesh as xm
from torch_xmesh.testing import spawn

SPLIT = ("blocks.0.feed", "blocks.1", "blocks.2", "blocks.3.norm2", "head")


def train(rank: int, world_size: int, places: list[int], text: str) -> None:
    split = SPLIT[len(SPLIT) + 1 - len(places) :]
    run = Run("gpt", split, tuple([place] for place in places), xm.Schedule.from_csv(text), 6, 13, steps=2)
    train_and_compare(run)


@pytest.mark.parametrize(
    ("kind", "places"), [(kind, places) for kind, places, _ in TORCHS], ids=lambda value: getattr(value, "__name__", "")
)
def test_torchs_files_run(kind: type, places: list[int], tmp_path: Path) -> None:
    spawn(train, 3, places, torch_csv(kind, places, 6, tmp_path), timeout=60)
