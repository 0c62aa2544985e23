"""Training around a step: whose parameters count, and loss scaling over the whole model."""

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import OptState
from torch.distributed.tensor import DTensor, Replicate

from torch_xmesh.pipeline.ranks.stage_mesh import StageMesh
from torch_xmesh.pipeline.ranks.transfers import Transfers
from torch_xmesh.pipeline.state.gradient_sync import local_of
from torch_xmesh.pipeline.state.numbers import numbers_of
from torch_xmesh.spec import array_of, mesh_grid


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
    grid = array_of(mesh.grid)
    for axis, index in enumerate(mesh.coordinate):
        at = [slice(None) if a == axis else i for a, i in enumerate(mesh.coordinate)]
        line = set(grid[tuple(at)].tolist())
        if index != 0 and len(line & covered) <= 1:
            return False
    return True


@dataclasses.dataclass(eq=False)
class _StandIn:
    """What a GradScaler looks at in an optimizer."""

    param_groups: list[dict[str, Any]]


class PipelineScaler:
    """A ``torch.amp.GradScaler`` for a pipeline: the engine's steps scale their losses by it, and an overflow in one
    stage skips the optimizer's step on every rank. ``step`` and ``unscale_`` are called by all ranks, once per step.
    A disabled one does nothing, here as there; it is disabled on all ranks."""

    def __init__(
        self,
        transfers: Transfers,
        scaler: "torch.amp.GradScaler",
        guard: Callable[[], AbstractContextManager[None]],
        device: torch.device,
    ) -> None:
        """`device`: where the scale is kept: that of this rank's parameters, or cpu if some are there."""
        if not isinstance(scaler, torch.amp.GradScaler):
            raise ValueError(f"engine.scaler() takes a torch.amp.GradScaler, got {type(scaler).__name__}")
        self._transfers = transfers
        self._guard = guard  # around what all ranks do together
        self._scaler = scaler
        self._unscaled: set[int] = set()
        self._device = device
        self._scale: float | None = None  # as it was read since the last change
        scaler.scale(torch.zeros((), device=device))  # makes its tensors

    def get_scale(self) -> float:
        """The factor by which the next step's losses are scaled."""
        if self._scale is None:  # a device is waited for
            self._scale = float(self._scaler.get_scale())
        return self._scale

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradients by the scale, and shares whether any rank found one that is not finite. Called by all
        ranks, before ``clip_grad_norm_``; :meth:`step` does it where it has not been done.

        Raises:
            RuntimeError: a second time since :meth:`update`, as ``GradScaler`` does.
        """
        if not self._scaler.is_enabled():
            return
        self._unscale_locals(optimizer)
        found = self._scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        mine = torch.tensor([sum(numbers_of(list(found.values())))], dtype=torch.float64, device="cpu")
        with self._guard():
            total = self._transfers.sum("found_inf", mine)
        # One flag where the scale is: the scaler would not wait for a copy of one from a device to the host.
        found.clear()
        found[self._device] = torch.full((), float(total[0] > 0), device=self._device)
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
        """The optimizer's step, unless some rank found an overflow. Called by all ranks.

        Returns:
            what ``optimizer.step(*args, **kwargs)`` does; None if it was skipped.
        """
        if id(optimizer) not in self._unscaled:
            self.unscale_(optimizer)
        self._unscaled.discard(id(optimizer))
        return self._scaler.step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Adapts the scale, alike on every rank: less after an overflow, more after many steps without one; or takes
        `new_scale`."""
        self._scale = None
        self._scaler.update(new_scale)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped scaler's scale and counters, equal on all ranks."""
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what :meth:`state_dict` gives."""
        self._scale = None
        self._scaler.load_state_dict(state)
