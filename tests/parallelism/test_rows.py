"""Each sharding of each operator, run on parts of its tensors: output and gradients are those of the whole."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from torch_xmesh.parallelism.loops import PARTIAL, PASS, REPLICATED, Choice, End, State, choices_of
from torch_xmesh.parallelism.operators import Operator
from torch_xmesh.parallelism.recorded_forwards import forward_of

Function = Callable[..., torch.Tensor]
Sizes = tuple[int, ...]


class Applied(nn.Module):
    """A function of parameters."""

    def __init__(self, function: Function, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.tensors = nn.ParameterList(nn.Parameter(tensor) for tensor in tensors)

    def forward(self) -> torch.Tensor:
        return self.function(*self.tensors)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


PICKS, PLACES, ZEROS = torch.tensor([0, 3, 3, 1]), torch.tensor([[0, 7, 1]] * 4), random(4, 8)
FIRST_PICKS = PICKS[:2]
STATISTICS = random(8), random(8).abs()

CASES: dict[str, tuple[Function, list[torch.Tensor]]] = {
    "linear": (F.linear, [random(4, 8, 12), random(16, 12), random(16)]),
    "linear without a bias": (F.linear, [random(8, 4), random(12, 4)]),
    "matmul": (torch.matmul, [random(4, 8, 4, 12), random(4, 8, 12, 16)]),
    "matmul that broadcasts": (torch.matmul, [random(4, 8, 12), random(12, 8)]),
    "batched with one": (torch.matmul, [random(4, 1, 8, 4), random(8, 4, 12)]),
    "matrix times vector": (torch.matmul, [random(4, 8, 12), random(12)]),
    "vector times matrix": (torch.matmul, [random(12), random(4, 12, 8)]),
    "vector times vector": (torch.matmul, [random(8), random(8)]),
    "mv": (torch.mv, [random(4, 8), random(8)]),
    "dot": (torch.dot, [random(8), random(8)]),
    "addmv": (torch.addmv, [random(4), random(4, 8), random(8)]),
    "outer": (torch.outer, [random(4), random(8)]),
    "tensordot": (torch.tensordot, [random(4, 8, 12), random(8, 12, 4)]),
    "tensordot of named dims": (
        lambda a, b: torch.tensordot(a, b, ([0, -1], [1, 0])),
        [random(4, 8, 12), random(12, 4, 8)],
    ),
    "bilinear": (F.bilinear, [random(4, 3, 8), random(4, 3, 4), random(12, 8, 4), random(12)]),
    "inner": (torch.inner, [random(4, 3, 8), random(12, 8)]),
    "add": (torch.add, [random(4, 8), random(4, 8)]),
    "add that broadcasts": (torch.add, [random(4, 8, 12), random(8, 1)]),
    "minus": (lambda a, b: a - b, [random(4, 8), random(8)]),
    "add a number": (lambda a: a + 1.5, [random(4, 8)]),
    "times": (lambda a, b: a * b, [random(4, 8), random(4, 1)]),
    "times a number": (lambda a: a * 1.5, [random(4, 8)]),
    "gelu": (F.gelu, [random(4, 8)]),
    "glu": (lambda x: F.glu(x, 1), [random(4, 8, 12)]),
    "prelu": (F.prelu, [random(4, 8, 12), random(8)]),
    "prelu of one slope": (F.prelu, [random(4, 8), random(1)]),
    "threshold": (lambda x: F.threshold(x, 0.1, 0.2), [random(4, 8)]),
    "normalize": (F.normalize, [random(4, 8, 12)]),
    "normalize over the last dim": (lambda x: F.normalize(x, 1.0, -1), [random(4, 8, 12)]),
    "cosine_similarity": (F.cosine_similarity, [random(4, 8, 12), random(8, 12)]),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (12,), w, b), [random(4, 8, 12), random(12), random(12)]),
    "softmax": (lambda x: x.softmax(-2), [random(4, 8, 12)]),
    "transpose": (lambda x: x.transpose(0, -1), [random(4, 8, 12)]),
    "permute": (lambda x: x.permute(2, 0, 1), [random(4, 8, 12)]),
    "movedim": (lambda x: x.movedim(0, 2), [random(4, 8, 12)]),
    "T": (lambda x: x.T, [random(4, 8)]),
    "mT": (lambda x: x.mT, [random(4, 8, 12)]),
    "number minus": (lambda x: 1.5 - x, [random(4, 8)]),
    "mm": (torch.mm, [random(4, 8), random(8, 12)]),
    "addmm": (torch.addmm, [random(12), random(4, 8), random(8, 12)]),
    "einsum": (lambda a, b: torch.einsum("bik,bkj->ijb", a, b), [random(4, 8, 12), random(4, 12, 8)]),
    "einsum with dots": (
        lambda a, b: torch.einsum("...ik,...kj->...ij", a, b),
        [random(4, 8, 4, 12), random(8, 12, 8)],
    ),
    "einsum with dots that broadcast": (
        lambda a, b: torch.einsum("i...k,k...", a, b),
        [random(8, 4, 8, 12), random(12, 1, 8)],
    ),
    "einsum of three": (
        lambda a, b, c: torch.einsum("ij,jk,kl->il", a, b, c),
        [random(4, 8), random(8, 4), random(4, 12)],
    ),
    "einsum of one": (lambda a: torch.einsum("ijk->ki", a), [random(4, 8, 12)]),
    "einsum that sums alone": (lambda a, b: torch.einsum("ti,ei->t", a, b), [random(4, 8), random(12, 8)]),
    "sum": (lambda x: x.sum(1), [random(4, 8, 12)]),
    "sum of all": (torch.sum, [random(4, 8)]),
    "mean": (lambda x: x.mean(-1, keepdim=True), [random(4, 8, 12)]),
    "mean of all": (lambda x: x.mean(), [random(4, 8)]),
    "amax": (lambda x: x.amax(1), [random(4, 8)]),
    "var_mean": (lambda x: torch.var_mean(x, 1)[0], [random(4, 8, 12)]),
    "std_mean": (lambda x: torch.std_mean(x, 1, keepdim=True)[1], [random(4, 8, 12)]),
    "linalg.norm": (lambda x: torch.linalg.norm(x, dim=1), [random(4, 8)]),
    "linalg.vector_norm": (lambda x: torch.linalg.vector_norm(x, 3, dim=(0, 1)), [random(4, 8, 12)]),
    "cumsum": (lambda x: x.cumsum(1), [random(4, 8)]),
    "cummax": (lambda x: x.cummax(1)[0], [random(4, 8)]),
    "logcumsumexp": (lambda x: x.logcumsumexp(0), [random(4, 8)]),
    "cat": (lambda a, b: torch.cat([a, b], 1), [random(4, 8), random(4, 4)]),
    "hstack": (lambda a, b: torch.hstack([a, b]), [random(4, 8), random(4, 4)]),
    "vstack": (lambda a, b: torch.vstack([a, b]), [random(4, 8), random(8)]),
    "stack": (lambda a, b: torch.stack([a, b], 1), [random(4, 8), random(4, 8)]),
    "stack along an axis": (lambda a, b: torch.stack([a, b], axis=1), [random(4, 8), random(4, 8)]),  # type: ignore[call-arg]
    "renorm": (lambda x: x.renorm(2, 1, 0.5), [random(4, 8, 12)]),
    "log_sigmoid": (F.logsigmoid, [random(4, 8)]),
    "flip": (lambda x: x.flip(0, 2), [random(4, 8, 12)]),
    "roll": (lambda x: x.roll(3, 1), [random(4, 8)]),
    "expand": (lambda x: x.expand(-1, 3, -1), [random(4, 1, 8)]),
    "one of the last dim": (lambda x: x[..., 0], [random(4, 8, 12)]),
    "some of a dim": (lambda x: x[:, 2:6], [random(4, 8, 12)]),
    "pad": (lambda x: F.pad(x, (1, 2)), [random(4, 8, 12)]),
    "picked": (lambda x: x[:, PICKS], [random(4, 8, 12)]),
    "index_select": (lambda x: x.index_select(0, FIRST_PICKS), [random(4, 8)]),
    "gather": (lambda x: x.gather(1, PLACES), [random(4, 8)]),
    "take_along_dim": (lambda x: torch.take_along_dim(x, PLACES, 1), [random(4, 8)]),
    "attention": (F.scaled_dot_product_attention, [random(4, 8, 4, 3), random(4, 8, 6, 3), random(4, 8, 6, 5)]),
    "causal attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        [random(4, 8, 4, 3), random(4, 8, 4, 3), random(4, 8, 4, 5)],
    ),
    "grouped attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        [random(2, 8, 4, 3), random(2, 4, 4, 3), random(2, 4, 4, 5)],
    ),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, padding=1), [random(4, 8, 5, 5), random(12, 8, 3, 3), random(12)]),
    "conv_transpose2d": (
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2),
        [random(4, 8, 4, 4), random(8, 12, 3, 3), random(12)],
    ),
    "conv_transpose1d in groups": (
        lambda x, w: F.conv_transpose1d(x, w, groups=len(w) // 2),
        [random(4, 8, 5), random(8, 3, 3)],
    ),
    "conv_transpose3d": (F.conv_transpose3d, [random(4, 8, 3, 3, 3), random(8, 4, 2, 2, 2)]),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), [random(4, 16, 3, 3)]),
    "pixel_unshuffle": (lambda x: F.pixel_unshuffle(x, 2), [random(4, 8, 4, 4)]),
    "max_pool2d of one sample": (lambda x: F.max_pool2d(x, 3, 1, 1), [random(8, 4, 4)]),
    "avg_pool2d of one sample": (lambda x: F.avg_pool2d(x, 3, 1, 1), [random(8, 4, 4)]),
    "max_pool3d of one sample": (lambda x: F.max_pool3d(x, 3, 1, 1), [random(8, 4, 4, 4)]),
    "avg_pool1d": (lambda x: F.avg_pool1d(x, 3), [random(4, 8, 6)]),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), [random(4, 8, 4, 4)]),
    "unfold": (lambda x: F.unfold(x, 2), [random(4, 8, 4, 4)]),
    "unfold along a dim": (lambda x: x.unfold(1, 3, 1), [random(4, 8, 12)]),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), [random(4, 8, 6, 6)]),
    "batch_norm in evaluation": (
        lambda x, w, b: F.batch_norm(x, *STATISTICS, w, b),
        [random(4, 8, 3), random(8), random(8)],
    ),
    "instance_norm": (F.instance_norm, [random(4, 8, 5)]),
    "instance_norm by running statistics": (
        lambda x: F.instance_norm(x, *STATISTICS, use_input_stats=False),
        [random(4, 8, 5)],
    ),
    "embedding_bag": (lambda x: F.embedding_bag(PLACES, x), [random(8, 12)]),
    "embedding_bag with weights": (
        lambda x, w: F.embedding_bag(PLACES, x, per_sample_weights=w, mode="sum"),
        [random(8, 12), random(4, 3)],
    ),
    "kl_div": (lambda x: F.kl_div(x, ZEROS, reduction="none", log_target=True), [random(4, 8)]),
    "kl_div that adds up": (lambda x: F.kl_div(x, ZEROS, reduction="sum", log_target=True), [random(4, 8)]),
    "soft_margin_loss": (lambda x: F.soft_margin_loss(x, ZEROS, reduction="sum"), [random(4, 8)]),
    "poisson_nll_loss": (lambda x: F.poisson_nll_loss(x, ZEROS, reduction="sum"), [random(4, 8)]),
    "mse_loss that adds up": (
        lambda x: F.mse_loss(x, ZEROS, reduction="sum"),
        [random(4, 8)],
    ),
}

LOCAL: dict[str, Callable[[Function, list[Any], Choice, Sizes, Sizes], torch.Tensor]] = {}
"""How a device computes its part, where that is not the function of its parts."""


def local(*names: str) -> Callable[[Any], Any]:
    def register(function: Any) -> Any:
        LOCAL.update(dict.fromkeys(names, function))
        return function

    return register


@local("linear", "addmm", "addmv", "bilinear", "conv2d", "conv_transpose2d")
def adds_once(function: Function, parts: list[Any], choice: Choice, devices: Sizes, sizes: Sizes) -> torch.Tensor:
    """The first device along an axis that adds up adds the bias; the others do so with nothing of its value."""
    place = 0 if parts[0].dim() == 1 else -1
    if any(label.startswith("k") for label in choice.axes):
        along = [device for device, label in zip(devices, choice.axes, strict=True) if label.startswith("k")]
        first = not any(along)
        parts[place] = parts[place] if first else parts[place] - parts[place].detach()
    return function(*parts)


@local("mean", "mean of all")
def of_the_whole(function: Function, parts: list[Any], choice: Choice, devices: Sizes, sizes: Sizes) -> torch.Tensor:
    """A mean of a part counts as much as its share."""
    held = zip(sizes, choice.axes, choice.outputs[0].value, strict=True)
    share = math.prod(size for size, label, state in held if state == PARTIAL and label != PASS)
    return function(*parts) / share


@local("kl_div", "kl_div that adds up", "soft_margin_loss", "poisson_nll_loss")
@local(
    "picked",
    "index_select",
    "gather",
    "take_along_dim",
    "instance_norm by running statistics",
    "batch_norm in evaluation",
    "mse_loss that adds up",
)
def with_part_of_the_index(
    function: Function, parts: list[Any], choice: Choice, devices: Sizes, sizes: Sizes
) -> torch.Tensor:
    """Tensors in the function that are no parameters are cut as it says."""
    states = {id(one): choice.inputs[1].value for one in (PICKS, FIRST_PICKS, PLACES, ZEROS)}
    states |= {id(one): choice.inputs[-1].value for one in STATISTICS}

    class Cut(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            def cut(one: Any) -> Any:
                if not isinstance(one, torch.Tensor) or any(one is mine for mine in parts):
                    return one
                return part(one, states[id(one)], devices, sizes, 0)

            return func(*pytree.tree_map(cut, args), **(kwargs or {}))

    with Cut():
        return function(*parts)


@local("embedding_bag", "embedding_bag with weights")
def with_part_of_the_bags(
    function: Function, parts: list[Any], choice: Choice, devices: Sizes, sizes: Sizes
) -> torch.Tensor:
    """Their indices come before the table."""
    indices = part(PLACES, choice.inputs[0].value, devices, sizes, 0)
    weights = parts[1] if len(parts) > 1 else None
    mode = "mean" if weights is None else "sum"
    return F.embedding_bag(indices, parts[0], mode=mode, per_sample_weights=weights)


def part(
    whole: torch.Tensor, state: State, devices: tuple[int, ...], sizes: tuple[int, ...], seed: int
) -> torch.Tensor:
    """What a device holds: its shard; of a partial sum the whole times a weight, which add up to one over the axis."""
    out = whole
    for held, device, size in zip(state, devices, sizes, strict=True):
        if held >= 0:
            out = out.chunk(size, held)[device]
        elif held == PARTIAL:
            weights = torch.linspace(-1, 2 + seed, size, dtype=torch.float64)
            weights += (1 - weights.sum()) / size
            out = out * weights[device]
    return out.detach().clone()


def joined(parts: dict[tuple[int, ...], torch.Tensor], state: State, sizes: tuple[int, ...]) -> torch.Tensor:
    """The whole of what the devices hold; those that hold the same must agree."""
    rest = parts
    for axis in reversed(range(len(sizes))):
        merged = {}
        for before in itertools.product(*map(range, sizes[:axis])):
            along = [rest[(*before, device)] for device in range(sizes[axis])]
            if state[axis] >= 0:
                merged[before] = torch.cat(along, state[axis])
            elif state[axis] == PARTIAL:
                merged[before] = torch.stack(along).sum(0)
            else:
                assert all(torch.allclose(one, along[0]) for one in along)
                merged[before] = along[0]
        rest = merged
    return rest[()]


def own_ends(operator: Operator, choice: Choice) -> list[End]:
    """The ends of those inputs that are parameters."""
    return [end for value, end in zip(operator.reads, choice.inputs, strict=True) if value.is_parameter]


@pytest.mark.parametrize("sizes", [(2,), (4,), (2, 2)])
@pytest.mark.parametrize("name", CASES)
def test_parts_make_the_whole(name: str, sizes: tuple[int, ...]) -> None:
    function, tensors = CASES[name]
    forward = forward_of(Applied(function, tensors), ())
    (operator,) = (one for one in forward.operators if not one.is_constant)
    assert operator.is_known
    # The operator reads its tensors in the order of the call.
    whole_inputs = [tensor.clone().requires_grad_() for tensor in tensors]
    whole = function(*whole_inputs)
    gradient = torch.randn_like(whole)
    whole.backward(gradient)  # type: ignore[no-untyped-call]
    choices = choices_of(operator.loops, sizes)
    assert any({*choice.axes} & {*operator.loops.extents} for choice in choices)
    alone = {one.label for one in operator.loops.within}
    for choice in choices:
        if alone & {*choice.axes}:
            continue
        outputs: dict[tuple[int, ...], torch.Tensor] = {}
        gradients: list[dict[tuple[int, ...], torch.Tensor]] = [{} for _ in tensors]
        for devices in itertools.product(*map(range, sizes)):
            parts: list[Any] = [
                part(tensor, end.value, devices, sizes, seed).requires_grad_()
                for seed, (tensor, end) in enumerate(zip(tensors, own_ends(operator, choice), strict=True))
            ]
            given = list(parts)
            output = LOCAL[name](function, given, choice, devices, sizes) if name in LOCAL else function(*given)
            outputs[devices] = output.detach()
            output.backward(  # type: ignore[no-untyped-call]
                part(gradient, choice.outputs[0].gradient, devices, sizes, 0)
            )
            for place, one in enumerate(parts):
                gradients[place][devices] = one.grad
        text = f"{name}, {choice}"
        torch.testing.assert_close(joined(outputs, choice.outputs[0].value, sizes), whole.detach(), msg=text)
        for place, (tensor, end) in enumerate(zip(whole_inputs, own_ends(operator, choice), strict=True)):
            found = joined(gradients[place], end.gradient, sizes)
            torch.testing.assert_close(found, tensor.grad, msg=f"{text}, gradient {place}")


def test_views_name_the_dims_that_go_together() -> None:
    """Heads are the first part of a width, and batch and length the first of their product."""
    x = random(4, 8, 12)
    cases: list[tuple[Function, set[tuple[int, int]]]] = [
        (lambda x: x.view(4, 8, 3, 4), {(0, 0), (1, 1), (2, 2)}),
        (lambda x: x.view(32, 12), {(0, 0), (2, 1)}),
        (lambda x: x.view(4, 96), {(0, 0), (1, 1)}),
        (lambda x: x.reshape(8, 4, 12), {(0, 0), (2, 2)}),
        (lambda x: x.unsqueeze(1), {(0, 0), (1, 2), (2, 3)}),
        (lambda x: x.flatten(), {(0, 0)}),
    ]
    for function, wanted in cases:
        (operator,) = forward_of(Applied(function, [x]), ()).operators
        (before,), after = operator.loops.inputs, operator.loops.outputs[0]
        assert before is not None
        pairs = {(before.index(label), after.index(label)) for label in operator.loops.extents}
        assert pairs == wanted
        for label in operator.loops.extents:
            for size in (2, 4):
                if operator.loops.extents[label] % size == 0:
                    pieces = [piece.flatten() for piece in x.chunk(size, before.index(label))]
                    held = [piece.flatten() for piece in function(x).chunk(size, after.index(label))]
                    assert all(torch.equal(a, b) for a, b in zip(pieces, held, strict=True))


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (torch.erfinv, (4, 8)),
        (F.softmax, (4, 8)),
        (lambda x: x.softmax(0), ()),
        (lambda x: x.t(), (4,)),
        (lambda x: torch.swapaxes(x, axis0=0, axis1=1), (4, 8)),
        (lambda x: x.view(0, 5), (2, 0)),
        (lambda x: x.view(torch.float32), (4, 8)),
        (lambda x: x.view(torch.int64), (4, 8)),
        (lambda x: F.embedding_bag(PICKS, x, FIRST_PICKS), (4, 8)),
        (lambda x: torch.einsum("...i->i", x), (4, 8)),
        (lambda x: F.embedding(PICKS, x, max_norm=1.0), (4, 8)),
        (lambda x: F.embedding(PICKS, x, scale_grad_by_freq=True), (4, 8)),
        (lambda x: torch.embedding(x, PICKS), (4, 8)),
        (nn.InstanceNorm1d(8, track_running_stats=True, dtype=torch.float64), (4, 8, 5)),
        (lambda x: x.roll(3), (4, 8)),
        (lambda x: x.flip(()), (4, 8)),
    ],
)
def test_what_is_unknown_is_whole(function: Function, shape: tuple[int, ...]) -> None:
    """So is what a row does not know of its operator."""
    (operator,) = forward_of(Applied(function, [random(*shape)]), ()).operators
    assert not operator.is_known
    assert {choice.outputs[0].value for choice in choices_of(operator.loops, (2,))} == {(REPLICATED,)}


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.div(x, 2, rounding_mode="floor"),
        lambda x: x.float(),
        lambda x: x.to(torch.bfloat16),
        lambda x: x.nansum(0),
    ],
)
def test_summands_are_neither_rounded_nor_left_out(function: Function) -> None:
    """A NaN in one of two summands makes their sum NaN, which `nansum` leaves out as a whole."""
    (operator,) = forward_of(Applied(function, [random(4, 8)]), ()).operators
    assert operator.is_known
    assert not operator.loops.is_linear


def test_a_table_is_sharded_by_rows_where_devices_add_zeros() -> None:
    """Rows that a device does not have are zeros there; by columns it has a part of each."""
    table, indices = random(12, 8), torch.tensor([[1, 11, 5], [0, 7, 5]])
    (operator,) = forward_of(Applied(lambda x: F.embedding(indices, x), [table]), ()).operators
    by = {choice.axes[0]: choice for choice in choices_of(operator.loops, (4,))}
    assert by["v"].outputs[0].value == (PARTIAL,)
    assert by["v"].inputs[-1].value == (0,)
    assert by["j"].outputs[0].value == (2,)
    assert by["j"].inputs[-1].gradient == (1,)
    rows = [F.embedding(indices, table * (torch.arange(12) // 3 == device)[:, None]) for device in range(4)]
    torch.testing.assert_close(torch.stack(rows).sum(0), F.embedding(indices, table))


IN_PLACE = "sigmoid tanh exp log sqrt rsqrt square reciprocal abs sin cos round floor ceil neg".split()


@pytest.mark.parametrize("name", IN_PLACE)
def test_forms_in_place_have_the_loops_of_the_others(name: str) -> None:
    found = [
        forward_of(Applied(lambda x, name=own: getattr(x * 2, name)(), [random(4, 8)]), ()).operators[-1]
        for own in (name, f"{name}_")
    ]
    assert [one.kind for one in found] == [name, f"{name}_"]
    assert all(one.is_known for one in found)
    assert found[0].loops == found[1].loops


def test_products_of_several_are_contracted_in_pairs() -> None:
    """From left to right; a letter that the output has stays, as one does that a later operand has."""
    tensors = [random(4, 8), random(8, 3), random(3, 12)]
    cases = {"ij,jk,kl->il": 2.0 * (4 * 8 * 3 + 4 * 3 * 12), "ij,jk,kl->ijl": 2.0 * (4 * 8 * 3 + 4 * 8 * 3 * 12)}
    for equation, flops in cases.items():
        function = functools.partial(torch.einsum, equation)
        (operator,) = forward_of(Applied(function, tensors), ()).operators
        assert operator.loops.flops == flops


def test_classes_of_all_elements_need_all_of_them() -> None:
    for num_classes, is_known in ((-1, False), (4, True)):
        (operator, _) = forward_of(
            Applied(lambda x, n=num_classes: F.one_hot(PICKS, n) * x, [random(4, 4)]), ()
        ).operators
        assert operator.is_known == is_known


def test_shapes_that_are_lent_are_not_read() -> None:
    (operator,) = forward_of(Applied(lambda x, y: x.view_as(y), [random(4, 8), random(8, 4)]), ()).operators
    assert [value.shape for value in operator.reads] == [(4, 8)]
