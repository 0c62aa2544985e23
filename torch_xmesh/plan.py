"""Plans: what moves where in which order, computed without a process group."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Placement

from torch_xmesh import _C
from torch_xmesh.arguments import instance_of, shown
from torch_xmesh.group import group_of
from torch_xmesh.plan_cache import Move, PlanOptions, plan_of, ranks_of, topology_of
from torch_xmesh.reshard_plot import plot_lanes
from torch_xmesh.spec import AnyMesh, Mesh, Spec, normal_placements, placement_of
from torch_xmesh.topology import Topology

_LEAST_BOUND_SECONDS = 1e-6


class ReshardingPlan:
    """An immutable plan for one or many tensors. ``str(plan)`` is a table for people, :meth:`to_json` replays it.

    It is the same on every rank and every CPU for the same arguments. Made by :func:`plan_resharding` or
    :meth:`from_json`.
    """

    __slots__ = ("core",)

    def __init__(self, core: "_C.ReshardingPlan") -> None:
        self.core = core

    @classmethod
    def from_json(cls, text: str) -> "ReshardingPlan":
        """Reads and checks :meth:`to_json`. Raises ValueError naming line, column and field of what is wrong."""
        return cls(_C.ReshardingPlan.from_json(instance_of("text", text, str, "a plan as JSON text")))

    def to_json(self) -> str:
        """One JSON object: version, strategy, tensors, topology, tasks, messages, bounds."""
        return self.core.to_json()

    @property
    def strategy(self) -> str:
        """The strategy in its canonical spelling."""
        return self.core.strategy

    @property
    def lower_bound_bytes(self) -> int:
        """Bytes that the busiest host's NIC must carry one way under any plan."""
        return self.core.lower_bound_bytes

    @property
    def lower_bound_seconds(self) -> float:
        """Seconds that no plan can go below on this topology, latency not counted."""
        return self.core.lower_bound_seconds

    @property
    def predicted_seconds(self) -> float:
        """Seconds from the first message's begin to the last one's end, by an event simulation of this plan."""
        return self.core.predicted_seconds

    @property
    def bound_ratio(self) -> float | None:
        """`predicted_seconds` over `lower_bound_seconds`; None where the bound is below a microsecond, or nothing moves
        between hosts: then latency is nearly all, which the bound does not count."""
        bound = self.lower_bound_seconds
        return self.predicted_seconds / bound if bound >= _LEAST_BOUND_SECONDS else None

    @property
    def num_messages(self) -> int:
        """Chunks times hops, copies inside a rank not counted."""
        return self.core.num_messages

    @property
    def participants(self) -> list[int]:
        """Ascending global ranks of either mesh."""
        return self.core.participants

    @property
    def topology(self) -> Topology:
        """The topology it was planned for."""
        return Topology.from_core(self.core.topology)

    @property
    def specs(self) -> list[tuple[Spec, Spec]]:
        """Source and destination spec per tensor."""
        return [(_spec_of(src), _spec_of(dst)) for src, dst in self.core.tensors]

    def bytes_sent(self, host: int) -> int:
        """Bytes that leave ``host`` (an index of the topology) over its NIC; 0 for a host that it does not use."""
        return self.core.bytes_sent().get(host, 0)

    def bytes_received(self, host: int) -> int:
        """Bytes that enter ``host`` (an index of the topology) over its NIC; 0 for a host that it does not use."""
        return self.core.bytes_received().get(host, 0)

    def plot(self, path: str | Path) -> None:
        """Draws each host's send and receive lanes over predicted time into an image file (format by suffix).

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: matplotlib does not know the format.
        """
        plot_lanes(self.core, self.bound_ratio, Path(path))

    def __str__(self) -> str:
        return self.core.text()

    def __repr__(self) -> str:
        return (
            f"ReshardingPlan(strategy={self.strategy!r}, tensors={len(self.core.tensors)}, "
            f"messages={self.num_messages}, lower_bound_bytes={self.lower_bound_bytes}, "
            f"predicted_seconds={self.predicted_seconds:.6g})"
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ReshardingPlan) and self.core.fingerprint() == other.core.fingerprint()

    def __hash__(self) -> int:
        return hash(self.core.fingerprint())

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return ReshardingPlan.from_json, (self.to_json(),)


