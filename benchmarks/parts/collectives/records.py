"""Records of measured collectives, and their rows in a table."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from parts.shared.table import LiveTable


@dataclass(frozen=True)
class Record:
    """One collective on one size by one method.

    `num_bytes` is the whole value; seconds are of one collective: the median over `runs` of (last rank's end - first
    rank's start), divided by `repeats`, which follow one another; `ratio` is against gloo's; `wrong` counts wrong
    elements over all ranks and runs.
    """

    collective: str
    method: str
    num_bytes: int
    seconds: float
    seconds_min: float
    seconds_max: float
    ratio: float
    repeats: int
    runs: int
    wrong: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


_HEAD = (
    ("collective", ""),
    ("method", ""),
    ("size", "(KiB)"),
    ("time", "(ms)"),
    ("min", "(ms)"),
    ("max", "(ms)"),
    ("ratio", ""),
    ("repeats", ""),
    ("runs", ""),
    ("#wrong", ""),
)


def cells(record: Record) -> list[str]:
    """The row of a record."""
    times = (record.seconds, record.seconds_min, record.seconds_max)
    return [
        record.collective,
        record.method,
        str(record.num_bytes >> 10),
        *(f"{1e3 * seconds:.3f}" for seconds in times),
        f"{record.ratio:.2f}",
        str(record.repeats),
        str(record.runs),
        str(record.wrong),
    ]


def live_table(collectives: Sequence[str], methods: Sequence[str]) -> LiveTable:
    """The table into which rows go as they are measured."""
    return LiveTable(_HEAD, [collectives, methods])
