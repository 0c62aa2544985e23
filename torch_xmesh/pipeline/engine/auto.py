"""``schedule="auto"``: the first training step is measured, or two where the number of microbatches is to be found too;
from then on runs what a simulation with their figures takes for the fastest."""

import functools
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

from torch_xmesh.pipeline.engine.measuring import Measured, MemoryMeter, costs_from, measured
from torch_xmesh.pipeline.ranks.clocks import clock_offsets
from torch_xmesh.pipeline.ranks.refused import StepRefusedError
from torch_xmesh.pipeline.schedule.choice import choose_microbatches
from torch_xmesh.pipeline.schedule.fit import costs_at
from torch_xmesh.pipeline.schedule.schedule import Schedule
from torch_xmesh.pipeline.schedule.simulation import Costs

if TYPE_CHECKING:
    from torch_xmesh.pipeline.engine.place import EnginePlace

MOST_PER_PLACE = 8
"""Microbatches beyond so many for each place gain little: what fills and drains a pipeline is an eighth of the step."""

_MOST_CHOICES = 64


def first_schedule(places: Sequence[int], num_microbatches: int, memory_limit_bytes: int | None) -> Schedule:
    """What a measured step runs: split backwards in 1f1b's memory; under a limit one microbatch at a time, since
    nothing is known yet of what one holds."""
    if memory_limit_bytes is None:
        return Schedule.make("zb_h1", len(places), num_microbatches, place_of_stage=places)
    rows = []
    for place in range(max(places) + 1):
        stages = [stage for stage, stage_place in enumerate(places) if stage_place == place]
        cells = []
        for microbatch in range(num_microbatches):
            cells += [f"{stage}F{microbatch}" for stage in stages]
            cells += [f"{stage}{kind}{microbatch}" for stage in reversed(stages) for kind in "IW"]
        rows.append(",".join(cells))
    return Schedule.from_csv("\n".join(rows), name="one_at_a_time")


