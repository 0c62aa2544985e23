"""Boxes: rectangular parts of a tensor, as one (begin, end) per dim."""

import math
import operator
from collections.abc import Iterable, Sequence
from types import EllipsisType

Box = tuple[tuple[int, int], ...]
GivenBox = Sequence["tuple[int, int] | slice"] | EllipsisType | None


def whole_box(shape: Iterable[int]) -> Box:
    """The box of all elements."""
    return tuple((0, extent) for extent in shape)


def extents(box: Box) -> tuple[int, ...]:
    """Elements along each dim."""
    return tuple(end - begin for begin, end in box)


def volume(box: Box) -> int:
    """Number of elements; 1 for the box of a tensor without dims."""
    return math.prod(end - begin for begin, end in box)


def box_text(box: Box) -> str:
    """As an index is written: ``[0:4, 2:8]``."""
    return f"[{', '.join(f'{begin}:{end}' for begin, end in box)}]"


def slices(box: Box) -> tuple[slice, ...]:
    """What indexes a tensor with the box."""
    return tuple(slice(begin, end) for begin, end in box)


def intersection(a: Box, b: Box) -> Box | None:
    """The elements that are in both boxes of one tensor, or None where there are none."""
    common = tuple(
        (max(begin, other_begin), min(end, other_end))
        for (begin, end), (other_begin, other_end) in zip(a, b, strict=True)
    )
    return common if all(begin < end for begin, end in common) else None


def without(boxes: Iterable[Box], hole: Box) -> list[Box]:
    """The elements of disjoint boxes that are not in ``hole``, as disjoint boxes."""
    out = []
    for box in boxes:
        common = intersection(box, hole)
        if common is None:
            out.append(box)
            continue
        for dim, ((begin, end), (hole_begin, hole_end)) in enumerate(zip(box, common, strict=True)):
            before, after = common[:dim], box[dim + 1 :]
            if begin < hole_begin:
                out.append((*before, (begin, hole_begin), *after))
            if hole_end < end:
                out.append((*before, (hole_end, end), *after))
    return out


def normal_box(box: GivenBox, shape: Sequence[int]) -> Box:
    """A box as a user gives it, as one (begin, end) per dim of a tensor of this shape.

    Args:
        box: one (begin, end) or slice per dim; an end of a slice may be left out or count from the back, as in an
            index. None or ``...``: the whole tensor.
        shape: of the tensor.

    Raises:
        ValueError: not one entry per dim, an entry of another kind, a step, or what is not inside the tensor.
    """
    if box is None or box is ...:
        return whole_box(shape)
    if not isinstance(box, list | tuple) or len(box) != len(shape):
        raise ValueError(
            f"a tensor of shape {tuple(shape)} has no box {box!r}: expected one (begin, end) or slice per dim"
        )
    out = tuple(_normal_range(entry, extent) for entry, extent in zip(box, shape, strict=True))
    if any(not 0 <= begin <= end <= extent for (begin, end), extent in zip(out, shape, strict=True)):
        raise ValueError(f"the box {box_text(out)} is not inside the tensor, whose shape is {tuple(shape)}")
    return out


def _normal_range(entry: "tuple[int, int] | slice", extent: int) -> tuple[int, int]:
    if isinstance(entry, slice):
        if entry.step not in (None, 1):
            raise ValueError(f"a box has no steps, got {entry}")
        begin = 0 if entry.start is None else operator.index(entry.start)
        end = extent if entry.stop is None else operator.index(entry.stop)
        return (begin + extent if begin < 0 else begin, end + extent if end < 0 else end)
    try:
        begin, end = (operator.index(bound) for bound in entry)
    except (TypeError, ValueError):
        raise ValueError(f"a box has one (begin, end) or slice per dim, got {entry!r}") from None
    return (begin, end)
