"""What a forward is taken for: operators, what they read, and what they change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from library_arguments import ARGUMENTS, made
from shardings import shard
from torch import nn
from torch.nn import functional as F

from torch_xmesh.parallelism.loops import choices_of
from torch_xmesh.parallelism.operators import Forward, Operator, Recorded
from torch_xmesh.parallelism.recorded_forwards import forward_of, recorded_turns


class Unread(nn.Module):
    """Computes what nobody reads, and changes in place what only that has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.aside = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        F.dropout(self.aside(x) * 2, 0.5, self.training)
        hidden = self.own(x) * 3
        seen = hidden[0]
        hidden.relu_()
        _ = seen + 1
        _, _ = hidden.sigmoid().chunk(2)
        self.norm(self.aside(x).tanh())
        out: torch.Tensor = hidden * 2
        return out


def test_what_nobody_reads_is_left_out() -> None:
    """But for what draws random numbers, in either mode, and what changes buffers; names are those of both modes."""
    model = Unread()
    (first, again), other = recorded_turns(model, (torch.zeros(4, 8),), None, 2)
    assert isinstance(other, Recorded)
    names = [one.name for one in first.forward.operators]
    assert names == [one.name for one in again.forward.operators]
    aside, own = ["aside.linear", "mul", "dropout"], ["own.linear", "mul.2", "relu_"]
    norm = ["aside.linear.2", "tanh", "norm.add_", "norm.batch_norm"]
    assert names == [*aside, *own, *norm, "mul.3"]
    assert [one.name for one in other.forward.operators] == [name for name in names if name != "norm.add_"]


@pytest.mark.parametrize("name", ARGUMENTS)
def test_models_nobody_here_wrote(name: str) -> None:
    """All that they compute from parameters has rows; the model, its caches' switch too, stays as it is; on meta the
    same is found."""
    model, args, kwargs = made(name)
    state = {key: (tuple(one.shape), one.dtype) for key, one in model.state_dict().items()}
    config: Any = getattr(model, "config", None)
    switches = copy.deepcopy(config)
    forward = forward_of(model, args, kwargs)
    assert [one.name for one in forward.operators if not one.is_known and not one.is_constant] == []
    assert {key: (tuple(one.shape), one.dtype) for key, one in model.state_dict().items()} == state
    if config is not None:
        assert config.to_dict() == switches.to_dict()
    read = {value.name for one in forward.operators for value in one.reads if value.is_trained}
    assert read <= {name for name, _ in model.named_parameters()}
    assert len(read) > 0.9 * len(list(model.parameters()))
    on_meta: Any = copy.deepcopy(model).to("meta")
    if hasattr(on_meta, "tie_weights"):
        on_meta.tie_weights()
    assert forward_of(on_meta, args, kwargs) == forward
    for axes in ([(4, 1e-5, 1e-9)], [(2, 1e-5, 1e-9), (4, 1e-6, 1e-10)]):
        found = shard(forward, axes, "ring")
        assert 0 < found.cost < 1


class Of(nn.Module):
    """A function of a parameter and the arguments."""

    def __init__(self, function: Callable[..., Any], *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(*shape))
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(self.weight, *args)


def found(function: Callable[..., Any], *args: Any) -> Forward:
    return forward_of(Of(function, 4, 8), args)


def kinds(forward: Forward) -> list[str]:
    return [one.kind for one in forward.operators]


def makers(operator: Operator) -> list[int | None]:
    return [value.maker for value in operator.reads]


def test_several_results_are_one_decision() -> None:
    forward = found(lambda w: [one * 2 for one in w.chunk(2, -1)])
    assert kinds(forward) == ["chunk", "mul", "mul"]
    assert [value.name for value in forward.operators[0].makes] == ["chunk[0]", "chunk[1]"]
    assert [makers(one) for one in forward.operators[1:]] == [[0], [0]]
    assert len(forward.outputs) == 2


def test_what_changes_in_place_is_read_afterwards() -> None:
    def function(weight: torch.Tensor) -> torch.Tensor:
        x = weight * 2
        x.add_(1)
        x[:, 0] = 3
        return x.exp()

    forward = found(function)
    assert kinds(forward) == ["mul", "add_", "__setitem__", "exp"]
    assert [makers(one) for one in forward.operators] == [[None], [0], [1], [2]]
    assert all(one.is_known for one in forward.operators)
    setitem = forward.operators[2]
    assert {choice.axes for choice in choices_of(setitem.loops, (4,))} == {("d1",), ("~",), ("-",)}


