"""What is handed from module to module: objects that may become part of a graph, containers that must not change."""

import enum
import functools
import types
from typing import Any

import numpy as np
import torch
from torch import nn

_PLAIN = (int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def is_plain(value: Any) -> bool:
    """Whether a graph can hold it as a literal."""
    return value is Ellipsis or isinstance(value, _PLAIN)


def plain_number(value: Any) -> Any:
    """A number of numpy's as one of Python's; all else as it is."""
    return value.item() if isinstance(value, np.generic) else value


def why_not_constant(value: Any) -> str | None:
    """Why an object cannot be part of a graph: it holds what belongs to one forward. None where it can."""
    if isinstance(value, type | enum.Enum | types.BuiltinFunctionType) or is_plain(value):
        return None
    if isinstance(value, functools.partial):
        held = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, types.FunctionType):
        held = [cell.cell_contents for cell in value.__closure__ or ()]
        held += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    elif isinstance(value, tuple | frozenset):
        held = list(value)
    elif type(value).__module__.partition(".")[0] == "torch" and callable(value) and not isinstance(value, nn.Module):
        return None  # an operator
    else:
        what = "a method of an object" if isinstance(value, types.MethodType) else "an object"
        return f"{what} of class {type(getattr(value, '__self__', value)).__qualname__}"
    why = next((found for found in map(why_not_constant, held) if found is not None), None)
    return None if why is None else f"a function that holds {why}"


def contents_of(tree: Any) -> list[tuple[Any, list[int]]]:
    """The lists, dicts and sets in a tree, and what is in each, by identity."""
    found: list[tuple[Any, list[int]]] = []
    left = [tree]
    while left:
        one = left.pop()
        inside = (
            list(one.values()) if isinstance(one, dict) else list(one) if isinstance(one, list | tuple | set) else []
        )
        if isinstance(one, dict | list | set):
            found.append((one, _identities(one)))
        left += inside
    return found


def have_changed(contents: list[tuple[Any, list[int]]]) -> bool:
    """Whether anything was put into the containers, or taken out."""
    return any(_identities(one) != known for one, known in contents)


def _identities(one: Any) -> list[int]:
    parts = [*one.keys(), *one.values()] if isinstance(one, dict) else list(one)
    return [hash(part) if is_plain(part) else id(part) for part in parts]
