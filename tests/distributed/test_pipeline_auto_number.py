"""num_microbatches="auto": two steps measured with microbatches of two sizes, then a number for each size of the batch;
the same on all ranks, and every gradient that of one process with as many microbatches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from pipeline_cases import Run, case_of, compare, engine_of_layers, make_engine
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

import torch_xmesh as xm
from torch_xmesh.testing import serial_step, spawn

RUNS = [
    Run("gpt", ("blocks.2",), ([0], [1]), samples=24),
    Run("mlp", ("layers.1", "layers.2"), ([0, 1], [2], [3, 1]), samples=24),  # shared ranks, data shards
    Run("unet", ("bottom", "decoders.0", "head"), ([0], [1], [1], [0]), samples=12),
    Run("conv", ("body.1",), ([0], [1]), samples=16),  # batch norm fails with one sample
    Run("mlp", ("layers.2",), ([0], [1]), samples=1),  # nothing to choose
]
BATCHES = (1, 1, 1, 0.5, 1, 0.5)
"""Samples of each step, times the run's."""


def steps_of(run: Run) -> list[tuple[int, str]]:
    """Number of microbatches and schedule of each step."""
    case = case_of(run.model)
    torch.manual_seed(0)
    model = case.build()
    reference = copy.deepcopy(model)
    engine = make_engine(run, model, num_microbatches="auto")
    assert "chosen after the first two training steps" in engine.summary()
    found = []
    for step, part in enumerate(BATCHES):
        torch.manual_seed(10 + step)
        args, kwargs, target = case.batch(max(1, int(part * run.samples)))
        engine.zero_grad()
        reference.zero_grad()
        losses: list[torch.Tensor] = []
        output = engine.step(*args, target=target, losses=losses, **kwargs)
        ran = engine._steps.ran
        found.append((ran.num_microbatches, ran.to_csv()))
        expected = serial_step(
            reference,
            args,
            kwargs,
            target=target,
            loss_fn=case.loss,
            num_microbatches=ran.num_microbatches,
            num_data_shards=run.num_shards,
            **case.specs,
        )
        compare(engine, reference, expected, output, losses, f"{run}, step {step}")
        known = str(engine.schedule)
        engine.evaluate(*args, target=target, **kwargs)
        if run.model != "conv":  # other microbatches, other statistics of batch norm
            assert engine.last_loss() == pytest.approx(float(expected.loss), rel=1e-4)
        assert str(engine.schedule) == known
    assert "predicted" in engine.summary()
    engine.close()
    return found


def train_all(rank: int, world_size: int) -> list[list[tuple[int, str]] | None]:
    return [steps_of(run) if rank in run.ranks else None for run in RUNS]


