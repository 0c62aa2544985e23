"""A user's mistakes: a ValueError that names what differs, on every rank that calls, and no state left behind."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layouts import Layout, assert_same_bytes, dtensor_of, expected_of, source_of
from torch.distributed.tensor import Partial, Replicate, Shard

import torch_xmesh as xm
from torch_xmesh.backend import backend_of
from torch_xmesh.group import group_of, reshards_of
from torch_xmesh.testing import spawn

LAYOUT = Layout((8, 6), torch.float32, xm.Mesh([0, 1]), (Shard(0),), xm.Mesh([2, 3]), (Shard(1),))


def good_call() -> None:
    y = xm.reshard(source_of(LAYOUT, as_spec=True), LAYOUT.dst_mesh, LAYOUT.dst)
    assert_same_bytes(y.to_local(), expected_of(LAYOUT), "after a mistake")


def spec(**changes: Any) -> xm.Spec:
    fields: dict[str, Any] = {
        "shape": LAYOUT.shape,
        "dtype": LAYOUT.dtype,
        "mesh": LAYOUT.src_mesh,
        "placements": LAYOUT.src,
    }
    return xm.Spec(**(fields | changes))


# (field, what rank 3 passes instead); the source ranks pass the right thing.
DIFFERENCES: list[tuple[str, Callable[[], Any]]] = [
    ("shape", lambda: xm.reshard(spec(shape=(8, 7)), LAYOUT.dst_mesh, LAYOUT.dst)),
    ("dtype", lambda: xm.reshard(spec(dtype=torch.float64), LAYOUT.dst_mesh, LAYOUT.dst)),
    ("source placements", lambda: xm.reshard(spec(placements=(Shard(1),)), LAYOUT.dst_mesh, LAYOUT.dst)),
    ("source mesh", lambda: xm.reshard(spec(mesh=xm.Mesh([1, 0])), LAYOUT.dst_mesh, LAYOUT.dst)),
    ("destination placements", lambda: xm.reshard(spec(), LAYOUT.dst_mesh, (Replicate(),))),
    ("destination mesh", lambda: xm.reshard(spec(), xm.Mesh([3, 2]), LAYOUT.dst)),
    ("requires_grad", lambda: xm.reshard(spec(requires_grad=True), LAYOUT.dst_mesh, LAYOUT.dst)),
    ("strategy", lambda: xm.reshard(spec(), LAYOUT.dst_mesh, LAYOUT.dst, strategy="broadcast:naive+naive")),
    ("number of tensors", lambda: xm.reshard_many([spec(), spec()], LAYOUT.dst_mesh, LAYOUT.dst)),
    ("topology", lambda: xm.reshard(spec(), LAYOUT.dst_mesh, LAYOUT.dst, topology=xm.Topology(devices_per_host=1))),
]


def disagreements(rank: int, world_size: int) -> None:
    for field, odd_call in DIFFERENCES:
        with pytest.raises(ValueError, match=rf"ranks disagree on {field}.*rank \d has .*rank \d"):
            odd_call() if rank == 3 else xm.reshard(source_of(LAYOUT), LAYOUT.dst_mesh, LAYOUT.dst)
        good_call()


# (pattern, the call that rank 3 refuses by itself); the others get its reason instead of waiting.
REFUSALS: list[tuple[str, Callable[[], Any]]] = [
    ("one placement per mesh axis", lambda: xm.reshard(spec(), LAYOUT.dst_mesh, (Shard(0), Shard(1)))),
    ("out of range", lambda: xm.reshard(spec(), LAYOUT.dst_mesh, (Shard(2),))),
    ("Partial", lambda: xm.reshard(spec(), LAYOUT.dst_mesh, (Partial("sum"),))),
    (
        "unknown strategy|strategy 'fastest'",
        lambda: xm.reshard(spec(), LAYOUT.dst_mesh, LAYOUT.dst, strategy="fastest"),
    ),
    (
        "only cpu tensors",
        lambda: xm.reshard(
            spec(mesh=xm.Mesh([0, 1], device_type="cpu")), xm.Mesh([2, 3], device_type="meta"), LAYOUT.dst
        ),
    ),
    (
        "only cpu tensors",
        lambda: xm.reshard(
            spec(mesh=xm.Mesh([0, 1], device_type="xpu")), xm.Mesh([2, 3], device_type="xpu"), LAYOUT.dst
        ),
    ),
    ("out= of tensor 0", lambda: xm.reshard(spec(), LAYOUT.dst_mesh, LAYOUT.dst, out=torch.empty(8, 3))),  # type: ignore[arg-type]
    # Who takes part cannot be known from these alone.
    (
        "expected a DTensor or an xm.Spec, got Tensor",
        lambda: xm.reshard(torch.empty(8, 6), LAYOUT.dst_mesh, LAYOUT.dst),  # type: ignore[arg-type]
    ),
    ("different keys", lambda: xm.reshard_many({"a": spec()}, LAYOUT.dst_mesh, {"b": LAYOUT.dst})),
    ("the list is empty", lambda: xm.reshard_many([], LAYOUT.dst_mesh, LAYOUT.dst)),
    ("a mesh is a DeviceMesh or an xm.Mesh, got list", lambda: xm.reshard(spec(), [2, 3], LAYOUT.dst)),  # type: ignore[arg-type]
    ("not in the process group", lambda: xm.reshard(spec(), xm.Mesh([2, 9]), LAYOUT.dst)),
]


def one_rank_refuses(rank: int, world_size: int) -> None:
    for pattern, odd_call in REFUSALS:
        with pytest.raises((ValueError, NotImplementedError), match=pattern):
            odd_call() if rank == 3 else xm.reshard(source_of(LAYOUT), LAYOUT.dst_mesh, LAYOUT.dst)
        good_call()


def spec_where_the_data_is(rank: int, world_size: int) -> None:
    text = r"rank 1 is on the source mesh and holds \[4, 6\] of it, but passes an xm.Spec"
    for grads in (False, True):
        x: Any = spec(requires_grad=grads)
        if rank == 0:
            x = source_of(LAYOUT).requires_grad_(grads)
        with pytest.raises(ValueError, match=text):
            xm.reshard(x, LAYOUT.dst_mesh, LAYOUT.dst)
        good_call()


def wrong_local_shape(rank: int, world_size: int) -> None:
    bad = dtensor_of(torch.zeros(3, 6), LAYOUT.shape, LAYOUT.src_mesh, LAYOUT.src)
    with pytest.raises(ValueError, match=r"(?s)shape.*\[4, 6\].*\[3, 6\]|\[3, 6\].*\[4, 6\]"):
        xm.reshard(bad if rank == 0 else source_of(LAYOUT), LAYOUT.dst_mesh, LAYOUT.dst)
    good_call()


def some_ranks_refuse(rank: int, world_size: int) -> None:
    """Some ranks pass nothing, or a plain tensor, once or twice: the rest hear of it, and the next call works."""
    empty: Callable[[], Any] = lambda: xm.reshard_many({}, LAYOUT.dst_mesh, LAYOUT.dst)  # noqa: E731
    nothing: Callable[[], Any] = lambda: xm.reshard_many([], LAYOUT.src_mesh, LAYOUT.dst)  # noqa: E731
    plain: Callable[[], Any] = lambda: xm.reshard(torch.empty(8, 6), LAYOUT.dst_mesh, LAYOUT.dst)  # type: ignore[arg-type]  # noqa: E731
    named: Callable[[], Any] = lambda: xm.reshard(spec(), LAYOUT.dst_mesh, (Partial("sum"),))  # noqa: E731
    right: Callable[[], Any] = lambda: xm.reshard(source_of(LAYOUT), LAYOUT.dst_mesh, LAYOUT.dst)  # noqa: E731
    rounds: list[dict[int, Callable[[], Any]]] = [
        {0: empty, 1: empty},
        {1: empty, 2: plain},
        {0: plain, 2: empty, 3: nothing},
        {0: empty, 3: named},
        dict.fromkeys(range(4), empty),
        {0: empty, 1: plain, 2: nothing, 3: named},
    ]
    for mistakes in rounds:
        for _ in range(2):
            with pytest.raises(ValueError, match="is empty|got Tensor|Partial"):
                mistakes.get(rank, right)()
        good_call()


_RING = torch.zeros(8)


def ring() -> Any:
    """A DTensor on every rank; each call wraps the same memory."""
    return dtensor_of(_RING, (8,), xm.Mesh([0, 1, 2, 3]), (Replicate(),))


def everyone_wrong(rank: int, world_size: int) -> None:
    """Mistakes that need no other rank to be seen, made by all."""
    x = source_of(LAYOUT)
    cases: list[tuple[str, Callable[[], Any]]] = [
        ("expected a DTensor", lambda: xm.reshard(torch.zeros(8, 6), LAYOUT.dst_mesh, LAYOUT.dst)),  # type: ignore[arg-type]
        ("list is empty", lambda: xm.reshard_many([], LAYOUT.dst_mesh, LAYOUT.dst)),
        ("not in the process group", lambda: xm.reshard(x, xm.Mesh([2, 9]), LAYOUT.dst)),
        ("distinct", lambda: xm.reshard(x, xm.Mesh([2, 2]), LAYOUT.dst)),
        ("DeviceMesh or an xm.Mesh", lambda: xm.reshard(x, [2, 3], LAYOUT.dst)),  # type: ignore[arg-type]
        ("placements are a sequence", lambda: xm.reshard(x, LAYOUT.dst_mesh, Shard(0))),  # type: ignore[arg-type]
        ("different keys", lambda: xm.reshard_many({"a": x}, LAYOUT.dst_mesh, {"b": LAYOUT.dst})),
        ("out= has 2", lambda: xm.reshard_many([x], LAYOUT.dst_mesh, LAYOUT.dst, out=[x, x])),
        ("shares memory", lambda: xm.reshard(ring(), ring().device_mesh, (Replicate(),), out=ring())),
        ("names no host", lambda: xm.reshard(x, LAYOUT.dst_mesh, LAYOUT.dst, topology=xm.Topology({0: 0}))),
    ]
    for pattern, call in cases:
        with pytest.raises(ValueError, match=pattern):
            call()
        dist.barrier()
        good_call()


def other_backend(rank: int, world_size: int) -> None:
    group = dist.new_group(backend="gloo")
    with pytest.raises(ValueError, match="xmesh"):
        xm.reshard(source_of(LAYOUT), LAYOUT.dst_mesh, LAYOUT.dst, group=group)
    good_call()


def two_threads_first(rank: int, world_size: int) -> None:
    """A new group's first call, by two threads of rank 0 at once: one is refused, the other goes on."""
    for _ in range(5):
        group = dist.new_group(backend="xmesh")
        start = threading.Barrier(2 if rank == 0 else 1)
        outcomes: queue.SimpleQueue[str] = queue.SimpleQueue()

        def call(group: Any = group, start: Any = start, outcomes: Any = outcomes) -> None:
            start.wait()
            try:
                y = xm.reshard(source_of(LAYOUT), LAYOUT.dst_mesh, LAYOUT.dst, group=group)
                assert_same_bytes(y.to_local(), expected_of(LAYOUT), "in one of two threads")
                outcomes.put("made")
            except RuntimeError as error:
                outcomes.put(str(error))

        threads = [threading.Thread(target=call) for _ in range(start.parties)]
        if rank == 0:
            for thread in threads:
                thread.start()
            assert "two threads call reshard" in outcomes.get()
        dist.barrier()
        if rank > 0:
            threads[0].start()
        for thread in threads:
            thread.join()
        assert outcomes.get() == "made"
        dist.destroy_process_group(group)