def _spec_of(core: "_C.TensorSpec") -> Spec:
    grid = torch.tensor(core.mesh_ranks, dtype=torch.int64, device="cpu").reshape(core.mesh_shape)
    placements = [placement_of(text) for text in core.placements]
    return Spec(core.shape, getattr(torch, core.dtype), Mesh(grid), placements)


def placements_per_tensor(placements: Sequence[Any], num_tensors: int) -> list[Sequence[Placement]]:
    """One sequence of placements per tensor: as given, or one for all. ValueError when the number does not fit."""
    if isinstance(placements, Placement) or not isinstance(placements, Sequence):
        raise ValueError(f"destination placements are a sequence with one placement per mesh axis, got {placements!r}")
    if all(isinstance(placement, Placement) for placement in placements):
        return [placements] * num_tensors
    if len(placements) != num_tensors:
        raise ValueError(f"expected placements for {num_tensors} tensors, got {len(placements)}")
    return list(placements)


def plan_resharding(
    specs: Spec | DTensor | Sequence[Spec | DTensor],
    dst_mesh: AnyMesh,
    dst_placements: Sequence[Any],
    *,
    strategy: object = "auto",
    topology: Topology | None = None,
) -> ReshardingPlan:
    """Plans a reshard. Needs no process group when ``topology`` says where ranks are.

    Args:
        specs: what lies where: one or a list of :class:`Spec` or DTensor.
        dst_mesh: the destination, a ``DeviceMesh`` or :class:`Mesh`.
        dst_placements: one placement per axis of ``dst_mesh``; for a list of specs also one such sequence per tensor.
        strategy: a name ("auto", "broadcast", "send_recv", "broadcast:naive+naive", ...) or an options object.
        topology: hosts and link speeds; the default is what the default group discovers.

    Returns:
        the plan, the same on every rank for the same arguments.

    Raises:
        ValueError: specs that do not fit, a Partial destination, an unknown strategy, or hosts unknown.

    The decomposition and ``broadcast`` follow AlpaComm (MLSys'23, sections 2 and 3); the bound is proven per host and
    host set.
    """
    many = [specs] if isinstance(specs, Spec | DTensor) else _listed(specs)
    if not many:
        raise ValueError("there is no tensor to reshard: the list is empty")
    sources = [_source_spec(spec) for spec in many]
    placements = placements_per_tensor(dst_placements, len(sources))
    moves = [
        Move(source, Spec.unchecked(source.shape, source.dtype, dst_mesh, normal_placements(target, len(source.shape))))
        for source, target in zip(sources, placements, strict=True)
    ]
    plan_options = PlanOptions.of(strategy, topology)
    return ReshardingPlan(plan_of(moves, plan_options.strategy, topology_of(ranks_of(moves), topology, _discovered)))


def _listed(specs: object) -> list[Any]:
    if isinstance(specs, str | bytes) or not isinstance(specs, Sequence):
        raise ValueError(f"specs must be an xm.Spec, a DTensor, or a list of them, got {shown(specs)}")
    return list(specs)


def _source_spec(spec: object) -> Spec:
    if isinstance(spec, DTensor):
        return Spec.of(spec)
    if isinstance(spec, Spec):
        return spec
    raise ValueError(f"expected an xm.Spec or a DTensor, got {type(spec).__name__}")


def _discovered(ranks: list[int], links: "_C.LinkModel") -> "_C.Topology":
    if not dist.is_initialized():
        raise ValueError(
            "it is not known which ranks share a host: pass topology=xm.Topology(devices_per_host=...), "
            "or call it after init_process_group('xmesh')"
        )
    return group_of(None).topology(ranks, links)
