"""How fast xm.plan_parallel is on one core: its parts, and whole searches."""

import contextlib
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

import torch_xmesh as xm
from parts.parallelism.alpa_models import gpt
from parts.parallelism.cluster import GIB, devices_of, half_precision, network
from torch_xmesh import _C
from torch_xmesh.parallelism.cluster import cluster_of
from torch_xmesh.parallelism.graph import ShardingGraph
from torch_xmesh.parallelism.layers import SLACK
from torch_xmesh.parallelism.recorded_forwards import forward_of
from torch_xmesh.parallelism.space import Space
from torch_xmesh.parallelism.stretch import Stretch

SPEED_HEAD = (
    ("case", ""),
    ("part", ""),
    ("time", "(s)"),
    ("clock", "(s)"),
    ("bar", "(s)"),
    ("Alpa", "(s)"),
    ("runs", ""),
    ("verdict", ""),
)
_NUM_PLANS = 12
_NUM_OPTIONS = 5
_LOSS = 0.3
"""Stages on n devices are n^(1 - this) times as fast as on one."""
_WHOLE_RUNS = 3


@dataclass(frozen=True)
class SpeedRecord:
    """One part's time: the process's CPU time, which is what an idle core's clock shows, since planning has one thread
    and waits for nothing; `wall_seconds`: the clock's. Medians. `alpa_seconds`: what the paper says of the same."""

    case: str
    part: str
    seconds: float
    wall_seconds: float
    bar_seconds: float | None
    alpa_seconds: float | None
    runs: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


Times = dict[str, tuple[float, float]]
"""By part: CPU seconds, and the clock's."""


@dataclass(frozen=True)
class SpeedCase:
    """What is measured. `measure` runs once; `bars` and `alpa`, by part, where there are any. `is_whole`: takes long,
    and fewer runs do."""

    name: str
    measure: Callable[[], Times]
    bars: dict[str, float]
    alpa: dict[str, float]
    is_whole: bool = False


@contextlib.contextmanager
def one_core() -> Iterator[str]:
    """This process on one core, with one thread, until the end; says which."""
    threads = torch.get_num_threads()
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    torch.set_num_threads(1)
    try:
        if cores:
            os.sched_setaffinity(0, {max(cores)})
        yield f"one thread, on core {max(cores)}" if cores else "one thread, on any core"
    finally:
        torch.set_num_threads(threads)
        if cores:
            os.sched_setaffinity(0, cores)


class Stopwatch:
    """CPU time of the process and time of the clock, since it was made."""

    def __init__(self) -> None:
        self._begun = self._now()

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.process_time(), time.perf_counter()

    def seconds(self) -> tuple[float, float]:
        spent, passed = (now - begun for now, begun in zip(self._now(), self._begun, strict=True))
        return spent, passed


def shardings(num_layers: int, width: int, num_heads: int) -> Times:
    """The cheapest shardings of a whole GPT on a mesh of 2 x 4: recording it, tables of costs, and their solution."""
    model, indices = gpt(num_layers, width, num_heads), torch.zeros(8, 1024, dtype=torch.int64)
    watch = Stopwatch()
    forward = forward_of(model, (indices,), {})
    recorded = watch.seconds()
    cluster = cluster_of(devices_of(2, 4), network(4), half_precision(), None)
    links = cluster.links(range(8), (2, 4))
    with _timed(_C.StrategyGraph, "least_cost") as solved:
        watch = Stopwatch()
        space = Space(links, "ring", compute=half_precision(), num_microbatches=128)
        ShardingGraph(Stretch.of(forward), space).least()
        spent, passed = watch.seconds()
    own, clock = (sum(values) for values in zip(*solved, strict=True))
    return {"recording": recorded, "tables": (spent - own, passed - clock), "solution": (own, clock)}


@contextlib.contextmanager
def _timed(kind: Any, name: str) -> Iterator[list[tuple[float, float]]]:
    """What every call of a method takes."""
    original, out = getattr(kind, name), []

    def method(*args: Any) -> Any:
        watch = Stopwatch()
        try:
            return original(*args)
        finally:
            out.append(watch.seconds())

    setattr(kind, name, method)
    try:
        yield out
    finally:
        setattr(kind, name, original)


