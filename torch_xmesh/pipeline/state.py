"""Training around a step: gradient norms, loss scaling, and checkpoints that know no stages."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import OptState
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from torch_xmesh.pipeline.boundary import Transfers
from torch_xmesh.pipeline.data_parallel import local_of, plain_name, settle_gradient
from torch_xmesh.pipeline.stage_mesh import StageMesh
from torch_xmesh.spec import device_mesh, mesh_grid, wrap_local


@dataclasses.dataclass(frozen=True)
class OwnParameter:
    """One parameter of this rank.

    Attributes:
        name: the model's own name.
        is_counted: this rank stands for all that hold the same part of it, in sums over the whole model.
    """

    name: str
    parameter: nn.Parameter
    mesh: StageMesh
    is_counted: bool


def is_counted(parameter: nn.Parameter, mesh: StageMesh) -> bool:
    """Whether this rank is the first of those that hold the same part of a parameter."""
    if isinstance(parameter, DTensor):
        coordinate = parameter.device_mesh.get_coordinate()
        if coordinate is None:
            return False
        copies = zip(coordinate, parameter.placements, strict=True)
        if any(index != 0 for index, placement in copies if isinstance(placement, Replicate)):
            return False
        covered = set(mesh_grid(parameter.device_mesh).ranks)
    else:
        covered = {mesh.rank}
    grid = torch.tensor(mesh.ranks).reshape(mesh.grid.shape)
    for axis, index in enumerate(mesh.coordinate):
        at = [slice(None) if a == axis else i for a, i in enumerate(mesh.coordinate)]
        line = set(grid[tuple(at)].tolist())
        if index != 0 and len(line & covered) <= 1:
            return False
    return True


def clip_gradients(
    transfers: Transfers, parameters: Sequence[OwnParameter], max_norm: float, norm_type: float
) -> torch.Tensor:
    """Scales gradients as torch's ``clip_grad_norm_`` would for the whole model; returns the norm, equal everywhere."""
    for own in parameters:
        settle_gradient(own.parameter)
    counted = [
        local_of(own.parameter.grad).detach().double()
        for own in parameters
        if own.is_counted and own.parameter.grad is not None
    ]
    if math.isinf(norm_type):
        mine = max((float(one.abs().max()) for one in counted if one.numel()), default=0.0)
        norm = max(transfers.gather("norm", mine))
    else:
        powers = sum((one.abs().pow(norm_type).sum() for one in counted), torch.zeros((), dtype=torch.float64))
        norm = float(transfers.sum("norm", powers.reshape(1))[0]) ** (1.0 / norm_type)
    scale = min(1.0, max_norm / (norm + 1e-6))
    if scale < 1.0 or math.isnan(norm):
        for own in parameters:
            if own.parameter.grad is not None:
                local_of(own.parameter.grad).mul_(scale)
    return torch.tensor(norm, dtype=torch.float32)


@dataclasses.dataclass(eq=False)
class _StandIn:
    """What a GradScaler looks at in an optimizer."""

    param_groups: list[dict[str, Any]]


class PipelineScaler:
    """A ``torch.amp.GradScaler`` for a pipeline: the engine's steps scale their losses by it, and an overflow in one
    stage skips the optimizer's step on every rank. ``step`` and ``unscale_`` are called by all ranks, once per step.
    A disabled one does nothing, here as there; it is disabled on all ranks."""

    def __init__(self, transfers: Transfers, scaler: "torch.amp.GradScaler") -> None:
        self._transfers = transfers
        self._scaler = scaler
        self._unscaled: set[int] = set()
        scaler.scale(torch.zeros(()))  # makes its tensors

    def get_scale(self) -> float:
        """The factor of the losses."""
        return float(self._scaler.get_scale())

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradients by the scale, and shares whether any rank found one that is not finite."""
        if not self._scaler.is_enabled():
            return
        self._unscale_locals(optimizer)
        found = self._scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        mine = torch.zeros(1, dtype=torch.float64)
        for one in found.values():
            mine += one.double()
        total = self._transfers.sum("found_inf", mine)
        if not found:
            found[torch.device("cpu")] = torch.zeros((), dtype=torch.float32)
        for one in found.values():
            one.copy_((total[0] > 0).to(one.dtype))
        self._unscaled.add(id(optimizer))

    def _unscale_locals(self, optimizer: torch.optim.Optimizer) -> None:
        """``GradScaler.unscale_`` on local tensors: its kernel takes no mixture of tensors and DTensors."""
        states = self._scaler._per_optimizer_states
        if states[id(optimizer)]["stage"] is not OptState.READY:
            self._scaler.unscale_(optimizer)  # says why not
        stand_ins = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    stand_ins.append(local_of(parameter.detach()))
                    stand_ins[-1].grad = local_of(parameter.grad)
        stand_in = _StandIn([{"params": stand_ins}])
        self._scaler.unscale_(stand_in)  # type: ignore[arg-type]
        states[id(optimizer)] = states.pop(id(stand_in))

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """The optimizer's step, unless some rank found an overflow."""
        if id(optimizer) not in self._unscaled:
            self.unscale_(optimizer)
        self._unscaled.discard(id(optimizer))
        return self._scaler.step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Adapts the scale: alike on every rank."""
        self._scaler.update(new_scale)

    def state_dict(self) -> dict[str, Any]:
        """The scaler's."""
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The scaler's."""
        self._scaler.load_state_dict(state)


