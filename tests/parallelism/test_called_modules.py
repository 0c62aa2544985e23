"""Modules that a planned stage calls as one, and activation checkpoints with something odd inside."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import torch_xmesh as xm
from torch_xmesh.parallelism.recorded_forwards import forward_of
from torch_xmesh.parallelism.running.stage import ShardedStage
from torch_xmesh.testing import spawn

OPTIONS: dict[str, Any] = {
    "devices": xm.Mesh(range(2)),
    "num_microbatches": 2,
    "compute": xm.Compute(flops=1e11, bytes_per_s=1e10),
    "topology": xm.Topology(devices_per_host=2, nic_bytes_per_s=10**8, local_bytes_per_s=10**10),
}


class Counting(nn.Module):
    """Counts its calls; it looks at values, so that it is called as one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.count: torch.Tensor
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if float(x.sum()) > 1e9:
            return x
        with torch.no_grad():
            self.count.add_(1.0)
        out: torch.Tensor = self.inner(x) * (1 + self.count * 0.01)
        return out


class CountTogether(nn.Module):
    """Two that count in one buffer, which the model itself has, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.one, self.other = nn.Linear(8, 8), Counting(), Counting()
        self.other.count = self.one.count
        self.register_buffer("count", self.one.count)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.other(self.one(self.first(x)))
        return out


class ReadsScale(nn.Module):
    """The outer module reads a buffer of what is called as one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.one = nn.Linear(8, 8), Counting()
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.full((8,), 2.0))
        self.one.register_buffer("scale", self.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.one(self.first(x)) * self.scale + self.one.get_buffer("scale")
        return out


class MixtralExperts(nn.Module):
    """Named as transformers' are: it does something else."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 16, 8))
        self.down_proj = nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = (
            hidden * self.down_proj.sum((0, 1)) + weights.sum(-1, keepdim=True) * self.gate_up_proj.mean()
        )
        return out + index[:, :1]


class OwnExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.experts = nn.Linear(8, 8), MixtralExperts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        weights, index = hidden.softmax(-1)[:, :4].topk(2)
        out: torch.Tensor = self.experts(hidden, index, weights)
        return out


class LooksAtAType(nn.Module):
    """In a checkpoint, at that of a value from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        wide: torch.Tensor = hidden.detach().float() + 1

        def inside(y: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = self.last(torch.tanh(y).type_as(wide).double())
            return made.masked_fill(y > 3, 0.0)

        out: torch.Tensor = checkpoint(inside, hidden, use_reentrant=False)
        return out + wide.double()


class InTraining(nn.Module):
    """Checkpointed in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        out: torch.Tensor = checkpoint(self.inner, x, use_reentrant=False) if self.training else self.inner(x)
        return out


def trained(model: nn.Module, plan: xm.ParallelPlan, x: torch.Tensor) -> nn.Module:
    """A step, with the loss, gradients and state of one process; the stage."""
    whole = copy.deepcopy(model)
    batch, target = torch.cat([x, x.flip(0)]), torch.randn(2 * len(x), 8, dtype=torch.float64)
    with xm.PipelineEngine(model, (x,), plan=plan, loss_fn=F.mse_loss) as engine:
        engine.train()
        engine.step(batch, target=target)
        losses = [F.mse_loss(whole(one), y) / 2 for one, y in zip(batch.chunk(2), target.chunk(2), strict=True)]
        torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
        assert engine.last_loss() == pytest.approx(float(torch.stack(losses).sum()), rel=1e-9)
        for name, parameter in engine.named_parameters():
            found, expected = parameter.grad, whole.get_parameter(name).grad
            assert isinstance(found, DTensor)
            assert expected is not None
            torch.testing.assert_close(found.full_tensor(), expected, rtol=1e-7, atol=1e-10, msg=name)
        assert {*engine.state_dict()} == {*whole.state_dict()}
        for name, value in engine.state_dict().items():
            torch.testing.assert_close(value.full_tensor(), whole.state_dict()[name], msg=name)
        return engine.stage_module(0)


def runs(rank: int, world_size: int, kind: type[nn.Module]) -> None:
    torch.manual_seed(1)
    model, x = kind().double().train(kind is not InTraining), torch.randn(4, 8, dtype=torch.float64)
    if kind is OwnExperts:
        assert not [one for one in forward_of(model, (x,)).operators if one.kind == "MixtralExperts"]
    plan = xm.presets.data_parallel(model, (x,), **OPTIONS)
    stage = trained(model, plan, x)
    assert isinstance(stage, ShardedStage)
    if kind in (InTraining, LooksAtAType):
        assert stage._of_mode()._regions


@pytest.mark.parametrize("kind", [CountTogether, ReadsScale, OwnExperts, LooksAtAType, InTraining])
def test_what_is_called_as_one_or_again(kind: type[nn.Module]) -> None:
    spawn(runs, 2, kind, timeout=60)


class Inside(nn.Module):
    """A checkpoint in what cannot be looked into."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(8, 8), Checkpoints()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(self.first(x))
        return out


class Checkpoints(Counting):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = super().forward(x)
        out: torch.Tensor = checkpoint(self.inner, made, use_reentrant=False)
        return out


class OnSeveralStages(nn.Module):
    """One counting module between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.counting, self.last = nn.Linear(8, 8), Counting(), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.counting(self.last(self.counting(self.first(x))))
        return out


class Mapped(nn.Module):
    """Hands on what is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        mean = hidden.mean(0)
        out: torch.Tensor = torch.vmap(lambda row: row * 2 + mean)(hidden)
        return out


def refuses(rank: int, world_size: int) -> None:
    x = torch.randn(4, 8, dtype=torch.float64)
    torch.manual_seed(1)
    model: nn.Module = Inside().double()
    with pytest.raises(
        ValueError, match=r"an activation checkpoint at .*test_called_modules.py:\d+.* cannot be looked"
    ):
        xm.presets.data_parallel(model, (x,), **OPTIONS)
    model = OnSeveralStages().double()
    plan = xm.presets.pipeline(model, (x,), num_stages=2, num_layers=2, **OPTIONS)
    with pytest.raises(ValueError, match=r"buffer counting.count is in modules called as one on several stages"):
        xm.PipelineEngine(model, (x,), plan=plan, loss_fn=F.mse_loss)
    dist.barrier()
    model = Mapped().double()
    plan = xm.presets.data_parallel(model, (x,), **OPTIONS)
    with pytest.raises(ValueError, match="takes what is no tensor, and made in the forward"):
        xm.PipelineEngine(model, (x,), plan=plan, loss_fn=F.mse_loss)


def test_what_is_refused() -> None:
    spawn(refuses, 2, timeout=60)
