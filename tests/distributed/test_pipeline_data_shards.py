"""What data shards have of their own: values without samples, buffers that training changes; and what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pipeline_cases import Run, about, case_of, compare, has_output, make_engine
from torch import nn
from torch.distributed.pipelining.microbatch import TensorChunkSpec, sum_reducer
from torch.nn import functional as F

import torch_xmesh as xm
from torch_xmesh.testing import serial_step, spawn


class Penalised(nn.Module):
    """Returns (output, penalty, sums): a scalar and a vector that depend on all samples and cross every boundary."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = torch.tanh(self.first(x))
        penalty, sums = x.square().mean() * x.mean(), x.sum(0)
        x = torch.tanh(self.second(x) * (1 + penalty))
        penalty = penalty + x.var()
        return self.third(x + sums), penalty, sums


def _loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output[0], target) + output[1] + output[2].square().mean()  # type: ignore[no-any-return]


MERGE = (TensorChunkSpec(0), sum_reducer, sum_reducer)  # type: ignore[no-untyped-call]


def penalised(meshes: Any, **options: Any) -> tuple[xm.PipelineEngine, nn.Module]:
    torch.manual_seed(0)
    model = Penalised()
    reference = copy.deepcopy(model)
    engine = xm.PipelineEngine(
        model,
        (torch.empty(2, 4),),
        meshes=[xm.Mesh(mesh) for mesh in meshes],
        split=xm.split_at(*("second", "third")[: len(meshes) - 1]),
        num_microbatches=3,
        loss_fn=_loss,
        output_merge_spec=MERGE,
        **options,
    )
    return engine, reference


def values_of_shards(rank: int, world_size: int, meshes: Any, options: dict[str, Any]) -> None:
    engine, reference = penalised(meshes, **options)
    mine, theirs = torch.optim.SGD(engine.parameters(), 0.1), torch.optim.SGD(reference.parameters(), 0.1)
    for step in range(3):
        torch.manual_seed(step)
        x, y = torch.randn(13, 4), torch.randn(13, 4)
        mine.zero_grad()
        theirs.zero_grad()
        losses: list[torch.Tensor] = []
        output = engine.step(x, target=y, losses=losses)
        expected = serial_step(
            reference,
            (x,),
            target=y,
            loss_fn=_loss,
            num_microbatches=3,
            num_data_shards=2,
            output_merge_spec=MERGE,
        )
        compare(engine, reference, expected, output, losses, f"step {step}")
        mine.step()
        theirs.step()
    engine.close()


@pytest.mark.parametrize(
    ("meshes", "options"),
    [
        (([0, 1], [2, 3], [4, 5]), {}),
        (([[0, 1], [2, 3]], [4, 5]), {"data_axis": [1, 0]}),
        (([0, 1], [2, 3], [0, 1]), {"schedule": "gpipe"}),
        (([0, 1], [0, 1]), {"schedule": "gpipe"}),
    ],
    ids=["2-2-2", "2x2-2", "shared", "local"],
)
def test_each_data_shard_has_its_own_values(meshes: Any, options: dict[str, Any]) -> None:
    spawn(values_of_shards, max(xm.Mesh(mesh).ranks[-1] for mesh in meshes) + 1, meshes, options, timeout=60)


