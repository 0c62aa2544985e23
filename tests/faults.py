"""Ranks that die or stop while the others work: what is done to them, and what the others have to do."""

from __future__ import annotations

import datetime
import signal
from typing import Any

import torch.distributed as dist
from own_threads import own_threads
from wait_until import wait_until

from torch_xmesh.testing import World


def timeout_of(number: int) -> dict[str, datetime.timedelta]:
    """A rank that has died is noticed by its sockets, under the default timeout of half an hour; a stopped one only by
    the group's own."""
    return {"timeout": datetime.timedelta(seconds=4)} if number == signal.SIGSTOP else {}


def leave() -> None:
    """Destroys the groups; no thread of theirs is left. The kernel lists a thread for a moment after it was joined."""
    dist.destroy_process_group()
    wait_until(lambda: not any(name.startswith("xmesh") for name in own_threads().values()))


def strike(world: World, victim: int, number: int) -> list[Any]:
    """Once all ranks are at their mark "running", one gets a signal; :func:`survive` then."""
    for rank in range(world.world_size):
        world.wait_mark(rank, "running")
    world.signal(victim, number)
    return survive(world, victim)


def survive(world: World, victim: int) -> list[Any]:
    """What the other ranks return. They raise nothing, and end with 0 though the victim's process is there until they
    have returned."""
    values = []
    for rank in set(range(world.world_size)) - {victim}:
        outcome = world.wait(rank, 60)
        assert outcome.error is None, outcome.error
        values.append(outcome.value)
    world.signal(victim, signal.SIGKILL)
    for outcome in world.join():
        assert outcome.rank == victim or outcome.exitcode == 0, outcome
    return values
