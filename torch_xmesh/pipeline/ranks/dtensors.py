"""DTensors at a stage's boundary: which part of the stage's mesh they lie on."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from torch_xmesh.pipeline.ranks.stage_mesh import StageMesh, coordinate_in
from torch_xmesh.spec import Mesh, array_of, device_mesh, mesh_grid


def slice_of(mesh: StageMesh, axes: Sequence[int]) -> Mesh:
    """The ranks with which this one differs in these axes of the user's mesh only."""
    at = [slice(None) if axis in axes else i for axis, i in enumerate(coordinate_in(mesh.whole, mesh.rank))]
    return Mesh(array_of(mesh.whole)[tuple(at)])


def spanned_axes(mesh: StageMesh, other: DeviceMesh) -> tuple[int, ...] | None:
    """The axes of the user's mesh that `other` is this rank's slice along; None if it is no such slice."""
    axes = range(len(mesh.whole.shape))
    grid = mesh_grid(other)
    for chosen in itertools.combinations(axes, len(grid.shape)):
        if slice_of(mesh, chosen) == grid:
            return chosen
    return None


def activation_mesh(mesh: StageMesh, module: nn.Module) -> tuple[DeviceMesh, tuple[int, ...]]:
    """Where a stage sees DTensors, and the axes of its grid that this is: all but the data axis, whose shards a stage
    knows nothing of. The mesh of the module's own DTensor parameters if there is one, so that they can meet."""
    axes = tuple(axis for axis in range(len(mesh.whole.shape)) if axis not in mesh.data_axes)
    of_grid = tuple(mesh.axis_of(axis) for axis in axes)
    for parameter in module.parameters():
        if isinstance(parameter, DTensor) and spanned_axes(mesh, parameter.device_mesh) == axes:
            return parameter.device_mesh, of_grid
    if len(axes) == len(mesh.whole.shape):
        return mesh.device_mesh, of_grid
    names = mesh.mesh.mesh_dim_names if isinstance(mesh.mesh, DeviceMesh) else None
    if names and axes:
        assert isinstance(mesh.mesh, DeviceMesh)
        return mesh.mesh[tuple(names[axis] for axis in axes)], of_grid
    return device_mesh(slice_of(mesh, axes), mesh.device.type), of_grid


def waited(tensor: torch.Tensor) -> torch.Tensor:
    """The memory behind a tensor that a collective of DTensor's may still be filling."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


class _Waited(torch.autograd.Function):
    """The identity, whose result is no tensor that is still being filled."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return waited(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


class _GradientWaited(torch.autograd.Function):
    """The identity, whose gradient is no tensor that is still being filled."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return waited(gradients[0])


def with_waited_gradient(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, such that its gradient can be sent as soon as it is there."""
    return _GradientWaited.apply(tensor) if tensor.requires_grad else tensor  # type: ignore[no-untyped-call]


def placements_on(mesh: StageMesh, parameter: nn.Parameter, what: str) -> tuple[Placement, ...]:
    """How a parameter lies on the user's mesh of its stage.

    Raises:
        ValueError: it is a DTensor on another mesh.
    """
    placements: list[Placement] = [Replicate()] * len(mesh.whole.shape)
    if isinstance(parameter, DTensor):
        axes = spanned_axes(mesh, parameter.device_mesh)
        if axes is None:
            raise ValueError(
                f"{what} is a DTensor on {mesh_grid(parameter.device_mesh)}, which is no slice of the stage's "
                f"{mesh.whole}"
            )
        for axis, placement in zip(axes, parameter.placements, strict=True):
            placements[axis] = placement
    return tuple(placements)


def to_local(tensor: torch.Tensor, mesh: StageMesh, placements: Sequence[Placement], what: str) -> torch.Tensor:
    """This rank's part of what a stage returns, with `placements` on the stage's grid; a plain tensor is that part.

    Raises:
        ValueError: a DTensor on another mesh than the stage's or a slice of it.
    """
    if not isinstance(tensor, DTensor):
        return _settled(tensor)
    axes = spanned_axes(mesh, tensor.device_mesh)
    if axes is None:
        raise ValueError(
            f"{what} is a DTensor on {mesh_grid(tensor.device_mesh)}, which is no slice of the stage's {mesh.whole}"
        )
    wanted = tuple(placements[mesh.axis_of(axis)] for axis in axes)
    return _settled(tensor.redistribute(placements=wanted).to_local(grad_placements=wanted))


def _settled(tensor: torch.Tensor) -> torch.Tensor:
    return _Waited.apply(tensor) if isinstance(tensor, AsyncCollectiveTensor) else tensor  # type: ignore[no-untyped-call]
