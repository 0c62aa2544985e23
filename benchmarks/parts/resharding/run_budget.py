"""Who gets further runs when time is short: the product's own choice first, slow rivals last."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_KEPT = ("auto", "striped", "broadcast")
_SLOW = 1.15


@dataclass(frozen=True)
class Cost:
    """What a run of one method costs: `seconds` of its own, `spent` with filling and checking the buffers."""

    seconds: float
    spent: float


def further_runs(costs: Mapping[str, Cost], wanted: int, seconds: float) -> dict[str, int]:
    """Runs per method within `seconds`, at most `wanted`. `auto` gets all; what is left goes to `striped` and
    `broadcast`, then to methods at most 1.15 times slower than the fastest, then to the others; all of one of these
    groups get the same number."""
    limit = _SLOW * min(cost.seconds for cost in costs.values())
    others = [name for name in costs if name not in _KEPT]
    groups = [
        [name for name in _KEPT[1:] if name in costs],
        [name for name in others if costs[name].seconds <= limit],
        [name for name in others if costs[name].seconds > limit],
    ]
    runs = dict.fromkeys(costs, wanted)
    left = seconds - sum(wanted * costs[name].spent for name in costs if name == "auto")
    for group in filter(None, groups):
        one_of_each = sum(costs[name].spent for name in group)
        count = max(0, min(wanted, int(left / one_of_each)))
        runs |= dict.fromkeys(group, count)
        left -= count * one_of_each
    return runs


def shares(weights: Iterable[float]) -> list[float]:
    """For each case the part that it may take of the time that is left when it begins."""
    listed = list(weights)
    return [weight / sum(listed[index:]) for index, weight in enumerate(listed)]
