"""Links between worlds that start apart: a source of two processes; replicas that die, stand still and come back."""

from __future__ import annotations

import datetime
import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from wait_until import wait_until

from torch_xmesh import _C
from torch_xmesh.testing import World

LAST = 1_000_000  # the version after which everybody ends
ROWS, COLUMNS = 64, 8
DEADLINE = datetime.timedelta(
    seconds=10
)  # no machine is so slow that a rank that works is taken for one that stands still
pytestmark = pytest.mark.timeout(300)


def values(version: int) -> torch.Tensor:
    """What the source's tensor has in a version: no element is the same in another."""
    return torch.arange(ROWS * COLUMNS, dtype=torch.float64).reshape(ROWS, COLUMNS) + 1000 * version


def manifest(held: list[Any], needed: list[Any]) -> str:
    return json.dumps({"version": 1, "held": held, "needed": needed})


def client(port: int) -> dist.Store:
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=280))


def link_of(store: dist.Store, replica: str, rank: int, size: int) -> _C.Link:
    return _C.Link(store, replica == "source", replica, rank, size, DEADLINE, 1 << 20, 1 << 20)


def publishes(store: dist.Store, rank: int, size: int) -> None:
    """Publishes one version after another, until it is told to end."""
    link = link_of(store, "source", rank, size)
    rows = ROWS // size
    mine = torch.zeros(rows, COLUMNS, dtype=torch.float64)
    held = {
        "name": "w",
        "shape": [ROWS, COLUMNS],
        "dtype": "float64",
        "boxes": [[[rank * rows, (rank + 1) * rows], [0, COLUMNS]]],
    }
    link.enter(manifest([held], []), [[mine]], [])
    count = 0
    while True:
        count += 1
        if rank == 0:
            store.set(f"next/{count}", str(LAST if store.check(["end"]) else store.add("version", 1)))
        version = int(store.get(f"next/{count}"))
        mine.copy_(values(version)[rank * rows : (rank + 1) * rows])
        link.publish(version)
        settled = link.wait_settled(version, datetime.timedelta(seconds=200))
        assert settled is not None, version
        assert not settled[0], settled
        if rank == 0:
            store.set("holders", json.dumps([version, settled[1]]))
            store.set("left out", json.dumps(settled[2]))
        if version == LAST:
            break
    link.close()


def serves(store: dist.Store, replica: str, rank: int, size: int) -> list[int]:
    """Takes up one version after another; which. Each is whole, and on all ranks of the replica the same one."""
    link = link_of(store, replica, rank, size)
    columns = COLUMNS // size
    box = [[0, ROWS], [rank * columns, (rank + 1) * columns]]
    mine = torch.zeros(ROWS, columns, dtype=torch.float32 if replica == "b" else torch.float64)
    name = "w" if replica != "misfit" else "v"
    link.enter(manifest([], [{"source": name, "box": box, "dtype": "float64"}]), [], [mine])
    taken: list[int] = []
    while not taken or taken[-1] != LAST:
        link.receive(datetime.timedelta(0))
        version = link.swap()
        if version:
            wanted = values(version)[:, rank * columns : (rank + 1) * columns]
            assert torch.equal(mine, wanted.to(mine.dtype)), version
            taken.append(version)
            store.set(f"{replica} has", str(version))
        link.resume()
    link.close()
    return taken


Role = tuple[str, int, int, str]  # the party, rank, size, and the store's key at which it starts


def play(rank: int, world_size: int, port: int, roles: list[Role]) -> Any:
    replica, own_rank, size, start = roles[rank]
    store = client(port)
    store.get(start)
    if replica == "source":
        publishes(store, own_rank, size)
        return None
    return serves(store, replica, own_rank, size)


class Stage:
    def __init__(self, server: dist.Store, world: World, roles: list[Role]) -> None:
        self.server, self.world, self.roles = server, world, roles
        self.begin("start")

    def begin(self, key: str) -> None:
        self.server.set(key, "")

    def ranks(self, replica: str, key: str = "start") -> list[int]:
        return [rank for rank, role in enumerate(self.roles) if role[0] == replica and role[3] == key]

    def holders(self) -> list[str]:
        found: list[str] = json.loads(self.server.get("holders"))[1] if self.server.check(["holders"]) else []
        return found

    def wait(self, holds: Callable[[], bool]) -> None:
        def or_failed() -> bool:
            failed = [outcome for outcome in self.world.outcomes() if outcome.error is not None]
            assert not failed, failed
            return holds()

        wait_until(or_failed)

    def wait_holders(self, *replicas: str) -> None:
        self.wait(lambda: self.holders() == sorted(replicas))

    def end(self) -> dict[str, list[int]]:
        """By replica, what it has taken up."""
        self.begin("end")
        taken: dict[str, list[int]] = {}
        for rank, role in enumerate(self.roles):
            outcome = self.world.wait(rank, 60)
            if outcome.value is not None:
                assert taken.setdefault(role[0] + role[3], outcome.value) == outcome.value
        return taken


