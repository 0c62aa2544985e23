"""The schedule for given costs: every one that fits the places, and orders planned for the costs, played and
compared."""

from collections.abc import Sequence
from typing import NamedTuple

from torch_xmesh import _C
from torch_xmesh.pipeline.schedule.schedule import Schedule
from torch_xmesh.pipeline.schedule.simulation import Costs


class Candidate(NamedTuple):
    """A schedule that was considered.

    Attributes:
        step_seconds: simulated.
        noisy_seconds: the mean of that and of runs whose every action and transfer takes up to 4 % longer or shorter;
            what candidates are compared by.
        early_weights: the times are with W that run before their turn where a stage would wait, as the costs allow;
            without, they are longer. What PipelineEngine calls so.
        peak_bytes: by place, the most bytes held at once.
        keeps_limit: no place holds more than the limit.
    """

    schedule: Schedule
    step_seconds: float
    noisy_seconds: float
    early_weights: bool
    peak_bytes: list[int]
    keeps_limit: bool


class ScheduleChoice:
    """What :func:`choose_schedule` found; ``str(choice)`` is a table.

    Attributes:
        schedule: the fastest that keeps the limit; of those within 0.3 % of it the one that holds least.
        early_weights: its W had better run before their turn where a stage would wait.
        predicted_seconds: its simulated step.
        predicted_peak_bytes: by place.
        candidates: all, the fastest first. "planned_c": an order made for these costs, with split backwards and at most
            c microbatches in flight on a stage.
    """

    def __init__(self, best: int, candidates: Sequence[Candidate], memory_limit_bytes: int | None) -> None:
        self.candidates = list(candidates)
        self._best = best
        self._limit = memory_limit_bytes
        self.schedule = self.candidates[best].schedule
        self.early_weights = self.candidates[best].early_weights
        self.predicted_seconds = self.candidates[best].step_seconds
        self.predicted_peak_bytes = self.candidates[best].peak_bytes

    def __str__(self) -> str:
        limit = "" if self._limit is None else f", at most {self._limit} bytes on a place"
        lines = [f"{self.schedule.name}: predicted {self.predicted_seconds:.6g} s per step{limit}"]
        lines.append(
            f"  {'schedule':<18} {'step s':>10} {'with noise':>10} {'in flight':>9} {'early W':>7} {'peak bytes':>14}"
        )
        for index, one in enumerate(self.candidates):
            mark = ">" if index == self._best else " "
            flight, peak = max(one.schedule.peak_in_flight), max(one.peak_bytes)
            steps = f"{one.step_seconds:10.5g} {one.noisy_seconds:10.5g}"
            early = "yes" if one.early_weights else "no"
            note = "" if one.keeps_limit else "  over the limit"
            lines.append(f"{mark} {one.schedule.name:<18} {steps} {flight:9d} {early:>7} {peak:14d}{note}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"ScheduleChoice({self.schedule.name!r}, predicted_seconds={self.predicted_seconds:.6g})"


def check_memory_limit(given: object) -> None:
    """Raises ValueError for what is no number of bytes and not None."""
    if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 1):
        raise ValueError(f"memory_limit_bytes is a positive int or None, got {given!r} ({type(given).__name__})")


def choose_schedule(
    costs: Costs,
    *,
    num_stages: int,
    num_microbatches: int,
    memory_limit_bytes: int | None = None,
    place_of_stage: Sequence[int] | None = None,
) -> ScheduleChoice:
    """The fastest schedule for these costs, by simulation. No process group is needed.

    Tried are all of :meth:`Schedule.names` that can run, and orders planned for the costs: input gradients first, then
    forwards, weight gradients where a place would wait ("backward weight delaying", Zhuang et al., On Optimizing the
    Communication of Model Parallelism, MLSys 2023, section 4), for several bounds on the microbatches in flight.

    Args:
        costs: of `num_stages` stages and their edges; bytes where a limit is given.
        num_stages, num_microbatches: positive.
        memory_limit_bytes: what the stages of no place may hold together.
        place_of_stage: as in :meth:`Schedule.make`.

    Raises:
        ValueError: costs that do not fit; or no schedule keeps the limit: the smallest that one would keep is named.
    """
    if len(costs.stages) != num_stages or num_stages < 1:
        raise ValueError(f"costs are for {len(costs.stages)} stages, num_stages is {num_stages}")
    check_memory_limit(memory_limit_bytes)
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches must be at least 1, got {num_microbatches}")
    places = list(range(num_stages)) if place_of_stage is None else list(place_of_stage)
    best, rows = _C.choose_schedule(costs.core(), places, num_microbatches, memory_limit_bytes)
    candidates = [
        Candidate(
            Schedule(core), step, noisy, early, peak, memory_limit_bytes is None or max(peak) <= memory_limit_bytes
        )
        for core, step, noisy, early, peak in rows
    ]
    if best < 0:
        least = min(candidates, key=lambda one: max(one.peak_bytes))
        raise ValueError(
            f"no schedule keeps memory_limit_bytes={memory_limit_bytes}: the smallest limit that one keeps is "
            f"{max(least.peak_bytes)} ({least.schedule.name!r})"
        )
    return ScheduleChoice(best, candidates, memory_limit_bytes)
