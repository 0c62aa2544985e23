"""What every partition has: the names of the model's inputs, tied and unused parameters, buffers in one stage only."""

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from torch_xmesh.pipeline.cut.stage_program import StageProgram
from torch_xmesh.pipeline.cut.value_info import ValueInfo
from torch_xmesh.pipeline.cut.values import InputInfo, OutputStructure, Partition, ValueName


def finish_partition(
    stages: list[StageProgram],
    values: dict[str, ValueInfo],
    *,
    arguments: Any,
    named: Sequence[tuple[str, tuple[Any, ...]]],
    samples: int | None,
    fixed_batch: bool,
) -> Partition:
    """What all partitions have in common: inputs, their structure, tied parameters. The caller adds the outputs."""
    inputs = {}
    for name, path in named:
        info = values[name]
        inputs[name] = InputInfo(name, path, info.shape, info.dtype, info.batch_dim, info.consumers)
    flat, structure = pytree.tree_flatten_with_path(arguments)
    names = iter(name for name, _ in named)
    leaves = tuple(
        ValueName(next(names)) if isinstance(leaf, torch.Tensor) else (leaf, pytree.keystr(keys)) for keys, leaf in flat
    )
    empty = OutputStructure((), pytree.tree_structure(()))
    return Partition(
        stages, values, inputs, empty, _tied_parameters(stages), (), samples, fixed_batch, leaves, structure
    )


def _tied_parameters(stages: Sequence[StageProgram]) -> list[list[tuple[int, str]]]:
    holders: dict[int, list[tuple[int, str]]] = {}
    for stage in stages:
        for name, parameter in stage.module.named_parameters():
            holders.setdefault(id(parameter), []).append((stage.index, name))
    return [group for group in holders.values() if len(group) > 1]


def unused_parameters(model: nn.Module, stages: Sequence[StageProgram]) -> tuple[str, ...]:
    held = {id(parameter) for stage in stages for parameter in stage.module.parameters()}
    return tuple(name for name, parameter in model.named_parameters() if id(parameter) not in held)


def check_buffers(stages: Sequence[StageProgram], changed_in: Mapping[str, int]) -> None:
    """Refuse a buffer in several stages if one of them, of those that `changed_in` has by its name, changes it.

    Batch norm hides all changes but its counter's, so a module's buffers count as one.
    """
    changed = {name.rpartition(".")[0]: stage for name, stage in changed_in.items()}
    holders: dict[str, list[int]] = {}
    for stage in stages:
        for name, _ in stage.module.named_buffers(remove_duplicate=False):
            holders.setdefault(name, []).append(stage.index)
    for name, found in holders.items():
        owner = name.rpartition(".")[0]
        if len(found) > 1 and owner in changed:
            raise ValueError(
                f"buffer {name!r} is changed in stage {changed[owner]} and read in stages {found}: their copies "
                "would differ; "
                "keep its users in one stage"
            )


def input_names(
    model: nn.Module, arguments: tuple[tuple[Any, ...], dict[str, Any]]
) -> list[tuple[str, tuple[Any, ...]]]:
    """A name and a path for each tensor argument, after the parameters of the model's forward."""
    parameters = [
        p.name
        for p in inspect.signature(model.forward).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    taken: set[str] = set()
    named = []
    for keys, leaf in pytree.tree_flatten_with_path(arguments)[0]:
        if not isinstance(leaf, torch.Tensor):
            continue
        plain: list[Any] = [getattr(key, "idx", getattr(key, "key", getattr(key, "name", None))) for key in keys]
        path = ("args" if plain[0] == 0 else "kwargs", *plain[1:])
        first = plain[1]
        if plain[0] == 0:
            first = parameters[first] if first < len(parameters) else f"arg{first}"
        name = re.sub(r"\W", "_", "_".join(str(word) for word in (first, *plain[2:])))
        name = name if not name[:1].isdigit() else f"_{name}"
        while name in taken:
            name += "_"
        taken.add(name)
        named.append((name, path))
    return named
