"""Groups on xmesh: made, split, found, timed out, closed, forked, and left behind at the interpreter's exit."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor import DTensor, Replicate, Shard

import torch_xmesh as xm
from torch_xmesh import backend
from torch_xmesh.testing import World, mark, spawn

CPU = torch.device("cpu")
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


def _sum(group: Any = None) -> float:
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def _names(rank: int, size: int) -> Any:
    group: Any = dist.group.WORLD
    ours = backend.backend_of()
    assert group._get_backend(CPU) is group._get_backend(torch.device("cuda"))
    assert isinstance(ours, backend.ProcessGroupXmesh)
    assert (ours.rank(), ours.size(), ours.timeout) == (rank, size, timedelta(seconds=77))
    assert ours.global_ranks == []
    ours.store.set(f"mine{rank}", str(rank))
    assert ours.store.get(f"mine{1 - rank}") == str(1 - rank).encode()
    return [dist.get_backend(), ours.name(), _sum(), ours.inner_backend(CPU).name()]


@pytest.mark.parametrize("name", ["xmesh", "cpu:xmesh,cuda:xmesh"])
def test_name_and_properties(name: str) -> None:
    for found in spawn(_names, 2, backend=name, init_kwargs={"timeout": timedelta(seconds=77)}):
        assert found[0] in ("xmesh", name)
        assert found[1:] == ["xmesh", 2.0, "gloo"]


@pytest.mark.parametrize(("inner", "told"), [({"cpu": "nccl"}, "gloo"), ({"xpu": "nothing"}, "expected nccl, xccl or")])
def test_inner_backends_that_cannot_be(inner: dict[str, str], told: str) -> None:
    options = backend.Options()
    options.inner = inner
    with pytest.raises(ValueError, match=told):
        dist.init_process_group("xmesh", store=dist.HashStore(), rank=0, world_size=1, pg_options=options)
    assert not dist.is_initialized()


def _detail(rank: int, size: int) -> Any:
    return [backend.backend_of().name(), _sum()]


def test_debug_detail_wraps_it() -> None:
    assert spawn(_detail, 2, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}) == [["xmesh", 2.0]] * 2


def _new_groups(rank: int, size: int) -> Any:
    pair = dist.new_group([0, 2])
    rest = dist.new_group([1], timeout=timedelta(seconds=5))
    gloo = dist.new_group(backend="gloo")
    found: list[Any] = []
    for group in (pair, rest, gloo):
        member = isinstance(group, dist.ProcessGroup)
        found.append(_sum(group) if member else None)
        try:
            found.append(backend.backend_of(group).global_ranks)
        except ValueError as error:
            found.append(str(error).split(":")[0])
    if rank == 1:
        assert backend.backend_of(rest).timeout == timedelta(seconds=5)
    return found


def test_new_group() -> None:
    outside = "this rank is not in the group"
    on_gloo = "expected a process group on xmesh, got one on gloo"
    inside = [2.0, [0, 2], None, outside, 3.0, on_gloo]
    assert spawn(_new_groups, 3) == [inside, [None, outside, 1.0, [1], 3.0, on_gloo], inside]


def _split(rank: int, size: int) -> Any:
    world: Any = dist.group.WORLD
    mine = [0, 2] if rank in (0, 2) else [1, 3]
    half = world.split_group(mine, timeout=timedelta(seconds=30), group_name=f"half{rank % 2}", group_desc="half")
    tensor = torch.tensor([float(rank)])
    half.allreduce([tensor]).wait()
    assert half._get_backend(CPU) is half._get_backend(torch.device("cuda"))
    quarter = half.split_group([half.rank()], timeout=timedelta(seconds=30), group_name=f"quarter{rank}")
    ours: Any = backend.backend_of(quarter)
    return [tensor.item(), half.rank(), backend.backend_of(half).global_ranks, ours.global_ranks, ours.size()]


def test_split_group() -> None:
    assert spawn(_split, 4) == [[2 if r % 2 == 0 else 4, r // 2, [r % 2, r % 2 + 2], [r], 1] for r in range(4)]


def _split_by_dist(rank: int, size: int) -> Any:
    world: Any = dist.group.WORLD
    if world.bound_device_id is None:
        world.bound_device_id = torch.device(
            "cuda:0"
        )  # what init_process_group(device_id=...) leaves; no GPU is touched
    half: Any = dist.split_group(split_ranks=[[0, 1], [2, 3]])
    return [_sum(half), dist.get_backend(half), dist.get_process_group_ranks(half)]


SPLIT = [[2, "xmesh", [0, 1]]] * 2 + [[2, "xmesh", [2, 3]]] * 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs on machines without a GPU, which it would bind groups to")
def test_split_group_of_dist() -> None:
    assert spawn(_split_by_dist, 4) == SPLIT


def _bound_to_cpu(rank: int, size: int) -> Any:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    row = torch.tensor([float(rank)])
    dist.all_reduce(row, group=mesh.get_group("b"))
    pair = dist.new_group([0, 1])
    return [row.item(), _sum(pair) if rank < 2 else None, _split_by_dist(rank, size)]


@pytest.mark.skipif(TORCH < (2, 15), reason="runs on any machine, with torch 2.15 or newer (groups bound to cpu:0)")
def test_bound_to_cpu() -> None:
    found = spawn(_bound_to_cpu, 4, init_kwargs={"device_id": torch.device("cpu:0")})
    assert found == [[1, 2, SPLIT[0]], [1, 2, SPLIT[1]], [5, None, SPLIT[2]], [5, None, SPLIT[3]]]


def _device_mesh(rank: int, size: int) -> Any:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    row = torch.tensor([float(rank)])
    dist.all_reduce(row, group=mesh.get_group("tp"))
    return [row.item(), dist.get_backend(mesh.get_group("dp"))]


def test_init_device_mesh() -> None:
    assert spawn(_device_mesh, 4) == [[1, "xmesh"], [1, "xmesh"], [5, "xmesh"], [5, "xmesh"]]


def _options(rank: int, size: int) -> Any:
    gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._threads = 3
    gloo._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
    given = backend.Options()
    given.gloo = gloo
    for options in (gloo, given):
        group: Any = dist.new_group(pg_options=options)
        inner: Any = backend.backend_of(group).inner_backend(CPU)
        assert _sum(group) == size
        assert inner.options._threads == 3
    try:
        dist.new_group(pg_options=7)
    except ValueError as error:
        return str(error)


def test_options_reach_the_inner_backend() -> None:
    assert all("got int" in said for said in spawn(_options, 2))


def test_a_group_whose_ranks_could_change_is_refused() -> None:
    """As torch asks for one: from 2.14 on in what describes the group. A group that does not is made of these."""
    for created, given in (
        (SimpleNamespace(enable_reconfigure=True), None),
        (None, SimpleNamespace(enable_reconfigure=True)),
    ):
        with pytest.raises(
            ValueError, match="enable_reconfigure: expected False, got True: a group on xmesh keeps the ranks"
        ):
            backend._create(created, given)
    with pytest.raises(ValueError, match="pg_options of a group on xmesh"):
        backend._create(SimpleNamespace(enable_reconfigure=False), SimpleNamespace(enable_reconfigure=False))


def _sequence_and_timeout(rank: int, size: int) -> Any:
    ours: Any = backend.backend_of()
    for _ in range(3):
        _sum()
    number = ours._get_sequence_number_for_group()
    ours._set_default_timeout(timedelta(milliseconds=300))
    assert ours.timeout == timedelta(milliseconds=300)
    if rank == 0:
        try:
            _sum()
        except RuntimeError as error:
            return [number, "imeout" in str(error) or "Timed out" in str(error)]
    return [number, True]


def test_sequence_numbers_and_timeouts() -> None:
    first, second = spawn(_sequence_and_timeout, 2)
    assert first == second
    assert first[1]
    assert first[0] >= 3


def _close(rank: int, size: int, how: str) -> Any:
    ours: Any = backend.backend_of()
    _sum()
    getattr(ours, how)()
    closed = ours.is_closed
    del ours
    dist.destroy_process_group()
    return [closed, len(os.listdir("/proc/self/task"))]


def _one_call_then_the_end(rank: int, size: int) -> None:
    spec = xm.Spec((12,), torch.float32, xm.Mesh([0]), (Replicate(),))
    for number in range(40):
        group = dist.new_group(range(size))
        x: Any = spec
        if rank == 0:
            x = DTensor.from_local(torch.full((12,), float(number)), xm.device_mesh(spec.mesh), (Replicate(),))
        part = xm.reshard(x, xm.Mesh(range(size)), [Shard(0)], group=group).to_local()
        dist.destroy_process_group(group)
        assert part.tolist() == [float(number)] * (12 // size)
        dist.barrier()


def test_a_rank_may_leave_when_its_own_call_has_ended() -> None:
    """What it said last, on a connection that it has just begun to make, comes before its goodbye."""
    spawn(_one_call_then_the_end, 3)


def again_at_one_address(rank: int, world_size: int, port: int, together: Any) -> None:
    for run in range(3):
        dist.init_process_group(
            "xmesh",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=20),
        )
        total = torch.full((2,), float(rank + run))
        dist.all_reduce(total)
        assert total.tolist() == [1.0 + 2 * run] * 2
        dist.destroy_process_group()
        if rank == 0:  # the server of the store went with the group
            with socket.socket() as probe:
                assert probe.connect_ex(("127.0.0.1", port)) != 0
        together.wait()


def test_groups_one_after_another_at_one_address() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(  # type: ignore[no-untyped-call]
        again_at_one_address,
        (2, port, mp.get_context("spawn").Barrier(2)),
        nprocs=2,
    )


LATE = """
import atexit
import torch, torch.distributed as dist

