"""Plans that were saved: by earlier versions, and by this one."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from planned_cases import whole_of
from small_models import Gpt
from torch.nn import functional as F

import torch_xmesh as xm
from torch_xmesh.testing import spawn

FOLDER = Path(__file__).parent / "version1"


def train_saved(rank: int, world_size: int, path: str) -> None:
    torch.manual_seed(2)
    model = Gpt(num_layers=2).double()
    whole = copy.deepcopy(model)
    tokens, target = torch.randint(0, 16, (8, 8)), torch.randn(8, 8, 96, dtype=torch.float64)
    engine = xm.PipelineEngine(model, (tokens[:4],), plan=xm.ParallelPlan.load(path), loss_fn=F.mse_loss)
    engine.step(tokens, target=target)
    F.mse_loss(whole(tokens), target).backward()  # type: ignore[no-untyped-call]
    for name, parameter in engine.named_parameters():
        torch.testing.assert_close(whole_of(parameter.grad), whole.get_parameter(name).grad)
    engine.close()


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.stem)
def test_a_file_of_version_1_runs(path: Path) -> None:
    spawn(train_saved, 4, str(path))
