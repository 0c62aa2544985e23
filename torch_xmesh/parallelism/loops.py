"""An operator as nested loops: which of its dims may be sharded, and what follows for its other tensors."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence

REPLICATED, PARTIAL = -1, -2
"""What a mesh axis does with a value that it does not shard; in C++ kReplicated and kPartialSum."""

Labels = tuple[str | None, ...]
"""One per dim of a tensor: the loop that runs over the dim, None where each device needs all of it. Where one of
several loops may run over it, they are joined by a "|"."""
State = tuple[int, ...]
"""One per mesh axis: the dim that it shards, REPLICATED or PARTIAL."""

WHOLE, PASS, LATER = "-", "+", "~"
"""Choices for a mesh axis that are no loop: every device does the same; partial sums go through as they are; every
device does the same forward, and backward, which is linear in the gradient, with its summand of that: they are added up
later."""

_NO_LOOPS = (WHOLE, PASS, LATER)

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
"""By C++'s names."""


@dataclasses.dataclass(frozen=True)
class Within:
    """Collectives that an operator runs by itself where a loop of it is sharded: a softmax's over its own dim.

    Attributes:
        label: the loop.
        collective: "all-reduce" or "all-to-all", along the axis that shards the loop.
        num_bytes: size of the whole value that it moves.
        cut_by: loops of other axes that cut this value.
        num_forward: how many there are forward.
        num_backward: backward.
    """

    label: str
    collective: str
    num_bytes: float
    cut_by: tuple[str, ...] = ()
    num_forward: int = 1
    num_backward: int = 1


@dataclasses.dataclass(frozen=True)
class Loops:
    """One operator, as einsum's labels say it: ``b k, j k -> b j`` is a linear layer's.

    A label in the outputs is a loop whose iterations make other elements; one in the inputs alone is a loop that adds
    up. A label is in all outputs or in none.

    Attributes:
        inputs: labels of each tensor among its arguments; None for one that it does not read.
        outputs: labels of each tensor that it makes.
        extents: by label, the size of the loop. The size of a mesh axis that shards it must divide it.
        is_linear: partial sums of the inputs give partial sums of the outputs.
        is_heavy: it computes so much that it is sharded over as many devices as it can be.
        flops: floating-point operations of the forward, of matrix products and what is like them; else 0: bytes count.
        within: its own collectives.
        once: inputs, by number, that stand outside of the loops that add up: a bias is added once.
        picked: inputs, by number, of which only as many elements are read as are made: a table that is looked into.
    """

    inputs: tuple[Labels | None, ...]
    outputs: tuple[Labels, ...]
    extents: Mapping[str, int]
    is_linear: bool = False
    is_heavy: bool = False
    flops: float = 0
    within: tuple[Within, ...] = ()
    once: frozenset[int] = frozenset()
    picked: frozenset[int] = frozenset()

    @functools.cached_property
    def key(self) -> tuple[object, ...]:
        """What equal loops have in common, to be looked up by."""
        flags = self.is_linear, self.is_heavy, self.flops, self.within, self.once, self.picked
        return self.inputs, self.outputs, tuple(self.extents.items()), flags


def dim_of(labels: Labels, label: str) -> int | None:
    """The dim that a loop runs over, None where it runs over none of this tensor's."""
    found = [dim for dim, own in enumerate(labels) if own is not None and label in own.split("|")]
    return found[0] if found else None


def _named(labels: Labels) -> list[str]:
    return [label for own in labels if own is not None for label in own.split("|")]


