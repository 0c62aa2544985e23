"""The models with arguments, targets, losses and split points."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.nn import functional as F

from models import language, small, vision


def _mean_square(output: Any, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, target)


def _first_mean_square(output: Any, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output[0], target)


def _tokens(output: Any, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def _classes(output: Any, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output["logits"], target) + output["hidden"][1].square().mean()  # type: ignore[no-any-return]


def _pixels(output: Any, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target)


def _sequences(output: Any, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, target)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and how to use it.

    Attributes:
        batch: (samples) -> (args, kwargs, target), random from torch's global generator.
        splits: names of split points, several partitions.
        specs: chunk specs for args, kwargs, target and output where the samples are not in dim 0.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[tuple[Any, ...], dict[str, Any], Any]]
    loss: Callable[[Any, Any], torch.Tensor]
    splits: tuple[tuple[str, ...], ...]
    specs: dict[str, Any] = dataclasses.field(default_factory=dict)


def _rows(width: int, outputs: int) -> Callable[[int], tuple[tuple[Any, ...], dict[str, Any], Any]]:
    return lambda n: ((torch.randn(n, width),), {}, torch.randn(n, outputs))


def _words(n: int) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    return (torch.randint(0, 13, (n, 5)),), {}, torch.randint(0, 13, (n, 5))


def _masked(n: int) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    mask = torch.arange(6)[None, :] < torch.randint(2, 7, (n, 1))
    kwargs = {"mask": mask, "kinds": torch.randint(0, 2, (n, 6))}
    return (torch.randint(0, 11, (n, 6)),), kwargs, torch.randint(0, 3, (n,))


def _images(n: int) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    return (torch.randn(n, 1, 8, 8),), {}, torch.randint(0, 2, (n, 8, 8))


def _pairs(n: int) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    return ((torch.randn(n, 4), torch.randn(n, 4)),), {"scale": 0.5}, torch.randn(n, 4)


_SEQUENCE = TensorChunkSpec(1)  # type: ignore[no-untyped-call]
_CASES = (
    Case(
        "mlp",
        small.MLP,
        _rows(6, 3),
        _mean_square,
        (("layers.2",), ("layers.1", "layers.2", "layers.3"), ("dropout", "head")),
    ),
    Case(
        "mlp_dropout",
        lambda: small.MLP(dropout=0.3),
        _rows(6, 3),
        _mean_square,
        (("layers.1", "layers.3"),),
    ),
    Case("gpt", language.GPT, _words, _tokens, (("blocks.2",), ("blocks.1", "blocks.2", "head"), ("blocks.0.feed",))),
    Case("gpt_dropout", lambda: language.GPT(dropout=0.2), _words, _tokens, (("blocks.1", "blocks.3.norm2"),)),
    Case("gpt_checkpoint", lambda: language.GPT(recompute=True, dropout=0.2), _words, _tokens, (("blocks.1", "norm"),)),
    Case("bert", language.Encoder, _masked, _classes, (("layers.1",), ("layers.0", "layers.2", "pooler"))),
    Case(
        "moe",
        language.MixtureOfExperts,
        lambda n: ((torch.randn(n, 3, 6),), {}, torch.randn(n, 3, 6)),
        _first_mean_square,
        (("dense.1",), ("experts.0", "dense.1", "experts.2")),
    ),
    Case(
        "unet",
        vision.UTransformer,
        _images,
        _pixels,
        (("bottom",), ("encoders.1", "attention", "decoders.0", "head"), ("gates.0",)),
    ),
    Case(
        "conv",
        vision.ConvNet,
        lambda n: ((torch.randn(n, 2, 8, 8),), {}, torch.randn(n, 4)),
        _mean_square,
        (("act1",), ("norm1", "body.1", "body.2", "head")),
    ),
    Case(
        "lstm",
        small.Recurrent,
        lambda n: ((torch.randn(3, n, 5),), {}, torch.randn(3, n, 2)),
        _sequences,
        (("second",), ("middle", "second", "head")),
        {
            "args_chunk_spec": (_SEQUENCE,),
            "target_chunk_spec": _SEQUENCE,
            "output_merge_spec": _SEQUENCE,
        },
    ),
    Case("tied", small.TiedInside, _rows(5, 2), _mean_square, (("shared",), ("third",), ("second", "third", "last"))),
    Case("function", small.CustomFunction, _rows(4, 4), _mean_square, (("second",), ("second", "third"))),
    Case("hooks", small.Hooked, _rows(4, 4), _mean_square, (("second",), ("second", "third"))),
    Case("several", small.Several, _pairs, _mean_square, (("middle",), ("middle", "last"), ("inner.second", "last"))),
    Case("autocast", small.Autocast, _rows(8, 8), _mean_square, (("second",), ("second", "third"))),
    Case(
        "export",
        small.Branching,
        _rows(4, 4),
        lambda o, t: F.mse_loss(o.flatten(1), t),
        (("second",), ("second", "third")),
    ),
)


def cases() -> tuple[Case, ...]:
    """All models."""
    return _CASES


def model_names() -> list[str]:
    return [case.name for case in _CASES]