def stage_search(classes: tuple[int, int], num_layers: int, num_microbatches: int, powers_of_two: bool) -> Times:
    """The dynamic program alone, on (hosts, devices of each). Layers differ by up to a factor of three; a stretch on a
    submesh takes its layers' work over the devices and an efficiency that is partly random. Each option takes longer
    than the one before and holds less. A device has room for what belongs to parameters with the middle option, and
    for nothing else: memory decides."""
    random = np.random.default_rng(0)
    total = math.prod(classes)
    work = np.concatenate([[0.0], np.cumsum(random.uniform(0.5, 1.5, num_layers))])
    stretch = np.maximum(work[None, 1:] - work[:-1, None], 0.0)
    shapes = _C.submesh_shapes([classes], powers_of_two=powers_of_two)
    sizes = [sum(hosts * devices for _, hosts, devices in parts) for parts in shapes]
    fixed, per_microbatch = stretch * 16 * GIB, stretch * GIB
    limit = round(fixed[0, -1] / total)
    in_flight = [min(num_microbatches, behind + 1) for behind in range(min(num_layers, total))]
    submeshes = [([size], limit) for size in sizes]
    problem = _C.StageProblem(num_layers, num_microbatches, [total], submeshes, in_flight)
    for number, size in enumerate(sizes):
        for option in range(_NUM_OPTIONS):
            efficiency = random.uniform(0.9, 1.0, stretch.shape) * size**-_LOSS
            seconds = stretch / size / efficiency * (1 + 0.1 * option)
            rows = (row * (1.4 - 0.2 * option) / size for row in (fixed, per_microbatch))
            held = (np.ceil(row).astype(np.int64).ravel().tolist() for row in rows)
            problem.add_options(number, seconds.ravel().tolist(), *held)
    watch = Stopwatch()
    plans = problem.best_plans(_NUM_PLANS)
    taken = watch.seconds()
    if not plans:
        raise RuntimeError(f"no stages on {classes} devices keep {limit} bytes")
    return {"stages": taken}


def clustering(num_operators: int, num_layers: int) -> Times:
    """Operators in a row, each of which reads what the one before and any earlier one made."""
    random = np.random.default_rng(0)
    flops = random.integers(1, 10**9, num_operators).tolist()
    sizes = random.integers(1, 1000, num_operators).tolist()
    operators = [
        (flops[number], sorted({number - 1, int(random.integers(number))} if number else ()))
        for number in range(num_operators)
    ]
    values: list[tuple[int | None, int]] = list(enumerate(sizes))
    watch = Stopwatch()
    _C.cluster_operators(operators, values, num_layers, SLACK)
    return {"layers": watch.seconds()}


def whole(
    num_hosts: int, num_layers: int, width: int, num_heads: int, num_microbatches: int, num_devices: int = 8
) -> Times:
    """All of xm.plan_parallel for a GPT, a microbatch of one sequence, recording included."""
    model, indices = gpt(num_layers, width, num_heads), torch.zeros(1, 1024, dtype=torch.int64)
    watch = Stopwatch()
    xm.plan_parallel(
        model,
        (indices,),
        devices=devices_of(num_hosts, num_devices),
        num_microbatches=num_microbatches,
        memory_limit_bytes=16 * GIB,
        compute=half_precision(),
        topology=network(num_devices),
    )
    return {"all": watch.seconds()}


SPEED_CASES = (
    SpeedCase("gpt-24-2x4", partial(shardings, 24, 1024, 16), {"tables": 0.5, "solution": 0.1}, {}),
    SpeedCase(
        "stages-8x8-48", partial(stage_search, (8, 8), 48, 16, powers_of_two=False), {"stages": 0.6}, {"stages": 1.65}
    ),
    SpeedCase("stages-128x8-48", partial(stage_search, (128, 8), 48, 16, powers_of_two=True), {"stages": 1.0}, {}),
    SpeedCase("operators-10000-24", partial(clustering, 10_000, 24), {"layers": 1.0}, {}),
    SpeedCase("gpt-39b-8x8", partial(whole, 8, 48, 8192, 64, 128), {"all": 20.0}, {"all": 2393.26}, is_whole=True),
    SpeedCase("gpt-39b-128x8", partial(whole, 128, 48, 8192, 64, 128), {"all": 60.0}, {}, is_whole=True),
)


def measure_speed(case: SpeedCase, runs: int) -> list[SpeedRecord]:
    """A record for each part."""
    count = min(runs, _WHOLE_RUNS) if case.is_whole else runs
    every = [case.measure() for _ in range(count)]
    return [
        SpeedRecord(
            case=case.name,
            part=part,
            seconds=statistics.median(times[part][0] for times in every),
            wall_seconds=statistics.median(times[part][1] for times in every),
            bar_seconds=case.bars.get(part),
            alpa_seconds=case.alpa.get(part),
            runs=count,
        )
        for part in every[0]
    ]


def speed_row(record: SpeedRecord) -> list[str]:
    """As the table shows it."""
    bar, alpa = record.bar_seconds, record.alpa_seconds
    verdict = "" if bar is None else "met" if record.seconds <= bar else "NOT met"
    return [
        record.case,
        record.part,
        f"{record.seconds:.3f}",
        f"{record.wall_seconds:.3f}",
        "" if bar is None else f"{bar:g}",
        "" if alpa is None else f"{alpa:g}",
        str(record.runs),
        verdict,
    ]


def missed(records: Sequence[SpeedRecord]) -> list[str]:
    """The parts that took longer than their bars."""
    return [
        f"{one.case}, {one.part}" for one in records if one.bar_seconds is not None and one.seconds > one.bar_seconds
    ]
