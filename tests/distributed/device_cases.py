"""What holds of reshards on every accelerator, whose kind is torch's default device: the bytes that cpu gives, behind
the caller's streams.

A case takes (rank, world_size) and any number of ranks, one included. It moves nothing to ranks that are not there.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import test_reshard
import test_reshard_many
import torch
import torch.distributed as dist
from layouts import (
    Layout,
    assert_same_bytes,
    dtensor_of,
    local_part,
    partial_weights,
    random_layout,
    whole_tensor,
)
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import torch_xmesh as xm
from torch_xmesh.backend import backend_of

Case = Callable[[int, int], None]
STRATEGIES = [*test_reshard.STRATEGIES, xm.Broadcast(collective=True), "broadcast:num_chunks=3,collective=1"]

SHAPE = (64, 48)


def kind() -> str:
    return torch.get_default_device().type


def keep_busy() -> None:
    """The current stream, for some tens of milliseconds."""
    if kind() == "cuda":
        torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]
    else:
        import emu_device

        emu_device.hold(max_ms=30)


def meshes(world_size: int) -> tuple[xm.Mesh, xm.Mesh]:
    """All ranks, and all in the other order."""
    ranks = list(range(world_size))
    return xm.Mesh(ranks), xm.Mesh(ranks[::-1])


def layout_cases(world_size: int, seed: int, count: int) -> list[tuple[Layout, Any, xm.Topology | None]]:
    """(layout, strategy, topology), equal on all ranks."""
    rng = random.Random(seed)
    return [
        (
            random_layout(rng, world_size),
            STRATEGIES[i % len(STRATEGIES)],
            rng.choice([None, xm.Topology(devices_per_host=2)]),
        )
        for i in range(count)
    ]


def one_layout(rank: int, layout: Layout, strategy: Any, topology: xm.Topology | None, turn: int) -> None:
    """Values differ from one turn to the next."""
    with torch.device("cpu"):
        weight, total = partial_weights(layout.src_mesh, layout.src, rank)
        whole = whole_tensor(layout.shape, layout.dtype).flatten().roll(turn).reshape(layout.shape)
        part = local_part(whole if weight == 1 else whole * weight, layout.src_mesh, layout.src, rank)
        wanted = local_part(whole if total == 1 else whole * total, layout.dst_mesh, layout.dst, rank)
    x = dtensor_of(part.to(kind()), layout.shape, layout.src_mesh, layout.src)
    y = xm.reshard(x, layout.dst_mesh, layout.dst, strategy=strategy, topology=topology)
    assert y.device.type == kind()
    assert_same_bytes(y.to_local().cpu(), wanted, (turn, strategy, topology, layout))


def random_layouts(rank: int, world_size: int, seed: int, count: int) -> None:
    for turn, (layout, strategy, topology) in enumerate(layout_cases(world_size, seed, count)):
        one_layout(rank, layout, strategy, topology, turn)


def same_bits_as_on_cpu(rank: int, world_size: int) -> None:
    """Floating point sums of several contributions, where the order of the additions shows."""
    src, dst = (xm.Mesh([[0, 1], [2, 3]]), xm.Mesh([1, 2, 0])) if world_size >= 4 else meshes(world_size)
    topology = xm.Topology(host_of={r: r for r in range(world_size)}, nic_bytes_per_s=10**9, latency_us=1.0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.complex64):
        for op in ("sum", "avg", "product") if dtype.is_complex else ("sum", "avg", "min", "max", "product"):
            placements = tuple(Partial(op) for _ in src.shape)
            for placement in (Replicate(), Shard(0)):
                for strategy in ("send_recv", "broadcast", "striped", xm.Broadcast(collective=True)):
                    with torch.device("cpu"):
                        generator = torch.Generator().manual_seed(rank)
                        part = torch.randn(33, 5, generator=generator).to(dtype)
                        x = dtensor_of(part, (33, 5), src, placements)
                        wanted = xm.reshard(x, dst, (placement,), strategy=strategy, topology=topology).to_local()
                    x = dtensor_of(part.to(kind()), (33, 5), src, placements)
                    y = xm.reshard(x, dst, (placement,), strategy=strategy, topology=topology)
                    assert_same_bytes(y.to_local().cpu(), wanted, (dtype, op, placement, strategy))


def integers_of_every_kind(rank: int, world_size: int) -> None:
    src = xm.Mesh(list(range(max(world_size - 1, 1))))
    dst = xm.Mesh([world_size - 1, 0] if world_size > 1 else [0])
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32):
        for op in ("sum", "min", "max", "product"):
            with torch.device("cpu"):
                generator = torch.Generator().manual_seed(rank)
                part = torch.randint(-(1 << 40), 1 << 40, (33, 5), generator=generator).to(dtype)
                x = dtensor_of(part, (33, 5), src, (Partial(op),))
                wanted = xm.reshard(x, dst, (Shard(0),)).to_local()
            y = xm.reshard(dtensor_of(part.to(kind()), (33, 5), src, (Partial(op),)), dst, (Shard(0),))
            assert_same_bytes(y.to_local().cpu(), wanted, (dtype, op))


def _whole(turn: int) -> torch.Tensor:
    return whole_tensor(SHAPE, torch.float32) + turn


def _sharded(whole: torch.Tensor, mesh: xm.Mesh, rank: int) -> DTensor:
    return dtensor_of(local_part(whole, mesh, (Shard(0),), rank), SHAPE, mesh, (Shard(0),))


def late_producer_and_early_consumer(rank: int, world_size: int) -> None:
    """The source is made late on the stream, and overwritten at once. The result is read behind it; the host does not
    wait."""
    source, target = meshes(world_size)
    for turn in range(10):
        x = _sharded(torch.zeros(SHAPE), source, rank)
        local = x.to_local()
        wanted = _whole(turn)
        made = local_part(wanted, source, (Shard(0),), rank)
        torch.accelerator.synchronize()
        keep_busy()
        local.copy_(made)
        y = xm.reshard(x, target, (Shard(1),))
        local.fill_(-1)
        seen = y.to_local() + 0
        assert_same_bytes(seen, local_part(wanted, target, (Shard(1),), rank), turn)


def on_a_stream_of_its_own(rank: int, world_size: int) -> None:
    """The caller's streams are those that are current: one for the call, another for the wait."""
    source, target = meshes(world_size)
    first, second = torch.Stream(device=kind()), torch.Stream(device=kind())
    for turn in range(10):
        wanted = _whole(turn)
        x = _sharded(torch.zeros(SHAPE), source, rank)
        made = local_part(wanted, source, (Shard(0),), rank)
        torch.accelerator.synchronize()
        with first:
            keep_busy()
            x.to_local().copy_(made)
            y, work = xm.reshard(x, target, (Shard(1),), async_op=True)
        with second:
            work.wait()
            seen = y.to_local() + 0
            assert_same_bytes(seen, local_part(wanted, target, (Shard(1),), rank), turn)


