"""Models under a plan on cpu and on the emulated device: the same steps, whose results have the same bits."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import test_experts
import test_workloads
import torch
from device_pipelines import assert_same, move, on_cpu
from planned_cases import OPTIONS, PLANS
from random_plans import loss_of, random_case, random_input, random_plan
from small_models import Gpt, Mlp
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import torch_xmesh as xm
from torch_xmesh.cli.training import output_loss

KINDS = ("cpu", "emu")
Made = Callable[[nn.Module], xm.PipelineEngine]
Uses = Callable[[xm.PipelineEngine], Any]


def on_both(model: nn.Module, made: Made, use: Uses, where: str, rtol: float = 0) -> None:
    """What `use` returns of an engine that was made of a copy of the model on either kind of device."""
    found = []
    for kind in KINDS:
        with made(move(copy.deepcopy(model), lambda _, kind=kind: kind)) as engine:  # type: ignore[misc]
            assert all(parameter.device.type == kind for parameter in engine.parameters())
            found.append(on_cpu(use(engine)))
    assert_same(found, where, rtol)


def trained(engine: xm.PipelineEngine, batches: Sequence[tuple[Any, dict[str, Any]]], **more: Any) -> list[Any]:
    """Steps with SGD: losses, outputs, gradients; parameters and buffers in the end."""
    optimizer = torch.optim.SGD(list(engine.parameters()), 0.05) if list(engine.parameters()) else None
    found: list[Any] = []
    for args, kwargs in batches:
        losses: list[torch.Tensor] = []
        engine.zero_grad()
        output = engine.step(*args, losses=losses, **kwargs, **more)
        gradients = {name: parameter.grad for name, parameter in engine.named_parameters()}
        found.append(on_cpu((output, losses, engine.last_loss(), gradients)))
        if optimizer is not None:
            optimizer.step()
    found.append(on_cpu([dict(engine.stage_module(stage).state_dict()) for stage in engine.stages]))
    return found


def preset(name: str, **more: Any) -> None:
    torch.manual_seed(1)
    model, batches = Gpt(num_layers=2), [torch.randint(0, 96, (16, 16)) for _ in range(3)]
    target = torch.randn(16, 16, 96)

    def made(own: nn.Module) -> xm.PipelineEngine:
        given = (batches[0][:8],)
        plan = PLANS[name](own, given)
        return xm.PipelineEngine(own, given, plan=plan, loss_fn=F.mse_loss)

    def use(engine: xm.PipelineEngine) -> Any:
        return trained(engine, [((x,), {"target": target}) for x in batches])

    on_both(model, made, use, name)


def drawn(seed: int) -> None:
    """A random model under a random plan."""
    case = random_case(seed)
    batches = []
    for number in range(2):
        generator = torch.Generator().manual_seed(seed + number)
        x, indices = random_input(generator, 16)
        target = torch.randn(16, 16, 32, generator=generator, dtype=torch.float64)
        batches.append(((x,), {"indices": indices, "target": target}))

    def made(own: nn.Module) -> xm.PipelineEngine:
        return xm.PipelineEngine(own, (case.x,), {"indices": case.indices}, plan=case.plan, loss_fn=loss_of)

    # Collectives among four devices add up in another order than gloo's.
    rtol = 1e-9 if any(stage.mesh_shape == (4,) for stage in case.plan.stages) else 0
    on_both(case.model, made, lambda engine: trained(engine, batches), f"seed {seed}: {case.plan}", rtol)


def workload(name: str, plan_of: str, flops: float) -> None:
    """A model of a library."""
    model, args, kwargs = test_workloads.made(name)
    options = {**test_workloads.OPTIONS, "compute": xm.Compute(flops=flops, bytes_per_s=1e10)}
    plan = test_workloads.PLANS[plan_of](model, args, kwargs, **options)
    whole_steps(model, args, kwargs, plan, f"{name}, {plan_of}")


def of_experts(seed: int) -> None:
    """A mixture of experts under a random plan: tokens are sent to devices."""
    model, args, kwargs = test_experts.in_double("Mixtral")
    plan = random_plan(model, args, kwargs, Random(seed))
    whole_steps(model, args, kwargs, plan, f"experts, seed {seed}: {plan}")


def whole_steps(model: nn.Module, args: Any, kwargs: Any, plan: xm.ParallelPlan, where: str) -> None:
    parts = [pytree.tree_map(lambda one, d=d: one.roll(d, 0), (args, kwargs)) for d in range(2)]
    batch = pytree.tree_map(lambda *some: torch.cat(some), *parts)

    def made(own: nn.Module) -> xm.PipelineEngine:
        return xm.PipelineEngine(own, args, kwargs, plan=plan, loss_fn=output_loss)

    on_both(model, made, lambda engine: trained(engine, [batch] * 2, return_outputs=False), where)


def mlp() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(1)
    return Mlp(64, 4), torch.randn(16, 64)


def overlapped() -> None:
    """One microbatch computes while another communicates."""
    model, x = mlp()
    plan = xm.presets.megatron(model, (x,), tensor_parallel=4, overlap=True, schedule="duplex", **OPTIONS)
    assert plan.schedule == "duplex"
    batches = [((torch.cat([x, x.flip(0)]),), {"target": torch.ones(32, 64)}) for _ in range(3)]

    def made(own: nn.Module) -> xm.PipelineEngine:
        return xm.PipelineEngine(own, (x,), plan=plan, loss_fn=F.mse_loss)

    on_both(model, made, lambda engine: trained(engine, batches), "overlapped")


def used(zero: int) -> None:
    """Evaluation, clipping, an optimizer whose state is saved and loaded."""
    model, x = mlp()
    batch, target = torch.cat([x, x.flip(0)]), torch.ones(32, 64)
    plan = xm.presets.pipeline(model, (x,), num_stages=2, tensor_parallel=2, zero=zero, **OPTIONS)

    def made(own: nn.Module) -> xm.PipelineEngine:
        return xm.PipelineEngine(own, (x,), plan=plan, loss_fn=F.mse_loss)

    def use(engine: xm.PipelineEngine) -> Any:
        optimizer = torch.optim.Adam(engine.parameters(), 0.01)
        found = []
        for _ in range(2):
            engine.zero_grad()
            engine.step(batch, target=target)
            found.append(on_cpu(engine.clip_grad_norm_(0.01)))
            optimizer.step()
        saved = {name: one.clone() for name, one in engine.state_dict().items()}
        engine.step(batch, target=target)
        optimizer.step()
        engine.load_state_dict(saved)
        losses: list[torch.Tensor] = []
        found.append(on_cpu((engine.evaluate(batch, target=target, losses=losses), losses, engine.last_loss())))
        engine.eval()
        found.append(on_cpu(engine.evaluate(batch, target=target)))
        return found

    on_both(model, made, use, f"used, ZeRO-{zero}")


class Dropping(nn.Module):
    """Random numbers inside parts, and batch norm over all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop, self.last = (
            nn.Linear(64, 64),
            nn.BatchNorm1d(64),
            nn.Dropout(0.3),
            nn.Linear(64, 64),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.drop(self.norm(self.first(x)).relu()))
        return out


