"""Stages that are parallel inside: DTensor activations at boundaries, tied and sharded parameters, FSDP2; one process
is the oracle for loss, gradients, clipping and three steps of SGD."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pipeline_cases import about
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

import torch_xmesh as xm
from torch_xmesh.testing import serial_step, spawn

Batch = Callable[[int], tuple[torch.Tensor, torch.Tensor]]


def train_and_compare(
    engine: xm.PipelineEngine, reference: nn.Module, batch: Batch, loss: Any, max_norm: float = 0.5
) -> None:
    """Three steps with clipped gradients: gradients, norm and parameters against one process."""
    mine, theirs = torch.optim.SGD(engine.parameters(), 0.1), torch.optim.SGD(reference.parameters(), 0.1)
    expected = dict(reference.named_parameters(remove_duplicate=False))
    for step in range(3):
        torch.manual_seed(step)
        x, y = batch(9)
        mine.zero_grad()
        theirs.zero_grad()
        engine.step(x, target=y)
        result = serial_step(reference, (x,), target=y, loss_fn=loss, num_microbatches=4)
        assert engine.last_loss() == pytest.approx(float(result.loss), rel=1e-5)
        _same(engine, {name: parameter.grad for name, parameter in expected.items()}, "gradient", step)
        norm = engine.clip_grad_norm_(max_norm)
        torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(reference.parameters(), max_norm))
        mine.step()
        theirs.step()
    found = {name: _full(parameter) for name, parameter in engine.named_parameters()}
    assert found
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name].detach(), rtol=2e-5, atol=2e-6, msg=about(name))


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _same(engine: xm.PipelineEngine, expected: dict[str, Any], what: str, step: int) -> None:
    assert list(engine.parameters())
    for name, parameter in engine.named_parameters():
        assert parameter.grad is not None, name
        where = about(f"{what} of {name} in step {step}")
        torch.testing.assert_close(_full(parameter.grad), expected[name], rtol=2e-5, atol=2e-6, msg=where)


class Wide(nn.Module):
    """A feed-forward block over [batch, tokens, 6]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))  # type: ignore[no-any-return]


def _tokens(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 4, 6), torch.randn(n, 4, 3)


def delay(engine: xm.PipelineEngine, rank: int) -> None:
    """Each rank's stages take a random while, forward and backward: what they send comes late."""
    rng = random.Random(rank)

    def wait(*_: Any) -> None:
        time.sleep(rng.choice((0.0, 0.0, 0.0, 0.005, 0.015)))

    for stage in engine.stages:
        engine.stage_module(stage).register_forward_pre_hook(wait)
        for parameter in engine.stage_module(stage).parameters():
            parameter.register_hook(wait)  # type: ignore[no-untyped-call]


SEQUENCE: dict[str, Any] = {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
}


def sequence_parallel(
    rank: int, world_size: int, grids: list[Any], axes: list[int | None], is_delayed: bool, schedule: str
) -> None:
    """Activations cross sharded over tokens, and the stages see them as DTensors."""
    torch.manual_seed(0)
    model = nn.Sequential(Wide(), Wide(), nn.Linear(6, 3))
    reference = copy.deepcopy(model)
    world = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("row", "tp"))

    def parallelize(stage: int, module: nn.Module, mesh: Any) -> nn.Module:
        wide = module.get_submodule(str(stage))
        if stage == 0:
            scatter = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),))
            parallelize_module(wide, world["tp"], {"": scatter, **SEQUENCE})
        else:
            parallelize_module(wide, world["tp"], SEQUENCE)
            gather = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
            parallelize_module(module, world["tp"], {"2": gather})
        return module

    placed = (Shard(1),) if axes[0] is None else (Shard(0), Shard(1))
    engine = xm.PipelineEngine(
        model,
        (torch.empty(2, 4, 6),),
        meshes=[xm.Mesh(grid) for grid in grids],
        split=xm.split_at("1"),
        data_axis=axes,
        num_microbatches=4,
        loss_fn=F.mse_loss,
        schedule=schedule,
        parallelize=parallelize,
        boundary_placements={"_0": (placed, True)},
    )
    if is_delayed:
        delay(engine, rank)
    train_and_compare(engine, reference, _tokens, F.mse_loss)
    for parameter in engine.parameters():
        assert isinstance(parameter, DTensor)
        assert isinstance(parameter.grad, DTensor)
        assert parameter.grad.placements == parameter.placements
    engine.close()


