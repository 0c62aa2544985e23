"""What every benchmark on real processes shares: a cluster's processes are started on a job, their records come back
row by row, and the result is printed, saved and judged alike.

    driver                                   ranks
    launch(cluster, listener, script, job) -> job_of_arguments()
       rows of the table    <- Listener <---- publish(job, records)   (rank 0)
       records              <----------------
"""

import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from parts.shared.progress import Listener, tell_rows

from torch_xmesh.testing.cluster import EmulatedCluster

_TAIL_LINES = 30
_BENCHMARKS = Path(__file__).resolve().parents[2]


class MeasurementError(RuntimeError):
    """A rank failed while it measured; the message holds what it wrote last."""


class Checked(Protocol):
    """A record that says how many elements were wrong, and how it is written down."""

    @property
    def wrong(self) -> int: ...

    def to_json(self) -> dict[str, Any]: ...


RecordT = TypeVar("RecordT", bound=Checked)


@dataclass(frozen=True)
class Measurement(Generic[RecordT]):
    """Records, and what has to be said with them in the JSON."""

    records: list[RecordT]
    about: dict[str, Any]


@dataclass(frozen=True)
class Launched:
    """What the ranks left: records as dicts, and all that rank 0 printed."""

    records: list[dict[str, Any]]
    output: str

    def lines(self, prefix: str) -> list[str]:
        """Lines of rank 0 that begin so."""
        return [line for line in self.output.splitlines() if line.startswith(prefix)]


def launch(
    cluster: EmulatedCluster, listener: Listener, script: Path, job: Mapping[str, Any], seconds: float
) -> Launched:
    """Runs a script on every device of a cluster with one argument, the path of the job's JSON, and collects what rank
    0 publishes. The script finds the package `parts`.

    Raises MeasurementError when a rank fails or the processes do not end in `seconds`.
    """
    listener.say(f"starting {cluster.world_size} processes")
    with tempfile.TemporaryDirectory(prefix="xmesh-bench-") as folder:
        records = Path(folder, "records.jsonl")
        path = Path(folder, "job.json")
        path.write_text(json.dumps({**job, "records": str(records)}))
        folders = [str(_BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])]
        ranks = cluster.start(str(script), str(path), env={"PYTHONPATH": os.pathsep.join(folders)})
        try:
            ranks.wait(seconds)
        except TimeoutError as error:
            ranks.stop()
            raise MeasurementError(f"{error}; rank 0 wrote:\n{ranks.ranks[0].output}") from error
        if (failed := ranks.failed_rank) is not None:
            tail = "\n".join(failed.output.splitlines()[-_TAIL_LINES:])
            raise MeasurementError(f"rank {failed.rank} ended with {failed.exit_code}; it wrote last:\n{tail}")
        listener.end()
        lines = records.read_text().splitlines() if records.exists() else []
        return Launched([json.loads(line) for line in lines], ranks.ranks[0].output)


def job_of_arguments() -> dict[str, Any]:
    """The job of this process, one that `launch` has started."""
    job: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    return job


def publish(job: Mapping[str, Any], records: Sequence[dict[str, Any]]) -> None:
    """Hands records to the driver. Called by every rank; rank 0's count."""
    if os.environ["RANK"] == "0":
        with Path(job["records"]).open("a") as lines:
            lines.writelines(json.dumps(record) + "\n" for record in records)
        tell_rows(records)


def machine_notes() -> list[str]:
    """Versions, cores and load, for the head of a table."""
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    processor = platform.processor() or platform.machine()
    return [
        f"torch {torch.__version__}, Python {platform.python_version()}, Linux {platform.release()}",
        f"{os.cpu_count()} cores ({processor}), load before the run {load}",
    ]


def wrong_note(records: Iterable[Checked]) -> str:
    """The table's last line."""
    return f"#wrong over all rows: {sum(record.wrong for record in records)}"


def save(path: Path, records: Sequence[dict[str, Any]], about: Mapping[str, Any]) -> None:
    """Writes `{"about": ..., "records": [...]}`, a line per record."""
    lines = ",\n".join(json.dumps(record) for record in records)
    path.write_text(f'{{"about": {json.dumps(about)},\n"records": [\n{lines}\n]}}\n')


def exit_code(records: Iterable[Checked]) -> int:
    """1 when an element was wrong, which stderr says, else 0."""
    wrong = sum(record.wrong for record in records)
    if wrong:
        print(f"{wrong} wrong elements", file=sys.stderr)
    return 1 if wrong else 0
