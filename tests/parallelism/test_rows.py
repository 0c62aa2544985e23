"""Each sharding of each operator, run on parts of its tensors: output and gradients are those of the whole."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torch_xmesh.parallelism.loops import PARTIAL, REPLICATED, State, choices_of
from torch_xmesh.parallelism.operators import forward_of

Function = Callable[..., torch.Tensor]


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


CASES: dict[str, tuple[Function, list[torch.Tensor]]] = {
    "linear": (F.linear, [random(4, 8, 12), random(16, 12), random(16)]),
    "linear without a bias": (F.linear, [random(8, 4), random(12, 4)]),
    "matmul": (torch.matmul, [random(4, 8, 4, 12), random(4, 8, 12, 16)]),
    "matmul that broadcasts": (torch.matmul, [random(4, 8, 12), random(12, 8)]),
    "batched with one": (torch.matmul, [random(4, 1, 8, 4), random(8, 4, 12)]),
    "add": (torch.add, [random(4, 8), random(4, 8)]),
    "add that broadcasts": (torch.add, [random(4, 8, 12), random(8, 1)]),
    "minus": (lambda a, b: a - b, [random(4, 8), random(8)]),
    "add a number": (lambda a: a + 1.5, [random(4, 8)]),
    "times": (lambda a, b: a * b, [random(4, 8), random(4, 1)]),
    "times a number": (lambda a: a * 1.5, [random(4, 8)]),
    "gelu": (F.gelu, [random(4, 8)]),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (12,), w, b), [random(4, 8, 12), random(12), random(12)]),
    "softmax": (lambda x: x.softmax(-2), [random(4, 8, 12)]),
    "transpose": (lambda x: x.transpose(0, -1), [random(4, 8, 12)]),
    "permute": (lambda x: x.permute(2, 0, 1), [random(4, 8, 12)]),
}


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


@pytest.mark.parametrize("sizes", [(2,), (4,), (2, 2)])
@pytest.mark.parametrize("name", CASES)
def test_parts_make_the_whole(name: str, sizes: tuple[int, ...]) -> None:
    function, tensors = CASES[name]
    forward = forward_of(Applied(function, tensors), ())
    (operator,) = forward.operators
    assert operator.is_known
    # The operator reads its tensors in the order of the call.
    whole_inputs = [tensor.clone().requires_grad_() for tensor in tensors]
    whole = function(*whole_inputs)
    gradient = torch.randn_like(whole)
    whole.backward(gradient)  # type: ignore[no-untyped-call]
    choices = choices_of(operator.loops, sizes)
    assert len(choices) > 1
    for choice in choices:
        outputs: dict[tuple[int, ...], torch.Tensor] = {}
        gradients: list[dict[tuple[int, ...], torch.Tensor]] = [{} for _ in tensors]
        for devices in itertools.product(*map(range, sizes)):
            parts: list[Any] = [
                part(tensor, end.value, devices, sizes, seed).requires_grad_()
                for seed, (tensor, end) in enumerate(zip(tensors, choice.inputs, strict=True))
            ]
            if name == "linear" and any(label == "k" for label in choice.axes):
                first = all(device == 0 for device, label in zip(devices, choice.axes, strict=True) if label == "k")
                scaled = parts[2] if first else parts[2] * 1.0 - parts[2].detach()  # one device adds the bias
                output = function(*parts[:2], scaled)
            else:
                output = function(*parts)
            outputs[devices] = output.detach()
            output.backward(  # type: ignore[no-untyped-call]
                part(gradient, choice.output.gradient, devices, sizes, 0)
            )
            for place, one in enumerate(parts):
                gradients[place][devices] = one.grad
        text = f"{name}, {choice}"
        torch.testing.assert_close(joined(outputs, choice.output.value, sizes), whole.detach(), msg=text)
        for place, (tensor, end) in enumerate(zip(whole_inputs, choice.inputs, strict=True)):
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
        (before,), after = operator.loops.inputs, operator.loops.output
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
    ],
)
def test_what_is_unknown_is_whole(function: Function, shape: tuple[int, ...]) -> None:
    """So is what a row does not know of its operator."""
    (operator,) = forward_of(Applied(function, [random(*shape)]), ()).operators
    assert not operator.is_known
    assert [choice.output.value for choice in choices_of(operator.loops, (2,))] == [(REPLICATED,)]


@pytest.mark.parametrize(
    "function", [lambda x: torch.div(x, 2, rounding_mode="floor"), lambda x: x.float(), lambda x: x.to(torch.bfloat16)]
)
def test_summands_are_not_rounded(function: Function) -> None:
    (operator,) = forward_of(Applied(function, [random(4, 8)]), ()).operators
    assert operator.is_known
    assert not operator.loops.is_linear


def test_a_table_is_sharded_by_rows_where_devices_add_zeros() -> None:
    """Rows that a device does not have are zeros there; by columns it has a part of each."""
    table, indices = random(12, 8), torch.tensor([[1, 11, 5], [0, 7, 5]])
    (operator,) = forward_of(Applied(lambda x: F.embedding(indices, x), [table]), ()).operators
    by = {choice.axes[0]: choice for choice in choices_of(operator.loops, (4,))}
    assert by["v"].output.value == (PARTIAL,)
    assert by["v"].inputs[-1].value == (0,)
    assert by["j"].output.value == (2,)
    assert by["j"].inputs[-1].gradient == (1,)
    rows = [F.embedding(indices, table * (torch.arange(12) // 3 == device)[:, None]) for device in range(4)]
    torch.testing.assert_close(torch.stack(rows).sum(0), F.embedding(indices, table))


def test_shapes_that_are_lent_are_not_read() -> None:
    (operator,) = forward_of(Applied(lambda x, y: x.view_as(y), [random(4, 8), random(8, 4)]), ()).operators
    assert [value.shape for value in operator.reads] == [(4, 8)]
