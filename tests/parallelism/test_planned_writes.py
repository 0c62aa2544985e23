"""Forwards that write to the model's own tensors, in plans and in stages of several data shards: as one process, or
refused by name."""

from __future__ import annotations

import copy

import pytest
import torch
from planned_cases import PLANS, whole_of
from torch.nn import functional as F
from writing_models import WRITES, Writing

import torch_xmesh as xm
from torch_xmesh.testing import spawn

REFUSED = {
    "batch norm, twice": "batch_norm in the model itself writes to mean, var, which the same forward reads again later",
    "max_norm": "the forward writes to parameter table",
    "max_norm of bags": "the forward writes to parameter table",
    "for each": "buffer mean is changed by the forward",
    "out=": "buffer mean is changed by the forward",
    "normalize(out=)": "buffer var is changed by the forward",
    "a view": "changes memory in place that is read under another name later|buffer mean is changed by the forward",
    "an item": "buffer mean is changed by the forward",
}


def trains(engine: xm.PipelineEngine, whole: Writing, x: torch.Tensor) -> None:
    """A step of two microbatches, against one process."""
    target = torch.ones_like(x)
    engine.step(x, target=target)
    for part, wanted in zip(x.chunk(2), target.chunk(2), strict=True):
        (F.mse_loss(whole(part), wanted) / 2).backward()  # type: ignore[no-untyped-call]
    for name, parameter in engine.named_parameters():
        expected = whole.get_parameter(name).grad
        assert (parameter.grad is None) == (expected is None), name
        if parameter.grad is not None:
            torch.testing.assert_close(whole_of(parameter.grad), expected)
    for stage in engine.stages:
        for name, buffer in engine.stage_module(stage).named_buffers():
            torch.testing.assert_close(whole_of(buffer), whole.get_buffer(name))


def planned(rank: int, world_size: int, name: str) -> None:
    for plan in ("data", "found", "megatron", "pipeline"):
        torch.manual_seed(0)
        model, x = Writing(WRITES[name][0]).double(), torch.randn(16, 4, dtype=torch.float64)
        whole = copy.deepcopy(model)
        if name in REFUSED:
            with pytest.raises(ValueError, match=REFUSED[name]):
                xm.PipelineEngine(model, (x[:8],), plan=PLANS[plan](model, (x[:8],)), loss_fn=F.mse_loss)
            continue
        engine = xm.PipelineEngine(model, (x[:8],), plan=PLANS[plan](model, (x[:8],)), loss_fn=F.mse_loss)
        trains(engine, whole, x)
        engine.close()


@pytest.mark.parametrize("name", WRITES)
def test_plans(name: str) -> None:
    spawn(planned, 4, name)


def sharded(rank: int, world_size: int, name: str) -> None:
    torch.manual_seed(0)
    model, x = Writing(WRITES[name][0]), torch.randn(16, 4)

    def make() -> xm.PipelineEngine:
        meshes = [xm.Mesh([0, 1]), xm.Mesh([2])]
        return xm.PipelineEngine(
            model, (x[:8],), meshes=meshes, split=xm.split_at("last"), num_microbatches=2, loss_fn=F.mse_loss
        )

    if "max_norm" in name:
        with pytest.raises(ValueError, match="the forward writes to parameter table, in stage 0, which runs on 2 data"):
            make()
        return
    engine = make()
    engine.step(x, target=torch.ones_like(x))
    engine.close()


@pytest.mark.parametrize("name", WRITES)
def test_data_shards(name: str) -> None:
    """A parameter that the forward writes to would differ between data shards; buffers are those of the first."""
    spawn(sharded, 3, name)
