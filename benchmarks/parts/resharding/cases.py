"""The layouts that the suites measure: which tensor, sharded how, from which ranks to which.

Ranks are host * devices + device. Placements are written as torch writes them, one per mesh axis.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from parts.resharding.random_layouts import random_layout

SUITES = ("table2", "fig5", "fig8", "refit", "random")
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "int32": 4, "int64": 8}

Ranks = npt.NDArray[np.int64]
S0, S1, S2, R = "Shard(0)", "Shard(1)", "Shard(2)", "Replicate()"


@dataclass(frozen=True)
class TensorLayout:
    """One tensor's global shape, dtype name and placements on both meshes."""

    shape: tuple[int, ...]
    dtype: str
    src: tuple[str, ...]
    dst: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, eq=False)
class Case:
    """One or many tensors on the same two meshes; a list of tensors is resharded by one call."""

    name: str
    src_mesh: Ranks
    dst_mesh: Ranks
    tensors: tuple[TensorLayout, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all global tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def world_size(self) -> int:
        return int(max(self.src_mesh.max(), self.dst_mesh.max())) + 1

    def to_json(self) -> dict[str, Any]:
        tensors = [
            {"shape": list(t.shape), "dtype": t.dtype, "src": list(t.src), "dst": list(t.dst)} for t in self.tensors
        ]
        return {
            "case": self.name,
            "src_mesh": self.src_mesh.tolist(),
            "dst_mesh": self.dst_mesh.tolist(),
            "tensors": tensors,
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> "Case":
        """Reads what `to_json` writes."""
        tensors = tuple(
            TensorLayout(tuple(t["shape"]), t["dtype"], tuple(t["src"]), tuple(t["dst"])) for t in data["tensors"]
        )
        return Case(data["case"], np.asarray(data["src_mesh"]), np.asarray(data["dst_mesh"]), tensors)


def grid(hosts: int, devices: int, *, first_host: int, devices_per_host: int) -> Ranks:
    """The (hosts, devices) mesh of the first devices of consecutive hosts."""
    first = (first_host + np.arange(hosts)) * devices_per_host
    return np.asarray(first[:, None] + np.arange(devices)[None, :], dtype=np.int64)


def table2(num_bytes: int, devices_per_host: int) -> list[Case]:
    """The nine many-to-many cases, (1024, 1024, 512) fp32 scaled to about `num_bytes`; the sixth has its first dim
    times 3/2."""
    depth = max(4, round(num_bytes / (4 * 512 * 512) / 4) * 4)
    shape = (512, 512, depth)
    padded = (768, 512, max(1, round(depth * 2 / 3)))
    two, four = (2, 4), (3, 4)
    rows = [
        ("c1", shape, (S0, R), (S0, R), two, two),
        ("c2", shape, (R, R), (S0, R), two, two),
        ("c3", shape, (S1, R), (S0, R), two, two),
        ("c4", shape, (S1, S1), (S0, S0), two, two),
        ("c5", shape, (R, S0), (S0, R), two, two),
        ("c6", padded, (S0, R), (S0, R), two, four),
        ("c7", shape, (R, S0), (R, R), (1, 4), two),
        ("c8", shape, (R, R), (R, R), (2, 3), (3, 2)),
        ("c9", shape, (S1, R), (S2, R), two, two),
    ]
    cases = []
    for name, tensor_shape, src, dst, src_size, dst_size in rows:
        src_mesh = grid(*src_size, first_host=0, devices_per_host=devices_per_host)
        dst_mesh = grid(*dst_size, first_host=src_size[0], devices_per_host=devices_per_host)
        cases.append(Case(name, src_mesh, dst_mesh, (TensorLayout(tensor_shape, "float32", src, dst),)))
    return cases


def fig5(num_bytes: int, devices_per_host: int) -> list[Case]:
    """One sender to 1 host of 1 to 4 devices, and to 1 to 4 hosts of 2 devices; everything replicated."""
    tensor = TensorLayout((num_bytes // 4,), "float32", (R, R), (R, R))
    src_mesh = grid(1, 1, first_host=0, devices_per_host=devices_per_host)
    cases = []
    for hosts, devices in [(1, 1), (1, 2), (1, 3), (1, 4), (2, 2), (3, 2), (4, 2)]:
        dst_mesh = grid(hosts, devices, first_host=1, devices_per_host=devices_per_host)
        cases.append(Case(f"1to{hosts}x{devices}", src_mesh, dst_mesh, (tensor,)))
    return cases


def refit(num_bytes: int, devices_per_host: int) -> list[Case]:
    """A transformer's weights (24 layers, 292 tensors, bf16) from a trainer to a rollout engine: TP4xDP2 to TP2, FSDP8
    to TP4."""
    hidden = max(8, int(math.sqrt(num_bytes / 2 / (24 * 12)) / 8) * 8)
    weights = _transformer(num_layers=24, hidden=hidden, vocabulary=16 * hidden)
    hosts_of_8 = -(-8 // devices_per_host)
    trainer = np.arange(8, dtype=np.int64)
    first_rollout = hosts_of_8 * devices_per_host
    tp2 = first_rollout + np.arange(2, dtype=np.int64)
    tp4 = first_rollout + np.arange(4, dtype=np.int64)
    tensor_parallel = [TensorLayout(shape, "bfloat16", (R, split), (split,)) for shape, split in weights]
    fully_sharded = [TensorLayout(shape, "bfloat16", (S0,), (split,)) for shape, split in weights]
    return [
        Case("tp4xdp2-tp2", trainer.reshape(2, 4), tp2, tuple(tensor_parallel)),
        Case("fsdp8-tp4", trainer, tp4, tuple(fully_sharded)),
    ]


def _transformer(*, num_layers: int, hidden: int, vocabulary: int) -> list[tuple[tuple[int, ...], str]]:
    """Shape and tensor-parallel placement of every parameter, in the order of registration."""
    layer: list[tuple[tuple[int, ...], str]] = [
        ((hidden,), R),
        ((hidden,), R),
        ((3 * hidden, hidden), S0),
        ((3 * hidden,), S0),
        ((hidden, hidden), S1),
        ((hidden,), R),
        ((hidden,), R),
        ((hidden,), R),
        ((4 * hidden, hidden), S0),
        ((4 * hidden,), S0),
        ((hidden, 4 * hidden), S1),
        ((hidden,), R),
    ]
    ends: list[tuple[tuple[int, ...], str]] = [((hidden,), R), ((hidden,), R), ((vocabulary, hidden), S0)]
    return [((vocabulary, hidden), S0), *(layer * num_layers), *ends]


def random_case(seed: int, *, num_bytes: int, hosts: int, devices: int) -> Case:
    """The layout of a seed on a cluster of `hosts` hosts: uneven shards, 1 to 3 axes, disjoint, overlapping or
    identical meshes."""
    layout = random_layout(seed, max_hosts=hosts, max_devices=devices, total_hosts=hosts, num_items=num_bytes // 4)
    tensor = TensorLayout(layout.shape, "float32", layout.src, layout.dst)
    return Case(f"seed{seed}", layout.src_mesh, layout.dst_mesh, (tensor,))


def suite_cases(suite: str, *, num_bytes: int, hosts: int, devices: int, seeds: Sequence[int]) -> list[Case]:
    """The cases of a suite that fit on the cluster. Raises ValueError when none does."""
    makers = {"table2": table2, "fig5": fig5, "fig8": table2, "refit": refit}
    if suite == "random":
        cases = [random_case(seed, num_bytes=num_bytes, hosts=hosts, devices=devices) for seed in seeds]
    else:
        cases = makers[suite](num_bytes, devices)
    fitting = [case for case in cases if fits(case, hosts=hosts, devices=devices)]
    if not fitting:
        raise ValueError(f"suite {suite}: no case fits on {hosts} hosts x {devices} devices")
    return fitting


def fits(case: Case, *, hosts: int, devices: int) -> bool:
    """Whether the case's meshes exist on the cluster and keep each rank once."""
    unique = all(len(np.unique(mesh)) == mesh.size for mesh in (case.src_mesh, case.dst_mesh))
    return unique and case.world_size <= hosts * devices
