"""``split="auto"``: the split points of a model, by what is measured of it."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from torch_xmesh.pipeline.cut.balance import balance
from torch_xmesh.pipeline.cut.microbatch import leaf_specs
from torch_xmesh.pipeline.cut.partition import SplitAt
from torch_xmesh.pipeline.cut.profile import Profile
from torch_xmesh.pipeline.cut.values import sorted_arguments


def check_limit(split: SplitAt | str | None, memory_limit_bytes: int | None) -> None:
    """Raises ValueError for a limit that nothing would keep."""
    if memory_limit_bytes is not None and split != "auto":
        raise ValueError(
            f'memory_limit_bytes={memory_limit_bytes} is for split="auto", which chooses where stages start; '
            f"split is {split!r}"
        )


def choose_split(
    model: nn.Module,
    example_args: Sequence[Any],
    example_kwargs: Mapping[str, Any] | None,
    num_stages: int,
    *,
    memory_limit_bytes: int | None = None,
    microbatches_in_flight: Sequence[int] | None = None,
    args_chunk_spec: Any = None,
    kwargs_chunk_spec: Any = None,
    repeats: int = 3,
) -> SplitAt:
    """Split points that make the slowest stage as fast as possible.

    The figures are measured here, so another process may get another answer: agree on one.

    Args:
        memory_limit_bytes: per stage, for parameters with gradients and two optimizer states, and what the
            microbatches in flight hold: what autograd keeps of them for backward, and what the stage receives.
        microbatches_in_flight: by stage, the schedule's peak; num_stages each without it.

    Raises:
        ValueError: fewer module calls than stages, or no split keeps the limit.
    """
    if num_stages < 1:
        raise ValueError(f"num_stages must be at least 1, got {num_stages}")
    if num_stages == 1 and memory_limit_bytes is None:
        return SplitAt(())
    arguments = sorted_arguments(example_args, example_kwargs)
    specs = leaf_specs(arguments[0], args_chunk_spec, "args") + leaf_specs(arguments[1], kwargs_chunk_spec, "kwargs")
    profile = Profile(model, arguments, specs, repeats)
    profile.refine(num_stages)
    flight = [num_stages] * num_stages if microbatches_in_flight is None else microbatches_in_flight
    while True:
        units = profile.units if memory_limit_bytes is None else profile.units_with_memory()
        try:
            starts = balance(units, num_stages, memory_limit_bytes, flight)
        except ValueError:
            if profile.open([unit.name for unit in units]):
                continue
            raise
        return SplitAt(tuple(units[start].name for start in starts))
