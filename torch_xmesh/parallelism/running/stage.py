"""A stage of a plan as a module that runs on each device's parts."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torch_xmesh.parallelism.forward_modes import ForwardModes
from torch_xmesh.parallelism.operators import Recorded
from torch_xmesh.parallelism.plan import ParallelPlan
from torch_xmesh.parallelism.program import EVALUATION, TRAINING
from torch_xmesh.parallelism.running.called_modules import called_modules, names_called
from torch_xmesh.parallelism.running.collectives import Moves, Seen
from torch_xmesh.parallelism.running.compiled import Compiler
from torch_xmesh.parallelism.running.forward import ShardedForward
from torch_xmesh.parallelism.running.loss import LossShares
from torch_xmesh.parallelism.running.parameters import StageParameters
from torch_xmesh.parallelism.running.stage_groups import StageGroups
from torch_xmesh.pipeline.ranks.transfers import Transfers


class ShardedStage(nn.Module):
    """A stage of a plan on its mesh. Parameters are DTensors, placed as the plan keeps them, under the model's own
    names.

    It is given the model's arguments that it reads, whole, and this device's parts of the values that enter it. It
    gives a tuple of this device's parts of those that later stages need; the last stage the model's outputs.

    Args:
        model: with values; they are the same on all devices.
        modes: its forward in both modes, of training and evaluation.
        plan: with programs.
        transfers: those of the pipeline.
        is_by_samples: the loss is a mean over samples, which each device of the last stage computes on some of them.
        on_collective: told of each collective that moves values.
        groups: which carry its collectives; None: the mesh's own.

    Attributes:
        loss_shares: how devices share the loss, on the last stage; None elsewhere.

    Raises:
        ValueError: something of the plan cannot be run.
    """

    def __init__(
        self,
        model: nn.Module,
        modes: ForwardModes,
        plan: ParallelPlan,
        number: int,
        mesh: DeviceMesh,
        transfers: Transfers,
        *,
        is_by_samples: bool = True,
        on_collective: Seen | None = None,
        groups: StageGroups | None = None,
    ) -> None:
        super().__init__()
        planned = plan.stages[number]
        if tuple(mesh.shape) != planned.mesh_shape:
            raise ValueError(f"the plan's mesh is {planned.mesh_shape}, got one of {tuple(mesh.shape)}")
        self._moves = Moves(mesh, on_collective, groups)
        programs = {
            mode: program for mode in (TRAINING, EVALUATION) for program in planned.programs if program.does(mode)
        }
        own_mode = TRAINING if modes.is_training else EVALUATION
        if own_mode not in programs:
            raise ValueError(f"the plan runs in {modes.other_mode} mode alone: {plan.one_mode_because}")
        names = {operator.name for operator in programs[own_mode].operators}
        called = called_modules(model, names_called(modes.recorded, names))

        def forward(recorded: Recorded, mode: str) -> ShardedForward:
            if mode not in programs:
                raise ValueError(plan.one_mode_because)
            return ShardedForward(recorded, planned, programs[mode], self._moves, called, is_by_samples=is_by_samples)

        self.first = forward(modes.recorded, own_mode)
        self._other: ShardedForward | ValueError = self.first
        if isinstance(modes.other, ValueError):
            self._other = modes.other
        elif modes.other is not None:
            try:
                self._other = other = forward(modes.other, modes.other_mode)
                if other.segments.text != self.first.segments.text:
                    raise ValueError("what its segments pass on differs between the modes")
            except ValueError as error:
                self._other = error
        is_last = number + 1 == len(plan.stages)
        self.loss_shares = LossShares(self._moves, [*self.first.left_states.values()]) if is_last else None
        readers: dict[str, set[int]] = {parameter.name: set() for parameter in planned.parameters}
        for of_mode in self._forwards():
            for name, segments in of_mode.readers().items():
                readers[name] |= segments
        self.own = StageParameters(
            modes.recorded,
            planned,
            mesh,
            self._moves,
            stage=number,
            readers={name: sorted(segments) for name, segments in readers.items()},
            transfers=transfers,
        )
        self._depends_on_mode = modes.other is not None
        self._first_modes: list[tuple[nn.Module, bool]] = []
        self.own.keep(model, self, called)
        if number == 0:
            read = {parameter.name for stage in plan.stages for parameter in stage.parameters}
            everywhere = names_called(modes.recorded)
            self.own.keep_unread(model, self, read, everywhere)
        self.own.plan()
        for path, module in self.named_modules():
            module.training = model.get_submodule(path).training
        self._first_modes.extend((module, module.training) for module in self.modules())

    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """One microbatch."""
        return self._of_mode().run(given, self.own)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """What the stage does between collectives is compiled, at the first step: ``torch.compile`` with these
        arguments but the first."""
        if args:
            raise TypeError("compile() of a planned stage takes torch.compile's keyword arguments")
        compiler = Compiler(kwargs)
        for forward in dict.fromkeys(self._forwards()):
            forward.compile(compiler)

    def check_mode(self) -> None:
        """Raises ValueError where modules are in modes in which the stage cannot be run, or where a hook of the stage's
        would not be called."""
        self._of_mode()
        if self.first.segments.count > 1 and (self._forward_hooks or self._forward_pre_hooks):
            raise ValueError(
                "a stage that is divided into segments has a forward hook, which would not be called: the engine runs "
                "its segments"
            )

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

    def run_segment(self, segment: int, given: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """One segment of a microbatch, in the mode in which the step was begun."""
        return self._chosen.run_segment(segment, given, self.own)

    def begin_step(self) -> None:
        """Its parameters are made ready for all microbatches, in the modes in which its modules are."""
        self._chosen = self._of_mode()
        self.own.begin_step()

    @property
    def whole_because(self) -> list[str]:
        """By segment why its backward is never split; empty where that depends on the graph."""
        modes = [forward.whole_because for forward in self._forwards()]
        return [next(filter(None, reasons), "") for reasons in zip(*modes, strict=True)]

    def _forwards(self) -> list[ShardedForward]:
        """Of the modes that can be run."""
        return [forward for forward in (self.first, self._other) if isinstance(forward, ShardedForward)]
