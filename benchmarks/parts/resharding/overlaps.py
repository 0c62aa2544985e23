"""Who holds and who needs which part of a case, and the least time any method can take: plain Python, apart from the
product's planner.

The bound is for hosts with one full-duplex NIC each and free links inside a host. With slice i of s_i bytes, holder
hosts S_i, needing hosts D_i and NIC rate B_h: the larger of max_h sum_{i: h in D_i - S_i} s_i / B_h (what a host must
receive) and, over host sets U, sum_{i: S_i within U} s_i / sum_{h in U} B_h over the slices that some host outside S_i
needs (what only U can send).
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from parts.resharding.cases import ITEM_BYTES, Case, Ranks, TensorLayout

Box = tuple[tuple[int, int], ...]
"""Begin and end per dim."""


@dataclass(frozen=True)
class Overlap:
    """A box that the same ranks hold and the same ranks need. Holders and needers in the order of their meshes."""

    tensor: int
    box: Box
    num_bytes: int
    holders: tuple[int, ...]
    needers: tuple[int, ...]


def shard_dim(placement: str) -> int | None:
    """The dim of "Shard(dim)", None for "Replicate()"."""
    return int(placement[len("Shard(") : -1]) if placement.startswith("Shard(") else None


def tile(shape: Sequence[int], mesh: Ranks, placements: Sequence[str], rank: int) -> Box | None:
    """The box that `rank` holds under torch's rule (ceil chunks, axes left to right); None outside the mesh."""
    where = np.argwhere(mesh == rank)
    if len(where) == 0:
        return None
    box = [(0, size) for size in shape]
    for axis, placement in enumerate(placements):
        dim = shard_dim(placement)
        if dim is None:
            continue
        begin, end = box[dim]
        chunk = -(-(end - begin) // mesh.shape[axis])
        low = min(end, begin + int(where[0][axis]) * chunk)
        box[dim] = (low, min(end, low + chunk))
    return tuple(box)


def box_shape(box: Box) -> tuple[int, ...]:
    return tuple(end - begin for begin, end in box)


def intersect(a: Box, b: Box) -> Box | None:
    """The common box, None when it is empty."""
    box = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return box if all(begin < end for begin, end in box) else None


def slices_within(box: Box, outer: Box) -> tuple[slice, ...]:
    """How to index `outer`'s local tensor to get `box`."""
    return tuple(slice(b[0] - o[0], b[1] - o[0]) for b, o in zip(box, outer, strict=True))


def _ranks_by_tile(layout: TensorLayout, mesh: Ranks, placements: Sequence[str]) -> dict[Box, list[int]]:
    ranks: dict[Box, list[int]] = defaultdict(list)
    for rank in mesh.reshape(-1).tolist():
        box = tile(layout.shape, mesh, placements, rank)
        if box is not None:
            ranks[box].append(rank)
    return ranks


def overlaps(case: Case) -> list[Overlap]:
    """The common refinement of source and destination tiles, tensor by tensor."""
    found = []
    for index, layout in enumerate(case.tensors):
        holders = _ranks_by_tile(layout, case.src_mesh, layout.src)
        needers = _ranks_by_tile(layout, case.dst_mesh, layout.dst)
        for src_box, src_ranks in holders.items():
            for dst_box, dst_ranks in needers.items():
                box = intersect(src_box, dst_box)
                if box is not None:
                    num_items = int(np.prod(box_shape(box), dtype=np.int64))
                    num_bytes = num_items * ITEM_BYTES[layout.dtype]
                    found.append(Overlap(index, box, num_bytes, tuple(src_ranks), tuple(dst_ranks)))
    return found


def bound_seconds(case: Case, host_of: Callable[[int], int], nic_bytes_per_s: Sequence[float]) -> float:
    """The lower bound of the module's docstring; 0 when no byte has to leave a host."""
    received: dict[int, int] = defaultdict(int)
    sent: dict[frozenset[int], int] = defaultdict(int)
    for part in overlaps(case):
        holder_hosts = frozenset(host_of(rank) for rank in part.holders)
        remote = {host_of(rank) for rank in part.needers} - holder_hosts
        for host in remote:
            received[host] += part.num_bytes
        if remote:
            sent[holder_hosts] += part.num_bytes
    bound = max((num_bytes / nic_bytes_per_s[host] for host, num_bytes in received.items()), default=0.0)
    senders = sorted(set().union(*sent)) if sent else []
    for size in range(1, len(senders) + 1):
        for hosts in combinations(senders, size):
            num_bytes = sum(amount for holders, amount in sent.items() if holders <= set(hosts))
            bound = max(bound, num_bytes / sum(nic_bytes_per_s[host] for host in hosts))
    return bound
