"""split="auto" under a limit of memory, with the schedule that the engine runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import torch_xmesh as xm
from torch_xmesh.testing import serial_step, spawn

ROUNDS = 30
KEPT = ROUNDS * 2 * 16 * 4
PARAMETERS = 4 * 4 * 16 * 16
LIMIT = 3 * (PARAMETERS + KEPT) + 2 * 16 * 4
"""Three blocks and what they receive, of one microbatch, or one block of three microbatches; no two blocks of three."""


class Block(nn.Module):
    """Keeps its output many times."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for _ in range(ROUNDS):
            x = torch.tanh(x)
        return x


def engine_of(**options: Any) -> xm.PipelineEngine:
    """An engine of a model on meta, whose costs are counted and not timed."""
    with torch.device("meta"):
        model = nn.Sequential(*(Block() for _ in range(4)))
    defaults = {"split": "auto", "schedule": "eager_1f1b", "num_microbatches": 4, "loss_fn": F.mse_loss}
    settings: dict[str, Any] = {**defaults, **options}
    meshes = [xm.Mesh([0]), xm.Mesh([1])]
    return xm.PipelineEngine(
        model,
        (torch.empty(2, 16),),
        meshes=meshes,
        data_axis=0,
        parallelize=lambda stage, module, mesh: filled(module.to_empty(device="cpu")),
        **settings,
    )


def filled(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        nn.init.eye_(parameter)
    return module


def limited(rank: int, world_size: int) -> list[list[str]]:
    reference = filled(nn.Sequential(*(Block() for _ in range(4))))
    x, y = torch.rand(8, 16, generator=torch.Generator().manual_seed(0)), torch.ones(8, 16)
    serial_step(reference, (x,), target=y, loss_fn=F.mse_loss, num_microbatches=4)
    expected = dict(reference.named_parameters())
    names = []
    for limit in (None, LIMIT):
        engine = engine_of(memory_limit_bytes=limit)
        engine.step(x, target=y)
        for name, parameter in engine.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[name].grad)
        names.append([name for name, _ in engine.named_parameters()])
        engine.close()
    return names


def test_limit_moves_the_split() -> None:
    first, second = spawn(limited, 2, timeout=120)
    weights = [f"{block}.inner.weight" for block in range(4)]
    assert first == [weights[:2], weights[:1]]
    assert second == [weights[2:], weights[1:]]


def refused(rank: int, world_size: int, options: dict[str, Any]) -> str:
    with pytest.raises(ValueError) as caught:
        engine_of(**options)
    dist.barrier()
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"memory_limit_bytes": 1000}, "keeps memory_limit_bytes=1000: the largest single module call needs"),
        ({"memory_limit_bytes": LIMIT, "schedule": "gpipe"}, "in flight (by stage: [4, 4])"),
        ({"memory_limit_bytes": LIMIT, "split": xm.split_at("2"), "schedule": "1f1b"}, 'is for split="auto"'),
    ],
)
def test_limit_that_nothing_keeps(options: dict[str, Any], text: str) -> None:
    for value in spawn(refused, 2, options, timeout=120):
        assert text in value, value
