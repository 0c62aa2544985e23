"""What is wrong with arguments that are not built like the example's, in words."""

import difflib
from typing import Any

from torch.utils import _pytree as pytree


def describe_mismatch(found: pytree.TreeSpec, expected: pytree.TreeSpec) -> str:
    """The first difference of two structures of (args, kwargs)."""
    (args, kwargs), (known_args, known) = (_skeleton(found), _skeleton(expected))
    takes = [f"{len(known_args)} positional" if known_args else "", *(repr(name) for name in known)]
    takes_text = f"the example arguments were {' and '.join(filter(None, takes)) or 'none'}"
    if unknown := [name for name in kwargs if name not in known]:
        close = difflib.get_close_matches(unknown[0], list(known), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        return f"unknown argument {unknown[0]!r}: {takes_text}{hint}"
    if len(args) != len(known_args):
        hint = "; the target goes by its name: target=y" if len(args) > len(known_args) else ""
        return f"{len(args)} positional arguments: {takes_text}{hint}"
    if missing := [name for name in known if name not in kwargs]:
        return f"argument {missing[0]!r} is missing: {takes_text}"
    pairs = [(f"args[{index}]", *pair) for index, pair in enumerate(zip(args, known_args, strict=True))]
    pairs += [(f"kwargs[{name!r}]", kwargs[name], known[name]) for name in known]
    for where, given, other in pairs:
        if pytree.tree_structure(given) != pytree.tree_structure(other):
            return f"argument {where} is {_shown(given)}, the example's was {_shown(other)}"
    return "the arguments are built otherwise than the example's"


def _skeleton(structure: pytree.TreeSpec) -> Any:
    return pytree.tree_unflatten([None] * structure.num_leaves, structure)


def _shown(tree: Any) -> str:
    if tree is None:
        return "one value"
    if isinstance(tree, dict):
        return f"a dict with {sorted(map(str, tree))}"
    if isinstance(tree, tuple | list):
        return f"a {type(tree).__name__} of {len(tree)}"
    return f"a {type(tree).__name__}"
