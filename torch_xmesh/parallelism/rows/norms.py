"""What needs whole rows: normalizations and softmax shard every other dim, or bring the row's statistics together."""

import math

import torch

from torch_xmesh.parallelism.loops import Labels, Loops, Within
from torch_xmesh.parallelism.rows.registry import CallForm, Tensor, broadcast, extents_of, labels_like, row

_STATISTIC, _MOMENT = 4, 8
"""Bytes of one: norms and softmax compute in 32 bits."""


@row("layer_norm", "rms_norm")
def layer_norm(call: CallForm) -> Loops:
    x = call.tensor(0, "input")
    shape = call.get(1, "normalized_shape")
    num_whole = 1 if isinstance(shape, int) else len(shape)
    labels = (*labels_like(x.shape)[: len(x.shape) - num_whole], *[None] * num_whole)
    whole: Labels = (None,) * num_whole
    inputs = {x.index: labels}
    for value in (call.get(2, "weight"), call.get(3, "bias")):
        if isinstance(value, Tensor):
            inputs[value.index] = whole
    return call.loops(inputs, labels, extents_of(labels, x.shape))


@row("group_norm", "instance_norm")
def group_norm(call: CallForm) -> Loops:
    """Samples are a loop, where no statistics of all of them are kept."""
    x = call.tensor(0, "input")
    is_instance = call.name == "instance_norm"
    if is_instance and isinstance(call.get(1, "running_mean"), Tensor) and call.get(5, "use_input_stats", True):
        raise ValueError("running statistics that are updated")
    labels: Labels = ("n", *[None] * (len(x.shape) - 1))
    inputs: dict[int, Labels] = {tensor.index: (None,) * len(tensor.shape) for tensor in call.tensors}
    inputs[x.index] = labels
    return call.loops(inputs, labels, extents_of(labels, x.shape))


@row("batch_norm")
def batch_norm(call: CallForm) -> Loops:
    """Channels are a loop, and samples, whose statistics are brought together as if the batch were whole."""
    x = call.tensor(0, "input")
    labels: Labels = ("n", "c", *[None] * (len(x.shape) - 2))
    inputs: dict[int, Labels] = {tensor.index: ("c",) for tensor in call.tensors}
    inputs[x.index] = labels
    uses_batch = bool(call.get(5, "training", False)) or not isinstance(call.get(1, "running_mean"), Tensor)
    statistics = Within("n", "all-reduce", 2 * _MOMENT * x.shape[1], ("c",))
    return call.loops(inputs, labels, extents_of(labels, x.shape), within=(statistics,) if uses_batch else ())


@row("normalize")
def normalize(call: CallForm) -> Loops:
    """Dims that the norm is over stay whole."""
    x, dim = call.tensor(0, "input"), call.get(2, "dim", 1)
    whole = {axis % len(x.shape) for axis in ([dim] if isinstance(dim, int) else dim)}
    labels = tuple(None if place in whole else label for place, label in enumerate(labels_like(x.shape)))
    return call.loops({x.index: labels}, labels, extents_of(labels, x.shape))


@row("cosine_similarity")
def cosine_similarity(call: CallForm) -> Loops:
    """Operands broadcast; the dim that the products are over stays whole."""
    a, b = call.tensor(0, "x1"), call.tensor(1, "x2")
    shape = torch.broadcast_shapes(a.shape, b.shape)  # type: ignore[no-untyped-call]
    dim = call.get(2, "dim", 1) % len(shape)
    labels = tuple(None if place == dim else label for place, label in enumerate(labels_like(shape)))
    inputs = {operand.index: broadcast(operand, labels, shape) for operand in (a, b)}
    return call.loops(inputs, (*labels[:dim], *labels[dim + 1 :]), extents_of(labels, shape))


@row("softmax", "log_softmax")
def softmax(call: CallForm) -> Loops:
    """Over its own dim devices bring together the greatest element and the sum, and backward one sum."""
    x = call.tensor(0, "input")
    dim = call.get(1, "dim")
    if not x.shape or not isinstance(dim, int):
        raise ValueError("softmax over no dim that is named")
    labels = labels_like(x.shape)
    own = labels[dim]
    assert own is not None
    rest = tuple(label for label in labels if label is not None and label != own)
    row_bytes = _STATISTIC * math.prod(x.shape) / max(x.shape[dim], 1)
    together = Within(own, "all-reduce", row_bytes, rest, num_forward=2)
    return call.loops({x.index: labels}, labels, extents_of(labels, x.shape), within=(together,))


@row("cross_entropy", "nll_loss")
def cross_entropy(call: CallForm) -> Loops:
    """Samples add up, and classes: each device has the logits of some, and the greatest element and the sum of all are
    brought together. A mean is over the samples that are not ignored, which all devices count together."""
    x, target = call.tensor(0, "input"), call.tensor(1, "target")
    if len(x.shape) < 2 or target.shape != (x.shape[0], *x.shape[2:]) or len(call.tensors) > 2:
        raise ValueError("class probabilities or weights")
    samples = labels_like(target.shape, "n")
    labels: Labels = (samples[0], "c", *samples[1:])
    output = samples if call.shape == target.shape else ()
    names = tuple(label for label in samples if label is not None)
    own = Within("c", "all-reduce", _STATISTIC * math.prod(target.shape), names, num_forward=2, num_backward=0)
    if call.get(3, "size_average") is not None or call.get(5, "reduce") is not None:
        raise ValueError("old arguments")
    is_mean = not output and call.get(6, "reduction", "mean") != "sum"
    counts = tuple(Within(name, "all-reduce", _STATISTIC, num_backward=0) for name in names if is_mean)
    within = (*([own] if call.name == "cross_entropy" else []), *counts)
    extents = extents_of(labels, x.shape)
    return call.loops({x.index: labels, target.index: samples}, output, extents, within=within)


_DISTANCES = """
    mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div
    soft_margin_loss poisson_nll_loss
"""


@row(*_DISTANCES.split())
def distances(call: CallForm) -> Loops:
    """Elements add up, or stay."""
    x, target = call.tensor(0, "input"), call.tensor(1, "target")
    if x.shape != target.shape or len(call.tensors) > 2:
        raise ValueError("a loss that broadcasts")
    if call.kwargs.get("size_average") is not None or any(isinstance(argument, bool) for argument in call.args[2:]):
        raise ValueError("old arguments")
    labels = labels_like(x.shape)
    output = labels if call.shape == x.shape else ()
    return call.loops({x.index: labels, target.index: labels}, output, extents_of(labels, x.shape))