def works(rank: int, world_size: int) -> None:
    """What can be asked of a Work, of several in flight, in another order."""
    source, target = meshes(world_size)
    wholes = [_whole(turn) for turn in range(8)]
    started = [
        xm.reshard(_sharded(whole, source, rank), target, (Replicate(),), async_op=True, strategy=STRATEGIES[i])
        for i, whole in enumerate(wholes)
    ]
    for whole, (y, work) in reversed(list(zip(wholes, started, strict=True))):
        assert work.wait()
        assert_same_bytes(y.to_local(), local_part(whole, target, (Replicate(),), rank), "async_op")
    for _, work in started:
        work.get_future().wait()
        assert work.is_completed()
        assert work.is_success()


def into_out(rank: int, world_size: int) -> None:
    """Into dense memory, and into memory with gaps."""
    source, target = meshes(world_size)
    whole = _whole(0)
    wanted = local_part(whole, target, (Shard(0),), rank)
    wide = torch.zeros(wanted.shape[0], 2 * wanted.shape[1])
    for local in (torch.zeros_like(wanted), wide[:, : wanted.shape[1]]):
        out = dtensor_of(local, SHAPE, target, (Shard(0),))
        assert xm.reshard(_sharded(whole, source, rank), target, (Shard(0),), out=out) is out
        assert_same_bytes(local, wanted, "out")
    assert not bool(wide[:, wanted.shape[1] :].any())


def gradients(rank: int, world_size: int) -> None:
    """The gradient comes back to the source's ranks, twice to the same leaf; as does that of a sum."""
    source, target = meshes(world_size)
    whole = _whole(0)
    x = _sharded(whole, source, rank)
    x.requires_grad_()
    weight = local_part(whole.square() + 1, target, (Shard(1),), rank)
    for _ in range(2):
        (xm.reshard(x, target, (Shard(1),)).to_local() * weight).sum().backward()
    assert isinstance(x.grad, DTensor)
    assert_same_bytes(x.grad.to_local(), local_part(2 * (whole.square() + 1), source, (Shard(0),), rank), "gradient")
    z = dtensor_of(torch.full((4,), float(rank + 1)), (4,), source, (Partial("sum"),))
    z.requires_grad_()
    y = xm.reshard(z, target, (Replicate(),))
    assert torch.equal(y.to_local().detach(), torch.full((4,), world_size * (world_size + 1) / 2))
    (3 * y.to_local()).sum().backward()
    assert isinstance(z.grad, DTensor)
    assert z.grad.placements == (Replicate(),)
    assert torch.equal(z.grad.to_local(), torch.full((4,), 3.0))


