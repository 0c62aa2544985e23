"""Checkpoints that know no stages: the model's and the optimizer's state under the model's own names, as DTensors."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from torch_xmesh.pipeline.ranks.stage_mesh import StageMesh
from torch_xmesh.pipeline.state.gradient_sync import local_of, plain_name
from torch_xmesh.pipeline.state.optimizer_init import initial_state
from torch_xmesh.pipeline.state.training import OwnParameter
from torch_xmesh.spec import device_mesh, wrap_local

StageModule = tuple[str, nn.Module, StageMesh]
"""What stands before the names of a stage's parameters, its module, its mesh."""

Unused = Mapping[str, tuple[nn.Parameter, StageMesh]]
"""The model's parameters that no stage has, and the mesh on which they are kept."""


def model_state(modules: Iterable[StageModule], unused: Unused) -> dict[str, Any]:
    """Parameters and buffers of this rank's stages, as DTensors on their meshes.

    Raises:
        ValueError: a module's own ``state_dict`` leaves a parameter out.
    """
    state: dict[str, Any] = {}
    for prefix, module, mesh in modules:
        found = {plain_name(name): value for name, value in module.state_dict().items()}
        _check_complete(module, found, mesh)
        for name, value in found.items():
            state.setdefault(prefix + name, on_mesh(value, mesh) if isinstance(value, torch.Tensor) else value)
    state.update({name: on_mesh(parameter.detach(), mesh) for name, (parameter, mesh) in unused.items()})
    return state


def _check_complete(module: nn.Module, state: Mapping[str, Any], mesh: StageMesh) -> None:
    for name, _ in module.named_parameters(remove_duplicate=False):
        if plain_name(name) not in state:
            raise ValueError(
                f"parameter {plain_name(name)} is missing from the state_dict() of its stage's module on rank "
                f"{mesh.rank}, so that a checkpoint would lose it: a state-dict hook leaves it out or renames it"
            )


def state_names(module: nn.Module) -> set[str]:
    """The names that the state dict of a module may have, those of tied parameters too; what its hooks make of them
    apart."""
    names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    names |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
    for name, part in module.named_modules(remove_duplicate=False):
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            names.add(f"{name}._extra_state" if name else "_extra_state")
    return {plain_name(name) for name in names}


def stage_state_names(modules: Iterable[StageModule]) -> set[str]:
    """The names of the states of this rank's stages, as their modules are now."""
    return {
        prefix + plain_name(name)
        for prefix, module, _ in modules
        for name in (*state_names(module), *module.state_dict())
    }


def load_model_state(modules: Iterable[StageModule], unused: Unused, given: Mapping[str, Any]) -> Callable[[], None]:
    """What copies values of :func:`model_state`'s form into this rank's stages; all is checked before.

    Raises:
        ValueError: a key is missing, or has another shape.
    """
    given = {plain_name(name): value for name, value in given.items()}
    stages = [
        (
            module,
            {
                own: _placed_as(value, _given(prefix + plain_name(own), value, given))
                for own, value in module.state_dict().items()
            },
        )
        for prefix, module, _ in modules
    ]
    others = [
        (parameter, _placed_as(parameter, _given(name, parameter, given))) for name, (parameter, _) in unused.items()
    ]

    def copy() -> None:
        for module, local in stages:
            module.load_state_dict(local)
        for parameter, value in others:
            parameter.detach().copy_(value)

    return copy


def unknown_names(names: Iterable[str], known: Set[str], what: str) -> str | None:
    """What to say of names that are not known; None where all are."""
    unknown = sorted({plain_name(str(name)) for name in names} - known)
    if not unknown:
        return None
    more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
    return (
        f"{what} has {unknown[0]!r}{more}, which the model has not: load a state of this model, or leave such keys out "
        "of it"
    )


def names_of_optimizer_state(given: Mapping[str, Any]) -> set[str]:
    """The parameters that an optimizer's state is of."""
    return {key.rpartition(f"/{_GROUP}")[0] or key.rpartition("/")[0] or key for key in map(str, given)}


def _given(name: str, value: Any, given: Mapping[str, Any]) -> Any:
    if name not in given:
        raise ValueError(f"the state dict has no {name!r}, which this rank's stage needs")
    found = given[name]
    if isinstance(value, torch.Tensor) and tuple(found.shape) != tuple(value.shape):
        raise ValueError(f"{name} has shape {tuple(found.shape)} in the state dict, expected {tuple(value.shape)}")
    return found


def _placed_as(value: Any, found: Any) -> Any:
    """What was found, as a tensor of the kind that is to be replaced; a whole tensor becomes this rank's shard."""
    if isinstance(value, DTensor) and isinstance(found, torch.Tensor) and not isinstance(found, DTensor):
        return distribute_tensor(found.detach(), value.device_mesh, value.placements, src_data_rank=None)
    return local_of(found) if isinstance(found, DTensor) and not isinstance(value, DTensor) else found


_GROUP = "param_groups."


