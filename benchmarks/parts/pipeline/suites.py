"""The pipeline suites: their cases, and how each is run on the emulated cluster."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from parts.pipeline.models import make
from parts.pipeline.records import Record, rows
from parts.pipeline.worker import SIGNAL, stage_seconds
from parts.shared.harness import Measurement, launch, machine_notes
from parts.shared.progress import Listener
from parts.shared.table import LiveTable
from torch_xmesh.testing.cluster import EmulatedCluster

_WORKER = Path(__file__).with_name("worker.py")
_START_SECONDS = 150.0


@dataclass(frozen=True)
class Buffers:
    """What a NIC (`burst`) and a socket (`tcp_wmem`: least, initial, most bytes) take at once.

    It must be small beside a message, else sends look free; a smaller burst costs CPU time, and a smaller socket has to
    be refilled more often."""

    burst: str
    tcp_wmem: tuple[int, int, int]

    @classmethod
    def beside(cls, message_bytes: float) -> "Buffers":
        """About a ninth of a message for a NIC and a fifth for a socket."""
        scale = max(1, int(message_bytes / 300_000))
        return cls(f"{32 * scale}kb", (4096, 16384, 65536 * scale))


_GOODPUT = 0.955
"""Payload over nominal rate of one TCP stream, to choose a NIC rate before there is a NIC."""

_UNET = {"samples": 1, "size": 32, "width": 128, "levels": 3}
_GPT = {"samples": 32, "width": 256, "depth": 6}
"""A MB per microbatch and 50 to 80 ms of forward: smaller messages want buckets so small, and less work per byte so
many bits per second, that emulating the NICs takes the cores away from the stages."""

METHODS = {
    "paced": (
        *("torch_1f1b", "torch_zb1p", "1f1b", "eager_1f1b", "interleaved_1f1b"),
        *("zb_h1", "eager_split", "auto", "auto_held"),
    ),
    "real": ("torch_1f1b", "broadcast", "1f1b", "eager_1f1b", "eager_split", "auto"),
    "meshes": ("by_hand", "1f1b", "eager_1f1b", "auto"),
}
SUITES = tuple(METHODS)


@dataclass(frozen=True)
class Settings:
    """How to measure. `microbatches` and `ratios` replace a suite's own where given; `forward_s` is F of a paced
    stage; `budget_seconds` limits the timed part."""

    suite: str
    methods: Sequence[str]
    runs: int = 5
    stages: int = 4
    microbatches: Sequence[int] = (16, 8)
    ratios: Sequence[float] = (0.5, 1.0)
    models: Sequence[str] = ("unet", "gpt")
    forward_s: float = 0.025
    is_shaped: bool = True
    budget_seconds: float = 420.0
    timeout_seconds: float = 300.0
    timelines: Path | None = None


def measure(settings: Settings, live: LiveTable) -> Measurement[Record]:
    """Runs a suite; rows go into `live` as they are measured.

    Raises MeasurementError when a rank fails or does not end in time, ValueError for methods that the suite does not
    have.
    """
    if unknown := sorted(set(settings.methods) - set(METHODS[settings.suite])):
        raise ValueError(f"suite {settings.suite} has no {unknown}; it has {list(METHODS[settings.suite])}")
    return {"paced": _paced, "real": _real, "meshes": _meshes}[settings.suite](settings, live)


def _paced(settings: Settings, live: LiveTable) -> Measurement[Record]:
    def cases(nic_bytes_per_s: float) -> list[dict[str, Any]]:
        return [
            {
                "name": "paced",
                "kind": "paced",
                "meshes": [[rank] for rank in range(settings.stages)],
                "methods": list(settings.methods),
                "variants": {
                    str(ratio): {
                        "num_stages": settings.stages,
                        "blocks_per_stage": 2,
                        "microbatches": microbatches,
                        "samples": 1,
                        "width": max(1, int(ratio * settings.forward_s * nic_bytes_per_s / 4)),
                        "forward_s": settings.forward_s,
                    }
                    for ratio in (SIGNAL, *settings.ratios)
                },
            }
            for microbatches in settings.microbatches
        ]

    return _on_200mbit(settings, live, cases, hosts=settings.stages, devices=1)


def _meshes(settings: Settings, live: LiveTable) -> Measurement[Record]:
    """Two stages that wait, on two hosts with two devices each."""
    pairs = {
        "2x1->1x2": [[[0], [1]], [[2, 3]]],
        "2->1": [[0, 1], [2]],
        "1->2": [[0], [2, 3]],
    }

    def cases(nic_bytes_per_s: float) -> list[dict[str, Any]]:
        return [
            {
                "name": name,
                "kind": "paced",
                "meshes": meshes,
                "methods": list(settings.methods),
                "variants": {
                    str(ratio): {
                        "num_stages": 2,
                        "blocks_per_stage": 2,
                        "microbatches": settings.microbatches[0],
                        "samples": 2,
                        "width": max(1, int(ratio * settings.forward_s * nic_bytes_per_s / 4 / 2)),
                        "forward_s": settings.forward_s,
                    }
                    for ratio in (SIGNAL, *settings.ratios)
                },
            }
            for name, meshes in pairs.items()
        ]

    return _on_200mbit(settings, live, cases, hosts=2, devices=2)


def _real(settings: Settings, live: LiveTable) -> Measurement[Record]:
    """A cluster for each model and ratio, its NICs as fast as the ratio wants them for the forward measured here."""
    parts = []
    for kind in settings.models:
        sizes: dict[str, Any] = {"microbatches": settings.microbatches[0], **(_UNET if kind == "unet" else _GPT)}
        forward_s, num_bytes = _forward_and_bytes(kind, sizes)
        for ratio in settings.ratios:
            bits_per_s = int(num_bytes * 8 / (ratio * forward_s) / _GOODPUT)
            case = {
                "name": kind,
                "kind": kind,
                "meshes": [[0], [1]],
                "methods": list(settings.methods),
                "variants": {str(SIGNAL): {**sizes, "is_signal": True}, str(ratio): sizes},
            }
            rate = f"{bits_per_s // 1000}kbit"
            parts.append(
                _on_cluster(
                    settings, live, partial(_only, case), hosts=2, devices=1, rate=rate, message_bytes=num_bytes
                )
            )
    records = [record for part in parts for record in part.records]
    about = {**parts[0].about, "clusters": [part.about["cluster"] for part in parts]}
    if about["is_shaped"]:
        about["cluster"] = "2 hosts x 1 devices, NICs shaped for each model and ratio (network namespaces, veth, tbf)"
    return Measurement(records, about)


def _on_200mbit(settings: Settings, live: LiveTable, cases: Any, *, hosts: int, devices: int) -> Measurement[Record]:
    """Paced stages: what a ratio means in bytes follows from the forward's time."""
    message_bytes = min(settings.ratios) * settings.forward_s * 200e6 / 8 * _GOODPUT
    return _on_cluster(settings, live, cases, hosts=hosts, devices=devices, rate="200mbit", message_bytes=message_bytes)


