"""What holds where some tensors of a call are on cpu and others on an accelerator, torch's default device.

A case takes (rank, world_size) and any number of ranks, one included.
"""

from __future__ import annotations

import random

import pytest
import torch
from device_cases import SHAPE, STRATEGIES, Case, keep_busy, kind, meshes
from layouts import assert_same_bytes, dtensor_of, local_part, partial_weights, random_layout, whole_tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import torch_xmesh as xm
from torch_xmesh import _C


def on(mesh: xm.Mesh, device: str) -> xm.Mesh:
    return xm.Mesh(mesh, device_type=device)


def random_layouts(rank: int, world_size: int, seed: int, count: int) -> None:
    """From cpu to the device and back, in turns; values differ from one layout to the next."""
    rng = random.Random(seed)
    for i in range(count):
        layout = random_layout(rng, world_size)
        strategy = STRATEGIES[i % len(STRATEGIES)]
        src_kind, dst_kind = ("cpu", kind()) if i % 2 == 0 else (kind(), "cpu")
        with torch.device("cpu"):
            weight, total = partial_weights(layout.src_mesh, layout.src, rank)
            whole = whole_tensor(layout.shape, layout.dtype).flatten().roll(i).reshape(layout.shape)
            part = local_part(whole if weight == 1 else whole * weight, layout.src_mesh, layout.src, rank)
            wanted = local_part(whole if total == 1 else whole * total, layout.dst_mesh, layout.dst, rank)
        x = dtensor_of(part.to(src_kind), layout.shape, on(layout.src_mesh, src_kind), layout.src)
        y = xm.reshard(x, on(layout.dst_mesh, dst_kind), layout.dst, strategy=strategy)
        assert y.device.type == dst_kind
        assert_same_bytes(y.to_local().cpu(), wanted, (i, strategy, layout))


def _whole(turn: int) -> torch.Tensor:
    with torch.device("cpu"):
        return whole_tensor(SHAPE, torch.float32) + turn


def late_producer(rank: int, world_size: int) -> None:
    """The source is made late on the caller's stream, and is its own again after the wait."""
    source, target = meshes(world_size)
    for turn in range(10):
        wanted = _whole(turn)
        made = local_part(wanted, source, (Shard(0),), rank).to(kind())
        local = torch.zeros_like(made)
        torch.accelerator.synchronize()
        keep_busy()
        local.copy_(made)
        y = xm.reshard(dtensor_of(local, SHAPE, source, (Shard(0),)), on(target, "cpu"), (Shard(1),))
        local.fill_(-1)
        assert_same_bytes(y.to_local(), local_part(wanted, target, (Shard(1),), rank), turn)


def target_in_use(rank: int, world_size: int) -> None:
    """What the caller's stream still reads is not overwritten; what it enqueues behind the call sees the result."""
    source, target = meshes(world_size)
    for turn in range(10):
        old = torch.full_like(local_part(_whole(0), target, (Shard(1),), rank), float(turn), device=kind())
        out = dtensor_of(old.clone(), SHAPE, on(target, kind()), (Shard(1),))
        torch.accelerator.synchronize()
        keep_busy()
        before = out.to_local() + 0
        wanted = _whole(turn)
        x = dtensor_of(local_part(wanted, source, (Shard(0),), rank), SHAPE, on(source, "cpu"), (Shard(0),))
        y, work = xm.reshard(x, on(target, kind()), (Shard(1),), out=out, async_op=True)
        work.wait()
        after = y.to_local() + 0
        y.to_local().fill_(-1)
        assert_same_bytes(before.cpu(), old.cpu(), turn)
        assert_same_bytes(after.cpu(), local_part(wanted, target, (Shard(1),), rank), turn)


def gradients(rank: int, world_size: int) -> None:
    """Come back to the kind of device that the source is on; of a sum too."""
    source, target = meshes(world_size)
    whole = _whole(0)
    for src_kind, dst_kind in (("cpu", kind()), (kind(), "cpu")):
        x = dtensor_of(
            local_part(whole, source, (Shard(0),), rank).to(src_kind), SHAPE, on(source, src_kind), (Shard(0),)
        )
        x.requires_grad_()
        weight = local_part(whole.square() + 1, target, (Shard(1),), rank).to(dst_kind)
        for _ in range(2):
            (xm.reshard(x, on(target, dst_kind), (Shard(1),)).to_local() * weight).sum().backward()
        assert isinstance(x.grad, DTensor)
        assert x.grad.device.type == src_kind
        wanted = local_part(2 * (whole.square() + 1), source, (Shard(0),), rank)
        assert_same_bytes(x.grad.to_local().cpu(), wanted, src_kind)
        z = dtensor_of(torch.full((4,), rank + 1.0, device=src_kind), (4,), on(source, src_kind), (Partial("sum"),))
        z.requires_grad_()
        y = xm.reshard(z, on(target, dst_kind), (Replicate(),)).to_local()
        assert torch.equal(y.detach().cpu(), torch.full((4,), world_size * (world_size + 1) / 2, device="cpu"))
        (3 * y).sum().backward()
        assert isinstance(z.grad, DTensor)
        assert torch.equal(z.grad.to_local().cpu(), torch.full((4,), 3.0, device="cpu"))


