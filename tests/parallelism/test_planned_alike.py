"""What stages on parts could do otherwise than one process, unseen: they do as it does, or refuse."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from planned_cases import OPTIONS, whole_of
from torch import nn
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.nn import functional as F

import torch_xmesh as xm
from torch_xmesh.testing import spawn


class Chooses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.a(x) if x.sum() > 0 else self.a(x).relu()
        return out


class Counts(Chooses):
    def __init__(self) -> None:
        super().__init__()
        self.number = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.number += 1.0
        out: torch.Tensor = self.a(x) * self.number
        return out


class Remembers(Chooses):
    def __init__(self) -> None:
        super().__init__()
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.a(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(out.mean(0), alpha=0.1)
        return out


class CountsInABuffer(Chooses):
    def __init__(self) -> None:
        super().__init__()
        self.number: torch.Tensor
        self.register_buffer("number", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.number.add_(1)
        out: torch.Tensor = self.a(x)
        return out


class AddsInEvaluation(Chooses):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.a(x)
        return out if self.training else out + 1


class ReturnsItsWeight(Chooses):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return self.a(x), self.a.weight


class ChangesARow(Chooses):
    """A constant is changed through a view of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.zeros(4, 64)
        rows[0].fill_(5.0)
        out: torch.Tensor = (self.a(x).unsqueeze(1) + rows).sum(1)
        return out


class NamedAsAStageIs(nn.Module):
    """Its parameters have the names of a stage's own attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(64, 64)
        self.recorded = nn.Parameter(torch.ones(64))
        self.coordinate: torch.Tensor
        self.register_buffer("coordinate", torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.own(x) * self.recorded + self.coordinate
        return out


class AddsNoise(Chooses):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.a(x + torch.randn_like(x)).square()
        return out


class Sequences(Chooses):
    """[length, batch, width], and a penalty."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return self.a(x), self.a.weight.square().sum()


