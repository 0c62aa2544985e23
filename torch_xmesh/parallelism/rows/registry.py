"""Where rows are registered, and what they are given."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torch_xmesh.parallelism.loops import Labels, Loops


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor among a call's arguments.

    Attributes:
        index: position among the call's tensors.
    """

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class CallForm:
    """A call of an operator: arguments with a Tensor in the place of each tensor.

    Attributes:
        num_tensors: how many tensors are among its arguments.
        shapes: shapes of the tensors that it makes.
        function: what is called: a function, or the name of a method of the first argument.
    """

    name: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    num_tensors: int
    shapes: tuple[tuple[int, ...], ...]
    function: Any = None

    @functools.cached_property
    def text(self) -> str:
        """With its arguments, but for numbers that scale."""
        arguments = pytree.tree_map_only(float, lambda _: "float", (tuple(self.args), dict(self.kwargs)))
        return f"{self.name} {arguments}"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor that it makes, of the first if it makes several."""
        return self.shapes[0]

    @property
    def tensors(self) -> list[Tensor]:
        """All that are arguments themselves, or in a list that is one."""
        leaves = pytree.tree_leaves((tuple(self.args), dict(self.kwargs)))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def get(self, position: int, name: str, default: Any = None) -> Any:
        """An argument, by position or by name; torch takes "axis" for "dim" too."""
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, self.kwargs.get("axis", default) if name == "dim" else default)

    def tensor(self, position: int, name: str) -> Tensor:
        """ValueError where that argument is no tensor: the row does not fit the call."""
        found = self.get(position, name)
        if not isinstance(found, Tensor):
            raise ValueError(f"{self.name}: argument {name} is no tensor")
        return found

    def loops(self, inputs: Mapping[int, Labels], output: Labels, extents: Mapping[str, int], **more: Any) -> Loops:
        """The call's loops. `inputs` has the labels of the tensors that are read, by index; of tensors without an entry
        only shape or dtype is looked at. `output` has the labels of what is made, the same for each tensor if there are
        several. `more` has other fields of Loops."""
        reads = tuple(inputs.get(i) for i in range(self.num_tensors))
        return Loops(reads, (output,) * len(self.shapes), extents, **more)


Row = Callable[[CallForm], Loops]
rows: dict[str, Row] = {}
"""By an operator's name: ``torch.nn.functional.linear`` and ``torch.linear`` are both "linear", as is a method."""


def row(*names: str) -> Callable[[Row], Row]:
    """Registers the loops of operators. A row raises ValueError for a call that it does not know."""

    def register(function: Row) -> Row:
        for name in names:
            rows[name] = function
        return function

    return register


def labels_like(shape: Sequence[int], prefix: str = "d") -> Labels:
    """A label for each dim, numbered from the last: what broadcasting aligns has the same ones."""
    return tuple(f"{prefix}{len(shape) - 1 - i}" for i in range(len(shape)))


def extents_of(labels: Labels, shape: Sequence[int]) -> dict[str, int]:
    return {label: extent for label, extent in zip(labels, shape, strict=True) if label is not None and extent > 1}


def broadcast(tensor: Tensor, output: Labels, shape: Sequence[int]) -> Labels:
    """An operand's labels where its dims are aligned with the output's from the right; None where it is repeated."""
    offset = len(shape) - len(tensor.shape)
    if offset < 0:
        raise ValueError("an operand of more dims than the output")
    return tuple(
        output[offset + dim] if extent == shape[offset + dim] else None for dim, extent in enumerate(tensor.shape)
    )
