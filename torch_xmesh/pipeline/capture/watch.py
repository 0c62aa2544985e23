"""What the operators of a forward did: drew random numbers, sized results by values, carried samples from one tensor to
another."""

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torch_xmesh.pipeline.capture.recording import memory_of
from torch_xmesh.pipeline.capture.writes import written_by

_SHAPE_ONLY = frozenset(
    "zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty new_empty_strided".split()
)
"""Operators that look at no entry of the tensors that they are given."""


class OperatorWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes of the operators that run inside, below autograd.

    Attributes:
        is_random: one has drawn random numbers since `begin`.
        is_sized_by_values: the size of a result followed from values, since `begin`.
        written: keys of the storages that were written to since `begin`.
        leaf: the module that runs and is not looked into, None between such modules.
    """

    def __init__(self, watched: Iterable[torch.Tensor] = ()) -> None:
        """`watched`: the model's buffers, which operators may write to and say nothing of it."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._watched = set(map(id, watched))
        self._memories: set[int] = set()
        self._makers: dict[int, str] = {}
        self.leaf: str | None = None
        self._alive: list[torch.Tensor] = []  # or the keys of their storages are used again
        self.begin()

    def begin(self) -> None:
        """Forgets what ran, but for who has samples."""
        self.is_random = self.is_sized_by_values = False
        self.written: set[int] = set()

    def mark(self, tensors: list[torch.Tensor]) -> None:
        """They follow from the samples of the batch."""
        self._memories.update(map(memory_of, tensors))
        self._alive += tensors

    def leaf_of(self, tensor: torch.Tensor) -> str | None:
        """The module inside of which a tensor was made, if that was one."""
        return self._makers.get(memory_of(tensor))

    def follows_from_samples(self, tensor: torch.Tensor) -> bool:
        """Whether operators have carried something of a marked tensor to this one."""
        return memory_of(tensor) in self._memories

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.is_random = self.is_random or torch.Tag.nondeterministic_seeded in func.tags
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        name = func.overloadpacket.__name__
        if torch.Tag.dynamic_output_shape in func.tags:
            self.is_sized_by_values = self.is_sized_by_values or name != "index" or any(map(_is_mask, given[1:]))
        made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        written = written_by(func, args, kwargs, self._watched)
        self.written.update(map(memory_of, written))
        if name not in _SHAPE_ONLY and any(map(self.follows_from_samples, given)):
            self.mark(made + written)
        if self.leaf is not None:
            self._alive += made
            for tensor in made:
                self._makers[memory_of(tensor)] = self.leaf
        return result


def _is_mask(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.bool, torch.uint8)


class RandomStates:
    """Whether random numbers that are not torch's were drawn."""

    def __init__(self) -> None:
        self._known = self._now()

    def _now(self) -> Any:
        _, keys, *rest = np.random.get_state()  # models draw from the global one
        return random.getstate(), np.asarray(keys).tobytes(), rest

    def have_changed(self) -> bool:
        """Since this was made, or since the last `forget`."""
        return bool(self._now() != self._known)

    def forget(self) -> None:
        """What was drawn till now does not count."""
        self._known = self._now()
