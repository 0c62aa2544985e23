"""Records of measured reshards and their table, in the manner of nccl-tests: units in the head, `#wrong` in every
row."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol


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


_NUMBER_WIDTH = 8
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


class LiveTable:
    """A table on stdout whose rows are printed as they come. The columns are as wide as the names that are to come and
    the usual numbers need."""

    def __init__(self, head: Sequence[tuple[str, str]], names: Sequence[Sequence[str]]) -> None:
        """`names`: the texts that the first columns may have."""
        self._head = [[name for name, _ in head], [unit for _, unit in head]]
        least = [max(map(len, texts), default=0) for texts in names] + [_NUMBER_WIDTH] * (len(head) - len(names))
        self._widths = [max(width, len(name), len(unit)) for width, name, unit in zip(least, *self._head, strict=True)]
        self._previous: str | None = None

    def begin(self, notes: Iterable[str]) -> None:
        """What is known before the first row; again, where what follows is measured otherwise."""
        self._previous = None
        for note in notes:
            self.note(note)
        for row in self._head:
            print(format_row(row, self._widths, is_head=True), flush=True)

    def note(self, text: str) -> None:
        print(f"# {text}", flush=True)

    def rows(self, rows: Iterable[Sequence[str]]) -> None:
        for row in rows:
            if self._previous not in (None, row[0]):
                print()
            self._previous = row[0]
            print(format_row(row, self._widths, is_head=False), flush=True)


def format_row(cells: Sequence[str], widths: Sequence[int], is_head: bool) -> str:
    """Two columns of names, then numbers."""
    aligned = [
        cell.ljust(width) if column < 2 else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return ("# " if is_head else "  ") + "  ".join(aligned).rstrip()


def live_table(cases: Sequence[str], strategies: Sequence[str]) -> LiveTable:
    """For records of these cases and strategies."""
    return LiveTable(_HEAD, [cases, [f"{name} (local_allgather)" if name == "auto" else name for name in strategies]])


def cells(record: Record) -> list[str]:
    """The row of a record."""
    return _row(record)


class _Checked(Protocol):
    @property
    def wrong(self) -> int: ...


def wrong_note(records: Iterable[_Checked]) -> str:
    """The table's last line."""
    return f"#wrong over all rows: {sum(record.wrong for record in records)}"


def save(path: Path, records: Sequence[Record], about: dict[str, Any]) -> None:
    """Writes `{"about": ..., "records": [...]}`."""
    path.write_text(json.dumps({"about": about, "records": [record.to_json() for record in records]}, indent=1) + "\n")
