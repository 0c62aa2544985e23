"""Where each element of a tensor that is made of others comes from: pieces of source tensors side by side."""

import dataclasses
from collections.abc import Sequence

import torch

from torch_xmesh.weight_sync.boxes import Box, intersection, volume, whole_box
from torch_xmesh.weight_sync.region import Hook

Number = float | int | bool | complex


@dataclasses.dataclass(frozen=True)
class Piece:
    """A box of the tensor that is made, and what fills it: a box of a source tensor, dims in some order, or a value.

    Attributes:
        box: in the tensor that is made.
        source: the source tensor's name; None for a value.
        begins: the source box's first index along each dim of the source. Its extents are those of ``box``.
        dims: for each dim of the source, the dim of the tensor that is made which it runs along; None where the source
            box has one index. Dims that no source dim runs along have the extent 1.
        value: without a source.
        dtype: the type that a cast names; None without a cast.
        hook, block: of the region that the piece becomes.
    """

    box: Box
    source: str | None
    begins: tuple[int, ...] = ()
    dims: tuple[int | None, ...] = ()
    value: Number = 0
    dtype: torch.dtype | None = None
    hook: Hook | None = None
    block: tuple[int, ...] | None = None

    def source_box(self) -> Box:
        """The box of the source tensor, one (begin, end) per dim of it."""
        sizes = [1 if dim is None else self.box[dim][1] - self.box[dim][0] for dim in self.dims]
        return tuple((begin, begin + size) for begin, size in zip(self.begins, sizes, strict=True))

    def within(self, box: Box) -> "Piece | None":
        """The part of the piece in a box of the tensor that is made; None if there is none."""
        common = intersection(self.box, box)
        if common is None:
            return None
        begins = tuple(
            begin if dim is None else begin + common[dim][0] - self.box[dim][0]
            for begin, dim in zip(self.begins, self.dims, strict=True)
        )
        return dataclasses.replace(self, box=common, begins=begins)

    def moved(self, dim: int, by: int) -> "Piece":
        """The piece, further along one dim of the tensor that is made."""
        begin, end = self.box[dim]
        return dataclasses.replace(self, box=(*self.box[:dim], (begin + by, end + by), *self.box[dim + 1 :]))

    def view_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The piece's memory in a tensor of its box's extents, with dims in the source's order."""
        axes = [dim for dim in self.dims if dim is not None]
        free = [dim for dim in range(len(self.box)) if dim not in axes]
        view = tensor.permute(*axes, *free) if tensor.dim() else tensor
        for _ in free:
            view = view.squeeze(-1)
        for position, dim in enumerate(self.dims):
            view = view.unsqueeze(position) if dim is None else view
        return view


