"""Operators that take tensors apart and put them together along a dim, which stays whole."""

from typing import Any

from torch_xmesh.parallelism.loops import Labels, Loops
from torch_xmesh.parallelism.rows.lookups import picked
from torch_xmesh.parallelism.rows.registry import CallForm, Tensor, extents_of, labels_like, row


@row("chunk", "split", "split_with_sizes", "tensor_split", "expand", "expand_as", "broadcast_to", "narrow", "repeat")
def pieces(call: CallForm) -> Loops:
    """Dims whose length stays are loops; of `expand` new ones are none."""
    x = call.tensor(0, "input")
    num_new = len(call.shape) - len(x.shape)
    if num_new < 0 or any(len(shape) != len(call.shape) for shape in call.shapes):
        raise ValueError(f"{call.name} that takes dims away")
    labels = tuple(
        label if all(shape[num_new + dim] == extent for shape in call.shapes) else None
        for dim, (label, extent) in enumerate(zip(labels_like(x.shape), x.shape, strict=True))
    )
    output: Labels = (*[None] * num_new, *labels)
    return call.loops({x.index: labels}, output, extents_of(labels, x.shape), is_linear=True)


@row("unbind", "select")
def unbind(call: CallForm) -> Loops:
    """The dim goes."""
    x = call.tensor(0, "input")
    dim = call.get(1, "dim", 0) % len(x.shape)
    labels = list(labels_like(x.shape))
    labels[dim] = None
    output = tuple(label for place, label in enumerate(labels) if place != dim)
    return call.loops({x.index: tuple(labels)}, output, extents_of(tuple(labels), x.shape), is_linear=True)


@row("cat", "concat", "concatenate")
def cat(call: CallForm) -> Loops:
    """An empty vector among the tensors is nothing."""
    return _cat(call, call.get(1, "dim", 0))


@row("hstack")
def hstack(call: CallForm) -> Loops:
    return _cat(call, 0 if len(call.shape) == 1 else 1)


@row("vstack", "row_stack")
def vstack(call: CallForm) -> Loops:
    """Vectors are rows."""
    labels: Labels = (None, *labels_like(call.shape)[1:])
    inputs = {tensor.index: labels[-len(tensor.shape) :] for tensor in call.tensors}
    return call.loops(inputs, labels, extents_of(labels, call.shape), is_linear=True)


def _cat(call: CallForm, dim: int) -> Loops:
    tensors = call.tensors
    labels = list(labels_like(call.shape))
    labels[dim] = None
    joined = tuple(labels)
    inputs = {tensor.index: joined for tensor in tensors if tensor.shape != (0,)}
    if any(len(tensor.shape) != len(joined) for tensor in tensors if tensor.shape != (0,)):
        raise ValueError("cat of tensors of other dims")
    return call.loops(inputs, joined, extents_of(joined, call.shape), is_linear=len(inputs) == len(tensors))


@row("stack")
def stack(call: CallForm) -> Loops:
    """The new dim stays whole."""
    dim = call.get(1, "dim", 0) % len(call.shape)
    labels = labels_like(call.tensors[0].shape)
    output: Labels = (*labels[:dim], None, *labels[dim:])
    inputs = {tensor.index: labels for tensor in call.tensors}
    return call.loops(inputs, output, extents_of(output, call.shape), is_linear=True)


@row("pad")
def pad(call: CallForm) -> Loops:
    """Dims that are not padded are loops."""
    x, padding = call.tensor(0, "input"), call.get(1, "pad")
    if not isinstance(padding, tuple | list):
        raise ValueError("padding that is no list")
    labels = list(labels_like(x.shape))
    for place in range(len(padding) // 2):
        labels[-1 - place] = None
    is_zero = call.get(2, "mode", "constant") == "constant" and not call.get(3, "value")
    output = tuple(labels)
    return call.loops({x.index: output}, output, extents_of(output, x.shape), is_linear=is_zero)


@row("repeat_interleave", "tile")
def repeat_interleave(call: CallForm) -> Loops:
    """Dims whose length stays are loops."""
    x = call.tensor(0, "input")
    if len(x.shape) != len(call.shape):
        raise ValueError(f"{call.name} of all elements")
    pairs = zip(labels_like(x.shape), x.shape, call.shape, strict=True)
    labels = tuple(label if before == after else None for label, before, after in pairs)
    return call.loops({x.index: labels}, labels, extents_of(labels, x.shape), is_linear=True)


@row("__getitem__", "getitem")
def getitem(call: CallForm) -> Loops:
    """Dims that are taken whole are loops; of tensors in the index see lookups."""
    x, index = call.tensor(0, "input"), call.args[1]
    index = tuple(index) if isinstance(index, tuple | list) else (index,)
    if any(isinstance(item, Tensor) for item in index):
        return picked(call, x, index)
    before, after = _taken(x.shape, index)
    return call.loops({x.index: before}, after, extents_of(before, x.shape), is_linear=True)


@row("__setitem__")
def setitem(call: CallForm) -> Loops:
    """A number or a tensor is written into a part: dims that are whole in the index are loops."""
    x, index, value = call.tensor(0, "input"), call.args[1], call.args[2]
    before, after = _taken(x.shape, tuple(index) if isinstance(index, tuple | list) else (index,))
    reads = {x.index: before}
    if isinstance(value, Tensor):
        if len(value.shape) > len(after):
            raise ValueError("a tensor of more dims than it is written to")
        sizes = dict(zip(before, x.shape, strict=True))
        written = after[len(after) - len(value.shape) :]  # dims of 1 and those that lack are written again and again
        reads[value.index] = tuple(
            label if label is not None and sizes[label] == size else None
            for label, size in zip(written, value.shape, strict=True)
        )
    return call.loops(reads, before, extents_of(before, x.shape))


def _taken(shape: tuple[int, ...], index: tuple[Any, ...]) -> tuple[Labels, Labels]:
    """Labels of a tensor of this shape, and of what an index takes of it: of the dims that it takes whole.

    Raises:
        ValueError: the index has more than numbers, slices, None and an ellipsis.
    """
    num_taken = sum(item is not None and item is not Ellipsis for item in index)
    rest = (slice(None),) * (len(shape) - num_taken)
    at = next((i for i, item in enumerate(index) if item is Ellipsis), len(index))
    before: list[str | None] = []
    after: list[str | None] = []
    labels = labels_like(shape)
    for item in (*index[:at], *rest, *index[at + 1 :]):
        if item is None:
            after.append(None)
        elif isinstance(item, int) and not isinstance(item, bool):
            before.append(None)
        elif isinstance(item, slice):
            dim = len(before)
            is_whole = item.indices(shape[dim]) == (0, shape[dim], 1)
            before.append(labels[dim] if is_whole else None)
            after.append(before[-1])
        else:
            raise ValueError(f"an index of {item!r}")
    return tuple(before), tuple(after)
