"""out= of reshards: memory that is shared is refused before anything moves, and a call that is refused on any rank
leaves every rank's out= as it was."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layouts import dtensor_of
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

import torch_xmesh as xm
from torch_xmesh.testing import spawn

# Destinations that share memory.

BOTH = xm.Mesh([0, 1])
Views = Callable[[torch.Tensor], list[torch.Tensor]]

# Views of 36 floats: local tensors of shape [4, 2], or less, of which two share a byte, or one has one place for two.
SHARED: dict[str, tuple[Views, str]] = {
    "the same twice": (lambda m: [m[:8].view(4, 2)] * 2, "tensor 0 shares memory with out= of tensor 1"),
    "rows in common": (
        lambda m: [m[:8].view(4, 2), m[6:14].view(4, 2)],
        "tensor 0 shares memory with out= of tensor 1",
    ),
    "columns in common": (
        lambda m: [m.view(4, 9)[:, :2], m.view(4, 9)[:, 4:6], m.view(4, 9)[:, 5:7]],
        "tensor 1 shares memory with out= of tensor 2",
    ),
    "a row and its column": (
        lambda m: [m.view(6, 6)[2:3, :2], m.view(6, 6)[:, 1:2]],
        "tensor 0 shares memory with out= of tensor 1",
    ),
    "another dtype": (
        lambda m: [m[:8].view(4, 2), m[7:].view(torch.uint8)[3:5].view(1, 2)],
        "tensor 0 shares memory with out= of tensor 1",
    ),
    "expanded": (lambda m: [m[:2].expand(4, 2)], r"tensor 0 shares memory with itself: .* strides \(0, 1\)"),
    "windows": (lambda m: [m.as_strided((4, 2), (1, 1))], r"tensor 0 shares memory with itself: .* strides \(1, 1\)"),
    "odd windows": (
        lambda m: [m.as_strided((4, 3), (2, 3))],
        r"tensor 0 shares memory with itself: .*strides \(2, 3\)",
    ),
}
SEPARATE: dict[str, Views] = {
    "column blocks": lambda m: [m.view(4, 9)[:, :2], m.view(4, 9)[:, 2:4], m.view(4, 9)[:, 4:9]],
    "every other": lambda m: [m[::2].view(9, 2), m[1::2].view(9, 2)],
    "transposed beside": lambda m: [m.view(4, 9)[:, :2].t(), m.view(4, 9)[:, 2:].t()],
    "odd but separate": lambda m: [m.as_strided((3, 2), (2, 3))],
    "one behind another": lambda m: [m[:8].view(4, 2), m[8:16].view(4, 2), m[16:].view(1, 20)],
}


def into(views: list[torch.Tensor], marked: int = 0) -> list[Any]:
    """Tensors of these shapes on rank 0 go into the views on both."""
    xs, outs = [], []
    for number, view in enumerate(views):
        shape = tuple(view.shape)
        values = (torch.arange(view.numel()) + 10 * number + marked).to(view.dtype).view(shape)
        local = values if dist.get_rank() == 0 else torch.empty(0, *shape[1:], dtype=view.dtype)
        xs.append(dtensor_of(local, shape, xm.Mesh([0]), (Replicate(),)))
        outs.append(dtensor_of(view, shape, BOTH, (Replicate(),)))
    xm.reshard_many(xs, BOTH, (Replicate(),), out=outs)
    return [values.to_local() for values in outs]


def shared_memory(rank: int, world_size: int) -> None:
    for who in (0, 1):  # both must name what is wrong; the other one's views are its own
        for name, (views, text) in SHARED.items():
            memory = torch.full((36,), -1.0)
            given = (
                views(memory) if rank == who else [torch.full(view.shape, -1).to(view.dtype) for view in views(memory)]
            )
            told = "" if rank == who else f"rank {who} refused this call: out= of "
            with pytest.raises(ValueError, match=told + ".*" + text):
                into(given)
            assert all((one == -1).all() for one in (memory, *given) if one.dtype == torch.float32), name
    for name, make in SEPARATE.items():
        memory = torch.full((36,), -1.0)
        given = make(memory)
        for number, found in enumerate(into(given)):
            assert torch.equal(found.flatten(), torch.arange(found.numel()) + 10.0 * number), name
        written = torch.zeros(36, dtype=torch.bool)
        for view in given:
            written.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(True)
        assert (memory[~written] == -1).all(), name


def test_shared_memory() -> None:
    spawn(shared_memory, 2, timeout=60)


def memory_of_a_source(rank: int, world_size: int) -> None:
    """Rank 0 has the source; what it receives into shares memory with that, or lies beside it."""
    raw = bytearray(64)
    both = torch.frombuffer(raw, dtype=torch.float32, count=8), torch.frombuffer(raw, dtype=torch.float32, offset=28)
    assert both[0].untyped_storage().data_ptr() != both[1].untyped_storage().data_ptr()
    m = torch.zeros(16)
    shared = {
        "the same": (m[:8], m[:8]),
        "in part": (m[:8], m[7:15]),
        "between": (m[::2], m[4:12]),
        "of another storage": (both[0], both[1][:8]),
        "expanded": (m[:1].expand(8), m[:8]),
    }
    for name, (source, target) in shared.items():
        before = target.clone()
        with pytest.raises(ValueError, match="out= of tensor 0 shares memory with a source, tensor 0"):
            one_into(source, target)
        assert torch.equal(target, before), name
    beside = {"behind": (m[:8], m[8:]), "between": (m[::2], m[1::2]), "expanded": (m[:1].expand(8), m[1:9])}
    for name, (source, target) in beside.items():
        m.copy_(torch.arange(16.0))
        wanted = source.clone() if rank == 0 else torch.arange(16.0)[: source.numel()]
        found = one_into(source, target)
        if rank == 0:
            assert torch.equal(found, wanted), name


def one_into(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    rank = dist.get_rank()
    x = dtensor_of(source if rank == 0 else torch.empty(0), (8,), xm.Mesh([0]), (Replicate(),))
    out = dtensor_of(target if rank == 0 else torch.empty(8), (8,), BOTH, (Replicate(),))
    return xm.reshard(x, BOTH, (Replicate(),), out=out).to_local()  # type: ignore[no-any-return]


def test_memory_of_a_source() -> None:
    spawn(memory_of_a_source, 2, timeout=60)


# Refused calls.

FROM, TO = xm.Mesh([0, 1]), xm.Mesh([1, 2, 3])  # rank 1 keeps a part, the others receive
ROWS, WHOLE = Shard(0), Replicate()


@dataclasses.dataclass
class Given:
    """The arguments of one rank's call; `local` is what its out= has, -1 before."""

    shape: tuple[int, ...] = (64, 6)
    dtype: torch.dtype = torch.float32
    src: Placement = ROWS
    dst: Placement = WHOLE
    name: str = "weight"
    strategy: str = "auto"
    topology: xm.Topology | None = None

    def __post_init__(self) -> None:
        rank, shape = dist.get_rank(), self.shape
        held = torch.ones(shape, dtype=self.dtype)
        nothing = torch.empty([0] * len(shape), dtype=self.dtype)
        x = (held.chunk(2)[rank] if isinstance(self.src, Shard) else held) if rank in FROM.ranks else nothing
        self.x = dtensor_of(x.contiguous(), shape, FROM, (self.src,))
        parts = held.chunk(3) if isinstance(self.dst, Shard) else [held] * 3
        self.local = torch.full_like(parts[TO.ranks.index(rank)] if rank in TO.ranks else nothing, -1)

    def call(self) -> None:
        out = dtensor_of(self.local, self.shape, TO, (self.dst,))
        options: dict[str, Any] = {"strategy": self.strategy, "topology": self.topology}
        xm.reshard_many({self.name: self.x}, TO, (self.dst,), out={self.name: out}, **options)


