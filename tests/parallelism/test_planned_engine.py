"""PipelineEngine(plan=...): what it is given, what it refuses, and what an engine is used for besides steps."""

from __future__ import annotations

import copy
import dataclasses
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from planned_cases import OPTIONS, whole_of
from small_models import Gpt, Mlp
from torch import nn
from torch.nn import functional as F

import torch_xmesh as xm
from torch_xmesh.parallelism.presets import _preset
from torch_xmesh.testing import World, mark, spawn


def model_and_input(seed: int = 1) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(seed)
    return Mlp(64, 4).double(), torch.randn(16, 64, dtype=torch.float64)


def planned(**more: Any) -> xm.ParallelPlan:
    model, x = model_and_input()
    return xm.presets.pipeline(model, (x,), num_stages=2, tensor_parallel=2, **{**OPTIONS, **more})


def used(rank: int, world_size: int, zero: int) -> None:
    """Losses, gradients' norm, weights and what is evaluated are those of one process; so is what is loaded."""
    model, x = model_and_input()
    whole = copy.deepcopy(model)
    engine = xm.PipelineEngine(model, (x,), plan=planned(zero=zero), loss_fn=F.mse_loss)
    batch, target = torch.cat([x, x.flip(0)]), torch.ones(32, 64, dtype=torch.float64)
    loss = F.mse_loss(whole(batch), target)
    loss.backward()  # type: ignore[no-untyped-call]
    engine.step(batch, target=target)
    assert engine.last_loss() == pytest.approx(loss.item(), rel=1e-12)
    norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.01)
    assert engine.clip_grad_norm_(0.01).item() == pytest.approx(norm.item(), rel=1e-6)
    optimizer, reference = (torch.optim.Adam(one.parameters(), 0.01) for one in (engine, whole))
    optimizer.step()
    reference.step()
    for name, parameter in engine.named_parameters():
        expected_weight = whole.get_parameter(name).detach()
        torch.testing.assert_close(whole_of(parameter).detach(), expected_weight, rtol=1e-5, atol=1e-6)
    expected = F.mse_loss(whole(batch), target)
    engine.evaluate(batch, target=target)
    assert engine.last_loss() == pytest.approx(expected.item(), rel=1e-12)
    saved = {name: one.clone() for name, one in engine.state_dict().items()}
    engine.zero_grad()
    engine.step(batch, target=target)
    optimizer.step()
    engine.load_state_dict(saved)
    engine.evaluate(batch, target=target)
    assert engine.last_loss() == pytest.approx(expected.item(), rel=1e-12)
    engine.eval()
    engine.evaluate(batch, target=target)
    assert engine.last_loss() == pytest.approx(expected.item(), rel=1e-12)
    engine.train()
    with pytest.raises(ValueError, match=r"no_sync\(\) cannot be used with a plan"), engine.no_sync():
        engine.step(batch, target=target)
    engine.close()


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_an_engine_with_a_plan_is_used_as_any(zero: int) -> None:
    """What is evaluated is what the optimizer has made, in parts or not."""
    spawn(used, 4, zero, timeout=120)


def trains_tied(rank: int, world_size: int, zero: int) -> None:
    """Weights that two stages have stay equal, and are one process's; so are gradients that add up over steps."""
    torch.manual_seed(2)
    model = Gpt(num_layers=2).double()
    model.head.weight = model.tokens.weight
    whole = copy.deepcopy(model)
    tokens, target = torch.randint(0, 96, (16, 16)), torch.randn(16, 16, 96, dtype=torch.float64)
    plan = _preset("pipeline 2", model, (tokens[:8],), OPTIONS, stages=2, tensor=1, zero=zero)
    assert [one.name for one in plan.ties] == ["tokens.weight"]
    engine = xm.PipelineEngine(model, (tokens[:8],), plan=plan, loss_fn=F.mse_loss)
    optimizer, reference = (torch.optim.Adam(one.parameters(), 0.01) for one in (engine, whole))
    for number in range(4):
        engine.step(tokens, target=target)
        loss = F.mse_loss(whole(tokens), target)
        loss.backward()  # type: ignore[no-untyped-call]
        assert engine.last_loss() == pytest.approx(loss.item(), rel=1e-8)
        if number % 2:
            optimizer.step()
            reference.step()
            engine.zero_grad()
            reference.zero_grad()
    for stage in engine.stages:
        found = dict(engine.stage_module(stage).named_parameters())
        torch.testing.assert_close(whole_of(found["tokens.weight"].detach()), whole.tokens.weight.detach())
    engine.close()


@pytest.mark.parametrize("zero", [0, 1])
def test_a_parameter_of_two_stages_trains(zero: int) -> None:
    spawn(trains_tied, 4, zero, timeout=120)


def mistakes(rank: int, world_size: int) -> None:
    model, x = model_and_input()
    plan = planned()

    def make(model: Any = model, args: Any = (x,), **more: Any) -> xm.PipelineEngine:
        return xm.PipelineEngine(model, args, **{"plan": plan, "loss_fn": F.mse_loss, **more})

    deeper = Mlp(64, 5).double()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"meshes": [xm.Mesh([0])]}, "meshes follows from the plan: leave it out"),
        ({"num_microbatches": 2}, "num_microbatches follows from the plan"),
        ({"schedule": "1f1b"}, "schedule follows from the plan"),
        ({"data_axis": 0}, "data_axis follows from the plan"),
        ({"plan": 5}, r"plan is an xm.ParallelPlan, got 5 \(int\)"),
        ({"model": [model]}, "with a plan the model is one nn.Module, got list"),
        ({"model": deeper}, "the plan is for another model, or for microbatches of another size"),
        ({"args": (x[:8],)}, "the plan is for another model, or for microbatches of another size"),
        ({"plan": None, "meshes": [xm.Mesh(range(4))]}, "num_microbatches is missing"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            make(**options)
        dist.barrier()
    for options, message in cases[:8]:  # on one rank alone
        with pytest.raises(ValueError, match=message if rank == 1 else "rank 1 could not make the pipeline"):
            make(**(options if rank == 1 else {}))
        dist.barrier()
    other = dataclasses.replace(plan, title="another")
    with pytest.raises(ValueError, match="ranks disagree on plan"):
        make(plan=other if rank == 2 else plan)
    dist.barrier()
    with pytest.raises(ValueError, match="ranks disagree on the model's values: rank 3 has others than rank 0"):
        make(model=model_and_input(2 if rank == 3 else 1)[0])
    dist.barrier()
    engine = make()
    engine.step(torch.cat([x, x]), target=torch.cat([x, x]))
    assert engine.last_loss() is not None
    engine.close()


def test_mistakes() -> None:
    spawn(mistakes, 4, timeout=120)


def outlives(rank: int, world_size: int) -> tuple[int, ...]:
    model, x = model_and_input()
    engine = xm.PipelineEngine(model, (x,), plan=planned(), loss_fn=F.mse_loss)
    mark("running")
    with pytest.raises(xm.PeerError) as caught:  # noqa: PT012  # the step it happens in
        for _ in range(10**6):
            engine.step(torch.cat([x, x]), target=torch.cat([x, x]))
    return caught.value.ranks


def test_a_rank_that_is_killed_is_heard_of() -> None:
    with World(outlives, 4) as world:
        for rank in range(4):
            world.wait_mark(rank, "running")
        world.signal(3, signal.SIGKILL)
        outcomes = world.join(60)
    assert [outcome.exitcode for outcome in outcomes] == [0, 0, 0, -9]
    assert [outcome.value for outcome in outcomes[:3]] == [(3,)] * 3
