"""How one stage is called."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from torch_xmesh.pipeline.cut.ready_adapter import ReadyAdapter
from torch_xmesh.pipeline.cut.stage_module import StageModule
from torch_xmesh.pipeline.cut.stage_segments import StageSegments
from torch_xmesh.pipeline.cut.value_info import ValueInfo


@dataclasses.dataclass
class StageProgram:
    """One stage: calling it maps its input values to its output values, on one autograd graph.

    Attributes:
        module: shares parameters, buffers and submodules with the model, under the model's names; may be replaced by
            a wrapper with the same call.
        input_values: order of the inputs; `model_inputs` are those that the user passes to the step.
        output_values: order of the outputs. In the last stage: the model's outputs, an earlier stage's ones handed
            through.
        is_always_seeded: where it draws random numbers, they follow from the engine's seed in any mode.
        uses_rng: False if the stage certainly draws no random numbers in training mode.
        adapter: how a ready module is called, None for a recorded one.
        codes: what a recorded one may run.
        infos: what is known of its input values.
        whole_because: why its backward is never split; empty where that depends on what it computes.
        waits_in_weights: in each of its W, or behind it, devices wait for each other.
        inner: the module that runs the codes, within what may be around it.
        num_segments: of how many it consists, known on all ranks; `segments`: what they are, on the stage's own.
    """

    index: int
    module: nn.Module
    input_values: tuple[str, ...]
    output_values: tuple[str, ...]
    model_inputs: tuple[str, ...]
    uses_rng: bool = True
    adapter: ReadyAdapter | None = None
    codes: Any = dataclasses.field(default=None, repr=False)
    infos: Sequence[ValueInfo] = dataclasses.field(default=(), repr=False)
    inner: StageModule | None = dataclasses.field(default=None, repr=False)
    is_always_seeded: bool = False
    whole_because: str = ""
    waits_in_weights: bool = False
    num_segments: int = 1
    segments: StageSegments | None = None

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the stage.

        Raises:
            ValueError: another number of inputs than `input_values`, or the model cannot be recorded for them.
        """
        if len(inputs) != len(self.input_values):
            raise ValueError(
                f"stage {self.index} takes {len(self.input_values)} inputs {list(self.input_values)}, got {len(inputs)}"
            )
        if self.adapter is not None:
            return self.adapter.run(self.index, self.module, inputs)
        given = {
            name: tensor for name, tensor in zip(self.input_values, inputs, strict=True) if name in self.model_inputs
        }
        return self.run(self.code(self._samples(inputs), given), inputs)

    def code(self, samples: int, given: Mapping[str, torch.Tensor]) -> Any:
        """What a recorded stage runs for so many samples; `given`: the model's inputs that it takes, by name.

        Raises:
            ValueError: the model cannot be recorded for them.
        """
        assert self.inner is not None
        return self.codes.of(samples, given, self.inner.mode)

    def run(self, code: Any, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Runs a recorded stage by a code of its own."""
        assert self.inner is not None
        self.inner.chosen = code
        return tuple(self.module(*inputs))

    def on_device(self, device: torch.device) -> None:
        """From now on it runs there; its parameters and buffers are there already."""
        if self.inner is not None:
            self.inner.on_device(device)

    def begin_step(self) -> None:
        """What ran in the last step runs no more, neither in a checkpoint's backward."""
        if self.inner is not None:
            self.inner.forget()

    def _samples(self, inputs: Sequence[torch.Tensor]) -> int:
        """How many samples the inputs hold."""
        for info, tensor in zip(self.infos, inputs, strict=True):
            if info.batch_dim is not None:
                return tensor.size(info.batch_dim) // info.tensor.sizes[info.batch_dim].per_sample
        return self.infos[0].samples if self.infos else 0

    def parameter_names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.module.named_parameters())
