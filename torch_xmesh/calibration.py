"""Measures the links of a running group: what ``torchrun ... -m xmesh_cli calibrate`` does.

The model that plans are judged by: k messages of b bytes together take ``latency + k * message + b / rate`` from one
host to another, where ``rate`` is the lower of the two hosts', and ``local_latency + b / local_rate`` inside a host.
A call costs more than its messages do (Python, agreement, threads waking up), so nothing is taken from one call's
duration: each number comes from the difference of two calls of the same ranks that differ in it alone.

- rate: ``(b1 - b0) / (t1 - t0)`` of a large and a small transfer (:func:`rate_into`).
- message: one tensor over one hop, cut into n messages and into one: ``(t_n - t_1) / (n - 1)``; at least the CPU time
  that a rank needs to receive a message and pass it on, since one thread does that for all of a rank's messages
  (:func:`message_cost`).
- latency: a value that n ranks contribute to goes to a root, and in the other call on from there through all ranks,
  one after another: ``(t_chain - t_root) / (n - 1)`` is a hop, a message and its latency (:func:`hop_cost`).
- a host's rate: the most of what all other hosts together send to it and what it sends to the fastest
  (:func:`nic_rates`).
"""

import dataclasses
import functools
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from torch_xmesh.devices import has_pinned_memory
from torch_xmesh.group import group_of
from torch_xmesh.resharding import reshard_many
from torch_xmesh.spec import Mesh, Spec, device_mesh, mesh_grid, wrap_local
from torch_xmesh.topology import Topology

_NUM_MESSAGES = 64  # messages that one tensor is cut into
_MESSAGE_BYTES = 16 << 10  # bytes of one; shorter ones would travel together, as chunks of a plan do not
_MOST_HOPS = 8  # length of the chain that measures a hop
_SMALL_REPEATS = 20  # times as many as of large calls: small ones end soon and are easily disturbed
_MESSAGE_REPEATS = 5
_LOCAL_FACTOR = 4  # inside a host bytes are so fast that few of them cannot be timed
_LEAST_SHARE = 0.25
_SAME_RATE = 0.05  # NICs that differ less are one rate
_MOST_PASSES = 5  # over all hosts; two do unless NIC rates differ by orders of magnitude


@dataclasses.dataclass(frozen=True)
class Probe:
    """A call to be timed: tensors that lie as ``sources`` say go to one mesh, in one plan."""

    sources: tuple[Spec, ...]
    mesh: Mesh
    placements: tuple[Placement, ...]
    strategy: str


class Timing(NamedTuple):
    """What a call takes."""

    seconds: float  # until the last rank has all
    cpu_seconds: float  # summed over the threads of a rank, on the rank that needs most


#: What each probe takes, the same on every rank; measured by turns, so that a disturbance hits all alike, and so many
#: times as often as usual.
Clock = Callable[[Sequence[Probe], int], list[Timing]]


def calibrate(*, num_bytes: int = 32 << 20, repeats: int = 3, device: torch.device | str = "cpu") -> Topology:
    """Measures hosts and links of the default group. Called by every rank; needs an idle network.

    Args:
        device: where tensors are that move. From a device to a device that is a copy to the host, the network, and a
            copy to the device, as between the stages of a pipeline on devices.
        num_bytes: size of the transfer that measures a network interface's rate, bytes; inside a host 4 times as many.
        repeats: measurements of each kind, of short calls more; the fastest counts.

    Returns:
        on every rank the same topology, with hosts as discovered and ``is_measured`` set. A host's rate is seen up to
        the sum of the other hosts'.

    Raises:
        ValueError: the default group is not on xmesh, or has one rank only.
    """
    ranks_of = _ranks_of_hosts()
    host_of = {rank: host for host, ranks in ranks_of.items() for rank in ranks}
    clock = functools.partial(_timings, repeats=repeats, device=torch.device(device))
    fields: dict[str, float] = {}
    nic_of = {host: int(rate) for host, rate in nic_rates(ranks_of, clock, num_bytes).items()}
    if nic_of:
        nic = statistics.median_low(nic_of.values())
        fields["nic_bytes_per_s"] = nic
        nic_of = {host: rate for host, rate in nic_of.items() if abs(rate - nic) > _SAME_RATE * nic}
    fields |= link_costs(ranks_of, clock, _LOCAL_FACTOR * num_bytes)
    return Topology(host_of, nic_of_host=nic_of, is_measured=True, **fields)  # type: ignore[arg-type]


