"""Meshes and specs: what a user says about where a tensor lies."""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from torch_xmesh import _C
from torch_xmesh.devices import is_device_here

_REDUCE_OPS = ("sum", "avg", "min", "max", "product")


class Mesh:
    """A grid of global ranks: what ``DeviceMesh`` says about ranks, without a process group or a device.

    Args:
        ranks: an integer array of any shape (nested lists, numpy, torch) of distinct GLOBAL ranks; its dimensions are
            the axes. Or a ``DeviceMesh``, whose names are kept.
        axis_names: one name per axis, as ``mesh_dim_names`` of a ``DeviceMesh``; a pipeline's ``data_axis`` may be one
            of them. Meshes that differ in names or in the device type only are equal.
        device_type: the device type of tensors on it, as in a ``DeviceMesh``. None: a destination takes the source's,
            anything else "cpu".

    Raises:
        ValueError: a rank is negative or repeats, the nesting is ragged, or there is not one name per axis.
    """

    __slots__ = ("_axis_names", "_device_type", "_ranks", "_shape", "_sliced_from")

    def __init__(self, ranks: Any, *, axis_names: Sequence[str] | None = None, device_type: str | None = None) -> None:
        if isinstance(ranks, DeviceMesh):
            ranks, axis_names = ranks.mesh, axis_names or ranks.mesh_dim_names
        elif isinstance(ranks, Mesh):
            device_type = device_type or ranks.device_type
            ranks, axis_names = array_of(ranks), axis_names or ranks.axis_names
        try:
            grid = torch.as_tensor(ranks, device="cpu")  # whatever torch takes for the default
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"a mesh is an array of integers, got {ranks!r} ({error})") from None
        if grid.is_floating_point() or grid.is_complex() or grid.dtype == torch.bool:
            raise ValueError(f"a mesh is an array of integers, got {grid.dtype}")
        self._shape = tuple(grid.shape)
        self._ranks = tuple(grid.flatten().tolist())
        if len(set(self._ranks)) != len(self._ranks) or any(rank < 0 for rank in self._ranks):
            raise ValueError(f"the ranks of a mesh are distinct and not negative, got {ranks!r}")
        self._axis_names = None if axis_names is None else _checked_names(axis_names, len(self._shape))
        self._sliced_from: Mesh | None = None
        self._device_type = device_type

    @property
    def shape(self) -> tuple[int, ...]:
        """Ranks along each axis."""
        return self._shape

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks, row-major."""
        return self._ranks

    @property
    def axis_names(self) -> tuple[str, ...] | None:
        """One name per axis, or None."""
        return self._axis_names

    @property
    def device_type(self) -> str | None:
        """The device type of tensors on it, such as "cpu"; None if it was not given."""
        return self._device_type

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self._shape)

    def size(self, axis: str | int | None = None) -> int:
        """Number of ranks, or the extent of one axis. ValueError without such an axis."""
        return len(self._ranks) if axis is None else self._shape[_axis_of(self, axis)]

    def __getitem__(self, index: Any) -> "Mesh":
        """A part of the mesh. By index as an array: ``mesh[0]`` drops the first axis, ``mesh[:, 1:]`` keeps both. By
        name as a ``DeviceMesh``: ``mesh["tp"]``, ``mesh["dp", "tp"]`` are the ranks that differ from this process's
        along these axes only; :meth:`through` says whose instead.

        Raises:
            ValueError: no such axis, an index out of range, or a name where this process is not in the mesh.
        """
        names = index if isinstance(index, tuple) else (index,)
        if all(isinstance(name, str) for name in names) and names:
            if not torch.distributed.is_initialized() or torch.distributed.get_rank() not in self._ranks:
                raise ValueError(
                    f"this process has no rank in {self!r}: {index!r} does not say which part; use mesh.through(rank, "
                    "...), an index (mesh[0], mesh[:, 1]), or xm.stage_meshes(mesh, axis) for all parts"
                )
            return self.through(torch.distributed.get_rank(), *names)
        return self._part(names)

    def through(self, rank: int, *axes: str | int) -> "Mesh":
        """The ranks that differ from global `rank` along these axes only, in the order of the mesh's own axes.

        Raises:
            ValueError: the rank is not in the mesh, or there is no such axis.
        """
        if rank not in self._ranks:
            raise ValueError(f"rank {rank} is not in {self!r}")
        kept = {_axis_of(self, axis) for axis in axes}
        coordinate = (array_of(self) == rank).nonzero()[0].tolist()
        part = self._part(tuple(slice(None) if i in kept else at for i, at in enumerate(coordinate)))
        part._sliced_from = self._sliced_from or self
        return part

    def _part(self, index: tuple[Any, ...]) -> "Mesh":
        if len(index) > self.ndim or not all(isinstance(at, int | slice) for at in index):
            raise ValueError(f"{self!r} has no part {index!r}: expected at most {self.ndim} integers or slices")
        try:
            grid = array_of(self)[index]
        except (IndexError, ValueError) as error:
            raise ValueError(f"{self!r} has no part {index!r} ({error})") from None
        kept = [i for i in range(self.ndim) if i >= len(index) or isinstance(index[i], slice)]
        names = None if self._axis_names is None else [self._axis_names[i] for i in kept]
        return Mesh(grid, axis_names=names, device_type=self.device_type)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and (self._shape, self._ranks) == (other._shape, other._ranks)

    def __hash__(self) -> int:
        return hash((self._shape, self._ranks))

    def __repr__(self) -> str:
        names = "" if self._axis_names is None else f", axis_names={self._axis_names}"
        device = "" if self.device_type in (None, "cpu") else f", device_type={self.device_type!r}"
        return f"Mesh({array_of(self).tolist()}{names}{device})"


AnyMesh = Mesh | DeviceMesh


def sliced_from(mesh: AnyMesh) -> AnyMesh | None:
    """The mesh of which this one is what one rank sees along some axes; None where it was not made so."""
    if isinstance(mesh, Mesh):
        return mesh._sliced_from
    root: DeviceMesh = mesh._get_root_mesh()
    return None if root is mesh else root


def _axis_of(mesh: Mesh, axis: str | int) -> int:
    if isinstance(axis, str):
        return named_axis(mesh, axis, "the mesh")
    if not -mesh.ndim <= axis < mesh.ndim:
        raise ValueError(f"axis {axis} is out of range for a mesh of {mesh.ndim} axes")
    return axis % mesh.ndim


def _checked_names(names: Sequence[str], num_axes: int) -> tuple[str, ...]:
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"axis_names is a sequence of strings, got {names!r}")
    if len(names) != num_axes or len(set(names)) != num_axes:
        raise ValueError(f"a mesh of {num_axes} axes has as many distinct names, got {tuple(names)}")
    return tuple(names)


def array_of(mesh: Mesh) -> torch.Tensor:
    """The ranks as a tensor of the mesh's shape, on cpu."""
    return torch.tensor(mesh.ranks, dtype=torch.int64, device="cpu").reshape(mesh.shape)


