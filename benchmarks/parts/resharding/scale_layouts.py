"""Layouts over many hosts of 8 devices each, for measuring how long planning takes."""

import numpy as np

from parts.resharding.cases import S0, S1, Case, R, Ranks, TensorLayout
from parts.resharding.random_layouts import random_layout

DEVICES = 8
_SHAPE = (32768, 32768)  # where slices are small: 4 GiB
_REPLICATED_SHAPE = (8192, 8192)  # where messages are the largest there are, 4 MiB: 64 of them
_RANDOM_ITEMS = 1 << 26
_RANDOM_SEEDS = range(4)


def scale_cases(num_hosts: int) -> list[Case]:
    """The families of `num_hosts` hosts; beyond 256 only the first three.

    `one_to_all`: replicated, from one host to the others. `replicated`: from n hosts to n others. `all_to_all`: from n
    hosts to n others, every host sends another slice to every host: Shard(0) over hosts and Shard(1) over a host's
    devices becomes Shard(1) over hosts and Shard(0) over devices, n x n slices of one holder and one needer each.
    `transposed`: the same specs on n hosts and on the same ranks read in another order. `gather`: Shard(0) over n / 2
    hosts, replicated on n / 2 others. `groups`: replicas on every fourth host, then in blocks of four, n / 2 hosts a
    side. `uneven`: as `all_to_all` onto 2 n / 3 other hosts, with extents that nothing divides. `random0` to `random3`:
    random_layouts.py on n hosts.
    """
    n, half = num_hosts, num_hosts // 2
    cases = [
        _case("one_to_all", n, _REPLICATED_SHAPE, _grid(0, 1), (R, R), _grid(1, n - 1), (R, R)),
        _case("replicated", n, _REPLICATED_SHAPE, _grid(0, n), (R, R), _grid(n, n), (R, R)),
        _case("all_to_all", n, _SHAPE, _grid(0, n), (S0, S1), _grid(n, n), (S1, S0)),
    ]
    if num_hosts > 256:
        return cases
    uneven = (_SHAPE[0] - 1, _SHAPE[1] - 81)
    cases += [
        _case("transposed", n, _SHAPE, _grid(0, n), (S0, S1), _grid(0, n).T.copy(), (S0, S1)),
        _case("gather", n, _REPLICATED_SHAPE, _grid(0, half), (S0, R), _grid(half, half), (R, R)),
        _case(
            "groups",
            n,
            _SHAPE,
            _grid(0, half).reshape(half // 4, 4, DEVICES),
            (S0, R, S1),
            _grid(half, half).reshape(4, half // 4, DEVICES),
            (R, S0, S1),
        ),
        _case("uneven", n, uneven, _grid(0, n), (S0, S1), _grid(n, 2 * n // 3), (S1, S0)),
    ]
    for seed in _RANDOM_SEEDS:
        layout = random_layout(seed, max_devices=DEVICES, max_hosts=n, total_hosts=n, num_items=_RANDOM_ITEMS)
        cases.append(_case(f"random{seed}", n, layout.shape, layout.src_mesh, layout.src, layout.dst_mesh, layout.dst))
    return cases


def _grid(first_host: int, num_hosts: int) -> Ranks:
    """Ranks by host and device."""
    first = first_host * DEVICES
    return np.arange(first, first + num_hosts * DEVICES, dtype=np.int64).reshape(num_hosts, DEVICES)


def _case(
    name: str,
    num_hosts: int,
    shape: tuple[int, ...],
    src_mesh: Ranks,
    src: tuple[str, ...],
    dst_mesh: Ranks,
    dst: tuple[str, ...],
) -> Case:
    return Case(f"{name}-{num_hosts}", src_mesh, dst_mesh, (TensorLayout(shape, "float32", src, dst),))
