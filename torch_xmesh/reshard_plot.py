"""Draws a plan: what each host sends and receives, when."""

from pathlib import Path

from torch_xmesh import _C
from torch_xmesh.palette import new_figure, time_unit


def plot_lanes(plan: "_C.ReshardingPlan", bound_ratio: float | None, path: Path) -> None:
    """A lane per host and direction in which anything moves, a bar per message between hosts in the color of the host
    that sends it; the lower bound as a line, where there is a `bound_ratio`: predicted over bound.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib import colormaps
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    bars: dict[tuple[int, bool], dict[int, list[tuple[float, float]]]] = {}  # of a lane, by sender
    for source, target, start, end in plan.lanes():
        if source != target:
            for lane in ((source, False), (target, True)):
                bars.setdefault(lane, {}).setdefault(source, []).append((start, end - start))
    lanes = sorted(bars)
    scale, unit = time_unit(plan.predicted_seconds)
    senders = sorted({sender for spans in bars.values() for sender in spans})
    palette = colormaps["tab10" if len(senders) <= 10 else "tab20"]
    colors = {host: palette(position % 20) for position, host in enumerate(senders)}
    figure = new_figure(10, 1.9 + 0.4 * max(1, len(lanes)))
    figure.set_layout_engine("constrained")
    axes = figure.add_subplot()
    for row, lane in enumerate(lanes):
        for sender, spans in bars[lane].items():
            scaled = [(start * scale, width * scale) for start, width in spans]
            axes.broken_barh(scaled, (row - 0.4, 0.8), facecolors=colors[sender], edgecolor="white", linewidth=0.2)
    axes.set_yticks(range(len(lanes)), [f"host {host} {'receives' if into else 'sends'}" for host, into in lanes])
    axes.set_ylim(max(1, len(lanes)) - 0.5, -0.5)
    axes.set_xlim(0, max(plan.predicted_seconds, plan.lower_bound_seconds) * scale * 1.02 or 1.0)
    axes.set_xlabel(f"{unit}, as predicted")
    handles: list[Patch | Line2D] = [Patch(color=colors[host], label=f"sent by host {host}") for host in senders]
    if bound_ratio is not None:
        axes.axvline(plan.lower_bound_seconds * scale, color="black", linestyle="--", linewidth=1)
        handles.append(Line2D([], [], color="black", linestyle="--", linewidth=1, label="lower bound of any plan"))
    if not lanes:
        axes.text(0.5, 0.5, "nothing moves between hosts", transform=axes.transAxes, ha="center", va="center")
    ratio = "" if bound_ratio is None else f", {bound_ratio:.3g} times the lower bound"
    sent = sum(plan.bytes_sent().values())
    axes.set_title(
        f"{plan.strategy}: {_bytes(sent)} between hosts in {plan.predicted_seconds * scale:.4g} {unit}{ratio}",
        fontsize=10,
    )
    if handles:
        figure.legend(
            handles=handles, loc="outside lower center", ncols=min(5, len(handles)), fontsize=8, frameon=False
        )
    figure.savefig(path)


def _bytes(count: int) -> str:
    for size, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} B"