@contextmanager
def stage(roles: list[Role]) -> Iterator[Stage]:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with World(play, len(roles), server.port, roles, backend=None) as world:
        yield Stage(server, world, roles)


def party(name: str, size: int, key: str = "start") -> list[Role]:
    return [(name, rank, size, key) for rank in range(size)]


def test_versions_reach_replicas_of_other_shapes() -> None:
    with stage(party("source", 2) + party("a", 2) + party("b", 1)) as play:
        play.wait_holders("a", "b")
        taken = play.end()
    assert taken["astart"][-1] == taken["bstart"][-1] == LAST


@pytest.mark.parametrize("victim", [0, 1])
def test_a_replica_that_loses_a_rank_holds_up_nobody_and_is_started_again(victim: int) -> None:
    with stage(party("source", 2) + party("a", 2) + party("b", 1) + party("a", 2, "again")) as play:
        play.wait_holders("a", "b")
        play.world.signal(play.ranks("a")[victim], signal.SIGKILL)
        wait_until(lambda: play.holders() == ["b"])
        other = play.world.wait(play.ranks("a")[1 - victim], 60)
        assert other.error is not None
        assert "a rank of replica 'a' is lost" in other.error
        play.world.signal(play.ranks("a")[1 - victim], signal.SIGKILL)
        play.begin("again")
        wait_until(lambda: play.holders() == ["a", "b"])
        play.begin("end")
        for rank in play.ranks("b") + play.ranks("a", "again"):
            assert play.world.wait(rank, 60).value[-1] == LAST


@pytest.mark.parametrize("victim", [0, 1])
def test_a_replica_that_stands_still_is_left_out_and_joins_again(victim: int) -> None:
    with stage(party("source", 2) + party("a", 2) + party("b", 1)) as play:
        play.wait_holders("a", "b")
        play.world.signal(play.ranks("a")[victim], signal.SIGSTOP)
        play.wait_holders("b")
        play.world.signal(play.ranks("a")[victim], signal.SIGCONT)
        play.wait_holders("a", "b")
        taken = play.end()
    assert taken["astart"][-1] == taken["bstart"][-1] == LAST


def test_a_replica_that_does_not_fit_is_left_out_and_told_why() -> None:
    with stage(party("source", 2) + party("misfit", 1) + party("b", 1)) as play:
        wanted = "replica 'misfit': replica 'misfit': the weights do not fit:"
        play.wait(lambda: play.server.check(["left out"]) and wanted in play.server.get("left out").decode())
        play.wait_holders("b")
        play.world.signal(play.ranks("misfit")[0], signal.SIGKILL)
        play.begin("end")
        assert play.world.wait(play.ranks("b")[0], 60).value[-1] == LAST


def test_mistakes_of_a_caller() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    source, late = link_of(client(server.port), "source", 0, 1), link_of(client(server.port), "a", 0, 2)
    held = {"name": "w", "shape": [4], "dtype": "float32", "boxes": [[[0, 4]]]}
    with pytest.raises(ValueError, match="only a source that has entered publishes"):
        source.publish(1)
    with pytest.raises(ValueError, match="expected memory for every tensor"):
        source.enter(manifest([held], []), [], [])
    source.enter(manifest([held], []), [[torch.ones(4)]], [])
    with pytest.raises(ValueError, match="entered once"):
        source.enter(manifest([], []), [], [])
    source.publish(1)
    assert source.wait_settled(1, DEADLINE) == ("", [], [])
    source.publish(1)
    settled = source.wait_settled(1, DEADLINE)
    assert settled is not None
    assert settled[0] == "versions ascend: version 1 is not above version 1"
    late.enter(manifest([], []), [], [])
    assert late.receive(datetime.timedelta(milliseconds=50)) == 0  # its other rank does not come
    for link in (source, late):
        link.close()
        link.close()
    with pytest.raises(RuntimeError, match="the link is closed"):
        late.receive(DEADLINE)
    with pytest.raises(RuntimeError, match="the link is closed"):
        source.publish(2)


def test_replicas_go_on_with_another_source() -> None:
    with stage(party("source", 2) + party("a", 2) + party("b", 1) + party("source", 1, "again")) as play:
        play.wait_holders("a", "b")
        for rank in play.ranks("source"):
            play.world.signal(rank, signal.SIGKILL)
        play.server.delete_key("holders")
        play.begin("again")
        for key in range(1, play.server.add("version", 0) + 3):  # the new source numbers its turns anew
            play.server.delete_key(f"next/{key}")
        wait_until(lambda: play.holders() == ["a", "b"])
        play.begin("end")
        for rank in play.ranks("a") + play.ranks("b"):
            assert play.world.wait(rank, 60).value[-1] == LAST
