"""Operators that move no element: dims are renamed, split or joined."""

import math
from collections.abc import Sequence

import torch

from torch_xmesh.parallelism.loops import Labels, Loops
from torch_xmesh.parallelism.rows.registry import CallForm, extents_of, labels_like, row


@row(
    "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "_unsafe_view", "view_as", "reshape_as", "ravel"
)
def view(call: CallForm) -> Loops:
    """Dims that are joined or split share the loop over the first of them, as far as both divide."""
    x = call.tensor(0, "input")
    if any(isinstance(argument, torch.dtype) for argument in (*call.args, *call.kwargs.values())):
        raise ValueError("a view as another type")
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


@row("transpose", "swapaxes", "swapdims", "t", "T", "mT", "adjoint", "H", "mH")
def transpose(call: CallForm) -> Loops:
    """Swaps two dims: those that are given, or the last two. `t`, `T` and `H` take matrices only."""
    x = call.tensor(0, "input")
    order = list(range(len(x.shape)))
    is_named = call.name in ("transpose", "swapaxes", "swapdims")
    a, b = (call.get(1, "dim0"), call.get(2, "dim1")) if is_named else (-2, -1)
    if not isinstance(a, int) or not isinstance(b, int) or len(order) < 2:
        raise ValueError("a transpose without two dims")
    if call.name in ("t", "T", "H") and len(order) != 2:
        raise ValueError("a transpose of no matrix")
    order[a], order[b] = order[b], order[a]
    return _permuted(call, order)


@row("permute")
def permute(call: CallForm) -> Loops:
    dims = call.get(1, "dims")
    order = call.args[1:] if isinstance(dims, int) else dims
    return _permuted(call, [dim % len(order) for dim in order])


@row("movedim", "moveaxis")
def movedim(call: CallForm) -> Loops:
    """Moves one dim. A call that moves several has no row."""
    x, source, target = call.tensor(0, "input"), call.get(1, "source"), call.get(2, "destination")
    if not isinstance(source, int) or not isinstance(target, int):
        raise ValueError("movedim of several dims")
    order = [dim for dim in range(len(x.shape)) if dim != source % len(x.shape)]
    order.insert(target % len(x.shape), source % len(x.shape))
    return _permuted(call, order)


def _permuted(call: CallForm, order: Sequence[int]) -> Loops:
    x = call.tensor(0, "input")
    labels = labels_like(x.shape)
    return call.loops(
        {x.index: labels}, tuple(labels[dim] for dim in order), extents_of(labels, x.shape), is_linear=True
    )
