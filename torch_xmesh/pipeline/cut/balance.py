"""Stages of about equal work: where they start, under each stage's memory."""

from collections.abc import Sequence

from torch_xmesh.pipeline.cut.profile_memory import UnitCost, needed_bytes


def balance(
    units: Sequence[UnitCost],
    num_stages: int,
    memory_limit_bytes: int | None,
    microbatches_in_flight: Sequence[int],
) -> list[int]:
    """The first unit of each stage but the first: minimizes the slowest stage's seconds, then the sum of squares
    (exact, O(n^2 * stages)).

    Raises:
        ValueError: fewer units than stages, or no split keeps the limit.
    """
    count = len(units)
    if count < num_stages:
        raise ValueError(
            f"the model has {count} module calls at which a stage may start ({[u.name for u in units]}), fewer "
            f"than {num_stages} stages"
        )
    needed = {} if memory_limit_bytes is None else needed_bytes(units)

    def cost(stage: int, first: int, end: int) -> tuple[float, float] | None:
        in_flight = microbatches_in_flight[stage]
        if memory_limit_bytes is not None and needed[first, end].total(in_flight) > memory_limit_bytes:
            return None
        seconds = sum(u.seconds for u in units[first:end])
        return seconds, seconds * seconds

    best: dict[tuple[int, int], tuple[float, float, tuple[int, ...]]] = {(0, 0): (0.0, 0.0, ())}
    for stage in range(1, num_stages + 1):
        for end in range(stage, count + 1):
            options = []
            for first in range(stage - 1, end):
                before, own = best.get((stage - 1, first)), cost(stage - 1, first, end)
                if before is not None and own is not None:
                    options.append((max(before[0], own[0]), before[1] + own[1], (*before[2], first)))
            if options:
                best[stage, end] = min(options)
    if (num_stages, count) not in best:
        fewest = min(microbatches_in_flight)
        largest = max(needed[unit, unit + 1].total(fewest) for unit in range(count))
        raise ValueError(
            f"no split into {num_stages} stages keeps memory_limit_bytes={memory_limit_bytes}: the largest single "
            f"module call needs {largest} bytes, all together {needed[0, count].total(fewest)}, with {fewest} "
            f"microbatches in flight (by stage: {list(microbatches_in_flight)})"
        )
    return list(best[num_stages, count][2][1:])
