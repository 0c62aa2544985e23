"""What happened in a step: events of all ranks as a Chrome trace, a picture, or a table."""

import dataclasses
import itertools
import json
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch_xmesh.palette import ACTIONS, ink_on, new_figure, time_unit
from torch_xmesh.pipeline.schedule.schedule import Schedule
from torch_xmesh.pipeline.schedule.simulation import ActionSpan, Costs, EdgeCosts, StageCosts, simulate

_COLUMNS = {
    "before": "before s",
    "F": "forward s",
    "B": "backward s",
    "I": "input grads s",
    "W": "weight grads s",
    "wait": "waiting s",
    "gradients": "after s",
    "tied": "after s",
    "losses": "after s",
    "buffers": "after s",
    "schedule": "after s",
    "between": "other s",
    "drain": "other s",
}
"""By kind of what a rank computes or waits for: the column of the table."""
_MOVED = re.compile(r"(value|gradient) (?:(\d+), segment )?(\d+)>(\d+) ")
"""The name of a transfer: between stages, or between segments of one."""
_INCHES, _MOST_INCHES = 12.0, 24.0
_SHARE = 0.86  # of a figure's width is for the bars
_FONT = 6
_CHARACTER_INCHES, _LINE_INCHES = 0.62 * _FONT / 72, 1.1 * _FONT / 72


@dataclasses.dataclass(frozen=True)
class Event:
    """One thing that a rank did; nanoseconds of its own clock, or, once all ranks' are aligned, seconds since the first
    rank entered the step.

    Attributes:
        lane: "compute", or "transfer" for what moved meanwhile.
        name: the action ("2F0"), "wait 2F0", "before" its first action, what moved, or what follows the actions:
            "gradients" (their sums over data shards), "tied" (those of tied parameters over their stages), "losses",
            "buffers", "schedule" (its choice), each with waiting for the ranks that take part;
            "between" for the engine's own time between actions, "drain" until what was sent has left.
        segment: of the stage, that an action is of.
    """

    rank: int
    stage: int
    lane: str
    name: str
    begin: float
    end: float
    segment: int = 0

    @property
    def kind(self) -> str:
        """As the palette knows it."""
        if self.lane == "transfer":
            return "receive" if self.name.endswith(" in") else "send"
        return self.name.split()[0] if self.name[0].isalpha() else self.name.strip("0123456789")


@dataclasses.dataclass(frozen=True)
class EdgeEnds:
    """Two stages, or two segments of one."""

    from_stage: int
    to_stage: int
    segments: tuple[int, int] | None = None

    def way(self, is_gradient: bool) -> str:
        """From where to where a value goes over it, or its gradient: "0>1", or "0, segment 13>14"."""
        start, stop = self.segments or (self.from_stage, self.to_stage)
        stage = "" if self.segments is None else f"{self.from_stage}, segment "
        return f"{stage}{stop}>{start}" if is_gradient else f"{stage}{start}>{stop}"


def events_of(
    rank: int,
    core: Any,
    edges: Sequence[EdgeEnds],
    *,
    entered_ns: int,
    after: Sequence[tuple[str, int, int]],
) -> list[Event]:
    """This rank's events of the last step, in nanoseconds of its clock; `core` is its C++ part, `edges` what its
    transfers go over, `entered_ns` when the step was called, `after` what it did once the actions had ended: (name,
    begin, end)."""
    spans = core.spans
    if not spans:
        return []
    events = []
    for kind, name, begin, end in spans:
        action, _, segment = name.partition(", segment ")  # a segment's is drawn as its stage's
        stage, text = int(action.rstrip("0123456789")[:-1]), action if kind == "compute" else f"wait {action}"
        events.append(Event(rank, stage, "compute", text, begin, end, int(segment or 0)))
    stage = min(event.stage for event in events)
    events.insert(0, Event(rank, stage, "compute", "before", entered_ns, min(event.begin for event in events)))
    for is_send, edge, microbatch, is_gradient, begin, end in core.transfers:
        what, direction = "gradient" if is_gradient else "value", "out" if is_send else "in"
        name = f"{what} {edges[edge].way(is_gradient)} mb{microbatch} {direction}"
        is_first = is_send is not is_gradient  # of the two stages, the one that the value comes from
        stage = edges[edge].from_stage if is_first else edges[edge].to_stage
        events.append(Event(rank, stage, "transfer", name, begin, end))
    events += _between(rank, events)
    first_after = min((begin for _, begin, _ in after), default=None)
    last = max(event.end for event in events if event.lane == "compute")
    if first_after is not None and first_after > last:
        events.append(Event(rank, stage, "compute", "drain", last, first_after))
    events += [Event(rank, stage, "compute", name, begin, end) for name, begin, end in after]
    return events


def _between(rank: int, events: Sequence[Event]) -> list[Event]:
    """What lies between one action and the next on a rank: Python, and starting transfers."""
    computed = sorted((event for event in events if event.lane == "compute"), key=lambda event: event.begin)
    return [
        Event(rank, later.stage, "compute", "between", earlier.end, later.begin)
        for earlier, later in itertools.pairwise(computed)
        if later.begin > earlier.end
    ]


