"""What can hang on a model that is planned: it is part of the forward, or refused by name."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from planned_cases import OPTIONS, PLANS, whole_of
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

import torch_xmesh as xm
from torch_xmesh.testing import spawn


class Scaled(nn.Module):
    """Two layers, a factor of its own, and methods that are hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8)
        self.factor = nn.Parameter(torch.full((16,), 1.5))
        self.register_buffer("shift", torch.full((16,), 0.25))

    def forward(self, x: torch.Tensor, *, weight: float = 1.0) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x))) * weight  # type: ignore[no-any-return]

    def scale(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output * self.factor + self.get_buffer("shift")


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


def _twice(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return 2 * output


def _twice_in_place(module: nn.Module, args: Any, output: torch.Tensor) -> None:
    output.mul_(2)


def _mean(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output - output.mean()


def _shifted(module: nn.Module, args: Any) -> Any:
    return (args[0] + 1,)


def _heavier(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return args, {"weight": 3.0}


def _holds_the_model(model: Scaled) -> None:
    factor, shift = model.factor, model.get_buffer("shift")
    model.first.register_forward_hook(lambda module, args, output: output * factor + shift)


HANGING: dict[str, Callable[[Scaled], Any]] = {
    "a forward hook": lambda model: model.first.register_forward_hook(_twice),
    "one of the model": lambda model: model.register_forward_hook(_twice),
    "one that looks at all": lambda model: model.first.register_forward_hook(_mean),
    "one that changes in place": lambda model: model.last.register_forward_hook(_twice_in_place),
    "one that is prepended": lambda model: [
        model.first.register_forward_hook(_mean),
        model.first.register_forward_hook(lambda module, args, output: output.abs(), prepend=True),
    ],
    "a pre-hook": lambda model: model.last.register_forward_pre_hook(_shifted),
    "a pre-hook with keywords": lambda model: model.register_forward_pre_hook(_heavier, with_kwargs=True),
    "a method of the model": lambda model: model.first.register_forward_hook(model.scale),
    "a function that holds tensors of the model": _holds_the_model,
    "a partial": lambda model: model.first.register_forward_hook(functools.partial(_twice)),
    "a parametrization": lambda model: parametrize.register_parametrization(model.first, "weight", Doubled()),
    "weight_norm": lambda model: parametrizations.weight_norm(model.first),
    "the old weight_norm": lambda model: torch.nn.utils.weight_norm(model.first),
}


def close(engine: xm.PipelineEngine, whole: nn.Module, x: torch.Tensor) -> None:
    target = torch.ones_like(x)
    for _ in range(2):
        whole.zero_grad()
        engine.zero_grad()
        engine.step(x, target=target)
        loss = sum(F.mse_loss(whole(part), target[: len(part)]) / 2 for part in x.chunk(2))
        assert isinstance(loss, torch.Tensor)
        loss.backward()  # type: ignore[no-untyped-call]
        assert engine.last_loss() == pytest.approx(loss.item(), rel=1e-9)
        for name, parameter in engine.named_parameters():
            torch.testing.assert_close(whole_of(parameter.grad), whole.get_parameter(name).grad)


def hung(rank: int, world_size: int, name: str) -> None:
    for plan in ("data", "megatron"):
        torch.manual_seed(0)
        model = Scaled().double()
        HANGING[name](model)
        torch.manual_seed(0)
        whole = Scaled().double()
        HANGING[name](whole)
        x = torch.randn(16, 8, dtype=torch.float64)
        engine = xm.PipelineEngine(model, (x[:8],), plan=PLANS[plan](model, (x[:8],)), loss_fn=F.mse_loss)
        close(engine, whole, x)
        engine.close()


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`")
@pytest.mark.parametrize("name", HANGING)
def test_what_hangs_on_a_planned_model_is_part_of_it(name: str) -> None:
    spawn(hung, 4, name)


class HooksItsOutput(Scaled):
    def forward(self, x: torch.Tensor, *, weight: float = 1.0) -> torch.Tensor:
        made = self.first(x)
        made.register_hook(lambda gradient: gradient.clamp(-1, 1))
        return self.last(made)  # type: ignore[no-any-return]


def _compiled(model: Scaled) -> Any:
    return torch.compile(model)


def _all(model: Scaled) -> nn.Module:
    nn.modules.module.register_module_forward_hook(_twice)  # type: ignore[arg-type]
    return model


def _after(do: Callable[[Scaled], Any]) -> Callable[[Scaled], nn.Module]:
    def done(model: Scaled) -> nn.Module:
        do(model)
        return model

    return done


REFUSED: dict[str, tuple[Callable[[Scaled], nn.Module], str]] = {
    "a hook that only looks": (
        _after(lambda model: model.first.register_forward_hook(lambda module, args, output: None)),
        "module 'first' has a forward hook, .*lambda.*, that changes nothing of the forward",
    ),
    "a pre-hook that only looks": (
        _after(lambda model: model.first.register_forward_pre_hook(lambda module, args: None)),
        "module 'first' has a forward pre-hook",
    ),
    "a full backward hook": (
        _after(lambda model: model.first.register_full_backward_hook(lambda module, got, given: None)),
        "module 'first' has a backward hook",
    ),
    "a full backward pre-hook": (
        _after(lambda model: model.register_full_backward_pre_hook(lambda module, given: None)),
        "the model has a backward pre-hook",
    ),
    "a parameter's hook": (
        _after(lambda model: model.factor.register_hook(lambda gradient: gradient * 2)),  # type: ignore[no-untyped-call]
        "parameter factor has a hook",
    ),
    "a parameter's hook behind its gradient": (
        _after(lambda model: model.factor.register_post_accumulate_grad_hook(lambda parameter: None)),  # type: ignore[no-untyped-call]
        "parameter factor has a hook",
    ),
    "a compiled model": (_compiled, r"the model \(OptimizedModule\) is compiled"),
    "a compiled layer": (_after(lambda model: model.first.compile()), r"module 'first' \(Linear\) is compiled"),
    "a tensor's hook": (lambda model: HooksItsOutput(), "the model itself calls register_hook"),
    "a hook on all modules": (_all, "a hook is registered on all modules, _twice"),
    "a wrapper": (lambda model: nn.DataParallel(model), r"the model \(DataParallel\) averages gradients itself"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_planned_is_refused_by_name(name: str) -> None:
    """By the search, and so by the engine, which reads the model in the same way."""
    make, message = REFUSED[name]
    x = torch.randn(8, 8)
    model = make(Scaled())
    try:
        with pytest.raises(ValueError, match=message):
            xm.plan_parallel(model, (x,), **OPTIONS)
    finally:
        torch.nn.modules.module._global_forward_hooks.clear()


LATER: dict[str, tuple[Callable[[Scaled, xm.PipelineEngine], Any], str]] = {
    "a module's": (lambda model, engine: model.first.register_forward_hook(_twice), "module 'first' has a hook since"),
    "the model's": (lambda model, engine: model.register_forward_pre_hook(_shifted), "the model has a hook since"),
    "a parameter's": (
        lambda model, engine: model.first.weight.register_hook(lambda gradient: gradient),  # type: ignore[no-untyped-call]
        "parameter first.weight has a hook",
    ),
    "a stage's module's": (
        lambda model, engine: engine.stage_module(0).get_submodule("last").register_forward_hook(_twice),
        "module 'last' of stage 0 has a hook, but is never called",
    ),
}


def later(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = Scaled().double()
    whole, x = copy.deepcopy(model), torch.randn(16, 8, dtype=torch.float64)
    plan = PLANS["data"](model, (x[:8],))
    if rank == 1:
        model.factor.register_hook(lambda gradient: gradient)  # type: ignore[no-untyped-call]
    with pytest.raises(ValueError, match="rank 1|parameter factor has a hook"):
        xm.PipelineEngine(model, (x[:8],), plan=plan, loss_fn=F.mse_loss)
    dist.barrier()
    model = copy.deepcopy(whole)
    engine = xm.PipelineEngine(model, (x[:8],), plan=plan, loss_fn=F.mse_loss)
    for hang, message in LATER.values():
        handle = hang(model, engine)
        with pytest.raises(ValueError, match=message):
            engine.step(x, target=x)
        handle.remove()
        dist.barrier()
    close(engine, whole, x)
    engine.close()


def test_hooks_that_come_later_are_refused() -> None:
    spawn(later, 4)
