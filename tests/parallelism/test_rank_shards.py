"""step(sharded=True) with a plan: ranks of a stage give equal parts, and train as on the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

import torch_xmesh as xm
from torch_xmesh.testing import spawn

EXAMPLE = (torch.zeros(4, 16),)
SAMPLES = 8
DEVICES = xm.Mesh([[0, 1], [2, 3]])


def make(kind: str) -> tuple[xm.PipelineEngine, xm.ParallelPlan]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(4)]
    given: dict[str, Any] = {"devices": DEVICES, "num_microbatches": 2, "compute": xm.Compute(1e12, 1e11)}
    model = nn.Sequential(*layers)
    if kind == "stages":
        plan = xm.presets.pipeline(model, EXAMPLE, num_stages=2, **given)
    else:
        plan = xm.presets.data_parallel(model, EXAMPLE, **given)
    return xm.PipelineEngine(model, EXAMPLE, plan=plan, loss_fn=nn.functional.mse_loss), plan


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(SAMPLES, 16, generator=generator), torch.randn(SAMPLES, 16, generator=generator)


def part(whole: torch.Tensor, plan: xm.ParallelPlan, rank: int) -> torch.Tensor:
    """As many as the rank's stage has ranks, in their order."""
    ranks = sorted(next(stage.ranks for stage in plan.stages if rank in stage.ranks))
    return whole.chunk(len(ranks))[ranks.index(rank)]


def trained(rank: int, kind: str, is_sharded: bool) -> tuple[list[float | None], list[torch.Tensor]]:
    losses = []
    engine, plan = make(kind)
    with engine:
        optimizer = torch.optim.SGD(engine.parameters(), 0.1)
        for step in range(3):
            x, y = batch(step)
            if is_sharded:
                x, y = part(x, plan, rank), part(y, plan, rank)
            engine.step(x, target=y, sharded=is_sharded)
            losses.append(engine.last_loss())
            optimizer.step()
            engine.zero_grad()
        x, y = batch(9)
        if is_sharded:
            x, y = part(x, plan, rank), part(y, plan, rank)
        engine.evaluate(x, target=y, sharded=is_sharded)
        losses.append(engine.last_loss())
        values = [one.to_local() if isinstance(one, DTensor) else one for one in engine.parameters()]
        return losses, [one.detach().clone() for one in values]


def as_whole(rank: int, world_size: int) -> None:
    for kind in ("stages", "data"):
        losses, values = trained(rank, kind, is_sharded=False)
        parts, same = trained(rank, kind, is_sharded=True)
        assert losses == parts
        assert all(torch.equal(one, other) for one, other in zip(values, same, strict=True))


def refused(engine: xm.PipelineEngine, pattern: str, x: Any, **given: Any) -> None:
    with pytest.raises(ValueError, match=pattern):
        engine.step(x, target=x, **given)


def mistakes(rank: int, world_size: int) -> None:
    """All ranks hear of each, and the next step is right."""
    engine, plan = make("data")
    with engine:
        x, _ = batch(0)
        own = part(x, plan, rank)
        refused(engine, "takes 8 samples, 2 microbatches of 4 as in the example, and got 2", own)
        refused(engine, "and got 18.*drop_last", torch.zeros(18, 16))
        refused(engine, "and got 32.*whole batch", x, sharded=True)
        refused(engine, "sharded=True", own if rank else x, sharded=rank > 0)
        refused(engine, "samples", torch.zeros(1 if rank == 3 else 2, 16), sharded=True)
        refused(
            engine,
            "plain tensors",
            DTensor.from_local(own, xm.device_mesh(DEVICES, "cpu"), [Shard(0)] * 2),
            sharded=True,
        )
        refused(engine, "has shape", own[:, :15], sharded=True)
        with pytest.raises(ValueError, match="part of the target has shapes and dtypes"):
            engine.step(own, target=own[:, :15] if rank == 2 else own, sharded=True)
        with pytest.raises(ValueError, match="part of the target has shapes and dtypes"):
            engine.step(own, target=own.double() if rank == 2 else own, sharded=True)
        engine.step(own, target=own, sharded=True)
        loss = engine.last_loss()
        engine.step(x, target=x)
        assert engine.last_loss() == loss


def body(rank: int, world_size: int) -> None:
    as_whole(rank, world_size)
    mistakes(rank, world_size)


def test_parts_of_a_batch() -> None:
    spawn(body, 4, timeout=170)