def optimizer_state(optimizer: torch.optim.Optimizer, parameters: Sequence[OwnParameter]) -> dict[str, Any]:
    """The optimizer's state under "name/key", tensors of a parameter's shape as DTensors where the parameter lies; and
    the options of the parameter's group (lr, betas, ...) under "name/param_groups.key".

    A parameter of the optimizer that has no state yet is there with the state it would start from: what is saved before
    its first step, or frozen, can be loaded later, and a fresh optimizer can be loaded into.
    """
    groups = _groups(optimizer)
    state: dict[str, Any] = {}
    for own in parameters:
        if own.parameter not in groups:
            continue
        for key, value in _state_of(optimizer, own.parameter, groups).items():
            is_shaped = isinstance(value, torch.Tensor) and value.shape == own.parameter.shape and value.dim() > 0
            state[f"{own.name}/{key}"] = on_mesh(value, own.mesh) if is_shaped else value
        for key, value in groups[own.parameter].items():
            if key != "params":
                state[f"{own.name}/{_GROUP}{key}"] = value
    return state


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, parameters: Sequence[OwnParameter], given: Mapping[str, Any]
) -> Callable[[], None]:
    """What copies what :func:`optimizer_state` gave into the optimizer; all is checked before.

    Raises:
        ValueError: a key is missing or has another shape, the optimizer holds no such key, or parameters of one group
            had different options.
    """
    groups = _groups(optimizer)
    keys: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for key, value in given.items():
        name, _, option = key.rpartition(f"/{_GROUP}")
        if name:
            options.setdefault(name, {})[option] = value
        else:
            name, _, field = key.rpartition("/")
            keys.setdefault(name, {})[field] = value
    states: list[tuple[OwnParameter, dict[str, Any]]] = []
    for own in parameters:
        if own.parameter in groups:
            states.append((own, _state_of(optimizer, own.parameter, groups)))
            _check_state(own.name, states[-1][1], keys.get(own.name, {}))
    names = {own.parameter: own.name for own in parameters}
    saved: list[tuple[dict[str, Any], dict[str, dict[str, Any]]]] = []
    for group in optimizer.param_groups:
        found = {names[p]: options.get(names[p], {}) for p in group["params"] if p in names}
        if found:
            _check_group(group, found)
            saved.append((group, found))

    def copy() -> None:
        for own, state in states:
            optimizer.state[own.parameter] = {k: _filled(v, keys[own.name][k]) for k, v in state.items()}
        for group, found in saved:
            for key, value in next(iter(found.values())).items():
                group[key] = _filled(group.get(key), value)

    return copy


def _groups(optimizer: torch.optim.Optimizer) -> dict[Any, dict[str, Any]]:
    return {parameter: group for group in optimizer.param_groups for parameter in group["params"]}


def _state_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, groups: Mapping[Any, Any]) -> dict[str, Any]:
    state: dict[str, Any] = optimizer.state.get(parameter) or initial_state(optimizer, groups[parameter], parameter)
    return state


def _check_state(name: str, state: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    if missing := sorted(set(state) - set(given)):
        raise ValueError(f"the optimizer's state has no {name}/{missing[0]}")
    if unknown := sorted(set(given) - set(state)):
        raise ValueError(
            f"the optimizer's state has {name}/{unknown[0]}, but this optimizer keeps {sorted(state)} for a parameter: "
            "make the optimizer that was saved"
        )
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and (shape := tuple(torch.as_tensor(given[key]).shape)) != tuple(
            value.shape
        ):
            raise ValueError(f"the optimizer's {name}/{key} has shape {shape}, expected {tuple(value.shape)}")


def _check_group(group: Mapping[str, Any], saved: Mapping[str, Mapping[str, Any]]) -> None:
    """The options of a group are those that each of its parameters had; `saved` has them by parameter."""
    first = next(iter(saved))
    for key in group:
        if key != "params" and key not in saved[first]:
            raise ValueError(f"the optimizer's state has no {first}/{_GROUP}{key}")
    for key, value in saved[first].items():
        for name, options in saved.items():
            if key not in options or not _is_same(options[key], value):
                raise ValueError(
                    f"{first} and {name} are in one group of the optimizer, but had {key} {value} and "
                    f"{options.get(key)}: make the optimizer with groups like those that were saved"
                )


def _is_same(value: Any, other: Any) -> bool:
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(value, other)
    return bool(value == other)


def _filled(value: Any, found: Any) -> Any:
    """A tensor keeps its memory."""
    if not isinstance(value, torch.Tensor):
        return found
    local_of(value).copy_(local_of(torch.as_tensor(found)))
    return value


def on_mesh(tensor: torch.Tensor, mesh: StageMesh) -> DTensor:
    """A tensor that all ranks of a stage have as a DTensor of the stage's mesh; a DTensor stays as it is."""
    if isinstance(tensor, DTensor):
        return tensor
    on = device_mesh(mesh.mesh)
    return wrap_local(tensor.detach(), tensor.shape, on, (Replicate(),) * on.ndim)
