"""Times backwards of models.py side by side, and follows what they allocate."""

import gc
import statistics
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.autograd.profiler import profile, record_function

from parts.split.models import FULL, Method, Model, Pass, num_wrong
from parts.split.records import MemoryRecord, TimeRecord

_FORWARD, _FIRST, _SECOND = "split_perf forward", "split_perf first", "split_perf second"
_Gradients = list[torch.Tensor | None]


class _Samples:
    """Seconds of one method, run by run, and what was wrong."""

    def __init__(self, method: Method) -> None:
        self.method = method
        self.first: list[float] = []
        self.whole: list[float] = []
        self.wrong = 0
        self.error: str | None = None

    def run(self, model: Model, expected: _Gradients) -> None:
        """A forward that is not timed, and a backward that is. What a rival raises ends its runs."""
        try:
            self._run(model, expected)
        except Exception as error:
            if not self.method.is_rival:
                raise
            self.error = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"

    def _run(self, model: Model, expected: _Gradients) -> None:
        run = Pass(model)
        run.output = model.module(run.input)
        began = time.perf_counter()
        self.method.first(run)
        run.output = None
        between = time.perf_counter()
        self.method.second(run)
        run.rest = None
        ended = time.perf_counter()
        self.first.append(between - began)
        self.whole.append(ended - began)
        self.wrong += num_wrong(run.gradients(), expected)


def expected_gradients(model: Model) -> _Gradients:
    """Gradients of one backward that is not split."""
    run = Pass(model)
    run.output = model.module(run.input)
    FULL.first(run)
    return run.gradients()


def time_backwards(family: str, model: Model, methods: Sequence[Method], runs: int) -> list[TimeRecord]:
    """Methods take turns, in another order each time, after one run each that is not counted. The first method is what
    the others are held against."""
    expected = expected_gradients(model)
    samples = [_Samples(method) for method in methods]
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        for turn in range(runs + 1):
            at = turn % len(samples)
            for one in samples[at:] + samples[:at]:
                if one.error is None:
                    one.run(model, expected)
            gc.collect()
    finally:
        gc.enable()
        gc.unfreeze()
    return [_time_record(family, model, one, samples[0]) for one in samples]


def _time_record(family: str, model: Model, samples: _Samples, base: _Samples) -> TimeRecord:
    record = TimeRecord(family, model.name, samples.method.name, samples.wrong, model.parts, samples.error)
    if samples.error is not None:
        return record
    first, whole, whole_of_base = samples.first[1:], samples.whole[1:], base.whole[1:]
    later = [end - begin for begin, end in zip(first, whole, strict=True)]
    record.runs = len(whole)
    record.input_seconds, record.input_seconds_median = min(first), statistics.median(first)
    record.weight_seconds, record.weight_seconds_median = min(later), statistics.median(later)
    record.seconds, record.seconds_median = min(whole), statistics.median(whole)
    record.ratio = min(whole) / min(whole_of_base)
    record.ratio_median = statistics.median(a / b for a, b in zip(whole, whole_of_base, strict=True))
    record.input_ratio = min(first) / min(whole_of_base)
    if model.parts is not None:
        differences = [a - b for a, b in zip(whole, whole_of_base, strict=True)]
        record.added_seconds_per_part = (min(whole) - min(whole_of_base)) / model.parts
        record.added_seconds_per_part_median = statistics.median(differences) / model.parts
    return record


def follow_memory(model: Model, methods: Sequence[Method]) -> list[MemoryRecord]:
    """The first method's peak is what the others' are held against."""
    expected = expected_gradients(model)
    records: list[MemoryRecord] = []
    for method in methods:
        try:
            record = _follow(model, method, expected)
        except Exception as error:
            if not method.is_rival:
                raise
            record = MemoryRecord("memory", model.name, method.name, 0, f"{type(error).__name__}: {error}")
        records.append(record)
        if record.peak_bytes is not None:
            record.peak_ratio = record.peak_bytes / (records[0].peak_bytes or 1)
    return records


def _follow(model: Model, method: Method, expected: _Gradients) -> MemoryRecord:
    """Weights, the input and the output's gradient are there before and do not count; gradients made do."""
    _Samples(method).run(model, expected)  # what is allocated once
    run = Pass(model)
    with profile(use_device=None, profile_memory=True) as profiled:
        with record_function(_FORWARD):
            run.output = model.module(run.input)
        with record_function(_FIRST):
            method.first(run)
            run.output = None
        with record_function(_SECOND):
            method.second(run)
            run.rest = None
    results: Any = profiled.kineto_results
    after, peaks = _curve(results.events(), [_FORWARD, _FIRST, _SECOND])
    record = MemoryRecord("memory", model.name, method.name, num_wrong(run.gradients(), expected))
    record.forward_bytes, record.held_bytes, record.end_bytes = after
    _, record.peak_bytes, record.weight_peak_bytes = peaks
    record.held_ratio = after[1] / after[0]
    return record


def _curve(events: Iterable[Any], phases: Sequence[str]) -> tuple[list[int], list[int]]:
    """Bytes alive after each phase, and the most within it."""
    all_events = list(events)
    ends = {event.name(): event.start_ns() + event.duration_ns() for event in all_events if event.name() in phases}
    steps = sorted(
        ((event.start_ns(), event.nbytes()) for event in all_events if event.name() == "[memory]"),
        key=lambda step: step[0],
    )
    after, peaks, alive, taken = [], [], 0, 0
    for phase in phases:
        peak = alive
        while taken < len(steps) and steps[taken][0] <= ends[phase]:
            alive += steps[taken][1]
            peak = max(peak, alive)
            taken += 1
        after.append(alive)
        peaks.append(peak)
    return after, peaks
