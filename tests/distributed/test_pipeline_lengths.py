"""Sequence lengths that change from step to step on one engine: the oracle's numbers, or an error that says why not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models.language import GPT, Block
from pipeline_cases import compare, has_output
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

import torch_xmesh as xm
from torch_xmesh.testing import serial_step, spawn

LENGTHS = (6, 4, 12, 4, 1, 6)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


class Tokens(nn.Module):
    """Embeddings of tokens and places; the length goes on beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(13, 8), nn.Embedding(12, 8)

    def forward(self, indices: torch.Tensor) -> tuple[torch.Tensor, int]:
        length = indices.size(1)
        return self.tokens(indices) + self.places(torch.arange(length)), length


class Middle(nn.Module):
    """A block; divides by the length."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(8, 2, causal=True)

    def forward(self, x: torch.Tensor, length: int) -> torch.Tensor:
        return self.block(x) / length  # type: ignore[no-any-return]


class Whole(nn.Module):
    """Ready stages as one model."""

    def __init__(self, stages: Any) -> None:
        super().__init__()
        for index, stage in enumerate(stages):
            self.add_module(str(index), stage)

    def forward(self, x: Any) -> Any:
        for stage in self.children():
            x = stage(*x) if isinstance(x, tuple) else stage(x)
        return x


def batch(step: int, length: int, samples: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(step)
    return torch.randint(13, (samples, length)), torch.randint(13, (samples, length))


def train(engine: xm.PipelineEngine, reference: nn.Module, shards: int, where: str) -> None:
    mine, theirs = (torch.optim.SGD(one.parameters(), 0.1) for one in (engine, reference))
    for step, length in enumerate(LENGTHS):
        x, y = batch(step, length)
        mine.zero_grad()
        theirs.zero_grad()
        losses: list[torch.Tensor] = []
        output = engine.step(x, target=y, losses=losses)
        options: dict[str, Any] = {"loss_fn": loss, "num_microbatches": 4, "num_data_shards": shards}
        expected = serial_step(reference, (x,), target=y, **options)
        compare(engine, reference, expected, output, losses, f"{where}, length {length}")
        mine.step()
        theirs.step()
        evaluated = engine.evaluate(x[:, :1])
        assert (evaluated is not None) == has_output(engine)
        if evaluated is not None:
            torch.testing.assert_close(evaluated, reference(x[:, :1]), rtol=2e-5, atol=2e-6)


def make(model: Any, meshes: Any, **options: Any) -> xm.PipelineEngine:
    return xm.PipelineEngine(
        model,
        (batch(0, 6, 2)[0],),
        meshes=[xm.Mesh(mesh) if isinstance(mesh, list) else mesh for mesh in meshes],
        num_microbatches=4,
        loss_fn=loss,
        **options,
    )


def lengths(rank: int, world_size: int) -> None:
    """The middle stage's ranks see no batch."""
    for meshes, schedule in ((([[0], [1]], [[2, 3]], [4]), "auto"), (([0], [1, 2], [0]), "1f1b")):
        if rank not in {r for mesh in meshes for r in xm.Mesh(mesh).ranks}:
            continue
        torch.manual_seed(0)
        model = GPT(tokens=12)
        reference: nn.Module = copy.deepcopy(model)
        engine = make(model, meshes, split=xm.split_at("blocks.1", "head"), schedule=schedule, data_axis=[0, 0, None])
        train(engine, reference, 2 if len(meshes[0]) > 1 else 1, str(meshes))
        engine.close()
        torch.manual_seed(0)
        stages = [Tokens(), Middle(), nn.Linear(8, 13)]
        reference = Whole(copy.deepcopy(stages))
        mine = [stage if rank in xm.Mesh(mesh).ranks else None for stage, mesh in zip(stages, meshes, strict=True)]
        engine = make(mine, meshes, schedule=schedule, data_axis=[0, 0, None])
        for name, parameter in engine.named_parameters():
            assert torch.equal(parameter, reference.get_parameter(name))
        train(engine, reference, 2 if len(meshes[0]) > 1 else 1, f"ready, {meshes}")
        engine.close()


class Skipping(nn.Module):
    """For short sequences a second value crosses into the head's stage."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head, self.other = nn.Embedding(13, 8), nn.Linear(8, 13), nn.Linear(8, 13)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        x = self.tokens(indices)
        y = self.head(torch.tanh(x))
        return y + self.other(x) if indices.size(1) < 5 else y * self.other.bias  # type: ignore[no-any-return]


class Even(nn.Module):
    """Fails for odd lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 13)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.size(1) % 2:
            raise RuntimeError("an odd length")
        return self.head(x)  # type: ignore[no-any-return]


def refused(engine: xm.PipelineEngine, length: int, other: int | None = None, rank: int = 0) -> str:
    x, y = batch(0, length)
    with pytest.raises(ValueError) as caught:
        engine.step(batch(0, other)[0] if other is not None and rank == 1 else x, target=y)
    x, y = batch(0, 6)
    engine.step(x, target=y)
    return str(caught.value)


def refusals(rank: int, world_size: int) -> list[str]:
    meshes = ([0, 1], [2])
    torch.manual_seed(0)
    texts = []
    engine = make(Skipping(), meshes, split=xm.split_at("head"))
    texts.append(refused(engine, 4))
    engine.close()
    engine = make(GPT(), meshes, split=xm.split_at("blocks.1"))
    texts.append(refused(engine, 4, 5, rank))
    engine.close()
    stages = [nn.Embedding(13, 8), Even()]
    mine = [stage if rank in mesh else None for stage, mesh in zip(stages, meshes, strict=True)]
    engine = make(mine, meshes)
    texts.append(refused(engine, 5))
    x, y = batch(0, 8)
    engine.step(x, target=y)
    engine.close()
    return texts


def sharded_batch(rank: int, world_size: int) -> None:
    """A batch that comes as a DTensor, of another length."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = GPT(tokens=12)
    reference = copy.deepcopy(model)
    engine = make(model, [mesh, mesh], split=xm.split_at("blocks.1"))
    for step, length in enumerate((6, 9, 3)):
        x, y = batch(step, length)
        dx, dy = (DTensor.from_local(one.chunk(2)[rank], mesh, [Shard(0)]) for one in (x, y))
        losses: list[torch.Tensor] = []
        output = engine.step(dx, target=dy, losses=losses)
        options: dict[str, Any] = {"loss_fn": loss, "num_microbatches": 4, "num_data_shards": 2}
        expected = serial_step(reference, (x,), target=y, shard_first=True, **options)
        compare(engine, reference, expected, output, losses, f"sharded, length {length}")
    engine.close()


def test_lengths_change_between_steps() -> None:
    spawn(lengths, 5, timeout=180)


def test_a_sharded_batch_of_another_length() -> None:
    spawn(sharded_batch, 2, timeout=120)


def test_refuses_lengths_that_do_not_work() -> None:
    for rank, texts in enumerate(spawn(refusals, 3, timeout=120)):
        assert "argument args[0] has shape (2, 4), the example had (2, 6)" in texts[0]
        assert "stage 0 would make ['tokens', 'tanh'], for the example it makes ['tanh']" in texts[0]
        assert "ranks disagree: argument args[0] has 4 entries along dim 1 on rank 0" in texts[1]
        assert "5 entries along dim 1 on rank 1" in texts[1]
        assert "an odd length" in texts[2], rank
