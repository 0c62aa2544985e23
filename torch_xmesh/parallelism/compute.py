"""What an operator takes to compute on a device: operations and bytes over a device's rates."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence

import torch

from torch_xmesh.parallelism.loops import Choice, End, num_devices_used, num_parts
from torch_xmesh.parallelism.operators import Operator, Value

_CALLS = 10


@dataclasses.dataclass(frozen=True)
class ComputeSeconds:
    """Seconds that each device computes for an operator: its forward, its inputs' gradients, its parameters'
    gradients."""

    forward: float = 0.0
    backward_input: float = 0.0
    backward_weight: float = 0.0


@dataclasses.dataclass(frozen=True)
class Compute:
    """How fast a device is, as a roofline (S. Williams et al., 2009): an operator takes as long as its floating-point
    operations or its bytes, whichever is more.

    Args:
        flops: floating-point operations per second that large matrix products reach.
        bytes_per_s: bytes per second that it reads and writes.

    Raises:
        ValueError: a rate that is not positive.
    """

    flops: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        for name, rate in (("flops", self.flops), ("bytes_per_s", self.bytes_per_s)):
            if not (isinstance(rate, int | float) and math.isfinite(rate) and rate > 0):
                raise ValueError(f"{name} is a positive number, got {rate!r}")

    @classmethod
    def measured(cls, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> "Compute":
        """Rates measured on this machine's device: FLOP/s of a large matrix product in `dtype`, and bytes/s of adding a
        number to a large tensor in place."""
        size, count = (1024, 1 << 24) if torch.device(device).type == "cpu" else (8192, 1 << 28)
        a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
        x = torch.ones(count // dtype.itemsize, dtype=dtype, device=device)
        product, added = least_seconds(lambda: a @ b, device), least_seconds(lambda: x.add_(1), device)
        return cls(2.0 * size**3 / product, 2.0 * x.numel() * dtype.itemsize / added)

    def seconds(self, flops: float, num_bytes: float) -> float:
        """Seconds for so many floating-point operations and so many bytes read and written, whichever takes longer."""
        return max(flops / self.flops, num_bytes / self.bytes_per_s)

    def of_operator(self, operator: Operator, choice: Choice, mesh_shape: Sequence[int]) -> ComputeSeconds:
        """What one takes on each device of a mesh."""
        return compute_seconds(operator, choice, mesh_shape, self)

    def describe(self) -> str:
        """In words: what operators take."""
        return f"at {self.flops:.3g} FLOP/s and {self.bytes_per_s:.3g} bytes/s"

    def kind_of(self, operator: Operator) -> tuple[object, ...]:
        """What operators of the same loops have in common besides, that take as long."""
        return ()


def least_seconds(
    call: Callable[[], object], device: torch.device | str, runs: int = 5, enough_seconds: float = math.inf
) -> float:
    """Seconds of a call in the fastest of several runs. A first run is not counted. Runs end early once all together
    have taken `enough_seconds`. On an accelerator a run is several calls, which are waited for once, so that launching
    a call is hidden by the call before it."""
    on_device = torch.device(device)
    times: list[float] = []
    count = 1 if on_device.type == "cpu" else _CALLS
    wait = (
        (lambda: None)
        if on_device.type == "cpu"
        else functools.partial(getattr(torch, on_device.type).synchronize, on_device)
    )
    while len(times) < 2 or (len(times) <= runs and sum(times) < enough_seconds):
        wait()
        begin = time.perf_counter()
        for _ in range(count):
            call()
        wait()
        times.append(time.perf_counter() - begin)
    return min(times[1:]) / count


def compute_seconds(operator: Operator, choice: Choice, mesh_shape: Sequence[int], compute: Compute) -> ComputeSeconds:
    """Seconds that each device computes for an operator in one microbatch. The gradient of one input takes as long as
    the forward: it is a product over the same loops, or reads as many bytes. Where the operator is no product, a
    parameter's gradient takes as long as writing it. What an activation checkpoint computes anew is counted with the
    inputs' gradients."""
    if operator.views:
        return ComputeSeconds()
    flops = operator.loops.flops / num_devices_used(choice, mesh_shape)
    made = sum(map(functools.partial(_num_bytes, mesh_shape), operator.makes, choice.outputs))
    numbers = [number for number, labels in enumerate(operator.loops.inputs) if labels is not None]
    read = sum(
        made if number in operator.loops.picked else _num_bytes(mesh_shape, value, end)
        for number, value, end in zip(numbers, operator.reads, choice.inputs, strict=True)
    )
    once = compute.seconds(flops, read + made)
    if not operator.requires_grad:
        return ComputeSeconds(once, once if operator.is_computed_again else 0.0)
    weights = [pair for pair in zip(operator.reads, choice.inputs, strict=True) if pair[0].is_trained]
    num_inputs = sum(value.requires_grad and not value.is_parameter for value in operator.reads)
    if operator.loops.flops:
        of_weights = once * sum(len(value.shape) > 1 for value, _ in weights)
    else:
        of_weights = compute.seconds(0.0, sum(_num_bytes(mesh_shape, value, end) for value, end in weights))
    again = once if operator.is_computed_again else 0.0
    return ComputeSeconds(once, again + once * min(num_inputs, 2), of_weights)


def _num_bytes(mesh_shape: Sequence[int], value: Value, end: End) -> float:
    return value.num_bytes / num_parts(end.value, mesh_shape)
