"""What happened in a step: events of all ranks as a Chrome trace, a picture, or a table."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_COLORS = {"F": "#7aa6dc", "B": "#8fc98f", "wait": "#dddddd", "transfer": "#d9a0a0"}
_AFTER_COLOR = "#c8b6e2"


@dataclasses.dataclass(frozen=True)
class Event:
    """One thing that a rank did; seconds since the step began on that rank.

    Attributes:
        lane: "compute", or "transfer" for what moved meanwhile.
        name: the action ("2F0"), "wait 2F0", what moved, or what follows the actions: "gradients" (their sums over data
            shards and tied stages), "losses", "buffers".
    """

    rank: int
    stage: int
    lane: str
    name: str
    begin_s: float
    end_s: float


def events_of(
    rank: int, core: Any, edges: Sequence[tuple[int, int]], after: Sequence[tuple[str, int, int]]
) -> list[Event]:
    """This rank's events of the last step; `core` is its C++ part, `edges` its (from, to) stages, `after` what it did
    once the actions had ended: (name, begin, end) in nanoseconds."""
    spans = core.spans
    if not spans:
        return []
    zero = min(begin for _, _, begin, _ in spans)
    events = []
    for kind, action, begin, end in spans:
        stage = int(action.rstrip("0123456789")[:-1])
        name = action if kind == "compute" else f"wait {action}"
        events.append(Event(rank, stage, "compute", name, (begin - zero) / 1e9, (end - zero) / 1e9))
    for is_send, edge, microbatch, is_gradient, begin, end in core.transfers:
        start, stop = edges[edge][::-1] if is_gradient else edges[edge]
        name = f"{'gradient' if is_gradient else 'value'} {start}>{stop} mb{microbatch} {'out' if is_send else 'in'}"
        events.append(
            Event(rank, start if is_send else stop, "transfer", name, (begin - zero) / 1e9, (end - zero) / 1e9)
        )
    stage = min(event.stage for event in events)
    events += [
        Event(rank, stage, "compute", name, (begin - zero) / 1e9, (end - zero) / 1e9) for name, begin, end in after
    ]
    return events


def chrome_trace(events: Sequence[Event]) -> str:
    """JSON for chrome://tracing or Perfetto: a process per rank, a row for computing and rows for transfers."""
    rows: list[dict[str, Any]] = []
    for rank in sorted({event.rank for event in events}):
        rows.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}})
    for number, event in enumerate(events):
        common = {"pid": event.rank, "name": event.name, "cat": event.lane}
        if event.lane == "compute":
            rows.append(
                {**common, "ph": "X", "tid": 0, "ts": event.begin_s * 1e6, "dur": (event.end_s - event.begin_s) * 1e6}
            )
        else:
            rows.append({**common, "ph": "b", "id": number, "tid": 1, "ts": event.begin_s * 1e6})
            rows.append({**common, "ph": "e", "id": number, "tid": 1, "ts": event.end_s * 1e6})
    return json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"})


def draw(events: Sequence[Event], path: Path) -> None:
    """One row per rank: forwards, backwards, waits, and below them the values it received; format by suffix."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ranks = sorted({event.rank for event in events})
    figure = Figure(figsize=(12, 1.2 + 0.8 * len(ranks)))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for event in events:
        row = ranks.index(event.rank)
        if event.lane == "transfer":
            if event.name.endswith(" in"):
                axes.barh(
                    row + 0.36, event.end_s - event.begin_s, 0.12, event.begin_s, color=_COLORS["transfer"], alpha=0.5
                )
            continue
        kind = _kind(event)
        color = _COLORS.get(kind, _AFTER_COLOR)
        axes.barh(row, event.end_s - event.begin_s, 0.56, event.begin_s, color=color, edgecolor="white")
        if kind in ("F", "B"):
            axes.text((event.begin_s + event.end_s) / 2, row, event.name, ha="center", va="center", fontsize=6)
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_title("computing (F, B), waiting (grey), receiving (red), after the actions (violet)")
    figure.tight_layout()
    figure.savefig(path)


def table(events: Sequence[Event]) -> str:
    """Per rank: seconds of forwards, backwards, waiting, and of sums and losses afterwards; and the step's length."""
    columns = ("F", "B", "wait", "after")
    heads = ("forward s", "backward s", "waiting s", "after s", "step s")
    lines = [f"{'rank':>4} {'stages':>8} " + " ".join(f"{head:>10}" for head in heads)]
    for rank in sorted({event.rank for event in events}):
        mine = [event for event in events if event.rank == rank and event.lane == "compute"]
        sums = dict.fromkeys(columns, 0.0)
        for event in mine:
            kind = _kind(event)
            sums[kind if kind in sums else "after"] += event.end_s - event.begin_s
        stages = ",".join(str(stage) for stage in sorted({event.stage for event in mine}))
        seconds = (*sums.values(), max(event.end_s for event in mine))
        lines.append(f"{rank:>4} {stages:>8} " + " ".join(f"{one:>10.4f}" for one in seconds))
    return "\n".join(lines)


def _kind(event: Event) -> str:
    return "wait" if event.name.startswith("wait") else event.name.strip("0123456789")
