"""Hooks in stages: on modules that no stage cuts, on parameters and on tensors they run as in one process, set before
the engine is made or afterwards; where they could not, they are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import torch_xmesh as xm
from torch_xmesh.testing import spawn


def _twice(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return 2 * output


def _of_tensor(model: nn.Sequential) -> None:
    def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda gradient: gradient * 0.5)  # type: ignore[no-untyped-call]

    model[1].register_forward_hook(hook)


HANGING: dict[str, Callable[[nn.Sequential], Any]] = {
    "forward": lambda model: model[0].register_forward_hook(_twice),
    "forward, with keywords": lambda model: model[0].register_forward_hook(
        lambda module, args, kwargs, output: output + 1, with_kwargs=True
    ),
    "forward, called always": lambda model: model[0].register_forward_hook(_twice, always_call=True),
    "pre-forward": lambda model: model[2].register_forward_pre_hook(lambda module, args: (args[0] * 3,)),
    "full backward": lambda model: model[2].register_full_backward_hook(
        lambda module, inputs, outputs: (inputs[0] * 0.5,)
    ),
    "full backward pre-hook": lambda model: model[2].register_full_backward_pre_hook(
        lambda module, outputs: (outputs[0] * 0.5,)
    ),
    "a tensor": _of_tensor,
    "a parameter": lambda model: model.get_parameter("0.weight").register_hook(lambda gradient: gradient * 3),  # type: ignore[no-untyped-call]
    "weight_norm": lambda model: parametrizations.weight_norm(model[0]),
    "the old weight_norm": lambda model: torch.nn.utils.weight_norm(model[0]),
    "spectral_norm": lambda model: parametrizations.spectral_norm(model[2]),
    "the old spectral_norm": lambda model: torch.nn.utils.spectral_norm(model[2]),
}
# They make parameters, which an engine takes when it is made.
BEFORE = frozenset({"weight_norm", "the old weight_norm", "spectral_norm", "the old spectral_norm"})


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()


def engine_of(model: nn.Module, x: torch.Tensor) -> xm.PipelineEngine:
    return xm.PipelineEngine(
        model,
        (x[:4],),
        meshes=[xm.Mesh([0]), xm.Mesh([1])],
        split=xm.split_at("2"),
        num_microbatches=2,
        loss_fn=F.mse_loss,
    )


def hung(rank: int, world_size: int, name: str, is_before: bool) -> None:
    model, whole = model_of(), model_of()
    torch.manual_seed(1)
    HANGING[name](whole)
    x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    if is_before:
        torch.manual_seed(1)
        HANGING[name](model)
    engine = engine_of(model, x)
    if not is_before:
        HANGING[name](model)
    for _ in range(2):
        engine.zero_grad()
        whole.zero_grad()
        engine.step(x, target=torch.ones_like(x))
        for part in x.chunk(2):
            (F.mse_loss(whole(part), torch.ones_like(part)) / 2).backward()  # type: ignore[no-untyped-call]
        for key, parameter in engine.named_parameters():
            torch.testing.assert_close(parameter.grad, whole.get_parameter(key).grad)
    engine.close()


@pytest.mark.filterwarnings("ignore:`torch.nn.utils")
@pytest.mark.parametrize("name", HANGING)
def test_hooks_run_as_in_one_process(name: str) -> None:
    spawn(hung, 2, name, True)


@pytest.mark.parametrize("name", sorted({*HANGING} - BEFORE))
def test_hooks_that_come_later_run_too(name: str) -> None:
    spawn(hung, 2, name, False)


def refused(rank: int, world_size: int) -> None:
    x = torch.randn(8, 6, dtype=torch.float64)
    model = model_of()
    handle = model.register_forward_hook(_twice)
    with pytest.raises(ValueError, match=r"a stage starts inside the model \(Sequential\), which has hooks"):
        engine_of(model, x)
    handle.remove()
    engine = engine_of(model, x)
    handle = model.register_forward_hook(_twice)
    with pytest.raises(ValueError, match="the model has a hook since the engine was made"):
        engine.step(x, target=x)
    handle.remove()
    handle = nn.modules.module.register_module_forward_hook(_twice)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a hook is registered on all modules, _twice"):
        engine.step(x, target=x)
    handle.remove()
    engine.step(x, target=x)
    engine.close()


def test_hooks_that_no_stage_would_call_are_refused() -> None:
    spawn(refused, 2)


def of_looked_into(rank: int, world_size: int) -> None:
    """On what a stage holds in the place of a module that it does not call."""
    model = nn.Sequential(model_of(), nn.Linear(6, 6).double())
    x = torch.randn(8, 6, dtype=torch.float64)
    whole = copy.deepcopy(model)
    engine = xm.PipelineEngine(
        model,
        (x[:4],),
        meshes=[xm.Mesh([0]), xm.Mesh([1])],
        split=xm.split_at("0.2"),
        num_microbatches=2,
        loss_fn=F.mse_loss,
    )
    stage = engine.stages[0]
    handle = engine.stage_module(stage).get_submodule("0").register_forward_hook(_twice)
    with pytest.raises(ValueError, match="module '0' of stage [01] has a hook, but is never called"):
        engine.step(x, target=x)
    handle.remove()
    engine.step(x, target=x)
    assert engine.last_loss() == pytest.approx(F.mse_loss(whole(x), x).item())
    engine.close()


def test_hooks_on_what_is_never_called_are_refused() -> None:
    spawn(of_looked_into, 2)
