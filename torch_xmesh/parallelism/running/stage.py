"""A stage of a plan as a module that runs on each device's parts."""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torch_xmesh.parallelism.conversions import Conversions
from torch_xmesh.parallelism.plan import ParallelPlan
from torch_xmesh.parallelism.running.called_modules import called_modules, names_called
from torch_xmesh.parallelism.running.collectives import Moves, Seen
from torch_xmesh.parallelism.running.compiled import Compiler
from torch_xmesh.parallelism.running.forward import ShardedForward
from torch_xmesh.parallelism.running.loss import LossShares
from torch_xmesh.parallelism.running.parameters import StageParameters
from torch_xmesh.parallelism.running.refusals import ForwardModes
from torch_xmesh.parallelism.running.stage_groups import StageGroups
from torch_xmesh.parallelism.running.stage_parts import stage_parts


class ShardedStage(nn.Module):
    """A stage of a plan on its mesh. Parameters are DTensors, placed as the plan keeps them, under the model's own
    names.

    It is given the model's arguments that it reads, whole, and this device's parts of the values that enter it. It
    gives a tuple of this device's parts of those that later stages need; the last stage the model's outputs.

    Args:
        model: with values; they are the same on all devices.
        turns: its forward in both modes, of training and evaluation; that in which it comes was planned.
        num_samples: samples of a microbatch, where the model's outputs go to a loss that is computed on each device's
            samples; None: outputs stay as the plan leaves them.
        on_collective: told of each collective that moves values.
        groups: which carry its collectives; None: the mesh's own.

    Raises:
        ValueError: something of the plan cannot be run.
    """

    def __init__(
        self,
        model: nn.Module,
        turns: ForwardModes,
        plan: ParallelPlan,
        number: int,
        mesh: DeviceMesh,
        *,
        num_samples: int | None = None,
        on_collective: Seen | None = None,
        groups: StageGroups | None = None,
    ) -> None:
        super().__init__()
        planned = plan.stages[number]
        if tuple(mesh.shape) != planned.mesh_shape:
            raise ValueError(f"the plan's mesh is {planned.mesh_shape}, got one of {tuple(mesh.shape)}")
        self._moves = Moves(mesh, on_collective, groups)
        conversions = Conversions(planned.mesh_shape, planned.links, plan.collectives)
        ports = stage_parts(turns.recorded, plan)
        called = called_modules(model, names_called(turns.recorded, ports[number].operators))
        self.first = ShardedForward(turns.recorded, plan, number, self._moves, conversions, num_samples, called)
        self._other: ShardedForward | ValueError = self.first
        if isinstance(turns.other, ValueError):
            self._other = turns.other
        elif turns.other is not None:
            try:
                self._other = ShardedForward(turns.other, plan, number, self._moves, conversions, num_samples, called)
                self._other.check_like(self.first)
            except ValueError as error:
                self._other = error
        self.own = StageParameters(turns.recorded, planned, self.first.gradients, mesh, self._moves, conversions)
        self._depends_on_mode = turns.other is not None
        self._first_modes: list[tuple[nn.Module, bool]] = []
        self.own.keep(model, self, called)
        if number == 0:
            read = {parameter.name for stage in plan.stages for parameter in stage.parameters}
            everywhere = names_called(turns.recorded, range(len(turns.recorded.sites)))
            self.own.keep_unread(model, self, read, everywhere)
        for path, module in self.named_modules():
            module.training = model.get_submodule(path).training
        self._first_modes.extend((module, module.training) for module in self.modules())
        self.own.begin_step()

    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """One microbatch."""
        return self._of_mode().run(given, self.own)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """What the stage does between collectives is compiled, at the first step: ``torch.compile`` with these
        arguments but the first."""
        if args:
            raise TypeError("compile() of a planned stage takes torch.compile's keyword arguments")
        compiler = Compiler(kwargs)
        for forward in {self.first, self._other}:
            if isinstance(forward, ShardedForward):
                forward.compile(compiler)

    def check_mode(self) -> None:
        """Raises ValueError where modules are in modes in which the stage cannot be run."""
        self._of_mode()

    def _of_mode(self) -> ShardedForward:
        if not self._depends_on_mode or all(module.training == mode for module, mode in self._first_modes):
            return self.first
        first, other = ("training", "evaluation") if self._first_modes[0][1] else ("evaluation", "training")
        if isinstance(self._other, ValueError):
            raise ValueError(f"with a plan this model runs in {first} mode alone, in which it came: {self._other}")
        if any(module.training == self._first_modes[0][1] for module, _ in self._first_modes):
            raise ValueError(f"with a plan this model's modules are in the modes in which they came, or all in {other}")
        return self._other

    @property
    def coordinate(self) -> tuple[int, ...]:
        """This device's coordinate in the stage's mesh."""
        return self._moves.coordinate

    @property
    def whole_because(self) -> str:
        """Why its backward is never split; empty where that depends on the graph."""
        other = "" if isinstance(self._other, ValueError) else self._other.whole_because
        return self.first.whole_because or other

    @property
    def loss_shares(self) -> LossShares | None:
        """How devices share the loss, if this is the last stage and each device computes the loss of its samples; else
        None."""
        return self.first.loss_shares
