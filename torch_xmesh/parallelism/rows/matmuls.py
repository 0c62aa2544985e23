"""Matrix products: loops over the output's elements, and one that adds up."""

import math
import string
from collections.abc import Mapping, Sequence

from torch_xmesh.parallelism.loops import Labels, Loops
from torch_xmesh.parallelism.rows.registry import CallForm, Tensor, broadcast, extents_of, labels_like, row


def product(
    call: CallForm,
    inputs: Mapping[int, Labels],
    output: Labels,
    extents: Mapping[str, int],
    added: Sequence[Tensor] = (),
) -> Loops:
    """A multiplication and an addition in each turn of all loops; `added` are added once."""
    once = frozenset(operand.index for operand in added)
    return call.loops(inputs, output, extents, is_heavy=True, flops=2.0 * math.prod(extents.values()), once=once)


@row("linear")
def linear(call: CallForm) -> Loops:
    x, weight = call.tensor(0, "input"), call.tensor(1, "weight")
    bias = call.get(2, "bias")
    batch = labels_like(x.shape[:-1], "b")
    inputs: dict[int, Labels] = {x.index: (*batch, "k"), weight.index: ("j", "k")}
    added = [bias] if isinstance(bias, Tensor) else []
    inputs |= {tensor.index: ("j",) for tensor in added}
    extents = {**extents_of((*batch, "k"), x.shape), **extents_of(("j", "k"), weight.shape)}
    return product(call, inputs, (*batch, "j"), extents, added)


@row("bilinear")
def bilinear(call: CallForm) -> Loops:
    """Both inputs' features add up."""
    a, b, weight = call.tensor(0, "input1"), call.tensor(1, "input2"), call.tensor(2, "weight")
    bias = call.get(3, "bias")
    batch = labels_like(call.shape[:-1], "b")
    inputs: dict[int, Labels] = {
        a.index: (*batch, "k0"),
        b.index: (*batch, "k1"),
        weight.index: ("j", "k0", "k1"),
    }
    added = [bias] if isinstance(bias, Tensor) else []
    inputs |= {tensor.index: ("j",) for tensor in added}
    extents = {**extents_of(batch, call.shape[:-1]), **extents_of(("j", "k0", "k1"), weight.shape)}
    return product(call, inputs, (*batch, "j"), extents, added)


@row("inner")
def inner(call: CallForm) -> Loops:
    """The inner product of each row of one operand with each row of the other."""
    a, b = call.tensor(0, "input"), call.tensor(1, "other")
    of_a, of_b = (*labels_like(a.shape[:-1], "i"), "k"), (*labels_like(b.shape[:-1], "j"), "k")
    extents = {**extents_of(of_a, a.shape), **extents_of(of_b, b.shape)}
    return product(call, {a.index: of_a, b.index: of_b}, (*of_a[:-1], *of_b[:-1]), extents)


_SECOND = {"mm": "mat2", "bmm": "mat2", "mv": "vec", "dot": "tensor"}


@row("matmul", "bmm", "mm", "mv", "dot", "__matmul__")
def matmul(call: CallForm) -> Loops:
    """Products of vectors, matrices and batches of matrices, whose batch dims broadcast."""
    return _matmul(call, call.tensor(0, "input"), call.tensor(1, _SECOND.get(call.name, "other")))


@row("__rmatmul__")
def reflected_matmul(call: CallForm) -> Loops:
    return _matmul(call, call.tensor(1, "other"), call.tensor(0, "input"))


@row("addmm", "addmv", "baddbmm")
def addmm(call: CallForm) -> Loops:
    """The first operand is added once, as a linear layer's bias is."""
    added, a, b = call.tensor(0, "input"), call.tensor(1, "mat1"), call.tensor(2, "mat2")
    return _matmul(call, a, b, [added])


def _matmul(call: CallForm, a: Tensor, b: Tensor, added: Sequence[Tensor] = ()) -> Loops:
    of_a = ("i", "k")[-len(a.shape) :]
    of_b = ("k", "j")[: len(b.shape)]
    own = (*of_a[:-1], *of_b[1:])
    num_batch = len(call.shape) - len(own)
    batch = labels_like(call.shape[:num_batch], "b")
    extents = extents_of(batch, call.shape[:num_batch])

    def labels_of(tensor: Tensor, last: tuple[str, ...]) -> Labels:
        extents.update(extents_of(last, tensor.shape[-len(last) :]))
        return (*_batch(tensor.shape[: -len(last)], batch, call.shape), *last)

    output: Labels = (*batch, *own)
    inputs = {operand.index: broadcast(operand, output, call.shape) for operand in added}
    inputs |= {a.index: labels_of(a, of_a), b.index: labels_of(b, of_b)}
    return product(call, inputs, output, extents, added)


