"""Segments of a stage: what it computes between transfers among its own devices."""

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch.distributed.tensor import Placement


@dataclasses.dataclass(frozen=True)
class PassedValue:
    """A value that goes from a segment to a later one.

    Attributes:
        output: its position among what the first one leaves; `input`: among what the later one is given.
        shape: of all of it.
        src, dst: how it lies there.
        gradient_src, gradient_dst: how its gradient lies at the later one, and comes to the first one.
    """

    name: str
    output: int
    input: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_differentiable: bool
    src: tuple[Placement, ...]
    dst: tuple[Placement, ...]
    gradient_src: tuple[Placement, ...]
    gradient_dst: tuple[Placement, ...]


@dataclasses.dataclass(frozen=True)
class SegmentEdge:
    """What goes from a segment to a later one. `is_sent`: by one transfer; else it is handed over."""

    from_segment: int
    to_segment: int
    is_sent: bool
    values: tuple[PassedValue, ...]

    @property
    def text(self) -> str:
        return ", ".join(value.name for value in self.values)


@dataclasses.dataclass(frozen=True)
class StageSegment:
    """Attributes:
    inputs: names, each once: what the user passes, on the first segment what other stages make, then what earlier
        segments pass on.
    outputs: names, each once: what later segments are passed; the last segment's are the stage's.
    model_inputs: by input that the user passes, which are the first ones, its position among the stage's.
    whole_because: why its backward is never split; empty where that depends on what it computes.
    waits_in_weights: in each of its W, or behind it, devices wait for each other.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    model_inputs: tuple[int, ...]
    whole_because: str = ""
    waits_in_weights: bool = False


@dataclasses.dataclass(frozen=True)
class StageSegments:
    """Attributes:
    run: runs one: its number, and what it is given.
    """

    segments: tuple[StageSegment, ...]
    edges: tuple[SegmentEdge, ...]
    run: Callable[[int, Sequence[torch.Tensor]], tuple[torch.Tensor, ...]] = dataclasses.field(repr=False)
