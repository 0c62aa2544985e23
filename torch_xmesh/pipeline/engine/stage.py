"""What one stage does for one microbatch: dropout's seed, DTensors at the boundary, the module, the loss."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torch_xmesh.generators import Drawn
from torch_xmesh.pipeline.cut.losses import loss_of, needs_target
from torch_xmesh.pipeline.cut.partition import Partition
from torch_xmesh.pipeline.cut.units import Units
from torch_xmesh.pipeline.engine.boundary import Boundaries
from torch_xmesh.pipeline.engine.measuring import MemoryMeter
from torch_xmesh.pipeline.ranks.dtensors import activation_mesh, to_local, with_waited_gradient
from torch_xmesh.pipeline.ranks.stage_mesh import StageMesh
from torch_xmesh.pipeline.stages.source import StageSource
from torch_xmesh.pipeline.state.seeds import dropout_rng, dropout_seed
from torch_xmesh.spec import core_spec


class StepState:
    """What all stages of a rank know of the step under way.

    Attributes:
        sizes: samples per microbatch.
        codes: by stage, what it runs for each microbatch, if it was recorded; None without samples.
        drawn: by stage and microbatch the state of random numbers behind a segment, for the next one.
        targets: this rank's part of each microbatch's target, on the last stage.
        losses: this rank's share of each microbatch's loss.
        outputs: this rank's part of each microbatch's model output values, by name.
    """

    def __init__(self, number: int, sizes: Sequence[int], is_train: bool) -> None:
        self.number = number
        self.sizes = list(sizes)
        self.is_train = is_train
        self.keeps_outputs = True
        self.meter: MemoryMeter | None = None  # counts memory in the first microbatch
        self.codes: Mapping[int, list[Any]] = {}
        self.drawn: dict[tuple[int, int], Drawn] = {}
        self.targets: list[Any] = []
        self.losses: dict[int, torch.Tensor] = {}
        self.outputs: dict[int, dict[str, torch.Tensor]] = {}


class StageWork:
    """Runs one stage's module; called by the C++ engine with the GIL.

    Args:
        num_parts: parts of a microbatch's samples on this stage's mesh, besides its data shards; the loss is that of
            one part.
    """

    def __init__(
        self,
        partition: Partition,
        stage: int,
        *,
        mesh: StageMesh,
        boundaries: Boundaries,
        loss_fn: Callable[..., torch.Tensor] | None,
        seed: int,
        scale_grads: bool,
        num_parts: int = 1,
    ) -> None:
        self.program = partition.stages[stage]
        self.mesh = mesh
        self.is_last = stage == partition.num_stages - 1
        self._partition = partition
        self._boundaries = boundaries
        self._loss_fn = loss_fn
        self._seed = seed
        self._scale_grads = scale_grads
        self._num_parts = num_parts
        infos = partition.values
        self._inputs = [infos[name] for name in self.program.input_values]
        self._outputs = [infos[name] for name in self.program.output_values]
        self._placements = [boundaries.placements(info, stage) for info in self._outputs]
        self._is_stacked = [boundaries.is_stacked(info) for info in self._outputs]
        self._shard = mesh.shard
        self._samples: dict[int, int] = {}  # this rank's samples, by samples of the microbatch
        self._shapes: dict[int, list[torch.Size]] = {}  # shapes of this rank's outputs, by samples of the microbatch
        edges = () if self.program.segments is None else self.program.segments.edges
        self._sent_values = [
            [value for edge in edges if edge.is_sent and edge.from_segment == segment for value in edge.values]
            for segment in range(self.program.num_segments)
        ]
        self._has_dtensors = any(isinstance(parameter, DTensor) for parameter in self.program.module.parameters())
        self._takes_as_sent = not self._has_dtensors and not any(
            boundaries.is_stacked(info) or boundaries.is_dtensor(info) for info in self._inputs
        )

    def at(self, partition: Partition, boundaries: Boundaries) -> "StageWork":
        """The same for values of other sizes."""
        return StageWork(
            partition,
            self.stage,
            mesh=self.mesh,
            boundaries=boundaries,
            loss_fn=self._loss_fn,
            seed=self._seed,
            scale_grads=self._scale_grads,
            num_parts=self._num_parts,
        )

    @property
    def stage(self) -> int:
        return self.program.index

    def run(
        self, step: StepState, microbatch: int, inputs: list[torch.Tensor], segment: int = 0
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """Outputs as local tensors, on the last stage as the module made them; and the loss where there is a target. Of
        a stage that is divided one segment is run; the last one's outputs are the stage's."""
        samples = self.samples(step.sizes[microbatch])
        if samples == 0:
            return self._empty_outputs(), None
        if torch.is_grad_enabled() is not step.is_train:  # the step has set it; a stage may have left it otherwise
            torch.set_grad_enabled(step.is_train)
        code = step.codes[self.stage][microbatch] if self.is_recorded else None
        uses_rng = self.program.uses_rng if code is None else code.uses_rng
        if not (uses_rng and (self.program.module.training or self.program.is_always_seeded)):
            return self._run(step, microbatch, samples, inputs, segment)
        seed = dropout_seed(
            seed=self._seed, step=step.number, stage=self.stage, microbatch=microbatch, data_shard=self._shard
        )
        drawn = step.drawn.pop((self.stage, microbatch), None)
        with dropout_rng(seed, self.mesh.device, drawn=drawn) as state:
            result = self._run(step, microbatch, samples, inputs, segment)
            if segment + 1 < self.program.num_segments:  # masks do not hang on where a stage is divided
                step.drawn[self.stage, microbatch] = state()
            return result

    def _empty_outputs(self) -> list[torch.Tensor]:
        device = self.mesh.device
        return [torch.empty(info.shape_for(0), dtype=info.dtype, device=device) for info in self._outputs]

    @property
    def is_recorded(self) -> bool:
        """The stage is one of a model that was cut; it was not given ready."""
        return self.program.codes is not None

    def codes(self, sizes: Sequence[int], inputs: Sequence[Sequence[torch.Tensor]] | None) -> list[Any]:
        """What a recorded stage runs for each microbatch, of these sizes; `inputs`: those of the model's inputs that it
        takes, by microbatch.

        Raises:
            ValueError: the model cannot be recorded for them.
        """
        if not self.program.codes.reads_values:
            made = {size: self._code(size, ()) for size in dict.fromkeys(sizes)}
            return [made[size] for size in sizes]
        return [self._code(size, () if inputs is None else inputs[index]) for index, size in enumerate(sizes)]

    def _code(self, size: int, inputs: Sequence[torch.Tensor]) -> Any:
        samples = self.samples(size)
        given = dict(zip(self.program.model_inputs, inputs, strict=bool(inputs)))
        return self.program.code(samples, given) if samples else None

    def samples(self, size: int) -> int:
        """How many samples this rank has of a microbatch of `size` samples."""
        if size not in self._samples:
            self._samples[size] = self.mesh.samples(size)
        return self._samples[size]

    def _run(
        self, step: StepState, microbatch: int, samples: int, inputs: list[torch.Tensor], segment: int
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        if self.program.segments is not None:
            outputs = self.program.segments.run(segment, inputs)
            if segment + 1 < self.program.num_segments:
                self._check_types(segment, outputs)
                return list(outputs), None
        else:
            given = self._wrapped(inputs, step.sizes[microbatch])
            code = step.codes[self.stage][microbatch] if self.is_recorded else None
            outputs = self.program(*given) if code is None else self.program.run(code, given)
        if self.is_last:
            loss = self._finish(step, microbatch, samples, outputs)
            if loss is not None and step.is_train and not loss.requires_grad:
                self._check_untrained(inputs)
            return list(outputs), loss
        if len(outputs) != len(self._outputs):
            raise ValueError(f"stage {self.stage} returned {len(outputs)} tensors, expected {len(self._outputs)}")
        size = step.sizes[microbatch]
        shapes = self._shapes.get(size)
        if shapes is None:
            shapes = self._shapes[size] = self._expected_shapes(size)
        return [self._sent(index, output, shapes[index], microbatch) for index, output in enumerate(outputs)], None

    def _check_types(self, segment: int, outputs: Sequence[torch.Tensor]) -> None:
        """What other segments are sent has the types with which that was planned."""
        for value in self._sent_values[segment]:
            if (found := outputs[value.output].dtype) != value.dtype:
                raise ValueError(
                    f"value {value.name} of stage {self.stage} has dtype {found} behind segment {segment}, expected "
                    f"{value.dtype}"
                )

    def _wrapped(self, inputs: list[torch.Tensor], samples: int) -> list[torch.Tensor]:
        if self._takes_as_sent:
            return inputs
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

    def _expected_shapes(self, size: int) -> list[torch.Size]:
        """The shapes of this rank's part of each output, in a microbatch of `size` samples."""
        shapes = []
        for info, placements, is_stacked in zip(self._outputs, self._placements, self._is_stacked, strict=True):
            spec = core_spec(self._boundaries.sent_shape(info, size), info.dtype, self.mesh.grid, placements)
            shapes.append(torch.Size((spec.local_shape(self.mesh.rank) or [])[int(is_stacked) :]))
        return shapes

    def _sent(self, index: int, output: torch.Tensor, shape: torch.Size, microbatch: int) -> torch.Tensor:
        info = self._outputs[index]
        if output.dtype != info.dtype:
            raise ValueError(
                f"value {info.name} of stage {self.stage} has dtype {output.dtype}, expected {info.dtype} as the model "
                "gives it without hooks of yours and wrappers: convert it back where one of them, or model.to(), "
                "changes it; where stages are on several kinds of device, autocast is on for all of them or for none"
            )
        local = self._local(index, output)
        if local.shape != shape:
            raise ValueError(
                f"value {info.name} of stage {self.stage} has shape {list(local.shape)} in microbatch {microbatch}, "
                f"expected {list(shape)} on rank {self.mesh.rank}: the shape of its example run, with this "
                "microbatch's samples"
            )
        return local.unsqueeze(0) if self._is_stacked[index] else local

    def _local(self, index: int, output: torch.Tensor) -> torch.Tensor:
        if type(output) is torch.Tensor:
            return output
        what = f"value {self._outputs[index].name} of stage {self.stage}"
        return to_local(output, self.mesh, self._placements[index], what)

    def _finish(
        self, step: StepState, microbatch: int, samples: int, outputs: Sequence[torch.Tensor]
    ) -> torch.Tensor | None:
        names = self.program.output_values
        if step.keeps_outputs:
            local = (self._local(index, output).detach() for index, output in enumerate(outputs))
            step.outputs[microbatch] = dict(zip(names, local, strict=True))
        if self._loss_fn is None or not (step.targets or step.is_train or not needs_target(self._loss_fn)):
            return None
        whole = self._partition.outputs
        output = outputs[0] if whole.is_single else whole.unflatten(dict(zip(names, outputs, strict=True)))
        loss = loss_of(self._loss_fn, output, step.targets[microbatch] if step.targets else None)
        if isinstance(loss, DTensor):
            loss = loss.full_tensor()
        if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
            shown = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ValueError(f"loss_fn must return a scalar tensor, got {shown}")
        share = samples / step.sizes[microbatch] / self._num_parts if self._scale_grads else 1.0
        step.losses[microbatch] = loss.detach() if share == 1.0 else loss.detach() * share
        return loss

    def _check_untrained(self, inputs: Sequence[torch.Tensor]) -> None:
        """A loss that carries no gradient is right only where nothing before it is trained."""
        if any(tensor.requires_grad for tensor in (*inputs, *self.program.module.parameters())):
            raise ValueError(
                "loss_fn returned a loss that does not require grad, while parameters are trained: compute it from the "
                "output without detach(), item() or no_grad()"
            )

    def loss_weights(self, sizes: Sequence[int]) -> list[float]:
        """By microbatch, the weight of this rank's loss in the step's."""
        total = sum(sizes)
        return [self.samples(size) / total / self._num_parts if self._scale_grads else 1.0 for size in sizes]


class StageForward:
    """What the C++ engine is given to call in a step."""

    def __init__(self, works: Mapping[int, StageWork], units: Units, source: StageSource) -> None:
        self.step: StepState | None = None
        self.works = works  # those of the step that runs
        self._source = source
        self._units = {unit: (stage, place) for unit, stage, place in units.of_stages(list(works))}

    def __call__(
        self, unit: int, microbatch: int, inputs: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        assert self.step is not None
        (stage, segment), step = self._units[unit], self.step
        work = self.works[stage]
        if step.meter is not None and microbatch == 0:
            return step.meter.around(lambda: work.run(step, microbatch, inputs, segment), stage, inputs)
        return work.run(step, microbatch, inputs, segment)

    def weights_done(self, unit: int, microbatch: int, is_last: bool) -> None:
        """Behind each B and W."""
        self._source.weights_done(*self._units[unit], microbatch, is_last)
