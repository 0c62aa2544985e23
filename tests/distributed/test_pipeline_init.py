"""Copies of a parameter that start from other values: one value from the first step on, or an error that names it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from pipeline_cases import compare
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, parallelize_module
from torch.nn import functional as F

import torch_xmesh as xm
from torch_xmesh.testing import serial_step, spawn


class Tied(nn.Module):
    """The first and the last layer share their weight; one layer has a buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second, self.last = (nn.Linear(4, 4) for _ in range(3))
        self.last.weight = self.first.weight
        self.register_buffer("scale", torch.rand(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x))) * self.scale))  # type: ignore[no-any-return]


class Added(nn.Module):
    """A layer and one that was put behind it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.added = layer, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.added(self.layer(x))  # type: ignore[no-any-return]


MESHES: dict[str, tuple[Any, ...]] = {"line": ([0, 1], [2, 3]), "grid": ([[0, 1]], [[2, 3]])}


def make(model: Any, meshes: str, **options: Any) -> xm.PipelineEngine:
    grids = [xm.Mesh(mesh) for mesh in MESHES[meshes]]
    split = xm.split_at("last") if isinstance(model, nn.Module) else None
    example = (torch.empty(2, 4),)
    return xm.PipelineEngine(
        model, example, meshes=grids, split=split, num_microbatches=2, loss_fn=F.mse_loss, **options
    )


def train(engine: xm.PipelineEngine, reference: nn.Module, shards: int) -> None:
    mine, theirs = (torch.optim.SGD(one.parameters(), 0.1) for one in (engine, reference))
    for step in range(2):
        torch.manual_seed(step)
        x, y = torch.randn(8, 4), torch.randn(8, 4)
        mine.zero_grad()
        theirs.zero_grad()
        losses: list[torch.Tensor] = []
        output = engine.step(x, target=y, losses=losses)
        options: dict[str, Any] = {"loss_fn": F.mse_loss, "num_microbatches": 2, "num_data_shards": shards}
        expected = serial_step(reference, (x,), target=y, **options)
        compare(engine, reference, expected, output, losses, f"step {step}")
        mine.step()
        theirs.step()
    engine.close()


def started_from_first(ranks: tuple[int, int]) -> Tied:
    """The model as its stages' first ranks made it; the tied weight is the first stage's."""
    first, last = Tied(ranks[0]), Tied(ranks[1])
    first.last.bias = last.last.bias
    return copy.deepcopy(first)


def replicas(rank: int, world_size: int) -> None:
    train(make(Tied(rank), "line"), started_from_first((0, 2)), 2)
    train(make(Tied(rank), "grid", data_axis=None), started_from_first((0, 2)), 1)
    train(make(Tied(5), "line", init_sync="check"), Tied(5), 2)
    train(make(Tied(5), "line", init_sync=False), Tied(5), 2)
    reference = nn.Sequential()
    for first in (0, 2):
        torch.manual_seed(first)
        reference.append(nn.Linear(4, 4))
    torch.manual_seed(rank)
    mine = nn.Linear(4, 4)
    stages = [mine if rank in mesh else None for mesh in MESHES["line"]]
    train(make(stages, "line"), reference, 2)


def made_in_parallelize(rank: int, world_size: int) -> None:
    """Tensor parallelism shards what each rank has; `parallelize` adds a layer, other values on every rank."""
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "tp"))

    def shard(stage: int, module: nn.Module, mesh: Any) -> nn.Module:
        style: ParallelStyle = ColwiseParallel(output_layouts=Replicate())
        plan = {"second": style} if stage == 0 else {}
        return parallelize_module(module, world["tp"], plan, src_data_rank=None)

    train(make(Tied(rank), "line", parallelize=shard), started_from_first((0, 2)), 1)

    def add(stage: int, module: nn.Module, mesh: Any) -> nn.Module:
        torch.manual_seed(rank)
        if stage == 0:
            module.second = Added(module.get_submodule("second"))
        return module

    reference = started_from_first((0, 2))
    torch.manual_seed(0)
    reference.second = Added(reference.second)  # type: ignore[assignment]
    train(make(Tied(rank), "line", parallelize=add, data_axis=0), reference, 2)


def refusals(rank: int, world_size: int) -> list[str]:
    found = []
    one = Tied(0)
    if rank == 3:
        one.last.bias.data[2] += 1.0
    apart = Tied(0)
    if rank >= 2:
        apart.first.weight.data[0] += 1.0
    wider = Tied(0)
    if rank == 1:
        wider.second = nn.Linear(4, 4).double()
    for model, option in ((one, "check"), (apart, "check"), (wider, True), (Tied(0), rank == 0), (Tied(0), "yes")):
        with pytest.raises(ValueError) as caught:
            make(model, "line", init_sync=option)
        found.append(str(caught.value))
    return found


def test_copies_start_from_the_first_ranks_values() -> None:
    spawn(replicas, 4, timeout=60)


def test_shards_and_added_layers_start_from_the_first_ranks_values() -> None:
    spawn(made_in_parallelize, 4, timeout=60)


def test_copies_that_differ_are_named() -> None:
    for found in spawn(refusals, 4, timeout=60):
        values, tied, kinds, options, unknown = found
        assert "last.bias of stage 1 has other values on rank 3 than on rank 2" in values
        assert "tied parameter first.weight has other values on stage 1" in tied
        assert "ranks disagree on value tanh" in kinds
        assert "torch.float64 [2, 4]" in kinds
        assert "disagree on init_sync" in options
        assert "init_sync is True (broadcast)" in unknown


def without_grad(rank: int, world_size: int) -> str:
    engine = xm.PipelineEngine(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        (torch.empty(2, 4),),
        meshes=[xm.Mesh([0]), xm.Mesh([1])],
        split=xm.split_at("1"),
        num_microbatches=2,
        loss_fn=lambda output, target: F.mse_loss(output.detach(), target),
    )
    engine.evaluate(torch.ones(4, 4), target=torch.ones(4, 4))
    with pytest.raises(xm.StageError) as caught:
        engine.step(torch.ones(4, 4), target=torch.ones(4, 4))
    engine.close()
    return str(caught.value)


def test_a_loss_without_grad_is_refused() -> None:
    for text in spawn(without_grad, 2, timeout=60):
        assert "returned a loss that does not require grad, while parameters are trained" in text
