"""Random layouts with every strategy on four ranks, of few bytes and of many: one that hangs is named.

NCCL runs the k-th messages of all pairs of ranks together, so groups that are right by themselves may wait for each
other. Messages of few bytes are buffered, and may hide it.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import device_cases
from layouts import Layout
from ranks import Case, run_cases

import torch_xmesh as xm

SMALL, LARGE = 60, 60
NUM_ELEMENTS = 1 << 20


def enlarged(layout: Layout) -> Layout:
    """About NUM_ELEMENTS, in the first dimension."""
    count = math.prod(layout.shape)
    if not layout.shape or count == 0:
        return layout
    shape = (layout.shape[0] * max(1, NUM_ELEMENTS // count), *layout.shape[1:])
    return dataclasses.replace(layout, shape=shape)


def one(rank: int, world_size: int, layout: Layout, strategy: Any, topology: xm.Topology | None, turn: int) -> None:
    device_cases.one_layout(rank, layout, strategy, topology, turn)


def cases() -> list[Case]:
    found = []
    for count, seed, change, title in ((SMALL, 1, lambda layout: layout, "small"), (LARGE, 5, enlarged, "large")):
        for turn, (layout, strategy, topology) in enumerate(device_cases.layout_cases(4, seed, count)):
            found.append(Case(f"{title} {turn}, {strategy}", one, (change(layout), strategy, topology, turn)))
    return found


def prepare() -> None:
    for case in cases():
        layout, strategy, topology, _ = case.args
        spec = xm.Spec(layout.shape, layout.dtype, layout.src_mesh, layout.src)
        xm.plan_resharding(
            spec, layout.dst_mesh, layout.dst, strategy=strategy, topology=topology or xm.Topology(devices_per_host=4)
        )


def run(device: str) -> bool:
    return run_cases(device, 4, cases(), case_s=15, group_s=4)
