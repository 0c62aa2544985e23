"""Tables that are looked into, and elements that are picked by numbers in tensors."""

import torch

from torch_xmesh.parallelism.loops import Labels, Loops
from torch_xmesh.parallelism.rows.registry import CallForm, Tensor, broadcast, extents_of, labels_like, row


@row("embedding")
def embedding(call: CallForm) -> Loops:
    """The vocabulary is a loop that adds up: a device that does not have a row adds zeros."""
    indices, weight = call.tensor(0, "input"), call.tensor(1, "weight")
    if call.get(3, "max_norm") is not None or call.get(5, "scale_grad_by_freq", False):
        raise ValueError("rows whose norms are bounded, or gradients by how often an index comes")
    if indices.dtype.is_floating_point:
        raise ValueError("a table before its indices")
    batch = labels_like(indices.shape, "b")
    extents = {**extents_of(batch, indices.shape), **extents_of(("v", "j"), weight.shape)}
    picked = frozenset([weight.index])
    return call.loops({indices.index: batch, weight.index: ("v", "j")}, (*batch, "j"), extents, picked=picked)


@row("embedding_bag")
def embedding_bag(call: CallForm) -> Loops:
    """Bags of one length: they are a loop, and the table's columns are."""
    indices, weight, weights = call.tensor(0, "input"), call.tensor(1, "weight"), call.get(8, "per_sample_weights")
    if indices.dtype.is_floating_point or len(indices.shape) != 2 or len(call.shapes) != 1:
        raise ValueError("bags of several lengths")
    if call.get(3, "max_norm") is not None or call.get(5, "scale_grad_by_freq", False):
        raise ValueError("rows whose norms are bounded, or gradients by how often an index comes")
    inputs: dict[int, Labels] = {indices.index: ("b", None), weight.index: (None, "j")}
    if isinstance(weights, Tensor):
        inputs[weights.index] = ("b", None)
    return call.loops(inputs, ("b", "j"), extents_of(("b", "j"), call.shape))


@row("gather", "take_along_dim", "scatter", "scatter_", "scatter_add", "scatter_add_")
def gather(call: CallForm) -> Loops:
    """The dim that is picked from stays whole; others are loops where all tensors are as long along them."""
    dim = call.get(2 if call.name == "take_along_dim" else 1, "dim")
    tensors = call.tensors
    if not isinstance(dim, int) or any(len(tensor.shape) != len(call.shape) for tensor in tensors):
        raise ValueError(f"{call.name} along no dim that is named")
    dim %= len(call.shape)
    labels = tuple(
        None if place == dim or any(tensor.shape[place] != call.shape[place] for tensor in tensors) else label
        for place, label in enumerate(labels_like(call.shape))
    )
    return call.loops({tensor.index: labels for tensor in tensors}, labels, extents_of(labels, call.shape))


@row("index_select")
def index_select(call: CallForm) -> Loops:
    x, index = call.tensor(0, "input"), call.tensor(2, "index")
    dim = call.get(1, "dim")
    labels = list(labels_like(x.shape))
    labels[dim] = None
    output = list(labels)
    output[dim] = "picked"
    extents = {**extents_of(tuple(labels), x.shape), **extents_of(tuple(output), call.shape)}
    return call.loops({x.index: tuple(labels), index.index: ("picked",)}, tuple(output), extents)


@row("one_hot")
def one_hot(call: CallForm) -> Loops:
    """The number of classes is given; else it follows from all elements."""
    x = call.tensor(0, "input")
    if call.get(1, "num_classes", -1) < 0:
        raise ValueError("as many classes as the elements have")
    labels = labels_like(x.shape)
    return call.loops({x.index: labels}, (*labels, None), extents_of(labels, x.shape))


def picked(call: CallForm, x: Tensor, index: tuple[object, ...]) -> Loops:
    """An index with tensors in it: the dims that they pick from stay whole, those that they make are loops."""
    found = [item for item in index if isinstance(item, Tensor)]
    at = [place for place, item in enumerate(index) if isinstance(item, Tensor)]
    plain = all(item == slice(None) for item in index if not isinstance(item, Tensor))
    if (
        not plain
        or any(indices.dtype in (torch.bool, torch.uint8) for indices in found)
        or at[-1] - at[0] + 1 != len(at)
    ):
        raise ValueError("an index of masks, or of tensors among other things")
    num_made = len(call.shape) - len(x.shape) + len(at)
    made = labels_like(call.shape[at[0] : at[0] + num_made], "i")
    labels = list(labels_like(x.shape))
    for place in at:
        labels[place] = None
    output: Labels = (*labels[: at[0]], *made, *labels[at[-1] + 1 :])
    inputs: dict[int, Labels] = {x.index: tuple(labels)}
    for indices in found:
        inputs[indices.index] = broadcast(indices, made, call.shape[at[0] : at[0] + num_made])
    return call.loops(inputs, output, extents_of(output, call.shape))
