"""Models of the zoo of libraries under seven plans: each trains as one process does, or is refused by name."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import torch
from models.libraries import MODELS, Batch, loss_of, without_chance
from planned_cases import OPTIONS, whole_of
from random_plans import random_plan
from torch import nn

import torch_xmesh as xm
from torch_xmesh.testing import mark, serial_step

NUM_MICROBATCHES = 2
_Maker = Callable[[nn.Module, Batch], xm.ParallelPlan]


@dataclasses.dataclass(frozen=True)
class Kind:
    """A way to plan: samples of a microbatch, and what makes the plan of a model and a microbatch's arguments."""

    samples: int
    make: _Maker


def _of(make: Callable[..., xm.ParallelPlan], **options: Any) -> _Maker:
    return lambda model, batch: make(model, (), example_kwargs=batch, **OPTIONS, **options)


def _random(seed: int) -> _Maker:
    return lambda model, batch: random_plan(model, (), batch, Random(seed))


KINDS: dict[str, Kind] = {
    "found": Kind(8, _of(xm.plan_parallel)),
    "found, 1 sample": Kind(1, _of(xm.plan_parallel)),
    "Megatron": Kind(8, _of(xm.presets.megatron, tensor_parallel=2)),
    "ZeRO-3": Kind(8, _of(xm.presets.zero_3)),
    "pipeline": Kind(8, _of(xm.presets.pipeline, num_stages=2, tensor_parallel=2)),
    "random": Kind(8, _random(0)),
    "another random": Kind(8, _random(1)),
}


@dataclasses.dataclass(frozen=True)
class Job:
    """A model and a plan that it is trained under."""

    model: str
    kind: str
    plan: str  # JSON
    is_random: bool

    def __str__(self) -> str:
        return f"{self.model}, {self.kind}"


def build(name: str, samples: int, *, is_random: bool) -> tuple[nn.Module, Batch]:
    """The same on every rank; a batch of so many samples."""
    torch.manual_seed(3)
    model = MODELS[name].build()
    if not is_random:
        without_chance(model)
    return model, MODELS[name].batch(samples)


def outcome_of(model: str, kind: str) -> Job | str:
    """The plan, of the model with its random numbers if it has one stage; or why it is refused."""
    for is_random in (True, False):
        built, batch = build(model, KINDS[kind].samples, is_random=is_random)
        try:
            plan = KINDS[kind].make(built, batch)
        except ValueError as error:
            return str(error)
        if len(plan.stages) == 1:
            break
    return Job(model, kind, plan.to_json(), is_random)


def compare(engine: xm.PipelineEngine, reference: nn.Module, dtype: torch.dtype) -> None:
    """Gradients, each element. Some models compute parts in single precision."""
    close = 1e-5 if dtype == torch.float64 else 1e-3
    for name, parameter in engine.named_parameters():
        expected = reference.get_parameter(name).grad
        found = None if parameter.grad is None else whole_of(parameter.grad)
        if expected is None or found is None:
            assert expected is None or not expected.any(), f"{name} has no gradient"
            assert found is None or not found.any(), f"{name} has a gradient"
            continue
        largest = expected.abs().max().item()
        off = ((found - expected).abs() - 10 * close * expected.abs()).max().item()
        assert off <= close * largest + 1e-9, f"{name}.grad is off by {off}, its largest is {largest}"


def _train(job: Job) -> None:
    """Two steps of AdamW. Its eps is large: a gradient that is rounding noise would move a parameter as far as any."""
    plan = xm.ParallelPlan.from_json(job.plan)
    kind = KINDS[job.kind]
    model, batch = build(job.model, kind.samples * NUM_MICROBATCHES, is_random=job.is_random)
    reference = copy.deepcopy(model)
    example = {
        name: given[: kind.samples] if isinstance(given, torch.Tensor) else given for name, given in batch.items()
    }
    dtype = MODELS[job.model].dtype
    close = 1e-6 if dtype == torch.float64 else 1e-4
    with xm.PipelineEngine(model, (), example, plan=plan, loss_fn=loss_of) as engine:
        optimizers = [
            torch.optim.AdamW(parameters, 1e-2, eps=1e-3)
            for parameters in (list(engine.parameters()), list(reference.parameters()))
            if parameters  # a stage may have none
        ]
        for step in range(2):
            engine.step(**batch)
            expected = serial_step(reference, (), batch, loss_fn=loss_of, num_microbatches=NUM_MICROBATCHES, step=step)
            loss = engine.last_loss()
            if loss is not None:
                off = abs(loss - expected.loss.item())
                assert off <= close * abs(expected.loss.item()), f"step {step}: loss is off by {off}"
            compare(engine, reference, dtype)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for name, buffer in reference.named_buffers():
            for stage in engine.stages:
                held = dict(engine.stage_module(stage).named_buffers()).get(name)
                if held is not None and held.is_floating_point():
                    torch.testing.assert_close(whole_of(held), buffer, rtol=1e-4, atol=1e-6, msg=name)


def train(rank: int, world_size: int, jobs: Sequence[Job]) -> None:
    """In four processes; marks each job that is done."""
    for number, job in enumerate(jobs):
        try:
            _train(job)
        except Exception as error:
            raise AssertionError(f"{job}: {error}") from error
        mark(f"{number} done")
