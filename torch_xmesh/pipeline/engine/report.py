"""What happened in an engine's last step, for people."""

from collections.abc import Sequence
from pathlib import Path

from torch_xmesh.pipeline.engine.place import EnginePlace
from torch_xmesh.pipeline.engine.steps import EngineSteps
from torch_xmesh.pipeline.ranks.clocks import clock_offsets
from torch_xmesh.pipeline.schedule.timeline import (
    Event,
    aligned,
    chrome_trace,
    draw,
    events_of,
    predicted,
    table,
)


class StepReport:
    """The last step of all ranks. :meth:`events` and :meth:`text` are called by all of them; what writes needs no other
    rank, so that a path that cannot be written ends nothing."""

    def __init__(self, place: EnginePlace, steps: EngineSteps) -> None:
        self._place = place
        self._steps = steps
        self._transfers = place.transfers

    def write_trace(self, events: Sequence[Event], path: Path) -> None:
        """A Chrome trace, on the first rank."""
        if self._is_first:
            path.write_text(chrome_trace(events))

    def write_timeline(self, events: Sequence[Event], path: Path) -> None:
        """A picture, with what a simulation with the step's own costs says, on the first rank."""
        if self._is_first:
            place = self._place
            edges = [(edge.from_stage, edge.to_stage) for edge in place.boundaries.edges]
            ranks = [list(mesh.ranks) for mesh in place.meshes]
            overlap, early = place.overlap, self._steps.ran_early
            draw(events, path, predicted(events, self._steps.ran, ranks, edges, overlap=overlap, early_weights=early))

    def text(self) -> str:
        """A table, stages that could not be split, and what ``schedule="auto"`` considered."""
        lines = [table(self.events())]
        told = self._transfers.gather("whole_because", self._place.core.whole_because)
        for stage, reason in sorted({stage: reason for one in told for stage, reason in one.items()}.items()):
            lines.append(f"stage {stage}: I is the whole backward and W nothing, since {reason}")
        if self._place.auto is not None:
            lines += ["", self._place.auto.text]
        return "\n".join(lines)

    @property
    def _is_first(self) -> bool:
        return self._transfers.rank == self._transfers.ranks[0]

    def events(self) -> list[Event]:
        """Of all ranks, on one clock."""
        edges = [(edge.from_stage, edge.to_stage) for edge in self._place.edges]
        steps, rank = self._steps, self._transfers.rank
        mine = events_of(rank, self._place.core, edges, entered_ns=steps.entered_ns, after=steps.after)
        ahead = {rank: offset for rank, (offset, _) in clock_offsets(self._transfers).items()}
        return aligned([event for events in self._transfers.gather("events", mine) for event in events], ahead)
