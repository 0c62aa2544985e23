"""Reshards of tensors on an accelerator, the emulated one: the same bytes as on cpu, behind the caller's streams."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import torch_xmesh as xm
from torch_xmesh import backend
from torch_xmesh.spec import device_mesh
from torch_xmesh.testing import spawn

pytestmark = pytest.mark.timeout(900)  # the first test builds the device
SOURCE, TARGET = xm.Mesh([0, 1], device_type="emu"), xm.Mesh([2, 3], device_type="emu")
SHAPE = (64, 48)
STRATEGIES = ["send_recv", "broadcast:collective=1", "striped"]


def on_ranks(body: Callable[[int], None]) -> None:
    spawn(_run, 4, body, backend=None, timeout=120)


def _run(rank: int, world_size: int, body: Callable[[int], None]) -> None:
    import emu_device  # noqa: F401  # registers the backend

    options = backend.Options()
    options.inner = {"emu": "emunccl"}
    dist.init_process_group("cpu:xmesh,emu:xmesh", pg_options=options)
    body(rank)
    dist.destroy_process_group()


def _whole(turn: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(SHAPE[0] * SHAPE[1]).reshape(SHAPE) % 97 + turn).to(dtype)


def _source(rank: int, local: torch.Tensor | None, dtype: torch.dtype, placement: Any) -> DTensor | xm.Spec:
    if local is None:
        return xm.Spec(SHAPE, dtype, SOURCE, [placement])
    return DTensor.from_local(local, device_mesh(SOURCE, "emu"), [placement], run_check=False)


def _expect(y: DTensor, rank: int, placement: Any, whole: torch.Tensor) -> None:
    assert y.device.type == "emu"
    if rank in TARGET.ranks:
        index = TARGET.ranks.index(rank)
        wanted = whole if placement == Replicate() else whole.chunk(2, placement.dim)[index]
        assert torch.equal(y.to_local().cpu(), wanted)


def _every_strategy(rank: int) -> None:
    for turn, strategy in enumerate(["auto", "send_recv", "broadcast", "striped", "local_allgather", "alpa"]):
        for src in (Shard(0), Shard(1), Replicate()):
            for dst in (Shard(0), Shard(1), Replicate()):
                whole = _whole(turn)
                local = None
                if rank in SOURCE.ranks:
                    local = (whole.chunk(2, src.dim)[rank] if isinstance(src, Shard) else whole).to("emu")
                x = _source(rank, local, torch.float32, src)
                _expect(xm.reshard(x, TARGET, [dst], strategy=strategy), rank, dst, whole)


def _sums(rank: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        local = _whole(rank, dtype).to("emu") if rank in SOURCE.ranks else None
        y = xm.reshard(_source(rank, local, dtype, Partial("sum")), TARGET, [Shard(0)])
        _expect(y, rank, Shard(0), _whole(0, dtype) + _whole(1, dtype))


def _gated(rank: int) -> None:
    """The producer is stopped while the reshard is called; nothing waits on the host, and what it makes arrives."""
    import emu_device

    for turn in range(10):
        local = torch.zeros(SHAPE, device="emu").chunk(2)[0].contiguous() if rank in SOURCE.ranks else None
        torch.accelerator.synchronize()
        gate = emu_device.hold()
        if local is not None:
            local.fill_(100 * turn + rank)
        y = xm.reshard(_source(rank, local, torch.float32, Shard(0)), TARGET, [Replicate()])
        seen = y.to_local() + 0
        gate.release()
        if rank in TARGET.ranks:
            halves = [torch.full((SHAPE[0] // 2, SHAPE[1]), 100.0 * turn + source) for source in SOURCE.ranks]
            assert torch.equal(seen.cpu(), torch.cat(halves))


def _circles(rank: int) -> None:
    """A collective broadcast has a communicator for each sender with its receivers, made once."""
    import emu_device

    local = _whole(0).chunk(2)[rank].to("emu") if rank in SOURCE.ranks else None
    for strategy, number in (("broadcast", 1), ("broadcast:collective=1", 2 if rank in SOURCE.ranks else 3)):
        for _ in range(3):
            y = xm.reshard(_source(rank, local, torch.float32, Shard(0)), TARGET, [Replicate()], strategy=strategy)
            _expect(y, rank, Replicate(), _whole(0))
            assert emu_device.communicators() == number
            assert xm.about().device_communicators == str(number)


def _many_communicators(rank: int) -> None:
    """More sets of ranks than a line keeps communicators for, in flight together; each again after it was given up."""
    meshes = [xm.Mesh(list(ranks), device_type="emu") for ranks in itertools.permutations(range(4), 2)]
    meshes += [xm.Mesh(list(ranks), device_type="emu") for ranks in itertools.permutations(range(4), 3)]
    for turn in range(3):
        whole = _whole(turn)
        started = []
        for mesh in meshes:
            source = xm.Mesh([mesh.ranks[0]], device_type="emu")
            x: Any = xm.Spec(SHAPE, torch.float32, source, [Replicate()])
            if rank == mesh.ranks[0]:
                x = DTensor.from_local(whole.to("emu"), device_mesh(source, "emu"), [Replicate()], run_check=False)
            if rank in mesh.ranks:
                started.append((mesh, *xm.reshard(x, mesh, [Shard(0)], async_op=True, strategy=STRATEGIES[turn])))
        for mesh, y, work in started:
            work.wait()
            wanted = whole.chunk(len(mesh.ranks))[mesh.ranks.index(rank)]
            assert torch.equal(y.to_local().cpu(), wanted)


def _refused_in_a_capture(rank: int) -> None:
    """As in a CUDA graph's; the next call goes on."""
    whole = _whole(0)
    x = _source(rank, whole.chunk(2)[rank].to("emu") if rank in SOURCE.ranks else None, torch.float32, Shard(0))
    module = torch.get_device_module("emu")
    module.is_current_stream_capturing = lambda: True
    with pytest.raises(NotImplementedError, match="cannot be captured in a graph"):
        xm.reshard(x, TARGET, [Shard(0)])
    del module.is_current_stream_capturing
    _expect(xm.reshard(x, TARGET, [Shard(0)]), rank, Shard(0), whole)


def _options_of_later_groups(rank: int) -> None:
    """They carry what the default group does, unless their own options name inner backends."""
    x = _source(rank, _whole(0).chunk(2)[rank].to("emu") if rank in SOURCE.ranks else None, torch.float32, Shard(0))
    xm.reshard(x, TARGET, [Shard(0)], group=dist.new_group(backend="cpu:xmesh,emu:xmesh"))
    own = xm.Options()
    own.inner = {"cuda": "nccl"}
    group = dist.new_group(backend="cpu:xmesh,emu:xmesh", pg_options=own)
    with pytest.raises(NotImplementedError, match="unless Options.inner names"):
        xm.reshard(x, TARGET, [Shard(0)], group=group)


@pytest.mark.parametrize(
    "body",
    [
        _every_strategy,
        _sums,
        _gated,
        _circles,
        _many_communicators,
        _refused_in_a_capture,
        _options_of_later_groups,
    ],
)
def test_reshard(body: Callable[[int], None]) -> None:
    on_ranks(body)
