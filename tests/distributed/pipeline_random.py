"""A pipeline drawn from a seed (model, split, meshes, schedule, microbatches), trained and compared with the oracle."""

from __future__ import annotations

import copy
import dataclasses
import random
import time
from typing import Any

import torch
from pipeline_cases import Graph, assert_all_found, compare, random_plan
from torch.nn import functional as F

import torch_xmesh as xm
from torch_xmesh.testing import serial_step

WIDTH = 3
GRIDS: dict[int, tuple[tuple[tuple[int, ...], int | None], ...]] = {
    1: (((1,), 0), ((1, 1), 1)),
    2: (((2,), 0), ((2,), None), ((2, 1), 0), ((1, 2), 0), ((1, 2), 1), ((2, 1), 1)),
    3: (((3,), 0), ((3,), None), ((1, 3), 0)),
    4: (((4,), 0), ((2, 2), 0), ((2, 2), 1), ((2, 2), None), ((1, 4), 0)),
}


@dataclasses.dataclass(frozen=True)
class RandomPipeline:
    """What a seed means; equal on every rank."""

    seed: int
    plan: list[tuple[str, list[int]]]
    split: tuple[str, ...]
    meshes: list[Any]
    axes: list[int | None]
    schedule: str
    microbatches: int
    samples: int
    overlap: bool
    is_delayed: bool

    @property
    def ranks(self) -> set[int]:
        return {rank for mesh in self.meshes for rank in xm.Mesh(mesh).ranks}


def draw(seed: int, world_size: int) -> RandomPipeline:
    rng = random.Random(seed)
    length = rng.randint(4, 7)
    num_stages = rng.randint(1, 4)
    starts = sorted(rng.sample(range(1, length), num_stages - 1))
    places = _places(rng, world_size, num_stages)
    num_places = max(places) + 1
    groups = _groups(rng, world_size, num_places)
    plan = random_plan(rng, length)
    may_differ = sum(kind == "inplace" for kind, _ in plan) < 2  # a shared parameter wants one way to shard the batch
    meshes: list[Any] = []
    axes: list[int | None] = []
    for place in places:
        shape, axis = rng.choice(GRIDS[len(groups[place])])
        if place in places[: len(meshes)] and not (may_differ and rng.random() < 0.4):
            first = places.index(place)
            meshes.append(meshes[first])
            axes.append(axes[first])
            continue
        meshes.append(torch.tensor(groups[place]).reshape(shape).tolist())
        axes.append(axis)
    schedules = xm.Schedule.names()
    microbatches = rng.randint(1, 7)
    return RandomPipeline(
        seed,
        plan,
        tuple(f"steps.{start}" for start in starts),
        meshes,
        axes,
        rng.choice(schedules),
        microbatches,
        microbatches * rng.randint(1, 5) + rng.randint(0, microbatches - 1),
        rng.random() < 0.8,
        rng.random() < 0.4,
    )


def _places(rng: random.Random, world_size: int, num_stages: int) -> list[int]:
    """The place of each stage, numbered in the order of their first stages."""
    count = rng.randint(1, num_stages) if rng.random() < 0.4 else num_stages
    raw = [rng.randrange(count) for _ in range(num_stages)] if count < num_stages else list(range(num_stages))
    if count < num_stages and rng.random() < 0.5:
        raw = [stage % count for stage in range(num_stages)]
    known = list(dict.fromkeys(raw))
    return [known.index(place) for place in raw]


def _groups(rng: random.Random, world_size: int, num_places: int) -> list[list[int]]:
    """Ranks in a random order, dealt to the places; some may stay out."""
    ranks = rng.sample(range(world_size), world_size)
    used = rng.randint(num_places, world_size)
    ends = [*sorted(rng.sample(range(1, used), num_places - 1)), used]
    return [ranks[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _loss(output: dict[str, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output["last"], target) + output["middle"].square().mean() + output["sum"].sigmoid().mean()


def _delay(engine: xm.PipelineEngine, seed: int, rank: int) -> None:
    """Stages of this rank take a random while, so that what they send and receive comes late, forward and backward."""
    rng = random.Random(f"{seed} {rank}")

    def wait(*_: Any) -> None:
        if rng.random() < 0.3:
            time.sleep(rng.uniform(0.0, 0.02))

    for stage in engine.stages:
        module = engine.stage_module(stage)
        module.register_forward_pre_hook(wait)
        for parameter in module.parameters():
            parameter.register_hook(wait)  # type: ignore[no-untyped-call]


def train_random(seed: int, rank: int, world_size: int, is_delayed: bool = False) -> None:
    """Three steps of SGD against the oracle; raises AssertionError with the seed."""
    case = draw(seed, world_size)
    if rank not in case.ranks:
        return
    where = f"seed {seed}: {case}"
    print(f"at seed {seed}", flush=True)  # shown of a rank that hangs
    torch.manual_seed(seed)
    model = Graph(case.plan, WIDTH)
    reference = copy.deepcopy(model)
    example = (torch.empty(2, WIDTH), torch.empty(2, WIDTH))
    engine = xm.PipelineEngine(
        model,
        example,
        meshes=[xm.Mesh(mesh) for mesh in case.meshes],
        split=xm.split_at(*case.split),
        data_axis=case.axes,
        schedule=case.schedule,
        num_microbatches=case.microbatches,
        loss_fn=_loss,
        overlap=case.overlap,
    )
    if case.is_delayed or is_delayed:
        _delay(engine, seed, rank)
    mine = torch.optim.SGD(engine.parameters(), 1e-2)
    theirs = torch.optim.SGD(reference.parameters(), 1e-2)
    for step in range(3):
        torch.manual_seed(1000 * seed + step)
        args = (torch.randn(case.samples, WIDTH), torch.randn(case.samples, WIDTH))
        target = torch.randn(case.samples, WIDTH)
        mine.zero_grad()
        theirs.zero_grad()
        losses: list[torch.Tensor] = []
        output = engine.step(*args, target=target, losses=losses)
        expected = serial_step(reference, args, target=target, loss_fn=_loss, num_microbatches=case.microbatches)
        compare(engine, reference, expected, output, losses, f"{where}, step {step}")
        mine.step()
        theirs.step()
    assert_all_found(engine, reference, case.ranks, where)
    engine.close()
