"""Records of auto_parallel.py, their rows in a table, and what they come to."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from parts.shared.charts import new_figure, save_figure
from parts.shared.steps import StepRecord, draw_steps
from parts.shared.table import LiveTable

_APART = 0.05
"""Plans whose predictions differ by less are not compared."""


@dataclass(frozen=True, kw_only=True)
class Record(StepRecord):
    """One model on devices of one speed under one method.

    Attributes:
        predicted_seconds: what the plan says; None of rivals.
    """

    predicted_seconds: float | None

    @property
    def predicted_step_seconds(self) -> float | None:
        return self.predicted_seconds


_HEAD = (
    ("case", ""),
    ("method", ""),
    ("time", "(ms)"),
    ("min", "(ms)"),
    ("max", "(ms)"),
    ("predicted", "(ms)"),
    ("pred/time", ""),
    ("runs", ""),
    ("#wrong", ""),
    ("plan", ""),
)


def live_table(methods: Sequence[str], cases: Sequence[str]) -> LiveTable:
    return LiveTable(_HEAD, [cases, methods])


def rows(records: Sequence[Record]) -> list[list[str]]:
    return [_row(record) for record in records]


def _row(record: Record) -> list[str]:
    predicted = record.predicted_seconds
    return [
        record.case,
        record.method,
        *(f"{seconds * 1e3:.0f}" for seconds in (record.seconds, record.seconds_min, record.seconds_max)),
        "-" if predicted is None else f"{predicted * 1e3:.0f}",
        "-" if predicted is None else f"{predicted / record.seconds:.2f}",
        str(record.runs),
        str(record.wrong),
        record.text or "-",
    ]


def summary(records: Sequence[Record]) -> list[str]:
    """By case: the plan found against the best of the others, how far predictions are off, and how often they put two
    plans in the wrong order."""
    out = []
    for case in dict.fromkeys(record.case for record in records):
        own = [record for record in records if record.case == case]
        plans = [record for record in own if record.predicted_seconds is not None]
        found = next((record for record in own if record.method == "found"), None)
        presets = [record for record in plans if record is not found]
        rivals = [record for record in own if record.predicted_seconds is None]
        line = f"{case}:"
        for what, others in (("presets", presets), ("rivals", rivals)):
            if found is not None and others:
                best = min(others, key=lambda record: record.seconds)
                line += f" {found.seconds / best.seconds:.2f} of the best of {what} ({best.method}),"
        if plans:
            off = max(abs(_predicted(one) / one.seconds - 1) for one in plans)
            inverted, pairs = _order(plans)
            line += f" predictions off by {off:.0%} at most, {inverted} of {pairs} pairs in the wrong order"
        out.append(line.removesuffix(","))
    return out


def _predicted(record: Record) -> float:
    assert record.predicted_seconds is not None
    return record.predicted_seconds


def _order(plans: Sequence[Record]) -> tuple[int, int]:
    """Pairs of plans whose predictions differ enough, and how many of these were measured the other way round."""
    pairs = [
        (one, other)
        for one, other in combinations(plans, 2)
        if abs(_predicted(one) - _predicted(other)) > _APART * min(_predicted(one), _predicted(other))
    ]
    inverted = sum((_predicted(one) < _predicted(other)) != (one.seconds < other.seconds) for one, other in pairs)
    return inverted, len(pairs)


def plot(path: Path, records: Sequence[Record], about: str) -> None:
    """A group of bars for each case; the line across a bar is the prediction."""

    def fastest(case: str) -> float:
        return min(one.seconds for one in records if one.case == case)

    title = f"plans found and plans by hand; black lines are predictions ({about})"
    figure = new_figure(4.0 * len({one.case for one in records}), 5.0)
    draw_steps(figure.add_subplot(), records, fastest, over="the case's fastest", title=title)
    save_figure(figure, path)
