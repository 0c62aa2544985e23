"""Where a stage of a pipeline lies: its mesh as one rank sees it, its data axis, and what stages share ranks."""

import dataclasses
import functools
from collections.abc import Sequence

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from torch_xmesh.pipeline.microbatch import shard_sizes
from torch_xmesh.pipeline.partition_values import ValueInfo
from torch_xmesh.spec import AnyMesh, Mesh, mesh_grid, named_axis

DEFAULT_AXIS = "default"


@dataclasses.dataclass(frozen=True)
class StageMesh:
    """One stage's mesh as one rank sees it.

    Attributes:
        mesh: as the user gave it.
        data_axis: the axis over which the batch is sharded, or None.
        rank: this process's global rank, which may be outside.
    """

    mesh: AnyMesh
    data_axis: int | None
    rank: int

    @property
    def grid(self) -> Mesh:
        return mesh_grid(self.mesh)

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.grid.ranks

    @property
    def num_shards(self) -> int:
        """Parts of the batch."""
        return 1 if self.data_axis is None else self.grid.shape[self.data_axis]

    @functools.cached_property
    def coordinate(self) -> tuple[int, ...]:
        """This rank's, one index per axis."""
        index = torch.tensor(self.ranks.index(self.rank))
        return tuple(int(i) for i in torch.unravel_index(index, self.grid.shape)) if self.grid.shape else ()

    @property
    def shard(self) -> int:
        """Which part of the batch this rank has."""
        return 0 if self.data_axis is None else self.coordinate[self.data_axis]

    @property
    def line(self) -> Mesh:
        """The ranks with which this one differs in the data axis only, in its order."""
        if self.data_axis is None:
            return Mesh([self.rank])
        grid = torch.tensor(self.ranks).reshape(self.grid.shape)
        at = [slice(None) if axis == self.data_axis else i for axis, i in enumerate(self.coordinate)]
        return Mesh(grid[tuple(at)])

    def is_stacked(self, info: ValueInfo) -> bool:
        """Whether each data shard has a value of its own, which moves as one row of a stack of them."""
        return info.varies and self.num_shards > 1

    def placements(self, info: ValueInfo) -> tuple[Placement, ...]:
        """Where a value lies by default: its samples sharded over the data axis, the rest replicated."""
        dim = 0 if self.is_stacked(info) else info.batch_dim
        return tuple(
            Shard(dim) if axis == self.data_axis and dim is not None else Replicate()
            for axis in range(len(self.grid.shape))
        )

    def global_shape(self, info: ValueInfo, num_samples: int) -> tuple[int, ...]:
        """Of a value of a microbatch of `num_samples` samples, or of the stack of all data shards' values.

        Raises:
            ValueError: data shards of different size make values of different shape.
        """
        if not self.is_stacked(info):
            return info.shape_for(num_samples)
        shapes = {info.shape_for(n) for n in shard_sizes(num_samples, self.num_shards) if n > 0}
        if len(shapes) > 1:
            raise ValueError(
                f"value {info.name} has the shapes {sorted(shapes)} on the data shards of a microbatch of "
                f"{num_samples} samples: pass a multiple of {self.num_shards} samples per microbatch"
            )
        return (self.num_shards, *shapes.pop())

    def gradient_placements(self, info: ValueInfo, placements: Sequence[Placement]) -> tuple[Placement, ...]:
        """Of the gradient at the value's consumer; data shards that all have the value have parts of a sum."""
        return tuple(
            Partial("sum") if axis == self.data_axis and isinstance(placement, Replicate) else placement
            for axis, placement in enumerate(placements)
        )

    def samples(self, num_samples: int) -> int:
        """How many of a microbatch's samples this rank has."""
        return shard_sizes(num_samples, self.num_shards)[self.shard]


def stage_mesh(mesh: AnyMesh, data_axis: str | int | None, has_parallelize: bool, stage: int, rank: int) -> StageMesh:
    """A stage's mesh with its data axis resolved.

    Raises:
        ValueError: no mesh, or no such axis.
    """
    grid = mesh_grid(mesh)
    axes = len(grid.shape)
    if data_axis == DEFAULT_AXIS:
        chosen = None if axes == 0 or (has_parallelize and axes == 1) else 0
    elif data_axis is None:
        chosen = None
    elif isinstance(data_axis, int):
        if not -axes <= data_axis < axes:
            raise ValueError(f"data_axis {data_axis} is out of range for stage {stage}'s mesh of {axes} axes")
        chosen = data_axis % axes
    else:
        chosen = named_axis(mesh, data_axis, f"stage {stage}'s mesh")
    return StageMesh(mesh, chosen, rank)


def places_of(meshes: Sequence[StageMesh]) -> list[int]:
    """The place of each stage: stages on the same ranks share one.

    Raises:
        ValueError: two meshes overlap without having the same ranks.
    """
    known: list[frozenset[int]] = []
    places: list[int] = []
    for stage, mesh in enumerate(meshes):
        ranks = frozenset(mesh.ranks)
        if ranks not in known:
            for place, other in enumerate(known):
                if shared := ranks & other:
                    first = places.index(place)
                    raise ValueError(
                        f"the meshes of stages {first} and {stage} share rank {min(shared)} but not all ranks: "
                        f"expected disjoint meshes or the same ranks, got {sorted(other)} and {sorted(ranks)}"
                    )
            known.append(ranks)
        places.append(known.index(ranks))
    return places
