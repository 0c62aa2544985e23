"""Moves real sharded tensors between real processes on different meshes, and checks every byte.

Run it with 8 processes: ``torchrun --nproc-per-node 8 examples/quickstart.py``, with ``--device cuda`` on GPUs, which
processes share where they are more.
"""

import argparse
import os
import sys
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

import torch_xmesh as xm

Placements = tuple[Placement, ...]


@dataclass(frozen=True)
class Layout:
    """One reshard to show."""

    title: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    src_mesh: xm.Mesh
    src: Placements
    dst_mesh: xm.Mesh
    dst: Placements


FRONT = xm.Mesh([[0, 1], [2, 3]])
BACK = xm.Mesh([[4, 5], [6, 7]])
ROLLOUT = xm.Mesh([[0, 2], [5, 7]])
HOSTS = xm.Topology(devices_per_host=4)  # plan as if every four ranks shared a host
LAYOUTS = [
    Layout(
        title="rows to columns, on disjoint 2x2 meshes",
        shape=(2048, 2048),
        dtype=torch.float32,
        src_mesh=FRONT,
        src=(Shard(0), Shard(0)),
        dst_mesh=BACK,
        dst=(Shard(1), Shard(1)),
    ),
    Layout(
        title="one stage's shards to a replica on every rank of the next",
        shape=(1024, 1024, 2),
        dtype=torch.float32,
        src_mesh=FRONT,
        src=(Shard(0), Replicate()),
        dst_mesh=BACK,
        dst=(Replicate(), Replicate()),
    ),
    Layout(
        title="trainer (8 shards) to rollout (2 shards, replicated)",
        shape=(4001, 1024),
        dtype=torch.bfloat16,
        src_mesh=xm.Mesh(range(8)),
        src=(Shard(0),),
        dst_mesh=ROLLOUT,
        dst=(Replicate(), Shard(1)),
    ),
    Layout(
        title="partial sums to shards, on overlapping meshes",
        shape=(1000, 1000),
        dtype=torch.int64,
        src_mesh=xm.Mesh([0, 1, 2, 3]),
        src=(Partial("sum"),),
        dst_mesh=xm.Mesh([2, 3, 4, 5, 6]),
        dst=(Shard(0),),
    ),
]


def global_tensor(layout: Layout) -> torch.Tensor:
    """The same tensor on every rank: each element tells where it belongs."""
    count = torch.Size(layout.shape).numel()
    return torch.arange(count).remainder(251).reshape(layout.shape).to(layout.dtype)


def local_part(layout: Layout, mesh: xm.Mesh, placements: Placements, whole: torch.Tensor) -> torch.Tensor:
    """What this rank holds of ``whole``, cut by torch's own rule."""
    rank = dist.get_rank()
    if rank not in mesh.ranks:
        return torch.empty(0, dtype=layout.dtype)
    coordinate = (torch.tensor(mesh.ranks).reshape(mesh.shape) == rank).nonzero()[0].tolist()
    part = whole
    for extent, index, placement in zip(mesh.shape, coordinate, placements, strict=True):
        if isinstance(placement, Shard):
            chunks = part.chunk(extent, placement.dim)
            part = chunks[index] if index < len(chunks) else part.narrow(placement.dim, 0, 0)
    return part.contiguous()


def source_of(layout: Layout, whole: torch.Tensor, device: str) -> DTensor | xm.Spec:
    """The source DTensor; a rank outside the source mesh has only the spec."""
    if dist.get_rank() not in layout.src_mesh.ranks:
        return xm.Spec(layout.shape, layout.dtype, xm.Mesh(layout.src_mesh, device_type=device), layout.src)
    mesh = xm.device_mesh(layout.src_mesh, device)
    local = local_part(layout, layout.src_mesh, layout.src, whole).to(device)
    return DTensor.from_local(local, mesh, layout.src, run_check=False, shape=whole.shape, stride=whole.stride())


def show(layout: Layout, runs: int, device: str) -> int:
    """Reshards a few times, prints the plan and a line, and returns the number of wrong elements over all ranks."""
    whole = global_tensor(layout)
    source = source_of(layout, whole, device)
    target = xm.Mesh(layout.dst_mesh, device_type=device)
    has_partial = any(isinstance(placement, Partial) for placement in layout.src)
    expected = whole * len(layout.src_mesh.ranks) if has_partial else whole
    seconds, wrong = [], 0
    for _ in range(runs):
        dist.barrier()
        start = time.perf_counter()
        result = xm.reshard(source, target, layout.dst, topology=HOSTS)
        if device != "cpu":
            torch.accelerator.synchronize()
        dist.barrier()
        seconds.append(time.perf_counter() - start)
        if dist.get_rank() in layout.dst_mesh.ranks:
            mine = result.to_local().cpu()
            want = local_part(layout, layout.dst_mesh, layout.dst, expected)
            wrong += int((mine != want).sum()) if mine.shape == want.shape else want.numel()
    total = torch.tensor([wrong])
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        spec = xm.Spec(layout.shape, layout.dtype, layout.src_mesh, layout.src)
        num_bytes = whole.numel() * whole.element_size()
        best = min(seconds)
        plan = xm.plan_resharding(spec, layout.dst_mesh, layout.dst, topology=HOSTS)
        print(f"\n== {layout.title}\n{plan}")
        print(
            f"{num_bytes / 1e6:.1f} MB in {best * 1e3:.1f} ms, {num_bytes / best / 1e9:.2f} GB/s, #wrong {int(total)}",
            flush=True,
        )
    return int(total)


def use_gpu() -> None:
    """This process's own GPU, or one that it shares: NCCL then has to take each process for a host of its own."""
    rank, num_gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if num_gpus == 0:
        raise SystemExit("--device cuda needs a GPU, here is none")
    if num_gpus < int(os.environ["LOCAL_WORLD_SIZE"]):
        os.environ.setdefault("NCCL_HOSTID", os.environ["RANK"])
    torch.cuda.set_device(rank % num_gpus)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="times to reshard each layout (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    options = parser.parse_args()
    if options.device == "cuda":
        use_gpu()
    dist.init_process_group("cpu:xmesh,cuda:xmesh" if options.device == "cuda" else "xmesh")
    try:
        if dist.get_world_size() != 8:
            raise SystemExit(f"expected 8 processes (torchrun --nproc-per-node 8), got {dist.get_world_size()}")
        wrong = sum(show(layout, options.runs, options.device) for layout in LAYOUTS)
        if dist.get_rank() == 0:
            print(f"\nall layouts: #wrong {wrong}")
        return 1 if wrong else 0
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
