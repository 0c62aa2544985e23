"""The cases of reshards on cpu, on the emulated accelerator: the same oracle, and what cpu gives."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import test_reshard
import test_reshard_autograd
import test_reshard_many
import torch
from device_ranks import on_device
from layouts import (
    Layout,
    assert_same_bytes,
    dtensor_of,
    expected_of,
    local_part,
    partial_weights,
    random_layout,
    whole_tensor,
)
from torch.distributed.tensor import Partial, Replicate, Shard

import torch_xmesh as xm

pytestmark = pytest.mark.timeout(900)  # the first test builds the device
Case = Callable[[int, int], None]
STRATEGIES = [*test_reshard.STRATEGIES, xm.Broadcast(collective=True), "broadcast:num_chunks=3,collective=1"]


def random_layouts(rank: int, world_size: int, seed: int, count: int) -> None:
    """Values differ from one layout to the next, and every stream is late at random."""
    import emu_device

    emu_device.delays(0.3, 300, seed + rank)
    rng = random.Random(seed)
    for i in range(count):
        layout = random_layout(rng, world_size)
        strategy = STRATEGIES[i % len(STRATEGIES)]
        topology = rng.choice([None, xm.Topology(devices_per_host=2)])
        with torch.device("cpu"):
            weight, total = partial_weights(layout.src_mesh, layout.src, rank)
            whole = whole_tensor(layout.shape, layout.dtype).flatten().roll(i).reshape(layout.shape)
            part = local_part(whole if weight == 1 else whole * weight, layout.src_mesh, layout.src, rank)
            wanted = local_part(whole if total == 1 else whole * total, layout.dst_mesh, layout.dst, rank)
        x = dtensor_of(part.to("emu"), layout.shape, layout.src_mesh, layout.src)
        y = xm.reshard(x, layout.dst_mesh, layout.dst, strategy=strategy, topology=topology)
        assert y.device.type == "emu"
        assert_same_bytes(y.to_local().cpu(), wanted, (i, strategy, topology, layout))


def same_bits_as_on_cpu(rank: int, world_size: int) -> None:
    """Floating point sums of several contributions, where the order of the additions shows."""
    src, dst = xm.Mesh([[0, 1], [2, 3]]), xm.Mesh([1, 2, 0])
    topology = xm.Topology(host_of={r: r for r in range(world_size)}, nic_bytes_per_s=10**9, latency_us=1.0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.complex64):
        for op in ("sum", "avg", "product") if dtype.is_complex else ("sum", "avg", "min", "max", "product"):
            for placement in (Replicate(), Shard(0)):
                for strategy in ("send_recv", "broadcast", "striped", xm.Broadcast(collective=True)):
                    with torch.device("cpu"):
                        generator = torch.Generator().manual_seed(rank)
                        part = torch.randn(33, 5, generator=generator).to(dtype)
                        x = dtensor_of(part, (33, 5), src, (Partial(op), Partial(op)))
                        wanted = xm.reshard(x, dst, (placement,), strategy=strategy, topology=topology).to_local()
                    x = dtensor_of(part.to("emu"), (33, 5), src, (Partial(op), Partial(op)))
                    y = xm.reshard(x, dst, (placement,), strategy=strategy, topology=topology)
                    assert_same_bytes(y.to_local().cpu(), wanted, (dtype, op, placement, strategy))


def integers_of_every_kind(rank: int, world_size: int) -> None:
    src, dst = xm.Mesh([0, 1, 2]), xm.Mesh([3, 0])
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32):
        for op in ("sum", "min", "max", "product"):
            with torch.device("cpu"):
                generator = torch.Generator().manual_seed(rank)
                part = torch.randint(-(1 << 40), 1 << 40, (33, 5), generator=generator).to(dtype)
                x = dtensor_of(part, (33, 5), src, (Partial(op),))
                wanted = xm.reshard(x, dst, (Shard(0),)).to_local()
            y = xm.reshard(dtensor_of(part.to("emu"), (33, 5), src, (Partial(op),)), dst, (Shard(0),))
            assert_same_bytes(y.to_local().cpu(), wanted, (dtype, op))


def staging_is_bounded(rank: int, world_size: int) -> None:
    """Sixteen times the bound is staged, in rounds."""
    options = xm.Options()
    options.inner = {"emu": "emunccl"}
    options.staging_bytes = 64 << 10
    group = torch.distributed.new_group(backend="cpu:xmesh,emu:xmesh", pg_options=options)
    layout = Layout((512, 512), torch.float32, xm.Mesh([0, 1]), (Shard(1),), xm.Mesh([2, 3]), (Shard(0),))
    whole = whole_tensor(layout.shape, layout.dtype)
    x = dtensor_of(local_part(whole, layout.src_mesh, layout.src, rank), layout.shape, layout.src_mesh, layout.src)
    y = xm.reshard(x, layout.dst_mesh, layout.dst, group=group)
    assert_same_bytes(y.to_local(), expected_of(layout), "staged")


def _each(rank: int, world_size: int, cases: list[Case]) -> None:
    for case in cases:
        case(rank, world_size)


@pytest.mark.parametrize(("world_size", "count"), [(4, 200), (2, 50), (3, 50)])
def test_random_layouts(world_size: int, count: int) -> None:
    on_device(random_layouts, world_size, 1, count)


def test_reductions() -> None:
    on_device(_each, 4, [same_bits_as_on_cpu, integers_of_every_kind, staging_is_bounded])


def test_calls() -> None:
    cases = [
        test_reshard.every_dtype,
        test_reshard.many_in_flight,
        test_reshard.into_out,
        test_reshard.strided_sources,
        test_reshard.lists_and_dicts,
        test_reshard_many.order_of_a_dict_does_not_matter,
        test_reshard_many.nested_with_other_entries,
    ]
    on_device(_each, 4, cases)


def test_gradients() -> None:
    on_device(test_reshard_autograd.everything, 6)