class Spec:
    """What a tensor is and how it is placed: stands for a DTensor on a rank that has no data, and in planning.

    Args:
        shape: global shape.
        dtype: element type.
        mesh: a ``DeviceMesh`` or :class:`Mesh`.
        placements: one of torch's placements per mesh axis.
        requires_grad: what the DTensor on the other ranks says; ranks must agree.

    Raises:
        ValueError: placements that do not fit the mesh or the shape.
    """

    __slots__ = ("dtype", "mesh", "placements", "requires_grad", "shape")

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        mesh: AnyMesh,
        placements: Sequence[Placement],
        *,
        requires_grad: bool = False,
    ) -> None:
        try:
            extents = [operator.index(extent) for extent in shape]
        except TypeError:
            raise ValueError(f"shape must be integers, got {shape!r}") from None
        if any(abs(extent) >= 1 << 63 for extent in extents):
            raise ValueError(f"shape must be integers of 64 bits, got {tuple(extents)}")
        self.shape = torch.Size(extents)
        self.dtype = dtype
        self.mesh = mesh
        self.placements = normal_placements(placements, len(self.shape))
        self.requires_grad = requires_grad
        self.to_core()

    @classmethod
    def of(cls, tensor: DTensor) -> "Spec":
        """The spec of a DTensor. ValueError for one whose shards are in an order of their own."""
        order = getattr(tensor._spec, "shard_order", None)
        if order is not None and order != DTensorSpec.compute_default_shard_order(tensor.placements):
            raise ValueError(
                f"a DTensor with shard_order {order} cannot be resharded: expected mesh axes that cut one dim to do so "
                "in their order"
            )
        return cls.unchecked(
            tensor.shape, tensor.dtype, tensor.device_mesh, tensor.placements, requires_grad=tensor.requires_grad
        )

    @classmethod
    def unchecked(
        cls,
        shape: torch.Size,
        dtype: torch.dtype,
        mesh: AnyMesh,
        placements: tuple[Placement, ...],
        *,
        requires_grad: bool = False,
    ) -> "Spec":
        """A Spec of arguments that are in normal form already; nothing is checked."""
        spec = cls.__new__(cls)
        spec.shape, spec.dtype, spec.mesh, spec.placements, spec.requires_grad = (
            shape,
            dtype,
            mesh,
            placements,
            requires_grad,
        )
        return spec

    def without_grad(self) -> "Spec":
        """The same spec that requires no gradient."""
        return Spec.unchecked(self.shape, self.dtype, self.mesh, self.placements) if self.requires_grad else self

    def to_core(self) -> "_C.TensorSpec":
        """The C++ form."""
        return core_spec(self.shape, self.dtype, self.mesh, self.placements)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Spec) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[Any, ...]:
        return (self.shape, self.dtype, mesh_grid(self.mesh), self.placements, self.requires_grad)

    def __repr__(self) -> str:
        return f"Spec({tuple(self.shape)}, {self.dtype}, mesh={mesh_grid(self.mesh)}, placements={self.placements})"


