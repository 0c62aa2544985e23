"""The devices that a plan is for: hosts, what each can do, and how fast a mesh of some of them communicates."""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from torch_xmesh.arguments import memory_limit
from torch_xmesh.parallelism.compute import Compute
from torch_xmesh.parallelism.space import Links
from torch_xmesh.spec import Mesh
from torch_xmesh.topology import Topology

ASSUMED = Compute(flops=100e12, bytes_per_s=1e12)
"""What a device is taken to do where nothing is said."""


@dataclasses.dataclass(frozen=True)
class HostKind:
    """Hosts that are alike: what one of their devices does and holds, and their network.

    Attributes:
        memory_bytes: memory of one device; None: no limit.
    """

    num_devices: int
    compute: Compute
    memory_bytes: int | None
    nic_bytes_per_s: float


@dataclasses.dataclass(frozen=True)
class Host:
    """One host's devices, by global rank."""

    ranks: tuple[int, ...]
    kind: HostKind


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Hosts in order.

    Attributes:
        is_assumed: nothing was said of what devices do.
        device_type: of the devices; None where their mesh says none.
    """

    hosts: tuple[Host, ...]
    local_bytes_per_s: float
    local_latency_s: float
    latency_s: float
    is_assumed: bool = False
    device_type: str | None = None

    @functools.cached_property
    def kinds(self) -> list[HostKind]:
        """By class, in the order of their first host."""
        return list(dict.fromkeys(host.kind for host in self.hosts))

    @property
    def num_devices(self) -> int:
        return sum(len(host.ranks) for host in self.hosts)

    @property
    def is_limited(self) -> bool:
        """Whether some devices have a memory limit."""
        return any(kind.memory_bytes is not None for kind in self.kinds)

    def limited_to(self, memory_bytes: int) -> "Cluster":
        """The same with another limit where there is one."""
        kinds = {kind: dataclasses.replace(kind, memory_bytes=memory_bytes) for kind in self.kinds if kind.memory_bytes}
        hosts = (dataclasses.replace(host, kind=kinds.get(host.kind, host.kind)) for host in self.hosts)
        return dataclasses.replace(self, hosts=tuple(hosts))

    def hosts_of(self, kind: HostKind) -> list[Host]:
        """Those of a class."""
        return [host for host in self.hosts if host.kind == kind]

    def links(self, ranks: Sequence[int], shape: Sequence[int]) -> list[Links]:
        """For each axis of a mesh of these devices: its size, the latency of a message, the seconds per byte of a
        device that sends to its neighbor, and those where all devices of a group send to all. All groups along the axis
        are taken to communicate at once. Groups that span hosts share each host's network interface; where all send to
        all, a host's devices in one group share it too."""
        host_of = {rank: number for number, host in enumerate(self.hosts) for rank in host.ranks}
        out: list[Links] = []
        for axis, size in enumerate(shape):
            stride = math.prod(shape[axis + 1 :])
            groups: dict[int, Counter[int]] = {}
            for place, rank in enumerate(ranks):
                group = place // (stride * size) * stride + place % stride
                groups.setdefault(group, Counter())[host_of[rank]] += 1
            leaving: Counter[int] = Counter()
            exchanged: dict[int, float] = {}
            for hosts in groups.values():
                for host, count in hosts.items() if len(hosts) > 1 else ():
                    leaving[host] += 1
                    exchanged[host] = exchanged.get(host, 0.0) + count * (size - count) / (size - 1)
            if leaving:
                rings, exchanges = (
                    max(count / self.hosts[host].kind.nic_bytes_per_s for host, count in by_host.items())
                    for by_host in (leaving, exchanged)
                )
                local = 1 / self.local_bytes_per_s
                out.append((size, self.latency_s, max(rings, local), max(exchanges, rings, local)))
            else:
                out.append((size, self.local_latency_s, 1 / self.local_bytes_per_s))
        return out

    def kind_of(self, ranks: Sequence[int]) -> HostKind:
        """What the slowest and smallest of some devices do and hold."""
        chosen = set(ranks)
        kinds = {host.kind for host in self.hosts if chosen & set(host.ranks)}
        limits = [kind.memory_bytes for kind in kinds if kind.memory_bytes is not None]
        computes = {kind.compute for kind in kinds}
        slowest = Compute(min(compute.flops for compute in computes), min(compute.bytes_per_s for compute in computes))
        return HostKind(
            min(kind.num_devices for kind in kinds),
            next(iter(computes)) if len(computes) == 1 else slowest,
            min(limits, default=None),
            min(kind.nic_bytes_per_s for kind in kinds),
        )


