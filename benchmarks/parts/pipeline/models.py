"""What the pipeline suites train: stages that wait instead of computing, a U-Transformer whose skips all cross, a GPT;
each also with messages of one element ("signal")."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

# Benchmarks are scripts, run by path: what they share with the examples is not beside them.
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

from train_gpt import ALPHABET, CONTEXT, GPT
from train_gpt import loss_fn as gpt_loss
from train_unet_transformer import UTransformer
from train_unet_transformer import loss_fn as unet_loss

Tensors = tuple[torch.Tensor, ...]
LossFn = Callable[[Any, Any], torch.Tensor]


def _wait(x: torch.Tensor, owner: "PacedBlock", forward_s: float, backward_s: float) -> torch.Tensor:
    result: torch.Tensor = _Wait.apply(x, owner, forward_s, backward_s)  # type: ignore[no-untyped-call]
    return result


class _Wait(torch.autograd.Function):
    """The identity, which takes its time both ways; sleeping holds neither a core nor the GIL."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, owner: "PacedBlock", forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.owner, ctx.seconds = owner, backward_s
        owner.wait(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        ctx.owner.wait(ctx.seconds)
        return grads[0], None, None, None


class PacedBlock(nn.Module):
    """[batch, width] to the same: F takes `forward_s`, and so do I and W, the halves of B, which wait on the way to the
    input's and to the weights' gradients. Every element counts in the loss, so every byte shows in a gradient."""

    def __init__(self, width: int, forward_s: float) -> None:
        super().__init__()
        self.linear = nn.Linear(min(width, 4), 1)
        self.seconds = forward_s
        self.is_waiting = True

    def wait(self, seconds: float) -> None:
        if self.is_waiting and seconds > 0:
            time.sleep(seconds)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = _wait(self.linear.weight, self, 0.0, self.seconds)
        shift = F.linear(x[:, : self.linear.in_features], weight, self.linear.bias)
        return x + _wait(shift, self, self.seconds, self.seconds)


class _Stage(nn.Module):
    """Consecutive parts of a model as one module that takes and gives tensors."""

    def __init__(self, parts: Sequence[nn.Module], run: Callable[..., Any]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self._run = run

    def forward(self, *values: torch.Tensor) -> Any:
        return self._run(*values)


class ToSignal(nn.Module):
    """A stage whose results stay: one element, on which all of them depend, goes on."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, *values: torch.Tensor) -> torch.Tensor:
        outputs = as_tuple(self.stage(*values))
        return torch.stack([output.flatten()[0] for output in outputs]).sum().view(1, 1)


class FromSignal(nn.Module):
    """A stage that makes its inputs itself, shifted by the one element that it is sent: it computes as much as if they
    came."""

    def __init__(self, stage: nn.Module, inputs: Tensors) -> None:
        super().__init__()
        self.stage = stage
        self.num_inputs = len(inputs)
        for index, value in enumerate(inputs):
            self.register_buffer(f"input{index}", value, persistent=False)

    def forward(self, signal: torch.Tensor) -> Any:
        return self.stage(*(getattr(self, f"input{index}") + signal.sum() for index in range(self.num_inputs)))


@dataclass
class Workload:
    """A model and how to cut it. `stages` are modules over the same parameters, stage k called with what stage k - 1
    returns: what a person writes by hand for an engine that does not trace. `args` and `target` are one step's batch;
    `split` names where all stages but the first start in `model`."""

    model: nn.Module
    split: list[str]
    stages: list[nn.Module]
    args: Tensors
    target: torch.Tensor
    loss_fn: LossFn
    num_microbatches: int

    @property
    def example(self) -> Tensors:
        """One microbatch's arguments."""
        return tuple(value[: len(value) // self.num_microbatches] for value in self.args)

    def wait(self, is_waiting: bool) -> None:
        """Switches waits (of paced models) on and off."""
        for module in self.model.modules():
            if isinstance(module, PacedBlock):
                module.is_waiting = is_waiting

    def boundaries(self) -> list[Tensors]:
        """What enters each stage for one microbatch; paced models do not wait."""
        values, entering = self.example, []
        self.wait(False)
        with torch.no_grad():
            for stage in self.stages:
                entering.append(values)
                values = as_tuple(stage(*values))
        self.wait(True)
        return entering

    def boundary_bytes(self) -> list[int]:
        """Bytes of one microbatch from stage k to stage k + 1."""
        return [sum(value.nbytes for value in values) for values in self.boundaries()[1:]]


def as_tuple(values: Any) -> Tensors:
    return tuple(values) if isinstance(values, tuple | list) else (values,)


def paced(
    *, num_stages: int, blocks_per_stage: int, microbatches: int, samples: int, width: int, forward_s: float
) -> Workload:
    """`num_stages` stages of `blocks_per_stage` blocks, all stages together taking forward_s * num_stages for F of one
    microbatch, which has `samples` rows of `width` floats."""
    torch.manual_seed(0)
    blocks = [PacedBlock(width, forward_s / blocks_per_stage) for _ in range(num_stages * blocks_per_stage)]
    model = nn.Sequential(*blocks)
    first = range(0, len(blocks), blocks_per_stage)
    stages: list[nn.Module] = [nn.Sequential(*blocks[k : k + blocks_per_stage]) for k in first]
    batch = torch.randn(samples * microbatches, width)
    target = torch.randn(samples * microbatches, width)
    return Workload(model, [str(k) for k in first][1:], stages, (batch,), target, F.mse_loss, microbatches)


def unet(*, microbatches: int, samples: int, size: int, width: int, levels: int, is_signal: bool = False) -> Workload:
    """The U-Transformer cut between bottom and decoders: every skip crosses."""
    torch.manual_seed(0)
    model = UTransformer(width, levels)

    def encode(image: torch.Tensor) -> Tensors:
        skips, x = [], image
        for encoder in model.encoders:
            skip, x = encoder(x)
            skips.append(skip)
        return (model.attention(model.bottom(x)), *skips)

    def decode(x: torch.Tensor, *skips: torch.Tensor) -> torch.Tensor:
        for decoder, skip in zip(model.decoders, reversed(skips), strict=True):
            x = decoder(x, skip)
        result: torch.Tensor = model.head(x)
        return result

    stages = [
        _Stage([*model.encoders, model.bottom, model.attention], encode),
        _Stage([*model.decoders, model.head], decode),
    ]
    batch = torch.randn(samples * microbatches, 1, size, size)
    target = torch.randint(0, 3, (samples * microbatches, size, size))
    whole = Workload(model, ["decoders.0"], list(stages), (batch,), target, unet_loss, microbatches)
    return signal_of(whole) if is_signal else whole


def gpt(*, microbatches: int, samples: int, width: int, depth: int, is_signal: bool = False) -> Workload:
    """The GPT of the example, its head untied: torch.distributed.pipelining ties no weights over stages."""
    torch.manual_seed(0)
    model = GPT(width, depth)
    model.head = nn.Linear(width, len(ALPHABET), bias=False)
    half = depth // 2

    def front(tokens: torch.Tensor) -> torch.Tensor:
        x = model.tokens(tokens) + model.positions
        for block in model.blocks[:half]:
            x = block(x)
        result: torch.Tensor = x
        return result

    def back(x: torch.Tensor) -> torch.Tensor:
        for block in model.blocks[half:]:
            x = block(x)
        result: torch.Tensor = model.head(model.norm(x))
        return result

    first = _Stage([model.tokens, *model.blocks[:half]], front)
    first.register_parameter("positions", model.positions)
    stages = [first, _Stage([*model.blocks[half:], model.norm, model.head], back)]
    batch = torch.randint(0, len(ALPHABET), (samples * microbatches, CONTEXT))
    target = torch.randint(0, len(ALPHABET), (samples * microbatches, CONTEXT))
    whole = Workload(model, [f"blocks.{half}"], list(stages), (batch,), target, gpt_loss, microbatches)
    return signal_of(whole) if is_signal else whole


def signal_of(whole: Workload) -> Workload:
    """The same two stages with messages of one element."""
    front, back = whole.stages
    inputs = whole.boundaries()[1]
    stages = [ToSignal(front), FromSignal(back, inputs)]
    return Workload(
        nn.Sequential(*stages), ["1"], list(stages), whole.args, whole.target, whole.loss_fn, whole.num_microbatches
    )


def make(kind: str, sizes: dict[str, Any]) -> Workload:
    """A workload by name: "paced", "unet" or "gpt", equal on every rank and at every call."""
    makers: dict[str, Callable[..., Workload]] = {"paced": paced, "unet": unet, "gpt": gpt}
    return makers[kind](**sizes)
