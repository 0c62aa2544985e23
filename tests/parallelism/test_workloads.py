"""Models as people have them train under plans as one process does: those of examples/models, and of libraries."""

from __future__ import annotations

import copy
import importlib.util
import math
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from library_arguments import ARGUMENTS
from library_arguments import made as of_a_library
from planned_cases import in_turn
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

import torch_xmesh as xm
from torch_xmesh.cli.training import output_loss
from torch_xmesh.parallelism.plan import PlannedStage
from torch_xmesh.parallelism.running.collectives import kind_of
from torch_xmesh.parallelism.running.stage import ShardedStage
from torch_xmesh.parallelism.space import CollectiveUse
from torch_xmesh.testing import spawn

EXAMPLES = Path(__file__).parents[2] / "examples" / "models"
OPTIONS: dict[str, Any] = {
    "devices": xm.Mesh([[0, 1], [2, 3]]),
    "num_microbatches": 2,
    "topology": xm.Topology(devices_per_host=2, nic_bytes_per_s=10**8, local_bytes_per_s=10**9),
}
PLANS: dict[str, Any] = {
    "found": lambda *args, **options: xm.plan_parallel(args[0], *args[1:], **options),
    "Megatron": lambda model, args, kwargs, **options: xm.presets.megatron(
        model, args, example_kwargs=kwargs, tensor_parallel=2, **options
    ),
    "pipeline with ZeRO-3": lambda model, args, kwargs, **options: xm.presets.pipeline(
        model, args, example_kwargs=kwargs, num_stages=2, zero=3, num_layers=4, **options
    ),
}


PADDED = ("BERT", "Llama")
"""They are given sequences of several lengths, and a mask that says so."""