def test_gradients_and_agreement() -> None:
    found = spawn(train_all, 4, timeout=240)
    for index, run in enumerate(RUNS):
        rows = [one[index] for one in found if one[index] is not None]
        assert len(rows) == len(run.ranks)
        assert all(row == rows[0] for row in rows)
        numbers = [number for number, _ in rows[0]]
        sizes = {-(-max(1, int(part * run.samples)) // n) for part, n in zip(BATCHES[:2], numbers[:2], strict=True)}
        assert len(sizes) == (1 if run.samples == 1 else 2)
        assert rows[0][2] == rows[0][4]  # the same batch, the same choice
        assert rows[0][3] == rows[0][5]


def limited(rank: int, world_size: int) -> tuple[int, str]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    x, y = torch.randn(256, 64), torch.randn(256, 64)

    def make(limit: int) -> xm.PipelineEngine:
        return engine_of_layers(copy.deepcopy(model), (32, 64), "2", num_microbatches="auto", memory_limit_bytes=limit)

    fixed = 4 * 2 * 65 * 64 * 4  # two layers, their gradients, two optimizer states
    room = 12 * 16 * 64 * 4  # receives posted ahead and a few microbatches, if they have 16 samples
    engine = make(fixed + room)
    for _ in range(2):
        engine.step(x, target=y)
    number = engine.schedule.num_microbatches
    size = 256 // number
    peak = engine.schedule.peak_in_flight[rank]
    assert (5 + peak * (1 + rank)) * size * 64 * 4 <= room
    engine.step(x, target=y)
    engine.close()
    engine = make(fixed)
    for _ in range(2):
        engine.step(x, target=y)
    with pytest.raises(ValueError, match=f"no schedule keeps memory_limit_bytes={fixed}: the smallest limit") as caught:
        engine.step(x, target=y)
    engine.evaluate(x)
    engine.close()
    return number, str(caught.value)


def test_a_limit_makes_microbatches_smaller() -> None:
    one, other = spawn(limited, 2, timeout=90)
    assert one == other


class Fixed(nn.Module):
    """Works for six samples at a time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(6, -1, 2).flatten(1)


def whole_gradients(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    F.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def peculiar(rank: int, world_size: int) -> None:
    """Steps of another kind between the measured ones; models and batches that leave little choice."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    fixed = nn.Sequential(nn.Linear(4, 4), Fixed(), nn.Linear(4, 4))
    mesh = xm.Mesh([0, 1])
    world = init_device_mesh("cpu", (2,))

    def make(which: nn.Module, **options: Any) -> xm.PipelineEngine:
        return engine_of_layers(copy.deepcopy(which), (6, 4), "2", **{"num_microbatches": "auto"} | options)

    def check(engine: xm.PipelineEngine, expected: list[torch.Tensor], which: nn.Module) -> None:
        names = [name for name, _ in which.named_parameters()]
        for name, parameter in engine.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[names.index(name)], rtol=1e-4, atol=1e-6)

    # Evaluated first, a batch refused, gradients kept back, another length: each with its own kind of microbatches.
    engine = make(model)
    x, y = torch.randn(24, 4), torch.randn(24, 4)
    engine.evaluate(x, target=y)
    expected = whole_gradients(model, x, y)
    with engine.no_sync():
        engine.step(x, target=y)
    with pytest.raises(ValueError, match="cannot be split"):
        engine.step(torch.randn(0, 4), target=torch.randn(0, 4))
    with pytest.raises(ValueError, match="samples"):
        engine.step(x, target=y[:3])
    check(engine, expected, model)
    for _ in range(2):
        engine.zero_grad()
        engine.step(x, target=y)
        check(engine, expected, model)
    with pytest.raises(ValueError, match="samples"):
        engine.step(x, target=y[:3])
    few = torch.randn(3, 4)
    engine.evaluate(few)
    state = engine.state_dict()
    engine.close()

    engine = make(model, num_microbatches=4)  # saved with some number, resumed with another
    engine.load_state_dict(state)
    engine.step(x, target=y)
    check(engine, expected, model)
    engine.close()

    engine = make(fixed)
    expected = whole_gradients(nn.Sequential(fixed[0], fixed[2]), x, y)
    for _ in range(3):
        engine.zero_grad()
        engine.step(x, target=y)
        assert engine.schedule.num_microbatches == 4
        check(engine, expected, fixed)
    engine.close()

    # Each data shard brings its own samples; FSDP2's and plain sums.
    engine = make(model, meshes=[mesh, mesh])
    part = slice(12 * rank, 12 * rank + 12)
    expected = whole_gradients(model, x, y)
    for _ in range(4):
        engine.zero_grad()
        shards = [DTensor.from_local(one[part], world, [Shard(0)]) for one in (x, y)]
        engine.step(shards[0], target=shards[1])
        check(engine, expected, model)
    engine.close()


def test_peculiar_steps() -> None:
    spawn(peculiar, 2, timeout=120)


def lengths(rank: int, world_size: int) -> list[int]:
    """A measured step says nothing about batches of another length: a number is chosen after two steps of one
    length."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    engine = engine_of_layers(copy.deepcopy(model), (2, 3, 4), "2", num_microbatches="auto")
    waiting = []
    for length in (3, 8, 8, 3, 8):
        x, y = torch.randn(16, length, 4), torch.randn(16, length, 4)
        expected = whole_gradients(model, x, y)
        engine.zero_grad()
        engine.step(x, target=y)
        names = [name for name, _ in model.named_parameters()]
        for name, parameter in engine.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[names.index(name)], rtol=1e-4, atol=1e-6)
        waiting.append(int("predicted" not in engine.summary()))
    engine.close()
    return waiting


def test_other_lengths() -> None:
    assert spawn(lengths, 2, timeout=60) == [[1, 1, 0, 0, 0]] * 2


def refused(rank: int, world_size: int) -> None:
    for options, text in (
        ({"schedule": "1f1b", "num_microbatches": "auto"}, 'num_microbatches="auto" needs schedule="auto"'),
        ({"num_microbatches": "some"}, 'num_microbatches is an int of at least 1 or "auto"'),
        ({"num_microbatches": "auto" if rank == 0 else 4}, "ranks disagree on number of microbatches"),
    ):
        if rank == 2:
            continue
        with pytest.raises(ValueError, match=text):
            engine_of_layers(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), (2, 4), "1", **options)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    engine = engine_of_layers(model, (2, 4), "1", num_microbatches="auto", meshes=[xm.Mesh([0, 1]), xm.Mesh([2])])
    with pytest.raises(ValueError, match="cannot be split"):
        engine.step(torch.randn(0, 4), target=torch.randn(0, 4))
    x, y = torch.ones(8, 4), torch.zeros(8, 4)
    for _ in range(3):  # it goes on
        engine.step(x, target=y)
    engine.close()


def test_refusals() -> None:
    spawn(refused, 3, timeout=90)
