"""Measures cases on the emulated cluster: builds it, measures its goodput, starts a worker on each device, collects the
records."""

import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from cases import Case
from progress import Listener
from table import LiveTable, Record, cells, wrong_note

from torch_xmesh.testing.cluster import Cluster, Goodput

_WORKER = Path(__file__).with_name("cluster_worker.py")
_OVERTIME_SECONDS = 120.0
"""What the runs that always take place, one of each method and all of `auto`, may need beyond the budget."""


class MeasurementError(RuntimeError):
    """A rank failed while it measured; the message holds what it wrote last."""


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


@dataclass(frozen=True)
class Measurement:
    """Records, and what has to be said with them in the JSON."""

    records: list[Record]
    about: dict[str, Any]


def measure(cases: Sequence[Case], strategies: Sequence[str], settings: Settings, live: LiveTable) -> Measurement:
    """Runs every case under every strategy, alternating, on one set of processes; rows go into `live` as they are
    measured.

    Raises MeasurementError when a rank fails or the processes do not end in time.
    """
    deadline = time.monotonic() + settings.budget_seconds
    listener = Listener(lambda rows: live.rows([cells(Record(**row)) for row in rows]))
    listener.say("building the cluster, measuring its links")
    with Cluster(
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
        with tempfile.TemporaryDirectory(prefix="xmesh-bench-") as folder:
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
                "records": f"{folder}/records.jsonl",
            }
            job_path = Path(folder, "job.json")
            job_path.write_text(json.dumps(job))
            left = max(0.0, deadline - time.monotonic())
            seconds = left + settings.timeout_seconds + _OVERTIME_SECONDS
            listener.say(f"starting {cluster.world_size} processes")
            written = run_workers(cluster, _WORKER, job_path, seconds)
            skipped = [line for line in written.splitlines() if line.startswith("skipped: ")]
            costs = [line for line in written.splitlines() if line.startswith("costs: ")]
            lines = Path(folder, "records.jsonl").read_text().splitlines()
        listener.end()
        records = [Record(**json.loads(line)) for line in lines]
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


def run_workers(cluster: Cluster, script: Path, job_path: Path, seconds: float) -> str:
    """Runs a script on every device, and returns what rank 0 wrote.

    Raises MeasurementError when a rank fails or the processes do not end in time.
    """
    job = cluster.start(str(script), str(job_path))
    try:
        job.wait(seconds)
    except TimeoutError as error:
        job.stop()
        raise MeasurementError(f"{error}; rank 0 wrote:\n{job.ranks[0].output}") from error
    failed = job.failed_rank
    if failed is not None:
        tail = "\n".join(failed.output.splitlines()[-30:])
        raise MeasurementError(f"rank {failed.rank} ended with {failed.exit_code}; it wrote last:\n{tail}")
    return job.ranks[0].output


def _goodput_note(cluster: Cluster, goodput: Goodput) -> str:
    use = "the bound uses it" if cluster.is_shaped else "loopback; the bound uses it and means little"
    return f"{goodput}; {use}"


def machine_notes() -> list[str]:
    """Versions, cores and load, for the head of a table."""
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    processor = platform.processor() or platform.machine()
    return [
        f"torch {torch.__version__}, Python {platform.python_version()}, Linux {platform.release()}",
        f"{os.cpu_count()} cores ({processor}), load before the run {load}",
    ]


def main_exit_code(records: Sequence[Record]) -> int:
    """1 when an element was wrong, else 0."""
    wrong = sum(record.wrong for record in records)
    if wrong:
        print(f"{wrong} wrong elements", file=sys.stderr)
    return 1 if wrong else 0
