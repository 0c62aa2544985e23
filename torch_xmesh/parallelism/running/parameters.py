"""A stage's parameters: how each device keeps its parts, what microbatches read, where gradients go.

kept between steps --> once a step, or (ZeRO-3) by each microbatch: as the stage reads them --> operators
          gradients as the parameters lie <-- added up over devices, once a step, or (ZeRO-2, 3) in backward <--+
"""

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torch_xmesh.parallelism.conversions import AxisMove
from torch_xmesh.parallelism.judge import placements_of
from torch_xmesh.parallelism.loops import REPLICATED, State
from torch_xmesh.parallelism.operators import Recorded, Value
from torch_xmesh.parallelism.plan import PlannedStage
from torch_xmesh.parallelism.running.collectives import Moves
from torch_xmesh.parallelism.running.fetching import Fetch, Fetched, InTurn
from torch_xmesh.pipeline.state.gradient_sync import local_of

InTurnKnown = dict[Value, tuple[Fetch, int]]
"""Parameters that a microbatch has fetched, with their numbers in what fetched them."""


def in_turn_of(planned: PlannedStage) -> frozenset[str]:
    """The parameters that each microbatch fetches anew (ZeRO-3), by name."""
    return frozenset(parameter.name for parameter in planned.parameters if parameter.zero_level == 3)


