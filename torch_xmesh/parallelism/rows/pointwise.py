"""Operators on elements: every dim of the output is a loop; operands broadcast."""

from torch_xmesh.parallelism.loops import Loops
from torch_xmesh.parallelism.rows.registry import Call, Tensor, broadcast, extents_of, labels_like, row

_SUMS = ("add", "sub", "__add__", "__radd__", "__sub__", "add_", "iadd")
_PRODUCTS = ("mul", "div", "truediv", "__mul__", "__rmul__", "__truediv__", "mul_", "neg")
_SAME = ("contiguous", "clone", "detach")


def _elementwise(call: Call, *, is_linear: bool) -> Loops:
    output = labels_like(call.shape)
    tensors = [value for value in [*call.args, *call.kwargs.values()] if isinstance(value, Tensor)]
    inputs = {tensor.index: broadcast(tensor, output, call.shape) for tensor in tensors}
    return call.loops(inputs, output, extents_of(output, call.shape), is_linear=is_linear)


@row(*_SUMS)
def sums(call: Call) -> Loops:
    """A partial sum and a number do not add up: it would be added on each device."""
    return _elementwise(call, is_linear=call.num_tensors == 2)


@row(*_PRODUCTS)
def products(call: Call) -> Loops:
    """By a number partial sums stay partial sums, unless they are rounded; a product of two has none."""
    return _elementwise(call, is_linear=call.num_tensors == 1 and call.kwargs.get("rounding_mode") is None)


@row(*_SAME)
def same(call: Call) -> Loops:
    return _elementwise(call, is_linear=True)


@row(
    "relu",
    "gelu",
    "silu",
    "tanh",
    "sigmoid",
    "exp",
    "square",
    "sqrt",
    "rsqrt",
    "pow",
    "dropout",
    "where",
    "masked_fill",
)
def functions(call: Call) -> Loops:
    return _elementwise(call, is_linear=False)


@row("to", "float", "double", "half", "bfloat16", "type_as")
def casts(call: Call) -> Loops:
    """Summands are not cast: what they add up to would be rounded otherwise."""
    x = call.tensor(0, "input")
    output = labels_like(call.shape)
    return call.loops({x.index: output}, output, extents_of(output, call.shape))
