"""Maps made at random against plain torch operations on whole tensors, bit for bit, on every rank of both sides."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_xmesh.weight_sync import Catalog, Expression, Manifest, apply_map, concat, resolve, stack, take

Pair = tuple[Expression, torch.Tensor]  # an expression, and what it is
MESHES = [(1,), (2,), (3,), (2, 2), (2, 3)]


@pytest.fixture(scope="module", autouse=True)
def group_of_nobody() -> Iterator[None]:
    """What DTensors ask for; nothing is ever sent."""
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield
    dist.destroy_process_group()


class RandomMap:
    """Sources, and expressions of a wanted shape, made from the outermost operation inwards."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.sources: dict[str, torch.Tensor] = {}

    def integer(self, low: int, high: int) -> int:
        return self.random.randint(low, high)

    def shape(self) -> tuple[int, ...]:
        return tuple(self.integer(1, 6) for _ in range(self.integer(1, 3)))

    def expression(self, shape: tuple[int, ...], depth: int, types: list[torch.dtype]) -> Pair:
        """``types``: which ones a source's elements are cast to, one after the other."""
        choices = ["leaf"] if depth == 0 or not shape else list(OPERATIONS)
        return OPERATIONS[self.random.choice(choices)](self, shape, depth - 1, types)

    def leaf(self, shape: tuple[int, ...], _depth: int, types: list[torch.dtype]) -> Pair:
        equal = [name for name, source in self.sources.items() if source.shape == shape]
        if equal and self.random.random() < 0.3:
            name = self.random.choice(equal)
        else:
            name = f"source.{len(self.sources)}"
            dtype = self.random.choice([torch.float32, torch.bfloat16, torch.float64, torch.int32])
            self.sources[name] = (torch.randn(shape, generator=self.generator) * 9).to(dtype)
        value = self.sources[name]
        for dtype in types:
            value = value.to(dtype)
        return take(name), value

    def narrow(self, shape: tuple[int, ...], depth: int, types: list[torch.dtype]) -> Pair:
        dim, before, after = self.integer(0, len(shape) - 1), self.integer(0, 3), self.integer(0, 3)
        made, value = self.expression(extended(shape, dim, before + shape[dim] + after), depth, types)
        value = value.narrow(dim, before, shape[dim])
        if dim == 0:
            return made.rows(before, before + shape[0]), value
        return made.narrow(dim - len(shape), before, before + shape[dim]), value

    def select(self, shape: tuple[int, ...], depth: int, types: list[torch.dtype]) -> Pair:
        dim, size = self.integer(0, len(shape)), self.integer(1, 3)
        index = self.integer(0, size - 1)
        made, value = self.expression((*shape[:dim], size, *shape[dim:]), depth, types)
        return made.select(dim, index), value.select(dim, index)

    def shard(self, shape: tuple[int, ...], depth: int, types: list[torch.dtype]) -> Pair:
        dim = self.integer(0, len(shape) - 1)
        extent, count, index = self.random.choice(
            [
                (extent, count, index)
                for count in (1, 2, 3, 4)
                for extent in range(shape[dim], shape[dim] * count + 1)
                for index, part in enumerate(torch.arange(extent).chunk(count))
                if len(part) == shape[dim]
            ]
        )
        made, value = self.expression(extended(shape, dim, extent), depth, types)
        return made.shard(dim, index, count), torch.chunk(value, count, dim)[index]

    def heads(self, shape: tuple[int, ...], depth: int, types: list[torch.dtype]) -> Pair:
        dim = self.integer(0, len(shape) - 1)
        if self.random.random() < 0.5:  # more ranks than heads
            num_heads = self.integer(1, 3)
            count = num_heads * self.integer(1, 3)
        else:
            count = self.integer(1, 3)
            num_heads = count * self.random.choice([each for each in (1, 2, 3) if shape[dim] % each == 0])
        share = max(num_heads // count, 1)
        index = self.integer(0, count - 1)
        made, value = self.expression(extended(shape, dim, shape[dim] // share * num_heads), depth, types)
        by_head = torch.chunk(value, num_heads, dim)
        mine = (
            by_head[index * share : (index + 1) * share]
            if count <= num_heads
            else [by_head[index * num_heads // count]]
        )
        return made.heads(dim, index, count, num_heads=num_heads), torch.cat(list(mine), dim)

    def transpose(self, shape: tuple[int, ...], depth: int, types: list[torch.dtype]) -> Pair:
        a, b = self.integer(0, len(shape) - 1), self.integer(0, len(shape) - 1)
        order = list(shape)
        order[a], order[b] = order[b], order[a]
        made, value = self.expression(tuple(order), depth, types)
        is_whole = len(shape) == 2 and a != b
        return made.t() if is_whole else made.transpose(a, b), value.t() if is_whole else value.transpose(a, b)

    def pad(self, shape: tuple[int, ...], depth: int, types: list[torch.dtype]) -> Pair:
        dim = self.integer(0, len(shape) - 1)
        kept = self.integer(1, shape[dim])
        made, value = self.expression(extended(shape, dim, kept), depth, types)
        fill = self.integer(-3, 3)
        behind = torch.full(extended(shape, dim, shape[dim] - kept), fill, dtype=types[-1])
        return made.pad(dim, shape[dim], fill), torch.cat([value, behind], dim)

    def concat(self, shape: tuple[int, ...], depth: int, types: list[torch.dtype]) -> Pair:
        dim = self.integer(0, len(shape) - 1)
        cuts = sorted({0, shape[dim], *(self.integer(0, shape[dim]) for _ in range(self.integer(0, 2)))})
        parts = [
            self.expression(extended(shape, dim, end - begin), depth, types) for begin, end in itertools.pairwise(cuts)
        ]
        return concat([made for made, _ in parts], dim), torch.cat([value for _, value in parts], dim)

    def stack(self, shape: tuple[int, ...], depth: int, types: list[torch.dtype]) -> Pair:
        dim = self.integer(0, len(shape) - 1)
        parts = [self.expression((*shape[:dim], *shape[dim + 1 :]), depth, types) for _ in range(shape[dim])]
        return stack([made for made, _ in parts], dim - len(shape)), torch.stack([value for _, value in parts], dim)

    def memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Of any strides, within a larger tensor of sevens."""
        order = self.random.sample(range(len(shape)), len(shape))
        margins = [(self.integer(0, 2), self.integer(0, 2)) for _ in shape]
        room = [sum(margins[dim]) + shape[dim] for dim in order]
        whole = torch.full(room, 7, dtype=dtype).permute(*(order.index(dim) for dim in range(len(shape))))
        return whole[tuple(slice(margins[dim][0], margins[dim][0] + shape[dim]) for dim in range(len(shape)))]

    def placements(self, shape: tuple[int, ...], mesh: tuple[int, ...]) -> list[Placement]:
        if len(mesh) == 2 and shape and self.random.random() < 0.25:  # as FSDP2 over tensor parallelism
            dim = self.integer(0, len(shape) - 1)
            return [_StridedShard(dim, split_factor=mesh[1]), Shard(dim)]
        return [
            Shard(self.integer(0, len(shape) - 1)) if shape and self.random.random() < 0.7 else Replicate()
            for _ in mesh
        ]


OPERATIONS: dict[str, Callable[[RandomMap, tuple[int, ...], int, list[torch.dtype]], Pair]] = {
    name: getattr(RandomMap, name)
    for name in ("leaf", "narrow", "select", "shard", "heads", "transpose", "pad", "concat", "stack")
}


def extended(shape: tuple[int, ...], dim: int, extent: int) -> tuple[int, ...]:
    return (*shape[:dim], extent, *shape[dim + 1 :])


def mesh_of(shape: tuple[int, ...], rank: int) -> DeviceMesh:
    """The mesh as the process of this rank sees it; with names of its own, as torch remembers equal meshes."""
    ranks = torch.arange(torch.Size(shape).numel()).view(shape)
    names = tuple(f"axis{axis}_of_{rank}" for axis in range(len(shape)))
    return DeviceMesh("cpu", ranks, mesh_dim_names=names, _init_backend=False, _rank=rank)


def sharded(tensor: torch.Tensor, mesh: DeviceMesh, placements: list[Placement]) -> DTensor:
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def catalog_of(made: RandomMap) -> Catalog:
    """The sources on the ranks of some mesh, by what each says of its shards."""
    shape = made.random.choice(MESHES)
    placements = {name: made.placements(tuple(source.shape), shape) for name, source in made.sources.items()}
    whole = {name: torch.zeros_like(source) for name, source in made.sources.items()}
    manifests = {}
    for rank in range(torch.Size(shape).numel()):
        mesh = mesh_of(shape, rank)
        manifest = Manifest.of({name: sharded(source, mesh, placements[name]) for name, source in made.sources.items()})
        for name, held in manifest.tensors.items():
            for box, view in zip(held.boxes, held.views, strict=True):
                whole[name][tuple(slice(*of_dim) for of_dim in box)] = view
        manifests[rank + 10] = Manifest.from_json(manifest.to_json())
        assert manifests[rank + 10] == manifest
    for name, source in made.sources.items():
        assert torch.equal(whole[name], source), name
    return Catalog.merge(dict(made.random.sample(list(manifests.items()), len(manifests))))


def run_random_map(seed: int) -> None:
    made = RandomMap(seed)
    wanted: dict[str, torch.Tensor] = {}
    mapping: dict[str, Expression] = {}
    for index in range(made.integer(1, 4)):
        dtype = made.random.choice([torch.float32, torch.bfloat16, torch.float64])
        cast = made.random.choice([None, None, torch.float32, torch.float16, torch.int16])
        types = [dtype] if cast is None else [cast, dtype]
        expression, value = made.expression(made.shape(), made.integer(0, 4), types)
        mapping[f"layers.{index}"] = expression if cast is None else expression.cast(cast)
        wanted[f"layers.{index}"] = value
    catalog = catalog_of(made)
    shape = made.random.choice(MESHES)
    placements = {name: made.placements(tuple(value.shape), shape) for name, value in wanted.items()}
    is_plain = {name: made.random.random() < 0.5 for name in wanted}
    for rank in range(torch.Size(shape).numel()):
        mesh = mesh_of(shape, rank)
        targets, expected = {}, {}
        for name, value in wanted.items():
            if is_plain[name]:
                targets[name], expected[name] = made.memory(tuple(value.shape), value.dtype), value
            else:
                targets[name] = sharded(torch.full_like(value, 7), mesh, placements[name])
                expected[name] = sharded(value.contiguous(), mesh, placements[name])
        tied = made.random.choice(list(wanted))
        nested = {"layers": [targets[name] for name in wanted], "tied": targets[tied]}
        around = {name: beside(target) for name, target in targets.items()}
        apply_map(made.sources, resolve(nested, {**mapping, "tied": mapping[tied]}, catalog))
        for name, target in targets.items():
            actual, value = local(target), local(expected[name])
            assert torch.equal(actual, value), f"seed {seed}, rank {rank}, {name}"
            assert torch.equal(
                beside(target), around[name]
            ), f"seed {seed}, rank {rank}: memory beside {name} was written"


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def beside(tensor: torch.Tensor) -> torch.Tensor:
    """What lies beside the tensor in its storage."""
    mine = local(tensor)
    everything = torch.empty(0, dtype=mine.dtype).set_(mine.untyped_storage()).clone()
    everything.as_strided(mine.shape, mine.stride(), mine.storage_offset()).zero_()
    return everything


@pytest.mark.parametrize("batch", range(20))
def test_random_maps_do_what_torch_does(batch: int) -> None:
    for seed in range(batch * 50, batch * 50 + 50):
        run_random_map(seed)
