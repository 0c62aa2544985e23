"""Ranks that are given samples of their own pair arguments with the targets of other samples: refused, whatever way the
batch is passed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F
from torch.utils.data import DistributedSampler

import torch_xmesh as xm
from torch_xmesh.testing import spawn

EXAMPLE = (torch.zeros(4, 8),)
X, Y = torch.randn(64, 8, generator=torch.Generator().manual_seed(1)), torch.arange(64.0)[:, None].expand(64, 8)


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def stages(rank: int, **options: Any) -> tuple[xm.PipelineEngine, dict[str, int]]:
    """Stages of two data shards each, and how a sampler counts them."""
    meshes = [xm.Mesh([0, 1]), xm.Mesh([2, 3])]
    given: dict[str, Any] = {"split": xm.split_at("2"), "num_microbatches": 2, "loss_fn": F.mse_loss} | options
    return xm.PipelineEngine(model_of(), EXAMPLE, meshes=meshes, **given), {"num_replicas": 2, "rank": rank % 2}


def planned(rank: int) -> tuple[xm.PipelineEngine, dict[str, int]]:
    model = model_of()
    plan = xm.presets.pipeline(model, EXAMPLE, num_stages=2, devices=xm.Mesh([[0, 1], [2, 3]]), num_microbatches=2)
    ranks = sorted(next(stage.ranks for stage in plan.stages if rank in stage.ranks))
    engine = xm.PipelineEngine(model, EXAMPLE, plan=plan, loss_fn=F.mse_loss)
    return engine, {"num_replicas": len(ranks), "rank": ranks.index(rank)}


def samples(counted: dict[str, int], number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first of one's own."""
    sampler: Any = DistributedSampler(X, seed=3, **counted)  # type: ignore[arg-type]
    chosen = list(sampler)[:number]
    return X[chosen], Y[chosen]


def of_samplers(rank: int, world_size: int) -> None:
    for engine, counted in (stages(rank), planned(rank)):
        with engine:
            x, y = samples({"num_replicas": world_size, "rank": rank}, 4)
            with pytest.raises(ValueError, match="target.* is of other samples than .*: count the .*num_replicas"):
                engine.step(x, target=y, sharded=True)
            with pytest.raises(ValueError, match="target.* is of other samples than .*: count the .*num_replicas"):
                engine.evaluate(x, target=y, sharded=True)
            x, y = samples(counted, 4)
            engine.step(x, target=y, sharded=True)
            loss = engine.last_loss()
            reads_arguments = rank < 2  # what a stage does not read may be missing, or be anything but samples
            engine.step(*((x,) if reads_arguments else ()), target=None if reads_arguments else y, sharded=True)
            assert engine.last_loss() == loss
            engine.step(x if reads_arguments else 0, target=[] if reads_arguments else y, sharded=True)
            assert engine.last_loss() == loss


def test_a_sampler_that_counts_the_jobs_ranks() -> None:
    spawn(of_samplers, 4, timeout=60)


def of_whole_batches(rank: int, world_size: int) -> None:
    """Each stage shuffles for itself."""
    chosen = torch.randperm(64, generator=torch.Generator().manual_seed(rank // 2))[:8]
    for engine, _ in (stages(rank), planned(rank)):
        with engine:
            with pytest.raises(ValueError, match="target is of other samples than .*: pass the same batch on every"):
                engine.step(X[chosen], target=Y[chosen])
            engine.step(X[:8], target=Y[:8])
    engine, _ = stages(rank, compare_batches=False)
    with engine:
        engine.step(X[chosen], target=Y[chosen])
    engine, counted = stages(rank)
    with engine:  # DTensors say which samples they are
        on = xm.device_mesh(xm.Mesh([0, 1]) if rank < 2 else xm.Mesh([2, 3]))
        x, y = (DTensor.from_local(part, on, [Shard(0)], run_check=False) for part in samples(counted, 4))
        engine.step(x, target=y)


def test_stages_that_shuffle_for_themselves() -> None:
    spawn(of_whole_batches, 4, timeout=60)


def of_uneven_stages(rank: int, world_size: int) -> None:
    """Two data shards, then one: pieces of the batch are compared."""
    engine = xm.PipelineEngine(
        model_of(),
        EXAMPLE,
        meshes=[xm.Mesh([0, 1]), xm.Mesh([2])],
        split=xm.split_at("2"),
        num_microbatches=2,
        loss_fn=F.mse_loss,
    )
    with engine:
        part = slice(8 * rank, 8 * rank + 8) if rank < 2 else slice(0, 16)
        y = Y[part] + 1 if rank == 1 else Y[part]
        with pytest.raises(ValueError, match="ranks 1 and 2 disagree: target in part 2 of 2 of the"):
            engine.step(X[part], target=y, sharded=True)
        engine.step(X[part], target=Y[part], sharded=True)


def test_stages_of_different_numbers_of_shards() -> None:
    spawn(of_uneven_stages, 3, timeout=60)


class WithLoss(nn.Module):
    """Computes its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.second(self.first(x).tanh()), labels)


def of_labels_that_are_arguments(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    engine = xm.PipelineEngine(
        WithLoss(),
        (),
        {"x": EXAMPLE[0], "labels": EXAMPLE[0]},
        meshes=[xm.Mesh([0]), xm.Mesh([1])],
        split=xm.split_at("second"),
        num_microbatches=2,
        loss_fn=lambda output: output,
    )
    with engine:
        x, y = samples({"num_replicas": world_size, "rank": rank}, 8)
        with pytest.raises(ValueError, match=r"argument kwargs\['labels'\] is of other .*: count the data"):
            engine.step(x=x, labels=y, sharded=True)
        x, y = X[:8], Y[:8]
        ordered: dict[str, Any] = {"x": x, "labels": y} if rank else {"labels": y, "x": x}
        engine.step(**ordered)


def test_labels_that_are_arguments() -> None:
    spawn(of_labels_that_are_arguments, 2, timeout=60)


def of_what_is_right(rank: int, world_size: int) -> None:
    """Arguments augmented at random on each rank; stand-ins where a stage reads nothing."""
    engine, _ = stages(rank)
    with engine:
        noise = torch.randn(8, 8, generator=torch.Generator().manual_seed(rank // 2))
        engine.step(X[:8] + noise, target=Y[:8])
        none = torch.empty(12, 8, device="meta")
        engine.step(X[:12] if rank < 2 else none, target=none if rank < 2 else Y[:12])
        target: Any = None if rank < 2 else Y[:16]
        engine.step(X[:16] if rank < 2 else X[:4], target=target)


def in_both_stages(rank: int, world_size: int) -> None:
    """Rank 1 has the second shard's arguments, and the first one's target."""
    engine = xm.PipelineEngine(
        model_of(),
        EXAMPLE,
        meshes=[xm.Mesh([0, 1]), xm.Mesh([1, 2])],
        split=xm.split_at("2"),
        num_microbatches=2,
        loss_fn=F.mse_loss,
    )
    with engine:
        halves = slice(0, 8), slice(8, 16)
        engine.step(X[halves[min(rank, 1)]], target=Y[halves[max(rank - 1, 0)]], sharded=True)


def test_what_is_right_is_not_refused() -> None:
    spawn(of_what_is_right, 4, timeout=60)
    spawn(in_both_stages, 3, timeout=60)
