"""Training steps on all ranks, timed in turn and checked: what benchmarks that train by plans share.

methods, one process's gradients --> TimedSteps: one uncounted step of each, then rounds of all --> seconds, wrong
"""

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from parts.shared.charts import Bar, draw_bars
from parts.shared.heap import PeakMemory
from parts.shared.pacing import Paced
from parts.shared.progress import tell
from torch.distributed.tensor import DTensor

from torch_xmesh import palette


class Method(ABC):
    """A way to train a model on all ranks."""

    @abstractmethod
    def step(self) -> None: ...

    @abstractmethod
    def parameters(self) -> Mapping[str, torch.Tensor]: ...

    def zero_gradients(self) -> None:
        for parameter in self.parameters().values():
            parameter.grad = None

    def close(self) -> None:  # noqa: B027  # most have nothing
        """Ends what it holds."""


@dataclass(frozen=True)
class StepRecord:
    """One model under one method.

    Attributes:
        text: stages' meshes and the schedule of a plan.
        seconds: the median step.
        peak_bytes: what the heap of a rank holds at most during a step, beyond what it held before; of the rank with the
            most. None of records from before it was looked at.
    """

    case: str
    method: str
    text: str
    seconds: float
    seconds_min: float
    seconds_max: float
    runs: int
    wrong: int
    peak_bytes: int | None = None

    @property
    def predicted_step_seconds(self) -> float | None:
        """What a plan says; None of others."""
        return None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class TimedSteps:
    """Steps of some methods on the same batch, from the first rank's start to the last one's end. Every rank makes it.

    Args:
        tolerance: relative; elements of a gradient may be off by it, and by a tenth of it of the largest.

    Attributes:
        computed: by method, seconds that the products of its last step take on the device that has most of them.
    """

    def __init__(
        self,
        methods: Mapping[str, Method],
        expected: Mapping[str, torch.Tensor],
        paced: Paced,
        group: Any,
        *,
        tolerance: float = 1e-4,
    ) -> None:
        self._methods, self._expected, self._paced, self._group = dict(methods), expected, paced, group
        self._tolerance = tolerance
        self._seconds: dict[str, list[float]] = {name: [] for name in methods}
        self._wrong = dict.fromkeys(methods, 0)
        self._peaks = dict.fromkeys(methods, 0)
        self.computed: dict[str, float] = {}

    def measure(self, case: str, job: Mapping[str, Any]) -> None:
        """One uncounted step of each, then rounds of all, then a step of each whose memory is looked at."""
        for number in range(1 + job["runs"]):
            for name in self._methods:
                if dist.get_rank() == 0:
                    tell(case, name, f"run {number} of {job['runs']}", job["ends_at"] - time.time())
                seconds = self._run(name)
                if number:
                    self._seconds[name].append(seconds)
        for name, method in self._methods.items():
            method.zero_gradients()
            with PeakMemory() as memory:
                self._run(name)
            peak = torch.tensor([memory.peak_bytes])
            dist.all_reduce(peak, dist.ReduceOp.MAX, group=self._group)
            self._peaks[name] = int(peak)

    def record(self, name: str) -> dict[str, Any]:
        """The fields of a StepRecord that were measured."""
        seconds = self._seconds[name]
        return {
            "method": name,
            "seconds": statistics.median(seconds),
            "seconds_min": min(seconds),
            "seconds_max": max(seconds),
            "runs": len(seconds),
            "wrong": self._wrong[name],
            "peak_bytes": self._peaks[name],
        }

    def _run(self, name: str) -> float:
        method = self._methods[name]
        method.zero_gradients()
        with self._paced:
            self._paced.operations = 0
            dist.barrier(group=self._group)
            begin = time.monotonic()
            method.step()
            end = time.monotonic()
        told = torch.tensor([-begin, end, self._paced.operations / self._paced.flops], dtype=torch.float64)
        dist.all_reduce(told, dist.ReduceOp.MAX, group=self._group)
        wrong = torch.tensor([self._count_wrong(method)])
        dist.all_reduce(wrong, group=self._group)
        self._wrong[name] += int(wrong)
        self.computed[name] = float(told[2])
        return float(told[:2].sum())

    def _count_wrong(self, method: Method) -> int:
        """Elements beyond the tolerance for sums in another order; all of a gradient that is missing."""
        wrong = 0
        for name, parameter in method.parameters().items():
            expected, found = self._expected[name], parameter.grad
            if isinstance(found, DTensor):
                found = found.full_tensor()
            if found is None or found.shape != expected.shape:
                wrong += expected.numel()
            else:
                most = self._tolerance * (expected.abs() + 0.1 * expected.abs().max()) + 1e-9
                wrong += int((~((found - expected).abs() <= most)).sum())
        return wrong


def gradients_of(model: Any, batch: torch.Tensor, target: torch.Tensor, loss_fn: Callable[..., Any]) -> dict[str, Any]:
    """What one process gets."""
    loss_fn(model(batch), target).backward()
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def draw_steps(
    axes: Any, records: Sequence[StepRecord], unit_of: Callable[[str], float], *, over: str, title: str
) -> None:
    """A group of bars for each case, in units of `unit_of(case)` seconds, which `over` names; the line across a bar is
    the prediction."""
    groups = list(dict.fromkeys(record.case for record in records))
    methods = list(dict.fromkeys(record.method for record in records))
    colors = dict(zip(methods, palette.colors_of(methods), strict=True))
    units = {group: unit_of(group) for group in groups}
    bars = []
    for one in records:
        unit, predicted = units[one.case], one.predicted_step_seconds
        ends = one.seconds / unit, one.seconds_min / unit, one.seconds_max / unit
        bars.append(Bar(one.case, one.method, *ends, None if predicted is None else predicted / unit))
    draw_bars(axes, bars, groups=groups, colors=colors)
    axes.set_ylabel(f"step, over {over}")
    axes.set_title(title, fontsize=9)
    handles = [axes.bar(0, 0, color=colors[method]) for method in methods]
    axes.legend(handles, methods, fontsize=7, ncols=2)