class StageParameters:
    """Parameters and buffers of the model that a stage reads, in this device's parts, as the plan keeps, fetches and
    adds them up."""

    def __init__(self, recorded: Recorded, planned: PlannedStage, mesh: DeviceMesh, moves: Moves) -> None:
        self._recorded, self._mesh, self._moves = recorded, mesh, moves
        self._planned = {parameter.name: parameter for parameter in planned.parameters}
        self._in_turn = in_turn_of(planned)
        self._own: dict[str, torch.Tensor] = {}
        self._read: dict[str, torch.Tensor] = {}
        self._summed_later: list[Value] = []

    # How they are kept.

    def keep(self, model: nn.Module, home: nn.Module, called: Mapping[str, nn.Module]) -> None:
        """This device's parts of the model's values, registered under its names in `home`, with the modules that are
        `called` as one, by name."""
        for name, module in called.items():
            owner, _, key = name.rpartition(".")
            _place(home, owner)._modules[key] = module
        tensors = _named_tensors(model)
        for value in self._recorded.given.values():
            if value.name not in self._planned or not value.is_parameter or value.name in self._own:
                continue
            whole, state = tensors[value.name], self._planned[value.name].kept_state
            steps = [AxisMove(axis, REPLICATED, dim) for axis, dim in enumerate(state) if dim != REPLICATED]
            part = self._moves.run(whole.detach(), steps, value.name, "parameter").clone()
            placed: torch.Tensor = self._placed(part, state)
            if isinstance(whole, nn.Parameter):
                placed = nn.Parameter(placed, whole.requires_grad)
            _register(model, home, value.name, placed)
            self._own[value.name] = placed
        kept = {id(tensors[name]): parameter for name, parameter in self._own.items()}
        for name, whole in tensors.items():
            known = kept.get(id(whole))
            if name not in self._own and known is not None:  # another name of the same
                _register(model, home, name, known)

    def keep_unread(self, model: nn.Module, home: nn.Module, read: set[str], called: Collection[str]) -> None:
        """What no stage reads, whole, under its names in `home`. Modules `called` as one have their own buffers."""
        within = tuple(f"{name}." for name in called)
        tensors = _named_tensors(model)
        elsewhere = {id(tensors[name]) for name in read}
        kept: dict[int, torch.Tensor] = {}
        for name, whole in tensors.items():
            is_parameter = isinstance(whole, nn.Parameter)
            if id(whole) in elsewhere or (name.startswith(within) and not is_parameter):
                continue
            if id(whole) not in kept:
                placed: torch.Tensor = self._placed(whole.detach().clone(), (REPLICATED,) * self._mesh.ndim)
                kept[id(whole)] = nn.Parameter(placed, whole.requires_grad) if is_parameter else placed
            _register(model, home, name, kept[id(whole)])

    def _placed(self, part: torch.Tensor, state: State) -> DTensor:
        return DTensor.from_local(part, self._mesh, placements_of(state), run_check=False)

    def _parameters(self) -> list[tuple[Value, nn.Parameter]]:
        """Those that the stage reads."""
        given = dict.fromkeys(value for value in self._recorded.given.values() if value.is_parameter)
        own = [(value, self._own.get(value.name)) for value in given]
        return [(value, parameter) for value, parameter in own if isinstance(parameter, nn.Parameter)]

    def check(self) -> None:
        """Raises ValueError where a parameter was frozen or unfrozen, or has hooks, which would not be called."""
        for value, own in self._parameters():
            if own.requires_grad != value.requires_grad:
                raise ValueError(f"parameter {value.name} was frozen or unfrozen: with a plan it stays as it came")
            if own._backward_hooks or own._post_accumulate_grad_hooks:
                raise ValueError(f"parameter {value.name} has a hook: with a plan gradients come to it once a step")

    # What a microbatch reads.

    def read(self, value: Value) -> torch.Tensor:
        """This device's part of a parameter or a buffer of the stage, as operators take it; none that each microbatch
        fetches."""
        return self._read.get(value.name, local_of(self._own[value.name]))

    def fetch(self, values: Sequence[Value], parts: dict[Value, Any], known: InTurnKnown) -> None:
        """Parameters of a layer, before the first operator that reads one, in a microbatch."""
        parameters, own = [], []
        for value in values:
            planned = self._planned[value.name]
            parameters.append(InTurn(value.name, planned.fetch, planned.sum))
            own.append(self._read[value.name])
        fetch = Fetch(self._moves, parameters, [part.detach() for part in own])
        wholes = Fetched.apply(fetch, *own)  # type: ignore[no-untyped-call]
        for place, (value, whole) in enumerate(zip(values, wholes, strict=True)):
            parts[value], known[value] = whole, (fetch, place)

    # A step.

    @torch.no_grad()
    def begin_step(self) -> None:
        """Parameters as this step's microbatches read them: those in parts are fetched, once for all."""
        self._summed_later = []
        taken = self._parameters()
        local = [local_of(own).detach() for _, own in taken]
        steps = [() if value.name in self._in_turn else self._planned[value.name].fetch for value, _ in taken]
        read = self._moves.run_together(local, steps, [value.name for value, _ in taken], "parameter")
        for (value, _), tensor in zip(taken, read, strict=True):
            self._read[value.name] = tensor.requires_grad_(value.requires_grad)
            if self._planned[value.name].zero_level == 2:
                tensor.register_post_accumulate_grad_hook(functools.partial(self._add_up_later, value))  # type: ignore[no-untyped-call]

    def _add_up_later(self, value: Value, read: torch.Tensor) -> None:
        """At the end of this backward, with others."""
        if not self._summed_later:
            torch.autograd.Variable._execution_engine.queue_callback(self._add_up_now)
        self._summed_later.append(value)

    def _add_up_now(self) -> None:
        later, self._summed_later = self._summed_later, []
        self._add_up(sorted(later, key=lambda value: value.name), "backward")  # they come in no order for all devices

    def finish_gradients(self) -> None:
        """Once all microbatches are through: gradients are added up over devices, and lie as the parameters do."""
        self._add_up([value for value, _ in self._parameters() if value.requires_grad], "gradient")

    @torch.no_grad()
    def _add_up(self, values: Sequence[Value], why: str) -> None:
        """The gradients of parameters as they were read go to the parameters."""
        own = [value for value in dict.fromkeys(values) if self._read[value.name].grad is not None]
        names = [value.name for value in own]
        steps = [() if name in self._in_turn else self._planned[name].sum for name in names]
        grads = [cast(torch.Tensor, self._read[name].grad) for name in names]
        for name, way, part in zip(names, steps, self._moves.run_together(grads, steps, names, why), strict=True):
            placed = self._placed(part if not way else part.clone(), self._planned[name].kept_state)
            parameter = self._own[name]
            parameter.grad = placed if parameter.grad is None else parameter.grad + placed
            self._read[name].grad = None


def _named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers, under all their names."""
    parameters: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    return {**parameters, **dict(model.named_buffers(remove_duplicate=False))}


def _place(home: nn.Module, path: str) -> nn.Module:
    place = home
    for part in path.split(".") if path else ():
        place = cast(nn.Module, place._modules.setdefault(part, nn.Module()))
    return place


def _register(model: nn.Module, home: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Parameters as such, all else as buffers, persistent where the model's are. Names of attributes of `home` may be
    among the model's, so torch's own methods, which refuse these, are not called."""
    owner, _, key = name.rpartition(".")
    place = _place(home, owner)
    if isinstance(tensor, nn.Parameter):
        place._parameters[key] = tensor
        return
    place._buffers[key] = tensor
    if key in model.get_submodule(owner)._non_persistent_buffers_set:
        place._non_persistent_buffers_set.add(key)
