"""Which of the tensors that it is given an operator writes to."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

_MOST_ELEMENTS = 1 << 26

_known: dict[Any, tuple[int, ...]] = {}
"""Which of its tensors an operator writes to, by what it is and which numbers it is given."""


def written_by(func: Any, args: Any, kwargs: Any, watched: set[int]) -> list[torch.Tensor]:
    """The tensors that a call of an operator writes to: those that its schema names, and where it names none those
    among `watched` (ids of tensors) that have other values after a run on stand-ins. Batch norm's running statistics
    are written though its schema says nothing of it."""
    if func._schema.is_mutable:
        return _by_schema(func, args, kwargs)
    leaves, structure = pytree.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if not any(id(tensor) in watched for tensor in tensors) or _gives_views(func):
        return []
    others = tuple(repr(leaf) for leaf in leaves if not isinstance(leaf, torch.Tensor))
    kinds = tuple((tensor.dtype, id(tensor) in watched) for tensor in tensors)
    key = func, str(structure), others, kinds
    if key not in _known:
        _known[key] = _by_a_run(
            func, leaves, structure, [place for place, tensor in enumerate(tensors) if id(tensor) in watched]
        )
    return [tensors[place] for place in _known[key]]


def _by_schema(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found += [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return found


def _gives_views(func: Any) -> bool:
    return any(returned.alias_info is not None for returned in func._schema.returns)


def _by_a_run(func: Any, leaves: Sequence[Any], structure: pytree.TreeSpec, places: Sequence[int]) -> tuple[int, ...]:
    """Those of these places whose tensors have other values after a run on stand-ins; none where the operator cannot be
    run, or the tensors are too large."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    largest = max(tensors, key=lambda tensor: tensor.numel())
    samples = largest.shape[0] if largest.dim() > 1 and largest.numel() > _MOST_ELEMENTS else None
    if sum(tensor.numel() for tensor in tensors if tensor.dim() < 2 or tensor.shape[0] != samples) > _MOST_ELEMENTS:
        return ()
    made = [_filled(tensor, samples) for tensor in tensors]
    before = [made[place].clone() for place in places]
    given = iter(made)
    args, kwargs = pytree.tree_unflatten(
        [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], structure
    )
    try:
        with torch.random.fork_rng(devices=[]):
            func(*args, **kwargs)
    except Exception:
        return ()
    pairs = zip(places, before, strict=True)
    return tuple(place for place, old in pairs if not torch.equal(made[place], old))


def _filled(like: torch.Tensor, samples: int | None) -> torch.Tensor:
    """Numbers in the same shape, fewer of as many samples; ones where numbers may be indices."""
    shape = [2, *like.shape[1:]] if samples is not None and like.dim() > 1 and like.shape[0] == samples else like.shape
    if not like.dtype.is_floating_point:
        return torch.ones(shape, dtype=like.dtype, device="cpu")
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float64, device="cpu") % 7 / 8 + 0.125).view(shape).to(like.dtype)
