"""Operators that make one element of many: along a dim, or of all."""

from collections.abc import Sequence

from torch_xmesh.parallelism.loops import Labels, Loops
from torch_xmesh.parallelism.rows.registry import CallForm, extents_of, labels_like, row


def reduced_dims(call: CallForm, position: int = 1) -> tuple[list[int], bool]:
    """The dims that a reduction is over, and whether they stay, with one element each."""
    x = call.tensor(0, "input")
    dim = call.get(position, "dim")
    dims: Sequence[int] = range(len(x.shape)) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    if not all(type(axis) is int for axis in dims):
        raise ValueError("dims that are no numbers")
    whole = [axis % max(len(x.shape), 1) for axis in dims] if len(dims) > 0 else list(range(len(x.shape)))
    return whole, len(call.shape) == len(x.shape) and bool(x.shape)


def without(labels: Labels, dims: Sequence[int], *, keeps: bool) -> Labels:
    """What a reduction leaves of a tensor's labels."""
    if keeps:
        return tuple(None if dim in dims else label for dim, label in enumerate(labels))
    return tuple(label for dim, label in enumerate(labels) if dim not in dims)


@row("sum", "mean", "nansum")
def sums(call: CallForm) -> Loops:
    """All dims are loops; those that are reduced add up. (Of a mean each device's part is divided by the whole.)
    Where one summand is NaN the other is not left out, but their sum is: `nansum` is not linear."""
    x = call.tensor(0, "input")
    dims, keeps = reduced_dims(call)
    labels = labels_like(x.shape)
    is_linear = call.name != "nansum" and call.kwargs.get("dtype") is None
    return call.loops(
        {x.index: labels}, without(labels, dims, keeps=keeps), extents_of(labels, x.shape), is_linear=is_linear
    )


_BY_ORDER = "norm", "linalg_norm", "linalg_vector_norm"
"""Their second argument is which norm, their third the dim."""

_EXTREMES = "amax amin argmax argmin all any var std var_mean std_mean logsumexp prod median"


@row(*_EXTREMES.split(), *_BY_ORDER)
def extremes(call: CallForm) -> Loops:
    """Dims that are reduced stay whole."""
    x = call.tensor(0, "input")
    dims, keeps = reduced_dims(call, 2 if call.name in _BY_ORDER else 1)
    labels = tuple(None if dim in dims else label for dim, label in enumerate(labels_like(x.shape)))
    return call.loops({x.index: labels}, without(labels, dims, keeps=keeps), extents_of(labels, x.shape))


@row("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "sort", "argsort", "topk", "flip", "roll", "kthvalue")
def along(call: CallForm) -> Loops:
    """Along a dim, which stays whole; the others are loops."""
    x = call.tensor(0, "input")
    position = 2 if call.name in ("topk", "kthvalue", "roll") else 1
    given = call.get(position, "dims" if call.name in ("flip", "roll") else "dim", None if call.name == "roll" else -1)
    if call.name == "flip" and isinstance(given, int):
        given = call.args[1:]
    dims = [given] if isinstance(given, int) else list(given or ())
    if not dims:
        raise ValueError(f"{call.name} of all elements")
    whole = {dim % len(x.shape) for dim in dims}
    labels = tuple(None if place in whole else label for place, label in enumerate(labels_like(x.shape)))
    return call.loops({x.index: labels}, labels, extents_of(labels, x.shape))


@row("renorm", "renorm_")
def renorm(call: CallForm) -> Loops:
    """The slices along a dim are a loop; the norm of each is over all other dims."""
    x, own = call.tensor(0, "input"), call.get(2, "dim") % len(call.shape)
    labels = tuple(label if dim == own else None for dim, label in enumerate(labels_like(x.shape)))
    return call.loops({x.index: labels}, labels, extents_of(labels, x.shape))
