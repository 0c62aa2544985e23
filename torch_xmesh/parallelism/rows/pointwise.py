"""Operators on elements: every dim of the output is a loop; operands broadcast."""

import math

from torch_xmesh.parallelism.loops import Labels, Loops
from torch_xmesh.parallelism.rows.registry import CallForm, broadcast, extents_of, labels_like, row

_SUMS = "add sub subtract __add__ __radd__ __sub__ __rsub__ add_ sub_ iadd isub __iadd__ __isub__"
_PRODUCTS = "mul multiply div divide truediv __mul__ __rmul__ __truediv__ mul_ div_ neg neg_ negative __neg__ __imul__"
_SAME = "contiguous clone detach alias positive requires_grad_ lift_fresh"
_FUNCTIONS = """
    relu relu_ relu6 gelu silu mish elu selu celu leaky_relu softplus softsign hardtanh hardswish hardsigmoid tanh
    sigmoid log_sigmoid logsigmoid exp exp2 expm1 log log2 log10 log1p square sqrt rsqrt reciprocal pow __pow__ __rpow__
    abs absolute sign sin cos tan asin acos atan sinh cosh erf floor ceil round trunc frac clamp clamp_ clip
    clamp_min clamp_max minimum maximum dropout dropout_ alpha_dropout where masked_fill masked_fill_
    nan_to_num lerp addcmul addcdiv fmod remainder floor_divide __rtruediv__ __floordiv__ __mod__ atan2 hypot logaddexp
    eq ne lt le gt ge __eq__ __ne__ __lt__ __le__ __gt__ __ge__ isnan isinf isfinite logical_and logical_or logical_xor
    logical_not bitwise_and bitwise_or bitwise_xor bitwise_not __and__ __or__ __xor__ __invert__ __rand__ __ror__
    zeros_like ones_like full_like empty_like rand_like randn_like bernoulli fill_ zero_ copy_ threshold _threshold
    sigmoid_ tanh_ exp_ log_ sqrt_ rsqrt_ square_ reciprocal_ pow_ abs_ sin_ cos_ round_ floor_ ceil_ clamp_min_
    clamp_max_ elu_ selu_ celu_ leaky_relu_ hardtanh_ threshold_ nan_to_num_ lerp_ addcmul_ addcdiv_
"""


def _elementwise(call: CallForm, *, is_linear: bool) -> Loops:
    output = labels_like(call.shape)
    inputs = {tensor.index: broadcast(tensor, output, call.shape) for tensor in call.tensors}
    return call.loops(inputs, output, extents_of(output, call.shape), is_linear=is_linear)


@row(*_SUMS.split())
def sums(call: CallForm) -> Loops:
    """A partial sum and a number do not add up: it would be added on each device."""
    return _elementwise(call, is_linear=call.num_tensors == 2)


@row(*_PRODUCTS.split())
def products(call: CallForm) -> Loops:
    """By a number partial sums stay partial sums, unless they are rounded; a product of two has none."""
    return _elementwise(call, is_linear=call.num_tensors == 1 and call.kwargs.get("rounding_mode") is None)


@row(*_SAME.split())
def same(call: CallForm) -> Loops:
    return _elementwise(call, is_linear=True)


@row(*_FUNCTIONS.split())
def functions(call: CallForm) -> Loops:
    return _elementwise(call, is_linear=False)


@row("prelu")
def prelu(call: CallForm) -> Loops:
    """All dims are loops; the slopes are one, or one per channel, which is the second dim."""
    x, weight = call.tensor(0, "input"), call.tensor(1, "weight")
    labels = labels_like(x.shape)
    slopes: Labels = (None,) * len(weight.shape)
    if math.prod(weight.shape) > 1:
        slopes = labels[1:2]
    return call.loops({x.index: labels, weight.index: slopes}, labels, extents_of(labels, x.shape))


@row("glu")
def glu(call: CallForm) -> Loops:
    """The dim whose halves are multiplied stays whole."""
    x = call.tensor(0, "input")
    labels = list(labels_like(x.shape))
    labels[call.get(1, "dim", -1)] = None
    output = tuple(labels)
    return call.loops({x.index: output}, output, extents_of(output, x.shape))


@row("tril", "triu", "tril_", "triu_")
def triangles(call: CallForm) -> Loops:
    """The last two dims stay whole: whether an element is kept follows from its place."""
    x = call.tensor(0, "input")
    labels = (*labels_like(x.shape)[:-2], None, None)
    return call.loops({x.index: labels}, labels, extents_of(labels, x.shape), is_linear=True)


@row("min", "max")
def either(call: CallForm) -> Loops:
    """The smaller or greater one of two; along a dim they are no functions of elements (see reductions)."""
    if len(call.tensors) != 2:
        from torch_xmesh.parallelism.rows.reductions import extremes

        return extremes(call)
    return _elementwise(call, is_linear=False)


@row("to", "float", "double", "half", "bfloat16", "type_as", "type", "long", "int", "bool")
def casts(call: CallForm) -> Loops:
    """Summands are not cast: what they add up to would be rounded otherwise."""
    x = call.tensor(0, "input")
    output = labels_like(call.shape)
    return call.loops({x.index: output}, output, extents_of(output, call.shape))
