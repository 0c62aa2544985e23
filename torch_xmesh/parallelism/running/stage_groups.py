"""Process groups of planned stages: their collectives are nobody else's, and end with the pipeline. Meshes of their
parameters."""

import datetime
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torch_xmesh.backend import backend_of
from torch_xmesh.pipeline.ranks.transfers import Transfers

_LOOK_SECONDS = 0.05

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
        device: this process's; None for cpu.
    """

    def __init__(
        self,
        by_axis: Sequence[dist.ProcessGroup | None],
        transfers: Transfers | None = None,
        *,
        device: torch.device | None = None,
    ) -> None:
        self._by_axis, self._transfers, self._device = tuple(by_axis), transfers, device or torch.device("cpu")

    @staticmethod
    def of_mesh(mesh: DeviceMesh) -> "StageGroups":
        """The groups that a mesh has."""
        return StageGroups([mesh.get_group(axis) for axis in range(mesh.ndim)])

    @staticmethod
    def make(grids: Sequence[torch.Tensor], device: torch.device, transfers: Transfers) -> list["StageGroups | None"]:
        """For each stage, by the ranks of its mesh, groups of its own, which carry this process's device; None for
        those of other ranks. Called by all ranks of the default group, whose timeout they have, once nobody is in a
        step of an earlier engine.

        Raises:
            PeerError, StageError: the pipeline has failed meanwhile.
        """
        _destroy_left()
        # On a device the pipeline itself ends what lasts for too long, before the device's backend ends the process.
        timeout = transfers.timeout if device.type == "cpu" else 2 * transfers.timeout + datetime.timedelta(minutes=1)
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
            is_own = transfers.rank in grid.flatten().tolist()
            out.append(StageGroups(by_axis, transfers, device=device) if is_own else None)
        if device.type != "cpu":
            _connect([group for groups in out if groups is not None for group in groups._by_axis], device, transfers)
        return out

    def run(self, axis: int, collective: Callable[..., Any], *args: Any) -> None:
        """Calls one of torch.distributed's along an axis of several devices. On a device the current stream waits for
        it, and the host does not.

        Raises:
            PeerError, StageError: what the pipeline failed with, where that is why it fails.
        """
        traffic = None if self._transfers is None or self._device.type == "cpu" else self._transfers.traffic
        try:
            begin = None if traffic is None else traffic.mark(self._device)
            collective(*args, group=self._by_axis[axis])
            if traffic is not None and begin is not None:
                traffic.expect_end(begin, self._device)
        except Exception as error:
            if self._transfers is not None:
                self._transfers.raise_cause(error)
            raise

    def leave(self) -> None:
        """This rank's engine is closed: they are destroyed when all ranks make another one, or with the default
        group."""
        _left.extend(group for group in self._by_axis if group is not None)
        self._by_axis = (None,) * len(self._by_axis)


def _connect(groups: Sequence[dist.ProcessGroup | None], device: torch.device, transfers: Transfers) -> None:
    """Makes groups' communicators, while nobody is in a step. To wait for a rank there has no end, and nothing aborts
    it: so a thread does, which stays behind where the pipeline fails."""
    failures: list[Exception] = []

    def connect() -> None:
        try:
            with torch.get_device_module(device).device(device):
                for group in groups:
                    if group is not None:
                        dist.all_reduce(torch.zeros(1, device=device), group=group)
                torch.get_device_module(device).synchronize()
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=connect, name="xmesh connects", daemon=True)
    thread.start()
    deadline = time.monotonic() + transfers.timeout.total_seconds()
    while thread.is_alive():
        thread.join(_LOOK_SECONDS)
        transfers.traffic.check()
        if time.monotonic() > deadline:
            transfers.traffic.await_cause(suspects=True)
    if failures:
        transfers.raise_cause(failures[0])
        raise failures[0]


def _destroy_left() -> None:
    for group in _left:
        if group in dist.distributed_c10d._world.pg_map:  # else the default group was destroyed since, and all others
            dist.destroy_process_group(group)
    _left.clear()
