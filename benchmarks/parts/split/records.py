"""Records of split_perf.py, their rows in its tables, and whether they meet the bars."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

RATIO_BARS = {"linear": 1.02, "transformer": 1.02, "transformer_eager": 1.02, "conv_norm": 1.07}
INPUT_RATIO_BAR = ("linear", 0.52)
CUT_BAR_US = 15.0
NODE_BAR_US = 0.2
LINEAR_BAR = 1.25
"""A layer of the longest chain over one of the next shorter."""
PEAK_BAR = 1.05
HELD_BAR = 0.9
MEMORY_BAR_MODELS = ("linear", "transformer", "transformer_eager")

MODEL_HEAD = [
    ("model", ""),
    ("method", ""),
    ("I", "ms"),
    ("W", "ms"),
    ("I+W", "ms"),
    ("I+W", "/full"),
    ("median", "/full"),
    ("I", "/full"),
    ("#wrong", ""),
]
CHAIN_HEAD = [
    ("chain", ""),
    ("method", ""),
    ("I", "us"),
    ("W", "us"),
    ("I+W", "us"),
    ("I+W", "us/layer"),
    ("added", "us/cut"),
    ("#wrong", ""),
]
WALK_HEAD = [
    ("chain", ""),
    ("method", ""),
    ("I", "us"),
    ("I", "us/node"),
    ("added", "us/node"),
    ("median", "us/node"),
    ("#wrong", ""),
]
MEMORY_HEAD = [
    ("model", ""),
    ("method", ""),
    ("forward", "MiB"),
    ("peak I", "MiB"),
    ("held", "MiB"),
    ("peak W", "MiB"),
    ("peak I", "/full"),
    ("held", "/forward"),
    ("#wrong", ""),
]


@dataclass
class _Record:
    family: str
    case: str
    method: str
    wrong: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class TimeRecord(_Record):
    """Seconds of one method on one model: the least of all runs, and the median. `input_` is the first half, `weight_`
    the second (of `full`, the first is all). `ratio`: over the least of the method that the others are held against;
    `..._median` of these: the median of what is found within each turn. All None where a rival raised, which `error`
    says."""

    parts: int | None = None
    error: str | None = None
    runs: int = 0
    input_seconds: float | None = None
    weight_seconds: float | None = None
    seconds: float | None = None
    input_seconds_median: float | None = None
    weight_seconds_median: float | None = None
    seconds_median: float | None = None
    ratio: float | None = None
    ratio_median: float | None = None
    input_ratio: float | None = None
    added_seconds_per_part: float | None = None
    added_seconds_per_part_median: float | None = None


@dataclass
class MemoryRecord(_Record):
    """Bytes of tensors alive beyond those that were there before the forward."""

    error: str | None = None
    forward_bytes: int | None = None
    peak_bytes: int | None = None
    held_bytes: int | None = None
    weight_peak_bytes: int | None = None
    end_bytes: int | None = None
    peak_ratio: float | None = None
    held_ratio: float | None = None


def _number(value: float | None, digits: int, factor: float = 1.0) -> str:
    return "-" if value is None else f"{value * factor:.{digits}f}"


def _per_part(record: TimeRecord) -> float | None:
    return None if record.seconds is None or not record.parts else record.seconds / record.parts


def model_row(record: TimeRecord) -> list[str]:
    halves = (None, None) if record.method == "full" else (record.input_seconds, record.weight_seconds)
    return [
        record.case,
        record.method,
        *(_number(seconds, 2, 1e3) for seconds in (*halves, record.seconds)),
        _number(record.ratio, 3),
        _number(record.ratio_median, 3),
        _number(None if record.method == "full" else record.input_ratio, 3),
        "raises" if record.error else str(record.wrong),
    ]


def chain_row(record: TimeRecord) -> list[str]:
    halves = (None, None) if record.method == "full" else (record.input_seconds, record.weight_seconds)
    return [
        record.case,
        record.method,
        *(_number(seconds, 0, 1e6) for seconds in (*halves, record.seconds)),
        _number(_per_part(record), 2, 1e6),
        _number(None if record.method == "full" else record.added_seconds_per_part, 2, 1e6),
        "raises" if record.error else str(record.wrong),
    ]


def walk_row(record: TimeRecord) -> list[str]:
    return [
        record.case,
        record.method,
        _number(record.seconds, 0, 1e6),
        _number(_per_part(record), 3, 1e6),
        _number(None if record.method == "grad" else record.added_seconds_per_part, 3, 1e6),
        _number(None if record.method == "grad" else record.added_seconds_per_part_median, 3, 1e6),
        str(record.wrong),
    ]


def memory_row(record: MemoryRecord) -> list[str]:
    is_full = record.method == "full"
    held, later = (None, None) if is_full else (record.held_bytes, record.weight_peak_bytes)
    return [
        record.case,
        record.method,
        *(_number(size, 2, 2**-20) for size in (record.forward_bytes, record.peak_bytes, held, later)),
        _number(record.peak_ratio, 3),
        _number(None if is_full else record.held_ratio, 3),
        "raises" if record.error else str(record.wrong),
    ]


def error_lines(records: Sequence[TimeRecord | MemoryRecord]) -> list[str]:
    return [f"{one.case}, {one.method} raises {one.error}" for one in records if one.error is not None]


def bar_lines(records: Sequence[TimeRecord | MemoryRecord]) -> list[str]:
    """One line per bar and model, for what was measured."""
    ours = [record for record in records if record.method == "ours"]
    times = {(one.family, one.case): one for one in ours if isinstance(one, TimeRecord)}
    lines = []
    for case, bar in RATIO_BARS.items():
        if (one := times.get(("models", case))) is not None:
            lines.append(_bar_line(f"{case}: I+W over full, least of all runs", one.ratio, bar))
            lines.append(_bar_line(f"{case}: I+W over full, median of turns", one.ratio_median, bar))
            if case == INPUT_RATIO_BAR[0]:
                lines.append(_bar_line(f"{case}: I over full", one.input_ratio, INPUT_RATIO_BAR[1]))
    for (family, case), one in times.items():
        if family == "chains":
            lines.append(_bar_line(f"{case}: us added per early cut", _us(one.added_seconds_per_part), CUT_BAR_US))
        elif family == "walk":
            what = f"{case}: us added per node"
            lines.append(_bar_line(f"{what}, least of all runs", _us(one.added_seconds_per_part), NODE_BAR_US))
            lines.append(_bar_line(f"{what}, median of turns", _us(one.added_seconds_per_part_median), NODE_BAR_US))
    lines += _linearity_lines(times)
    for record in ours:
        if isinstance(record, MemoryRecord) and record.case in MEMORY_BAR_MODELS:
            lines.append(_bar_line(f"{record.case}: peak in I over peak of full", record.peak_ratio, PEAK_BAR))
            lines.append(_bar_line(f"{record.case}: held over left by forward", record.held_ratio, HELD_BAR))
    return lines


def _us(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e6


def _linearity_lines(times: Mapping[tuple[str, str], TimeRecord]) -> list[str]:
    chains = sorted((one.parts or 0, _per_part(one) or 0.0) for key, one in times.items() if key[0] == "chains")
    if len(chains) < 2:
        return []
    (few, short), (many, long) = chains[-2:]
    return [_bar_line(f"I+W of a layer among {many} over one among {few}", long / short, LINEAR_BAR)]


def _bar_line(what: str, value: float | None, bar: float) -> str:
    if value is None:
        return f"{what}: not measured"
    verdict = "met" if value <= bar else f"NOT met, {value - bar:.3g} above"
    return f"{what} {value:.3f}; bar {bar:g}: {verdict}"