def measure_costs(
    *, num_bytes: int = 128 << 20, repeats: int = 3, device: torch.device | str = "cpu"
) -> dict[str, float]:
    """What a byte inside a host and a message cost in the default group. Called by every rank; needs idle links.

    Args:
        num_bytes: size of the transfer that measures the rate inside a host, bytes.
        repeats: measurements of each kind, of short calls more; the fastest counts.
        device: as of :func:`calibrate`.

    Returns:
        on every rank the same arguments of :class:`Topology`: ``latency_us`` and ``message_us`` where there are several
        hosts, ``local_bytes_per_s`` and ``local_latency_us`` where one has several ranks.

    Raises:
        ValueError: the default group is not on xmesh, or has one rank only.
    """
    clock = functools.partial(_timings, repeats=repeats, device=torch.device(device))
    return link_costs(_ranks_of_hosts(), clock, num_bytes)


def _ranks_of_hosts() -> dict[int, list[int]]:
    """The default group's ranks by host, both ascending."""
    world_size = dist.get_world_size()
    if world_size < 2:
        raise ValueError("calibration measures the links between ranks, and this group has one rank only")
    host_of = group_of(None).topology(list(range(world_size)), Topology().links).host_of
    ranks_of: dict[int, list[int]] = {host: [] for host in sorted(set(host_of.values()))}
    for rank, host in sorted(host_of.items()):
        ranks_of[host].append(rank)
    return ranks_of


def link_costs(ranks_of: Mapping[int, list[int]], clock: Clock, num_bytes: int) -> dict[str, float]:
    """What :func:`measure_costs` returns, for ranks by host and a clock."""
    costs: dict[str, float] = {}
    entrances = [ranks[0] for ranks in ranks_of.values()]
    if len(entrances) > 1:
        message = message_cost(entrances, clock)
        hop = hop_cost(entrances, clock)
        costs["latency_us"] = round(max(0.0, hop - message) * 1e6, 2)
        costs["message_us"] = round(message * 1e6, 2)
    neighbors = max(ranks_of.values(), key=len)
    if len(neighbors) > 1:
        costs["local_bytes_per_s"] = int(rate_into(neighbors[1:2], {tuple(neighbors[:1]): 1.0}, clock, num_bytes))
        costs["local_latency_us"] = round(hop_cost(neighbors, clock) * 1e6, 2)
    return costs


def nic_rates(ranks_of: Mapping[int, list[int]], clock: Clock, num_bytes: int) -> dict[int, float]:
    """Each host's bytes per second; nothing for one host.

    A pass lets every host send to the one that is fastest so far, which sees the lower rate of the two, and then every
    host receive from all others, each sending in proportion to what is known of it: so it sees its own rate or the sum
    of the known ones, whichever is lower. Nothing known is ever above the truth, so another pass is needed only where
    one found more. No host can be seen faster than all others together.
    """
    hosts = list(ranks_of)
    rates = dict.fromkeys(hosts, 0.0)
    fastest = hosts[0]
    for _ in range(_MOST_PASSES if len(hosts) > 1 else 0):
        for host in hosts:
            if host != fastest:
                pair = rate_into(ranks_of[fastest], {tuple(ranks_of[host]): 1.0}, clock, num_bytes)
                rates |= {end: max(rates[end], pair) for end in (host, fastest)}
        seen_in_pairs = dict(rates)
        for host in hosts:
            slow_first = sorted(set(hosts) - {host}, key=lambda other: rates[other])
            others = {tuple(ranks_of[other]): rates[other] for other in slow_first}
            rates[host] = max(rates[host], rate_into(ranks_of[host], others, clock, num_bytes))
        fastest = max(hosts, key=lambda host: rates[host])
        if all(rates[host] <= (1 + _SAME_RATE) * seen_in_pairs[host] for host in hosts):
            break
    return rates if len(hosts) > 1 else {}


