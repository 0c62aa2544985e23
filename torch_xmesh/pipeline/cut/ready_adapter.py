"""How a ready stage module is called."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree


@dataclasses.dataclass(frozen=True)
class ReadyAdapter:
    """How a ready stage module is called: input leaves into arguments, the result into output leaves.

    Attributes:
        leaves: the leaves of (args, kwargs). An int is the position among the inputs, a tuple (value,) a constant.
        structure: the pytree structure of (args, kwargs).
        result: the structure that the module must return.
        tensor_positions: which of the result's leaves are the stage's outputs.
        changed: positions of the inputs that the module changes in place: it gets copies.
    """

    leaves: tuple[Any, ...]
    structure: pytree.TreeSpec
    result: pytree.TreeSpec
    tensor_positions: tuple[int, ...]
    changed: frozenset[int] = frozenset()

    @functools.cached_property
    def _is_plain(self) -> bool:
        """Whether the inputs, as they come, are the module's positional arguments."""
        in_order = self.leaves == tuple(range(len(self.leaves))) and not self.changed
        return in_order and self.structure == pytree.tree_structure((self.leaves, {}))

    def run(self, stage: int, module: nn.Module, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        if self._is_plain:
            result = module(*inputs)
            if isinstance(result, torch.Tensor) and self.tensor_positions == (0,) and self.result.is_leaf():
                return (result,)
        else:
            given = [tensor.clone() if position in self.changed else tensor for position, tensor in enumerate(inputs)]
            flat = [given[leaf] if isinstance(leaf, int) else leaf[0] for leaf in self.leaves]
            args, kwargs = pytree.tree_unflatten(flat, self.structure)
            result = module(*args, **kwargs)
        leaves, structure = pytree.tree_flatten(result)
        if structure != self.result:
            raise ValueError(
                f"stage {stage} ({type(module).__name__}) returned the structure {structure}, its example run "
                f"returned {self.result}"
            )
        return tuple(leaves[position] for position in self.tensor_positions)
