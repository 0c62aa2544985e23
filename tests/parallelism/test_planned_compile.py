"""Stages of plans, compiled between their collectives."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from planned_cases import PLANS, whole_of
from slice_models import WRITES, Slices
from small_models import Gpt, Mlp
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import torch_xmesh as xm
from torch_xmesh.parallelism.running.stage import ShardedStage
from torch_xmesh.testing import spawn


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gpt, self.drop = Gpt(num_layers=3), nn.Dropout(0.0)

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.gpt.tokens(tokens) + self.gpt.positions(torch.arange(tokens.shape[1]))
        for layer in self.gpt.layers.children():
            x = checkpoint(layer, x, use_reentrant=False)
        return self.gpt.head(self.gpt.norm(self.drop(x)))


def trains(rank: int, world_size: int, name: str, plan: str) -> tuple[int, int]:
    """Graphs compiled, and how often they ran, forward. Autograd's graphs are made of them, too."""
    torch.manual_seed(1)
    model: nn.Module = {"gpt": lambda: Gpt(num_layers=3), "checkpointed": Checkpointed}[name]().double()
    whole = copy.deepcopy(model)
    tokens, target = torch.randint(0, 96, (16, 16)), torch.randn(16, 16, 96).double()
    compiled, ran = [], []

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled.append(graph)
        function = torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

        def run(*given: Any) -> Any:
            ran.append(graph)
            return function(*given)

        return run

    engine = xm.PipelineEngine(model, (tokens[:8],), plan=PLANS[plan](model, (tokens[:8],)), loss_fn=F.mse_loss)
    for stage in engine.stages:
        engine.stage_module(stage).compile(backend=count)
    for _ in range(2):
        engine.zero_grad()
        engine.step(tokens, target=target)
    num_compiled = len(compiled)
    F.mse_loss(whole(tokens), target).backward()  # type: ignore[no-untyped-call]
    for key, parameter in engine.named_parameters():
        found, expected = parameter.grad, whole.get_parameter(key).grad
        assert isinstance(found, DTensor)
        assert expected is not None
        torch.testing.assert_close(found.full_tensor(), expected, rtol=1e-6, atol=1e-9, msg=key)
    engine.eval()
    engine.evaluate(tokens, target=target)
    if engine.last_loss() is not None:
        assert engine.last_loss() == pytest.approx(F.mse_loss(whole(tokens), target).item(), rel=1e-9)
    engine.close()
    return num_compiled, len(ran)


def writes(rank: int, world_size: int) -> None:
    """With a sample per device copies that are recorded as such share memory with what they are of."""
    torch.manual_seed(1)
    model, x = Slices(WRITES["copies of some"]).double(), torch.randn(8, 8, dtype=torch.float64)
    whole, target = copy.deepcopy(model), torch.randn(8, 8, dtype=torch.float64)
    plan = PLANS["data"](model, (x[:4],))
    with xm.PipelineEngine(model, (x[:4],), plan=plan, loss_fn=F.mse_loss) as engine:
        engine.stage_module(0).compile(backend="aot_eager")
        engine.step(x, target=target)
        F.mse_loss(whole(x), target).backward()  # type: ignore[no-untyped-call]
        for key, parameter in engine.named_parameters():
            torch.testing.assert_close(whole_of(parameter.grad), whole.get_parameter(key).grad, msg=key)


def test_compiled_copies_have_memory_of_their_own() -> None:
    spawn(writes, 4)


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("plan", ["data", "megatron", "pipeline with ZeRO-3"])
@pytest.mark.parametrize("name", ["gpt", "checkpointed"])
def test_stages_are_compiled(name: str, plan: str) -> None:
    """They do as before; a graph for each kind of run, not for each layer."""
    for num_compiled, num_ran in spawn(trains, 4, name, plan, timeout=240):
        assert 0 < num_compiled < 30, num_compiled
        assert num_ran > num_compiled


def refuses(rank: int, world_size: int) -> None:
    model, x = Mlp(64, 4), torch.randn(16, 64)
    engine = xm.PipelineEngine(model, (x,), plan=PLANS["data"](model, (x,)), loss_fn=F.mse_loss)
    stage = engine.stage_module(0)
    assert isinstance(stage, ShardedStage)
    with pytest.raises(TypeError, match=r"takes torch.compile's keyword arguments"):
        stage.compile("inductor")
    engine.close()


def test_mistakes() -> None:
    spawn(refuses, 4, timeout=60)
