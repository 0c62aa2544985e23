"""Records of measured pipeline steps and of what an engine costs the CPU, and their rows in tables."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from parts.shared.table import LiveTable


@dataclass(frozen=True)
class Record:
    """One pipeline under one method; benchmarks/README.md explains the keys."""

    suite: str
    case: str
    stages: int
    microbatches: int
    ratio: float
    method: str
    seconds: float
    seconds_min: float
    seconds_max: float
    signal_seconds: float | None
    ideal_seconds: float
    predicted_seconds: float
    peak_in_flight: int
    wrong: int
    runs: int
    stolen: float | None = None

    @property
    def point(self) -> str:
        """What the methods are compared on."""
        return f"{self.case} n{self.stages} m{self.microbatches} r{self.ratio:g}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


_HEAD = (
    ("case", ""),
    ("method", ""),
    ("time", "(ms)"),
    ("min", "(ms)"),
    ("max", "(ms)"),
    ("signal", "(ms)"),
    ("signal/time", ""),
    ("rival/time", ""),
    ("ideal", "(ms)"),
    ("predicted", "(ms)"),
    ("pred/time", ""),
    ("peak", ""),
    ("stolen", "(%)"),
    ("runs", ""),
    ("#wrong", ""),
)


def _row(record: Record, rival: Record | None) -> list[str]:
    def ms(seconds: float | None) -> str:
        return "-" if seconds is None else f"{seconds * 1e3:.0f}"

    return [
        record.point,
        record.method,
        ms(record.seconds),
        ms(record.seconds_min),
        ms(record.seconds_max),
        ms(record.signal_seconds),
        "-" if record.signal_seconds is None else f"{record.signal_seconds / record.seconds:.3f}",
        "-" if rival is None else f"{rival.seconds / record.seconds:.2f}",
        ms(record.ideal_seconds),
        ms(record.predicted_seconds),
        f"{record.predicted_seconds / record.seconds:.3f}",
        str(record.peak_in_flight),
        "-" if record.stolen is None else f"{record.stolen * 100:.1f}",
        str(record.runs),
        str(record.wrong),
    ]


def rival_of(record: Record, records: Sequence[Record]) -> Record | None:
    """What `rival/time` is against: torch's 1F1B, or the gathers by hand, on the same point."""
    found = (r for r in records if r.point == record.point and r.method in ("torch_1f1b", "by_hand"))
    return next(found, None)


def live_table(methods: Sequence[str]) -> LiveTable:
    """For records of these methods."""
    return LiveTable(_HEAD, [["2x1->1x2 n2 m16 r0.5"], methods])


def rows(records: Sequence[Record]) -> list[list[str]]:
    """The rows of records that have the rival of each among them."""
    return [_row(record, rival_of(record, records)) for record in records]


@dataclass(frozen=True)
class OverheadRecord:
    """CPU time of one engine on one number of stages and microbatches; benchmarks/README.md explains the keys."""

    suite: str
    method: str
    stages: int
    microbatches: int
    cpu_us_per_action: float
    cpu_us_per_compute_action: float
    cpu_us_all_threads_per_action: float
    bare_us: float

    @property
    def point(self) -> str:
        """What the methods are compared on."""
        return f"n{self.stages} m{self.microbatches}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


_OVERHEAD_HEAD = (
    ("case", ""),
    ("method", ""),
    ("action", "(us)"),
    ("F or B", "(us)"),
    ("all threads", "(us)"),
    ("bare F or B", "(us)"),
)


def overhead_table(methods: Sequence[str]) -> LiveTable:
    """For records of what engines cost."""
    return LiveTable(_OVERHEAD_HEAD, [["n4 m16"], methods])


def overhead_rows(records: Sequence[OverheadRecord]) -> list[list[str]]:
    """CPU time beyond the bare stage: the calling thread's per action and per compute action, that of all threads per
    action, and the bare stage's own."""
    return [
        [
            record.point,
            record.method,
            f"{record.cpu_us_per_action:.1f}",
            f"{record.cpu_us_per_compute_action:.1f}",
            f"{record.cpu_us_all_threads_per_action:.1f}",
            f"{record.bare_us:.1f}",
        ]
        for record in records
    ]


@dataclass(frozen=True)
class HfRecord:
    """Steps of a model of transformers by one method; benchmarks/README.md explains the keys."""

    suite: str
    method: str
    layers: int
    width: int
    microbatches: int
    seconds: float
    seconds_min: float
    seconds_max: float
    make_seconds: float
    runs: int
    wrong: int

    @property
    def point(self) -> str:
        """What the methods are compared on."""
        return f"{self.layers} layers m{self.microbatches}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


_HF_HEAD = (
    ("case", ""),
    ("method", ""),
    ("step", "(ms)"),
    ("min", "(ms)"),
    ("max", "(ms)"),
    ("to ready", ""),
    ("make", "(s)"),
    ("steps", ""),
    ("#wrong", ""),
)


def hf_table(methods: Sequence[str]) -> LiveTable:
    """For records of a model of transformers."""
    return LiveTable(_HF_HEAD, [["8 layers m8"], methods])


def hf_rows(records: Sequence[HfRecord]) -> list[list[str]]:
    """Median, least and most milliseconds of a step on its slowest rank, and the median's ratio to the ready
    stages'."""
    ready = next((record.seconds for record in records if record.method == "ready"), None)
    return [
        [
            record.point,
            record.method,
            *(f"{value * 1e3:.1f}" for value in (record.seconds, record.seconds_min, record.seconds_max)),
            "-" if ready is None else f"{record.seconds / ready:.3f}",
            f"{record.make_seconds:.2f}",
            str(record.runs),
            str(record.wrong),
        ]
        for record in records
    ]
