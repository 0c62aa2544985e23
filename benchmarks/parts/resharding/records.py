"""Records of measured reshards, and their rows in a table."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from parts.shared.table import LiveTable


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


def cells(record: Record) -> list[str]:
    """The row of a record."""

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


def live_table(cases: Sequence[str], strategies: Sequence[str]) -> LiveTable:
    """For records of these cases and strategies."""
    return LiveTable(_HEAD, [cases, [f"{name} (local_allgather)" if name == "auto" else name for name in strategies]])
