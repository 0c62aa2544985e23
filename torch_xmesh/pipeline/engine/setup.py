"""What a pipeline engine works out before its first step."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from torch_xmesh.arguments import flag, instance_of, memory_limit
from torch_xmesh.pipeline.cut.partition import Partition
from torch_xmesh.pipeline.engine.boundary import Placed
from torch_xmesh.pipeline.schedule.schedule import Schedule, schedule_name
from torch_xmesh.pipeline.state.init_sync import InitSync
from torch_xmesh.pipeline.state.materialize import InitFn
from torch_xmesh.topology import Topology

LOOKAHEAD = 4
"""Receiving actions beyond the present one whose receives are posted."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlaceOptions:
    """What a user says of a pipeline besides its model and meshes; see PipelineEngine."""

    schedule: str | type[Any] | Schedule
    num_microbatches: int | str
    loss_fn: Callable[..., torch.Tensor] | None
    parallelize: Callable[[int, nn.Module, Any], nn.Module] | None
    boundary_placements: Mapping[str, Placed] | None
    scale_grads: bool
    memory_limit_bytes: int | None
    chunk_specs: Mapping[str, Any]
    seed: int
    overlap: bool
    early_weights: bool
    compare_batches: bool
    init_sync: InitSync
    init_fn: InitFn | None
    strategy: object
    topology: Topology | None


def check_options(options: PlaceOptions) -> None:
    """Raises ValueError for an argument of another type than the engine's."""
    count = options.num_microbatches
    if count == "auto":
        if options.schedule != "auto":
            raise ValueError('num_microbatches="auto" needs schedule="auto", which chooses both')
    elif isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f'num_microbatches is an int of at least 1 or "auto", got {count!r} ({type(count).__name__})')
    memory_limit(options.memory_limit_bytes)
    functions = {"loss_fn": options.loss_fn, "parallelize": options.parallelize, "init_fn": options.init_fn}
    for name, given in functions.items():
        if given is not None and not callable(given):
            raise ValueError(f"{name} is a function or None, got {given!r} ({type(given).__name__})")
    for name in ("scale_grads", "overlap", "early_weights", "compare_batches"):
        flag(name, getattr(options, name))
    if options.boundary_placements is not None:
        what = "a dict from value names to (placements, as_dtensor)"
        instance_of("boundary_placements", options.boundary_placements, Mapping, what)  # type: ignore[type-abstract]


def schedule_of(given: str | type[Any] | Schedule, places: list[int], num_microbatches: int) -> Schedule:
    """The schedule that a user means: an object, a CSV, or a name. Raises ValueError where it does not fit."""
    num_stages = len(places)
    if not isinstance(given, str | Schedule):
        given = schedule_name(given)
    if isinstance(given, Schedule):
        schedule = given
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
    return schedule


def describe_values(cut: Partition) -> str:
    """All that ranks must agree on in a partition."""
    stages = [f"{stage.index}: {stage.input_values} -> {stage.output_values}" for stage in cut.stages]
    values = [
        f"{info.name} {info.producer} {info.consumers} {info.shape} {info.dtype} {info.batch_dim} {info.requires_grad}"
        for info in cut.values.values()
    ]
    return "\n".join([*stages, *values])
