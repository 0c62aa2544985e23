"""Draws a simulated schedule: each place's computation and its NIC's two directions."""

from pathlib import Path
from typing import TYPE_CHECKING

from torch_xmesh.palette import ACTIONS

if TYPE_CHECKING:
    from torch_xmesh.pipeline.simulation import Simulation

_MAX_LABELS = 400


def plot_simulation(simulation: "Simulation", path: Path) -> None:
    """One lane of actions per place, its sends and receives in thin lanes below; microbatch numbers where they fit.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    schedule = simulation.schedule
    figure, axes = plt.subplots(figsize=(12, 1.5 + 0.8 * schedule.num_places))
    has_label: set[str] = set()
    for place, action, start, end in simulation.actions:
        stage, kind, microbatch = _parts(action)
        label = ACTIONS[kind][0] if kind not in has_label else None
        has_label.add(kind)
        axes.barh(
            place,
            end - start,
            left=start,
            height=0.5,
            color=ACTIONS[kind][1],
            edgecolor="white",
            linewidth=0.4,
            label=label,
        )
        if len(simulation.actions) <= _MAX_LABELS:
            text = microbatch if schedule.num_stages == schedule.num_places else f"{stage}.{microbatch}"
            axes.text((start + end) / 2, place, text, ha="center", va="center", fontsize=6, color="white")
    for is_sender, offset, colour in ((True, 0.32, ACTIONS["send"][1]), (False, 0.42, ACTIONS["receive"][1])):
        lanes: dict[int, list[tuple[float, float]]] = {}
        for span in simulation.transfers:
            place = schedule.place_of_stage[span.from_stage if is_sender else span.to_stage]
            lanes.setdefault(place, []).append((span.start_seconds, span.end_seconds - span.start_seconds))
        for place, bars in lanes.items():
            axes.broken_barh(bars, (place + offset - 0.05, 0.1), facecolors=colour, edgecolor="white", linewidth=0.2)
    axes.set_yticks(range(schedule.num_places), [f"place {place}" for place in range(schedule.num_places)])
    axes.invert_yaxis()
    axes.set_xlabel("seconds (simulated); thin lanes: sent, received")
    axes.set_title(
        f"{schedule.name}: {simulation.makespan_seconds:.4g} s, {100 * simulation.bubble_fraction:.1f} % idle, "
        f"in flight {simulation.peak_in_flight}"
    )
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=7)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _parts(action: str) -> tuple[str, str, str]:
    kind = next(letter for letter in action if letter.isalpha())
    stage, microbatch = action.split(kind)
    return stage, kind, microbatch
