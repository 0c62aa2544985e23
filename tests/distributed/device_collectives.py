"""Collectives and point-to-point calls on the accelerator that is torch's default device fill what they fill on cpu."""

from __future__ import annotations

import torch
import torch.distributed as dist
from device_cases import kind
from layouts import assert_same_bytes


def _values(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Whole numbers, whose sums are exact in every dtype and every order."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 5, shape, generator=generator, device="cpu").to(dtype)


def _all_reduce(rank: int, size: int, device: str) -> list[torch.Tensor]:
    out = []
    for dtype in (torch.float32, torch.float64, torch.float16, torch.int32, torch.int64, torch.uint8):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
            out.append(_values(rank, 3, 5, dtype=dtype).to(device))
            dist.all_reduce(out[-1], op)
    return out


def _all_reduce_async(rank: int, size: int, device: str) -> list[torch.Tensor]:
    out = [_values(rank + 10 * i, 1000).to(device) for i in range(4)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in out]
    for work in works:
        assert work is not None
        work.wait()
    return out


def _all_gather_into_tensor(rank: int, size: int, device: str) -> list[torch.Tensor]:
    out = torch.zeros(4 * size, 3, device=device)
    dist.all_gather_into_tensor(out, _values(rank, 4, 3).to(device))
    return [out]


def _reduce_scatter_tensor(rank: int, size: int, device: str) -> list[torch.Tensor]:
    out = torch.zeros(4, 3, device=device)
    dist.reduce_scatter_tensor(out, _values(rank, 4 * size, 3).to(device))
    return [out]


def _broadcast(rank: int, size: int, device: str) -> list[torch.Tensor]:
    out = [_values(rank, 6).to(device) for _ in range(size)]
    for root, tensor in enumerate(out):
        dist.broadcast(tensor, src=root)
    return out


def _barrier(rank: int, size: int, device: str) -> list[torch.Tensor]:
    dist.barrier()
    return []


def _send_recv(rank: int, size: int, device: str) -> list[torch.Tensor]:
    """Ranks 0 and 1, 2 and 3, ...: there and back."""
    out = torch.zeros(10, device=device)
    peer = rank ^ 1
    if peer < size:
        if rank < peer:
            dist.send(_values(rank, 10).to(device), peer)
            dist.recv(out, peer)
        else:
            dist.recv(out, peer)
            dist.send(_values(rank, 10).to(device), peer)
    return [out]


def _batch_isend_irecv(rank: int, size: int, device: str) -> list[torch.Tensor]:
    out = [torch.zeros(8, device=device) for _ in range(size)]
    others = [other for other in range(size) if other != rank]
    sends = [dist.P2POp(dist.isend, _values(rank + 3 * other, 8).to(device), other) for other in others]
    receives = [dist.P2POp(dist.irecv, out[other], other) for other in others]
    for work in dist.batch_isend_irecv(sends + receives) if others else []:
        work.wait()
    return out


def collectives(rank: int, world_size: int) -> None:
    for call in (
        _all_reduce,
        _all_reduce_async,
        _all_gather_into_tensor,
        *([] if kind() == "emu" else [_reduce_scatter_tensor]),  # emunccl has none
        _broadcast,
        _barrier,
        _send_recv,
        _batch_isend_irecv,
    ):
        wanted, found = call(rank, world_size, "cpu"), call(rank, world_size, kind())
        assert len(wanted) == len(found)
        for left, right in zip(found, wanted, strict=True):
            assert left.device.type == kind()
            assert_same_bytes(left.cpu(), right, call.__name__)
