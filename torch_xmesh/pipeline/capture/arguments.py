"""What is handed from module to module: objects that may become part of a graph, containers that must not change."""

import enum
import functools
import types
from collections.abc import Callable
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


def _is_operator(value: Any) -> bool:
    is_torchs = type(value).__module__.partition(".")[0] == "torch"
    return is_torchs and callable(value) and not isinstance(value, nn.Module)


Lifted = tuple[list[Any], Callable[..., Any]]
"""What a function holds that belongs to one forward, and what makes the function anew of others in its place."""


class Lifter:
    """Takes tensors and whole modules out of functions that hold them: in their closure, their defaults, a partial's
    arguments, as the object of a method."""

    def __init__(self, is_whole: Callable[[nn.Module], bool]) -> None:
        """`is_whole`: a module is the model's, and no stage begins inside."""
        self._is_whole = is_whole

    def lift(self, value: Any) -> Lifted | str:
        """What a value holds; or why it cannot become part of a graph: it holds something else of one forward."""
        if isinstance(value, torch.Tensor) or (isinstance(value, nn.Module) and self._is_whole(value)):
            return [value], lambda given: given
        if isinstance(value, type | enum.Enum | types.BuiltinFunctionType | np.ndarray) or is_plain(value):
            return [], lambda: value
        if type(value) is tuple:
            return self._parts(list(value), tuple)
        if isinstance(value, functools.partial):
            return self._partial(value)
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.MethodType) and isinstance(value.__self__, nn.Module):
            if self._is_whole(value.__self__):
                return [value.__self__], lambda module: getattr(module, value.__name__)
        elif _is_operator(value):
            return [], lambda: value
        what = "a method of an object" if isinstance(value, types.MethodType) else "an object"
        return f"{what} of class {type(getattr(value, '__self__', value)).__qualname__}"

    def _partial(self, value: "functools.partial[Any]") -> Lifted | str:
        names, num_args = list(value.keywords), len(value.args)

        def make(parts: list[Any]) -> Any:
            options = dict(zip(names, parts[1 + num_args :], strict=True))
            return functools.partial(parts[0], *parts[1 : 1 + num_args], **options)

        return self._parts([value.func, *value.args, *value.keywords.values()], make)

    def _function(self, function: types.FunctionType) -> Lifted | str:
        try:
            cells = [cell.cell_contents for cell in function.__closure__ or ()]
        except ValueError:
            return "a function that holds a variable without a value"
        defaults, options = list(function.__defaults__ or ()), dict(function.__kwdefaults__ or {})
        held = [*cells, *defaults, *options.values()]
        if any(known is function for known in held):
            return "a function that holds itself"

        def make(parts: list[Any]) -> Any:
            closure = tuple(types.CellType(part) for part in parts[: len(cells)])
            given = tuple(parts[len(cells) : len(cells) + len(defaults)])
            code, name = function.__code__, function.__name__
            made = types.FunctionType(code, function.__globals__, name, given or None, closure)
            made.__kwdefaults__ = dict(zip(options, parts[len(cells) + len(defaults) :], strict=True)) or None
            return made

        found = self._parts(held, make)
        if isinstance(found, str):
            return f"a function that holds {found}"
        return ([], lambda: function) if not found[0] else found

    def _parts(self, parts: list[Any], make: Callable[[list[Any]], Any]) -> Lifted | str:
        held: list[Any] = []
        makers: list[tuple[int, Callable[..., Any]]] = []
        for part in parts:
            found = self.lift(part)
            if isinstance(found, str):
                return found
            makers.append((len(found[0]), found[1]))
            held += found[0]

        def rebuild(*given: Any) -> Any:
            remaining = iter(given)
            return make([maker(*(next(remaining) for _ in range(count))) for count, maker in makers])

        return held, rebuild


def contents_of(tree: Any) -> list[tuple[Any, list[int]]]:
    """The lists, dicts and sets in a tree, and what is in each, by identity."""
    found: list[tuple[Any, list[int]]] = []
    left = [tree]
    while left:
        item = left.pop()
        if isinstance(item, dict | list | set):
            found.append((item, _identities(item)))
        if isinstance(item, dict | list | set | tuple):
            left += item.values() if isinstance(item, dict) else item
    return found


def have_changed(contents: list[tuple[Any, list[int]]]) -> bool:
    """Whether anything was put into the containers, or taken out."""
    return any(_identities(container) != known for container, known in contents)


def _identities(container: Any) -> list[int]:
    parts = [*container.keys(), *container.values()] if isinstance(container, dict) else list(container)
    return [hash(part) if is_plain(part) else id(part) for part in parts]
