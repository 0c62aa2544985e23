"""What stage graphs know without being told by another stage: integers and constants that follow from the sizes of
the model's inputs."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from torch_xmesh.pipeline.cut.propagate import Affine, Constant, NodeInfo, TensorInfo

_LITERALS = (
    int,
    float,
    bool,
    complex,
    str,
    type(None),
    torch.dtype,
    torch.device,
    torch.Size,
    torch.layout,
    torch.memory_format,
)
_Read = Callable[[Mapping[fx.Node, NodeInfo]], Any]


class OtherSizesError(ValueError):
    """The stages do not hold for inputs of these sizes; the message says why."""


def is_literal(info: NodeInfo) -> bool:
    """Whether a node's value is made of constants that a graph can hold."""
    return all(isinstance(leaf, Constant) and isinstance(leaf.value, _LITERALS) for leaf in info.leaves)


class Numbers:
    """Cells that stage graphs read as they run, filled for the sizes of the inputs that are under way. One thread."""

    def __init__(self, info: Mapping[fx.Node, NodeInfo]) -> None:
        self._now: Mapping[fx.Node, NodeInfo] = info
        self._cells: list[tuple[list[Any], _Read]] = []

    def constant(self, node: fx.Node) -> Callable[[], Any]:
        """What a node without tensors is, for a graph to call."""
        cell = self._cell(lambda info: _constant(info, node))

        def number() -> Any:
            return cell[0]

        return number

    def from_size(self, node: fx.Node, reference: fx.Node, index: int, dim: int) -> Callable[[int], int]:
        """The integer that `node` is, of the size of a tensor (leaf `index` of `reference`) in dim `dim`."""

        def read(info: Mapping[fx.Node, NodeInfo]) -> tuple[int, int, int]:
            value, tensor = info[node].leaves[0], info[reference].leaves[index]
            assert isinstance(tensor, TensorInfo)
            size = tensor.sizes[dim] if dim < len(tensor.sizes) else Affine(0, 0)
            if isinstance(value, Constant):
                value = Affine(0, value.value)
            if not isinstance(value, Affine) or size.per_sample <= 0 or size.fixed != 0:
                raise OtherSizesError(f"node {node.name}{_at(node)} follows otherwise from the number of samples")
            return size.per_sample, value.per_sample, value.fixed

        cell = self._cell(read)

        def number(size: int) -> int:
            entries, per_sample, fixed = cell[0]
            return size // entries * per_sample + fixed  # type: ignore[no-any-return]

        return number

    def rebuilder(self, node: fx.Node) -> Callable[..., Any]:
        """Makes a node's value, a structure of tensors and constants, out of the tensors."""
        structure = self._now[node].structure

        def read(info: Mapping[fx.Node, NodeInfo]) -> list[tuple[Any, ...]]:
            if info[node].structure != structure:
                raise OtherSizesError(f"node {node.name}{_at(node)} returns another structure")
            return [() if isinstance(leaf, TensorInfo) else (_value(node, leaf),) for leaf in info[node].leaves]

        cell = self._cell(read)

        def rebuild(*tensors: torch.Tensor) -> Any:
            remaining = iter(tensors)
            return pytree.tree_unflatten([leaf[0] if leaf else next(remaining) for leaf in cell[0]], structure)

        return rebuild

    def check(self, info: Mapping[fx.Node, NodeInfo]) -> None:
        """Raises OtherSizesError where the graphs do not hold for what the nodes are now."""
        for _, read in self._cells:
            read(info)

    def use(self, info: Mapping[fx.Node, NodeInfo]) -> None:
        """From now on the graphs run where the nodes are `info`, which has passed :meth:`check`."""
        if info is not self._now:
            self._now = info
            for cell, read in self._cells:
                cell[0] = read(info)

    def _cell(self, read: _Read) -> list[Any]:
        cell = [read(self._now)]
        self._cells.append((cell, read))
        return cell


def _constant(info: Mapping[fx.Node, NodeInfo], node: fx.Node) -> Any:
    return pytree.tree_unflatten([_value(node, leaf) for leaf in info[node].leaves], info[node].structure)


def _value(node: fx.Node, leaf: Any) -> Any:
    if not isinstance(leaf, Constant):
        raise OtherSizesError(f"node {node.name}{_at(node)} is no constant: it depends on the number of samples")
    return leaf.value


def _at(node: fx.Node) -> str:
    return f" at {node.meta['source']}" if node.meta.get("source") else ""
