"""Records of overlap_perf.py, their rows in a table, and a chart."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parts.shared.charts import new_figure, save_figure
from parts.shared.steps import StepRecord, draw_steps
from parts.shared.table import LiveTable
from torch_xmesh import palette

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
    ("memory", "(/unsplit)"),
    ("#wrong", ""),
    ("plan", ""),
)


def live_table(methods: Sequence[str], cases: Sequence[str]) -> LiveTable:
    return LiveTable(_HEAD, [cases, methods])


def unsplit_of(records: Sequence[Record], record: Record) -> Record | None:
    """The same model's plan without overlap."""
    return next((one for one in records if one.case == record.case and one.method == UNSPLIT), None)


def hidden_part(seconds: float, unsplit: float, computed: float) -> float:
    """HiDup's overlap ratio: (computation + communication - time) / min(computation, communication), where what the
    unsplit step takes beyond its computation is its communication."""
    communicated = unsplit - computed
    return (unsplit - seconds) / max(min(computed, communicated), 1e-9)


def rows(records: Sequence[Record]) -> list[list[str]]:
    return [_row(records, record) for record in records]


def _row(records: Sequence[Record], record: Record) -> list[str]:
    predicted, first = record.predicted, unsplit_of(records, record)
    part = hidden = told = memory = "-"
    if first is not None:
        part = f"{record.seconds / first.seconds:.2f}"
        if record.peak_bytes is not None and first.peak_bytes:
            memory = f"{record.peak_bytes / first.peak_bytes:.2f}"
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
        memory,
        str(record.wrong),
        record.text or "-",
    ]


def plot(path: Path, records: Sequence[Record], about: str) -> None:
    """Above a group of bars for each case; the line across a bar is the prediction. Below what steps consist of."""

    def unsplit(case: str) -> float:
        return next(one.seconds for one in records if one.case == case)

    title = f"one microbatch under another; black lines are predictions ({about})"
    groups = list(dict.fromkeys(record.case for record in records))
    figure = new_figure(max(4.0 * len(groups), 6.0), 8.0)
    above, below = figure.subplots(2, 1)
    draw_steps(above, records, unsplit, over="the unsplit one's", title=title)
    _draw_breakdown(below, records)
    save_figure(figure, path)


def breakdown(records: Sequence[Record], record: Record) -> tuple[float, float, float] | None:
    """Seconds of a plan's step in which devices compute alone, compute while they communicate, and communicate alone.
    None of rivals, of which nobody knows."""
    first = unsplit_of(records, record)
    if first is None or record.predicted is None:
        return None
    computed = first.computed_seconds
    both = min(max(first.seconds - record.seconds, 0.0), computed, max(first.seconds - computed, 0.0))
    return computed - both, both, max(record.seconds - computed, 0.0)


_PARTS = {"computation": "F", "both": "I", "communication": "send"}
"""What a step consists of, with the kind of action whose color it has."""


def _draw_breakdown(axes: Any, records: Sequence[Record]) -> None:
    """A stacked bar for each plan's step."""
    found = [(one, parts) for one in records if (parts := breakdown(records, one)) is not None]
    bottoms = [0.0] * len(found)
    for number, (label, kind) in enumerate(_PARTS.items()):
        heights = [1e3 * parts[number] for _, parts in found]
        axes.bar(range(len(found)), heights, bottom=bottoms, color=palette.ACTIONS[kind][1], label=label)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    for at, (one, _) in enumerate(found):
        first = unsplit_of(records, one)
        if first is not None and first is not one:
            part = hidden_part(one.seconds, first.seconds, first.computed_seconds)
            axes.text(at, bottoms[at], f"hidden {part:.2f}", ha="center", va="bottom", fontsize=7)
    axes.set_xticks(range(len(found)), [f"{one.case}\n{one.method}" for one, _ in found], fontsize=6, rotation=90)
    axes.set_ylabel("step, ms")
    axes.legend(fontsize=7, ncols=3)
