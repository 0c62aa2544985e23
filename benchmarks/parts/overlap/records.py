"""Records of overlap_perf.py, their rows in a table, and a chart."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from parts.shared.steps import StepRecord, plot_steps
from parts.shared.table import LiveTable

UNSPLIT = "unsplit"


@dataclass(frozen=True, kw_only=True)
class Record(StepRecord):
    """One model under one method.

    Attributes:
        computed_seconds: what products of the step take on the device that has most of them.
        predicted: a plan's PredictedStep by field; None of others.
    """

    computed_seconds: float
    predicted: dict[str, float] | None

    @property
    def predicted_step_seconds(self) -> float | None:
        return None if self.predicted is None else self.predicted["total"]


_HEAD = (
    ("case", ""),
    ("method", ""),
    ("time", "(ms)"),
    ("min", "(ms)"),
    ("max", "(ms)"),
    ("predicted", "(ms)"),
    ("time/pred", ""),
    ("/unsplit", ""),
    ("hidden", ""),
    ("hidden,pred", ""),
    ("#wrong", ""),
    ("plan", ""),
)


def live_table(methods: Sequence[str], cases: Sequence[str]) -> LiveTable:
    return LiveTable(_HEAD, [cases, methods])


def unsplit_of(records: Sequence[Record], record: Record) -> Record | None:
    """The same model's plan without overlap, of the same kind."""
    kind = record.method.partition(", ")[2]
    wanted = f"{UNSPLIT}, {kind}" if kind else UNSPLIT
    return next((one for one in records if one.case == record.case and one.method.startswith(wanted)), None)


def hidden_part(seconds: float, unsplit: float, computed: float) -> float:
    """HiDup's overlap ratio: (computation + communication - time) / min(computation, communication), where what the
    unsplit step takes beyond its computation is its communication."""
    communicated = unsplit - computed
    return (unsplit - seconds) / max(min(computed, communicated), 1e-9)


def rows(records: Sequence[Record]) -> list[list[str]]:
    return [_row(records, record) for record in records]


def _row(records: Sequence[Record], record: Record) -> list[str]:
    predicted, first = record.predicted, unsplit_of(records, record)
    part = hidden = told = "-"
    if first is not None:
        part = f"{record.seconds / first.seconds:.2f}"
    if first is not None and predicted is not None and first.predicted is not None and first is not record:
        hidden = f"{hidden_part(record.seconds, first.seconds, first.computed_seconds):.2f}"
        told = f"{hidden_part(predicted['total'], first.predicted['total'], first.predicted['compute']):.2f}"
    return [
        record.case,
        record.method,
        *(f"{seconds * 1e3:.0f}" for seconds in (record.seconds, record.seconds_min, record.seconds_max)),
        "-" if predicted is None else f"{predicted['total'] * 1e3:.0f}",
        "-" if predicted is None else f"{record.seconds / predicted['total']:.2f}",
        part,
        hidden,
        told,
        str(record.wrong),
        record.text or "-",
    ]


def plot(path: Path, records: Sequence[Record], about: str) -> None:
    """A group of bars for each case; the line across a bar is the prediction."""

    def unsplit(case: str) -> float:
        return next(one.seconds for one in records if one.case == case)

    title = f"one microbatch under another; black lines are predictions ({about})"
    plot_steps(path, records, unsplit, over="the unsplit one's", title=title)