@pytest.mark.parametrize("schedule", ["eager_1f1b", "eager_split"])
@pytest.mark.parametrize(
    ("world_size", "grids", "axes", "is_delayed"),
    [(4, ([0, 1], [2, 3]), (None, None), False), (6, ([[0, 1], [2, 3]], [[4, 5]]), (0, 0), True)],
    ids=["tensor", "data and tensor, delayed"],
)
def test_sequence_parallel_boundaries(world_size: int, grids: Any, axes: Any, is_delayed: bool, schedule: str) -> None:
    spawn(sequence_parallel, world_size, list(grids), list(axes), is_delayed, schedule, timeout=90)


class TiedEnds(nn.Module):
    """Embedding, a layer, and an output layer with the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.middle, self.head = nn.Embedding(8, 6), nn.Linear(6, 6), nn.Linear(6, 8, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.middle(self.tokens(indices))))  # type: ignore[no-any-return]


def _words(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 8, (n, 4)), torch.randint(0, 8, (n, 4))


def _word_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def tied_and_sharded(rank: int, world_size: int, sharded: tuple[int, ...]) -> None:
    """The copies of one weight lie sharded on one stage, on the other, or on both."""
    torch.manual_seed(0)
    model = TiedEnds()
    reference = copy.deepcopy(model)
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "tp"))
    plans: list[dict[str, Any]] = [
        {"tokens": RowwiseParallel(input_layouts=Replicate())},
        {"head": ColwiseParallel(output_layouts=Replicate())},
    ]

    def parallelize(stage: int, module: nn.Module, mesh: Any) -> nn.Module:
        return parallelize_module(module, world["tp"], plans[stage]) if stage in sharded else module

    engine = xm.PipelineEngine(
        model,
        (torch.zeros(2, 4, dtype=torch.long),),
        meshes=[xm.Mesh([0, 1]), xm.Mesh([2, 3])],
        split=xm.split_at("middle"),
        num_microbatches=4,
        loss_fn=_word_loss,
        parallelize=parallelize,
    )
    train_and_compare(engine, reference, _words, _word_loss)
    engine.close()


def all_tied_and_sharded(rank: int, world_size: int) -> None:
    for sharded in ((0, 1), (0,), (1,)):
        tied_and_sharded(rank, world_size, sharded)


def test_tied_parameters_with_shards() -> None:
    spawn(all_tied_and_sharded, 4, timeout=90)


def untied(rank: int, world_size: int) -> str:
    """parallelize makes two parameters out of one."""
    world = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

    def parallelize(stage: int, module: nn.Module, mesh: Any) -> nn.Module:
        return parallelize_module(module, world, {"tokens": RowwiseParallel(input_layouts=Replicate())})

    with pytest.raises(ValueError) as caught:
        xm.PipelineEngine(
            TiedEnds(),
            (torch.zeros(2, 4, dtype=torch.long),),
            meshes=[xm.Mesh([0, 1])],
            num_microbatches=2,
            loss_fn=_word_loss,
            parallelize=parallelize,
        )
    return str(caught.value)


def test_a_tie_lost_in_parallelize_is_refused() -> None:
    for text in spawn(untied, 2, timeout=60):
        assert "tokens.weight of stage 0 and head.weight of stage 0 were one parameter before parallelize" in text


def fsdp(rank: int, world_size: int, is_root: bool) -> None:
    """Parameters sharded over ranks that all see the whole batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    reference = copy.deepcopy(model)
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "shard"))

    def parallelize(stage: int, module: nn.Module, mesh: Any) -> nn.Module:
        for child in module.children():
            if isinstance(child, nn.Linear):
                fully_shard(child, mesh=world["shard"])
        if is_root:
            fully_shard(module, mesh=world["shard"])
        return module

    def make(data_axis: int | None) -> xm.PipelineEngine:
        return xm.PipelineEngine(
            copy.deepcopy(reference),
            (torch.empty(2, 6),),
            meshes=[xm.Mesh([0, 1]), xm.Mesh([2, 3])],
            split=xm.split_at("2"),
            data_axis=data_axis,
            num_microbatches=4,
            loss_fn=F.mse_loss,
            parallelize=parallelize,
        )

    engine = make(None)
    train_and_compare(engine, reference, lambda n: (torch.randn(n, 6), torch.randn(n, 3)), F.mse_loss)
    assert all(isinstance(value, DTensor) and value.placements == (Shard(0),) for value in engine.state_dict().values())
    engine.close()


