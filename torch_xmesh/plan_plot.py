"""Draws a plan: each host's send and receive lanes."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_xmesh.plan import ReshardingPlan


def plot_lanes(plan: "ReshardingPlan", path: Path) -> None:
    """One lane per host and direction, a bar per message between hosts in the other host's colour; the bound as a line.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    hosts = sorted(set(plan.core.topology.host_of.values()))
    lane_of = {(host, sends): 2 * i + (0 if sends else 1) for i, host in enumerate(hosts) for sends in (True, False)}
    colour = plt.get_cmap("tab20")
    figure, axes = plt.subplots(figsize=(10, 1.2 + 0.45 * len(lane_of)))
    bars: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for source, target, start, end in plan.core.lanes():
        if source != target:
            bars.setdefault((lane_of[(source, True)], target), []).append((start, end - start))
            bars.setdefault((lane_of[(target, False)], source), []).append((start, end - start))
    for (lane, other), spans in bars.items():
        axes.broken_barh(spans, (lane - 0.4, 0.8), facecolors=colour(other % 20), edgecolor="white", linewidth=0.2)
    axes.axvline(plan.lower_bound_seconds, color="black", linestyle="--", linewidth=1, label="lower bound")
    axes.set_yticks(range(len(lane_of)), [f"host {host} {'out' if sends else 'in'}" for host, sends in lane_of])
    axes.invert_yaxis()
    axes.set_xlabel("seconds (predicted); colour: the other host")
    axes.set_title(f"{plan.strategy}: {plan.predicted_seconds:.4g} s, bound {plan.lower_bound_seconds:.4g} s")
    axes.legend(loc="upper right")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
