"""Records of measured reshards and their table, in the manner of nccl-tests: units in the head, `#wrong` in every
row."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Record:
    """One case under one strategy.

    `seconds` is the median over `runs` of (last rank's end - first rank's start); `bound_seconds` the lower bound at
    the measured goodput; `ratio` is seconds / bound_seconds (None where nothing has to leave a host); `wrong` counts
    wrong elements over all ranks and runs; `stolen` is the median share of the cores' time that other machines got.
    """

    case: str
    strategy: str
    num_bytes: int
    seconds: float
    seconds_min: float
    seconds_max: float
    bound_seconds: float
    ratio: float | None
    predicted_seconds: float | None
    num_messages: int
    wrong: int
    runs: int
    cpu_seconds: float
    plan_strategy: str | None = None
    stolen: float | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


_HEAD = (
    ("case", ""),
    ("strategy", ""),
    ("size", "(MiB)"),
    ("messages", ""),
    ("time", "(ms)"),
    ("min", "(ms)"),
    ("max", "(ms)"),
    ("bound", "(ms)"),
    ("ratio", ""),
    ("predicted", "(ms)"),
    ("rate", "(MB/s)"),
    ("cpu", "(ms)"),
    ("stolen", "(%)"),
    ("runs", ""),
    ("#wrong", ""),
)


def _row(record: Record) -> list[str]:
    def ms(seconds: float | None) -> str:
        return "-" if seconds is None else f"{seconds * 1e3:.3f}" if seconds < 0.1 else f"{seconds * 1e3:.0f}"

    chosen = record.plan_strategy
    strategy = record.strategy if chosen in (None, record.strategy) else f"{record.strategy} ({chosen})"
    return [
        record.case,
        strategy,
        f"{record.num_bytes / 2**20:.1f}",
        str(record.num_messages),
        ms(record.seconds),
        ms(record.seconds_min),
        ms(record.seconds_max),
        ms(record.bound_seconds),
        "-" if record.ratio is None else f"{record.ratio:.3f}",
        ms(record.predicted_seconds),
        f"{record.num_bytes / record.seconds / 1e6:.1f}" if record.seconds > 0 else "-",
        ms(record.cpu_seconds),
        "-" if record.stolen is None else f"{record.stolen * 100:.1f}",
        str(record.runs),
        str(record.wrong),
    ]


def render(records: Sequence[Record], notes: Iterable[str]) -> str:
    """The table as text: notes as comment lines, a head with units, one row per record, the sum of wrong elements
    below."""
    rows = [[name for name, _ in _HEAD], [unit for _, unit in _HEAD], *(_row(record) for record in records)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    lines = [f"# {note}" for note in notes]
    previous = None
    for index, row in enumerate(rows):
        if index >= 2 and previous not in (None, row[0]):
            lines.append("")
        previous = row[0] if index >= 2 else None
        cells = [
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(("# " if index < 2 else "  ") + "  ".join(cells).rstrip())
    lines.append(f"# #wrong over all rows: {sum(record.wrong for record in records)}")
    return "\n".join(lines)


def save(path: Path, records: Sequence[Record], about: dict[str, Any]) -> None:
    """Writes `{"about": ..., "records": [...]}`."""
    path.write_text(json.dumps({"about": about, "records": [record.to_json() for record in records]}, indent=1) + "\n")
