"""Charts of measured reshards: bars per case and strategy with the lower bound as a black line, or, for many cases, how
their ratios are distributed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parts.resharding.records import Record
from parts.shared.charts import INCHES, Bar, draw_bars, new_figure, save_figure
from torch_xmesh.palette import colors_of

_BARS_PER_ROW = 30
_MOST_CASES = 12


def is_ratio(about: dict[str, Any]) -> bool:
    """Whether a suite's layouts are compared by their ratios, not their times."""
    return about.get("suite") in ("table2", "refit", "random", "loopback")


def plot(path: Path, records: Sequence[Record], *, about: dict[str, Any]) -> None:
    """Writes a PNG: time over the lower bound, else time in seconds (`is_ratio`); bars carry their value, whiskers
    reach from least to most. More than twelve cases are drawn as a distribution.

    Args:
        about: what the JSON says of the measurement: suite or case_file, and cluster.

    Raises ImportError without matplotlib.
    """
    as_ratio = is_ratio(about)
    cases = list(dict.fromkeys(record.case for record in records))
    strategies = list(dict.fromkeys(record.strategy for record in records))
    colors = dict(zip(strategies, colors_of(strategies), strict=True))
    if as_ratio and len(cases) > _MOST_CASES:
        figure = _distribution(records, colors)
    else:
        figure = _bars(records, cases, colors, as_ratio, _bound_of(about))
    figure.suptitle(_caption(about, len(cases), as_ratio), fontsize=9)
    save_figure(figure, path)


def _bound_of(about: dict[str, Any]) -> str:
    """What the black line is."""
    return "gloo's own time" if about.get("suite") == "loopback" else "lower bound of any plan"


def _caption(about: dict[str, Any], num_cases: int, as_ratio: bool) -> str:
    what = f"suite {about['suite']}" if "suite" in about else f"cases of {about['case_file']}"
    least = "gloo's own" if about.get("suite") == "loopback" else "the least that its NICs need"
    means = f"time of an operation over {least}" if as_ratio else "time of a reshard"
    return f"{what}, {num_cases} cases: {means}; less is better\n{about['cluster']}"


def _bars(
    records: Sequence[Record], cases: Sequence[str], colors: dict[str, str], as_ratio: bool, bound_name: str
) -> Any:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    strategies = list(colors)
    per_row = min(len(cases), max(1, _BARS_PER_ROW // len(strategies)))
    rows = [cases[start : start + per_row] for start in range(0, len(cases), per_row)]
    height = 0.8 + 1.9 * len(rows)
    figure = new_figure(INCHES, height)
    panels = figure.subplots(len(rows), 1, squeeze=False)
    for axes, shown in zip(panels[:, 0], rows, strict=True):
        drawn = [
            Bar(
                record.case,
                record.strategy,
                record.seconds * scale,
                record.seconds_min * scale,
                record.seconds_max * scale,
            )
            for record in records
            if record.case in shown
            for scale in [1 / record.bound_seconds if as_ratio and record.bound_seconds > 0 else 1.0]
        ]
        draw_bars(axes, drawn, groups=shown, colors=colors)
        for index, case in enumerate(shown):
            bound = 1.0 if as_ratio else next(record.bound_seconds for record in records if record.case == case)
            axes.plot([index - 0.46, index + 0.46], [bound, bound], color="black", lw=1.2)
        axes.set_xlim(-0.55, per_row - 0.45)
        axes.set_ylabel("ratio" if as_ratio else "seconds", fontsize=8)
        axes.tick_params(axis="y", labelsize=8)
    handles: list[Any] = [Patch(color=color, label=name) for name, color in colors.items()]
    handles.append(Line2D([0], [0], color="black", lw=1.2, label=bound_name))
    figure.legend(handles=handles, fontsize=8, ncols=5, loc="outside lower center", frameon=False)
    return figure


def _distribution(records: Sequence[Record], colors: dict[str, str]) -> Any:
    """For each strategy the share of the layouts that it does within a ratio."""

    figure = new_figure(INCHES, 4.2)
    axes = figure.add_subplot()
    most = 1.0
    for strategy, color in colors.items():
        ratios = sorted(r.ratio for r in records if r.strategy == strategy and r.ratio is not None)
        if not ratios:
            continue
        most = max(most, ratios[-1])
        shares = [(index + 1) / len(ratios) * 100 for index in range(len(ratios))]
        median = ratios[(len(ratios) - 1) // 2]
        label = f"{strategy}: half within {median:.2f}, all within {ratios[-1]:.2f}"
        axes.step([ratios[0], *ratios], [0, *shares], where="post", color=color, lw=2, label=label)
    axes.axvline(1.0, color="black", lw=1.2, label="lower bound of any plan")
    axes.set_xscale("log")
    ticks = [tick for tick in (1, 1.1, 1.2, 1.5, 2, 3, 5, 10, 20, 50) if tick <= most * 1.1]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("time / lower bound")
    axes.set_ylabel("% of the layouts")
    axes.set_ylim(0, 100)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
    return figure