class Weighed(nn.Module):
    """A scalar of the whole microbatch, which goes to later layers and into the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.tanh(self.first(x))
        penalty = x.square().mean() * x.mean()
        return self.second(x * (1 + penalty)), penalty


def one_value_for_all(rank: int, world_size: int) -> None:
    """The stage that makes the scalar has no data shards, the one that reads it has two."""

    def loss(output: Any, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(output[0], target) + output[1]  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = Weighed()
    reference = copy.deepcopy(model)
    merge = (TensorChunkSpec(0), sum_reducer)  # type: ignore[no-untyped-call]
    engine = xm.PipelineEngine(
        model,
        (torch.empty(2, 4),),
        meshes=[xm.Mesh([0]), xm.Mesh([1, 2])],
        split=xm.split_at("second"),
        num_microbatches=3,
        loss_fn=loss,
        output_merge_spec=merge,
    )
    x, y = torch.randn(13, 4), torch.randn(13, 4)
    losses: list[torch.Tensor] = []
    output = engine.step(x, target=y, losses=losses)
    expected = serial_step(reference, (x,), target=y, loss_fn=loss, num_microbatches=3, output_merge_spec=merge)
    compare(engine, reference, expected, output, losses, "one value")
    engine.close()


def test_one_value_for_all_data_shards() -> None:
    spawn(one_value_for_all, 3, timeout=60)


def other_shards(rank: int, world_size: int) -> str:
    with pytest.raises(ValueError) as caught:
        penalised(([0, 1], [2]))
    return str(caught.value)


def test_values_of_other_data_shards_are_refused() -> None:
    for text in spawn(other_shards, 3, timeout=60):
        assert "has no batch dim and depends on the samples" in text
        assert "2 of stage 0 cannot become 1 of stage 1" in text


class Rows(nn.Module):
    """What crosses has three rows per sample, or comes from a parameter alone."""

    def __init__(self, has_rows: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(2))
        self.has_rows = has_rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.scale * 2
        if not self.has_rows:
            return self.second(self.first(x)[:, :2]) * scale  # type: ignore[no-any-return]
        return self.second(self.first(x).reshape(-1, 2)).reshape(-1, 3, 2)[:, 0]  # type: ignore[no-any-return]


def few_samples(rank: int, world_size: int) -> list[str]:
    """A batch that data shards could only hold otherwise than DTensor lays it out, or that leaves one empty."""
    found = []
    for has_rows, samples in ((True, 6), (False, 3)):
        engine = xm.PipelineEngine(
            Rows(has_rows),
            (torch.empty(2, 6),),
            meshes=[xm.Mesh([0, 1]), xm.Mesh([2, 3])],
            split=xm.split_at("second"),
            num_microbatches=2,
            loss_fn=F.mse_loss,
        )
        engine.step(torch.ones(8, 6), target=torch.ones(8, 2))
        dist.barrier()  # a failure ends what others are still at
        with pytest.raises(ValueError) as caught:
            engine.step(torch.ones(samples, 6), target=torch.ones(samples, 2))
        engine.close()
        found.append(str(caught.value))
    return found


def test_too_few_samples_for_data_shards() -> None:
    for rows, empty in spawn(few_samples, 4, timeout=60):
        assert "has 9 rows for 3 samples, which 2 data shards" in rows
        assert "pass a multiple of 2 samples" in rows
        assert "has no batch dim, and a microbatch of 1 samples leaves a data shard" in empty


NORMED = Run("conv", ("act1",), ([0, 1], [2, 3]), microbatches=2)


def buffers(rank: int, world_size: int, folder: str) -> None:
    """Batch norm: every rank ends with data shard 0's statistics, which are what is saved and what evaluation uses."""
    torch.manual_seed(0)
    case = case_of("conv")
    model = case.build()
    reference = copy.deepcopy(model)
    engine = make_engine(NORMED, model)
    for step in range(3):
        torch.manual_seed(step)
        args, _, target = case.batch(NORMED.samples)
        options: dict[str, Any] = {"target": target, "loss_fn": case.loss, "num_microbatches": 2, "num_data_shards": 2}
        output = engine.step(*args, target=target) if step != 1 else engine.evaluate(*args, target=target)
        expected = serial_step(reference, args, backward=step != 1, **options)
        assert (output is not None) == has_output(engine)
        if output is not None:
            torch.testing.assert_close(output, expected.output, rtol=2e-5, atol=2e-6)
        stated = dict(reference.named_buffers())
        own = {n: b for stage in engine.stages for n, b in engine.stage_module(stage).named_buffers()}
        assert own
        for name, buffer in own.items():
            torch.testing.assert_close(buffer, stated[name], msg=about(f"{name} after step {step}"))
    state = engine.state_dict()
    dcp.save(state, checkpoint_id=folder)
    engine.close()
    dist.barrier()
    torch.manual_seed(5)
    other = make_engine(Run("conv", ("body.1", "head"), ([0], [1], [2])), case.build()) if rank < 3 else None
    if other is not None:
        state = other.state_dict()
        dcp.load(state, checkpoint_id=folder, process_group=dist.new_group([0, 1, 2], use_local_synchronization=True))
        other.load_state_dict(state)
        for stage in other.stages:
            for name, buffer in other.stage_module(stage).named_buffers():
                torch.testing.assert_close(buffer, stated[name], msg=about(name))
        other.eval()
        reference.eval()
        args, _, target = case.batch(8)
        output = other.evaluate(*args, target=target)
        assert (output is not None) == has_output(other)
        if output is not None:
            torch.testing.assert_close(output, reference(*args), rtol=2e-5, atol=2e-6)
        other.close()


def test_changed_buffers_are_those_of_data_shard_0(tmp_path: Path) -> None:
    spawn(buffers, 4, str(tmp_path / "saved"), timeout=90)
