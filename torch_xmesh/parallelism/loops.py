"""An operator as nested loops: which of its dims may be sharded, and what follows for its other tensors."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

REPLICATED, PARTIAL = -1, -2
"""What a mesh axis does with a value that it does not shard; in C++ kReplicated and kPartialSum."""

Labels = tuple[str | None, ...]
"""One per dim of a tensor: the loop that runs over the dim, None where each device needs all of it."""
State = tuple[int, ...]
"""One per mesh axis: the dim that it shards, REPLICATED or PARTIAL."""

WHOLE, PASS = "-", "+"
"""Choices for a mesh axis that are no loop: every device does the same; partial sums go through as they are."""


@dataclasses.dataclass(frozen=True)
class Loops:
    """One operator, as einsum's labels say it: ``b k, j k -> b j`` is a linear layer's.

    A label in the output is a loop whose iterations make other elements; one in the inputs alone is a loop that adds
    up.

    Attributes:
        inputs: labels of each tensor among its arguments; None of one that it does not read.
        output: of the tensor that it makes.
        extents: of each label, by which an axis that shards it must divide.
        is_linear: partial sums of the inputs give partial sums of the output.
        is_heavy: it computes so much that it is sharded over as many devices as it can be.
    """

    inputs: tuple[Labels | None, ...]
    output: Labels
    extents: Mapping[str, int]
    is_linear: bool = False
    is_heavy: bool = False


def check_loops(loops: Loops, inputs: Sequence[Sequence[int]], output: Sequence[int]) -> None:
    """ValueError where the labels do not fit tensors of these shapes."""
    for labels, shape in [*zip(loops.inputs, inputs, strict=True), (loops.output, output)]:
        if labels is None:
            continue
        named = [label for label in labels if label is not None]
        if len(labels) != len(shape) or len(named) != len(set(named)):
            raise ValueError(f"labels {labels} of a tensor of shape {list(shape)}")
        for label, extent in zip(labels, shape, strict=True):
            if label is not None and label in loops.extents and extent % loops.extents[label] != 0:
                raise ValueError(f"loop {label} of {loops.extents[label]} over {extent} elements")


@dataclasses.dataclass(frozen=True)
class End:
    """How a tensor is held, and its gradient."""

    value: State
    gradient: State


@dataclasses.dataclass(frozen=True)
class Choice:
    """One way to shard an operator.

    Attributes:
        axes: per mesh axis a label of its loops, WHOLE or PASS.
        inputs: how it takes each tensor that it reads, and the gradient that it gives for it.
        output: what it makes, and the gradient that it needs.
    """

    axes: tuple[str, ...]
    inputs: tuple[End, ...]
    output: End

    def __str__(self) -> str:
        return " ".join(self.axes)


def choices_of(loops: Loops, mesh_shape: Sequence[int]) -> list[Choice]:
    """All ways to shard the operator over a mesh, in a fixed order; at least one."""
    per_axis = [*loops.extents, *([PASS] if loops.is_linear else []), WHOLE]
    found = [
        _choice(loops, axes)
        for axes in itertools.product(per_axis, repeat=len(mesh_shape))
        if _fits(loops, axes, mesh_shape)
    ]
    if not loops.is_heavy:
        return found

    def num_used(choice: Choice) -> int:
        return math.prod(size for label, size in zip(choice.axes, mesh_shape, strict=True) if label != WHOLE)

    most = max(map(num_used, found))
    return [choice for choice in found if num_used(choice) == most]


def _fits(loops: Loops, axes: Sequence[str], mesh_shape: Sequence[int]) -> bool:
    """Loops divide, and an axis of one device does nothing."""
    parts: dict[str, int] = {}
    for label, size in zip(axes, mesh_shape, strict=True):
        if size == 1 and label != WHOLE:
            return False
        parts[label] = parts.get(label, 1) * size
    return all(loops.extents[label] % count == 0 for label, count in parts.items() if label not in (WHOLE, PASS))


def _choice(loops: Loops, axes: tuple[str, ...]) -> Choice:
    output = End(_state(loops.output, axes, PARTIAL), _state(loops.output, axes, REPLICATED, passing=REPLICATED))
    inputs = tuple(
        End(_state(labels, axes, REPLICATED), _gradient_state(labels, loops.output, axes))
        for labels in loops.inputs
        if labels is not None
    )
    return Choice(axes, inputs, output)


def _state(labels: Labels, axes: Sequence[str], otherwise: int, passing: int = PARTIAL) -> State:
    """Of a tensor with these labels: what an axis does with one that does not have its loop."""

    def of(label: str) -> int:
        if label == WHOLE:
            return REPLICATED
        if label == PASS:
            return passing
        return labels.index(label) if label in labels else otherwise

    return tuple(map(of, axes))


def _gradient_state(labels: Labels, output: Labels, axes: Sequence[str]) -> State:
    """Of an input's gradient: a sum over the devices where these made other elements of the output from all of it."""
    return tuple(
        _state(labels, (label,), PARTIAL if label in output else REPLICATED, passing=REPLICATED)[0] for label in axes
    )


def num_parts(state: State, mesh_shape: Sequence[int]) -> int:
    """Into how many parts a value is cut."""
    return math.prod(size for held, size in zip(state, mesh_shape, strict=True) if held >= 0)