def example(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    sys.path.insert(0, str(EXAMPLES))
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model, args = module.make()
    return model, args, {}


def in_double(one: Any) -> Any:
    return one.double() if isinstance(one, torch.Tensor) and one.is_floating_point() else one


def trains(rank: int, world_size: int, name: str, plan_of: str, flops: float) -> None:
    model, args, kwargs = made(name)
    options = {**OPTIONS, "compute": xm.Compute(flops=flops, bytes_per_s=1e10)}
    check(model, args, kwargs, PLANS[plan_of](model, args, kwargs, **options))


def made(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A model in float64 with arguments."""
    torch.manual_seed(4)
    model, args, kwargs = of_a_library(name) if name in ARGUMENTS else example(name)
    model = model.double()
    if name in ARGUMENTS and name not in ("ResNet-50", "Llama with checkpoints"):
        model.eval()  # an engine's dropout is not one process's
    args, kwargs = pytree.tree_map(in_double, (args, kwargs))
    if name in PADDED:
        lengths = torch.arange(args[0].shape[1]) < torch.randint(3, args[0].shape[1], (len(args[0]), 1))
        kwargs["attention_mask"] = lengths.to(torch.int64)
    return model, args, kwargs


def check(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    plan: xm.ParallelPlan,
    *,
    is_priced: bool = True,
) -> None:
    """A step of two microbatches: the loss and all gradients. And which collectives are run, of a plan `is_priced` for
    a loss on each device's samples, where all parameters are used."""
    whole = copy.deepcopy(model)
    parts = [pytree.tree_map(lambda one, d=d: one.roll(d, 0), (args, kwargs)) for d in range(2)]
    batch, named = pytree.tree_map(lambda *some: torch.cat(some), *parts)
    with xm.PipelineEngine(model, args, kwargs, plan=plan, loss_fn=output_loss) as engine:
        seen: dict[int, list[CollectiveUse]] = {stage: [] for stage in engine.stages}
        for stage, uses in seen.items():
            part = engine.stage_module(stage)
            assert isinstance(part, ShardedStage)
            part._moves._on_collective = uses.append
        engine.step(*batch, return_outputs=False, **named)
        for stage, uses in seen.items() if is_priced else ():
            check_collectives(plan.stages[stage], engine.stage_module(stage), uses)
        loss = sum(output_loss(whole(*own, **own_named)) / 2 for own, own_named in parts)
        assert isinstance(loss, torch.Tensor)
        loss.backward()  # type: ignore[no-untyped-call]
        assert engine.last_loss() == pytest.approx(loss.item(), rel=1e-6)
        for key, parameter in engine.named_parameters():
            found, expected = parameter.grad, whole.get_parameter(key).grad
            if isinstance(found, DTensor):
                found = found.full_tensor()
            if found is None or expected is None:
                assert not any(one.any() for one in (found, expected) if one is not None), key
            else:
                scale = expected.abs().max().item()
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * scale + 1e-10, msg=key)


def of_transfers(planned: PlannedStage, part: ShardedStage) -> list[CollectiveUse]:
    """What the transfers between segments do for a microbatch, as collectives are counted."""
    out = []
    for one in part.first.segments.passed:
        for why, moves, begin in (("forward", one.there, one.ends[0]), ("backward", one.back, one.ends[2])):
            state = list(begin)
            for move in moves:
                shares = [size for held, size in zip(state, planned.mesh_shape, strict=True) if held >= 0]
                size, kind = planned.mesh_shape[move.axis], kind_of(move)
                num_bytes = one.key.num_bytes / math.prod(shares) * (size if kind.startswith("all-") else 1)
                num_bytes /= size if kind == "all-reduce" else 1
                if kind != "local" and size > 1:
                    out.append(CollectiveUse(one.name, why, kind, move.axis, num_bytes))
                state[move.axis] = move.after
    return out


def check_collectives(planned: PlannedStage, part: nn.Module, uses: list[CollectiveUse]) -> None:
    """Two microbatches run as many collectives, of as many bytes, as predicted. Bytes are not compared where operators
    run collectives of their own: these are predicted for the case in which most bytes flow. Small collectives in
    backward of what leaves the stage are not counted: a plan does not say how the gradient of a loss on each device's
    samples comes back."""
    assert isinstance(part, ShardedStage)
    counted: Counter[tuple[str, str, int]] = Counter()
    num_bytes: Counter[tuple[str, str, int]] = Counter()
    left = part.first.left_states
    for use in [*uses, *2 * of_transfers(planned, part)]:
        if use.why == "backward" and use.value in left and use.num_bytes <= 8:
            continue
        counted[use.why, use.collective, use.axis] += 1
        num_bytes[use.why, use.collective, use.axis] += round(use.num_bytes)
    times = {"forward": 2, "backward": 2, "gradient": 1, "parameter": 1}
    predicted = {
        (one.why, one.collective, one.axis): (times[one.why] * one.count, times[one.why] * round(one.num_bytes))
        for one in planned.collectives
    }
    differing = {key: (counted[key], predicted.get(key)) for key in {*counted, *predicted}}
    assert dict(counted) == {key: count for key, (count, _) in predicted.items()}, differing
    if not any(operator.loops.within for operator in part.first.recorded.forward.operators):
        assert dict(num_bytes) == {key: wanted for key, (_, wanted) in predicted.items()}


def trains_and_evaluates(rank: int, world_size: int, name: str) -> None:
    """As they come, weights dropped: steps in training, and between them one process's loss in evaluation."""
    model, args, kwargs = made(name)
    model.train()
    whole = copy.deepcopy(model).eval()
    plan = xm.plan_parallel(model, args, kwargs, compute=xm.Compute(flops=1e9, bytes_per_s=1e10), **OPTIONS)
    batch, named = pytree.tree_map(lambda one: torch.cat([one, one.roll(1, 0)]), (args, kwargs))
    losses = []
    with xm.PipelineEngine(model, args, kwargs, plan=plan, loss_fn=output_loss) as engine:
        optimizer = torch.optim.SGD(engine.parameters(), 0.1)
        for _ in range(2):
            engine.train()
            engine.step(*batch, return_outputs=False, **named)
            losses.append(engine.last_loss())
            engine.zero_grad()
            engine.eval()
            engine.evaluate(*batch, **named)
            if engine.last_loss() is not None:
                halves = [pytree.tree_map(lambda one, i=i: one.chunk(2)[i], (batch, named)) for i in range(2)]
                wanted = sum(float(output_loss(whole(*own, **own_named))) / 2 for own, own_named in halves)
                assert engine.last_loss() == pytest.approx(wanted, rel=1e-6)
        optimizer.step()
    assert losses[0] is None or losses[0] != losses[1]


@pytest.mark.timeout(400)
def test_models_of_libraries_in_both_modes() -> None:
    names = ["GPT-2", "T5", "nn.TransformerEncoder"]
    for name in names:
        of_a_library(name)  # skipped here where the library is missing
    spawn(in_turn, 4, [(trains_and_evaluates, (name,)) for name in names], timeout=380)


@pytest.mark.parametrize("plan", PLANS)
def test_examples_train_as_one_process(plan: str) -> None:
    spawn(in_turn, 4, [(trains, (name, plan, 1e11)) for name in ("gpt", "moe", "wide_resnet")], timeout=160)


@pytest.mark.in_turn(2)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("names", [["BERT", "Llama", "Llama with checkpoints", "T5", "GPT-2"], ["ResNet-50", "ViT"]])
def test_models_of_libraries_train_as_one_process(names: Sequence[str]) -> None:
    for name in names:
        of_a_library(name)  # skipped here where the library is missing
    spawn(in_turn, 4, [(trains, (name, "found", 1e9)) for name in names], timeout=580)
