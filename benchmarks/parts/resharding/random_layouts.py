"""Seeded random layouts: the family over which planners and executors are judged.

Half of the seeds have disjoint meshes, a quarter overlapping ones, a quarter identical ones; 1 to 3 mesh axes, 1 to 4
tensor dims, shapes that the meshes do not divide. A layout is a pure function of its seed and bounds.
"""

import random
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_MAX_AXES = 3
_MAX_DIMS = 4


@dataclass(frozen=True, eq=False)
class RandomLayout:
    """A tensor's shape and placements on two meshes of ranks, `devices_per_host` consecutive ranks to a host."""

    seed: int
    relation: str
    devices_per_host: int
    shape: tuple[int, ...]
    src_mesh: npt.NDArray[np.int64]
    src: tuple[str, ...]
    dst_mesh: npt.NDArray[np.int64]
    dst: tuple[str, ...]


def random_layout(
    seed: int, *, max_hosts: int = 8, max_devices: int = 8, total_hosts: int | None = None, num_items: int = 1 << 22
) -> RandomLayout:
    """The layout of `seed`: up to `max_hosts` hosts and `max_devices` devices a side, about `num_items` elements.

    With `total_hosts` both meshes lie on that many hosts of `max_devices` ranks each.
    """
    rng = random.Random(seed)
    relation = ("disjoint", "disjoint", "overlapping", "identical")[seed % 4]
    src_hosts, dst_hosts, first_dst_host = _hosts(rng, relation, max_hosts, total_hosts)
    src_devices = rng.randint(1, max_devices)
    dst_devices = src_devices if relation == "identical" else rng.randint(1, max_devices)
    src_ranks = _ranks(0, src_hosts, src_devices, max_devices)
    dst_ranks = src_ranks if relation == "identical" else _ranks(first_dst_host, dst_hosts, dst_devices, max_devices)
    shape = _shape(rng, num_items)
    src_mesh = src_ranks.reshape(_factor(rng, src_hosts, src_devices))
    dst_mesh = dst_ranks.reshape(_factor(rng, dst_hosts, dst_devices))
    src = _placements(rng, src_mesh.ndim, len(shape))
    dst = _placements(rng, dst_mesh.ndim, len(shape))
    return RandomLayout(seed, relation, max_devices, shape, src_mesh, src, dst_mesh, dst)


def _hosts(rng: random.Random, relation: str, max_hosts: int, total_hosts: int | None) -> tuple[int, int, int]:
    """Hosts of either mesh and the first host of the destination (the source starts at 0)."""
    total = total_hosts if total_hosts is not None else 2 * max_hosts
    if relation == "identical":
        hosts = rng.randint(1, min(max_hosts, total))
        return hosts, hosts, 0
    if relation == "disjoint":
        src_hosts = rng.randint(1, min(max_hosts, total - 1))
        return src_hosts, rng.randint(1, min(max_hosts, total - src_hosts)), src_hosts
    src_hosts = rng.randint(1, min(max_hosts, total))
    first_dst_host = rng.randrange(src_hosts)
    return src_hosts, rng.randint(1, min(max_hosts, total - first_dst_host)), first_dst_host


def _ranks(first_host: int, hosts: int, devices: int, devices_per_host: int) -> npt.NDArray[np.int64]:
    first = (first_host + np.arange(hosts, dtype=np.int64)) * devices_per_host
    return np.asarray(first[:, None] + np.arange(devices, dtype=np.int64)[None, :]).reshape(-1)


def _factor(rng: random.Random, hosts: int, devices: int) -> tuple[int, ...]:
    """A mesh shape of 1 to 3 axes over hosts x devices ranks; a host's devices stay together on the last axes."""
    num_axes = rng.randint(1, _MAX_AXES)
    if num_axes == 1:
        return (hosts * devices,)
    if num_axes == 2:
        return (hosts, devices)
    side = rng.choice([hosts, devices])
    divisors = [d for d in range(1, side + 1) if side % d == 0]
    inner = rng.choice(divisors)
    return (hosts // inner, inner, devices) if side == hosts else (hosts, devices // inner, inner)


def _shape(rng: random.Random, num_items: int) -> tuple[int, ...]:
    """1 to 4 dims with about `num_items` elements, each but the last between 3 and 40 and mostly indivisible."""
    dims = [rng.randint(3, 40) for _ in range(rng.randint(1, _MAX_DIMS) - 1)]
    last = max(1, num_items // int(np.prod(dims, dtype=np.int64)))
    shape = [*dims, last]
    rng.shuffle(shape)
    return tuple(shape)


def _placements(rng: random.Random, num_axes: int, num_dims: int) -> tuple[str, ...]:
    choices = [f"Shard({dim})" for dim in range(num_dims)] + ["Replicate()"]
    return tuple(rng.choice(choices) for _ in range(num_axes))
