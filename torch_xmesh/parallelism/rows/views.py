"""Operators that move no element: dims are renamed, split, joined or left out."""

import math
from collections.abc import Sequence

from torch_xmesh.parallelism.loops import Labels, Loops
from torch_xmesh.parallelism.rows.registry import Call, extents_of, labels_like, row


@row("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "_unsafe_view", "view_as", "reshape_as")
def view(call: Call) -> Loops:
    """Dims that are joined or split share the loop over the first of them, as far as both divide."""
    x = call.tensor(0, "input")
    if math.prod(x.shape) != math.prod(call.shape) or 0 in x.shape:
        raise ValueError("a view of other bytes, or of none")
    before, after, extents = _matched(x.shape, call.shape)
    return call.loops({x.index: before}, after, extents, is_linear=True)


def _matched(before: Sequence[int], after: Sequence[int]) -> tuple[Labels, Labels, dict[str, int]]:
    labels: tuple[list[str | None], list[str | None]] = ([None] * len(before), [None] * len(after))
    extents: dict[str, int] = {}
    dims = [[dim for dim, extent in enumerate(shape) if extent > 1] for shape in (before, after)]
    i = j = 0
    while i < len(dims[0]) and j < len(dims[1]):
        first = dims[0][i], dims[1][j]
        left, right = before[first[0]], after[first[1]]
        label = f"g{len(extents)}"
        labels[0][first[0]] = labels[1][first[1]] = label
        extents[label] = math.gcd(left, right)
        while left != right:
            if left < right:
                i += 1
                left *= before[dims[0][i]]
            else:
                j += 1
                right *= after[dims[1][j]]
        i, j = i + 1, j + 1
    return tuple(labels[0]), tuple(labels[1]), extents


@row("transpose", "swapaxes", "t")
def transpose(call: Call) -> Loops:
    x = call.tensor(0, "input")
    order = list(range(len(x.shape)))
    a, b = (0, 1) if call.name == "t" else (call.get(1, "dim0"), call.get(2, "dim1"))
    if not isinstance(a, int) or not isinstance(b, int) or len(order) < 2:
        raise ValueError("a transpose without two dims")
    order[a], order[b] = order[b], order[a]
    return _permuted(call, order)


@row("permute")
def permute(call: Call) -> Loops:
    dims = call.get(1, "dims")
    order = call.args[1:] if isinstance(dims, int) else dims
    return _permuted(call, [dim % len(order) for dim in order])


def _permuted(call: Call, order: Sequence[int]) -> Loops:
    x = call.tensor(0, "input")
    labels = labels_like(x.shape)
    return call.loops(
        {x.index: labels}, tuple(labels[dim] for dim in order), extents_of(labels, x.shape), is_linear=True
    )


@row("chunk", "split", "expand")
def pieces(call: Call) -> Loops:
    """One of them; of `expand` the repeated tensor. Dims whose length stays are loops."""
    x = call.tensor(0, "input")
    if len(x.shape) != len(call.shape):
        raise ValueError(f"{call.name} that changes the number of dims")
    labels = tuple(
        label if before == after else None
        for label, before, after in zip(labels_like(x.shape), x.shape, call.shape, strict=True)
    )
    return call.loops({x.index: labels}, labels, extents_of(labels, call.shape), is_linear=True)
