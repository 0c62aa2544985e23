"""Charts of measured pipeline steps, and of what an engine costs the CPU."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parts.pipeline.records import OverheadRecord, Record
from parts.shared.charts import Bar, draw_bars, new_figure, save_figure
from torch_xmesh.palette import colors_of


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


def plot_overhead(path: Path, records: Sequence[OverheadRecord]) -> None:
    """Writes a PNG: the calling thread's CPU time per action, with that of all threads as a black line.

    Raises ImportError without matplotlib.
    """
    bars = []
    for record in records:
        own = record.cpu_us_per_action
        bars.append(Bar(record.point, record.method, own, own, own, record.cpu_us_all_threads_per_action))
    title = "CPU time of an action beyond the bare stage's: n stages, m microbatches; less is better"
    _draw(path, bars, title=title, unit="microseconds per action", mark="all threads")


def _draw(path: Path, bars: Sequence[Bar], *, title: str, unit: str, mark: str) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Rectangle

    groups = list(dict.fromkeys(bar.group for bar in bars))
    methods = list(dict.fromkeys(bar.method for bar in bars))
    colors = dict(zip(methods, colors_of(methods), strict=True))
    figure = new_figure(max(7.0, 1.5 + 0.3 * len(groups) * (len(methods) + 1.5)), 4.2)
    axes = figure.add_subplot()
    draw_bars(axes, bars, groups=groups, colors=colors)
    axes.set_xticks(range(len(groups)), [_in_two_lines(group) for group in groups], fontsize=9)
    axes.set_ylabel(unit)
    axes.set_title(title, fontsize=9)
    handles: list[Any] = [Rectangle((0, 0), 1, 1, color=colors[method]) for method in methods]
    line = Line2D([0], [0], color="black", lw=1.4)
    axes.legend([*handles, line], [*methods, mark], fontsize=7, ncols=min(4, len(methods) + 1))
    save_figure(figure, path)


def _in_two_lines(point: str) -> str:
    """ "2x1->1x2 n2 m16 r0.5" with what is measured above its sizes: neighbors do not touch."""
    what, _, sizes = point.partition(" ")
    return f"{what}\n{sizes}"
