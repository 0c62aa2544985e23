"""What happened in an engine's last step, for people."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch_xmesh.pipeline.engine.place import EnginePlace
from torch_xmesh.pipeline.engine.steps import EngineSteps
from torch_xmesh.pipeline.ranks.clocks import clock_offsets
from torch_xmesh.pipeline.ranks.refused import StepRefusedError
from torch_xmesh.pipeline.schedule.timeline import (
    EdgeEnds,
    Event,
    aligned,
    chrome_trace,
    draw,
    events_of,
    predicted,
    table,
)

_FAILURES = OSError, ImportError, ValueError
"""What a path, a missing matplotlib, or an unknown format may raise."""


class StepReport:
    """The last step of all ranks. Everything but :meth:`refusal` is called by all of them."""

    def __init__(self, place: EnginePlace, steps: EngineSteps) -> None:
        self._place = place
        self._steps = steps
        self._transfers = place.transfers

    def refusal(self, path: Any) -> Exception | None:
        """Why this rank cannot write there."""
        if not isinstance(path, str | Path):
            return ValueError(f"path is a str or a pathlib.Path, got {type(path).__name__}")
        return None if self._place.core.spans else ValueError("no step has run yet: there is nothing to show")

    def write_trace(self, path: Path) -> None:
        """A Chrome trace, on the first rank."""
        events = self.events()
        self._on_first(lambda: path.write_text(chrome_trace(events)), path)

    def write_timeline(self, path: Path) -> None:
        """A picture, with what a simulation with the step's own costs says, on the first rank."""
        events, place = self.events(), self._place
        edges = [(edge.from_stage, edge.to_stage) for edge in place.boundaries.edges]
        ranks = [list(mesh.ranks) for mesh in place.meshes]
        counts = [stage.num_segments for stage in place.partition.stages]
        overlap, early = place.overlap, self._steps.ran_early

        def write() -> None:
            simulated = predicted(events, self._steps.ran, ranks, counts, edges, overlap=overlap, early_weights=early)
            draw(events, path, simulated)

        self._on_first(write, path)

    def _on_first(self, write: Callable[[], object], path: Path) -> None:
        """Raises StepRefusedError on all ranks where the first one cannot."""
        first, failure = self._transfers.ranks[0], None
        if self._transfers.rank == first:
            try:
                write()
            except _FAILURES as error:
                kinds = (number for number, kind in enumerate(_FAILURES) if isinstance(error, kind))
                failure = next(kinds), f"rank {first} could not write {path}: {error}"
        told = self._transfers.broadcast("written", first, failure)
        if told is not None:
            kind, text = told
            raise StepRefusedError(_FAILURES[kind](text))

    def text(self) -> str:
        """A table, stages that could not be split, and what ``schedule="auto"`` considered."""
        lines = [table(self.events())]
        told = self._transfers.gather("whole_because", self._place.core.whole_because)
        for _, name, reason in sorted({tuple(one) for of_rank in told for one in of_rank}):
            lines.append(f"{name}: I is the whole backward and W nothing, since {reason}")
        if self._place.auto is not None:
            lines += ["", self._place.auto.text]
        return "\n".join(lines)

    def events(self) -> list[Event]:
        """The last step's events on all ranks, on one clock. Called by all ranks."""
        place = self._place
        edges = [EdgeEnds(edge.from_stage, edge.to_stage) for edge in place.edges]
        for stage in place.stages:
            segments = place.partition.stages[stage].segments
            for edge in () if segments is None else segments.edges:
                edges.append(EdgeEnds(stage, stage, (edge.from_segment, edge.to_segment)))
        steps, rank = self._steps, self._transfers.rank
        mine = events_of(rank, self._place.core, edges, entered_ns=steps.entered_ns, after=steps.after)
        ahead = {rank: offset for rank, (offset, _) in clock_offsets(self._transfers).items()}
        return aligned([event for events in self._transfers.gather("events", mine) for event in events], ahead)