def norm_and_dropout(plan_of: str) -> None:
    _, x = mlp()
    torch.manual_seed(4)
    model = Dropping()
    batches = [((torch.cat([x, x.flip(0)]),), {"target": torch.ones(32, 64)}) for _ in range(3)]
    plan = PLANS[plan_of](model, (x,))

    def made(own: nn.Module) -> xm.PipelineEngine:
        return xm.PipelineEngine(own, (x,), plan=plan, loss_fn=F.mse_loss)

    # Collectives among four devices add up in another order than gloo's.
    on_both(model, made, lambda engine: trained(engine, batches), f"batch norm, {plan_of}", rtol=1e-5)


def of_gpt(plan_of: str, prepare: Callable[[xm.PipelineEngine], Any]) -> None:
    """Steps of a small GPT. `prepare` is given the engine before them, and returns what is on around them."""
    torch.manual_seed(1)
    model, x = Gpt(num_layers=2), torch.randint(0, 96, (16, 16))
    target = torch.randn(16, 16, 96)
    plan = PLANS[plan_of](model, (x[:8],))

    def made(own: nn.Module) -> xm.PipelineEngine:
        return xm.PipelineEngine(own, (x[:8],), plan=plan, loss_fn=F.mse_loss)

    def use(engine: xm.PipelineEngine) -> Any:
        with prepare(engine):
            return trained(engine, [((x,), {"target": target})] * 2)

    on_both(model, made, use, plan_of)


def autocast(plan_of: str) -> None:
    of_gpt(plan_of, lambda engine: torch.autocast(next(iter(engine.parameters())).device.type, torch.bfloat16))


def compiled(plan_of: str) -> None:
    """What is between collectives, by aot_eager."""

    def compile_stages(engine: xm.PipelineEngine) -> Any:
        for stage in engine.stages:
            engine.stage_module(stage).compile(backend="aot_eager")
        return contextlib.nullcontext()

    of_gpt(plan_of, compile_stages)


def on_meta() -> None:
    """A model on meta runs where its plan was made for."""
    with torch.device("meta"):
        model = Mlp(64, 4)
    x = torch.randn(16, 64)
    batches = [((torch.cat([x, x.flip(0)]),), {"target": torch.ones(32, 64)}) for _ in range(2)]
    found = []

    def fill(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            with torch.no_grad():
                local.copy_(torch.linspace(-0.2, 0.2, local.numel()).view(local.shape))

    for kind in KINDS:
        devices = xm.Mesh([[0, 1], [2, 3]], device_type=kind)
        options = {**OPTIONS, "devices": devices, "collectives": "ring"}
        plan = xm.presets.pipeline(model, (x,), num_stages=2, tensor_parallel=2, **options)
        assert xm.ParallelPlan.from_json(plan.to_json()).device_type == kind
        with xm.PipelineEngine(copy.deepcopy(model), (x,), plan=plan, loss_fn=F.mse_loss, init_fn=fill) as engine:
            assert all(parameter.device.type == kind for parameter in engine.parameters())
            found.append(trained(engine, batches))
    assert_same(found, "on meta")
