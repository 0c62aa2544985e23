"""Process groups of planned stages: their collectives are nobody else's, and end with the pipeline. Meshes of their
parameters."""

import datetime
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torch_xmesh.backend import backend_of
from torch_xmesh.pipeline.ranks.transfers import Transfers

_left: list[dist.ProcessGroup] = []
"""Groups of engines that were closed in this process. Other ranks may still be at the end of their last step."""


_meshes: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[Any, ...], DeviceMesh]]" = weakref.WeakKeyDictionary()
"""By default group and ranks."""


def parameter_meshes(grids: Sequence[torch.Tensor], kind: str) -> list[DeviceMesh]:
    """For each stage, by the ranks of its mesh, what its parameters lie on, on a kind of device. Called by all ranks of
    the default group together. Engines share them: parameters outlive their engine, and a mesh's groups end with the
    default group."""
    made = _meshes.setdefault(dist.distributed_c10d._get_default_group(), {})
    out = []
    for grid in grids:
        key = (kind, *grid.shape, *grid.flatten().tolist())
        out.append(made.get(key) or made.setdefault(key, DeviceMesh(kind, grid)))
    return out


class StageGroups:
    """The devices along each axis of a stage's mesh, as one of them sees them.

    Args:
        by_axis: a group per mesh axis; None where an axis has one device.
        transfers: those of the pipeline, which know why a collective fails; None: the stage is used by itself.
        kind: of the devices.
    """

    def __init__(
        self, by_axis: Sequence[dist.ProcessGroup | None], transfers: Transfers | None = None, *, kind: str = "cpu"
    ) -> None:
        self._by_axis, self._transfers, self._is_on_device = tuple(by_axis), transfers, kind != "cpu"

    @staticmethod
    def of_mesh(mesh: DeviceMesh) -> "StageGroups":
        """The groups that a mesh has."""
        return StageGroups([mesh.get_group(axis) for axis in range(mesh.ndim)])

    @staticmethod
    def make(grids: Sequence[torch.Tensor], kind: str, transfers: Transfers) -> list["StageGroups | None"]:
        """For each stage, by the ranks of its mesh, groups of its own, which carry a kind of device; None for those of
        other ranks. Called by all ranks of the default group, whose timeout they have, once nobody is in a step of an
        earlier engine."""
        _destroy_left()
        # On a device the pipeline itself ends what lasts for too long, before the device's backend ends the process.
        timeout = transfers.timeout if kind == "cpu" else 2 * transfers.timeout + datetime.timedelta(minutes=1)
        out: list[StageGroups | None] = []
        for grid in grids:
            by_axis: list[dist.ProcessGroup | None] = []
            for axis in range(grid.dim()):
                lines = grid.movedim(axis, -1).reshape(-1, grid.shape[axis]).tolist()
                made = [dist.new_group(line, timeout=timeout) for line in lines if len(line) > 1]
                mine = [candidate for candidate in made if isinstance(candidate, dist.ProcessGroup)]
                by_axis.append(mine[0] if mine else None)
            for group in by_axis:
                if group is not None:
                    transfers.traffic.ends_too(backend_of(group))
                    if kind != "cpu":  # connected now, while nobody is in a step: to wait for a rank then has no end
                        dist.all_reduce(torch.zeros(1, device=kind), group=group)
            is_own = transfers.rank in grid.flatten().tolist()
            out.append(StageGroups(by_axis, transfers, kind=kind) if is_own else None)
        return out

    def run(self, axis: int, collective: Callable[..., Any], *args: Any) -> None:
        """Calls one of torch.distributed's along an axis of several devices. On a device the current stream waits for
        it, and the host does not.

        Raises:
            PeerError, StageError: what the pipeline failed with, where that is why it fails.
        """
        try:
            work = collective(*args, group=self._by_axis[axis], async_op=True)
            work.wait()
            if self._is_on_device and self._transfers is not None:
                self._transfers.traffic.expect_end(work)
        except Exception as error:
            if self._transfers is not None:
                self._transfers.raise_cause(error)
            raise

    def leave(self) -> None:
        """This rank's engine is closed: they are destroyed when all ranks make another one, or with the default
        group."""
        _left.extend(group for group in self._by_axis if group is not None)
        self._by_axis = (None,) * len(self._by_axis)


def _destroy_left() -> None:
    for group in _left:
        if group in dist.distributed_c10d._world.pg_map:  # else the default group was destroyed since, and all others
            dist.destroy_process_group(group)
    _left.clear()