def filled(weight: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(4, 8)
    out[:, :4].copy_(weight[:, :4] * 2)
    return out.exp()


def through_a_view(weight: torch.Tensor) -> torch.Tensor:
    x = weight * 2
    x.view(32).add_(1)
    return x.exp()


def returned(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = weight * 2
    return x, x.view(32).add_(1)


def detached(weight: torch.Tensor) -> torch.Tensor:
    x = weight * 2
    x.detach().add_(1)
    return x.exp()


def of_another_shape(weight: torch.Tensor) -> torch.Tensor:
    x = weight * 2
    x.view_as(weight).add_(1)
    return x.exp()


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (filled, ["zeros", "mul", "__setitem__", "exp"]),
        (through_a_view, ["mul", "view", "clone", "add_", "write_view", "exp"]),
        (returned, ["mul", "view", "clone", "add_", "write_view", "view"]),
    ],
)
def test_changes_that_are_seen_under_another_name_go_through_what_is_viewed(
    function: Callable[..., Any], expected: list[str]
) -> None:
    forward = found(function)
    assert [kind for kind in kinds(forward) if kind != "getitem" and kind != "__getitem__"] == expected
    assert all(value.requires_grad for value in forward.outputs)


@pytest.mark.parametrize("function", [detached, of_another_shape])
def test_changes_that_are_seen_under_another_name_are_refused(function: Callable[..., Any]) -> None:
    """Once they are of parameters: stages could have them apart."""
    with pytest.raises(ValueError, match="add_ in the model itself changes memory in place that is read under"):
        found(function)


class Remembers(nn.Module):
    """Adds what it has written into its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.memory: torch.Tensor
        self.register_buffer("memory", torch.zeros(4, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.memory[:] = self.a(x).detach()
        out: torch.Tensor = x + self.memory
        return out


def test_what_is_changed_is_what_the_changer_makes() -> None:
    """A view that nobody looks behind, a buffer, and what is no parameter's."""
    behind = found(lambda w: F.relu((w * 2).view(32), inplace=True).exp())
    assert all(one.is_known for one in behind.operators)
    operators = {one.kind: one for one in forward_of(Remembers(), (torch.zeros(4, 8),)).operators}
    assert set(operators["add"].reads) > set(operators["__setitem__"].makes)

    def masked(weight: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(4, 8)
        mask[:, :3].fill_(1)
        return weight * mask

    operators = {one.kind: one for one in found(masked).operators}
    assert operators["fill_"].is_constant
    assert operators["__setitem__"].is_constant
    assert set(operators["__setitem__"].makes) & set(operators["mul"].reads)


def test_operations_of_what_has_no_row_are_counted() -> None:
    forward = found(lambda w: torch.linalg.multi_dot([w, w.t(), w]).sinc())
    unknown = {one.kind: one.loops.flops for one in forward.operators if not one.is_known}
    assert unknown == {"linalg_multi_dot": 2 * (4 * 8 * 4) * 2, "sinc": 0}


def test_constants_are_whole() -> None:
    """What follows from arguments alone is computed by every device; what parameters are behind is not."""
    forward = found(lambda w, x: (x.cos() > 0) * w + x.sin(), torch.randn(4, 8))
    constant = [one.kind for one in forward.operators if one.is_constant]
    assert constant == ["cos", "gt", "sin"]
    assert not forward.operators[-1].is_constant
    image = forward_of(nn.Conv2d(3, 4, 3), (torch.zeros(2, 3, 8, 8),))
    assert not image.operators[0].is_constant


def test_random_numbers_are_told() -> None:
    forward = found(lambda w: F.dropout(w, 0.5) * 2)
    assert [one.draws for one in forward.operators] == [True, False]
    noisy = found(lambda w, x: w * (x + torch.randn_like(x)), torch.randn(4, 8))
    assert not any(one.is_constant for one in noisy.operators), "drawn once, not by every stage that reads it"


def test_a_module_that_cannot_be_looked_into_is_called_as_one() -> None:
    """And all of its class; a module without it that fails is no module's fault."""

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.linear(x)
            return y * 2 if float(y.sum()) > 0 else y * 3

    forward = forward_of(nn.Sequential(nn.Linear(8, 8), Looks(), Looks()), (torch.randn(4, 8),))
    assert kinds(forward) == ["linear", "Looks", "Looks"]
    assert [value.name for value in forward.operators[1].reads] == ["0.linear", "1.linear.weight", "1.linear.bias"]
    assert [one.is_known for one in forward.operators] == [True, False, False]
    with pytest.raises(ValueError, match="Looks cannot be recorded|reads values"):
        forward_of(Looks(), (torch.randn(4, 8),))

    class Breaks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError("always")

    with pytest.raises(ValueError, match=r"cannot be recorded.*ArithmeticError: always"):
        forward_of(nn.Sequential(nn.Linear(8, 8), Breaks()), (torch.randn(4, 8),))