def state_dicts(rank: int, world_size: int) -> None:
    """An optimizer's state, some of it on cpu: to the same kinds of devices, and all of it to cpu."""
    source, target = meshes(world_size)
    for turn in range(4):
        whole = _whole(turn)
        state = {
            "step": dtensor_of(torch.full((), float(turn), device="cpu"), (), on(source, "cpu"), (Replicate(),)),
            "lr": 0.1,
            "moments": [
                dtensor_of(
                    local_part(whole + i, source, (Shard(0),), rank).to(kind()), SHAPE, on(source, kind()), (Shard(0),)
                )
                for i in range(3)
            ],
        }
        for moments_kind in (kind(), "cpu"):
            there, work = xm.reshard_many(
                state,
                {"step": on(target, "cpu"), "moments": on(target, moments_kind)},
                {"step": [Replicate()], "moments": [Shard(1)]},
                async_op=True,
            )
            work.wait()
            assert there["lr"] == 0.1
            assert there["step"].device.type == "cpu"
            assert there["step"].to_local().item() == turn
            for i, moment in enumerate(there["moments"]):
                assert moment.device.type == moments_kind
                assert_same_bytes(moment.to_local().cpu(), local_part(whole + i, target, (Shard(1),), rank), i)


def works(rank: int, world_size: int) -> None:
    """Several in flight, waited for in another order, beside calls on one kind of device."""
    source, target = meshes(world_size)
    kinds = [("cpu", kind()), (kind(), kind()), (kind(), "cpu"), ("cpu", "cpu")]
    started = []
    for turn in range(8):
        src_kind, dst_kind = kinds[turn % 4]
        local = local_part(_whole(turn), source, (Shard(0),), rank).to(src_kind)
        x = dtensor_of(local, SHAPE, on(source, src_kind), (Shard(0),))
        started.append(xm.reshard(x, on(target, dst_kind), (Replicate(),), async_op=True))
    for turn, (y, work) in reversed(list(enumerate(started))):
        assert work.wait()
        assert_same_bytes(y.to_local().cpu(), local_part(_whole(turn), target, (Replicate(),), rank), turn)
    for _, work in started:
        work.get_future().wait()
        assert work.is_success()


def in_inference_mode(rank: int, world_size: int) -> None:
    """Tensors that may be written in that mode only; and back to ones that it did not make."""
    source, target = meshes(world_size)
    wanted = _whole(3)
    with torch.inference_mode():
        x = dtensor_of(local_part(wanted, source, (Shard(0),), rank).to(kind()), SHAPE, on(source, kind()), (Shard(0),))
        there = xm.reshard(x, on(target, "cpu"), (Shard(1),))
        back = xm.reshard(there, on(source, kind()), (Shard(0),))
        assert_same_bytes(there.to_local(), local_part(wanted, target, (Shard(1),), rank), "to cpu")
        assert_same_bytes(back.to_local().cpu(), local_part(wanted, source, (Shard(0),), rank), "and back")
    out = dtensor_of(torch.zeros_like(back.to_local()), SHAPE, on(source, kind()), (Shard(0),))
    with torch.inference_mode():
        xm.reshard(there, on(source, kind()), (Shard(0),), out=out)
    assert_same_bytes(out.to_local().cpu(), local_part(wanted, source, (Shard(0),), rank), "into out")


def without_memory(rank: int, world_size: int) -> None:
    """A rank that cannot have the result's memory tells the others; the next call moves the next bytes."""
    source, target = meshes(world_size)
    for turn in range(2):
        wanted = _whole(turn)
        local = local_part(wanted, source, (Shard(0),), rank).to(kind())
        x = dtensor_of(local, SHAPE, on(source, kind()), (Shard(0),))
        with pytest.MonkeyPatch.context() as patched:
            if rank == world_size - 1:
                patched.setattr(_C.ResultMaker, "make", _no_memory)
            with pytest.raises((RuntimeError, ValueError), match="there is no memory"):
                xm.reshard(x, on(target, "cpu"), (Shard(1),))
        y = xm.reshard(x, on(target, "cpu"), (Shard(1),))
        assert_same_bytes(y.to_local(), local_part(wanted, target, (Shard(1),), rank), turn)


def _no_memory(*args: object, **kwargs: object) -> torch.Tensor:
    raise torch.OutOfMemoryError("there is no memory")


CASES: list[Case] = [late_producer, target_in_use, gradients, state_dicts, works, in_inference_mode, without_memory]