def runs_rightly(rank: int, world_size: int) -> None:
    """What a plan's stages could do otherwise than one process, unseen."""
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    options = {**OPTIONS, "num_layers": 1}

    def both(model: nn.Module, loss_fn: Any, x: torch.Tensor, **more: Any) -> tuple[xm.PipelineEngine, nn.Module]:
        whole = copy.deepcopy(model)
        plan = xm.presets.megatron(model, (x,), tensor_parallel=2, **options)
        return xm.PipelineEngine(model, (x,), plan=plan, loss_fn=loss_fn, **more), whole

    batch, target = torch.cat([x, x]), torch.ones(32, 64)
    for kind in (ChangesARow, NamedAsAStageIs):
        torch.manual_seed(0)
        engine, whole = both(kind(), F.mse_loss, x)
        engine.step(batch, target=target)
        assert engine.last_loss() == pytest.approx(F.mse_loss(whole(batch), target).item(), rel=1e-5)
        assert {*engine.state_dict()} == {*whole.state_dict()}
        engine.close()

    torch.manual_seed(0)
    engine, _ = both(AddsNoise().eval(), F.mse_loss, x)
    torch.manual_seed(rank)  # a rank's own generator does not matter
    made = engine.evaluate(batch, target=target)
    told: list[Any] = [None] * world_size
    dist.all_gather_object(told, made.double().sum().item())
    assert len(set(told)) == 1
    engine.close()

    torch.manual_seed(0)
    spec, first = TensorChunkSpec(1), TensorChunkSpec(0)  # type: ignore[no-untyped-call]
    words = torch.randn(8, 16, 64, generator=torch.Generator().manual_seed(1))
    wanted = torch.randint(64, (8, 32), generator=torch.Generator().manual_seed(1))

    def loss_of(output: Any, target: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = F.cross_entropy(output[0].flatten(0, 1), target.flatten()) + 0.1 * output[1]
        return loss

    more = {"args_chunk_spec": (spec,), "target_chunk_spec": spec, "output_merge_spec": (spec, first)}
    engine, whole = both(Sequences(), loss_of, words, **more)
    batch = torch.cat([words, words.flip(1)], 1)
    engine.step(batch, target=wanted, return_outputs=False)
    assert engine.last_loss() == pytest.approx(loss_of(whole(batch), wanted).item(), rel=1e-5)
    engine.close()

    def sum_of(output: Any, target: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = F.cross_entropy(output[0], target, reduction="sum") + output[1]
        return loss

    torch.manual_seed(0)
    engine, whole = both(Sequences(), sum_of, x, scale_grads=False)
    batch, labels = torch.cat([x, x]), wanted[0]
    engine.step(batch, target=labels, return_outputs=False)
    loss = sum(sum_of(whole(x), half) for half in labels.chunk(2))
    assert isinstance(loss, torch.Tensor)
    loss.backward()  # type: ignore[no-untyped-call]
    assert engine.last_loss() == pytest.approx(loss.item(), rel=1e-5)
    for name, parameter in engine.named_parameters():
        torch.testing.assert_close(whole_of(parameter.grad), whole.get_parameter(name).grad, rtol=1e-4, atol=1e-4)
    engine.close()


def test_what_parts_could_do_otherwise_unseen() -> None:
    spawn(runs_rightly, 4, timeout=120)


def refuses(rank: int, world_size: int) -> None:
    x = torch.randn(16, 64)
    unplanned: list[tuple[type[nn.Module], str]] = [
        (Chooses, "the forward depends on values"),
        (Remembers, "buffer mean is changed by the forward, and not by one operator alone"),
        (CountsInABuffer, "buffer number is changed by the forward"),
        (ReturnsItsWeight, "output a.weight follows from a.weight alone"),
    ]
    cases: list[tuple[type[nn.Module], str]] = [
        (Counts, "the forward does something else the next time"),
    ]
    options = {**OPTIONS, "num_layers": 1}
    for kind, message in unplanned:
        with pytest.raises(ValueError, match=message):
            xm.presets.data_parallel(kind(), (x,), **options)
        with pytest.raises(ValueError, match=message):
            xm.plan_parallel(kind(), (x,), **options)
    for kind, message in cases:
        torch.manual_seed(0)
        model: nn.Module = kind()
        plan = xm.presets.data_parallel(model, (x,), **options)
        with pytest.raises(ValueError, match=message):
            xm.PipelineEngine(model, (x,), plan=plan, loss_fn=F.mse_loss)
        dist.barrier()
    torch.manual_seed(0)
    model = AddsInEvaluation()
    plan = xm.presets.data_parallel(model, (x,), **options)
    engine = xm.PipelineEngine(model, (x,), plan=plan, loss_fn=F.mse_loss)
    batch = torch.cat([x, x])
    engine.step(batch, target=batch)
    engine.eval()
    with pytest.raises(ValueError, match="this model runs in training mode alone.*there is add, which the plan"):
        engine.evaluate(batch, target=batch)
    engine.train()
    engine.step(batch, target=batch)
    next(engine.stage_module(0).children()).eval()
    with pytest.raises(ValueError, match="this model runs in training mode alone"):
        engine.step(batch, target=batch)
    engine.train()
    engine.step(batch, target=batch)  # a refusal does not end the engine
    parameter = next(iter(engine.parameters()))
    hook = parameter.register_hook(lambda gradient: gradient)  # type: ignore[no-untyped-call]
    with pytest.raises(ValueError, match="has a hook" if rank == 1 else "rank 1|has a hook"):
        engine.step(batch, target=batch)
    hook.remove()
    engine.step(batch, target=batch)
    engine.close()
    dist.barrier()
    torch.manual_seed(0)
    engine = xm.PipelineEngine(model, (x,), plan=plan, loss_fn=F.mse_loss)
    for parameter in engine.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(ValueError, match="was frozen or unfrozen"):
        engine.step(batch, target=batch)


def test_what_parts_would_do_otherwise_is_refused() -> None:
    spawn(refuses, 4, timeout=120)