@dataclasses.dataclass(frozen=True)
class Layout:
    """A tensor's shape, and disjoint pieces that fill it. Methods are named after torch's, and make another layout."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @classmethod
    def of_source(cls, name: str, shape: Sequence[int]) -> "Layout":
        """A whole source tensor."""
        box = whole_box(shape)
        piece = Piece(box, name, (0,) * len(box), tuple(range(len(box))))
        return cls(tuple(shape), (piece,) if volume(box) else ())

    def dim(self, dim: int) -> int:
        """A dim counted from the front. ValueError if there is no such dim."""
        if not -len(self.shape) <= dim < len(self.shape):
            raise ValueError(f"dim {dim} is out of range for a tensor of shape {self.shape}")
        return dim % len(self.shape)

    def within(self, box: Box) -> tuple[Piece, ...]:
        """The parts of the pieces in a box; their boxes are in the whole tensor."""
        return tuple(part for piece in self.pieces if (part := piece.within(box)) is not None)

    def narrow(self, dim: int, begin: int, end: int) -> "Layout":
        """Indices ``begin`` to ``end`` along a dim. ValueError if these are not in the tensor."""
        dim = self.dim(dim)
        if not 0 <= begin <= end <= self.shape[dim]:
            raise ValueError(f"{begin}:{end} is not inside dim {dim} of a tensor of shape {self.shape}")
        box = (*whole_box(self.shape[:dim]), (begin, end), *whole_box(self.shape[dim + 1 :]))
        shape = (*self.shape[:dim], end - begin, *self.shape[dim + 1 :])
        return Layout(shape, tuple(piece.moved(dim, -begin) for piece in self.within(box)))

    def select(self, dim: int, index: int) -> "Layout":
        """One index along a dim, which goes. ValueError if it is not in the tensor."""
        dim = self.dim(dim)
        one = self.narrow(dim, index, index + 1)
        pieces = []
        for piece in one.pieces:
            dims = tuple(None if d == dim else d - 1 if d is not None and d > dim else d for d in piece.dims)
            pieces.append(dataclasses.replace(piece, box=(*piece.box[:dim], *piece.box[dim + 1 :]), dims=dims))
        return Layout((*self.shape[:dim], *self.shape[dim + 1 :]), tuple(pieces))

    def transpose(self, dim0: int, dim1: int) -> "Layout":
        """Two dims exchanged."""
        order = list(range(len(self.shape)))
        dim0, dim1 = self.dim(dim0), self.dim(dim1)
        order[dim0], order[dim1] = dim1, dim0
        pieces = tuple(
            dataclasses.replace(
                piece,
                box=tuple(piece.box[dim] for dim in order),
                dims=tuple(None if dim is None else order[dim] for dim in piece.dims),
            )
            for piece in self.pieces
        )
        return Layout(tuple(self.shape[dim] for dim in order), pieces)

    def unsqueeze(self, dim: int) -> "Layout":
        """A dim of extent 1 more, at position ``dim`` of the result. ValueError without such a position."""
        if not -len(self.shape) - 1 <= dim <= len(self.shape):
            raise ValueError(f"dim {dim} is out of range for stacked tensors of shape {self.shape}")
        dim %= len(self.shape) + 1
        pieces = tuple(
            dataclasses.replace(
                piece,
                box=(*piece.box[:dim], (0, 1), *piece.box[dim:]),
                dims=tuple(d + 1 if d is not None and d >= dim else d for d in piece.dims),
            )
            for piece in self.pieces
        )
        return Layout((*self.shape[:dim], 1, *self.shape[dim:]), pieces)

    def pad(self, dim: int, to: int, value: Number) -> "Layout":
        """With ``value`` behind the elements along a dim, up to ``to`` indices. ValueError if it has more already."""
        dim = self.dim(dim)
        if to < self.shape[dim]:
            raise ValueError(f"dim {dim} of a tensor of shape {self.shape} cannot be padded to {to}")
        if to == self.shape[dim]:
            return self
        before, after = whole_box(self.shape[:dim]), whole_box(self.shape[dim + 1 :])
        fill = Piece((*before, (self.shape[dim], to), *after), None, value=value)
        return Layout((*self.shape[:dim], to, *self.shape[dim + 1 :]), (*self.pieces, fill))

    def cast(self, dtype: torch.dtype) -> "Layout":
        """With elements of another type under way. ValueError where another cast was named before."""
        named = {piece.dtype for piece in self.pieces if piece.source is not None} - {None, dtype}
        if named:
            raise ValueError(f"cast to {dtype} what is cast to {named.pop()} already: expected one cast")
        return Layout(self.shape, tuple(dataclasses.replace(piece, dtype=dtype) for piece in self.pieces))

    def through(self, hook: Hook, block: tuple[int, ...] | None) -> "Layout":
        """With a hook that writes what comes from sources. ValueError where there is one, or for a wrong block."""
        for piece in self.pieces:
            if piece.hook is not None:
                raise ValueError("a hook on what has one already: expected one")
            if piece.source is not None and block is not None and len(block) != len(piece.dims):
                raise ValueError(f"block={block} for {piece.source!r}, which has {len(piece.dims)} dims")
        pieces = (
            piece if piece.source is None else dataclasses.replace(piece, hook=hook, block=block)
            for piece in self.pieces
        )
        return Layout(self.shape, tuple(pieces))


def concat_layouts(parts: Sequence[Layout], dim: int) -> Layout:
    """Tensors one behind the other along a dim, as ``torch.cat``. ValueError if they differ along another dim."""
    first = parts[0]
    dim = first.dim(dim)
    pieces: list[Piece] = []
    length = 0
    for part in parts:
        rest = [shape[:dim] + shape[dim + 1 :] for shape in (first.shape, part.shape)]
        if len(part.shape) != len(first.shape) or rest[0] != rest[1]:
            raise ValueError(
                f"tensors of shapes {', '.join(str(each.shape) for each in parts)} cannot be concatenated "
                f"along dim {dim}: expected equal extents along all others"
            )
        pieces += [piece.moved(dim, length) for piece in part.pieces]
        length += part.shape[dim]
    return Layout((*first.shape[:dim], length, *first.shape[dim + 1 :]), tuple(pieces))
