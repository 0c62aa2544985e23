"""Planned stages, at each of their collectives, segments and parcels: a rank that raises, dies or stops there is the
one that all others hear of, and the groups of the user's are as they were."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from faults import survive, timeout_of
from planned_cases import OPTIONS
from small_models import Mlp
from torch.nn import functional as F

import torch_xmesh as xm
from torch_xmesh.parallelism.running.parcels import Parcel, Sent
from torch_xmesh.parallelism.running.stage import ShardedStage
from torch_xmesh.parallelism.running.stage_groups import StageGroups
from torch_xmesh.testing import World, mark, spawn

TWO = {**OPTIONS, "devices": xm.Mesh([[0, 1]])}

# By name: the number of ranks, and a plan for them. Stages of the first three have all ranks, the others two each.
PLANS: dict[str, tuple[int, Callable[..., xm.ParallelPlan]]] = {
    "megatron": (2, lambda *args: xm.presets.megatron(*args, tensor_parallel=2, **TWO)),
    "ZeRO-3": (2, lambda *args: xm.presets.zero_3(*args, **TWO)),
    "data": (2, lambda *args: xm.presets.data_parallel(*args, **TWO)),
    "2x2": (4, lambda *args: xm.presets.pipeline(*args, num_stages=2, tensor_parallel=2, **OPTIONS)),
    "2x2 with ZeRO-2": (4, lambda *args: xm.presets.pipeline(*args, num_stages=2, zero=2, **OPTIONS)),
}


def make(name: str) -> tuple[xm.PipelineEngine, torch.Tensor]:
    torch.manual_seed(1)
    model, x = Mlp(64, 4).double(), torch.randn(16, 64, dtype=torch.float64)
    return xm.PipelineEngine(model, (x,), plan=PLANS[name][1](model, (x,)), loss_fn=F.mse_loss), torch.cat([x, x])


@contextmanager
def at_places(look: Callable[[int], None]) -> Iterator[list[int]]:
    """Calls `look` before each collective, each segment and each parcel of parameters or gradients that leaves or is
    waited for, of this rank's stages, with its number; gives how many there were. A segment's transfers are under way
    when the next one is run."""
    count = [0]
    places: list[tuple[Any, str]] = [
        (StageGroups, "run"),
        (ShardedStage, "run_segment"),
        (Parcel, "start"),
        (Sent, "wait"),
    ]
    before = [getattr(owner, name) for owner, name in places]

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            count[0] += 1
            look(count[0] - 1)
            return method(*args)

        return call

    for (owner, name), method in zip(places, before, strict=True):
        setattr(owner, name, counted(method))
    try:
        yield count
    finally:
        for (owner, name), method in zip(places, before, strict=True):
            setattr(owner, name, method)


Make = Callable[[str], tuple[xm.PipelineEngine, torch.Tensor]]


def number_of_places(name: str, make: Make = make) -> int:
    """How many places there are in a step of this rank's."""
    engine, batch = make(name)
    with at_places(lambda number: None) as count:
        engine.step(batch, target=batch)
    engine.close()
    dist.barrier()
    return count[0]


def works_as_before(world_size: int) -> None:
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == world_size


def raises_everywhere(rank: int, world_size: int, name: str, make: Make = make) -> list[str]:
    """Rank 1 raises at each collective of a step, each time in an engine of its own."""
    number = torch.tensor([number_of_places(name, make)])
    dist.broadcast(number, 1)
    told = []
    for turn in range(int(number)):
        engine, batch = make(name)
        engine.step(batch, target=batch)
        dist.barrier()  # a failure ends what others are still at

        def fails(number: int, turn: int = turn) -> None:
            if number == turn and rank == 1:
                raise FileNotFoundError("no such shard")

        with at_places(fails), pytest.raises((xm.StageError, FileNotFoundError)) as caught:  # noqa: PT012
            engine.step(batch, target=batch)
            engine.step(batch, target=batch)  # another stage may be through with the first
        told.append(f"{type(caught.value).__name__}: {caught.value}")
        engine.close()
        works_as_before(world_size)
    return told


