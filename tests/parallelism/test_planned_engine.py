"""PipelineEngine(plan=...): what it is given, what it refuses, and what an engine is used for besides steps."""

from __future__ import annotations

import copy
import dataclasses
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_models import Gpt, Mlp
from torch import nn
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import torch_xmesh as xm
from torch_xmesh.testing import World, mark, spawn

OPTIONS: dict[str, Any] = {
    "devices": xm.Mesh([[0, 1], [2, 3]]),
    "num_microbatches": 2,
    "compute": xm.Compute(flops=1e11, bytes_per_s=1e10),
    "topology": xm.Topology(devices_per_host=2, nic_bytes_per_s=10**8, local_bytes_per_s=10**10),
}


def model_and_input(seed: int = 1) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(seed)
    return Mlp(64, 4).double(), torch.randn(16, 64, dtype=torch.float64)


def planned(**more: Any) -> xm.ParallelPlan:
    model, x = model_and_input()
    return xm.presets.pipeline(model, (x,), num_stages=2, tensor_parallel=2, **{**OPTIONS, **more})


def whole_of(tensor: Any) -> torch.Tensor:
    out: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return out


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


def trains_frozen(rank: int, world_size: int, zero: int, frozen: str) -> None:
    """Frozen parameters stay, the others' gradients are one process's; a stage may have no other."""
    torch.manual_seed(2)
    model, x = Mlp(64, 4).double(), torch.randn(16, 64, dtype=torch.float64)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(name.startswith(f"layers.{layer}") for layer in frozen))
    whole = copy.deepcopy(model)
    plan = xm.presets.pipeline(model, (x,), num_stages=2, zero=zero, **OPTIONS)
    engine = xm.PipelineEngine(model, (x,), plan=plan, loss_fn=F.mse_loss)
    trained = [parameter for parameter in engine.parameters() if parameter.requires_grad]
    optimizers = [torch.optim.SGD(one, 0.1) for one in (trained, whole.parameters()) if one]
    batch, target = torch.cat([x, x.flip(0)]), torch.ones(32, 64, dtype=torch.float64)
    for _ in range(2):
        engine.step(batch, target=target)
        F.mse_loss(whole(batch), target).backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        assert engine.clip_grad_norm_(0.5).item() == pytest.approx(norm.item(), rel=1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        engine.zero_grad()
    for name, parameter in engine.named_parameters():
        expected = whole.get_parameter(name)
        assert parameter.requires_grad == expected.requires_grad
        torch.testing.assert_close(whole_of(parameter).detach(), expected.detach(), rtol=1e-6, atol=1e-8, msg=name)
    engine.close()


@pytest.mark.parametrize("frozen", ["0", "13", "01", "23"])
@pytest.mark.parametrize("zero", [0, 3])
def test_frozen_parameters(zero: int, frozen: str) -> None:
    spawn(trains_frozen, 4, zero, frozen, timeout=60)


def trains_tied(rank: int, world_size: int, zero: int) -> None:
    """Weights that two stages have stay equal, and are one process's; so are gradients that add up over steps."""
    torch.manual_seed(2)
    model = Gpt(num_layers=2).double()
    model.head.weight = model.tokens.weight
    whole = copy.deepcopy(model)
    tokens, target = torch.randint(0, 96, (16, 16)), torch.randn(16, 16, 96, dtype=torch.float64)
    plan = xm.presets.pipeline(model, (tokens[:8],), num_stages=2, zero=zero, **OPTIONS)
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


class Drops(nn.Module):
    """What it does in training it does not in evaluation, and a counter goes on in one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.b(F.dropout(self.norm(self.a(x)), training=self.training))
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


def runs_in_both_modes(rank: int, world_size: int, zero: int, is_first: bool) -> None:
    """Evaluated in evaluation mode between steps in training mode, whichever the model came in."""
    torch.manual_seed(0)
    model, x = Drops().train(is_first).double(), torch.randn(16, 64, dtype=torch.float64)
    whole = copy.deepcopy(model)
    plan = xm.presets.pipeline(model, (x,), num_stages=2, tensor_parallel=1, zero=zero, **OPTIONS)
    engine = xm.PipelineEngine(model, (x,), plan=plan, loss_fn=F.mse_loss)
    optimizer, reference = (torch.optim.SGD(one.parameters(), 0.1) for one in (engine, whole))
    batch, target = torch.cat([x, x.flip(0)]), torch.ones(32, 64, dtype=torch.float64)
    drawn = []
    for _ in range(2):
        engine.eval()
        whole.eval()
        engine.evaluate(batch, target=target)
        loss = sum(F.mse_loss(whole(half), part) for half, part in zip(batch.chunk(2), target.chunk(2), strict=True))
        assert engine.last_loss() == pytest.approx(float(loss) / 2, rel=1e-9)
        engine.step(batch, target=target)  # trained as it is evaluated
        loss.backward()  # type: ignore[union-attr]
        assert engine.last_loss() == pytest.approx(float(loss) / 2, rel=1e-9)
        for parameter in whole.parameters():
            assert parameter.grad is not None
            parameter.grad /= 2
        optimizer.step()
        reference.step()
        engine.zero_grad()
        reference.zero_grad()
        engine.train()
        engine.step(batch, target=target)  # masks are the engine's
        engine.zero_grad()
        drawn.append(engine.last_loss())
        whole.train()
        for half in batch.chunk(2):
            whole(half)  # statistics
    assert drawn[0] is None or drawn[0] != drawn[1]
    engine.close()


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("zero", [0, 3])
def test_training_and_evaluation(zero: int, is_first: bool) -> None:
    spawn(runs_in_both_modes, 4, zero, is_first, timeout=120)


def refuses(rank: int, world_size: int) -> None:
    x = torch.randn(16, 64)
    cases: list[tuple[type[nn.Module], str]] = [
        (Chooses, "the forward depends on values"),
        (Counts, "the forward does something else the next time"),
        (Remembers, "buffer mean is changed by the forward, and not by one operator alone"),
        (CountsInABuffer, "buffer number is changed by the forward"),
        (ReturnsItsWeight, "output a.weight follows from a.weight alone"),
    ]
    options = {**OPTIONS, "num_layers": 1}
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


def outlives(rank: int, world_size: int) -> str:
    model, x = model_and_input()
    engine = xm.PipelineEngine(model, (x,), plan=planned(), loss_fn=F.mse_loss)
    mark("running")
    with pytest.raises((xm.PeerError, xm.StageError, RuntimeError)) as caught:  # noqa: PT012  # the step it happens in
        for _ in range(10**6):
            engine.step(torch.cat([x, x]), target=torch.cat([x, x]))
    return str(caught.value)


def test_a_rank_that_is_killed_is_heard_of() -> None:
    with World(outlives, 4) as world:
        for rank in range(4):
            world.wait_mark(rank, "running")
        world.signal(3, signal.SIGKILL)
        outcomes = world.join(60)
    assert [outcome.exitcode for outcome in outcomes] == [0, 0, 0, -9]
