"""Stages given as a list of modules: every rank has those that it likes, as long as it has what it runs."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from pipeline_cases import compare
from torch import nn
from torch.nn import functional as F

import torch_xmesh as xm
from torch_xmesh.testing import serial_step, spawn

Given = list[nn.Module | None]
ONE_EACH, SHARDED = ([0], [1], [2]), ([0, 1], [2])


def stages(is_tied: bool = False) -> nn.Sequential:
    """A tie of the first and the last stage, and one of the second with the last: both are "weight" there."""
    torch.manual_seed(0)
    one, two, three, four = (nn.Linear(4, 4) for _ in range(4))
    if is_tied:
        three.weight, four.weight = one.weight, two.weight
    return nn.Sequential(one, two, nn.Sequential(three, four))


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.double()


def make(given: nn.Module | Given, meshes: tuple[list[int], ...] = ONE_EACH) -> xm.PipelineEngine:
    return xm.PipelineEngine(
        given,
        (torch.empty(2, 4),),
        meshes=[xm.Mesh(mesh) for mesh in meshes],
        num_microbatches=2,
        loss_fn=F.mse_loss,
    )


def train(rank: int, world_size: int, has: dict[int, tuple[int, ...]], is_tied: bool) -> None:
    whole = stages(is_tied)
    reference = copy.deepcopy(whole)
    engine = make([module if stage in has[rank] else None for stage, module in enumerate(whole)])
    mine, theirs = torch.optim.SGD(engine.parameters(), 0.1), torch.optim.SGD(reference.parameters(), 0.1)
    for step in range(2):
        torch.manual_seed(step)
        x, y = torch.randn(8, 4), torch.randn(8, 4)
        mine.zero_grad()
        theirs.zero_grad()
        losses: list[torch.Tensor] = []
        output = engine.step(x, target=y, losses=losses)
        expected = serial_step(reference, (x,), target=y, loss_fn=F.mse_loss, num_microbatches=2)
        compare(engine, reference, expected, output, losses, f"step {step}")
        mine.step()
        theirs.step()
    engine.close()


@pytest.mark.parametrize(
    ("has", "is_tied"),
    [
        ({0: (0, 1, 2), 1: (1,), 2: (0, 2)}, False),
        ({0: (0, 1, 2), 1: (0, 1, 2), 2: (0, 1, 2)}, True),
        ({0: (0, 2, 1), 1: (1, 2), 2: (0, 1, 2)}, True),
    ],
    ids=["mixed", "tied", "tied mixed"],
)
def test_lists_of_stages(has: dict[int, tuple[int, ...]], is_tied: bool) -> None:
    spawn(train, 3, has, is_tied, timeout=60)


def mistake(rank: int, world_size: int, which: str) -> str:
    whole = stages(is_tied=which.startswith("tie"))
    given: Given = list(whole)
    meshes: tuple[list[int], ...] = ONE_EACH
    if which == "tie on one rank" and rank == 2:
        given[0] = None
    elif which == "tie in no stage's rank":
        given = given if rank == 1 else [given[0], None, None] if rank == 0 else [None, None, given[2]]
    elif which == "no module":
        meshes, given = SHARDED, [None if rank == 1 else whole[0], whole[1]]
    elif which == "other module" and rank == 1:
        given[0] = Doubled()
    with pytest.raises(ValueError) as caught:
        make(whole if which == "a module" and rank == 2 else given, meshes)
    return str(caught.value)


@pytest.mark.parametrize(
    ("which", "text"),
    [
        ("tie on one rank", "weight of stage 0 and 0.weight of stage 2 are one on rank 0, not on rank 2"),
        ("tie in no stage's rank", "weight of stage 0 and 0.weight of stage 2 are one on rank 1, not on rank 0"),
        ("no module", "stage 0 is None on rank 1, which is on its mesh"),
        ("other module", "ranks disagree on stage 0: on rank 0 it returns .*float32.*, on rank 1 .*float64"),
        ("a module", "ranks disagree on the model: rank . has a (list of stage modules|module), rank . has a"),
    ],
)
def test_mistakes(which: str, text: str) -> None:
    for value in spawn(mistake, 3, which, timeout=60):
        assert re.search(text, value), value
