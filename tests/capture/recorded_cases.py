"""A model that does anything between two modules, and the comparison of its stages with it: for tests of recording."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from torch_xmesh.pipeline.capture.recorded import RecordedModel
from torch_xmesh.pipeline.capture.recording import Recording
from torch_xmesh.pipeline.cut.partition import Partition, partition, split_at


class Leaf(nn.Module):
    """Calls a function with its linear layer and what it is given."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.run = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self.linear, *args, **kwargs)


def linear_of(linear: nn.Linear, x: torch.Tensor) -> Any:
    return linear(x)


class Model(nn.Module):
    """`first`, what `between` does with both, `second`; a stage starts at `second`."""

    def __init__(self, between: Callable[..., Any], first: Any = linear_of, second: Any = linear_of) -> None:
        super().__init__()
        self.first, self.second = Leaf(first), Leaf(second)
        self.between = between
        self.register_buffer("table", torch.ones(4))
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.between(self, *args, **kwargs)

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def cut(model: nn.Module, *args: Any) -> Partition:
    return partition(model, args, None, split_at("second"))


def check(model: nn.Module, batches: Any, text: str = "") -> None:
    """The stages, cut with the first batch, give the model's output and gradients for each."""
    reference = copy.deepcopy(model)
    parts = cut(model, *batches[0])
    for batch in batches:
        for one in (model, reference):
            one.zero_grad()
        torch.manual_seed(1)
        made = parts.run(*copy.deepcopy(batch))
        torch.manual_seed(1)
        expected = reference(*copy.deepcopy(batch))
        assert torch.equal(made, expected), text
        assert made.requires_grad == expected.requires_grad
        made.sum().backward()
        expected.sum().backward()
        for (name, mine), other in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert (mine.grad is None) == (other.grad is None), f"{text}: {name}"
            assert mine.grad is None or other.grad is None or torch.equal(mine.grad, other.grad), f"{text}: {name}"


def rows(*values: float) -> torch.Tensor:
    return torch.tensor([[value] * 4 for value in values])


ROWS = [(rows(1.0, 2.0),), (rows(-1.0, 3.0),), (rows(-1.0, -2.0),), (rows(5.0, 1.0, -1.0),), (rows(1.0, 2.0),)]


def record_opened(
    model: nn.Module, args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor] | None = None
) -> Recording:
    """A forward of which all modules that hold others are looked into."""
    arguments = args, dict(kwargs or {})
    tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
    recorded = RecordedModel(
        model,
        arguments,
        names=[f"input{i}" for i in range(len(tensors))],
        opened=frozenset(name for name, one in model.named_modules() if any(True for _ in one.children())),
        batch=(),
        device=torch.device("cpu"),
        opens_functions=True,
        closes_what_fails=True,
    )
    return recorded.record(tensors, None)
