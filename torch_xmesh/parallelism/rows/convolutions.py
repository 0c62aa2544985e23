"""Convolutions and what else goes over space, whose dims stay whole."""

import math
import re

from torch_xmesh.parallelism.loops import Labels, Loops
from torch_xmesh.parallelism.rows.registry import CallForm, Tensor, extents_of, labels_like, row


@row("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def convolution(call: CallForm) -> Loops:
    """Samples, output channels, and input channels, which add up; of a grouped one the groups. The first dim of a
    transposed one's weight is the input channels."""
    is_transposed = "transpose" in call.name
    x, weight, bias = call.tensor(0, "input"), call.tensor(1, "weight"), call.get(2, "bias")
    groups = call.get(6, "groups", 1)
    num_space = len(weight.shape) - 2
    if len(x.shape) != len(weight.shape):
        raise ValueError("a convolution of one sample without a batch")
    space: Labels = (None,) * num_space
    if groups == 1:
        channels = ("k", "c") if is_transposed else ("c", "k")
        inputs: dict[int, Labels] = {x.index: ("n", "k", *space), weight.index: (*channels, *space)}
        output: Labels = ("n", "c", *space)
        extents = {"n": x.shape[0], **dict(zip(channels, weight.shape, strict=False))}
    else:
        inputs = {x.index: ("n", "g", *space), weight.index: ("g", None, *space)}
        output = ("n", "g", *space)
        extents = {"n": x.shape[0], "g": groups}
    once = frozenset({bias.index} if isinstance(bias, Tensor) else ())
    inputs |= {number: (output[1],) for number in once}
    turns = math.prod(x.shape if is_transposed else call.shape) * math.prod(weight.shape[1:])
    usable = {label: extent for label, extent in extents.items() if extent > 1}
    return call.loops(inputs, output, usable, is_heavy=True, flops=2.0 * turns, once=once)


_OVER_SPACE = """
    max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d lp_pool1d lp_pool2d
    lp_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d
    adaptive_max_pool3d interpolate upsample dropout1d dropout2d dropout3d feature_dropout feature_alpha_dropout
"""


@row(*_OVER_SPACE.split())
def over_space(call: CallForm) -> Loops:
    """Samples and channels are loops. Where the name says over how many dims it goes, one sample may be without a
    batch."""
    x = call.tensor(0, "input")
    named = re.search(r"(\d)d", call.name)
    num_outer = len(x.shape) - int(named[1]) if named else 2
    if num_outer not in (1, 2) or len(x.shape) < 2 or call.shape[:num_outer] != x.shape[:num_outer]:
        raise ValueError(f"{call.name} without channels")
    outer = labels_like(x.shape)[:num_outer]
    labels: Labels = (*outer, *[None] * (len(x.shape) - num_outer))
    output: Labels = (*outer, *[None] * (len(call.shape) - num_outer))
    return call.loops({x.index: labels}, output, extents_of(outer, x.shape[:num_outer]))


@row("unfold")
def unfold(call: CallForm) -> Loops:
    """Patches of images may be sharded by samples and by channels, since a channel's patches lie together. Windows
    along one dim of a tensor may be sharded along all other dims."""
    x = call.tensor(0, "input")
    if len(call.shape) == len(x.shape) + 1:
        dim = call.get(1, "dimension") % len(x.shape)
        labels = tuple(None if place == dim else label for place, label in enumerate(labels_like(x.shape)))
        return call.loops({x.index: labels}, (*labels, None), extents_of(labels, x.shape), is_linear=True)
    if len(x.shape) != 4:
        raise ValueError("patches of one sample without a batch")
    return call.loops({x.index: ("n", "c", None, None)}, ("n", "c", None), extents_of(("n", "c"), x.shape[:2]))


@row("pixel_shuffle", "pixel_unshuffle")
def pixel_shuffle(call: CallForm) -> Loops:
    """Samples are loops, and channels of the side that has fewer: what becomes of one lies together."""
    x = call.tensor(0, "input")
    batch = labels_like(x.shape[:-3], "b")
    labels: Labels = (*batch, "c", None, None)
    extents = extents_of((*batch, "c"), (*x.shape[:-3], min(x.shape[-3], call.shape[-3])))
    return call.loops({x.index: labels}, labels, extents, is_linear=True)