@pytest.mark.in_turn(2)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", PLANS)
def test_a_rank_raises_at_any_collective(name: str) -> None:
    for rank, told in enumerate(spawn(raises_everywhere, PLANS[name][0], name, timeout=150)):
        assert told
        for text in told:
            assert "no such shard" in text, (rank, text)
            assert rank == 1 or (text.startswith("StageError") and "rank 1" in text), (rank, text)


def in_a_loss(rank: int, world_size: int, name: str) -> str:
    """One rank's loss raises while the others of its stage are in the collectives behind theirs."""
    torch.manual_seed(1)
    model, x = Mlp(64, 4).double(), torch.randn(16, 64, dtype=torch.float64)
    broken: list[bool] = []

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if broken:
            raise FileNotFoundError("no such target")
        return F.mse_loss(output, target)

    engine = xm.PipelineEngine(model, (x,), plan=PLANS[name][1](model, (x,)), loss_fn=loss_fn)
    batch = torch.cat([x, x])
    engine.step(batch, target=batch)
    if rank == world_size - 1:
        broken.append(True)
    with pytest.raises(xm.StageError) as caught:
        engine.step(batch, target=batch)
    engine.close()
    works_as_before(world_size)
    return str(caught.value)


@pytest.mark.parametrize("name", PLANS)
def test_a_loss_raises(name: str) -> None:
    size = PLANS[name][0]
    for text in spawn(in_a_loss, size, name, timeout=60):
        assert f"failed on rank {size - 1} in microbatch 0 of step 1: FileNotFoundError: no such target" in text, text


def meets_its_end(rank: int, world_size: int, name: str, part: float, number: int) -> Any:
    """Rank 1 gets a signal at a collective, which lies at that part of a step."""
    turn = int(part * (number_of_places(name) - 1))
    engine, batch = make(name)
    engine.step(batch, target=batch)
    if rank == 1:

        def ends(count: int) -> None:
            if count == turn:
                mark("there")
                os.kill(os.getpid(), number)

        with at_places(ends):
            engine.step(batch, target=batch)

    def steps() -> None:
        for _ in range(2):  # another stage may be through with the first, if it needs rank 1 no more
            engine.step(batch, target=batch)

    with pytest.raises(xm.PeerError) as caught:
        steps()
    engine.close()
    dist.destroy_process_group()
    return caught.value.ranks, str(caught.value)


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("part", [0.0, 0.3, 0.6, 1.0])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("name", ["megatron", "2x2", "data", "ZeRO-3"])
def test_a_rank_dies_or_stops_at_a_collective(name: str, number: int, part: float) -> None:
    with World(meets_its_end, PLANS[name][0], name, part, number, init_kwargs=timeout_of(number)) as world:
        world.wait_mark(1, "there", 20)
        for value in survive(world, 1):
            assert value[0] == (1,), value


def leaves_in_a_collective(rank: int, world_size: int) -> Any:
    """A rank that destroys its groups between steps is named, though it goes on living."""
    engine, batch = make("2x2")
    engine.step(batch, target=batch)
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()  # a failure ends what others are still at
    if rank == 1:
        dist.destroy_process_group()
        store.set("left", "")
        return (1,)
    store.wait(["left"])
    with pytest.raises(xm.PeerError) as caught:
        engine.step(batch, target=batch)
    return caught.value.ranks


def test_a_rank_leaves() -> None:
    assert spawn(leaves_in_a_collective, 4, timeout=60) == [(1,)] * 4


def many_engines(rank: int, world_size: int, name: str) -> None:
    """Groups of engines that were closed go when others are made, and their threads."""
    counts = []
    for _ in range(4):
        engine, batch = make(name)
        engine.step(batch, target=batch)
        engine.close()
        dist.barrier()
        counts.append((len(dist.distributed_c10d._world.pg_map), len(os.listdir("/proc/self/task"))))
    assert counts[1:] == counts[:1] * 3, counts


@pytest.mark.parametrize("name", ["data", "2x2"])
def test_groups_of_closed_engines_go(name: str) -> None:
    spawn(many_engines, PLANS[name][0], name, timeout=60)
