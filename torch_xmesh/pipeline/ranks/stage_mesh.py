"""Where a stage of a pipeline lies: its mesh as one rank sees it, its data axis, and what stages share ranks."""

import dataclasses
import functools
import math
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from torch_xmesh.pipeline.cut.microbatch import shard_sizes
from torch_xmesh.pipeline.cut.value_info import ValueInfo
from torch_xmesh.spec import AnyMesh, Mesh, array_of, device_mesh, mesh_grid, named_axis

_CPU = torch.device("cpu")
DEFAULT_AXIS = "default"


@dataclasses.dataclass(frozen=True)
class StageMesh:
    """One stage's mesh as one rank sees it.

    Attributes:
        mesh: as the user gave it.
        data_axes: its axes over which the batch is sharded: none, one, or several that together are one data axis.
        rank: this process's global rank, which may be outside.
        device: that the stage computes on; of a stage of other ranks the kind alone.
    """

    mesh: AnyMesh
    data_axes: tuple[int, ...]
    rank: int
    device: torch.device = _CPU

    def on_device(self, device: torch.device) -> "StageMesh":
        """The same stage's, on a device."""
        return dataclasses.replace(self, device=device)

    @functools.cached_property
    def whole(self) -> Mesh:
        """The ranks as the user gave them, for what is on cpu wherever the stage computes."""
        return Mesh(mesh_grid(self.mesh), device_type="cpu")

    @functools.cached_property
    def device_mesh(self) -> DeviceMesh:
        """The user's mesh for DTensors on the stage's device."""
        return device_mesh(self.mesh, self.device.type)

    @functools.cached_property
    def grid(self) -> Mesh:
        """The ranks with one data axis at most: several are one, where the first of them is, the last one counting
        fastest."""
        if len(self.data_axes) < 2:
            return self.whole
        ranks = array_of(self.whole)
        order: list[int] = []
        for axis in self._grid_axes:
            order.extend(self.data_axes if axis == self.data_axes[0] else (axis,))
        shape = [self.num_shards if axis == self.data_axes[0] else self.whole.shape[axis] for axis in self._grid_axes]
        return Mesh(ranks.permute(order).reshape(shape), device_type="cpu")

    @functools.cached_property
    def values_grid(self) -> Mesh:
        """The grid, for what is on the stage's device."""
        return Mesh(self.grid, device_type=self.device.type)

    @functools.cached_property
    def _grid_axes(self) -> tuple[int, ...]:
        """By axis of the grid, the first axis of the mesh in it."""
        return tuple(axis for axis in range(len(self.whole.shape)) if axis not in self.data_axes[1:])

    def axis_of(self, axis: int) -> int:
        """Where an axis of the mesh is in the grid."""
        return self._grid_axes.index(self.data_axes[0] if axis in self.data_axes else axis)

    @property
    def data_axis(self) -> int | None:
        """The grid's."""
        return self.axis_of(self.data_axes[0]) if self.data_axes else None

    @property
    def ranks(self) -> tuple[int, ...]:
        """In the mesh's order."""
        return self.whole.ranks

    @property
    def num_shards(self) -> int:
        """Parts of the batch."""
        return math.prod(self.whole.shape[axis] for axis in self.data_axes)

    @functools.cached_property
    def coordinate(self) -> tuple[int, ...]:
        """This rank's in the grid, one index per axis."""
        return coordinate_in(self.grid, self.rank)

    @property
    def shard(self) -> int:
        """Which part of the batch this rank has."""
        return 0 if self.data_axis is None else self.coordinate[self.data_axis]

    @property
    def line(self) -> Mesh:
        """The ranks with which this one differs in the data axis only, in its order."""
        if self.data_axis is None:
            return Mesh([self.rank])
        grid = array_of(self.grid)
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
        """The global shape of a value in a microbatch of `num_samples` samples; where data shards' values are stacked,
        that of the stack.

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
        """The placements of a value's gradient at a stage that reads the value. Where all data shards have the same
        value, each has a summand of its gradient."""
        return tuple(
            Partial("sum") if axis == self.data_axis and isinstance(placement, Replicate) else placement
            for axis, placement in enumerate(placements)
        )

    def samples(self, num_samples: int) -> int:
        """How many of a microbatch's samples this rank has."""
        return shard_sizes(num_samples, self.num_shards)[self.shard]


def coordinate_in(grid: Mesh, rank: int) -> tuple[int, ...]:
    """A rank's, one index per axis."""
    index = torch.tensor(grid.ranks.index(rank), device="cpu")
    return tuple(int(i) for i in torch.unravel_index(index, grid.shape)) if grid.shape else ()


DataAxis = str | int | tuple[str | int, ...] | None


def stage_mesh(mesh: AnyMesh, *, data_axis: DataAxis, has_parallelize: bool, stage: int, rank: int) -> StageMesh:
    """A stage's mesh with its data axis resolved.

    Raises:
        ValueError: no mesh, or no such axis.
    """
    axes = len(mesh_grid(mesh).shape)
    chosen: tuple[int, ...] = ()
    if data_axis == DEFAULT_AXIS:
        chosen = () if axes == 0 or (has_parallelize and axes == 1) else (0,)
    elif data_axis is not None:
        several = data_axis if isinstance(data_axis, tuple) else (data_axis,)
        # In the order in which a DTensor shards over them.
        chosen = tuple(sorted(_axis_index(mesh, axis, axes, stage) for axis in several))
        if len(set(chosen)) < len(chosen):
            raise ValueError(f"data_axis {data_axis} names an axis of stage {stage}'s mesh twice")
    return StageMesh(mesh, chosen, rank)


def _axis_index(mesh: AnyMesh, axis: str | int, num_axes: int, stage: int) -> int:
    if isinstance(axis, str):
        return named_axis(mesh, axis, f"stage {stage}'s mesh")
    if isinstance(axis, bool) or not isinstance(axis, int):
        raise ValueError(
            f"data_axis of stage {stage} is an axis's name, its index, a tuple of them or None, got {axis!r}"
        )
    if not -num_axes <= axis < num_axes:
        raise ValueError(f"data_axis {axis} is out of range for stage {stage}'s mesh of {num_axes} axes")
    return axis % num_axes


def places_of(meshes: Sequence[StageMesh]) -> list[int]:
    """The place of each stage: stages that share ranks share one, also through others.

    A place has one order of actions, of which each rank runs those of its own stages. The first action of the order
    that is not done can always go on: ranks that share some stages only never wait for each other in a circle.
    """
    ranks_of: list[set[int]] = []  # by place so far
    found: list[set[int]] = []  # by place, its stages
    for stage, mesh in enumerate(meshes):
        ranks, stages = set(mesh.ranks), {stage}
        for place in [place for place, others in enumerate(ranks_of) if others & ranks][::-1]:
            ranks |= ranks_of.pop(place)
            stages |= found.pop(place)
        ranks_of.append(ranks)
        found.append(stages)
    ordered = sorted(found, key=min)
    return [next(place for place, stages in enumerate(ordered) if stage in stages) for stage in range(len(meshes))]
