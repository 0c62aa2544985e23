"""What the charts of all benchmarks share: figures that leave matplotlib's backend alone, and groups of bars."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_xmesh import palette

INCHES = 9.0
_GROUP_WIDTH = 0.84


@dataclass(frozen=True)
class Bar:
    """One bar of a group, its whisker's ends and the line across it."""

    group: str
    method: str
    value: float
    least: float
    most: float
    mark: float | None = None


def new_figure(width: float, height: float) -> Any:
    """A figure of so many inches. Raises ImportError without matplotlib."""
    figure = palette.new_figure(width, height)
    figure.set_layout_engine("constrained")
    return figure


def draw_bars(axes: Any, bars: Sequence[Bar], *, groups: Sequence[str], colors: Mapping[str, str]) -> None:
    """A group of bars at every whole number, one per method, with its value above it."""
    methods = list(colors)
    width = _GROUP_WIDTH / len(methods)
    for bar in bars:
        at = groups.index(bar.group) - _GROUP_WIDTH / 2 + (methods.index(bar.method) + 0.5) * width
        spread = [[bar.value - bar.least], [bar.most - bar.value]]
        color = colors[bar.method]
        axes.bar(at, bar.value, width * 0.92, color=color, yerr=spread, error_kw={"lw": 0.7, "capsize": 1.5})
        axes.text(at, bar.most, f" {bar.value:.3g}", ha="center", va="bottom", fontsize=7, rotation=90)
        if bar.mark is not None:
            axes.plot([at - width / 2, at + width / 2], [bar.mark] * 2, color="black", lw=1.4)
    axes.set_xticks(range(len(groups)), groups, fontsize=9)
    axes.margins(y=0.22)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def save_figure(figure: Any, path: Path) -> None:
    """Writes a PNG."""
    figure.savefig(path, dpi=120)