@pytest.mark.parametrize("is_root", [False, True], ids=["layers", "layers and root"])
def test_fully_sharded_stages(is_root: bool) -> None:
    spawn(fsdp, 4, is_root, timeout=60)


def sharded_linear(grids: Any, tp: Any, split: str) -> tuple[xm.PipelineEngine, nn.Module]:
    """Feed-forward blocks, sharded over `tp` where it is given."""
    torch.manual_seed(0)
    model = nn.Sequential(Wide(), Wide(), nn.Linear(6, 3))
    reference = copy.deepcopy(model)

    def parallelize(stage: int, module: nn.Module, mesh: Any) -> nn.Module:
        for child in module.children():
            if isinstance(child, Wide) and tp is not None:
                parallelize_module(child, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return module

    engine = xm.PipelineEngine(
        model,
        (torch.empty(2, 4, 6),),
        meshes=[xm.Mesh(grid) for grid in grids],
        split=xm.split_at(split),
        num_microbatches=3,
        loss_fn=F.mse_loss,
        parallelize=parallelize,
    )
    return engine, reference


def scaled_and_saved(rank: int, world_size: int, folder: str) -> None:
    """An overflow in one shard of one stage skips the step on all ranks; the state goes on in other stages."""
    tp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "tp"))["tp"]
    engine, reference = sharded_linear(([0, 1], [2, 3]), tp, "1")
    mine = torch.optim.Adam(engine.parameters(), 1e-2, eps=1e-3)
    theirs = torch.optim.Adam(reference.parameters(), 1e-2, eps=1e-3)
    scaler = engine.scaler(torch.amp.GradScaler("cpu", init_scale=256.0))
    for step in range(3):
        torch.manual_seed(step)
        x, y = _tokens(7)
        mine.zero_grad()
        theirs.zero_grad()
        engine.step(x, target=y)
        serial_step(reference, (x,), target=y, loss_fn=F.mse_loss, num_microbatches=3)
        if step == 1 and rank == 3:
            grad = dict(engine.named_parameters())["1.up.weight"].grad
            assert isinstance(grad, DTensor)
            grad.to_local()[0] = float("inf")
        scaler.step(mine)
        scaler.update()
        if step != 1:
            theirs.step()
        assert scaler.get_scale() == (256.0 if step == 0 else 128.0)
    expected = dict(reference.named_parameters())
    for name, parameter in engine.named_parameters():
        torch.testing.assert_close(_full(parameter), expected[name].detach(), rtol=1e-4, atol=2e-5, msg=about(name))
    dcp.save(engine.state_dict(mine), checkpoint_id=folder)
    engine.close()
    dist.barrier()
    torch.manual_seed(9)
    engine, _ = sharded_linear(([0, 1, 2], [3]), None, "2")
    for parameter in engine.parameters():
        nn.init.normal_(parameter)
    mine = torch.optim.Adam(engine.parameters(), 1e-2, eps=1e-3)
    state = engine.state_dict(mine)
    dcp.load(state, checkpoint_id=folder)
    engine.load_state_dict(state, mine)
    torch.manual_seed(5)
    x, y = _tokens(7)
    engine.step(x, target=y)
    theirs.zero_grad()
    serial_step(reference, (x,), target=y, loss_fn=F.mse_loss, num_microbatches=3)
    mine.step()
    theirs.step()
    for name, parameter in engine.named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-4, atol=2e-5, msg=about(f"loaded {name}"))
    engine.close()


def test_scaler_and_checkpoint_with_shards(tmp_path: Path) -> None:
    spawn(scaled_and_saved, 4, str(tmp_path / "saved"), timeout=90)
