"""Plans as JSON: every field by its name, and what is read is checked against the classes' types and against itself."""

import dataclasses
import functools
import json
import re
import sys
import types
import typing
from typing import TYPE_CHECKING, Any

from torch_xmesh.parallelism.plan_checks import check_plan

if TYPE_CHECKING:
    from torch_xmesh.parallelism.plan import ParallelPlan

_VERSION = 2
_READ = (1, 2)
"""Versions that are read. In 1 there are no programs."""
_ROW = re.compile(r"\[\n\s*([^\[\]{}]*?)\n\s*\]")
"""A list of numbers and names: it is written in one line."""
_ROUNDING = 1e-9
"""That a difference of sums may be below 0."""


def plan_to_json(plan: "ParallelPlan") -> str:
    return _ROW.sub(_in_a_row, json.dumps({"version": _VERSION, **_plain(plan)}, indent=1))


def plan_from_json(kind: "type[ParallelPlan]", text: str) -> "ParallelPlan":
    """Raises ValueError naming what is wrong."""
    try:
        fields = json.loads(text, object_pairs_hook=_distinct)
    except json.JSONDecodeError as error:
        raise ValueError(f"plan: not JSON: {error}") from None
    version = fields.pop("version", None) if isinstance(fields, dict) else None
    if type(version) is not int or version not in _READ:
        raise ValueError(f"plan: expected a JSON object of version {' or '.join(map(str, _READ))}")
    made: ParallelPlan = _object(kind, fields, "plan")
    check_plan(made)
    return made


def _in_a_row(match: re.Match[str]) -> str:
    return "[" + re.sub(r"\n\s*", " ", match[1]) + "]"


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object's fields, each of which is there once."""
    out = dict(pairs)
    if len(out) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"plan: field {next(name for name in names if names.count(name) > 1)!r} is there twice")
    return out


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value) if not field.name.startswith("_")]
        return {name: _plain(getattr(value, name)) for name in names}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


def _object(kind: Any, fields: Any, where: str) -> Any:
    """A dataclass's instance, made of a JSON object that has its fields by name. Raises ValueError for unknown and for
    missing fields."""
    names = {field.name: field for field in dataclasses.fields(kind) if not field.name.startswith("_")}
    if not isinstance(fields, dict):
        raise ValueError(f"{where}: expected an object, got {_shown(fields)}")
    unknown = sorted(set(fields) - set(names))
    missing = sorted(
        name for name, field in names.items() if name not in fields and field.default is dataclasses.MISSING
    )
    if unknown or missing:
        what = f"an unknown field {unknown[0]!r}" if unknown else f"no field {missing[0]!r}"
        raise ValueError(f"{where}: {what}")
    hints = _hints(kind)
    return kind(**{name: _typed(hints[name], value, f"{where}.{name}") for name, value in fields.items()})


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _typed(hint: Any, value: Any, where: str) -> Any:
    """A value of a type: a class of fields, a number, a text, a tuple of one or of given types, or None."""
    if isinstance(hint, types.UnionType):
        given = [member for member in typing.get_args(hint) if (member is type(None)) == (value is None)]
        return None if value is None and given else _typed(given[0] if given else hint, value, where)
    if dataclasses.is_dataclass(hint):
        return _object(hint, value, where)
    if typing.get_origin(hint) is tuple:
        kinds = typing.get_args(hint)
        if not isinstance(value, list) or (kinds[-1] is not ... and len(kinds) != len(value)):
            raise ValueError(
                f"{where}: expected a list{'' if kinds[-1] is ... else f' of {len(kinds)}'}, got {_shown(value)}"
            )
        each = [kinds[0]] * len(value) if kinds[-1] is ... else kinds
        return tuple(
            _typed(kind, part, f"{where}[{i}]") for i, (kind, part) in enumerate(zip(each, value, strict=True))
        )
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        if not -_ROUNDING <= value <= sys.float_info.max:  # seconds, bytes, parts of these
            raise ValueError(f"{where}: expected a finite number of at least 0, got {_shown(value)}")
        return float(value)
    if type(value) is not hint:
        raise ValueError(f"{where}: expected {getattr(hint, '__name__', hint)}, got {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) < 60 else text[:57] + '...'} ({type(value).__name__})"
