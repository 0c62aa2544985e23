"""Bar charts of the records: cases side by side, one bar per strategy, the lower bound as a black line."""

from collections.abc import Sequence
from pathlib import Path

from table import Record

_COLORS = (
    "#0b6e4f",
    "#66b58f",
    "#3a7ebf",
    "#8fc1ea",
    "#7a5195",
    "#e08e0b",
    "#b23a48",
    "#b0b0b0",
    "#4c4c4c",
    "#c5b000",
)


def plot(path: Path, records: Sequence[Record], *, title: str, as_ratio: bool) -> None:
    """Writes a PNG: time over the lower bound (`as_ratio`), else time in seconds; bars carry their value, whiskers
    reach from min to max.

    Raises ImportError without matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.lines import Line2D
    from matplotlib.patches import Rectangle

    cases = list(dict.fromkeys(record.case for record in records))
    strategies = list(dict.fromkeys(record.strategy for record in records))
    width_inches = max(7.0, 1.5 + 0.17 * len(cases) * (len(strategies) + 1.5))
    figure, axes = pyplot.subplots(figsize=(width_inches, 4.6), layout="constrained")
    width = 0.84 / len(strategies)
    for index, strategy in enumerate(strategies):
        for record in (r for r in records if r.strategy == strategy):
            scale = 1 / record.bound_seconds if as_ratio and record.bound_seconds > 0 else 1.0
            at = cases.index(record.case) - 0.42 + (index + 0.5) * width
            value = record.seconds * scale
            spread = [[value - record.seconds_min * scale], [record.seconds_max * scale - value]]
            color = _COLORS[index % len(_COLORS)]
            axes.bar(at, value, width * 0.92, color=color, yerr=spread, error_kw={"lw": 0.7, "capsize": 1.5})
            axes.text(
                at, record.seconds_max * scale, f" {value:.2f}", ha="center", va="bottom", fontsize=6, rotation=90
            )
    for index, case in enumerate(cases):
        bound = 1.0 if as_ratio else next(record.bound_seconds for record in records if record.case == case)
        axes.plot([index - 0.46, index + 0.46], [bound, bound], color="black", lw=1.2)
    axes.set_xticks(range(len(cases)), cases, fontsize=8, rotation=30 if max(map(len, cases)) > 8 else 0)
    axes.set_ylabel("time / lower bound" if as_ratio else "time (s)")
    axes.set_title(title, fontsize=9)
    handles = [Rectangle((0, 0), 1, 1, color=_COLORS[i % len(_COLORS)]) for i in range(len(strategies))]
    bound_line = Line2D([0], [0], color="black", lw=1.2)
    names = [*strategies, "lower bound"]
    columns = min(len(names), int(width_inches / 1.6))
    figure.legend([*handles, bound_line], names, fontsize=8, ncols=columns, loc="outside lower center", frameon=False)
    axes.margins(x=0.01, y=0.12)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
