"""What an operator takes to compute on a device: operations and bytes over a device's rates."""

import dataclasses
import math
from collections.abc import Sequence

from torch_xmesh.parallelism.loops import Choice, End, num_devices_used, num_parts
from torch_xmesh.parallelism.operators import Operator, Value


@dataclasses.dataclass(frozen=True)
class Compute:
    """A device's rates (S. Williams et al., Roofline, 2009): an operator takes what its operations take or what its
    bytes take, whichever is more.

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

    def seconds(self, flops: float, num_bytes: float) -> float:
        """Of something that does so many operations and reads and writes so many bytes."""
        return max(flops / self.flops, num_bytes / self.bytes_per_s)


@dataclasses.dataclass(frozen=True)
class ComputeSeconds:
    """Of an operator on each device: its forward, its inputs' gradients, its parameters' gradients."""

    forward: float = 0.0
    backward_input: float = 0.0
    backward_weight: float = 0.0


def compute_seconds(operator: Operator, choice: Choice, mesh_shape: Sequence[int], compute: Compute) -> ComputeSeconds:
    """Of one microbatch. A gradient of one input takes as long as the forward does: it is a product of the same loops,
    or reads as many bytes."""
    if operator.views:
        return ComputeSeconds()
    flops = operator.loops.flops / num_devices_used(choice, mesh_shape)
    read, made = (operator.reads, choice.inputs), (operator.makes, choice.outputs)
    moved = sum(_num_bytes(values, ends, mesh_shape) for values, ends in (read, made))
    once = compute.seconds(flops, moved)
    if not operator.requires_grad:
        return ComputeSeconds(once)
    num_weights = sum(value.is_trained for value in operator.reads if len(value.shape) > 1)
    num_inputs = sum(value.requires_grad and not value.is_parameter for value in operator.reads)
    has_weights = operator.loops.is_heavy and num_weights > 0
    return ComputeSeconds(once, once * min(num_inputs, 2), once * num_weights if has_weights else 0.0)


def _num_bytes(values: Sequence[Value], ends: Sequence[End], mesh_shape: Sequence[int]) -> float:
    pairs = zip(values, ends, strict=True)
    return sum(value.num_bytes / num_parts(end.value, mesh_shape) for value, end in pairs)