def use_from_three_threads(group: Any, third: Callable[[], Any]) -> list[Exception]:
    """A group's first reshard, a question for its hosts, and `third`, all at once."""
    start = threading.Barrier(3)
    failures: list[Exception] = []

    def run(job: Callable[[], Any]) -> None:
        start.wait()
        try:
            job()
        except (RuntimeError, ValueError) as error:
            failures.append(error)

    jobs: list[Callable[[], Any]] = [
        lambda: xm.reshard(source_of(LAYOUT), LAYOUT.dst_mesh, LAYOUT.dst, group=group),
        lambda: group_of(group).topology([0, 1, 2, 3], xm.Topology().links),
        third,
    ]
    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures


def planning_and_closing_beside_a_first_call(rank: int, world_size: int) -> None:
    group = dist.new_group(backend="xmesh")
    assert not use_from_three_threads(group, lambda: group_of(group))
    dist.barrier()
    group = dist.new_group(backend="xmesh")
    use_from_three_threads(group, backend_of(group).abort)  # whoever comes late is told; nobody hangs
    dist.barrier()


def two_threads(rank: int, world_size: int) -> None:
    """While rank 0's first call waits for the others, a second thread's call is refused."""
    if rank > 0:
        dist.barrier()
        good_call()
        return
    reshards = reshards_of(None)
    first = threading.Thread(target=good_call)
    first.start()
    while not reshards._caller.locked():
        assert first.is_alive()
    with pytest.raises(RuntimeError, match="two threads"):
        good_call()
    dist.barrier()
    first.join()


def closed_group(rank: int, world_size: int) -> None:
    good_call()
    group = dist.group.WORLD
    dist.barrier()
    dist.destroy_process_group()
    with pytest.raises((RuntimeError, ValueError), match="closed|process group"):
        xm.reshard(spec(), LAYOUT.dst_mesh, LAYOUT.dst, group=group)


def everything(rank: int, world_size: int) -> None:
    for check in (
        disagreements,
        one_rank_refuses,
        some_ranks_refuse,
        wrong_local_shape,
        spec_where_the_data_is,
        everyone_wrong,
        other_backend,
        two_threads_first,
        planning_and_closing_beside_a_first_call,
        two_threads,
        closed_group,
    ):
        check(rank, world_size)


def test_mistakes() -> None:
    spawn(everything, 4, timeout=150)
