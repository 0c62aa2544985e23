"""Pipelines on real processes against one process: every model, schedule, number of stages and mesh."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from pipeline_cases import ONE, Run, cases, compare, engine_of_layers, has_output, train_and_compare
from torch import nn
from torch.nn import functional as F

from torch_xmesh.testing import serial_step, spawn


def train_all(rank: int, world_size: int, runs: list[Run]) -> int:
    mine = [run for run in runs if rank in run.ranks]
    for run in mine:
        train_and_compare(run)
    return len(mine)


MODELS = [
    Run(case.name, split, tuple(ONE[str(len(split) + 1)]))
    for case in cases()
    for split in case.splits
    if len(split) < 4
]
SPLIT_BACKWARDS = [
    dataclasses.replace(
        run, schedule=("zb_h1", "eager_split")[index % 2], microbatches=3 + index % 3, samples=13, steps=2
    )
    for index, run in enumerate(MODELS)
]
SPLITS = {1: (), 2: ("layers.2",), 3: ("layers.1", "layers.3"), 4: ("layers.1", "layers.2", "layers.3")}
SCHEDULES = [
    Run("mlp", split, tuple(ONE[str(stages)]), schedule, microbatches, samples)
    for schedule in ("gpipe", "1f1b", "eager_1f1b", "zb_h1", "eager_split")
    for stages, split in SPLITS.items()
    for microbatches, samples in ((4, 8), (5, 13), (2, 2))
]
SHARED = [
    Run("mlp", SPLITS[4], ([0], [1], [0], [1]), "interleaved_1f1b"),
    Run("mlp", SPLITS[4], ([0], [1], [0], [1]), "gpipe", 3, 7),
    Run("gpt", ("blocks.1", "blocks.2", "head"), ([0], [1], [0], [1]), "interleaved_1f1b", 2, 4),
    Run("gpt", ("blocks.2",), ([0], [0])),
    Run("unet", ("bottom", "decoders.0", "head"), ([0], [1], [1], [0]), "gpipe"),
    Run("mlp", SPLITS[4], ([0, 1], [2, 3], [0, 1], [2, 3]), "interleaved_1f1b"),
    Run("unet", ("bottom", "decoders.0", "head"), ([0], [1], [1], [0]), "1f1b", 5, 11),
    Run("gpt", ("blocks.1", "blocks.2", "head"), ([0, 1], [2], [2], [0, 1]), "interleaved_1f1b", 5, 10),
    Run("mlp", SPLITS[4], ([0], [0], [1, 2], [1, 2]), "1f1b", 4, 9),
    Run("unet", ("bottom", "decoders.0", "head"), ([0], [1], [1], [1]), "eager_1f1b"),
    Run("mlp", SPLITS[4], ([3], [0], [3], [1]), "auto", 7, 15),
    Run("mlp", SPLITS[4], ([0], [1], [1], [0]), "eager_1f1b", overlap=False),
    Run("unet", ("bottom", "decoders.0", "head"), ([0], [1], [1], [0]), "zb_h1", 5, 11),
    Run("gpt", ("blocks.1", "blocks.2", "head"), ([0], [1], [1], [0]), "zb_v", 5, 11),
    Run("mlp", SPLITS[4], ([0, 1], [2, 3], [0, 1], [2, 3]), "interleaved_zb", 4, 9),
    Run("mlp", SPLITS[4], ([0], [1], [0], [1]), "looped_bfs", 3, 7),
    Run("gpt", ("blocks.1", "blocks.2", "head"), ([0, 1], [2], [2], [0, 1]), "eager_split", 5, 10),
]
OFF = [
    Run("mlp", SPLITS[4], tuple(ONE["4"]), "1f1b", overlap=False),
    Run("unet", ("bottom",), ([0], [1]), "gpipe", overlap=False),
    Run("unet", ("bottom",), ([0], [1]), "eager_split", overlap=False),
]
MESHES = (
    ("eager_1f1b", ([0, 1], [2]), 8),
    ("1f1b", ([0], [1, 2]), 8),
    ("eager_1f1b", ([[0], [1]], [[2, 3]]), 8),
    ("1f1b", ([[0, 1]], [[2], [3]]), 8),
    ("eager_1f1b", ([0, 1], [2, 3]), 16),
    ("gpipe", ([0, 1], [2, 3]), 11),
    ("gpipe", ([[0, 1]], [[0], [1]]), 8),
    ("eager_split", ([0, 1], [2]), 8),
    ("zb_h1", ([[0], [1]], [[2, 3]]), 8),
)
MIXED = [
    Run(model, split, meshes, schedule, 4, samples)
    for model, split, chosen in (
        ("mlp", ("layers.2",), MESHES),
        ("gpt", ("blocks.2",), MESHES[3:6]),
        ("unet", ("bottom",), MESHES[:5:4]),
        ("bert", ("layers.1",), MESHES[2:4]),
    )
    for schedule, meshes, samples in chosen
]
WIDE = [
    Run("mlp", (), ([[0, 1], [2, 3]],), samples=9),
    Run("mlp", ("layers.2",), ([[0, 1], [2, 3]], [[0, 2], [1, 3]]), "gpipe"),
    Run("mlp_dropout", ("layers.1",), ([0, 1], [2, 3])),
    Run("gpt_checkpoint", ("blocks.1",), ([[0, 1]], [[2, 3]])),
    Run("mlp", ("layers.2",), ([0, 1, 2], [3]), samples=17),
]


def test_models() -> None:
    spawn(train_all, 4, MODELS, timeout=240)


def test_split_backwards() -> None:
    spawn(train_all, 4, SPLIT_BACKWARDS, timeout=240)


def test_schedules() -> None:
    spawn(train_all, 4, SCHEDULES, timeout=240)


def test_several_stages_per_rank() -> None:
    spawn(train_all, 4, SHARED, timeout=120)


def test_without_overlap() -> None:
    spawn(train_all, 4, OFF, timeout=120)


def test_mixed_meshes() -> None:
    spawn(train_all, 4, MIXED + WIDE, timeout=240)


def lost_on_the_way(rank: int, world_size: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x, y = torch.ones(4, 4), torch.ones(4, 4)
    with engine_of_layers(copy.deepcopy(model), (2, 4), "1", num_microbatches=2) as engine:
        losses: list[torch.Tensor] = []
        output = engine.step(x, target=y, losses=losses)
        expected = serial_step(model, (x,), target=y, loss_fn=F.mse_loss, num_microbatches=2)
        compare(engine, model, expected, output, losses, "as it is")
        for wrong, found in ((None, []), (x, losses)) if has_output(engine) else ((x, losses), (None, [x])):
            with pytest.raises(AssertionError):
                compare(engine, model, expected, wrong, found, "wrong")


def test_a_comparison_notices_what_is_missing_or_too_much() -> None:
    spawn(lost_on_the_way, 2)