def _batch(shape: Sequence[int], batch: Labels, whole: Sequence[int]) -> Labels:
    offset = len(batch) - len(shape)
    return tuple(batch[offset + dim] if extent == whole[offset + dim] else None for dim, extent in enumerate(shape))


@row("outer", "ger")
def outer(call: CallForm) -> Loops:
    a, b = call.tensor(0, "input"), call.tensor(1, "vec2")
    return product(call, {a.index: ("i",), b.index: ("j",)}, ("i", "j"), extents_of(("i", "j"), call.shape))


@row("tensordot")
def tensordot(call: CallForm) -> Loops:
    """Pairs of dims are loops that add up."""
    a, b, given = call.tensor(0, "a"), call.tensor(1, "b"), call.get(2, "dims", 2)
    if isinstance(given, int):
        given = range(len(a.shape) - given, len(a.shape)), range(given)
    labels = list(labels_like(a.shape, "i")), list(labels_like(b.shape, "j"))
    for number, (left, right) in enumerate(zip(*given, strict=True)):
        if a.shape[left] != b.shape[right]:
            raise ValueError("dims of other lengths")
        labels[0][left] = labels[1][right] = f"k{number}"
    of_a, of_b = map(tuple, labels)
    extents = {**extents_of(of_a, a.shape), **extents_of(of_b, b.shape)}
    output = tuple(label for label in (*of_a, *of_b) if label is not None and not label.startswith("k"))
    return product(call, {a.index: of_a, b.index: of_b}, output, extents)


@row("einsum")
def einsum(call: CallForm) -> Loops:
    """As its equation says; a letter that one operand has twice is no loop."""
    equation = call.args[0]
    operands = call.args[1] if isinstance(call.args[1], tuple | list) else call.args[1:]
    if not isinstance(equation, str) or not all(isinstance(operand, Tensor) for operand in operands):
        raise ValueError("an einsum without an equation")
    left, arrow, right = equation.replace(" ", "").partition("->")
    if not arrow:
        right = "".join(sorted(letter for letter in set(left) - {*",."} if left.count(letter) == 1))
        right = f"...{right}" if "." in left else right
    terms, right = _without_dots(left.split(","), right, [len(operand.shape) for operand in operands])
    twice = {letter for term in terms for letter in term if term.count(letter) > 1}

    def labels(term: str) -> Labels:
        return tuple(None if letter in twice else letter for letter in term)

    extents: dict[str, int] = {}
    for term, operand in zip(terms, operands, strict=True):
        for letter, extent in zip(term, operand.shape, strict=True):
            extents[letter] = max(extent, extents.get(letter, 1))
    for term, operand in zip(terms, operands, strict=True):
        twice |= {letter for letter, extent in zip(term, operand.shape, strict=True) if extent != extents[letter]}
    inputs = {operand.index: labels(term) for term, operand in zip(terms, operands, strict=True)}
    used = {letter: extent for letter, extent in extents.items() if letter not in twice and extent > 1}
    if len(operands) < 2:
        return call.loops(inputs, labels(right), used, is_linear=True)
    return call.loops(inputs, labels(right), used, is_heavy=True, flops=_pairwise_flops(terms, right, used))


def _without_dots(terms: Sequence[str], output: str, num_dims: Sequence[int]) -> tuple[list[str], str]:
    """With letters in the place of "...", which stands for the dims that are not named, aligned from the last."""
    counts = [total - len(term.replace("...", "")) for term, total in zip(terms, num_dims, strict=True)]
    letters = [letter for letter in string.ascii_letters if letter not in "".join((*terms, output))]
    names = "".join(letters[: max(counts)])
    if "." in "".join(terms) and "..." not in output:
        raise ValueError("an einsum that adds up dims without names")
    pairs = zip(terms, counts, strict=True)
    return [term.replace("...", names[len(names) - count :]) for term, count in pairs], output.replace("...", names)


def _pairwise_flops(terms: Sequence[str], output: str, extents: Mapping[str, int]) -> float:
    """FLOPs of contracting an einsum's operands from left to right. A letter is summed over once neither a later
    operand nor the output has it."""
    flops, held = 0.0, set(terms[0])
    for number, term in enumerate(terms[1:], 1):
        turns = held | set(term)
        flops += 2.0 * math.prod(extents.get(letter, 1) for letter in turns)
        held = turns & {*output, *"".join(terms[number + 1 :])}
    return flops
