"""Engines follow the programs of their plan: they choose nothing anew, and compare by name what they are given."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from planned_cases import OPTIONS, whole_of
from small_models import Gpt, Mlp
from torch import nn
from torch.nn import functional as F

import torch_xmesh as xm
from torch_xmesh import _C
from torch_xmesh.parallelism import loops
from torch_xmesh.testing import spawn


def gradients_are(engine: xm.PipelineEngine, whole: nn.Module) -> None:
    for name, parameter in engine.named_parameters():
        torch.testing.assert_close(whole_of(parameter.grad), whole.get_parameter(name).grad)


def chooses_nothing(rank: int, world_size: int, text: str) -> None:
    """Neither ways between shardings nor what a choice means to an operator's tensors."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("an engine chose something")

    for name in ("choice_along", "choices_of", "whole_choice"):
        setattr(loops, name, refuse)
    _C.ConversionCosts = refuse  # type: ignore[misc, assignment]
    torch.manual_seed(2)
    model = Gpt(num_layers=2).double()
    whole = copy.deepcopy(model)
    tokens, target = torch.randint(0, 16, (8, 8)), torch.randn(8, 8, 96, dtype=torch.float64)
    with xm.PipelineEngine(model, (tokens[:4],), plan=xm.ParallelPlan.from_json(text), loss_fn=F.mse_loss) as engine:
        engine.step(tokens, target=target)
        F.mse_loss(whole(tokens), target).backward()  # type: ignore[no-untyped-call]
        gradients_are(engine, whole)


@pytest.mark.parametrize("zero", [0, 3])
def test_an_engine_chooses_nothing(zero: int) -> None:
    torch.manual_seed(2)
    tokens = torch.randint(0, 16, (4, 8))
    plan = xm.presets.pipeline(
        Gpt(num_layers=2).double(), (tokens,), num_stages=2, tensor_parallel=2, zero=zero, **OPTIONS
    )
    spawn(chooses_nothing, 4, plan.to_json())


class TakesThree(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor, scale: torch.Tensor, *, shift: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x * scale).relu()) * mask + shift
        return out


def takes_arguments_by_name(rank: int, world_size: int) -> None:
    """Planned with keywords in one order, run with others, one of them passed by position."""
    torch.manual_seed(1)
    model = TakesThree().double()
    whole = copy.deepcopy(model)
    x, shift, mask = (torch.randn(8, 16, dtype=torch.float64) for _ in range(3))
    scale = torch.randn(8, 1, dtype=torch.float64)
    given = {"mask": mask[:4], "shift": shift[:4], "scale": scale[:4], "x": x[:4]}
    plan = xm.presets.megatron(model, (), example_kwargs=given, tensor_parallel=2, **OPTIONS)
    example = {"shift": shift[:4], "mask": mask[:4]}
    with xm.PipelineEngine(model, (x[:4], scale[:4]), example, plan=plan, loss_fn=F.mse_loss) as engine:
        engine.step(x, scale, mask=mask, shift=shift, target=torch.zeros_like(x))
        F.mse_loss(whole(x, scale, shift=shift, mask=mask), torch.zeros_like(x)).backward()  # type: ignore[no-untyped-call]
        gradients_are(engine, whole)


def test_arguments_are_known_by_name() -> None:
    spawn(takes_arguments_by_name, 4)


def is_trained_otherwise(rank: int, world_size: int) -> None:
    torch.manual_seed(1)
    model, x = Mlp(64, 4).double(), torch.randn(16, 64, dtype=torch.float64)
    plan = xm.presets.megatron(model, (x,), tensor_parallel=2, **OPTIONS)
    next(model.parameters()).requires_grad_(False)
    with pytest.raises(ValueError, match="had a gradient when the plan was made, and has none now: plan the model as"):
        xm.PipelineEngine(model, (x,), plan=plan, loss_fn=F.mse_loss)


def test_a_model_that_is_trained_otherwise_is_refused() -> None:
    spawn(is_trained_otherwise, 4)


def in_one_mode(rank: int, world_size: int) -> None:
    """The plan says why the other mode is none of its own, and so does its engine."""
    torch.manual_seed(1)
    model, x = OtherOutput().double(), torch.randn(16, 64, dtype=torch.float64)
    plan = xm.presets.megatron(model, (x,), tensor_parallel=2, **OPTIONS)
    assert plan.one_mode_because == "in the other it returns something else"
    assert [program.mode for program in plan.stages[0].programs] == ["training"]
    plan = xm.ParallelPlan.from_json(plan.to_json())
    with pytest.raises(ValueError, match="runs in training mode alone: in the other it returns something else"):
        xm.PipelineEngine(copy.deepcopy(model).eval(), (x,), plan=plan, loss_fn=F.mse_loss)
    with xm.PipelineEngine(model, (x,), plan=plan, loss_fn=F.mse_loss) as engine:
        engine.step(torch.cat([x, x]), target=torch.zeros(32, 64, dtype=torch.float64))
        engine.eval()
        with pytest.raises(ValueError, match="runs in training mode alone"):
            engine.evaluate(torch.cat([x, x]))


class OtherOutput(nn.Module):
    """In evaluation it returns the same tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = Mlp(64, 2)

    def forward(self, x: torch.Tensor) -> Any:
        out = self.layers(x)
        return out if self.training else (out, out)


def test_a_plan_of_one_mode_says_why() -> None:
    spawn(in_one_mode, 4)
