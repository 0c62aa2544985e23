"""What a pipeline engine works out before its first step."""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch_xmesh.group import GroupReshards
from torch_xmesh.pipeline.boundary import Boundaries
from torch_xmesh.pipeline.partition import Partition
from torch_xmesh.pipeline.schedule import Schedule, schedule_name

_engines: "WeakKeyDictionary[GroupReshards, dict[tuple[int, ...], int]]" = WeakKeyDictionary()


def next_name(reshards: GroupReshards, ranks: Sequence[int]) -> str:
    """A name that every rank of the pipeline finds, and no other pipeline of the group has."""
    counts = _engines.setdefault(reshards, {})
    key = tuple(ranks)
    counts[key] = counts.get(key, 0) + 1
    return f"pipeline {counts[key]} of ranks {list(ranks)}"


def schedule_of(given: str | Schedule | type[Any], places: list[int], num_microbatches: int) -> Schedule:
    """The schedule that a user means: an object, a CSV, or a name. Raises ValueError where it does not fit, or where it
    has a backward that the engine does not run."""
    num_stages, num_places = len(places), max(places) + 1
    if isinstance(num_microbatches, bool) or not isinstance(num_microbatches, int) or num_microbatches < 1:
        raise ValueError(f"num_microbatches is a positive int, got {num_microbatches!r}")
    if not isinstance(given, str | Schedule):
        given = schedule_name(given)
    if isinstance(given, Schedule):
        schedule = given
    elif given == "auto":
        cyclic = places == [stage % num_places for stage in range(num_stages)]
        name = "interleaved_1f1b" if cyclic and num_places < num_stages else "eager_1f1b"
        schedule = Schedule.make(name, num_stages, num_microbatches, place_of_stage=places)
    elif "," in given or "\n" in given:
        schedule = Schedule.from_csv(given)
    else:
        schedule = Schedule.make(given, num_stages, num_microbatches, place_of_stage=places)
    if (schedule.num_stages, schedule.num_microbatches) != (num_stages, num_microbatches):
        raise ValueError(
            f"the schedule has {schedule.num_stages} stages and {schedule.num_microbatches} microbatches, "
            f"expected {num_stages} and {num_microbatches}"
        )
    if list(schedule.place_of_stage) != places:
        raise ValueError(
            f"the schedule has its stages on places {list(schedule.place_of_stage)}, the meshes put them on {places}"
        )
    _check_full_backward(schedule)
    return schedule


def _check_full_backward(schedule: Schedule) -> None:
    for place, cells in enumerate(schedule.core.cells):
        for position, cell in enumerate(cells):
            if cell is not None and cell[0] not in "FB":
                kind, stage, microbatch = cell
                schedule.core.refuse_cell(
                    place,
                    position,
                    f"{stage}{kind}{microbatch} is part of a split backward; this version runs full backward only: "
                    f"{stage}B{microbatch} in place of {stage}I{microbatch} and {stage}W{microbatch}",
                )


def digest(text: str) -> str:
    """Equal for equal texts."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def describe_values(cut: Partition) -> str:
    """All that ranks must agree on in a partition."""
    stages = [f"{stage.index}: {stage.input_values} -> {stage.output_values}" for stage in cut.stages]
    values = [
        f"{info.name} {info.producer} {info.consumers} {info.shape} {info.dtype} {info.batch_dim} {info.requires_grad}"
        for info in cut.values.values()
    ]
    return "\n".join([*stages, *values])


def describe_moves(boundaries: Boundaries, cut: Partition) -> Iterator[str]:
    """Where every value lies on both sides of its boundaries."""
    for edge in boundaries.edges:
        for info in edge.values:
            placed = [boundaries.placements(info, stage) for stage in (edge.from_stage, edge.to_stage)]
            yield f"{info.name} {placed} {boundaries.is_dtensor(info)}"
