"""Plans under autocast, and with a GradScaler."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from planned_cases import OPTIONS, PLANS, whole_of
from small_models import Gpt
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import torch_xmesh as xm
from torch_xmesh.parallelism.running.fetching import Fetch
from torch_xmesh.testing import spawn


class WithLoss(nn.Module):
    """A GPT that computes its loss, over a vocabulary that devices share."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = Gpt(num_layers=2)

    def forward(self, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.gpt(tokens).flatten(0, 1), target.flatten())


def gradients_of(model: nn.Module, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Gradients in one process: the mean over microbatches."""
    model.zero_grad()
    for one in batches:
        (model(*one) / len(batches)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def error_of(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    differences = [(found[name] - one).float().square().sum() for name, one in exact.items() if name in found]
    return float(torch.stack(differences).sum().sqrt())


def trains(rank: int, world_size: int, plan: str, is_made_under: bool, is_planned_under: bool) -> None:
    """No further from exact gradients than one process under autocast; what crosses is as narrow as there."""
    torch.manual_seed(0)
    model = WithLoss()
    reference = copy.deepcopy(model)
    tokens, target = torch.randint(0, 96, (16, 16)), torch.randint(0, 96, (16, 16))
    halves = [(tokens[:8], target[:8]), (tokens[8:], target[8:])]
    exact = gradients_of(reference, halves)
    with torch.autocast("cpu", torch.bfloat16):
        serial = gradients_of(reference, halves)
    cast = torch.autocast("cpu", torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=is_planned_under):
        made = PLANS[plan](model, halves[0])
    with torch.autocast("cpu", torch.bfloat16, enabled=is_made_under):
        engine = xm.PipelineEngine(model, halves[0], plan=made, loss_fn=lambda loss: loss)
    with cast:
        for _ in range(2):
            engine.zero_grad()
            engine.step(tokens, target)
    for stage in engine.stages:
        found = {name: whole_of(p.grad) for name, p in engine.stage_module(stage).named_parameters()}
        mine = {name: one for name, one in exact.items() if name in found}
        assert error_of(found, mine) <= 2 * error_of(serial, mine) + 1e-6
        assert error_of(found, mine) > 0
    engine.zero_grad()
    engine.step(tokens, target)  # and without it
    for stage in engine.stages:
        for name, p in engine.stage_module(stage).named_parameters():
            torch.testing.assert_close(whole_of(p.grad), exact[name], rtol=1e-4, atol=1e-5)
    engine.close()


@pytest.mark.parametrize("plan", ["data", "ZeRO-3", "megatron", "pipeline", "found"])
def test_autocast_around_the_step(plan: str) -> None:
    spawn(trains, 4, plan, False, False, timeout=120)


def test_autocast_around_plan_and_engine() -> None:
    for is_planned_under in (False, True):
        spawn(trains, 4, "pipeline", True, is_planned_under, timeout=120)


def keeps(rank: int, world_size: int) -> None:
    """Backward fetches as many parameters anew as without autocast: no cast copy is kept in their place."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 64)), torch.randn(16, 64)
    plan = xm.presets.zero_3(model, (x,), num_layers=1, **OPTIONS)
    engine = xm.PipelineEngine(model, (x,), plan=plan, loss_fn=F.mse_loss)
    batch = torch.cat([x, x])
    counts = []
    for enabled in (False, True):
        with (
            mock.patch.object(Fetch, "save", autospec=True, side_effect=Fetch.save) as saved,
            torch.autocast("cpu", torch.bfloat16, enabled=enabled),
        ):
            engine.step(batch, target=batch)
        counts.append(saved.call_count)
    assert counts[0] == counts[1] > 0
    engine.close()


def test_parameters_that_are_fetched_are_not_kept_under_autocast() -> None:
    spawn(keeps, 4, timeout=60)


def scales(rank: int, world_size: int, plan: str) -> None:
    """A step that overflows on one device is skipped on all; the others are those of one process."""
    torch.manual_seed(0)
    model = WithLoss()
    tokens, target = torch.randint(0, 96, (16, 16)), torch.randint(0, 96, (16, 16))
    halves = [(tokens[:8], target[:8]), (tokens[8:], target[8:])]
    reference = copy.deepcopy(model)
    engine = xm.PipelineEngine(model, halves[0], plan=PLANS[plan](model, halves[0]), loss_fn=lambda loss: loss)
    optimizer, ours = (torch.optim.SGD(one.parameters(), 0.1) for one in (reference, engine))
    scaler = engine.scaler(torch.amp.GradScaler("cpu", init_scale=1024.0))
    for overflows in (False, True, False):
        ours.zero_grad()
        engine.step(tokens, target)
        parameter = next(iter(engine.parameters()))
        if overflows and rank == 1:
            whole = parameter.grad
            assert whole is not None
            (whole.to_local() if isinstance(whole, DTensor) else whole).fill_(float("inf"))
        scaler.unscale_(ours)
        if not overflows:
            wanted = gradients_of(reference, halves)
            norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
            assert engine.clip_grad_norm_(0.5).item() == pytest.approx(norm.item(), rel=1e-3)
            assert {*wanted} >= {name for name, _ in engine.named_parameters()}
            optimizer.step()
        scaler.step(ours)
        scaler.update()
    assert scaler.get_scale() == 512.0
    told: list[Any] = [None] * world_size
    dist.all_gather_object(told, scaler.get_scale())
    assert set(told) == {512.0}
    for name, p in engine.named_parameters():
        torch.testing.assert_close(whole_of(p.detach()), reference.get_parameter(name).detach(), rtol=1e-3, atol=1e-4)
    engine.close()


@pytest.mark.parametrize("plan", ["ZeRO-3", "pipeline"])
def test_a_grad_scaler(plan: str) -> None:
    spawn(scales, 4, plan, timeout=120)