def rate_into(targets: Sequence[int], sources: Mapping[tuple[int, ...], float], clock: Clock, num_bytes: int) -> float:
    """Bytes per second from several sources, each one or more ranks, into ranks of one host.

    Args:
        sources: each one's share of the bytes, in any unit.
        num_bytes: size of the larger of the two transfers whose difference is the rate.
    """
    totals: list[int] = []
    probes: list[Probe] = []
    for wanted in (num_bytes // 4, num_bytes):
        unit = wanted / sum(sources.values())
        specs = [
            Spec((len(ranks) * max(1, round(share * unit / len(ranks))),), torch.uint8, Mesh(ranks), (Shard(0),))
            for ranks, share in sources.items()
        ]
        totals.append(sum(spec.shape[0] for spec in specs))
        probes.append(Probe(tuple(specs), Mesh(targets), (Shard(0),), "send_recv"))
    small_s, large_s = (timing.seconds for timing in clock(probes, 1))
    # The call's cost drops out of the difference, unless a disturbance was longer than the difference itself.
    if large_s - small_s > _LEAST_SHARE * large_s:
        return (totals[1] - totals[0]) / (large_s - small_s)
    return totals[1] / large_s


def message_cost(ranks: Sequence[int], clock: Clock) -> float:
    """Seconds that each further message of one tensor costs, on a hop or the rank that passes it on.

    Args:
        ranks: each on a host of its own; a chain of them passes on.
    """
    chain = _chain(ranks)
    spec = Spec((_NUM_MESSAGES * _MESSAGE_BYTES,), torch.uint8, Mesh(chain[:1]), (Replicate(),))
    probes = [
        Probe((spec,), Mesh(targets), (Replicate(),), f"broadcast:num_chunks={num_messages}")
        for targets in (chain[1:2], chain[1:])
        for num_messages in (1, _NUM_MESSAGES)
    ]
    single, many, single_passed_on, many_passed_on = clock(probes, _MESSAGE_REPEATS)
    on_a_hop = many.seconds - single.seconds
    on_a_rank = many_passed_on.cpu_seconds - single_passed_on.cpu_seconds
    return max(0.0, on_a_hop, on_a_rank) / (_NUM_MESSAGES - 1)


def hop_cost(ranks: Sequence[int], clock: Clock) -> float:
    """Seconds that a small message takes from one rank to the next, all of them inside one host or each on its own."""
    chain = _chain(ranks)
    spec = Spec((1,), torch.float32, Mesh(chain), (Partial("sum"),))
    needers = [Mesh(chain[:1]), Mesh(chain)]
    root, on_from_root = clock([Probe((spec,), mesh, (Replicate(),), "broadcast") for mesh in needers], _SMALL_REPEATS)
    return max(0.0, on_from_root.seconds - root.seconds) / (len(chain) - 1)


def _chain(ranks: Sequence[int]) -> list[int]:
    return list(ranks[: _MOST_HOPS + 1])


def _timings(probes: Sequence[Probe], factor: int, *, repeats: int, device: torch.device) -> list[Timing]:
    """The clock of a running group: the least of each kind, from a common start on."""
    inputs = [[_tensor(spec) for spec in probe.sources] for probe in probes]
    copies = _Copies(device) if device.type != "cpu" else None
    rounds = [
        [_timed(probe, tensors, copies) for probe, tensors in zip(probes, inputs, strict=True)]
        for _ in range(1 + factor * repeats)
    ]
    return [Timing(*map(min, zip(*timings, strict=True))) for timings in zip(*rounds, strict=True)]


class _Copies:
    """Between a device and the host, by way of pinned memory where torch has it."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_pinned = device, has_pinned_memory(device.type)
        self._beside: dict[int, torch.Tensor] = {}  # on the device, by number of bytes

    def of(self, tensors: Sequence[Any], *, to_host: bool) -> None:
        """One way, each as large as this rank's part of a tensor; returns when they are there."""
        for tensor in tensors:
            if isinstance(tensor, DTensor) and (local := tensor.to_local()).numel() > 0:
                host = torch.empty(local.shape, dtype=local.dtype, device="cpu", pin_memory=self._is_pinned)
                if local.nbytes not in self._beside:
                    self._beside[local.nbytes] = torch.ones(local.nbytes, dtype=torch.uint8, device=self._device)
                beside = self._beside[local.nbytes].view(local.dtype)
                ends = (host.view(-1), beside) if to_host else (beside, host.view(-1))
                ends[0].copy_(ends[1], non_blocking=True)
        torch.get_device_module(self._device).synchronize()


def _timed(probe: Probe, tensors: list[DTensor | Spec], copies: _Copies | None) -> Timing:
    dist.barrier()
    start, cpu_start = time.perf_counter(), time.process_time()
    if any(dist.get_rank() in mesh_grid(mesh).ranks for mesh in (probe.mesh, *(spec.mesh for spec in probe.sources))):
        if copies is not None:
            copies.of(tensors, to_host=True)
        moved = reshard_many(tensors, probe.mesh, probe.placements, strategy=probe.strategy)
        if copies is not None:
            copies.of(moved, to_host=False)
    cpu_seconds = time.process_time() - cpu_start
    mine = torch.tensor([time.perf_counter() - start, cpu_seconds], dtype=torch.float64, device="cpu")
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return Timing(*mine.tolist())


def _tensor(spec: Spec) -> DTensor | Spec:
    """This rank's part of a tensor of one dim, whose shards are equal."""
    ranks = mesh_grid(spec.mesh).ranks
    if dist.get_rank() not in ranks:
        return spec
    num_shards = len(ranks) if spec.placements[0] == Shard(0) else 1
    local = torch.ones(spec.shape[0] // num_shards, dtype=spec.dtype, device="cpu")
    return wrap_local(local, spec.shape, device_mesh(spec.mesh), spec.placements)


def run(path: str, num_bytes: int, device: str = "cpu") -> None:
    """The command: joins the group that torchrun describes, measures, writes the file on rank 0."""
    if device != "cpu":
        torch.get_device_module(device).set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("xmesh", timeout=timedelta(minutes=5))
    try:
        topology = calibrate(num_bytes=num_bytes, device=device)
        if dist.get_rank() == 0:
            topology.save(path)
            print(f"{topology.to_json()}\nwritten to {path}", flush=True)
    finally:
        dist.destroy_process_group()
