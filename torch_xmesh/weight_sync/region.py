"""What goes where: a box of a source tensor and the memory that its elements land in."""

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch.distributed.tensor import DTensor

from torch_xmesh.arguments import instance_of, int_list, shown
from torch_xmesh.weight_sync.boxes import Box, GivenBox

Hook = Callable[[torch.Tensor, torch.Tensor, Box], None]
"""``hook(received, into, box)``: writes ``into`` from what was received for this box of the source tensor."""


@dataclasses.dataclass(frozen=True, eq=False)
class Region:
    """The elements of a box of a source tensor go, in row-major order, into a view of the target's memory.

    Attributes:
        source: the source tensor's name.
        box: one (begin, end) or slice per dim of the source tensor; None or ``...`` for the whole tensor.
        into: a torch view, of any strides, of exactly the box's extents; ``target[4:8].t()`` takes a box transposed.
            None with ``staged``.
        dtype: the element type while it is under way. None: the narrower of the source's and ``into``'s, so that the
            cast is at the narrower end; of two as wide, ``into``'s.
        staged: the elements land in memory of their own, and are given to a loader afterwards.
        hook: called at the receiving end as ``hook(received, into, box)`` instead of a copy, for what torch's casts do
            not know, such as quantisation with scales. ``received`` has the extents of ``box`` and the type under way
            (by default the source's), ``into`` is the part of the region's view for that box.
        block: extents, one per dim of the box: the hook may be called for parts of the region that are cut at multiples
            of these, counted from the region's first element. None: it is called once, for the whole region.

    Raises:
        ValueError: an argument of a wrong type, both or neither of ``into`` and ``staged``, a DTensor, a hook on a
            staged region, a block without a hook or with an extent that is not positive.
    """

    source: str
    box: GivenBox = None
    into: torch.Tensor | None = None
    dtype: torch.dtype | None = None
    staged: bool = dataclasses.field(default=False, kw_only=True)
    hook: Hook | None = dataclasses.field(default=None, kw_only=True)
    block: tuple[int, ...] | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        instance_of("source", self.source, str, "a string")
        for what, value, kind in (("into", self.into, torch.Tensor), ("dtype", self.dtype, torch.dtype)):
            if value is not None and not isinstance(value, kind):
                raise ValueError(f"{what} must be a torch.{kind.__name__} or None, got {shown(value)}")
        if self.hook is not None and not callable(self.hook):
            raise ValueError(f"hook must be callable or None, got {shown(self.hook)}")
        if self.staged == (self.into is not None):
            given = "both" if self.staged else "neither"
            raise ValueError(f"the region of {self.source!r} has {given} of into=view and staged=True, expected one")
        if isinstance(self.into, DTensor):
            raise ValueError(f"the region of {self.source!r} goes into a DTensor: expected a view of its local tensor")
        if self.hook is not None and self.staged:
            raise ValueError(f"the region of {self.source!r} is staged: its loader takes the place of a hook")
        if self.block is not None and (self.hook is None or min(int_list("block", self.block), default=1) < 1):
            raise ValueError(
                f"the region of {self.source!r} has block={self.block}: expected positive extents, beside a hook"
            )

    @property
    def ranges(self) -> Box:
        """The box as :func:`resolve` returns it: one (begin, end) per dim. ValueError for one in another form."""
        ranges = [of_dim for of_dim in self.box if isinstance(of_dim, tuple)] if isinstance(self.box, tuple) else None
        if ranges is None or not isinstance(self.box, tuple) or len(ranges) < len(self.box):
            raise ValueError(f"the box {self.box} of {self.source!r} has no ranges before it is resolved")
        return tuple(ranges)


@dataclasses.dataclass(frozen=True, eq=False)
class Fill:
    """Target memory without a source, such as the rows that pad a vocabulary: filled once, by the receiver."""

    into: torch.Tensor
    value: float | int | bool | complex


@dataclasses.dataclass(frozen=True, eq=False)
class TargetRegions:
    """What fills one target tensor: every element of it by one region or fill.

    Attributes:
        name: the target's name.
        regions: those of the process's part of it, none where ``same_as`` is set. Their boxes are one (begin, end) per
            dim, their dtypes are set.
        fills: memory that gets a value once.
        same_as: the name of another target that is the same memory, and is filled by the same regions; None otherwise.
    """

    name: str
    regions: tuple[Region, ...]
    fills: tuple[Fill, ...] = ()
    same_as: str | None = None


def dtype_under_way(source: torch.dtype, into: torch.dtype) -> torch.dtype:
    """The narrower of two element types; of two as wide, the one that the elements end in."""
    return source if source.itemsize < into.itemsize else into


def cast_mistake(source: torch.dtype, under_way: torch.dtype, into: torch.dtype, *, is_asked_for: bool) -> str | None:
    """Why elements cannot be cast from ``source`` to ``under_way`` to ``into``, or None where they can.

    Args:
        is_asked_for: the type under way was named by the user: then the first cast may drop a fraction (float to int),
            though never an imaginary part.
    """
    if source.is_complex and not (under_way.is_complex and into.is_complex):
        return f"{source} cannot be cast to {into if under_way.is_complex else under_way}: its imaginary part would go"
    for first, second, is_named in ((source, under_way, is_asked_for), (under_way, into, False)):
        if first != second and not is_named and not torch.can_cast(first, second):
            return f"{first} is not cast to {second} unless asked for: say .cast({second}), or dtype={second}"
        if not _has_cast(first, second):
            return f"torch has no cast from {first} to {second}"
    return None


@functools.cache
def _has_cast(source: torch.dtype, into: torch.dtype) -> bool:
    """Whether torch converts elements: of types of less than a byte it moves the bytes only."""
    try:
        return source == into or torch.empty(1, dtype=source).to(into).dtype == into
    except (RuntimeError, NotImplementedError):
        return False