def _only(case: dict[str, Any], nic_bytes_per_s: float) -> list[dict[str, Any]]:
    return [case]


def _forward_and_bytes(kind: str, sizes: dict[str, Any]) -> tuple[float, int]:
    """Seconds of the slower stage's forward on one core, and bytes of a microbatch between the two stages."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        workload = make(kind, sizes)
        entering = workload.boundaries()
        forwards = [
            statistics.median(stage_seconds(workload, stage, inputs)[0] for _ in range(3))
            for stage, inputs in enumerate(entering)
        ]
    finally:
        torch.set_num_threads(threads)
    return max(forwards), workload.boundary_bytes()[0]


def _on_cluster(
    settings: Settings, live: LiveTable, cases: Any, *, hosts: int, devices: int, rate: str, message_bytes: float
) -> Measurement[Record]:
    """`cases(nic_bytes_per_s)` gives the descriptions that the workers run on one set of processes."""
    wanted, buffers = rate if settings.is_shaped else None, Buffers.beside(message_bytes)
    listener = Listener(lambda found: live.rows(rows([Record(**row) for row in found])))
    listener.say("building the cluster, measuring its links")
    with EmulatedCluster(
        hosts=hosts,
        devices=devices,
        rate=wanted,
        burst=buffers.burst,
        tcp_wmem=buffers.tcp_wmem,
        output=listener.stream,
    ) as cluster:
        goodput = cluster.goodput()
        live.begin([*machine_notes(), f"{cluster.description}, burst {buffers.burst}, goodput {goodput}"])
        nic_bytes_per_s = statistics.median(goodput.nic_bytes_per_s) if cluster.is_shaped else 24e6
        job = {
            "suite": settings.suite,
            "cases": cases(nic_bytes_per_s),
            "runs": settings.runs,
            "is_pinned": settings.suite == "real",
            "nic_bytes_per_s": nic_bytes_per_s,
            "budget_seconds": settings.budget_seconds,
            "timeout_seconds": settings.timeout_seconds,
            "timelines": None if settings.timelines is None else str(settings.timelines.resolve()),
        }
        seconds = settings.budget_seconds + settings.timeout_seconds + _START_SECONDS
        done = launch(cluster, listener, _WORKER, job, seconds)
        about = {
            "machine": machine_notes(),
            "cluster": cluster.description,
            "is_shaped": cluster.is_shaped,
            "nic_bytes_per_s": nic_bytes_per_s,
            "forward_seconds": settings.forward_s,
            "runs": settings.runs,
        }
    return Measurement([Record(**record) for record in done.records], about)
