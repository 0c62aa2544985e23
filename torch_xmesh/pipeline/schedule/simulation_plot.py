"""Draws a simulated schedule: each place's computation and its NIC's two directions."""

from collections.abc import Sequence
from pathlib import Path

from torch_xmesh.palette import ACTIONS, ink_on, new_figure, time_unit
from torch_xmesh.pipeline.schedule.schedule import Schedule

Action = tuple[int, str, float, float]
"""Place, action, start and end in seconds."""
Transfer = tuple[int, int, int, float, float, float, tuple[int, int]]
"""From stage, to stage, microbatch; ready, start and end in seconds; the stages' segments."""

_MAX_LABELS = 400
_THIN = ("send", "receive")


def plot_simulation(
    schedule: Schedule, actions: Sequence[Action], transfers: Sequence[Transfer], *, title: str, path: Path
) -> None:
    """One lane of actions per place, its sends and receives in thin lanes below; microbatch numbers unless there are
    too many.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = new_figure(12, 1.5 + 0.8 * schedule.num_places)
    from matplotlib.patches import Patch

    axes = figure.add_subplot()
    scale, unit = time_unit(max((end for *_, end in actions), default=0.0))
    is_one_each, has_labels = schedule.num_stages == schedule.num_places, len(actions) <= _MAX_LABELS
    shown = dict.fromkeys(_parts(action)[1] for _, action, _, _ in actions)
    for place, action, start, end in actions:
        stage, kind, microbatch = _parts(action)
        color = ACTIONS[kind][1]
        width, left = (end - start) * scale, start * scale
        axes.barh(place, width, left=left, height=0.5, color=color, edgecolor="white", linewidth=0.4)
        if has_labels:
            text, ink = microbatch if is_one_each else f"{stage}.{microbatch}", ink_on(color)
            axes.text(left + width / 2, place, text, ha="center", va="center", fontsize=6, color=ink)
    for is_sender, offset, color in ((True, 0.32, ACTIONS["send"][1]), (False, 0.42, ACTIONS["receive"][1])):
        lanes: dict[int, list[tuple[float, float]]] = {}
        for from_stage, to_stage, _, _, start, end, _ in transfers:
            place = schedule.place_of_stage[from_stage if is_sender else to_stage]
            lanes.setdefault(place, []).append((start * scale, (end - start) * scale))
        for place, bars in lanes.items():
            axes.broken_barh(bars, (place + offset - 0.05, 0.1), facecolors=color, edgecolor="white", linewidth=0.2)
    axes.set_yticks(range(schedule.num_places), [f"place {place}" for place in range(schedule.num_places)])
    axes.invert_yaxis()
    axes.set_xlabel(f"{unit}, simulated")
    axes.set_title(title)
    handles = [Patch(facecolor=ACTIONS[kind][1], label=ACTIONS[kind][0]) for kind in shown]
    if transfers:
        handles += [Patch(facecolor=ACTIONS[kind][1], label=f"{ACTIONS[kind][0]} (thin)") for kind in _THIN]
    if has_labels:
        text = "3: microbatch 3" if is_one_each else "1.3: stage 1, microbatch 3"
        handles.append(Patch(visible=False, label=text))
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=7)
    figure.tight_layout()
    figure.savefig(path)


def _parts(action: str) -> tuple[str, str, str]:
    kind = next(letter for letter in action if letter.isalpha())
    stage, microbatch = action.split(kind)
    return stage, kind, microbatch
