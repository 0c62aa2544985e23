"""Measures the links of a running group: what ``torchrun ... -m torch_xmesh calibrate`` does.

The model is alpha-beta with a cost per message: sending b bytes in k messages over a network interface takes
``latency + k * message + b / rate`` (the model that plans are judged by).
"""

import statistics
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from torch_xmesh.group import group_of
from torch_xmesh.resharding import reshard, reshard_many
from torch_xmesh.spec import Mesh, Spec, device_mesh, wrap_local
from torch_xmesh.topology import Topology

_NUM_SMALL = 512
_LOCAL_FACTOR = 4  # inside a host bytes are so fast that few of them cannot be timed
_LEAST_SHARE = 0.25
_SAME_RATE = 0.05  # NICs that differ less are one rate


def calibrate(*, num_bytes: int = 32 << 20, repeats: int = 3) -> Topology:
    """Measures hosts and links of the default group. Called by every rank; needs an idle network.

    Args:
        num_bytes: size of the transfer that measures a network interface's rate, bytes; inside a host 4 times as many.
        repeats: measurements of each kind; the fastest counts.

    Returns:
        on every rank the same topology, with hosts as discovered and ``is_measured`` set.

    Raises:
        ValueError: the default group is not on xmesh, or has one rank only.
    """
    ranks_of = _ranks_of_hosts()
    host_of = {rank: host for host, ranks in ranks_of.items() for rank in ranks}
    fields: dict[str, float] = {}
    nic_of = _nic_rates(ranks_of, num_bytes, repeats)
    if nic_of:
        nic = int(statistics.median(nic_of.values()))
        fields["nic_bytes_per_s"] = nic
        nic_of = {host: rate for host, rate in nic_of.items() if abs(rate - nic) > _SAME_RATE * nic}
    fields |= measure_costs(num_bytes=_LOCAL_FACTOR * num_bytes, repeats=repeats)
    return Topology(host_of, nic_of_host=nic_of, is_measured=True, **fields)  # type: ignore[arg-type]


def measure_costs(*, num_bytes: int = 128 << 20, repeats: int = 3) -> dict[str, float]:
    """What a byte inside a host and a message cost in the default group. Called by every rank; needs idle links.

    Args:
        num_bytes: size of the transfer that measures the rate inside a host, bytes.
        repeats: measurements of each kind; the fastest counts.

    Returns:
        on every rank the same arguments of :class:`Topology`: ``latency_us`` and ``message_us`` where there are several
        hosts, ``local_bytes_per_s`` and ``local_latency_us`` where one has several ranks.

    Raises:
        ValueError: the default group is not on xmesh, or has one rank only.
    """
    ranks_of = list(_ranks_of_hosts().values())
    costs: dict[str, float] = {}
    if len(ranks_of) > 1:
        costs |= _small_costs(ranks_of[0][0], ranks_of[1][0], repeats, local=False)
    pair = next((ranks for ranks in ranks_of if len(ranks) > 1), None)
    if pair is not None:
        costs["local_bytes_per_s"] = int(_rate(pair[0], pair[1], num_bytes, repeats))
        costs |= _small_costs(pair[0], pair[1], repeats, local=True)
    return costs


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


def _nic_rates(ranks_of: dict[int, list[int]], num_bytes: int, repeats: int) -> dict[int, int]:
    """Each host's rate to or from its neighbours, whichever is more; nothing for one host."""
    hosts = list(ranks_of)
    if len(hosts) < 2:
        return {}
    outgoing = [
        _rate(ranks_of[host][0], ranks_of[hosts[(i + 1) % len(hosts)]][0], num_bytes, repeats)
        for i, host in enumerate(hosts)
    ]
    return {host: int(max(outgoing[i], outgoing[i - 1])) for i, host in enumerate(hosts)}


def _rate(source: int, target: int, num_bytes: int, repeats: int) -> float:
    """Bytes per second from one rank to another."""
    small, large = num_bytes // 4, num_bytes
    seconds_small = _seconds(source, target, [small], repeats)
    seconds_large = _seconds(source, target, [large], repeats)
    # Latency drops out of the difference, unless a disturbance was longer than the difference itself.
    seconds = seconds_large - seconds_small
    return (large - small) / seconds if seconds > _LEAST_SHARE * seconds_large else large / seconds_large


def _small_costs(source: int, target: int, repeats: int, *, local: bool) -> dict[str, float]:
    """Latency of one small message, and what each further one adds, microseconds."""
    one = _seconds(source, target, [4], repeats * 5)
    many = _seconds(source, target, [4] * _NUM_SMALL, repeats)
    message = max(0.0, (many - one) / (_NUM_SMALL - 1))
    if local:
        return {"local_latency_us": round(one * 1e6, 2)}
    return {"latency_us": round(max(0.0, one - message) * 1e6, 2), "message_us": round(message * 1e6, 2)}


def _seconds(source: int, target: int, sizes: list[int], repeats: int) -> float:
    """The shortest time, over the group, from a common start to the arrival of all tensors."""
    tensors = [_tensor(source, size) for size in sizes]
    mesh = Mesh([target])

    def move() -> None:
        if dist.get_rank() not in (source, target):
            return
        if len(tensors) == 1:
            reshard(tensors[0], mesh, (Replicate(),), strategy="send_recv")
        else:
            reshard_many(tensors, mesh, (Replicate(),), strategy="send_recv")

    return min(_timed(move) for _ in range(repeats + 1))


def _timed(move: Callable[[], None]) -> float:
    dist.barrier()
    start = time.perf_counter()
    move()
    mine = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return float(mine)


def _tensor(source: int, num_bytes: int) -> DTensor | Spec:
    shape = torch.Size([num_bytes])
    mesh = Mesh([source])
    if dist.get_rank() != source:
        return Spec(shape, torch.uint8, mesh, (Replicate(),))
    return wrap_local(torch.zeros(shape, dtype=torch.uint8), shape, device_mesh(mesh), (Replicate(),))


def run(path: str, num_bytes: int) -> None:
    """The command: joins the group that torchrun describes, measures, writes the file on rank 0."""
    dist.init_process_group("xmesh", timeout=timedelta(minutes=5))
    try:
        topology = calibrate(num_bytes=num_bytes)
        if dist.get_rank() == 0:
            topology.save(path)
            print(f"{topology.to_json()}\nwritten to {path}", flush=True)
    finally:
        dist.destroy_process_group()