# What one rank passes otherwise.
OTHERWISE: dict[str, dict[str, Any]] = {
    "dtype": {"dtype": torch.float64},
    "shape": {"shape": (66, 6)},
    "a name": {"name": "bias"},
    "source placements": {"src": Partial()},
    "destination placements": {"dst": Shard(0)},
    "strategy": {"strategy": "broadcast:naive+naive"},
    "topology": {"topology": xm.Topology(devices_per_host=1)},
    "an argument that is none": {"strategy": "nonsense"},
}


def refused(rank: int, world_size: int, usual: dict[str, Any]) -> None:
    for turn in range(6):
        for number, (what, changes) in enumerate(OTHERWISE.items()):
            if changes.items() <= usual.items():
                continue
            other = (turn + number) % world_size
            given = Given(**usual | (changes if rank == other else {}))
            with pytest.raises(ValueError, match="ranks disagree on|refused this call|unknown strategy"):
                given.call()
            dist.barrier()  # what is still on its way could be written till then
            assert (given.local == -1).all(), f"rank {rank}: {what} differs on rank {other}"
        given = Given(**usual)
        given.call()
        assert (given.local == (2 if usual.get("src") == Partial() else 1)).all()


@pytest.mark.parametrize("rows", [64, 1 << 16])
@pytest.mark.parametrize("usual", [{}, {"src": Partial()}, {"dst": Shard(0)}], ids=["values", "sums", "parts"])
def test_a_refused_call_changes_nothing(rows: int, usual: dict[str, Any]) -> None:
    spawn(refused, 4, {"shape": (rows, 6), **usual}, timeout=120)


def some_have_out(rank: int, world_size: int) -> None:
    """Which ranks give out= is each one's own affair; calls in flight at once, in chains over ranks."""
    for whose in range(1 << world_size):
        works = []
        for number in range(3):
            x = dtensor_of(torch.full((96,) if rank == 0 else (0,), number + 1.0), (96,), xm.Mesh([0]), (Replicate(),))
            target = xm.Mesh([0, 1, 2, 3])
            out = dtensor_of(torch.zeros(96), (96,), target, (Replicate(),)) if whose >> rank & 1 else None
            works.append(
                xm.reshard(x, target, (Replicate(),), out=out, async_op=True, strategy="broadcast:num_chunks=4")
            )
        for number, (y, work) in enumerate(works):
            work.wait()
            assert (y.to_local() == number + 1).all(), (whose, number)


def test_some_ranks_have_out() -> None:
    spawn(some_have_out, 4, timeout=60)