def cluster_of(
    devices: Mesh | DeviceMesh,
    topology: Topology | None,
    compute: Compute | Mapping[int, Compute] | None,
    memory_limit_bytes: int | Mapping[int, int] | None,
) -> Cluster:
    """The cluster that `devices` are. Each row of a mesh of two axes is a host; of a mesh of one axis `topology` says
    the hosts, else all of it is one. `compute` and `memory_limit_bytes` may differ from host to host, by its number.

    Raises:
        ValueError: a mesh of no or more axes, a topology that says other hosts than the rows, a rank without a host, or
            a host for which something is missing, or said though there is none.
    """
    mesh = mesh_of_devices(devices)
    if topology is not None and not isinstance(topology, Topology):
        raise ValueError(f"topology must be an xm.Topology, got {topology!r} ({type(topology).__name__})")
    links = topology or Topology(devices_per_host=1)
    host_of = _hosts_of(mesh, topology)
    rates: dict[int, int] = dict(links.to_core(list(mesh.ranks)).nic_of_host)
    names = list(dict.fromkeys(host_of[rank] for rank in mesh.ranks))
    for what, given in (("compute", compute), ("memory_limit_bytes", memory_limit_bytes)):
        _check_hosts(what, given, names)
    if not (topology is not None and topology.knows_hosts):
        _check_hosts("the topology's nic_of_host", rates, names)
    hosts = []
    for name in names:
        ranks = tuple(rank for rank in mesh.ranks if host_of[rank] == name)
        rate = rates.get(name, links.links.nic_bytes_per_s)
        kind = HostKind(len(ranks), _compute(compute, name), _limit(memory_limit_bytes, name), float(rate))
        hosts.append(Host(ranks, kind))
    return Cluster(
        tuple(hosts),
        float(links.links.local_bytes_per_s),
        links.links.local_latency_us * 1e-6,
        links.links.latency_us * 1e-6,
        compute is None,
        mesh.device_type,
    )


def mesh_of_devices(devices: Any) -> Mesh:
    """Hosts, and devices of each, or devices alone.

    Raises:
        ValueError: no mesh of one or two axes.
    """
    expected = "devices is a mesh of one or two axes (hosts, devices of each)"
    if isinstance(devices, int):
        raise ValueError(f"{expected}, got {devices!r} ({type(devices).__name__}): xm.Mesh(range(n)) is n devices")
    mesh = devices if isinstance(devices, Mesh) else Mesh(devices)
    if mesh.ndim not in (1, 2):
        raise ValueError(f"{expected}, got {mesh.ndim}: {mesh!r}")
    if not mesh.ranks:
        raise ValueError(f"{expected}, got one without ranks: {mesh!r}")
    return mesh


def _hosts_of(mesh: Mesh, topology: Topology | None) -> dict[int, int]:
    """The host of each rank."""
    row = mesh.shape[-1]
    if topology is None or not topology.knows_hosts:
        return {rank: place // row for place, rank in enumerate(mesh.ranks)}
    host_of: dict[int, int] = dict(topology.to_core(list(mesh.ranks)).host_of)
    rows = [mesh.ranks[begin : begin + row] for begin in range(0, len(mesh.ranks), row)] if mesh.ndim == 2 else []
    row_of: dict[int, int] = {}
    for number, ranks in enumerate(rows):
        hosts = sorted({host_of[rank] for rank in ranks})
        where = f"row {number} of devices (ranks {list(ranks)})"
        advice = "pass a mesh of one axis where rows are no hosts"
        if len(hosts) > 1:
            raise ValueError(f"{where} is one host, the topology has it on hosts {hosts}: {advice}")
        other = row_of.setdefault(hosts[0], number)
        if other != number:
            raise ValueError(
                f"{where} is a host of its own, the topology has it on host {hosts[0]}, as row {other}: {advice}"
            )
    return host_of


def _check_hosts(what: str, given: Any, hosts: Sequence[int]) -> None:
    """What is said by host is said of the hosts that there are."""
    unknown = [host for host in given if host not in hosts] if isinstance(given, Mapping) else []
    if unknown:
        raise ValueError(f"{what} says something of host {unknown[0]!r}: the devices are on hosts {sorted(hosts)}")


def _of_host(given: Any, host: int, what: str) -> Any:
    if not isinstance(given, Mapping):
        return given
    if host not in given:
        raise ValueError(f"{what} says nothing of host {host}: it has {', '.join(map(str, sorted(given))) or 'none'}")
    return given[host]


def _compute(given: Any, host: int) -> Compute:
    if given is None:
        return ASSUMED
    found = _of_host(given, host, "compute")
    if not isinstance(found, Compute):
        raise ValueError(f"compute is an xm.Compute, or one by host, got {found!r} ({type(found).__name__})")
    return found


def _limit(given: int | Mapping[int, int] | None, host: int) -> int | None:
    found = _of_host(given, host, "memory_limit_bytes")
    return memory_limit(found)


def logical_shapes(num_hosts: int, devices_per_host: int) -> list[tuple[int, ...]]:
    """Meshes of one and two axes that a submesh is looked at as: all in a row, hosts by devices, and with an axis that
    is half and twice as long as a host, or two."""
    total = num_hosts * devices_per_host
    out: list[tuple[int, ...]] = [(total,)]
    for inner in (devices_per_host, devices_per_host // 2, devices_per_host * 2, 2):
        if (
            1 < inner < total
            and total % inner == 0
            and (devices_per_host % inner == 0 or inner % devices_per_host == 0)
        ):
            out.append((total // inner, inner))
    return list(dict.fromkeys(out))