def check_loops(loops: Loops, inputs: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> None:
    """ValueError where the labels do not fit tensors of these shapes."""
    if any({*_named(labels)} != {*_named(loops.outputs[0])} for labels in loops.outputs):
        raise ValueError(f"outputs of other loops: {loops.outputs}")
    pairs = [*zip(loops.inputs, inputs, strict=True), *zip(loops.outputs, outputs, strict=True)]
    for labels, shape in pairs:
        if labels is None:
            continue
        named = _named(labels)
        if len(labels) != len(shape) or len(named) != len(set(named)):
            raise ValueError(f"labels {labels} of a tensor of shape {list(shape)}")
        for label in named:
            extent = shape[dim_of(labels, label) or 0]
            if label in loops.extents and extent % loops.extents[label] != 0:
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
        axes: per mesh axis a label of its loops, WHOLE, PASS or LATER.
        inputs: how it takes each tensor that it reads, and the gradient that it gives for it.
        outputs: what it makes, and the gradients that it needs.
    """

    axes: tuple[str, ...]
    inputs: tuple[End, ...]
    outputs: tuple[End, ...]

    def __str__(self) -> str:
        return " ".join(self.axes)


def choices_of(loops: Loops, mesh_shape: Sequence[int], *, may_idle: bool = False) -> list[Choice]:
    """All ways to shard the operator over a mesh, in a fixed order; at least one. A heavy one is done by as many
    devices as can be, unless they `may_idle`: do the same as others."""
    per_axis = [*loops.extents, *([PASS] if loops.is_linear else []), *([] if loops.is_heavy else [LATER]), WHOLE]
    found = [
        _choice(loops, axes)
        for axes in itertools.product(per_axis, repeat=len(mesh_shape))
        if _fits(loops, axes, mesh_shape)
    ]
    if not loops.is_heavy or may_idle:
        return found

    def num_used(choice: Choice) -> int:
        return math.prod(size for label, size in zip(choice.axes, mesh_shape, strict=True) if label != WHOLE)

    most = max(map(num_used, found))
    return [choice for choice in found if num_used(choice) == most]


def _fits(loops: Loops, axes: Sequence[str], mesh_shape: Sequence[int]) -> bool:
    """Loops divide, those over one dim together, and an axis of one device does nothing."""
    parts: dict[str, int] = {}
    for label, size in zip(axes, mesh_shape, strict=True):
        if size == 1 and label != WHOLE:
            return False
        parts[label] = parts.get(label, 1) * size
    if any(loops.extents[label] % count != 0 for label, count in parts.items() if label not in _NO_LOOPS):
        return False
    every = (*loops.outputs, *(labels for labels in loops.inputs if labels is not None))
    for own in {own for labels in every for own in labels if own is not None and "|" in own}:
        names = own.split("|")
        extent = math.lcm(*(loops.extents.get(name, 1) for name in names))
        if extent % math.prod(parts.get(name, 1) for name in names) != 0:
            return False
    return True


def _choice(loops: Loops, axes: tuple[str, ...]) -> Choice:
    outputs = tuple(
        End(_state(labels, axes, PARTIAL), _state(labels, axes, REPLICATED, passing=REPLICATED, later=PARTIAL))
        for labels in loops.outputs
    )
    made = loops.outputs[0] if loops.outputs else ()
    inputs = tuple(
        End(_state(labels, axes, REPLICATED), _gradient_state(labels, made, axes, is_once=number in loops.once))
        for number, labels in enumerate(loops.inputs)
        if labels is not None
    )
    return Choice(axes, inputs, outputs)


def _state(
    labels: Labels, axes: Sequence[str], otherwise: int, passing: int = PARTIAL, later: int = REPLICATED
) -> State:
    """The state of a tensor with these labels, per mesh axis. An axis that shards a loop shards the dim over which the
    loop runs; where it runs over none of the tensor's dims, the state is `otherwise`. It is `passing` for PASS and
    `later` for LATER."""

    def of(label: str) -> int:
        if label == WHOLE:
            return REPLICATED
        if label == LATER:
            return later
        if label == PASS:
            return passing
        dim = dim_of(labels, label)
        return otherwise if dim is None else dim

    return tuple(map(of, axes))


def _gradient_state(labels: Labels, output: Labels, axes: Sequence[str], *, is_once: bool) -> State:
    """The state of an input's gradient, per mesh axis. Where the axis shards a loop that does not run over the input,
    its devices have summands of the gradient. They all have the same gradient if the input stands outside of the loops
    that add up (`is_once`) and the loop does not run over the output either."""

    def otherwise(label: str) -> int:
        return REPLICATED if is_once and dim_of(output, label) is None else PARTIAL

    return tuple(_state(labels, (label,), otherwise(label), REPLICATED, PARTIAL)[0] for label in axes)


def choice_along(loops: Loops, axes: Sequence[str]) -> Choice:
    """What follows from what each mesh axis does.

    Raises:
        ValueError: an axis shards a loop that there is not.
    """
    for label in axes:
        if label not in loops.extents and label not in _NO_LOOPS:
            raise ValueError(f"no loop {label!r}: there are {', '.join(loops.extents) or 'none'}")
    return _choice(loops, tuple(axes))


def whole_choice(loops: Loops, num_axes: int) -> Choice:
    """Every device does all of it."""
    return _choice(loops, (WHOLE,) * num_axes)


def num_devices_used(choice: Choice, mesh_shape: Sequence[int]) -> int:
    """Among how many devices the operator's work is divided."""
    return math.prod(size for label, size in zip(choice.axes, mesh_shape, strict=True) if label not in _NO_LOOPS)


def num_parts(state: State, mesh_shape: Sequence[int]) -> int:
    """Into how many parts a value is cut."""
    return math.prod(size for held, size in zip(state, mesh_shape, strict=True) if held >= 0)