def costs_of_events(
    events: Sequence[Event], counts: Sequence[int], edges: Sequence[tuple[int, int]], *, overlap: bool
) -> Costs:
    """What the actions and transfers of a step took, aligned: medians of the actions of a segment, the shortest
    transfer of each edge and direction. `counts`: by stage its segments; costs are of these, numbered through."""
    first = [0, *itertools.accumulate(counts)]
    taken: dict[tuple[int, str], list[float]] = {}
    moved: dict[tuple[int, int, str], list[float]] = {}
    for event in events:
        if event.kind in "FBIW":
            taken.setdefault((first[event.stage] + event.segment, event.kind), []).append(event.end - event.begin)
        elif event.kind == "send":
            between = _MOVED.match(event.name)
            assert between is not None, event.name
            what, within, ends = between[1], between[2], (int(between[3]), int(between[4]))
            start, stop = ends if what == "value" else ends[::-1]
            if within is None:
                start, stop = first[start + 1] - 1, first[stop]
            else:
                start, stop = first[int(within)] + start, first[int(within)] + stop
            moved.setdefault((start, stop, what), []).append(event.end - event.begin)
    median = {key: statistics.median(found) for key, found in taken.items()}
    segments = [
        StageCosts(
            forward_seconds=median.get((segment, "F"), 0.0),
            backward_seconds=median.get((segment, "B"), 0.0),
            backward_input_seconds=median.get((segment, "I"), 0.0),
            backward_weight_seconds=median.get((segment, "W"), 0.0),
        )
        for segment in range(first[-1])
    ]
    sent = {(start, stop) for start, stop, _ in moved}
    between_stages = [(first[start + 1] - 1, first[stop]) for start, stop in edges]
    chains = [
        (at, at + 1) for stage, count in enumerate(counts) for at in range(first[stage], first[stage] + count - 1)
    ]
    ways: dict[tuple[int, int], EdgeCosts | float] = {
        edge: EdgeCosts(
            forward_seconds=min(moved.get((*edge, "value"), [0.0])),
            backward_seconds=min(moved.get((*edge, "gradient"), [0.0])),
            is_resharded=edge in sent,
        )
        for edge in dict.fromkeys([*between_stages, *chains, *sorted(sent)])
    }
    groups = None if max(counts) == 1 else range(first[-1])
    return Costs(stages=segments, edges=ways, overlap=overlap, blocks_receiver=False, weights_groups=groups)


def aligned(events: Sequence[Event], ahead_ns: Mapping[int, int]) -> list[Event]:
    """Events of all ranks on one clock, in seconds since the first rank entered the step; `ahead_ns`: what each rank's
    clock is ahead.

    A rank that came later waited before its first action. A receive, posted long before, begins when the first of its
    senders does.
    """
    if not events:
        return []
    zero = min(event.begin - ahead_ns[event.rank] for event in events if event.name == "before")
    begins: dict[str, float] = {}
    moved = []
    for event in events:
        begin, end = ((at - ahead_ns[event.rank] - zero) / 1e9 for at in (event.begin, event.end))
        moved.append(dataclasses.replace(event, begin=0.0 if event.name == "before" else begin, end=end))
        if event.kind == "send":
            sent = event.name.removesuffix(" out")
            begins[sent] = min(begin, begins.get(sent, begin))
    for position, event in enumerate(moved):
        if event.kind == "receive":
            begin = max(event.begin, begins.get(event.name.removesuffix(" in"), event.begin))
            moved[position] = dataclasses.replace(event, begin=min(begin, event.end))
    return moved


def predicted(
    events: Sequence[Event],
    schedule: Schedule,
    ranks: Sequence[Sequence[int]],
    counts: Sequence[int],
    edges: Sequence[tuple[int, int]],
    *,
    overlap: bool,
    early_weights: bool,
) -> dict[int, list[ActionSpan]]:
    """By rank, what a simulation with the costs of these events, aligned, says of its actions; `ranks`, and `counts` of
    segments, by stage."""
    if not events:
        return {}
    costs = costs_of_events(events, counts, edges, overlap=overlap)
    first = [0, *itertools.accumulate(counts)]
    alone = [at for stage, mesh in enumerate(ranks) if len(mesh) == 1 for at in range(first[stage], first[stage + 1])]
    costs = dataclasses.replace(costs, early_weights=alone if early_weights else False)
    found: dict[int, list[ActionSpan]] = {}
    for span in simulate(Schedule(schedule.core.divided(counts)), costs).actions:
        stage = re.match(r"\d+", span.action)
        assert stage is not None, span.action
        for rank in ranks[int(stage[0])]:
            found.setdefault(rank, []).append(span)
    return found


def chrome_trace(events: Sequence[Event]) -> str:
    """JSON for chrome://tracing or Perfetto: a process per rank, a row for computing and rows for transfers."""
    rows: list[dict[str, Any]] = []
    for rank in sorted({event.rank for event in events}):
        rows.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}})
    for number, event in enumerate(events):
        common = {"pid": event.rank, "name": event.name, "cat": event.lane}
        if event.lane == "compute":
            duration = (event.end - event.begin) * 1e6
            rows.append({**common, "ph": "X", "tid": 0, "ts": event.begin * 1e6, "dur": duration})
        else:
            rows.append({**common, "ph": "b", "id": number, "tid": 1, "ts": event.begin * 1e6})
            rows.append({**common, "ph": "e", "id": number, "tid": 1, "ts": event.end * 1e6})
    return json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"})


