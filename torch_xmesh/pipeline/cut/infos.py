"""What a value is at any number of samples: shapes, dtypes and gradients, joined from runs at several.

A dim that grows by the same step from n samples to n + 1 and n + 2 is ``per_sample * samples + fixed``.
"""

import dataclasses
from typing import Any

import torch
from torch.utils import _pytree as pytree


@dataclasses.dataclass(frozen=True)
class Affine:
    """An integer ``per_sample * samples + fixed``."""

    per_sample: int
    fixed: int

    def at(self, samples: int) -> int:
        return self.per_sample * samples + self.fixed


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """A tensor at any number of samples."""

    sizes: tuple[Affine, ...]
    dtype: torch.dtype
    requires_grad: bool

    def shape(self, samples: int) -> tuple[int, ...]:
        return tuple(size.at(samples) for size in self.sizes)

    @property
    def batch_dim(self) -> int | None:
        """The one dim that grows with the samples and has nothing else in it, or None."""
        growing = [dim for dim, size in enumerate(self.sizes) if size.per_sample]
        return growing[0] if len(growing) == 1 and self.sizes[growing[0]].fixed == 0 else None


@dataclasses.dataclass(frozen=True)
class Constant:
    """A value that is no tensor and the same for every batch size."""

    value: Any


@dataclasses.dataclass(frozen=True)
class Opaque:
    """A value that is no tensor, no integer, and depends on the batch size."""


Leaf = TensorInfo | Constant | Affine | Opaque


@dataclasses.dataclass(frozen=True)
class NodeInfo:
    """A node's value: the leaves of a pytree."""

    leaves: tuple[Leaf, ...]
    structure: pytree.TreeSpec

    @property
    def is_leaf(self) -> bool:
        return self.structure.is_leaf()

    @property
    def has_tensors(self) -> bool:
        return any(isinstance(leaf, TensorInfo) for leaf in self.leaves)


class NotLinearError(Exception):
    """A size is no linear function of the number of samples."""


def describe(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """A value's leaves, tensors as (shape, dtype, requires_grad), and its structure: what `join` takes."""
    leaves, structure = pytree.tree_flatten(value)
    return [
        (tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in leaves
    ], structure


def join(runs: list[tuple[list[Any], pytree.TreeSpec]], samples: int) -> NodeInfo:
    """What is common to descriptions made with `samples`, `samples` + 1 and `samples` + 2 samples (or with `samples`
    only).

    Raises:
        NotLinearError: a size is no linear function of the number of samples, or the structures differ.
    """
    if any(structure != runs[0][1] for _, structure in runs):
        raise NotLinearError
    return NodeInfo(
        tuple(_join_leaf(list(leaf), samples) for leaf in zip(*(flat for flat, _ in runs), strict=True)), runs[0][1]
    )


def _join_leaf(seen: list[Any], samples: int) -> Leaf:
    if isinstance(seen[0], tuple) and len(seen[0]) == 3 and isinstance(seen[0][1], torch.dtype):
        shapes = [shape for shape, _, _ in seen]
        if any(len(shape) != len(shapes[0]) for shape in shapes):
            raise NotLinearError
        return TensorInfo(tuple(_line(list(dim), samples) for dim in zip(*shapes, strict=True)), seen[0][1], seen[0][2])
    if all(type(value) is type(seen[0]) and bool(value == seen[0]) for value in seen):
        return Constant(seen[0])
    if all(type(value) is int for value in seen):
        return _line(seen, samples)
    return Opaque()


def _line(values: list[int], samples: int) -> Affine:
    if len(values) == 1:
        return Affine(0, values[0])
    step = values[1] - values[0]
    if len(values) > 2 and values[2] - values[1] != step:
        raise NotLinearError
    return Affine(step, values[0] - step * samples)
