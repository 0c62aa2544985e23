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
            with pytest.raises(ValueError, match="would meet targets of other samples: count the .*num_replicas"):
                engine.step(x, target=y, sharded=True)
            with pytest.raises(ValueError, match="would meet targets of other samples: count the .*num_replicas"):
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
            with pytest.raises(ValueError, match="would meet targets of other samples: pass the same batch on every"):
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
        with pytest.raises(ValueError, match="ranks 1 and 2 disagree: targets would meet arguments of other samples"):
            engine.step(X[part], target=y, sharded=True)
        engine.step(X[part], target=Y[part], sharded=True)


def test_stages_of_different_numbers_of_shards() -> None:
    spawn(of_uneven_stages, 3, timeout=60)
