"""Every collective and point-to-point form of c10d as a small function, for comparing two backends on real processes.

A case takes (rank, world_size, group) and returns tensors; it leaves every tensor that it was given in what it returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

Case = Callable[[int, int, Any], Any]
CASES: dict[str, Case] = {}
DTYPES = (torch.float32, torch.float64, torch.float16, torch.int8, torch.uint8, torch.int32, torch.int64)


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def _root(rank: int) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = rank, 0
    return options


def values(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Different numbers on every rank, small enough for every dtype."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 5, shape, generator=generator).to(dtype) + rank % 3


@case
def all_reduce_every_dtype_and_op(rank: int, size: int, group: Any) -> Any:
    ops = (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX)
    tensors = [values(rank, 3, 5, dtype=dtype) for dtype in DTYPES for _ in ops]
    for index, tensor in enumerate(tensors):
        dist.all_reduce(tensor, ops[index % len(ops)], group=group)
    return tensors


@case
def all_reduce_bitwise(rank: int, size: int, group: Any) -> Any:
    tensor = values(rank, 7, dtype=torch.int32)
    dist.all_reduce(tensor, dist.ReduceOp.BXOR, group=group)
    return tensor


@case
def all_reduce_avg(rank: int, size: int, group: Any) -> Any:
    tensor = values(rank, 7)
    dist.all_reduce(tensor, dist.ReduceOp.AVG, group=group)
    return tensor


@case
def all_reduce_bfloat16_and_complex(rank: int, size: int, group: Any) -> Any:
    tensors = [values(rank, 9, dtype=torch.bfloat16), values(rank, 9, dtype=torch.complex64)]
    for tensor in tensors:
        dist.all_reduce(tensor, group=group)
    return tensors


@case
def all_reduce_async_with_future(rank: int, size: int, group: Any) -> Any:
    tensors = [values(rank + 10 * i, 1000) for i in range(4)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    doubled = [work.get_future().then(lambda future: future.value()[0] * 2) for work in works]
    for work in works:
        assert work.wait()
        assert work.is_completed()
    return [tensors, [future.wait() for future in doubled]]


@case
def all_reduce_empty_and_large(rank: int, size: int, group: Any) -> Any:
    tensors = [torch.empty(0), values(rank, 1 << 18), values(rank, 64, 64).t()]
    for tensor in tensors:
        dist.all_reduce(tensor, group=group)
    return tensors


@case
def all_reduce_sparse(rank: int, size: int, group: Any) -> Any:
    tensor = torch.sparse_coo_tensor(torch.tensor([[rank, 3]]), torch.tensor([1.0, 2.0]), (8,))
    dist.all_reduce(tensor, group=group)
    return tensor.to_dense()


@case
def all_reduce_coalesced(rank: int, size: int, group: Any) -> Any:
    tensors = [values(rank, 4), values(rank, 2, 3)]
    dist.all_reduce_coalesced(tensors, group=group)
    return tensors


@case
def reduce_to_each_root(rank: int, size: int, group: Any) -> Any:
    tensors = [values(rank, 6) for _ in range(size)]
    for root, tensor in enumerate(tensors):
        dist.reduce(tensor, dst=root, group=group)
    return tensors[rank]


@case
def broadcast_from_each_root(rank: int, size: int, group: Any) -> Any:
    tensors = [values(rank, 6) for _ in range(size)]
    for root, tensor in enumerate(tensors):
        dist.broadcast(tensor, src=root, group=group)
    return tensors


@case
def all_gather(rank: int, size: int, group: Any) -> Any:
    out = [torch.zeros(2, 3) for _ in range(size)]
    dist.all_gather(out, values(rank, 2, 3), group=group)
    return out


@case
def all_gather_uneven(rank: int, size: int, group: Any) -> Any:
    out = [torch.zeros(r + 1) for r in range(size)]
    dist.all_gather(out, values(rank, rank + 1), group=group)
    return out


@case
def all_gather_into_tensor(rank: int, size: int, group: Any) -> Any:
    out = torch.zeros(size * 4, 3)
    dist.all_gather_into_tensor(out, values(rank, 4, 3), group=group)
    return out


@case
def all_gather_coalesced(rank: int, size: int, group: Any) -> Any:
    out = [[torch.zeros(2), torch.zeros(3)] for _ in range(size)]
    dist.all_gather_coalesced(out, [values(rank, 2), values(rank, 3)], group=group)
    return out


@case
def gather_to_each_root(rank: int, size: int, group: Any) -> Any:
    found = []
    for root in range(size):
        out = [torch.zeros(5) for _ in range(size)] if rank == root else None
        dist.gather(values(rank, 5), out, dst=root, group=group)
        found.append(out)
    return found[rank]


@case
def gather_into_tensor(rank: int, size: int, group: Any) -> Any:
    if not hasattr(dist, "gather_into_tensor"):
        return None
    out = torch.zeros(size * 2) if rank == 0 else None
    dist.gather_into_tensor(values(rank, 2), out, dst=0, group=group)
    return out


@case
def scatter_from_each_root(rank: int, size: int, group: Any) -> Any:
    out = [torch.zeros(5) for _ in range(size)]
    for root in range(size):
        parts = [values(root + 7 * r, 5) for r in range(size)] if rank == root else None
        dist.scatter(out[root], parts, src=root, group=group)
    return out


@case
def reduce_scatter(rank: int, size: int, group: Any) -> Any:
    out = torch.zeros(4)
    dist.reduce_scatter(out, [values(rank + r, 4) for r in range(size)], group=group)
    return out


@case
def reduce_scatter_tensor(rank: int, size: int, group: Any) -> Any:
    out = torch.zeros(4, 2)
    dist.reduce_scatter_tensor(out, values(rank, 4 * size, 2), group=group)
    return out


@case
def all_to_all_single(rank: int, size: int, group: Any) -> Any:
    out = torch.zeros(size * 3)
    dist.all_to_all_single(out, values(rank, size * 3), group=group)
    return out


@case
def all_to_all_single_uneven(rank: int, size: int, group: Any) -> Any:
    out_splits, in_splits = [rank + 1] * size, [r + 1 for r in range(size)]
    out = torch.zeros(sum(out_splits), 2)
    dist.all_to_all_single(out, values(rank, sum(in_splits), 2), out_splits, in_splits, group=group)
    return out


@case
def all_to_all(rank: int, size: int, group: Any) -> Any:
    out = [torch.zeros(2) for _ in range(size)]
    dist.all_to_all(out, [values(rank + r, 2) for r in range(size)], group=group)
    return out


@case
def barriers(rank: int, size: int, group: Any) -> Any:
    dist.barrier(group=group)
    work = dist.barrier(group=group, async_op=True)
    assert work is not None
    work.wait()
    return []


@case
def send_recv_with_tags(rank: int, size: int, group: Any) -> Any:
    to, source = (rank + 1) % size, (rank - 1) % size
    sends = [dist.isend(values(rank + tag, 10), to, group=group, tag=tag) for tag in (3, 1, 2)]
    out = [torch.zeros(10) for _ in range(3)]
    for tag in (1, 2, 3):
        dist.recv(out[tag - 1], source, group=group, tag=tag)
    for send in sends:
        assert send is not None
        send.wait()
    return out


@case
def recv_from_any_source(rank: int, size: int, group: Any) -> Any:
    if rank != 0:
        dist.send(values(rank, 4), 0, group=group, tag=5)
        return None
    found = {}
    for _ in range(size - 1):
        tensor = torch.zeros(4)
        found[dist.recv(tensor, group=group, tag=5)] = tensor
    return [found[r] for r in sorted(found)]


@case
def batched_point_to_point(rank: int, size: int, group: Any) -> Any:
    out = [torch.zeros(8) for _ in range(size)]
    others = [r for r in range(size) if r != rank]
    ops = [dist.P2POp(dist.isend, values(rank + 3 * r, 8), r, group) for r in others]
    ops += [dist.P2POp(dist.irecv, out[r], r, group) for r in others]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return out


@case
def objects(rank: int, size: int, group: Any) -> Any:
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, {"rank": rank}, group=group)
    told: list[Any] = [("from", rank), rank]
    dist.broadcast_object_list(told, src=1, group=group)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [f"for {r}" for r in range(size)] if rank == 0 else None, src=0, group=group)
    gathered: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(rank**2, gathered, dst=0, group=group)
    return [everyone, told, mine, gathered]


@case
def coalescing_manager(rank: int, size: int, group: Any) -> Any:
    tensors = [values(rank, 4), values(rank, 3)]
    with dist._coalescing_manager(group=group, device=torch.device("cpu")):
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    return tensors


@case
def coalesced_tensor_forms(rank: int, size: int, group: Any) -> Any:
    gathered = [torch.zeros(size * 2), torch.zeros(size * 3)]
    group.allgather_into_tensor_coalesced(gathered, [values(rank, 2), values(rank, 3)]).wait()
    reduced = [torch.zeros(2), torch.zeros(3)]
    group.reduce_scatter_tensor_coalesced(reduced, [values(rank, 2 * size), values(rank, 3 * size)]).wait()
    return [gathered, reduced]


@case
def wrong_sizes_are_refused(rank: int, size: int, group: Any) -> Any:
    dist.all_gather_into_tensor(torch.zeros(size * 4 + 1), values(rank, 4), group=group)
    return None


@case
def wrong_ranks_are_refused(rank: int, size: int, group: Any) -> Any:
    group.broadcast([values(rank, 4)], _root(size + 3)).wait()
    return None


@case
def monitored_barrier(rank: int, size: int, group: Any) -> Any:
    group._get_backend(torch.device("cpu")).monitored_barrier()
    return []
