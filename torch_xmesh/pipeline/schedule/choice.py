"""The schedule for given costs: every one that fits the places, and orders planned for the costs, played and
compared."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torch_xmesh import _C
from torch_xmesh.arguments import MOST_MICROBATCHES, MOST_STAGES, instance_of, int_list, memory_limit, positive_int
from torch_xmesh.pipeline.schedule.schedule import Schedule
from torch_xmesh.pipeline.schedule.simulation import Costs

_TIE = 1.003
"""As fast as the fastest: the one that holds least is taken."""


class Candidate(NamedTuple):
    """A schedule that was considered.

    Attributes:
        schedule: its actions.
        step_seconds: the simulated time of a step.
        noisy_seconds: the mean of `step_seconds` and of simulations in which every action and transfer takes up to 4 %
            longer or shorter. Candidates are compared by it.
        early_weights: whether these times are with W running before their turn where a stage would wait: the costs
            allow it, and it is faster. The same as PipelineEngine's `early_weights`.
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
        early_weights: whether its W should run before their turn where a stage would wait.
        predicted_seconds: the simulated time of its step.
        predicted_peak_bytes: by place, the most bytes held at once.
        candidates: a :class:`Candidate` for each schedule that was considered, the fastest first. "planned_c": an
            order made for these costs, with split backwards and at most c microbatches in flight on a stage.
    """

    def __init__(
        self,
        best: int,
        candidates: Sequence[Candidate],
        memory_limit_bytes: int | None,
        others: Mapping[int, float] | None = None,
    ) -> None:
        """`others`: where the number of microbatches was chosen too, the least `noisy_seconds` of other numbers."""
        self.candidates = list(candidates)
        self._best = best
        self._limit = memory_limit_bytes
        self._others = dict(others or {})
        self.schedule = self.chosen.schedule
        self.early_weights = self.chosen.early_weights
        self.predicted_seconds = self.chosen.step_seconds
        self.predicted_peak_bytes = self.chosen.peak_bytes

    @property
    def chosen(self) -> Candidate:
        """The candidate whose schedule this is."""
        return self.candidates[self._best]

    def __str__(self) -> str:
        limit = "" if self._limit is None else f", at most {self._limit} bytes on a place"
        lines = [f"{self.schedule.name}: predicted {self.predicted_seconds:.6g} s per step{limit}"]
        if self._others:
            others = ", ".join(f"{number}: {seconds:.5g} s" for number, seconds in self._others.items())
            lines.append(
                f"  num_microbatches {self.schedule.num_microbatches}; the best of others, with noise: {others}"
            )
        lines.append(
            f"  {'schedule':<18} {'step s':>10} {'with noise':>10} {'in flight':>9} {'early W':>7} {'peak bytes':>14}"
        )
        for index, candidate in enumerate(self.candidates):
            mark = ">" if index == self._best else " "
            flight, peak = max(candidate.schedule.peak_in_flight), max(candidate.peak_bytes)
            steps = f"{candidate.step_seconds:10.5g} {candidate.noisy_seconds:10.5g}"
            early = "yes" if candidate.early_weights else "no"
            note = "" if candidate.keeps_limit else "  over the limit"
            lines.append(f"{mark} {candidate.schedule.name:<18} {steps} {flight:9d} {early:>7} {peak:14d}{note}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"ScheduleChoice({self.schedule.name!r}, predicted_seconds={self.predicted_seconds:.6g})"


def choose_schedule(
    costs: Costs,
    *,
    num_stages: int,
    num_microbatches: int,
    memory_limit_bytes: int | None = None,
    place_of_stage: Sequence[int] | None = None,
    num_segments: Sequence[int] | None = None,
) -> ScheduleChoice:
    """The fastest schedule for these costs, by simulation. No process group is needed.

    Tried are all of :meth:`Schedule.names` that can run, and orders planned for the costs: input gradients first, then
    forwards, weight gradients where a place would wait ("backward weight delaying", Zhuang et al., On Optimizing the
    Communication of Model Parallelism, MLSys 2023, section 4), for several bounds on the microbatches in flight.

    Args:
        costs: costs of `num_stages` stages and their edges, with bytes if a limit is given.
        num_stages, num_microbatches: positive.
        memory_limit_bytes: the most bytes that the stages of a place may hold together, by `costs`; None: no limit.
        place_of_stage: as in :meth:`Schedule.make`.
        num_segments: by stage, of how many segments it consists; `costs` are of segments then, and so is the order: one
            microbatch's are computed while values of another's are on their way among a place's devices (HiDup's
            Duplex, S. Zhang et al., SoCC 2022, and mixtures with other stages). None: stages are not divided.

    Returns:
        the choice; ``choice.schedule`` may be given to PipelineEngine, ``print(choice)`` shows what was considered.

    Raises:
        ValueError: costs that do not fit; or no schedule keeps the limit: the smallest that one would keep is named.
    """
    instance_of("costs", costs, Costs, "xm.Costs")
    positive_int("num_stages", num_stages, MOST_STAGES)
    positive_int("num_microbatches", num_microbatches, MOST_MICROBATCHES)
    segments = [] if num_segments is None else int_list("num_segments", num_segments)
    if num_segments is not None and (len(segments) != num_stages or min(segments) < 1):
        raise ValueError(f"num_segments has a number of at least 1 for each of {num_stages} stages, got {segments}")
    if len(costs.stages) != (sum(segments) or num_stages):
        what = f"num_segments are {segments}" if segments else f"num_stages is {num_stages}"
        raise ValueError(f"costs are for {len(costs.stages)} {'segments' if segments else 'stages'}, {what}")
    memory_limit(memory_limit_bytes)
    places = list(range(num_stages)) if place_of_stage is None else int_list("place_of_stage", place_of_stage)
    choice, least = _considered(costs, places, num_microbatches, memory_limit_bytes, segments)
    if choice is None:
        raise ValueError(_refusal(memory_limit_bytes, [least]))
    return choice


def choose_microbatches(
    costs_of: Callable[[int], Costs], numbers: Sequence[int], places: Sequence[int], memory_limit_bytes: int | None
) -> ScheduleChoice:
    """As :func:`choose_schedule`, also among numbers of microbatches, ascending; `costs_of(number)` are those of one
    microbatch. Every other number is played, then the neighbours of the best.

    Raises:
        ValueError: no schedule of any number keeps the limit: the smallest that one would keep is named.
    """
    found: dict[int, ScheduleChoice] = {}
    smallest: dict[int, Candidate] = {}

    def play(number: int) -> None:
        if number not in smallest:
            choice, smallest[number] = _considered(costs_of(number), places, number, memory_limit_bytes)
            if choice is not None:
                found[number] = choice

    for number in (*numbers[::2], numbers[-1]):
        play(number)
    fastest = min(found, key=lambda number: found[number].chosen.noisy_seconds, default=numbers[-1])
    index = numbers.index(fastest)
    for number in numbers[max(0, index - 1) : index + 2]:
        play(number)
    if not found:
        raise ValueError(_refusal(memory_limit_bytes, list(smallest.values())))
    least = min(choice.chosen.noisy_seconds for choice in found.values())
    equal = [number for number, choice in found.items() if choice.chosen.noisy_seconds <= _TIE * least]
    best = min(equal, key=lambda number: max(found[number].predicted_peak_bytes))
    others = {number: found[number].chosen.noisy_seconds for number in sorted(found) if number != best}
    return ScheduleChoice(found[best]._best, found[best].candidates, memory_limit_bytes, others)


def best_schedule(
    costs: Costs,
    places: Sequence[int],
    num_microbatches: int,
    memory_limit_bytes: int | None,
    segments: Sequence[int] = (),
) -> ScheduleChoice | None:
    """As :func:`choose_schedule`; None where no schedule keeps the limit."""
    return _considered(costs, places, num_microbatches, memory_limit_bytes, segments)[0]


def _considered(
    costs: Costs,
    places: Sequence[int],
    num_microbatches: int,
    memory_limit_bytes: int | None,
    segments: Sequence[int] = (),
) -> tuple[ScheduleChoice | None, Candidate]:
    """The choice, if anything keeps the limit, and what needs least memory."""
    best, rows = _C.choose_schedule(costs.core(), places, num_microbatches, memory_limit_bytes, segments)
    candidates = [
        Candidate(
            Schedule(core), step, noisy, early, peak, memory_limit_bytes is None or max(peak) <= memory_limit_bytes
        )
        for core, step, noisy, early, peak in rows
    ]
    choice = ScheduleChoice(best, candidates, memory_limit_bytes) if best >= 0 else None
    return choice, min(candidates, key=lambda candidate: max(candidate.peak_bytes))


def _refusal(memory_limit_bytes: int | None, smallest: Sequence[Candidate]) -> str:
    least = min(smallest, key=lambda candidate: max(candidate.peak_bytes))
    of = f" with {least.schedule.num_microbatches} microbatches" if len(smallest) > 1 else ""
    return (
        f"no schedule keeps memory_limit_bytes={memory_limit_bytes}: the smallest limit that one keeps is "
        f"{max(least.peak_bytes)} ({least.schedule.name!r}{of})"
    )