@functools.lru_cache(maxsize=4096)
def _grid_of(mesh: AnyMesh) -> Mesh:
    return Mesh(mesh.mesh if isinstance(mesh, DeviceMesh) else array_of(mesh))


def mesh_grid(mesh: AnyMesh) -> Mesh:
    """The ranks of either kind of mesh, without names. Raises ValueError for anything else."""
    if isinstance(mesh, Mesh) and mesh.axis_names is None and mesh.device_type is None:
        return mesh
    if isinstance(mesh, Mesh | DeviceMesh):
        return _grid_of(mesh)
    raise ValueError(f"a mesh is a DeviceMesh or an xm.Mesh, got {type(mesh).__name__}")


def device_type_of(mesh: AnyMesh) -> str | None:
    """What a mesh says of its tensors' device, None where it says nothing. Raises ValueError for what is no mesh."""
    if not isinstance(mesh, Mesh | DeviceMesh):
        mesh_grid(mesh)
    return mesh.device_type


def axis_names(mesh: AnyMesh) -> tuple[str, ...] | None:
    """The names of a mesh's axes, None where they have none."""
    return mesh.axis_names if isinstance(mesh, Mesh) else mesh.mesh_dim_names


def named_axis(mesh: AnyMesh, name: str, what: str) -> int:
    """The axis of that name. Raises ValueError, about `what`, where there is none."""
    names = axis_names(mesh) or ()
    if name not in names:
        raise ValueError(f"{what} has no axis {name!r}; its axes are {names or 'not named: give an index'}")
    return names.index(name)


def normal_placements(placements: Sequence[Placement], num_dims: int) -> tuple[Placement, ...]:
    """Placements as a tuple with dims counted from the front. Raises ValueError for what is no placement."""
    if isinstance(placements, Placement) or not isinstance(placements, Sequence):
        raise ValueError(f"placements are a sequence with one placement per mesh axis, got {placements!r}")
    out: list[Placement] = []
    for placement in placements:
        if isinstance(placement, _StridedShard):
            dim = _front_dim(placement.dim, num_dims, placement)
            out.append(_StridedShard(dim, split_factor=placement.split_factor))
        elif isinstance(placement, Shard):
            out.append(Shard(_front_dim(placement.dim, num_dims, placement)))
        elif isinstance(placement, Replicate) or type(placement) is Partial:
            out.append(placement)
        else:
            raise ValueError(
                f"{placement!r} cannot be resharded: expected Replicate(), Shard(dim), _StridedShard or a plain Partial"
            )
    return tuple(out)


def _front_dim(dim: int, num_dims: int, placement: Placement) -> int:
    if not -num_dims <= dim < num_dims:
        raise ValueError(f"{placement!r} is out of range for a tensor of {num_dims} dims")
    return dim % num_dims


def placement_text(placement: Placement) -> str:
    """The core's spelling of a normal placement."""
    if isinstance(placement, _StridedShard):
        return f"StridedShard({placement.dim}, {placement.split_factor})"
    if isinstance(placement, Shard):
        return f"Shard({placement.dim})"
    if isinstance(placement, Partial):
        if placement.reduce_op not in _REDUCE_OPS:
            raise ValueError(
                f"Partial({placement.reduce_op!r}) cannot be resharded: expected one of {', '.join(_REDUCE_OPS)}"
            )
        return f"Partial({placement.reduce_op})"
    return "Replicate()"


def placement_of(text: str) -> Placement:
    """The placement that ``placement_text`` spelled."""
    name, _, inside = text.rstrip(")").partition("(")
    if name == "Shard":
        return Shard(int(inside))
    if name == "StridedShard":
        dim, split_factor = inside.split(",")
        return _StridedShard(int(dim), split_factor=int(split_factor))
    return Partial(inside) if name == "Partial" else Replicate()


