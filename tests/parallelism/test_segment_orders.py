"""Orders of segments: one microbatch's between another's. Whatever the order, the numbers are the same."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import running_models
import torch
from planned_cases import OPTIONS, whole_of
from test_planned_segments import Drops
from torch import nn
from torch.nn import functional as F

import torch_xmesh as xm
from torch_xmesh.testing import spawn

Unit = tuple[int, int]
"""A stage, and a segment of it."""

PRESETS: dict[str, Callable[..., xm.ParallelPlan]] = {
    "megatron": lambda *args, **options: xm.presets.megatron(*args, tensor_parallel=2, **options),
    "two stages": lambda *args, **options: xm.presets.pipeline(*args, num_stages=2, tensor_parallel=2, **options),
    "ZeRO-2": xm.presets.zero_2,
    "ZeRO-3": xm.presets.zero_3,
}
CASES: dict[str, tuple[str, Callable[[], tuple[nn.Module, torch.Tensor]]]] = {
    "megatron, dropout": ("megatron", lambda: (Drops(), torch.randn(16, 64))),
    "two stages, dropout": ("two stages", lambda: (Drops(), torch.randn(16, 64))),
    "megatron, tied": ("megatron", running_models.tied_gpt),
    "megatron, checkpoints": ("megatron", running_models.checkpointed),
    "two stages, tied": ("two stages", running_models.tied_gpt),
    "ZeRO-2": ("ZeRO-2", running_models.gpt),
    "ZeRO-3": ("ZeRO-3", running_models.gpt),
    "ZeRO-3, checkpoints": ("ZeRO-3", running_models.checkpointed),
}


def counts_of(plan: xm.ParallelPlan) -> list[int]:
    """Segments, by stage."""
    return [max(1, len(stage.programs[0].segments)) for stage in plan.stages]


def random_order(counts: Sequence[int], num_microbatches: int, *, is_split: bool, seed: int) -> str:
    """Any order of all segments' actions in which each comes after what it needs, and each segment's microbatches go in
    their order: a CSV, each stage on a place of its own."""
    draw = random.Random(seed)
    units: list[Unit] = [(stage, segment) for stage, count in enumerate(counts) for segment in range(count)]
    kinds = "FIW" if is_split else "FB"
    done = {(kind, unit): 0 for kind in kinds for unit in units}
    back = kinds[1]

    def is_ready(kind: str, at: int) -> bool:
        unit, microbatch = units[at], done[kind, units[at]]
        if microbatch == num_microbatches:
            return False
        if kind == "F":
            return at == 0 or done["F", units[at - 1]] > microbatch
        if kind == "W":
            return done["I", unit] > microbatch
        return done["F", unit] > microbatch and (at + 1 == len(units) or done[back, units[at + 1]] > microbatch)

    rows: list[list[str]] = [[] for _ in counts]
    while True:
        ready = [(kind, at) for kind in kinds for at in range(len(units)) if is_ready(kind, at)]
        if not ready:
            return "\n".join(",".join(row) for row in rows)
        kind, at = draw.choice(ready)
        stage, segment = units[at]
        name = f"{stage}.{segment}" if counts[stage] > 1 else str(stage)
        rows[stage].append(f"{name}{kind}{done[kind, units[at]]}")
        done[kind, units[at]] += 1


def with_order(plan: xm.ParallelPlan, csv: str) -> xm.ParallelPlan:
    fields = json.loads(plan.to_json())
    fields["schedule_csv"], fields["schedule"] = csv, "random"
    return xm.ParallelPlan.from_json(json.dumps(fields))


def trained(plan: xm.ParallelPlan, model: nn.Module, x: torch.Tensor) -> list[Any]:
    """Losses and gradients of two steps and an evaluation."""
    torch.manual_seed(5)
    out: list[Any] = []
    batch = torch.cat([x, x.flip(0)] * 2)
    with xm.PipelineEngine(copy.deepcopy(model), (x,), plan=plan, loss_fn=loss_of) as engine:
        for _ in range(2):
            losses: list[torch.Tensor] = []
            engine.step(batch, target=torch.ones(len(batch)), losses=losses)
            out += [*losses, *(whole_of(parameter.grad).clone() for _, parameter in engine.named_parameters())]
            engine.zero_grad()
        engine.eval()
        engine.evaluate(batch, target=torch.ones(len(batch)))
        out.append(engine.last_loss())
        if max(engine.schedule.num_segments) > 1:
            assert xm.Schedule.from_csv(engine.schedule.to_csv()) == engine.schedule
    return out


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output.flatten(1).mean(1), target.to(output.dtype))


def orders_alike(rank: int, world_size: int, name: str, seeds: Sequence[int]) -> None:
    torch.manual_seed(1)
    preset, make = CASES[name]
    model, x = make()
    plan = PRESETS[preset](model, (x,), **{**OPTIONS, "num_microbatches": 4, "schedule": "1f1b"})
    counts = counts_of(plan)
    assert max(counts) > 1, counts
    split = PRESETS[preset](model, (x,), **{**OPTIONS, "num_microbatches": 4, "schedule": "zb_h1"})
    whole = trained(plan, model, x), trained(split, model, x)
    for seed in seeds:
        is_split = seed % 2 == 1
        csv = random_order(counts, 4, is_split=is_split, seed=seed)
        found = trained(with_order(split if is_split else plan, csv), model, x)
        torch.testing.assert_close(found, whole[is_split], rtol=0, atol=0, msg=f"seed {seed}\n{csv}")


@pytest.mark.parametrize("name", CASES)
def test_any_order_of_segments_gives_the_same_bits(name: str) -> None:
    spawn(orders_alike, 4, name, range(4))
