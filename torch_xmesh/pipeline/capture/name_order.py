"""An order of what a model holds that is the same in every process: as its author wrote it down, else by name."""

import re
from collections.abc import Iterable
from typing import Any, TypeVar

from torch import nn

_T = TypeVar("_T")
Natural = tuple[tuple[int, int, str], ...]


def natural(text: str) -> Natural:
    """For sorting: numbers in a text by their size."""
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", text) if part)


class NameOrder:
    """Sorts dotted names of modules, parameters and buffers. Attributes that the code of a class names come in the
    order in which they were set; others, such as a ModuleDict's, may have been set in the order of a set of strings,
    and come by name."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._known: dict[str, Any] = {}

    def key(self, name: str) -> Any:
        """What names are sorted by."""
        if name not in self._known:
            owner: Any = self._model
            parts = []
            for part in name.split("."):
                written = _written(owner) if isinstance(owner, nn.Module) else []
                parts.append((0, written.index(part), ()) if part in written else (1, 0, natural(part)))
                owner = getattr(owner, part, None)
            self._known[name] = tuple(parts)
        return self._known[name]

    def sorted(self, named: Iterable[tuple[str, _T]]) -> list[tuple[str, _T]]:
        """Things by name, in order."""
        return sorted(named, key=lambda pair: self.key(pair[0]))


def _written(module: nn.Module) -> list[str]:
    """What a module holds under names that its class's code has, in the order in which it was set."""
    names = _names_in_code(type(module))
    return [name for name in (*module._parameters, *module._buffers, *module._modules) if name in names]


def _names_in_code(kind: type[nn.Module]) -> frozenset[str]:
    made = (vars(base).get("__init__") for base in kind.__mro__)
    return frozenset(name for method in made for name in getattr(getattr(method, "__code__", None), "co_names", ()))