def model_state(
    modules: Iterable[tuple[str, nn.Module, StageMesh]],
    keeps: Callable[[str], bool],
    unused: Mapping[str, tuple[nn.Parameter, StageMesh]],
) -> dict[str, Any]:
    """Parameters and buffers of this rank's stages as DTensors on their meshes; (prefix, module, mesh) per stage.

    `unused` are parameters that no stage has, and the mesh on which they are kept.
    """
    state: dict[str, Any] = {}
    for prefix, module, mesh in modules:
        for found, value in module.state_dict().items():
            name = prefix + plain_name(found)
            if keeps(name):
                state.setdefault(name, on_mesh(value, mesh) if isinstance(value, torch.Tensor) else value)
    state.update({name: on_mesh(parameter.detach(), mesh) for name, (parameter, mesh) in unused.items()})
    return state


def load_model_state(
    modules: Iterable[tuple[str, nn.Module, StageMesh]],
    keeps: Callable[[str], bool],
    unused: Mapping[str, tuple[nn.Parameter, StageMesh]],
    given: Mapping[str, Any],
) -> None:
    """Copies values of :func:`model_state`'s form into this rank's stages.

    Raises:
        ValueError: a key is missing, or has another shape.
    """
    for prefix, module, _ in modules:
        local: dict[str, Any] = {}
        for own, value in module.state_dict().items():
            name = prefix + plain_name(own)
            if not keeps(name):
                continue
            local[own] = _placed_as(value, _given(name, value, given))
        module.load_state_dict(local, strict=False)
    for name, (parameter, _) in unused.items():
        parameter.detach().copy_(_placed_as(parameter, _given(name, parameter, given)))


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

    A fresh optimizer gets its state first, so that a checkpoint can be loaded into it.
    """
    from torch.distributed.checkpoint.state_dict import _init_optim_state

    _init_optim_state(optimizer)
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    state: dict[str, Any] = {}
    for own in parameters:
        for key, value in optimizer.state.get(own.parameter, {}).items():
            is_shaped = isinstance(value, torch.Tensor) and value.shape == own.parameter.shape and value.dim() > 0
            state[f"{own.name}/{key}"] = on_mesh(value, own.mesh) if is_shaped else value
        for key, value in groups.get(own.parameter, {}).items():
            if key != "params":
                state[f"{own.name}/{_GROUP}{key}"] = value
    return state


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, parameters: Sequence[OwnParameter], given: Mapping[str, Any]
) -> None:
    """Copies what :func:`optimizer_state` gave into the optimizer.

    Raises:
        ValueError: a key is missing, or parameters of one group had different options.
    """
    from torch.distributed.checkpoint.state_dict import _init_optim_state

    _init_optim_state(optimizer)
    for own in parameters:
        state = optimizer.state.get(own.parameter, {})
        for key, value in state.items():
            if f"{own.name}/{key}" not in given:
                raise ValueError(f"the optimizer's state has no {own.name}/{key}")
            state[key] = _filled(value, given[f"{own.name}/{key}"])
    options: dict[str, dict[str, Any]] = {}
    for key, value in given.items():
        name, _, option = key.rpartition(f"/{_GROUP}")
        options.setdefault(name, {})[option] = value
    names = {own.parameter: own.name for own in parameters}
    for group in optimizer.param_groups:
        saved = {names[p]: options.get(names[p], {}) for p in group["params"] if p in names}
        if saved:
            _load_group(group, saved)


def _load_group(group: dict[str, Any], saved: Mapping[str, Mapping[str, Any]]) -> None:
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
        group[key] = _filled(group.get(key), value)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return bool(one == other)


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
