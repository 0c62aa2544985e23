"""Measures cases on the emulated cluster: builds it, measures its goodput, starts a worker on each device, collects the
records."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from parts.resharding.cases import Case
from parts.resharding.records import Record, cells
from parts.shared.harness import Measurement, launch, machine_notes, wrong_note
from parts.shared.progress import Listener
from parts.shared.table import LiveTable
from torch_xmesh.testing.cluster import EmulatedCluster, Goodput

_WORKER = Path(__file__).with_name("cluster_worker.py")
_OVERTIME_SECONDS = 120.0
"""What the runs that always take place, one of each method and all of `auto`, may need beyond the budget."""


@dataclass(frozen=True)
class Settings:
    """How to measure. `costs` are arguments of the product's Topology besides rates, empty if they are to be measured;
    `budget_seconds` is for everything from the building of the cluster on; beyond it each method still runs once."""

    hosts: int = 5
    devices: int = 4
    rate: str | None = "200mbit"
    rate_of: dict[int, str] = field(default_factory=dict)
    is_paced: bool = True
    shared_memory: bool = True
    runs: int = 5
    budget_seconds: float = 480.0
    timeout_seconds: float = 300.0
    costs: dict[str, float] = field(default_factory=dict)


def measure(
    cases: Sequence[Case], strategies: Sequence[str], settings: Settings, live: LiveTable
) -> Measurement[Record]:
    """Runs every case under every strategy, alternating, on one set of processes; rows go into `live` as they are
    measured.

    Raises MeasurementError when a rank fails or the processes do not end in time.
    """
    deadline = time.monotonic() + settings.budget_seconds
    listener = Listener(lambda rows: live.rows([cells(Record(**row)) for row in rows]))
    listener.say("building the cluster, measuring its links")
    with EmulatedCluster(
        hosts=settings.hosts,
        devices=settings.devices,
        rate=settings.rate,
        rate_of=settings.rate_of,
        output=listener.stream,
    ) as cluster:
        goodput = cluster.goodput()
        notes = [*machine_notes(), cluster.description, f"goodput: {_goodput_note(cluster, goodput)}"]
        if not settings.shared_memory:
            notes.append("the product shares no memory inside hosts")
        live.begin(notes)
        nic_bytes_per_s = list(goodput.nic_bytes_per_s) or [1e9]
        job = {
            "cases": [case.to_json() for case in cases],
            "strategies": list(strategies),
            "devices": settings.devices,
            "runs": settings.runs,
            "deadline": deadline,
            "timeout_seconds": settings.timeout_seconds,
            "shared_memory": settings.shared_memory,
            "nic_bytes_per_s": nic_bytes_per_s,
            "is_paced": settings.is_paced and cluster.is_shaped,
            "costs": settings.costs,
        }
        left = max(0.0, deadline - time.monotonic())
        done = launch(cluster, listener, _WORKER, job, left + settings.timeout_seconds + _OVERTIME_SECONDS)
        skipped, costs = done.lines("skipped: "), done.lines("costs: ")
        records = [Record(**record) for record in done.records]
        for note in (*costs, *skipped, wrong_note(records)):
            live.note(note)
        about = {
            "machine": machine_notes(),
            "cluster": cluster.description,
            "is_shaped": cluster.is_shaped,
            "nic_bytes_per_s": nic_bytes_per_s,
            "costs": settings.costs or next((json.loads(line.removeprefix("costs: ")) for line in costs), {}),
            "runs": settings.runs,
            "shared_memory": settings.shared_memory,
            "skipped": skipped,
        }
    return Measurement(records, about)


def _goodput_note(cluster: EmulatedCluster, goodput: Goodput) -> str:
    use = "the bound uses it" if cluster.is_shaped else "loopback; the bound uses it and means little"
    return f"{goodput}; {use}"