def a_training_loop(rank: int, world_size: int) -> None:
    """Two layers on two meshes have the same losses on a device as on cpu."""
    source, target = meshes(world_size)

    def losses() -> list[float]:
        generator = torch.Generator().manual_seed(0)
        first, second, batch = (torch.randn(8, 8, generator=generator, device="cpu") for _ in range(3))
        device = torch.get_default_device()
        a, b = (weight.to(device).requires_grad_() for weight in (first, second))
        optimizer = torch.optim.SGD([a, b], lr=0.01)
        out = []
        for _ in range(5):
            optimizer.zero_grad()
            hidden = DTensor.from_local(
                batch.to(device) @ a, xm.device_mesh(source, device.type), [Replicate()], run_check=False
            )
            output = xm.reshard(hidden, target, (Replicate(),)).to_local() @ b
            loss = output.square().mean()
            loss.backward()
            optimizer.step()
            out.append(loss.item())
        return out

    found = losses()
    with torch.device("cpu"):
        wanted = losses()
    torch.testing.assert_close(torch.tensor(found, device="cpu"), torch.tensor(wanted, device="cpu"))
    assert found[-1] < found[0]


def another_group(ranks: list[int] | None = None, **settings: Any) -> dist.ProcessGroup | None:
    """None on a rank that is not in it."""
    options = xm.Options()
    options.inner = dict(backend_of().options.inner)
    for name, value in settings.items():
        setattr(options, name, value)
    group = dist.new_group(ranks, backend=f"cpu:xmesh,{kind()}:xmesh", pg_options=options)
    return group if isinstance(group, dist.ProcessGroup) else None


def staging_is_bounded(rank: int, world_size: int) -> None:
    """Many times the bound is staged, in rounds. (One rank has nothing to stage.)"""
    group = another_group(staging_bytes=64 << 10)
    source, target = meshes(world_size)
    layout = Layout((1024, 1024), torch.float32, source, (Shard(1),), target, (Shard(0),))
    whole = whole_tensor(layout.shape, layout.dtype)
    x = dtensor_of(local_part(whole, layout.src_mesh, layout.src, rank), layout.shape, layout.src_mesh, layout.src)
    y = xm.reshard(x, layout.dst_mesh, layout.dst, group=group)
    assert_same_bytes(y.to_local(), local_part(whole, layout.dst_mesh, layout.dst, rank), "staged")


def lines() -> int:
    """The threads of this process that enqueue calls on devices."""
    return sum(name.read_text().strip() == "xmesh_stream" for name in Path("/proc/self/task").glob("*/comm"))


def several_groups(rank: int, world_size: int) -> None:
    """Calls of three groups share a line, in whatever order a rank makes them. A group's end ends no other's."""
    before = lines()
    groups = [None, another_group(), another_group(list(range(max(1, world_size - 1))))]
    for i, group in enumerate(groups):  # a group's first call waits on the host until all of its ranks have made it
        source, target = meshes(world_size if i < 2 else max(1, world_size - 1))
        if rank in source.ranks:
            xm.reshard(_sharded(_whole(0), source, rank), target, (Replicate(),), group=group)
    own = random.Random(rank)
    placements = (Replicate(), Shard(0), Shard(1))
    for turn in range(6):
        left = {
            i: [(_whole(10 * turn + i), one) for one in placements]
            for i in range(len(groups))
            if i < 2 or rank < world_size - 1
        }
        started = []
        while left:
            i = own.choice(list(left))
            whole, placement = left[i].pop(0)
            if not left[i]:
                del left[i]
            source, target = meshes(world_size if i < 2 else max(1, world_size - 1))
            call = xm.reshard(_sharded(whole, source, rank), target, (placement,), async_op=True, group=groups[i])
            started.append((call, local_part(whole, target, (placement,), rank)))
        own.shuffle(started)
        for (y, work), wanted in started:
            work.wait()
            assert_same_bytes(y.to_local(), wanted, turn)
    assert lines() == max(before, 1)
    source, target = meshes(world_size)
    whole = _whole(0)
    x = _sharded(whole, source, rank)
    keep_busy()
    y, work = xm.reshard(x, target, (Shard(1),), async_op=True)
    dist.destroy_process_group(groups[1])
    work.wait()
    assert_same_bytes(y.to_local(), local_part(whole, target, (Shard(1),), rank), "beside the end of a group")
    if rank < world_size - 1:
        dist.destroy_process_group(groups[2])
    assert lines() == max(before, 1)


CALLS: list[Case] = [
    same_bits_as_on_cpu,
    integers_of_every_kind,
    late_producer_and_early_consumer,
    on_a_stream_of_its_own,
    works,
    into_out,
    gradients,
    a_training_loop,
    several_groups,
    staging_is_bounded,
]

CALLS_OF_CPU: list[Case] = [
    test_reshard.every_dtype,
    test_reshard.many_in_flight,
    test_reshard.into_out,
    test_reshard.strided_sources,
    test_reshard.lists_and_dicts,
    test_reshard_many.order_of_a_dict_does_not_matter,
    test_reshard_many.nested_with_other_entries,
]
"""Those of the tests on cpu that hold on every accelerator; of 4 ranks."""


def each(rank: int, world_size: int, cases: list[Case]) -> None:
    for case in cases:
        case(rank, world_size)
