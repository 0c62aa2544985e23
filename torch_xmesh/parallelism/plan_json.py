"""Plans as JSON: every field by its name, and what is read is checked against the classes' types and against itself."""

import dataclasses
import itertools
import json
import types
import typing
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch_xmesh.pipeline.schedule.schedule import Schedule

if TYPE_CHECKING:
    from torch_xmesh.parallelism.plan import ParallelPlan, PlannedParameter, PlannedStage

_VERSION = 1


def plan_to_json(plan: "ParallelPlan") -> str:
    return json.dumps({"version": _VERSION, **_plain(plan)}, indent=1)


def plan_from_json(kind: "type[ParallelPlan]", text: str) -> "ParallelPlan":
    """Raises ValueError naming what is wrong."""
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"plan: not JSON: {error}") from None
    if not isinstance(fields, dict) or fields.pop("version", None) != _VERSION:
        raise ValueError(f"plan: expected a JSON object of version {_VERSION}")
    made: ParallelPlan = _object(kind, fields, "plan")
    _check(made)
    return made


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value) if not field.name.startswith("_")]
        return {name: _plain(getattr(value, name)) for name in names}
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    return value


def _object(kind: Any, fields: Any, where: str) -> Any:
    """Of a class, from its fields by name."""
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
    hints = typing.get_type_hints(kind)
    return kind(**{name: _typed(hints[name], value, f"{where}.{name}") for name, value in fields.items()})


def _typed(hint: Any, value: Any, where: str) -> Any:
    """A value of a type: a class of fields, a number, a text, a tuple of one or of given types, or None."""
    if isinstance(hint, types.UnionType):
        given = [one for one in typing.get_args(hint) if (one is type(None)) == (value is None)]
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
        return tuple(_typed(one, part, f"{where}[{i}]") for i, (one, part) in enumerate(zip(each, value, strict=True)))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not hint:
        raise ValueError(f"{where}: expected {getattr(hint, '__name__', hint)}, got {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) < 60 else text[:57] + '...'} ({type(value).__name__})"


def _check(plan: "ParallelPlan") -> None:
    """Raises ValueError for a plan that no devices could run."""
    if not plan.stages:
        raise ValueError("plan: no stages")
    if plan.num_microbatches < 1:
        raise ValueError(f"plan.num_microbatches: expected at least 1, got {plan.num_microbatches}")
    used = Counter(rank for stage in plan.stages for rank in stage.ranks)
    twice = sorted(rank for rank, count in used.items() if count > 1)
    if twice:
        raise ValueError(f"plan: device {twice[0]} is in two stages")
    if min(used, default=-1) < 0:
        raise ValueError("plan: a stage without devices, or a device below 0")
    if len(used) != plan.devices:
        raise ValueError(f"plan.devices: {plan.devices}, the stages have {len(used)}")
    ends = [0, *(stage.layers[1] for stage in plan.stages)]
    are_in_order = [stage.layers for stage in plan.stages] == list(itertools.pairwise(ends))
    if not are_in_order or ends[-1] != len(plan.layers):
        raise ValueError(f"plan: stages do not follow one another through the {len(plan.layers)} layers")
    for number, stage in enumerate(plan.stages):
        _check_stage(stage, f"plan.stages[{number}]")
    for i, value in enumerate(plan.values):
        where = f"plan.values[{i}]"
        if not 0 <= value.from_stage < value.to_stage < len(plan.stages):
            raise ValueError(f"{where}: from stage {value.from_stage} to stage {value.to_stage}")
        for number, state in ((value.from_stage, value.src), (value.to_stage, value.dst)):
            _check_state(state, value.shape, plan.stages[number].mesh_shape, where)
    for i, tie in enumerate(plan.ties):
        if len(set(tie.stages)) < 2 or not all(0 <= stage < len(plan.stages) for stage in tie.stages):
            raise ValueError(f"plan.ties[{i}]: stages {list(tie.stages)}")
    _check_schedule(plan)


def _check_schedule(plan: "ParallelPlan") -> None:
    schedule = Schedule.from_csv(plan.schedule_csv, name="plan.schedule_csv")
    if (schedule.num_stages, schedule.num_microbatches) != (len(plan.stages), plan.num_microbatches):
        raise ValueError(
            f"plan.schedule_csv: of {schedule.num_stages} stages and {schedule.num_microbatches} microbatches, "
            f"the plan has {len(plan.stages)} and {plan.num_microbatches}"
        )


def _check_stage(stage: "PlannedStage", where: str) -> None:
    size = 1
    for extent in stage.mesh_shape:
        size *= extent
    if size != len(stage.ranks) or not stage.mesh_shape:
        raise ValueError(f"{where}: {len(stage.ranks)} ranks in a mesh of {list(stage.mesh_shape)}")
    for one in stage.operators:
        if len(one.axes) != len(stage.mesh_shape):
            raise ValueError(
                f"{where}: operator {one.name} has {len(one.axes)} axes on a mesh of {len(stage.mesh_shape)}"
            )
        if one.layer is not None and not stage.layers[0] <= one.layer < stage.layers[1]:
            raise ValueError(f"{where}: operator {one.name} is of layer {one.layer}")
        for number, state in enumerate(one.outputs):
            shape = one.shape if number == 0 else None
            _check_state(state, shape, stage.mesh_shape, f"{where}: operator {one.name}")
    for parameter in stage.parameters:
        _check_parameter(parameter, stage.mesh_shape, where)
    if len(stage.links) != len(stage.mesh_shape) or not all(len(links) in (2, 3) for links in stage.links):
        raise ValueError(f"{where}: links of {len(stage.links)} axes on a mesh of {len(stage.mesh_shape)}")
    for held in stage.held:
        for state in (held.state, held.gradient):
            _check_state(state, None, stage.mesh_shape, f"{where}: value {held.name}")


def _check_parameter(parameter: "PlannedParameter", mesh_shape: Sequence[int], where: str) -> None:
    where = f"{where}: parameter {parameter.name}"
    _check_state(parameter.state, parameter.shape, mesh_shape, where, is_whole=True)
    if parameter.zero_level not in (0, 1, 2, 3) or (parameter.zero_level > 0) != (parameter.zero_state is not None):
        raise ValueError(f"{where} has ZeRO level {parameter.zero_level} and parts {parameter.zero_state}")
    if parameter.zero_state is not None:
        _check_state(parameter.zero_state, parameter.shape, mesh_shape, where, is_whole=True)


def _check_state(
    state: Sequence[int],
    shape: Sequence[int] | None,
    mesh_shape: Sequence[int],
    where: str,
    *,
    is_whole: bool = False,
) -> None:
    """Of a value of this shape, if that is known; `is_whole`: it is no sum."""
    if len(state) != len(mesh_shape):
        raise ValueError(f"{where} has {len(state)} states on a mesh of {len(mesh_shape)} axes")
    parts: dict[int, int] = {}
    for held, size in zip(state, mesh_shape, strict=True):
        if held < (-1 if is_whole else -2) or (shape is not None and held >= len(shape)):
            raise ValueError(f"{where} has no dim {held}")
        if held >= 0:
            parts[held] = parts.get(held, 1) * size
    for dim, count in parts.items():
        if shape is not None and shape[dim] % count != 0:
            raise ValueError(f"{where}: dim {dim} of {shape[dim]} in {count} parts")
