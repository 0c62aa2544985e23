"""What a function does, as a text that is equal on ranks that pass the same one."""

import functools
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from torch_xmesh.pipeline.ranks.digests import number_of


def described(function: Any) -> str:
    """Its name, and a number made of its code, its constants and what it closes over. Values whose text says where they
    are in memory count by their type; files and lines do not count."""
    if function is None:
        return "none"
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{name} {number_of(_text(function, set())):x}"


def _text(value: Any, seen: set[int]) -> str:
    if value is None or isinstance(
        value, bool | int | float | complex | str | bytes | torch.dtype | types.EllipsisType
    ):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return f"tensor {value.dtype} {tuple(value.shape)}"
    if id(value) in seen:
        return "again"
    seen.add(id(value))
    of = functools.partial(_text, seen=seen)
    if isinstance(value, functools.partial):
        return f"partial {of(value.func)} {of(value.args)} {of(value.keywords)}"
    if isinstance(value, types.MethodType):
        return f"method {of(value.__func__)} of {of(value.__self__)}"
    if isinstance(value, types.FunctionType):
        cells = [_cell(cell, seen) for cell in value.__closure__ or ()]
        kept = of(value.__defaults__), of(value.__kwdefaults__)
        return f"{value.__module__}.{value.__qualname__} {_code(value.__code__, seen)} {cells} {kept}"
    if isinstance(value, nn.Module):
        children = [(name, of(child)) for name, child in value.named_children()]
        own = {name: one for name, one in vars(value).items() if not name.startswith("_") and name != "training"}
        return f"{_name_of(type(value))} {value.extra_repr()} {of(own)} {children}"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__} {[of(one) for one in value]}"
    if isinstance(value, frozenset | set):
        return f"set {sorted(of(one) for one in value)}"
    if isinstance(value, Mapping):
        return f"mapping {sorted((str(key), of(one)) for key, one in value.items())}"
    return f"{_name_of(type(value))} {_name_of(value)}"


def _name_of(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"


def _cell(cell: types.CellType, seen: set[int]) -> str:
    try:
        return _text(cell.cell_contents, seen)
    except ValueError:  # empty
        return "empty"


def _code(code: types.CodeType, seen: set[int]) -> str:
    constants = [_code(one, seen) if isinstance(one, types.CodeType) else _text(one, seen) for one in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {constants}"