@atexit.register
def late():  # registered first, so called last
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        print("late:", error)

import torch_xmesh
dist.init_process_group("xmesh", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(1))
"""


def test_a_call_after_the_end_of_the_process_has_begun() -> None:
    ran = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "late: xmesh: the process is about to end" in ran.stdout


@pytest.mark.parametrize("how", ["abort", "shutdown"])
def test_close_leaves_no_thread(how: str) -> None:
    for closed, threads in spawn(_close, 2, how):
        assert closed
        assert threads <= 2  # this one, and in rank 0 the store's, which the test harness holds


def _fork(rank: int, size: int) -> Any:
    _sum()
    child = os.fork()
    if child == 0:
        dist.destroy_process_group()  # must touch none of the parent's threads
        os._exit(7)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return [status, _sum()]


def test_forked_child_leaves_the_group_alone() -> None:
    assert spawn(_fork, 2) == [[7, 2.0]] * 2


_kept: list[Any] = []


def _exit_with_group(rank: int, size: int) -> Any:
    _kept.extend([dist.new_group(), backend.backend_of()])
    return _sum()


def test_interpreter_exit_with_a_live_group() -> None:
    assert spawn(_exit_with_group, 2, fresh=True) == [2.0, 2.0]


def _peer_dies(rank: int, size: int) -> Any:
    _sum()
    mark("ready")
    if rank == 1:
        signal.pause()
    try:
        _sum()
    except xm.PeerError as error:
        dist.destroy_process_group()
        return error.ranks, str(error)


def test_dead_peer_is_named_beside_the_inner_backends_error() -> None:
    with World(_peer_dies, 3) as world:
        for rank in range(3):
            world.wait_mark(rank, "ready")
        world.signal(1, 9)
        outcomes = world.join(60)
    assert [outcome.exitcode for outcome in outcomes] == [0, -9, 0]
    for rank in (0, 2):
        ranks, text = outcomes[rank].value
        assert ranks == (1,)
        assert re.search(r"rank \d, all_reduce of ranks \[0, 1, 2\]: rank 1 is lost: .*\(gloo: .*onnection", text)


def _env_rank(rank: int, size: int, port: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("xmesh")
    assert _sum() == size
    dist.destroy_process_group()


def test_mp_spawn_with_env() -> None:
    from torch_xmesh.testing.spawn import _free_port

    mp.spawn(_env_rank, args=(2, _free_port()), nprocs=2)  # type: ignore[no-untyped-call]


def test_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "import os, torch, torch.distributed as dist, torch_xmesh\n"
        "dist.init_process_group('cpu:xmesh,cuda:xmesh')\n"
        "t = torch.ones(1)\n"
        "dist.all_reduce(t)\n"
        "os.write(1, b'sum %.1f\\n' % t.item())\n"  # in one piece: both ranks write to one pipe
        "dist.destroy_process_group()\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 2.0") == 2


def test_no_group_is_a_clear_error() -> None:
    with pytest.raises(ValueError, match="has not been initialized"):
        backend.backend_of()
