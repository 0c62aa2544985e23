"""Stages whose meshes share some ranks only: one process is the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipeline_cases import Run, train_and_compare
from torch import nn
from torch.nn import functional as F

import torch_xmesh as xm
from torch_xmesh.pipeline.ranks.stage_mesh import places_of, stage_mesh
from torch_xmesh.testing import spawn

MLP = ("layers.2", "layers.3")


def train(rank: int, world_size: int, runs: list[Run]) -> None:
    for run in runs:
        if rank in run.ranks:
            train_and_compare(run)


RUNS = [
    Run("mlp", MLP[:1], ([0, 1], [1, 2])),
    Run("mlp", MLP[:1], ([0, 1, 2, 3], [2]), "gpipe"),
    Run("mlp", MLP[:1], ([1], [0, 1]), "1f1b", overlap=False),
    Run("mlp", MLP, ([0, 1], [1, 2], [2, 3]), "eager_1f1b"),
    Run("mlp", MLP, ([[0, 1], [2, 3]], [[1], [2]], [3]), "gpipe"),
    Run("mlp", MLP, ([0, 1], [2], [1, 3]), "1f1b"),
    Run("mlp", MLP, ([0], [1, 2], [0, 1]), "interleaved_1f1b"),
]


def test_gradients_are_those_of_one_process() -> None:
    spawn(train, 4, RUNS, timeout=120)


def test_places_are_what_shares_ranks_through_others() -> None:
    def places(*meshes: Any) -> list[int]:
        return places_of(
            [
                stage_mesh(xm.Mesh(mesh), data_axis=None, has_parallelize=False, stage=k, rank=0)
                for k, mesh in enumerate(meshes)
            ]
        )

    assert places([0], [1], [0]) == [0, 1, 0]
    assert places([0, 1], [1, 2], [2, 3]) == [0, 0, 0]
    assert places([0], [1], [2], [0, 2]) == [0, 1, 0, 0]
    assert places([3], [0, 1], [2], [1, 2]) == [0, 1, 1, 1]


class Shared(nn.Module):
    """Both stages have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))  # type: ignore[no-any-return]


def tied(rank: int, world_size: int) -> str:
    with pytest.raises(ValueError) as caught:
        xm.PipelineEngine(
            Shared(),
            (torch.empty(2, 4),),
            meshes=[xm.Mesh([0, 1]), xm.Mesh([1, 2])],
            split=xm.split_at("second"),
            num_microbatches=2,
            loss_fn=F.mse_loss,
        )
    return str(caught.value)


def test_a_tied_parameter_is_refused() -> None:
    for text in spawn(tied, 3, timeout=60):
        assert "stages 0 and 1 share parameter first.weight, and rank 1, but not all ranks" in text
