"""Records of overlap_perf.py, their rows in a table, and a chart."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from parts.shared.charts import Bar, draw_bars, new_figure, save_figure
from parts.shared.table import LiveTable
from torch_xmesh import palette

UNSPLIT = "unsplit"


@dataclass(frozen=True)
class Record:
    """One model under one method.

    Attributes:
        text: stages' meshes and the schedule of a plan.
        seconds: the median step.
        computed_seconds: what products of the step take on the device that has most of them.
        predicted: a plan's PredictedStep by field; None of others.
    """

    case: str
    method: str
    text: str
    seconds: float
    seconds_min: float
    seconds_max: float
    computed_seconds: float
    predicted: dict[str, float] | None
    runs: int
    wrong: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


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
    groups = list(dict.fromkeys(record.case for record in records))
    methods = list(dict.fromkeys(record.method for record in records))
    colors = dict(zip(methods, palette.colors_of(methods), strict=True))
    of = {group: next(one.seconds for one in records if one.case == group) for group in groups}
    bars = [
        Bar(
            one.case,
            one.method,
            one.seconds / of[one.case],
            one.seconds_min / of[one.case],
            one.seconds_max / of[one.case],
            None if one.predicted is None else one.predicted["total"] / of[one.case],
        )
        for one in records
    ]
    figure = new_figure(4.0 * len(groups), 5.0)
    axes = figure.add_subplot()
    draw_bars(axes, bars, groups=groups, colors=colors)
    axes.set_ylabel("step, over the unsplit one's")
    axes.set_title(f"one microbatch under another; black lines are predictions ({about})", fontsize=9)
    handles = [axes.bar(0, 0, color=colors[method]) for method in methods]
    axes.legend(handles, methods, fontsize=7, ncols=2)
    save_figure(figure, path)
