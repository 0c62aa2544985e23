"""How a target tensor is made of source tensors, as a person writes it: ``concat(["q", "k"]).shard(0, 1, 2)``.

An expression is written without knowing the sources. Its layout is found once their shapes are known. Its methods do to
whole tensors what torch's of these names do; nothing is ever computed, the sources' elements are only placed.
"""

import dataclasses
import operator
import re
from collections.abc import Callable, Mapping, Sequence

import torch

from torch_xmesh.arguments import instance_of, int_list, shown
from torch_xmesh.weight_sync.layout import Layout, Number, concat_layouts
from torch_xmesh.weight_sync.region import Hook

ShapeOf = Callable[[str], tuple[int, ...]]


class Expression:
    """A tensor made of source tensors. Immutable; every method returns another one.

    An argument of a wrong type is a ValueError at once; a dim, index or shape that does not fit is one where the
    expression meets the sources, in :func:`resolve`.
    """

    def names(self) -> set[str]:
        """The source tensors that it reads."""
        raise NotImplementedError

    def layout(self, shape_of: ShapeOf) -> Layout:
        """Shape and pieces, for sources of these shapes.

        Raises:
            ValueError: a dim, index or shape that does not fit.
        """
        raise NotImplementedError

    def narrow(self, dim: int, begin: int, end: int) -> "Expression":
        """Indices ``begin`` to ``end`` (not included) along a dim."""
        _check_ints(dim=dim, begin=begin, end=end)
        return _Changed(self, lambda layout: layout.narrow(dim, begin, end))

    def rows(self, begin: int, end: int) -> "Expression":
        """Indices ``begin`` to ``end`` (not included) along dim 0."""
        return self.narrow(0, begin, end)

    def select(self, dim: int, index: int) -> "Expression":
        """One index along a dim, which goes: an expert of stacked ones."""
        _check_ints(dim=dim, index=index)
        return _Changed(self, lambda layout: layout.select(dim, index))

    def shard(self, dim: int, index: int, count: int) -> "Expression":
        """Part ``index`` of ``count`` along a dim, by DTensor's rule: chunks of the rounded-up share, the last ones
        smaller or empty."""
        _check_ints(dim=dim, index=index, count=count)

        def change(layout: Layout) -> Layout:
            _check_part(index, count)
            extent = layout.shape[layout.dim(dim)]
            size = -(-extent // count)
            return layout.narrow(dim, min(index * size, extent), min((index + 1) * size, extent))

        return _Changed(self, change)

    def heads(self, dim: int, index: int, count: int, *, num_heads: int) -> "Expression":
        """The attention heads of rank ``index`` of ``count``, where a dim has ``num_heads`` heads one behind the other.

        An even share of them; where there are more ranks than heads, the one head ``index * num_heads // count``, which
        several ranks have. ValueError where the dim is no multiple of the heads, or the heads none of fewer ranks.
        """
        _check_ints(dim=dim, index=index, count=count, num_heads=num_heads)

        def change(layout: Layout) -> Layout:
            _check_part(index, count)
            extent = layout.shape[layout.dim(dim)]
            if num_heads < 1 or extent % num_heads:
                raise ValueError(f"dim {dim} of a tensor of shape {layout.shape} has no {num_heads} heads of one size")
            if count <= num_heads and num_heads % count:
                raise ValueError(f"{num_heads} heads cannot be shared evenly by {count} ranks")
            first, share = index * num_heads // count, max(num_heads // count, 1)
            head_dim = extent // num_heads
            return layout.narrow(dim, first * head_dim, (first + share) * head_dim)

        return _Changed(self, change)

    def transpose(self, dim0: int, dim1: int) -> "Expression":
        """Two dims exchanged."""
        _check_ints(dim0=dim0, dim1=dim1)
        return _Changed(self, lambda layout: layout.transpose(dim0, dim1))

    def t(self) -> "Expression":
        """A matrix transposed; a tensor of one dim or none as it is."""

        def change(layout: Layout) -> Layout:
            if len(layout.shape) > 2:
                raise ValueError(f"t() of a tensor of shape {layout.shape}: expected at most 2 dims")
            return layout.transpose(0, 1) if len(layout.shape) == 2 else layout

        return _Changed(self, change)

    def pad(self, dim: int, to: int, value: Number = 0) -> "Expression":
        """With ``value`` behind the elements along a dim, up to ``to`` indices: the receiver fills them once."""
        _check_ints(dim=dim, to=to)
        if not isinstance(value, bool | int | float | complex):
            raise ValueError(f"value must be a number, got {shown(value)}")
        return _Changed(self, lambda layout: layout.pad(dim, to, value))

    def cast(self, dtype: torch.dtype) -> "Expression":
        """With elements of this type under way; on arrival they are cast to the target's. One cast per element."""
        instance_of("dtype", dtype, torch.dtype, "a torch.dtype")
        return _Changed(self, lambda layout: layout.cast(dtype))

    def through(self, hook: Hook, block: Sequence[int] | None = None) -> "Expression":
        """With a hook that writes the target from what is received, as :class:`Region`'s.

        Args:
            hook: called as ``hook(received, into, box)``, all with the source tensor's dims in the source's order.
            block: extents per dim of the source tensor, at whose multiples a region may be cut.
        """
        if not callable(hook):
            raise ValueError(f"hook must be callable, got {shown(hook)}")
        cut = None if block is None else tuple(int_list("block", block))
        return _Changed(self, lambda layout: layout.through(hook, cut))


@dataclasses.dataclass(frozen=True, eq=False)
class _Taken(Expression):
    name: str

    def names(self) -> set[str]:
        return {self.name}

    def layout(self, shape_of: ShapeOf) -> Layout:
        return Layout.of_source(self.name, shape_of(self.name))


@dataclasses.dataclass(frozen=True, eq=False)
class _Changed(Expression):
    of: Expression
    change: Callable[[Layout], Layout]

    def names(self) -> set[str]:
        return self.of.names()

    def layout(self, shape_of: ShapeOf) -> Layout:
        return self.change(self.of.layout(shape_of))


@dataclasses.dataclass(frozen=True, eq=False)
class _Joined(Expression):
    parts: tuple[Expression, ...]
    join: Callable[[list[Layout]], Layout]

    def names(self) -> set[str]:
        return set().union(*(part.names() for part in self.parts))

    def layout(self, shape_of: ShapeOf) -> Layout:
        return self.join([part.layout(shape_of) for part in self.parts])


def take(name: str) -> Expression:
    """The whole source tensor of this name. Several targets may take one."""
    return _Taken(instance_of("name", name, str, "a string"))


def concat(parts: Sequence[Expression | str], dim: int = 0) -> Expression:
    """Tensors one behind the other along a dim, as ``torch.cat``.

    Args:
        parts: expressions, or names of whole source tensors.
        dim: along which they may differ.

    Raises:
        ValueError: no parts.
    """
    _check_ints(dim=dim)
    return _Joined(_checked_parts(parts, "concat"), lambda layouts: concat_layouts(layouts, dim))


def stack(parts: Sequence[Expression | str], dim: int = 0) -> Expression:
    """Tensors of one shape along a new dim, as ``torch.stack``: experts.

    Args:
        parts: expressions, or names of whole source tensors.
        dim: the new dim's position in the result.

    Raises:
        ValueError: no parts.
    """

    _check_ints(dim=dim)

    def join(layouts: list[Layout]) -> Layout:
        if len(shapes := {layout.shape: None for layout in layouts}) > 1:
            raise ValueError(f"tensors of shapes {', '.join(map(str, shapes))} cannot be stacked: expected one shape")
        return concat_layouts([layout.unsqueeze(dim) for layout in layouts], dim)

    return _Joined(_checked_parts(parts, "stack"), join)


class Renaming:
    """Source names from target names, by regular expressions: ``rename({r"^model\\.": ""})``."""

    def __init__(self, rules: Mapping[str, str]) -> None:
        if not isinstance(rules, Mapping) or not all(isinstance(text, str) for text in (*rules, *rules.values())):
            raise ValueError(f"rules must be a dict of strings, got {shown(rules)}")
        try:
            self._rules = [(re.compile(pattern), replacement) for pattern, replacement in rules.items()]
        except re.error as error:
            raise ValueError(f"{error.pattern!r} is no regular expression: {error}") from None

    def __call__(self, name: str) -> str:
        """The source's name for a target's. ValueError for a replacement that names a group which is not there."""
        for pattern, replacement in self._rules:
            try:
                name = pattern.sub(replacement, name)
            except (re.error, IndexError) as error:
                raise ValueError(f"the rule {pattern.pattern!r} -> {replacement!r}: {error}") from None
        return name


def rename(rules: Mapping[str, str]) -> Renaming:
    """Rules that make source names of target names, for targets without an expression.

    Args:
        rules: replacement by regular expression, as of ``re.sub``; all are applied, in the order of the dict.

    Raises:
        ValueError: a pattern that is no regular expression.
    """
    return Renaming(rules)


def _checked_parts(parts: Sequence[Expression | str], what: str) -> tuple[Expression, ...]:
    if not isinstance(parts, list | tuple) or not all(isinstance(part, Expression | str) for part in parts):
        raise ValueError(f"{what} takes a list of expressions and names, got {shown(parts)}")
    if not parts:
        raise ValueError(f"{what} of no tensors: expected at least one")
    return tuple(take(part) if isinstance(part, str) else part for part in parts)


def _check_ints(**values: int) -> None:
    for name, value in values.items():
        try:
            operator.index(value)
        except TypeError:
            raise ValueError(f"{name} must be an int, got {shown(value)}") from None


def _check_part(index: int, count: int) -> None:
    if not 0 <= index < count:
        raise ValueError(f"part {index} of {count}: expected an index from 0 up to the count")