@functools.lru_cache(maxsize=1024)
def numbers_of(samples: int, shards: int, num_places: int) -> tuple[int, ...]:
    """Numbers of microbatches that are worth a try: 1, 2, 3, 4, 6, 8, 12, ..., or one a little larger or smaller of
    which all microbatches get equally many samples. Each of the data shards has two samples or more of a microbatch, if
    the batch has as many: some models fail with one."""
    per_shard = samples // shards
    most = max(1, min(per_shard // 2, MOST_PER_PLACE * num_places))
    even = [number for number in range(1, most + 1) if per_shard % number == 0]
    found = set()
    for power in range(most.bit_length()):
        for wanted in (2**power, 3 * 2**power):
            if wanted <= most:
                near = _nearest(even, wanted)
                found.add(near if Fraction(4, 5) < Fraction(near, wanted) < Fraction(5, 4) else wanted)
    return tuple(sorted(found))


def _nearest(numbers: Sequence[int], wanted: int) -> int:
    """By ratio; exact, since every rank finds it by itself."""
    return min(numbers, key=lambda number: (Fraction(max(number, wanted), min(number, wanted)), number))


class Cuts(NamedTuple):
    """How a batch can be cut; equal on all ranks.

    Attributes:
        samples: number of samples in the batch.
        shards: data shards, the most of any stage.
        shapes: shapes of the model's inputs, without the batch dim.
        numbers: the numbers of microbatches into which it can be cut.
    """

    samples: int
    shards: int
    shapes: Any
    numbers: tuple[int, ...]

    def size(self, number: int) -> int:
        """The most samples that a data shard has of one of so many microbatches: what its time goes with."""
        return -(-self.samples // (number * self.shards))


class StepPlan(NamedTuple):
    """What a step runs.

    Attributes:
        early_weights: W may run before their turn.
        is_measured: the next choice is made with its figures.
    """

    schedule: Schedule
    early_weights: bool
    is_measured: bool = False


class _Choice(NamedTuple):
    """What is known of batches that are cut alike; without a plan `text` says why no schedule will do."""

    plan: StepPlan | None
    text: str


class AutoSchedule:
    """The choice of one engine's schedule, the same on all ranks, and of the number of microbatches if that is "auto":
    then for each size of the batch.

    Attributes:
        text: what was considered for the last training step, or after it; or why nothing was found.
    """

    def __init__(
        self, places: Sequence[int], num_microbatches: int | None, memory_limit_bytes: int | None, early_weights: bool
    ) -> None:
        steps = "the first training step, which is" if num_microbatches else "the first two training steps, which are"
        self.text = f'schedule="auto": chosen after {steps} measured'
        self._places = list(places)
        self._num_places = max(places) + 1
        self._given = num_microbatches
        self._limit = memory_limit_bytes
        self._early_weights = early_weights
        # Equal on all ranks but for _costs, which only the leader has.
        self._shapes: Any = None  # the inputs' shapes in the measured steps
        self._sizes: list[int] = []  # samples of a microbatch in the measured steps, as Cuts.size()
        self._costs: list[tuple[int, Costs]] = []  # by size
        self._choices: dict[Cuts | None, _Choice] = {}  # the last ones used

    def numbers(self, samples: int, shards: int) -> tuple[int, ...]:
        """The numbers of microbatches to try for a batch of `samples` on `shards` data shards."""
        return (self._given,) if self._given is not None else numbers_of(samples, shards, self._num_places)

    def plan(self, place: "EnginePlace", cuts: Cuts, *, is_train: bool) -> StepPlan:
        """Called by all ranks alike.

        Raises:
            StepRefusedError: no schedule keeps the limit.
        """
        lacking = self._lacking(cuts)
        choice = self._choice(place, cuts) if not lacking else None
        plan = None if choice is None else choice.plan
        if choice is not None and plan is None and is_train:
            raise StepRefusedError(ValueError(choice.text))
        if plan is None:
            number = self._to_measure(lacking or cuts.numbers)
            plan = StepPlan(first_schedule(self._places, number, self._limit), self._early_weights, is_train)
        if is_train:
            self._adopt(place, plan, self.text if choice is None else choice.text)
        return plan

    def note(self, place: "EnginePlace", meter: MemoryMeter, cuts: Cuts, sizes: Sequence[int]) -> None:
        """After a measured step of microbatches of so many samples: chooses, or waits for one more. Called by all
        ranks."""
        told: list[Measured] = place.transfers.gather("measured", measured(place, meter, sizes))
        offsets = clock_offsets(place.transfers)
        ahead_ns = [offsets[rank][0] for rank in place.transfers.ranks]
        if self._shapes != cuts.shapes:  # a straight line is for the number of samples only
            self._shapes, self._sizes, self._costs = cuts.shapes, [], []
        self._sizes.append(cuts.size(len(sizes)))
        if place.transfers.rank == place.transfers.ranks[0]:
            self._costs.append((self._sizes[-1], costs_from(place, told, ahead_ns, sizes[0])))
        if not self._lacking(cuts):
            choice = self._choice(place, cuts)
            self._adopt(place, choice.plan, choice.text)

    def _adopt(self, place: "EnginePlace", plan: StepPlan | None, text: str) -> None:
        """What the engine shows from now on."""
        self.text = text
        if plan is not None:
            place.schedule, place.early_weights = plan.schedule, plan.early_weights

    def _lacking(self, cuts: Cuts) -> list[int]:
        """The numbers of which one should still be measured."""
        if self._given is not None:
            return [] if self._sizes else [self._given]
        if len(self._sizes) >= 2:
            return []
        known = self._sizes if self._shapes == cuts.shapes else []
        return [number for number in cuts.numbers if cuts.size(number) not in known]

    def _to_measure(self, numbers: Sequence[int]) -> int:
        """Without a limit the usual numbers, of which the larger comes second; with one the smallest microbatches."""
        wanted = (2 if not self._sizes else 4) * self._num_places
        if self._limit is not None:
            wanted = MOST_PER_PLACE * self._num_places // (1 if not self._sizes else 2)
        return _nearest(numbers, wanted)

    def _choice(self, place: "EnginePlace", cuts: Cuts) -> _Choice:
        """The leader's, told to all ranks; the first time for such a batch."""
        key = None if self._given is not None else cuts
        choice = self._choices.pop(key, None)
        if choice is None:
            leader = place.transfers.ranks[0]
            answer = self._answer(cuts) if place.transfers.rank == leader else None
            text, name, csv, early = place.transfers.broadcast("schedule", leader, answer)
            choice = _Choice(None if csv is None else StepPlan(Schedule.from_csv(csv, name=name), early), text)
            if len(self._choices) == _MOST_CHOICES:
                del self._choices[next(iter(self._choices))]
        self._choices[key] = choice
        return choice

    def _answer(self, cuts: Cuts) -> tuple[str, str, str | None, bool]:
        def costs_of(number: int) -> Costs:
            return self._costs[0][1] if self._given is not None else costs_at(self._costs, cuts.size(number))

        try:
            choice = choose_microbatches(costs_of, cuts.numbers, self._places, self._limit)
        except ValueError as error:
            return str(error), "", None, False
        return str(choice), choice.schedule.name, choice.schedule.to_csv(), choice.early_weights
