"""What planning has to reach, and lines that say whether it does."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from parts.resharding.hard import BROADCASTS

CASES_BAR_MS = 5.0
SCALE_BAR_MS = {64: 20.0, 256: 200.0, 1024: 1000.0}
CACHED_BAR_MS = 0.05
_RATIO_BARS = (
    ("striped:num_chunks=64", 99, 1.035),
    ("striped:num_chunks=64", 100, 1.05),
    ("striped:num_chunks=256", 99, 1.02),
)
_FINITE_CHUNKS = {"striped:num_chunks=64": 64, "striped:num_chunks=256": 256}
_MOST_EXCESS = 2.0  # chunks
_MOST_OVER_BROADCAST = 1.05
_FAR = 1.3
_GAIN_WHERE_FAR = 0.2


@dataclass(frozen=True)
class PlanRecord:
    """`num_chunks_bound`: chunks that the busiest NIC carries at the least, bound bytes over the plan's largest
    message, None where that was not counted; `predicted_ratio`: simulated time over the lower bound, None where nothing
    has to leave a host."""

    case: str
    strategy: str
    num_chunks_bound: int | None
    predicted_ratio: float | None
    plan_seconds: float


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` per cent of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def time_line(what: str, records: Sequence[PlanRecord], bar_ms: float) -> str:
    """Whether the slowest of some plannings was within a bar."""
    slowest = max(records, key=lambda record: record.plan_seconds)
    slowest_ms = slowest.plan_seconds * 1e3
    return _line(f"{what}: slowest {slowest_ms:.1f} ms ({slowest.case})", slowest_ms - bar_ms, f"{bar_ms:.0f} ms", "ms")


def quality_lines(
    records: Sequence[PlanRecord], fans: Mapping[str, int], bound_items: Mapping[str, float]
) -> list[str]:
    """One line per bar on random layouts. `fans`: by case, most hosts that need one slice from outside. `bound_items`:
    by case, elements that the busiest NIC carries; where these are fewer than chunks, no plan can cut so finely, and
    the case is named and left out."""
    tiny = {case for case, items in bound_items.items() if 0 < items < max(_FINITE_CHUNKS.values())}
    ratios: dict[str, dict[str, float]] = {}
    for record in records:
        if record.predicted_ratio is not None and record.case not in tiny:
            ratios.setdefault(record.strategy, {})[record.case] = record.predicted_ratio
    names = ", ".join(f"{case} ({bound_items[case]:.0f})" for case in sorted(tiny)) or "none"
    lines = [f"# left out, the busiest NIC carrying fewer elements than chunks: {names}"]
    for strategy, percent, bar in _RATIO_BARS:
        found = percentile(list(ratios[strategy].values()), percent)
        lines.append(_line(f"{strategy} p{percent} {found:.4f}", found - bar, f"{bar}"))
    for strategy, num_chunks in _FINITE_CHUNKS.items():
        lines.append(_excess_line(strategy, ratios[strategy], num_chunks, fans))
    best = {case: min(ratios[name][case] for name in BROADCASTS) for case in ratios[BROADCASTS[0]]}
    for strategy in _FINITE_CHUNKS:
        lines += _rival_lines(strategy, ratios[strategy], best)
    return lines


def _excess_line(strategy: str, ratios: Mapping[str, float], num_chunks: int, fans: Mapping[str, int]) -> str:
    def excess(case: str) -> float:
        return (ratios[case] - 1) * num_chunks - (math.ceil(math.log2(fans[case] + 1)) - 1)

    case, most = _worst(ratios, excess)
    return _line(
        f"{strategy} excess over the finite-chunk bound {most:.2f} chunks ({case})",
        most - _MOST_EXCESS,
        f"{_MOST_EXCESS:.0f} chunks",
    )


def _rival_lines(strategy: str, ratios: Mapping[str, float], best: Mapping[str, float]) -> list[str]:
    case, most = _worst(best, lambda name: ratios[name] / best[name])
    lines = [
        _line(
            f"{strategy} over the best broadcast plan {most:.4f} ({case})",
            most - _MOST_OVER_BROADCAST,
            f"{_MOST_OVER_BROADCAST}",
        )
    ]
    far = {name: ratio for name, ratio in best.items() if ratio > _FAR}
    if far:
        case, most = _worst(far, lambda name: ratios[name] / best[name])
        missed = sum(ratios[name] > (1 - _GAIN_WHERE_FAR) * ratio for name, ratio in far.items())
        where = f"where that is above {_FAR} ({len(far)} layouts, {missed} not reached)"
        what = f"{strategy} of the best broadcast plan {where} {most:.4f} ({case})"
        lines.append(_line(what, most - (1 - _GAIN_WHERE_FAR), f"{1 - _GAIN_WHERE_FAR}"))
    return lines


def _worst(cases: Mapping[str, float], value: Callable[[str], float]) -> tuple[str, float]:
    name = max(cases, key=value)
    return name, value(name)


def _line(what: str, over: float, bar: str, unit: str = "") -> str:
    verdict = "met" if over <= 1e-9 else f"NOT met, {over:.4g} {unit}".rstrip() + " above"
    return f"# {what}; bar {bar}: {verdict}"
