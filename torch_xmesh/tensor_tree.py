"""Lists and dicts of tensors, nested or not: their tensors in one order on every rank, by name."""

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement
from torch.utils import _pytree as pytree

from torch_xmesh.spec import Spec

Source = DTensor | Spec
_Path = tuple[Any, ...]


class TensorTree:
    """The tensors and specs of a nested list, tuple or dict, sorted by name: the order of a dict does not matter.

    What is neither a tensor nor a container is passed through; its name and type are among the ``entries``.

    Attributes:
        tensors: DTensors and specs, in the order that is the same on every rank.
        labels: one name per tensor for error texts: ``['layer']['weight']``; empty for a plain list, whose tensors are
            numbered.
        places: position of each tensor among the container's leaves.
        entries: what ranks compare beside the tensors: (what, value) in words.

    Raises:
        ValueError: a plain tensor, a dict with keys that are not strings or integers, or a tensor in a container of
            another kind.
    """

    def __init__(self, xs: Any) -> None:
        self._root = _as_container(xs)
        if isinstance(self._root, DTensor | Spec) or pytree.tree_structure(self._root).is_leaf():
            raise ValueError(f"expected a list or a dict of tensors, got {type(xs).__name__}")
        self._found, self._structure = pytree.tree_flatten_with_path(self._root)
        for path, leaf in self._found:
            _check_leaf(path, leaf)
        order = sorted(range(len(self._found)), key=lambda i: [_sort_key(key) for key in self._found[i][0]])
        self.places = [i for i in order if isinstance(self._found[i][1], DTensor | Spec)]
        self.tensors: list[Source] = [self._found[i][1] for i in self.places]
        is_list = isinstance(self._root, list | tuple) and not hasattr(self._root, "_fields")
        is_flat = is_list and len(self.places) == len(self._root) == len(self._found)
        self.labels: tuple[str, ...] = () if is_flat else tuple(_name(self._found[i][0]) for i in self.places)
        entries = [] if is_flat else [(f"entry {_name(self._found[i][0])}", _kind(self._found[i][1])) for i in order]
        self.entries: tuple[tuple[str, str], ...] = (("container", "a list" if is_list else "a dict"), *entries)

    def label(self, index: int) -> str:
        """The name of a tensor for error texts."""
        return self.labels[index] if self.labels else str(index)

    def spread(self, values: Any, is_value: Callable[[Any], bool], what: str, expected: str) -> list[Any]:
        """One of ``values`` per tensor: one for all, or a container shaped like the tensors', as deep as one likes.

        A value that stands where the tensors have a list or dict is for all tensors in it. Nothing need be said for
        entries that are no tensors. ValueError names the key that is in one of them only.
        """
        values = values if is_value(values) else _as_container(values)
        given = dict(pytree.tree_flatten_with_path(values, is_leaf=is_value)[0])
        both_lists = () not in given and isinstance(values, list | tuple) and isinstance(self._root, list | tuple)
        if both_lists and len(values) != len(self._root):
            raise ValueError(f"{what} has {len(values)} entries, expected {len(self._root)}")
        out = []
        for i, place in enumerate(self.places):
            path = self._found[place][0]
            known = next((path[:n] for n in range(len(path) + 1) if path[:n] in given), None)
            if known is None:
                raise ValueError(f"{what} and the tensors have different keys: {_name(path)} is in one of them only")
            if not is_value(given[known]):
                raise ValueError(f"{what} of tensor {self.label(i)}: expected {expected}, got {given[known]!r}")
            out.append(given[known])
        known_paths = {path[:n] for path, _ in self._found for n in range(len(path) + 1)}
        for path in given:
            if path not in known_paths:
                raise ValueError(f"{what} and the tensors have different keys: {_name(path)} is in one of them only")
        return out

    def rebuild(self, results: Sequence[Any]) -> Any:
        """The container as it was given, with ``results`` in place of the tensors."""
        leaves = [leaf for _, leaf in self._found]
        for place, result in zip(self.places, results, strict=True):
            leaves[place] = result
        return pytree.tree_unflatten(leaves, self._structure)


def is_placements(value: Any) -> bool:
    """One placement per mesh axis, and not a list of such."""
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and all(isinstance(placement, Placement) for placement in value)
    )


def _as_container(xs: Any) -> Any:
    """A mapping or sequence of a class that pytree does not know, as a dict or list."""
    if isinstance(xs, Mapping) and pytree.tree_structure(xs).is_leaf():
        return dict(xs)
    if isinstance(xs, Sequence) and not isinstance(xs, str | bytes) and pytree.tree_structure(xs).is_leaf():
        return list(xs)
    return xs


def _check_leaf(path: _Path, leaf: Any) -> None:
    for key in path:
        if isinstance(key, pytree.MappingKey) and not _is_plain(key.key):
            raise ValueError(f"the key {key.key!r}: expected strings, integers or tuples of them")
    if isinstance(leaf, DTensor | Spec):
        return
    if isinstance(leaf, torch.Tensor):
        raise ValueError(f"tensor {_name(path)}: expected a DTensor or an xm.Spec, got {type(leaf).__name__}")
    if _hides_tensor(leaf):
        raise ValueError(
            f"{_name(path)} is a {type(leaf).__name__} with tensors: expected a list, a tuple or a dict, "
            "or a class registered with torch.utils._pytree"
        )


def _is_plain(key: Any) -> bool:
    return isinstance(key, str | int) or (isinstance(key, tuple) and all(_is_plain(part) for part in key))


def _hides_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_hides_tensor(held) for held in value.values())
    if isinstance(value, Sequence | Set) and not isinstance(value, str | bytes):
        return any(_hides_tensor(held) for held in value)
    return isinstance(value, torch.Tensor | Spec)


def _kind(leaf: Any) -> str:
    return "a tensor" if isinstance(leaf, DTensor | Spec) else type(leaf).__qualname__


def _name(path: _Path) -> str:
    """``['layer'][0]``; an integer key of a dict as ``{0}``, so that no list and dict have the same names."""
    return "".join(
        f"{{{key.key!r}}}" if isinstance(key, pytree.MappingKey) and not isinstance(key.key, str) else str(key)
        for key in path
    )


def _sort_key(key: Any) -> tuple[str, int, str]:
    if isinstance(key, pytree.SequenceKey):
        return ("", key.idx, "")
    if isinstance(key, pytree.MappingKey):
        return ("int", int(key.key), "") if isinstance(key.key, int) else (type(key.key).__name__, 0, repr(key.key))
    return ("", 0, str(key))