def core_spec(
    shape: Sequence[int], dtype: torch.dtype, mesh: AnyMesh, placements: Sequence[Placement]
) -> "_C.TensorSpec":
    """The C++ spec. Raises ValueError for what does not fit."""
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype must be a torch.dtype, got {dtype!r}")
    grid = mesh_grid(mesh)
    texts = [placement_text(placement) for placement in normal_placements(placements, len(shape))]
    return _C.TensorSpec(list(shape), str(dtype).removeprefix("torch."), list(grid.shape), list(grid.ranks), texts)


def device_mesh(mesh: AnyMesh, device_type: str = "cpu") -> DeviceMesh:
    """A ``DeviceMesh`` for a :class:`Mesh`, without process groups of its own and without names, so that tensors on
    equal meshes meet; a ``DeviceMesh`` is returned as it is. No other rank is needed.

    Args:
        mesh: which global ranks lie where.
        device_type: the device type of tensors on it.

    Raises:
        ValueError: ``mesh`` is neither.
    """
    if isinstance(mesh, DeviceMesh):
        return mesh
    if not isinstance(mesh, Mesh):
        raise ValueError(f"a mesh is a DeviceMesh or an xm.Mesh, got {type(mesh).__name__}")
    return _ranks_only(mesh, device_type)


@functools.lru_cache(maxsize=1024)
def _ranks_only(mesh: Mesh, device_type: str) -> DeviceMesh:
    return _RanksOnlyMesh(device_type, array_of(mesh), _init_backend=False)


class _NoProcessGroups(AttributeError, RuntimeError):
    """Raised where torch looks for a process group that a mesh does not have; torch asks with ``hasattr`` too."""


class _RanksOnlyMesh(DeviceMesh):
    """A ``DeviceMesh`` without process groups, which says so when a collective is asked for."""

    def get_group(self, mesh_dim: int | str | None = None) -> torch.distributed.ProcessGroup:
        raise _NoProcessGroups(_NO_GROUPS)

    def __getattr__(self, name: str) -> Any:
        if name == "_dim_group_names":
            raise _NoProcessGroups(_NO_GROUPS)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


_NO_GROUPS = (
    "this DTensor lies on the mesh of an xm.Mesh, which has no process groups: full_tensor(), redistribute() and other "
    "collectives cannot run on it. Pass a DeviceMesh with process groups (init_device_mesh) as dst_mesh, or reshard to "
    "[Replicate(), ...] and take to_local()"
)


def wrap_local(local: torch.Tensor, shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
    """A DTensor around a local tensor, with the global shape as given and row-major global strides."""
    make: Any = DTensor  # its constructor has no types
    made: DTensor = make(local, dtensor_spec(shape, local.dtype, mesh, placements), requires_grad=False)
    return made


def dtensor_spec(
    shape: torch.Size, dtype: torch.dtype, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> DTensorSpec:
    """What torch says of a DTensor of this global shape, with row-major global strides."""
    strides: list[int] = []
    step = 1
    for extent in reversed(shape):
        strides.insert(0, step)
        step *= max(extent, 1)
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, tuple(strides), dtype))


def empty_local(shape: torch.Size, dtype: torch.dtype, device_type: str) -> torch.Tensor:
    """The local tensor of a rank outside the mesh. On cpu where the rank has no such device."""
    return torch.empty(empty_shape(shape), dtype=dtype, device=device_type if is_device_here(device_type) else "cpu")


def empty_shape(shape: torch.Size) -> list[int]:
    """The local shape of a rank outside the mesh: of the global tensor's number of dims, which autograd asks for."""
    return [0] * max(len(shape), 1)


def stage_meshes(world_mesh: AnyMesh, axis: str | int) -> list[Mesh]:
    """The meshes of all stages, on every rank in the same order: ``world_mesh`` cut along one axis.

    Args:
        world_mesh: the mesh of all ranks.
        axis: the pipeline axis, by name or index; it disappears from the results.

    Returns:
        one :class:`Mesh` per index of the axis, with the remaining axes and their names in order.

    Raises:
        ValueError: no such axis.
    """
    grid = array_of(mesh_grid(world_mesh))
    if isinstance(axis, str):
        axis = named_axis(world_mesh, axis, "the mesh")
    if not -grid.dim() <= axis < grid.dim():
        raise ValueError(f"axis {axis} is out of range for a mesh of {grid.dim()} axes")
    axis %= grid.dim()
    names = axis_names(world_mesh)
    rest = None if names is None else [*names[:axis], *names[axis + 1 :]]
    return [Mesh(part, axis_names=rest, device_type=world_mesh.device_type) for part in grid.unbind(axis)]
