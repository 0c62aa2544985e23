"""What split_perf.py runs: models, and the ways to run their backward, in one or two halves."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import torch_xmesh as xm


@dataclass(frozen=True, eq=False)
class Model:
    """A module in training, its input and the gradient of its output. `parts`: layers or nodes that a figure is divided
    by."""

    name: str
    module: nn.Module
    input: torch.Tensor
    output_gradient: torch.Tensor
    parts: int | None

    @classmethod
    def of(cls, name: str, module: nn.Module, shape: tuple[int, ...], parts: int | None = None) -> "Model":
        given = torch.randn(shape)
        with torch.no_grad():
            output = module(given)
        return cls(name, module, given, torch.randn_like(output), parts)


class _Residual(nn.Module):
    """Two convolutions with norms and a way around them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.body(x))


class _EagerBlock(nn.Module):
    """A transformer block with its attention written out, norms before, and GELU."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = self.qkv(self.norm1(x)).view(batch, length, 3, self._heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = split.unbind(0)
        scores = torch.softmax(query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5, dim=-1)
        x = x + self.mix((scores @ value).transpose(1, 2).reshape(batch, length, width))
        return x + self.feed(self.norm2(x))  # type: ignore[no-any-return]


class _Doublings(nn.Module):
    """So many operations, one after another, that have no weights."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self._count):
            x = x * 2
        return x


def linear(layers: int = 8, width: int = 1024, batch: int = 256) -> Model:
    """Linear and ReLU, by turns."""
    chain = [module for _ in range(layers) for module in (nn.Linear(width, width), nn.ReLU())]
    return Model.of("linear", nn.Sequential(*chain), (batch, width), layers)


def transformer(blocks: int = 4, width: int = 256, length: int = 128, batch: int = 4) -> Model:
    """torch's own blocks (fused attention, ReLU, norms after), without dropout."""
    chain = [nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True) for _ in range(blocks)]
    return Model.of("transformer", nn.Sequential(*chain), (batch, length, width))


def transformer_eager(blocks: int = 4, width: int = 256, length: int = 128, batch: int = 4) -> Model:
    """Blocks of the same size that save more: scores of attention, GELU's input."""
    chain = [_EagerBlock(width, 4) for _ in range(blocks)]
    return Model.of("transformer_eager", nn.Sequential(*chain), (batch, length, width))


def conv_norm(blocks: int = 3, channels: int = 32, size: int = 32, batch: int = 8) -> Model:
    """A convolution and residual blocks, each convolution with a batch norm."""
    stem = [nn.Conv2d(3, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()]
    return Model.of("conv_norm", nn.Sequential(*stem, *map(_Residual, [channels] * blocks)), (batch, 3, size, size))


def tiny_chain(layers: int) -> Model:
    """Linear layers on which nearly all time is overhead."""
    chain = [nn.Linear(8, 8) for _ in range(layers)]
    return Model.of(f"{layers} layers", nn.Sequential(*chain), (4, 8), layers)


def doublings(count: int) -> Model:
    """Nodes alone: nothing to cut, and one element to compute with."""
    return Model.of(f"{count} nodes", _Doublings(count), (1,), count)


_MAKERS: list[Callable[[], Model]] = [linear, transformer, transformer_eager, conv_norm]
MODELS = {make.__name__: make for make in _MAKERS}


class Pass:
    """One forward, ready for a backward. The output, and with it the graph, is dropped once its backward's first half
    has run."""

    def __init__(self, model: Model) -> None:
        self.weights = list(model.module.parameters())
        for weight in self.weights:
            weight.grad = None
        self.input = model.input.detach().requires_grad_()
        self.output: Any = None
        self.output_gradient = model.output_gradient
        self.input_gradient: torch.Tensor | None = None
        self.rest: Any = None
        """What the second half needs."""

    def gradients(self) -> list[torch.Tensor | None]:
        """What the backward has made: the input's gradient, then the weights'."""
        return [self.input_gradient, *(weight.grad for weight in self.weights)]


@dataclass(frozen=True)
class Method:
    """A way to run a backward. `is_rival`: it may raise, and be wrong."""

    name: str
    first: Callable[[Pass], None]
    second: Callable[[Pass], None] = lambda _: None
    is_rival: bool = False


def _full(run: Pass) -> None:
    torch.autograd.backward(run.output, run.output_gradient)
    run.input_gradient = run.input.grad


def _grad(run: Pass) -> None:
    (run.input_gradient,) = torch.autograd.grad(run.output, run.input, run.output_gradient)


def _ours_first(run: Pass) -> None:
    (run.input_gradient,), run.rest = xm.split_backward(run.output, run.output_gradient, run.input)


def _ours_second(run: Pass) -> None:
    run.rest()


def _torch_first(run: Pass) -> None:
    from torch.distributed.pipelining._backward import stage_backward_input

    (run.input_gradient,), run.rest = stage_backward_input(
        [run.output], [run.output_gradient], [run.input], iter(run.weights)
    )


def _torch_second(run: Pass) -> None:
    from torch.distributed.pipelining._backward import stage_backward_weight

    stage_backward_weight(iter(run.weights), run.rest)


FULL = Method("full", _full)
OURS = Method("ours", _ours_first, _ours_second)
TORCH = Method("torch", _torch_first, _torch_second, is_rival=True)
GRAD = Method("grad", _grad)
OURS_FIRST = Method("ours", _ours_first)
"""For models without weights."""


def num_wrong(found: list[torch.Tensor | None], expected: list[torch.Tensor | None]) -> int:
    """Elements that differ in a bit; a gradient that is missing, or should be, counts whole."""
    return sum(map(_num_differing, found, expected))


def _num_differing(found: torch.Tensor | None, expected: torch.Tensor | None) -> int:
    if found is None or expected is None:
        return sum(one.numel() for one in (found, expected) if one is not None)
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return expected.numel()
    bits = [one.detach().contiguous().view(torch.uint8) for one in (found, expected)]
    if torch.equal(*bits):
        return 0
    differs = (bits[0] != bits[1]).reshape(expected.numel(), expected.element_size())
    return int(differs.any(1).sum())
