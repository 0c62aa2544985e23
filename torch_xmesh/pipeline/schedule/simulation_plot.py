"""Draws a simulated schedule: each place's computation and its NIC's two directions."""

from collections.abc import Sequence
from pathlib import Path

from torch_xmesh.palette import ACTIONS, ink_on, new_figure
from torch_xmesh.pipeline.schedule.schedule import Schedule

Action = tuple[int, str, float, float]
"""Place, action, start and end in seconds."""
Transfer = tuple[int, int, int, float, float, float]
"""From stage, to stage, microbatch; ready, start and end in seconds."""

_MAX_LABELS = 400


def plot_simulation(
    schedule: Schedule, actions: Sequence[Action], transfers: Sequence[Transfer], *, title: str, path: Path
) -> None:
    """One lane of actions per place, its sends and receives in thin lanes below; microbatch numbers where they fit.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = new_figure(12, 1.5 + 0.8 * schedule.num_places)
    axes = figure.add_subplot()
    has_label: set[str] = set()
    for place, action, start, end in actions:
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
        if len(actions) <= _MAX_LABELS:
            text = microbatch if schedule.num_stages == schedule.num_places else f"{stage}.{microbatch}"
            ink = ink_on(ACTIONS[kind][1])
            axes.text((start + end) / 2, place, text, ha="center", va="center", fontsize=6, color=ink)
    for is_sender, offset, color in ((True, 0.32, ACTIONS["send"][1]), (False, 0.42, ACTIONS["receive"][1])):
        lanes: dict[int, list[tuple[float, float]]] = {}
        for from_stage, to_stage, _, _, start, end in transfers:
            place = schedule.place_of_stage[from_stage if is_sender else to_stage]
            lanes.setdefault(place, []).append((start, end - start))
        for place, bars in lanes.items():
            axes.broken_barh(bars, (place + offset - 0.05, 0.1), facecolors=color, edgecolor="white", linewidth=0.2)
    axes.set_yticks(range(schedule.num_places), [f"place {place}" for place in range(schedule.num_places)])
    axes.invert_yaxis()
    axes.set_xlabel("seconds (simulated); thin lanes: sent, received")
    axes.set_title(title)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=7)
    figure.tight_layout()
    figure.savefig(path)


def _parts(action: str) -> tuple[str, str, str]:
    kind = next(letter for letter in action if letter.isalpha())
    stage, microbatch = action.split(kind)
    return stage, kind, microbatch
