"""What a function does, as a text that is equal on ranks that pass the same one."""

import functools
import re
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from torch_xmesh.digests import number_of


def described(function: Any) -> str:
    """Its name, and a number made of its code: of what it closes over, is partially applied to, or has as attributes,
    numbers with a point, flags and texts count too. Integers do not, nor in texts, where they may be a rank or its
    device; nor do files, lines and places in memory."""
    if function is None:
        return "none"
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{name} {number_of(_text(function, [])):x}"


def _text(value: Any, seen: list[Any]) -> str:
    """`seen` keeps what it has, so that no place in memory is used again."""
    if value is None or isinstance(value, bool | float | complex | torch.dtype | type(...)):
        return repr(value)
    if isinstance(value, str):
        return re.sub(r"\d+", "#", value)
    if isinstance(value, int | bytes):
        return type(value).__name__
    if isinstance(value, torch.Tensor):
        return f"tensor {value.dtype} {tuple(value.shape)}"
    if any(value is known for known in seen):
        return "again"
    seen.append(value)
    of = functools.partial(_text, seen=seen)
    if isinstance(value, functools.partial):
        return f"partial {of(value.func)} {of(value.args)} {of(value.keywords)}"
    if isinstance(value, types.MethodType):
        return f"method {of(value.__func__)} of {type(value.__self__).__qualname__}"
    if isinstance(value, types.FunctionType):
        cells = [_cell(cell, seen) for cell in value.__closure__ or ()]
        kept = of(value.__defaults__), of(value.__kwdefaults__)
        return f"{value.__qualname__} {_code(value.__code__)} {cells} {kept}"
    if isinstance(value, nn.Module):
        own = sorted((name, of(attribute)) for name, attribute in vars(value).items() if not name.startswith("_"))
        return f"{type(value).__qualname__} {own} {[(name, of(child)) for name, child in value.named_children()]}"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__} {[of(item) for item in value]}"
    if isinstance(value, Mapping):
        return f"mapping {sorted((str(key), of(item)) for key, item in value.items())}"
    return f"{type(value).__qualname__} {getattr(value, '__qualname__', '')}"


def _cell(cell: types.CellType, seen: list[Any]) -> str:
    try:
        value = cell.cell_contents
    except ValueError:
        return "empty"
    return _text(value, seen)


def _code(code: types.CodeType) -> str:
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {[_constant(value) for value in code.co_consts]}"


def _constant(value: Any) -> str:
    if isinstance(value, types.CodeType):
        return _code(value)
    if isinstance(value, frozenset):
        return f"set {sorted(map(repr, value))}"
    return repr(value)
