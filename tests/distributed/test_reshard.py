"""Reshards on real processes against an oracle that cuts with torch.chunk."""

from __future__ import annotations

import copy
import pickle
import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from layouts import (
    DTYPES,
    Layout,
    assert_same_bytes,
    dtensor_of,
    expected_of,
    local_part,
    random_layout,
    source_of,
    whole_tensor,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import torch_xmesh as xm
from torch_xmesh.testing import spawn

STRATEGIES = [
    "auto", "send_recv", "broadcast", "broadcast:naive+naive", "broadcast:size+greedy,seed=3", "striped",
    "local_allgather", "global_allgather", "alpa",
]  # fmt: skip


def random_layouts(rank: int, world_size: int, seed: int, count: int) -> None:
    rng = random.Random(seed)
    for i in range(count):
        layout = random_layout(rng, world_size)
        strategy, as_spec = rng.choice(STRATEGIES), rng.random() < 0.5
        topology = rng.choice([None, xm.Topology(devices_per_host=2)])  # all on one host, or on three by the plan
        source = source_of(layout, as_spec=as_spec)
        y = xm.reshard(source, layout.dst_mesh, layout.dst, strategy=strategy, topology=topology)
        assert y.shape == torch.Size(layout.shape)
        assert y.placements == layout.dst
        assert_same_bytes(y.to_local(), expected_of(layout), (i, strategy, topology, layout))


def test_random_layouts() -> None:
    spawn(random_layouts, 6, 1, 250)


@pytest.mark.soak
@pytest.mark.timeout(700)
@pytest.mark.parametrize("seed", range(2, 12))
def test_more_random_layouts(seed: int) -> None:
    spawn(random_layouts, 6, seed, 1000, timeout=600)


def every_dtype(rank: int, world_size: int) -> None:
    for dtype in DTYPES:
        layout = Layout((7, 6), dtype, xm.Mesh([0, 1]), (Shard(0),), xm.Mesh([2, 3, 0]), (Shard(1),))
        assert_same_bytes(
            xm.reshard(source_of(layout), layout.dst_mesh, layout.dst).to_local(), expected_of(layout), dtype
        )


def many_in_flight(rank: int, world_size: int) -> None:
    rng = random.Random(7)
    layouts = [random_layout(rng, world_size) for _ in range(64)]
    started = [xm.reshard(source_of(layout), layout.dst_mesh, layout.dst, async_op=True) for layout in layouts]
    order = list(range(64))
    random.Random(rank).shuffle(order)
    for i in order:
        y, work = started[i]
        work.wait()
        assert work.is_completed() or y.device.type != "cpu"  # elsewhere it is its stream that waits
        assert_same_bytes(y.to_local(), expected_of(layouts[i]), layouts[i])


def into_out(rank: int, world_size: int) -> None:
    layout = Layout((9, 8), torch.float32, xm.Mesh([0, 1]), (Shard(1),), xm.Mesh([1, 2]), (Shard(0),))
    shape = expected_of(layout).shape
    for local in (torch.zeros(shape), torch.zeros(shape[::-1]).t() if len(shape) == 2 else torch.zeros(shape)):
        out = dtensor_of(local, layout.shape, layout.dst_mesh, layout.dst)
        y = xm.reshard(source_of(layout), layout.dst_mesh, layout.dst, out=out)
        assert y is out
        assert_same_bytes(local, expected_of(layout), "out")


def strided_sources(rank: int, world_size: int) -> None:
    layout = Layout((6, 4, 5), torch.int64, xm.Mesh([0, 1]), (Shard(0),), xm.Mesh([2, 3]), (Shard(2),))
    part = local_part(whole_tensor(layout.shape, layout.dtype), layout.src_mesh, layout.src, rank)
    turned = part.permute(2, 1, 0).contiguous().permute(2, 1, 0) if part.dim() == 3 else part
    assert part.numel() == 0 or not turned.is_contiguous()
    y = xm.reshard(dtensor_of(turned, layout.shape, layout.src_mesh, layout.src), layout.dst_mesh, layout.dst)
    assert_same_bytes(y.to_local(), expected_of(layout), "strided source")


def lists_and_dicts(rank: int, world_size: int) -> None:
    rng = random.Random(3)
    src, dst = xm.Mesh([0, 1]), xm.Mesh([[1, 2], [3, 0]])
    layouts = [
        Layout(
            shape=tuple(rng.choice([1, 4, 6]) for _ in range(2)),
            dtype=rng.choice(DTYPES),
            src_mesh=src,
            src=(Shard(rng.randrange(2)),),
            dst_mesh=dst,
            dst=(Replicate(), Shard(rng.randrange(2))),
        )
        for _ in range(20)
    ]
    ys = xm.reshard_many([source_of(layout) for layout in layouts], dst, [layout.dst for layout in layouts])
    for y, layout in zip(ys, layouts, strict=True):
        assert_same_bytes(y.to_local(), expected_of(layout), layout)
    named, work = xm.reshard_many(
        {str(i): source_of(layout) for i, layout in enumerate(layouts)},
        dst,
        {str(i): layout.dst for i, layout in reversed(list(enumerate(layouts)))},
        async_op=True,
    )
    work.wait()
    for i, layout in enumerate(layouts):
        assert_same_bytes(named[str(i)].to_local(), expected_of(layout), layout)


def floating_partials(rank: int, world_size: int) -> None:
    """Replicas bitwise equal, repeatable, and close to an fp64 reference, for every reduction and strategy."""
    src, dst = xm.Mesh([[0, 1], [2, 3]]), xm.Mesh([1, 2, 0])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for op in ("sum", "avg", "min", "max", "product"):
            parts = [torch.randn(33, 5, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(4)]
            stacked = torch.stack([part.double() for part in parts])
            reference = {
                "sum": stacked.sum(0),
                "avg": stacked.mean(0),
                "min": stacked.amin(0),
                "max": stacked.amax(0),
                "product": stacked.prod(0),
            }[op]
            for strategy in ("send_recv", "broadcast"):
                x = dtensor_of(parts[rank], (33, 5), src, (Partial(op), Partial(op)))
                runs = [xm.reshard(x, dst, (Replicate(),), strategy=strategy).to_local() for _ in range(2)]
                if rank in dst.ranks:
                    torch.testing.assert_close(runs[0], reference.to(dtype))
                gathered = [torch.empty(0, dtype=dtype)] * 4
                dist.all_gather_object(gathered, runs[0])
                for other in (runs[1] if rank in dst.ranks else gathered[0], gathered[1], gathered[2]):
                    assert_same_bytes(other, gathered[0], (dtype, op, strategy))


def through_memory_and_over_tcp(rank: int, world_size: int) -> None:
    """Ranks of one host share memory unless they are told not to; the bytes are the same."""
    layout = Layout((1 << 10, 1 << 10), torch.int64, xm.Mesh([0, 1]), (Shard(0),), xm.Mesh([3, 2]), (Shard(1),))
    for shared_memory in (False, True):
        options = xm.Options()
        options.shared_memory = shared_memory
        group = dist.new_group(backend="xmesh", pg_options=options)
        for _ in range(2):
            y = xm.reshard(source_of(layout), layout.dst_mesh, layout.dst, group=group)
            assert_same_bytes(y.to_local(), expected_of(layout), shared_memory)
        assert ("torch_xmesh-ring" in Path("/proc/self/maps").read_text()) == shared_memory


def test_through_memory_and_over_tcp() -> None:
    spawn(through_memory_and_over_tcp, 4)


def sums_on_the_way(rank: int, world_size: int) -> None:
    """Four hosts contribute, few reduce: contributions are added up from host to host, within the staging bound."""
    options = xm.Options()
    options.staging_bytes = 4 << 20
    group = dist.new_group(backend="xmesh", pg_options=options)
    rows, columns = 384, 512
    topology = xm.Topology(host_of={r: r for r in range(world_size)}, nic_bytes_per_s=10**9, latency_us=1.0)
    src = xm.Mesh([0, 1, 2, 3])
    for dtype, op, ranks, strategy in (
        (torch.int32, "sum", [4], "striped"),
        (torch.int64, "max", [2, 0], "striped:num_chunks=16"),
        (torch.float32, "avg", [4], "auto"),
        (torch.float32, "product", [4, 1], "striped"),
        (torch.bfloat16, "sum", [4], "auto"),
        (torch.float16, "avg", [3], "striped"),
    ):
        dst = xm.Mesh(ranks)
        shape, case = (rows, columns), (dtype, op, ranks, strategy)
        plan = xm.plan_resharding(
            xm.Spec(shape, dtype, src, (Partial(op),)), dst, (Replicate(),), strategy=strategy, topology=topology
        )
        assert "partial_sum" in plan.to_json(), case
        generator = torch.Generator().manual_seed(5)
        parts = [torch.randint(-50, 50, shape, generator=generator) for _ in range(4)]
        parts = [part.to(dtype) if not dtype.is_floating_point else (part / 32).to(dtype) for part in parts]
        stacked = torch.stack([part.double() for part in parts])
        reduced = {"sum": stacked.sum(0), "avg": stacked.mean(0), "max": stacked.amax(0), "product": stacked.prod(0)}[
            op
        ]
        x = dtensor_of(parts[rank] if rank < 4 else torch.empty((0, 0), dtype=dtype), shape, src, (Partial(op),))
        for local in ("contiguous", "transposed"):
            into = torch.zeros(shape if rank in ranks else (0, 0), dtype=dtype)
            if local == "transposed" and rank in ranks:
                into = torch.zeros(shape[::-1], dtype=dtype).t()
            out = dtensor_of(into, shape, dst, (Replicate(),))
            xm.reshard(x, dst, (Replicate(),), strategy=strategy, topology=topology, out=out, group=group)
            if rank in ranks:
                torch.testing.assert_close(into, reduced.to(dtype), msg=lambda text: f"{case}: {text}")  # noqa: B023
            gathered = [torch.empty(0)] * world_size
            dist.all_gather_object(gathered, into.contiguous())
            for replica in ranks:
                assert_same_bytes(gathered[replica], gathered[ranks[0]], case)
    from torch_xmesh.group import group_of

    assert group_of(group).peak_staging_bytes <= options.staging_bytes


def test_sums_on_the_way() -> None:
    spawn(sums_on_the_way, 5)


def device_meshes(rank: int, world_size: int) -> None:
    """Meshes made by torch: init_device_mesh and its slices, an axis of a sub-mesh, stage_meshes."""
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    first, second = xm.stage_meshes(world, "pp")
    assert (first, second) == (xm.Mesh([0, 1]), xm.Mesh([2, 3]))
    whole = torch.arange(24.0).reshape(6, 4)
    x = distribute_tensor(whole, world, [Shard(0), Shard(1)])
    y = xm.reshard(x, DeviceMesh("cpu", torch.tensor([3, 1]), _init_backend=False), [Shard(0)])
    assert_same_bytes(y.to_local(), local_part(whole, xm.Mesh([3, 1]), (Shard(0),), rank), "sub-mesh")
    z = xm.reshard(x, world, [Replicate(), Replicate()])
    assert isinstance(z, DTensor)
    assert torch.equal(z.full_tensor(), whole)
    assert torch.equal((z + 1).full_tensor(), whole + 1)  # type: ignore[attr-defined]


def groups(rank: int, world_size: int) -> None:
    """A group other than the default one, whose group ranks are not the global ranks; a rank of neither mesh."""
    members = [3, 1, 2]
    group = dist.new_group(sorted(members), backend="xmesh")
    layout = Layout((5, 3), torch.float32, xm.Mesh([3]), (Replicate(),), xm.Mesh([1, 2]), (Shard(0),))
    if rank in members:
        y = xm.reshard(source_of(layout), layout.dst_mesh, layout.dst, group=group)
        assert_same_bytes(y.to_local(), expected_of(layout), "sub-group")
    y = xm.reshard(source_of(layout, as_spec=True), layout.dst_mesh, layout.dst)
    assert_same_bytes(y.to_local(), expected_of(layout), "rank of neither mesh")


def plans_by_value(rank: int, world_size: int) -> None:
    layout = Layout((8, 8), torch.float32, xm.Mesh([0, 1]), (Shard(0),), xm.Mesh([2, 3]), (Shard(1),))
    spec = xm.Spec(layout.shape, layout.dtype, layout.src_mesh, layout.src)
    xm.reshard(source_of(layout), layout.dst_mesh, layout.dst)
    plan = xm.plan_resharding(spec, layout.dst_mesh, layout.dst)  # the topology that the group discovered
    plans = [None] * world_size
    dist.all_gather_object(plans, plan.to_json())
    assert len(set(plans)) == 1
    assert pickle.loads(pickle.dumps(plan)) == copy.deepcopy(plan) == plan


def everything(rank: int, world_size: int) -> None:
    for check in (
        every_dtype,
        many_in_flight,
        into_out,
        strided_sources,
        lists_and_dicts,
        floating_partials,
        device_meshes,
        groups,
        plans_by_value,
    ):
        check(rank, world_size)


def test_forms_of_calls() -> None:
    spawn(everything, 4)


def test_cpu_tensors_on_a_group_for_cpu_and_cuda() -> None:
    spawn(every_dtype, 4, backend="cpu:xmesh,cuda:xmesh")
