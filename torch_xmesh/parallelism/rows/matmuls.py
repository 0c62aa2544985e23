"""Matrix products: loops over the output's elements, and one that adds up."""

import math
from collections.abc import Mapping, Sequence

from torch_xmesh.parallelism.loops import Labels, Loops
from torch_xmesh.parallelism.rows.registry import Call, Tensor, broadcast, extents_of, labels_like, row


def product(
    call: Call, inputs: Mapping[int, Labels], output: Labels, extents: Mapping[str, int], added: Sequence[Tensor] = ()
) -> Loops:
    """A multiplication and an addition in each turn of all loops; `added` are added once."""
    once = frozenset(one.index for one in added)
    return call.loops(inputs, output, extents, is_heavy=True, flops=2.0 * math.prod(extents.values()), once=once)


@row("linear")
def linear(call: Call) -> Loops:
    x, weight = call.tensor(0, "input"), call.tensor(1, "weight")
    bias = call.get(2, "bias")
    batch = labels_like(x.shape[:-1], "b")
    inputs: dict[int, Labels] = {x.index: (*batch, "k"), weight.index: ("j", "k")}
    added = [bias] if isinstance(bias, Tensor) else []
    inputs |= {one.index: ("j",) for one in added}
    extents = {**extents_of((*batch, "k"), x.shape), **extents_of(("j", "k"), weight.shape)}
    return product(call, inputs, (*batch, "j"), extents, added)


@row("matmul", "bmm", "mm", "__matmul__")
def matmul(call: Call) -> Loops:
    """Of matrices and of batches of them, which broadcast."""
    a, b = call.tensor(0, "input"), call.tensor(1, "mat2" if call.name in ("mm", "bmm") else "other")
    return _matmul(call, a, b)


@row("__rmatmul__")
def reflected_matmul(call: Call) -> Loops:
    return _matmul(call, call.tensor(1, "other"), call.tensor(0, "input"))


@row("addmm", "baddbmm")
def addmm(call: Call) -> Loops:
    """The first operand is added once, as a linear layer's bias is."""
    added, a, b = call.tensor(0, "input"), call.tensor(1, "mat1"), call.tensor(2, "mat2")
    return _matmul(call, a, b, [added])


def _matmul(call: Call, a: Tensor, b: Tensor, added: Sequence[Tensor] = ()) -> Loops:
    if len(a.shape) < 2 or len(b.shape) < 2:
        raise ValueError("matmul of a vector")
    batch = labels_like(call.shape[:-2], "b")
    extents = extents_of(batch, call.shape[:-2])

    def labels_of(tensor: Tensor, last: tuple[str, str]) -> Labels:
        extents.update(extents_of(last, tensor.shape[-2:]))
        return (*_batch(tensor.shape[:-2], batch, call.shape), *last)

    output: Labels = (*batch, "i", "j")
    inputs = {one.index: broadcast(one, output, call.shape) for one in added}
    inputs |= {a.index: labels_of(a, ("i", "k")), b.index: labels_of(b, ("k", "j"))}
    return product(call, inputs, output, extents, added)


def _batch(shape: Sequence[int], batch: Labels, whole: Sequence[int]) -> Labels:
    offset = len(batch) - len(shape)
    return tuple(batch[offset + dim] if extent == whole[offset + dim] else None for dim, extent in enumerate(shape))


@row("einsum")
def einsum(call: Call) -> Loops:
    """As its equation says; a letter that one operand has twice is no loop."""
    equation = call.args[0]
    operands = call.args[1] if isinstance(call.args[1], tuple | list) else call.args[1:]
    if not isinstance(equation, str) or "." in equation or not all(isinstance(one, Tensor) for one in operands):
        raise ValueError("an einsum without a plain equation")
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow:
        right = "".join(sorted(letter for letter in set(left) - {","} if left.count(letter) == 1))
    twice = {letter for term in terms for letter in term if term.count(letter) > 1}

    def labels(term: str) -> Labels:
        return tuple(None if letter in twice else letter for letter in term)

    extents: dict[str, int] = {}
    for term, one in zip(terms, operands, strict=True):
        for letter, extent in zip(term, one.shape, strict=True):
            extents[letter] = max(extent, extents.get(letter, 1))
    for term, one in zip(terms, operands, strict=True):
        twice |= {letter for letter, extent in zip(term, one.shape, strict=True) if extent != extents[letter]}
    inputs = {one.index: labels(term) for term, one in zip(terms, operands, strict=True)}
    used = {letter: extent for letter, extent in extents.items() if letter not in twice and extent > 1}
    if len(operands) < 2:
        return call.loops(inputs, labels(right), used, is_linear=True)
    return call.loops(inputs, labels(right), used, is_heavy=True, flops=_pairwise_flops(terms, right, used))


def _pairwise_flops(terms: Sequence[str], output: str, extents: Mapping[str, int]) -> float:
    """Of contracting operands from left to right; a letter stays as long as a later one or the output has it."""
    flops, held = 0.0, set(terms[0])
    for number, term in enumerate(terms[1:], 1):
        turns = held | set(term)
        flops += 2.0 * math.prod(extents.get(letter, 1) for letter in turns)
        held = turns & {*output, *"".join(terms[number + 1 :])}
    return flops
