"""Records of measured pipeline steps, their table and their bar chart."""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from table import LiveTable

from torch_xmesh.palette import colors_of


@dataclass(frozen=True)
class Record:
    """One pipeline under one method; the keys are explained in README.md."""

    suite: str
    case: str
    stages: int
    microbatches: int
    ratio: float
    method: str
    seconds: float
    seconds_min: float
    seconds_max: float
    signal_seconds: float | None
    ideal_seconds: float
    predicted_seconds: float
    peak_in_flight: int
    wrong: int
    runs: int
    stolen: float | None = None

    @property
    def point(self) -> str:
        """What the methods are compared on."""
        return f"{self.case} n{self.stages} m{self.microbatches} r{self.ratio:g}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


_HEAD = (
    ("case", ""),
    ("method", ""),
    ("time", "(ms)"),
    ("min", "(ms)"),
    ("max", "(ms)"),
    ("signal", "(ms)"),
    ("signal/time", ""),
    ("rival/time", ""),
    ("ideal", "(ms)"),
    ("predicted", "(ms)"),
    ("pred/time", ""),
    ("peak", ""),
    ("stolen", "(%)"),
    ("runs", ""),
    ("#wrong", ""),
)


def _row(record: Record, rival: Record | None) -> list[str]:
    def ms(seconds: float | None) -> str:
        return "-" if seconds is None else f"{seconds * 1e3:.0f}"

    return [
        record.point,
        record.method,
        ms(record.seconds),
        ms(record.seconds_min),
        ms(record.seconds_max),
        ms(record.signal_seconds),
        "-" if record.signal_seconds is None else f"{record.signal_seconds / record.seconds:.3f}",
        "-" if rival is None else f"{rival.seconds / record.seconds:.2f}",
        ms(record.ideal_seconds),
        ms(record.predicted_seconds),
        f"{record.predicted_seconds / record.seconds:.3f}",
        str(record.peak_in_flight),
        "-" if record.stolen is None else f"{record.stolen * 100:.1f}",
        str(record.runs),
        str(record.wrong),
    ]


def rival_of(record: Record, records: Sequence[Record]) -> Record | None:
    """What `rival/time` is against: torch's 1F1B, or the gathers by hand, on the same point."""
    found = (r for r in records if r.point == record.point and r.method in ("torch_1f1b", "by_hand"))
    return next(found, None)


def live_table(methods: Sequence[str]) -> LiveTable:
    """For records of these methods."""
    return LiveTable(_HEAD, [["2x1->1x2 n2 m16 r0.5"], methods])


def rows(records: Sequence[Record]) -> list[list[str]]:
    """The rows of records that have the rival of each among them."""
    return [_row(record, rival_of(record, records)) for record in records]


def render_overhead(records: Sequence[Mapping[str, Any]], notes: Iterable[str]) -> str:
    """The table of suite `overhead`, whose records are dicts with the same keys."""
    keys = list(records[0]) if records else []
    cells = [[_cell(record[key]) for key in keys] for record in records]
    return "\n".join(_lines([keys, [""] * len(keys), *cells], notes))


def _cell(value: Any) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def _lines(rows: Sequence[Sequence[str]], notes: Iterable[str]) -> list[str]:
    """Aligned rows, of which the first two are the head; a blank line where the first column changes."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [f"# {note}" for note in notes]
    for index, row in enumerate(rows):
        if index > 2 and rows[index - 1][0] != row[0]:
            lines.append("")
        cells = [
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append((("# " if index < 2 else "  ") + "  ".join(cells)).rstrip())
    return lines


def save(path: Path, records: Sequence[Mapping[str, Any]], about: dict[str, Any]) -> None:
    """Writes `{"about": ..., "records": [...]}`."""
    path.write_text(json.dumps({"about": about, "records": list(records)}, indent=1) + "\n")


def plot(path: Path, records: Sequence[Record], *, title: str) -> None:
    """Writes a PNG: a group of bars per case, one per method, with the step of one-element messages as a black line
    across each bar.

    Raises ImportError without matplotlib.
    """
    bars = [
        Bar(record.point, record.method, record.seconds, record.seconds_min, record.seconds_max, record.signal_seconds)
        for record in records
    ]
    title += "\nn stages, m microbatches, r: time of a transfer over that of a stage's forward; less is better"
    _draw(path, bars, title=title, unit="seconds per step", mark="the same step with messages of one element")


def plot_overhead(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Writes a PNG: the calling thread's CPU time per action, with that of all threads as a black line.

    Raises ImportError without matplotlib.
    """
    bars = []
    for record in records:
        own, all_threads = record["cpu_us_per_action"], record["cpu_us_all_threads_per_action"]
        bars.append(Bar(f"n{record['stages']} m{record['microbatches']}", record["method"], own, own, own, all_threads))
    title = "CPU time of an action beyond the bare stage's: n stages, m microbatches; less is better"
    _draw(path, bars, title=title, unit="microseconds per action", mark="all threads")


@dataclass(frozen=True)
class Bar:
    """One bar of a group, its whisker's ends and the line across it."""

    group: str
    method: str
    value: float
    least: float
    most: float
    mark: float | None


def _draw(path: Path, bars: Sequence[Bar], *, title: str, unit: str, mark: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Rectangle

    groups = list(dict.fromkeys(bar.group for bar in bars))
    methods = list(dict.fromkeys(bar.method for bar in bars))
    figure = Figure(figsize=(max(7.0, 1.5 + 0.3 * len(groups) * (len(methods) + 1.5)), 4.2))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    width = 0.84 / len(methods)
    colors = dict(zip(methods, colors_of(methods), strict=True))
    for bar in bars:
        at = groups.index(bar.group) - 0.42 + (methods.index(bar.method) + 0.5) * width
        spread = [[bar.value - bar.least], [bar.most - bar.value]]
        color = colors[bar.method]
        axes.bar(at, bar.value, width * 0.92, color=color, yerr=spread, error_kw={"lw": 0.7, "capsize": 1.5})
        axes.text(at, bar.most, f" {bar.value:.3g}", ha="center", va="bottom", fontsize=6, rotation=90)
        if bar.mark is not None:
            axes.plot([at - width / 2, at + width / 2], [bar.mark] * 2, color="black", lw=1.4)
    axes.set_xticks(range(len(groups)), groups, fontsize=8)
    axes.set_ylabel(unit)
    axes.set_title(title, fontsize=9)
    handles: list[Any] = [Rectangle((0, 0), 1, 1, color=colors[method]) for method in methods]
    line = Line2D([0], [0], color="black", lw=1.4)
    axes.legend([*handles, line], [*methods, mark], fontsize=7, ncols=min(4, len(methods) + 1))
    axes.margins(y=0.22)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def redraw(path: Path) -> Path:
    """Draws the picture of recorded results beside them."""
    content = json.loads(path.read_text())
    about, picture = content["about"], path.with_suffix(".png")
    if about["suite"] == "overhead":
        plot_overhead(picture, content["records"])
    else:
        title = f"suite {about['suite']}: {about['cluster']}"
        plot(picture, [Record(**record) for record in content["records"]], title=title)
    return picture


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(redraw(Path(name)))
