"""What the pipeline tests share: one training run of a model of the zoo, step by step against the serial oracle."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Case, cases
from models.random_graph import Graph, random_plan
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import torch_xmesh as xm
from torch_xmesh.pipeline.cut.partition import partition
from torch_xmesh.testing import serial_step

__all__ = [
    "ONE",
    "Case",
    "Graph",
    "Run",
    "about",
    "assert_all_found",
    "case_of",
    "cases",
    "compare",
    "engine_of_layers",
    "has_output",
    "make_engine",
    "random_plan",
    "train_and_compare",
]

ONE = {name: [[rank] for rank in range(count)] for name, count in {"1": 1, "2": 2, "3": 3, "4": 4}.items()}


@dataclasses.dataclass(frozen=True)
class Run:
    """A model, where its stages lie, and how they run."""

    model: str
    split: tuple[str, ...]
    meshes: tuple[Any, ...]
    schedule: str | xm.Schedule = "auto"
    microbatches: int = 4
    samples: int = 8
    overlap: bool = True
    steps: int = 3

    @property
    def ranks(self) -> set[int]:
        return {rank for mesh in self.meshes for rank in xm.Mesh(mesh).ranks}

    @property
    def num_shards(self) -> int:
        return xm.Mesh(self.meshes[-1]).shape[0]


def about(where: str) -> Callable[[str], str]:
    """For assert_close: its text after where it was."""
    return lambda text: f"{where}: {text}"


def has_output(engine: xm.PipelineEngine) -> bool:
    """Whether a step's output is this rank's too: it is of the last stage's ranks."""
    return engine.partition.num_stages - 1 in engine.stages


def assert_all_found(engine: xm.PipelineEngine, reference: nn.Module, ranks: Iterable[int], where: str) -> None:
    """After a step: every parameter that has a gradient in one process is some rank's. All of `ranks` call it, once for
    each `where`."""
    store = dist.PrefixStore(where, dist.distributed_c10d._get_default_store())
    store.set(str(dist.get_rank()), "\n".join(name for name, _ in engine.named_parameters()))
    found = {name for rank in ranks for name in store.get(str(rank)).decode().splitlines()}
    trained = {name for name, parameter in reference.named_parameters() if parameter.grad is not None}
    assert trained <= found, f"{where}: {trained - found} are on no rank"


def case_of(name: str) -> Case:
    return next(case for case in cases() if case.name == name)


def example(case: Case, samples: int) -> tuple[Any, Any]:
    args, kwargs, _ = case.batch(samples)
    return args, kwargs


def make_engine(run: Run, model: Any, **options: Any) -> xm.PipelineEngine:
    case = case_of(run.model)
    specs = dict(case.specs)
    args, kwargs = example(case, run.samples // run.microbatches)
    return xm.PipelineEngine(
        model,
        args,
        kwargs,
        meshes=[xm.Mesh(mesh) for mesh in run.meshes],
        split=xm.split_at(*run.split),
        schedule=run.schedule,
        loss_fn=case.loss,
        overlap=run.overlap,
        seed=7,
        **specs,
        **{"num_microbatches": run.microbatches, **options},
    )


def engine_of_layers(model: nn.Module, example: tuple[int, ...], *split: str, **options: Any) -> xm.PipelineEngine:
    """For models without peculiarities: a microbatch of that shape goes in, stage k is on rank k alone, and the loss is
    the mean square, unless `options` say otherwise."""
    usual: dict[str, Any] = {"meshes": [xm.Mesh([rank]) for rank in range(len(split) + 1)], "loss_fn": F.mse_loss}
    return xm.PipelineEngine(model, (torch.empty(example),), split=xm.split_at(*split), **usual | options)


def train_and_compare(run: Run) -> tuple[int, int]:
    """Three steps of SGD: loss, output and every gradient of each against the oracle; the buffers' counters stay."""
    case = case_of(run.model)
    torch.manual_seed(0)
    model = case.build()
    torch.manual_seed(0)
    reference = case.build()
    engine = make_engine(run, model)
    whole = None
    if any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in reference.modules()):
        args, kwargs = example(case, run.samples // run.microbatches)
        whole = partition(reference, args, kwargs, xm.split_at(*run.split))  # dropout is seeded for each stage
    mine = torch.optim.SGD(engine.parameters(), 1e-3)
    theirs = torch.optim.SGD(reference.parameters(), 1e-3)
    counts = (0, 0)
    for step in range(run.steps):
        torch.manual_seed(10 + step)
        args, kwargs, target = case.batch(run.samples)
        mine.zero_grad()
        theirs.zero_grad()
        state = torch.get_rng_state()
        losses: list[torch.Tensor] = []
        output = engine.step(*args, target=target, losses=losses, **kwargs)
        assert torch.equal(state, torch.get_rng_state())
        expected = serial_step(
            reference,
            args,
            kwargs,
            target=target,
            loss_fn=case.loss,
            num_microbatches=run.microbatches,
            num_data_shards=run.num_shards,
            partition=whole,
            seed=7,
            step=step,
            **case.specs,
        )
        compare(engine, reference, expected, output, losses, f"{run}, step {step}")
        mine.step()
        theirs.step()
        if step == 1:
            counts = engine.buffer_counts
    assert_all_found(engine, reference, run.ranks, f"{run}")
    # A W that runs early gives its stage's received values back early: how many buffers are out depends on lateness.
    if run.steps >= 3 and not (engine.early_weights and "W" in engine.schedule.to_csv()):
        assert engine.buffer_counts == counts, (run, engine.buffer_counts, counts)
    engine.close()
    return counts


def compare(engine: Any, reference: Any, expected: Any, output: Any, losses: list[torch.Tensor], where: str) -> None:
    bounds: Any = {"rtol": 2e-5, "atol": 2e-6}
    gradients = {name: parameter.grad for name, parameter in reference.named_parameters(remove_duplicate=False)}
    found = dict(engine.named_parameters())
    assert found, where
    for name, parameter in found.items():
        want = gradients[name]
        if want is None or parameter.grad is None:
            assert want is None or not want.any(), f"{where}: {name} has no gradient"
            assert parameter.grad is None or not parameter.grad.any(), f"{where}: {name} has a gradient"
            continue
        gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        torch.testing.assert_close(gradient, want, **bounds, msg=about(f"{where}: {name}"))
    assert engine.last_loss() == pytest.approx(float(expected.loss), rel=1e-5), where
    assert (output is not None) == has_output(engine), where
    if output is not None:
        torch.testing.assert_close(torch.stack(losses), torch.stack(expected.losses), **bounds, msg=about(where))
        torch.testing.assert_close(output, expected.output, **bounds, msg=about(where))
    else:
        assert not losses
