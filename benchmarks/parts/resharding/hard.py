"""Which random layouts are hard: those where even the best broadcast plan is far from the bound, by the product's own
simulator."""

from collections.abc import Mapping, Sequence

from parts.resharding.cases import Case, random_case
from parts.resharding.overlaps import bound_seconds
from parts.shared.progress import Progress
from torch_xmesh.testing.cluster import parse_rate

BROADCASTS = ("broadcast:naive+naive", "broadcast:size+naive", "broadcast:size+dfs", "broadcast:size+greedy")
_HARD = 1.2
_MIN_BOUND_SECONDS = 1.0
_GOODPUT = 0.955  # the fraction of the nominal rate that TCP over Ethernet carries
_MAX_TRIES = 4000


def best_broadcast_ratio(case: Case, *, devices: int, nic_bytes_per_s: Sequence[float], bound: float) -> float:
    """predicted / bound of the best of the broadcast strategies. `nic_bytes_per_s`: of each host."""
    import numpy as np
    import torch

    import torch_xmesh as xm
    from parts.resharding.methods import placement

    ranks = np.union1d(case.src_mesh, case.dst_mesh).tolist()
    host_of = {rank: rank // devices for rank in ranks}
    topology = xm.Topology(
        host_of=host_of, nic_of_host={host: int(nic_bytes_per_s[host]) for host in set(host_of.values())}
    )
    layout = case.tensors[0]
    spec = xm.Spec(
        layout.shape, getattr(torch, layout.dtype), xm.Mesh(case.src_mesh), [placement(text) for text in layout.src]
    )
    dst = [placement(text) for text in layout.dst]
    predicted = [
        xm.plan_resharding(spec, xm.Mesh(case.dst_mesh), dst, strategy=name, topology=topology).predicted_seconds
        for name in BROADCASTS
    ]
    return float(min(predicted)) / bound


def hard_cases(
    count: int, *, first_seed: int, rate: str, rate_of: Mapping[int, str], num_bytes: int, hosts: int, devices: int
) -> list[Case]:
    """The first `count` layouts from `first_seed` on whose bound is at least 1 s and whose best broadcast plan exceeds
    1.2 of it, at NICs of `rate`, 200mbit for "none", or of `rate_of` a host.

    Raises ValueError when too few are found in 4,000 seeds.
    """
    usual = "200mbit" if rate == "none" else rate
    nic_bytes_per_s = [parse_rate(rate_of.get(host, usual)) / 8 * _GOODPUT for host in range(hosts)]
    found: list[Case] = []
    progress = Progress()
    for seed in range(first_seed, first_seed + _MAX_TRIES):
        progress.say(f"looking for hard layouts: {len(found)} of {count}, seed {seed}")
        case = random_case(seed, num_bytes=num_bytes, hosts=hosts, devices=devices)
        bound = bound_seconds(case, lambda rank: rank // devices, nic_bytes_per_s)
        if bound < _MIN_BOUND_SECONDS:
            continue
        if best_broadcast_ratio(case, devices=devices, nic_bytes_per_s=nic_bytes_per_s, bound=bound) > _HARD:
            found.append(case)
        if len(found) == count:
            progress.clear()
            return found
    raise ValueError(f"random --hard: {len(found)} of {count} hard layouts within {_MAX_TRIES} seeds from {first_seed}")