def draw(events: Sequence[Event], path: Path, simulated: Mapping[int, Sequence[ActionSpan]] | None = None) -> None:
    """One row per rank: what it computed and waited for; below that, thinner, what it sent and received, and what a
    simulation says of its place (`simulated`, by rank, from the first action's begin); format by suffix. An
    action carries its name, upright where it is short: the picture is so wide that most names fit."""
    from matplotlib.patches import Patch

    ranks = sorted({event.rank for event in events})
    length = max((event.end for event in events), default=1.0)
    begin = min((event.begin for event in events if event.kind in "FBIW"), default=0.0)
    ends = [begin + span.end_seconds for spans in (simulated or {}).values() for span in spans]
    length = max([length, *ends])
    scale, unit = time_unit(length)
    inches = _inches(events, length)
    figure = new_figure(inches, 1.6 + 0.8 * max(1, len(ranks)))
    axes = figure.add_subplot()
    for event in events:
        row, width = ranks.index(event.rank), (event.end - event.begin) * scale
        lane, height = {"send": (0.33, 0.09), "receive": (0.43, 0.09)}.get(event.kind, (0.0, 0.52))
        color = ACTIONS[event.kind][1]
        axes.barh(row + lane, width, height, event.begin * scale, color=color, edgecolor="white", linewidth=0.3)
        room = width / scale / length * _SHARE * inches
        is_upright = room < len(event.name) * _CHARACTER_INCHES
        if event.kind in "FBIW" and (not is_upright or room >= _LINE_INCHES):
            at, turn = (event.begin + event.end) / 2 * scale, 90 if is_upright else 0
            axes.text(at, row, event.name, ha="center", va="center", fontsize=_FONT, color=ink_on(color), rotation=turn)
    for rank, spans in (simulated or {}).items():
        for span in spans:
            width, kind = span.end_seconds - span.start_seconds, span.action.strip("0123456789.")
            at = (begin + span.start_seconds) * scale
            color = ACTIONS[kind][1]
            axes.barh(ranks.index(rank) - 0.34, width * scale, 0.12, at, color=color, edgecolor="white", linewidth=0.3)
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axes.set_xlim(0, length * scale)
    axes.invert_yaxis()
    axes.set_xlabel(f"{unit} since the first rank entered the step")
    kinds = {event.kind for event in events} | {"idle"}
    handles = [
        Patch(facecolor=color, edgecolor="#7a7a7a", linewidth=0.4, label=text)
        for kind, (text, color) in ACTIONS.items()
        if kind in kinds
    ]
    handles.append(Patch(visible=False, label="1F0: stage 1, forward, microbatch 0"))
    if simulated:
        handles.append(Patch(visible=False, label="thin row above: simulated with this step's costs"))
    figure.legend(
        handles=handles, loc="upper center", ncols=min(len(handles), 6), fontsize=7, frameon=False, handlelength=1.2
    )
    figure.tight_layout(rect=(0, 0, 1, 0.9))
    figure.savefig(path)


def _inches(events: Sequence[Event], length: float) -> float:
    """So wide that most actions have room for their names."""
    spans = sorted(event.end - event.begin for event in events if event.kind in "FBIW")
    if not spans:
        return _INCHES
    short = spans[len(spans) // 3] * _SHARE
    return max(_INCHES, min(_LINE_INCHES * length / short, _MOST_INCHES)) if short else _MOST_INCHES


def table(events: Sequence[Event]) -> str:
    """Per rank: seconds before its first action (a rank that comes late makes others wait), of forwards, backwards
    (or their two parts, where they are split), waiting, and of sums and losses afterwards; and until it was done, since
    the first rank entered the step."""
    computed = [event for event in events if event.lane == "compute"]
    is_split = any(event.kind in "IW" for event in computed)
    hidden = {"B"} - {event.kind for event in computed} if is_split else {"I", "W"}
    heads = list(dict.fromkeys(head for kind, head in _COLUMNS.items() if kind not in hidden))
    widths = {head: max(10, len(head)) for head in (*heads, "step s")}
    lines = [" ".join([f"{'rank':>4}", f"{'stages':>8}", *(f"{head:>{width}}" for head, width in widths.items())])]
    for rank in sorted({event.rank for event in events}):
        mine = [event for event in computed if event.rank == rank]
        sums = dict.fromkeys(heads, 0.0)
        for event in mine:
            sums[_COLUMNS[event.kind]] += event.end - event.begin
        stages = ",".join(str(stage) for stage in sorted({event.stage for event in mine}))
        sums["step s"] = max(event.end for event in mine)
        cells = [f"{seconds:>{widths[head]}.4f}" for head, seconds in sums.items()]
        lines.append(" ".join([f"{rank:>4}", f"{stages:>8}", *cells]))
    return "\n".join(lines)
