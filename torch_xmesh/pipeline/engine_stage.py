"""What one stage does for one microbatch: dropout's seed, DTensors at the boundary, the module, the loss."""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torch_xmesh.pipeline.boundary import Boundaries, StageMesh
from torch_xmesh.pipeline.dtensors import activation_mesh, to_local, with_waited_gradient
from torch_xmesh.pipeline.partition import Partition
from torch_xmesh.pipeline.seeds import dropout_rng, dropout_seed


class StepState:
    """What all stages of a rank know of the step under way.

    Attributes:
        sizes: samples per microbatch.
        targets: this rank's part of each microbatch's target, on the last stage.
        losses: this rank's share of each microbatch's loss.
        outputs: this rank's part of each microbatch's model output values, by name.
    """

    def __init__(self, number: int, sizes: Sequence[int], is_train: bool) -> None:
        self.number = number
        self.sizes = list(sizes)
        self.is_train = is_train
        self.keeps_outputs = True
        self.targets: list[Any] = []
        self.losses: dict[int, torch.Tensor] = {}
        self.outputs: dict[int, dict[str, torch.Tensor]] = {}


class StageWork:
    """Runs one stage's module; called by the C++ engine with the GIL."""

    def __init__(
        self,
        partition: Partition,
        stage: int,
        mesh: StageMesh,
        boundaries: Boundaries,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None,
        seed: int,
        scale_grads: bool,
    ) -> None:
        self.program = partition.stages[stage]
        self.mesh = mesh
        self.is_last = stage == partition.num_stages - 1
        self._partition = partition
        self._boundaries = boundaries
        self._loss_fn = loss_fn
        self._seed = seed
        self._scale_grads = scale_grads
        infos = partition.values
        self._inputs = [infos[name] for name in self.program.input_values]
        self._outputs = [infos[name] for name in self.program.output_values]
        self._has_dtensors = any(isinstance(parameter, DTensor) for parameter in self.program.module.parameters())

    @property
    def stage(self) -> int:
        return self.program.index

    def run(
        self, step: StepState, microbatch: int, inputs: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """Outputs as local tensors, and the weighted loss on the last stage in training."""
        samples = self.mesh.samples(step.sizes[microbatch])
        if samples == 0:
            return [torch.empty(info.shape_for(0), dtype=info.dtype) for info in self._outputs], None
        with torch.set_grad_enabled(step.is_train), self._rng(step, microbatch):
            outputs = self.program(*self._wrapped(inputs, step.sizes[microbatch]))
            if not self.is_last:
                return [self._sent(info, out) for info, out in zip(self._outputs, outputs, strict=True)], None
            loss = self._finish(step, microbatch, samples, outputs)
        return list(self._detached(outputs)), loss

    def _rng(self, step: StepState, microbatch: int) -> Any:
        if not (self.program.uses_rng and self.program.module.training):
            return contextlib.nullcontext()
        return dropout_rng(dropout_seed(self._seed, step.number, self.stage, microbatch, self.mesh.shard))

    def _wrapped(self, inputs: list[torch.Tensor], samples: int) -> list[torch.Tensor]:
        wrapped = []
        for info, tensor in zip(self._inputs, inputs, strict=True):
            if self._has_dtensors:
                tensor = with_waited_gradient(tensor)
            if self._boundaries.is_stacked(info):
                tensor = tensor.squeeze(0)
            elif self._boundaries.is_dtensor(info):
                mesh, axes = self._activation_mesh
                shape = torch.Size(info.shape_for(self.mesh.samples(samples)))
                stride = torch.empty(shape, device="meta").stride()
                whole = self._boundaries.placements(info, self.stage)
                placements = tuple(whole[axis] for axis in axes)
                tensor = DTensor.from_local(tensor, mesh, placements, run_check=False, shape=shape, stride=stride)
            wrapped.append(tensor)
        return wrapped

    @functools.cached_property
    def _activation_mesh(self) -> tuple[DeviceMesh, tuple[int, ...]]:
        return activation_mesh(self.mesh, self.program.module)

    def _sent(self, info: Any, output: torch.Tensor) -> torch.Tensor:
        if output.dtype != info.dtype:
            raise ValueError(
                f"value {info.name} of stage {self.stage} has dtype {output.dtype}, expected {info.dtype} as when the "
                "engine was made: make it in the same dtype and under the same torch.autocast in which it steps"
            )
        local = self._local(info, output)
        return local.unsqueeze(0) if self._boundaries.is_stacked(info) else local

    def _local(self, info: Any, output: torch.Tensor) -> torch.Tensor:
        placements = self._boundaries.placements(info, self.stage)
        return to_local(output, self.mesh, placements, f"value {info.name} of stage {self.stage}")

    def _finish(
        self, step: StepState, microbatch: int, samples: int, outputs: Sequence[torch.Tensor]
    ) -> torch.Tensor | None:
        named = dict(zip(self.program.output_values, outputs, strict=True))
        if step.keeps_outputs:
            step.outputs[microbatch] = dict(zip(named, self._detached(outputs), strict=True))
        if self._loss_fn is None or not step.targets:
            return None
        loss = self._loss_fn(self._partition.outputs.unflatten(named), step.targets[microbatch])
        if isinstance(loss, DTensor):
            loss = loss.full_tensor()
        if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
            shown = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ValueError(f"loss_fn must return a scalar tensor, got {shown}")
        share = samples / step.sizes[microbatch] if self._scale_grads else 1.0
        step.losses[microbatch] = loss.detach() * share
        return loss * (samples / sum(step.sizes)) if self._scale_grads else loss

    def _detached(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [self._local(info, out).detach() for info, out in zip(self._outputs, outputs, strict=True)]


class StageForward:
    """What the C++ engine calls; it holds the stages' work, not the Python engine, which holds the C++ engine."""

    def __init__(self, works: Mapping[int, StageWork]) -> None:
        self.step: StepState | None = None
        self._works = works

    def __call__(
        self, stage: int, microbatch: int, inputs: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        assert self.step is not None
        return self._works[stage].run(self.step, microbatch, inputs)
