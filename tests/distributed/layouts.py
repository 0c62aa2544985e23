"""Random layouts, and what each rank must hold of them, cut with torch.chunk: an oracle without the library's code.

Tensors are on torch's default device.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import torch_xmesh as xm
from torch_xmesh.spec import wrap_local

Placements = tuple[Placement, ...]

DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.uint8, torch.bool,
    torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip
REDUCIBLE = [torch.int64, torch.int32, torch.float32]


@dataclass(frozen=True)
class Layout:
    """One reshard."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    src_mesh: xm.Mesh
    src: Placements
    dst_mesh: xm.Mesh
    dst: Placements


def random_mesh(rng: random.Random, world_size: int) -> xm.Mesh:
    shapes = [(1,), (2,), (3,), (4,), (2, 2), (1, 3), (3, 2), (2, 1, 2), (5,), (6,)]
    shape = rng.choice([shape for shape in shapes if math.prod(shape) <= world_size])
    return xm.Mesh(torch.tensor(rng.sample(range(world_size), math.prod(shape))).reshape(shape))


def random_placements(rng: random.Random, mesh: xm.Mesh, num_dims: int, with_partial: bool) -> Placements:
    choices: list[Placement] = [Replicate()]
    choices += [Shard(dim) for dim in range(num_dims)] * 2
    choices += [_StridedShard(dim, split_factor=rng.choice([2, 3])) for dim in range(num_dims)]
    if with_partial:
        choices.append(Partial("sum"))
    return tuple(rng.choice(choices) for _ in mesh.shape)


def random_layout(rng: random.Random, world_size: int) -> Layout:
    num_dims = rng.choice([0, 1, 1, 2, 2, 2, 3, 4])
    shape = tuple(rng.choice([0, 1, 2, 3, 5, 7, 8, 13]) for _ in range(num_dims))
    with_partial = rng.random() < 0.25
    src_mesh, dst_mesh = random_mesh(rng, world_size), random_mesh(rng, world_size)
    return Layout(
        shape,
        rng.choice(REDUCIBLE if with_partial else DTYPES),
        src_mesh,
        random_placements(rng, src_mesh, num_dims, with_partial),
        dst_mesh,
        random_placements(rng, dst_mesh, num_dims, with_partial=False),
    )


def whole_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Every element tells where it belongs, as far as the dtype can."""
    values = torch.arange(torch.Size(shape).numel()).reshape(shape)
    return (values % 2 == 0) if dtype == torch.bool else (values % 113 + 1).to(torch.float32).to(dtype)


def coordinate_of(mesh: xm.Mesh, rank: int) -> list[int] | None:
    if rank not in mesh.ranks:
        return None
    return (torch.tensor(mesh.ranks).reshape(mesh.shape) == rank).nonzero()[0].tolist()


def chunk_of(part: torch.Tensor, extent: int, index: int, dim: int) -> torch.Tensor:
    chunks = part.chunk(extent, dim) if part.shape[dim] > 0 else ()
    return chunks[index] if index < len(chunks) else part.narrow(dim, 0, 0)


def local_part(whole: torch.Tensor, mesh: xm.Mesh, placements: Placements, rank: int) -> torch.Tensor:
    """What ``rank`` holds of ``whole`` (Partial counted as Replicate); empty outside the mesh."""
    coordinate = coordinate_of(mesh, rank)
    if coordinate is None:
        return whole.new_empty([0] * max(whole.dim(), 1))
    part = whole
    for extent, index, placement in zip(mesh.shape, coordinate, placements, strict=True):
        if isinstance(placement, _StridedShard):
            outer = [chunk_of(part, placement.split_factor, i, placement.dim) for i in range(placement.split_factor)]
            part = torch.cat([chunk_of(piece, extent, index, placement.dim) for piece in outer], placement.dim)
        elif isinstance(placement, Shard):
            part = chunk_of(part, extent, index, placement.dim)
    return part.contiguous()


def partial_weights(mesh: xm.Mesh, placements: Placements, rank: int) -> tuple[int, int]:
    """(this rank's weight, the sum of all weights): a contribution is the whole tensor times the weight."""
    coordinate = coordinate_of(mesh, rank) or [0] * len(mesh.shape)
    index, count = 0, 1
    for extent, place, placement in zip(mesh.shape, coordinate, placements, strict=True):
        if isinstance(placement, Partial):
            index, count = index * extent + place, count * extent
    return (index + 1, count * (count + 1) // 2) if count > 1 else (1, 1)


def dtensor_of(local: torch.Tensor, shape: tuple[int, ...], mesh: xm.Mesh, placements: Placements) -> DTensor:
    """A DTensor around a local tensor, without communication. (DTensor.from_local takes a scalar's shape for none.)"""
    return wrap_local(local, torch.Size(shape), xm.device_mesh(mesh, local.device.type), placements)


def source_of(layout: Layout, *, as_spec: bool = False) -> Any:
    """This rank's source: a DTensor, or outside the mesh (if wanted) a Spec."""
    rank = dist.get_rank()
    if as_spec and rank not in layout.src_mesh.ranks:
        mesh = xm.Mesh(layout.src_mesh, device_type=torch.get_default_device().type)
        return xm.Spec(layout.shape, layout.dtype, mesh, layout.src)
    weight, _ = partial_weights(layout.src_mesh, layout.src, rank)
    whole = whole_tensor(layout.shape, layout.dtype)
    local = local_part(whole if weight == 1 else whole * weight, layout.src_mesh, layout.src, rank)
    return dtensor_of(local, layout.shape, layout.src_mesh, layout.src)


def expected_of(layout: Layout) -> torch.Tensor:
    """This rank's part of the result."""
    _, total = partial_weights(layout.src_mesh, layout.src, dist.get_rank())
    whole = whole_tensor(layout.shape, layout.dtype)
    return local_part(whole if total == 1 else whole * total, layout.dst_mesh, layout.dst, dist.get_rank())


def assert_same_bytes(actual: torch.Tensor, expected: torch.Tensor, what: object) -> None:
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, expected {expected.shape}"
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype}, expected {expected.dtype}"
    left, right = actual.contiguous().reshape(-1).view(torch.uint8), expected.contiguous().reshape(-1).view(torch.uint8)
    assert torch.equal(left, right), f"{what}: {int((left != right).sum())} wrong bytes"
