"""Batch norm where samples lie on several devices: statistics are those of the whole batch, as one process has them
(S. Ioffe, C. Szegedy, Batch Normalization, 2015, algorithm 1)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from torch_xmesh.parallelism.running.local_rules import Local

_AddUp = Callable[[torch.Tensor, str], torch.Tensor]


class _Normalized(torch.autograd.Function):
    """Moments are brought together in 64 bits, in one sum each way: a variance is the difference of two of them."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        moments: tuple[torch.Tensor, torch.Tensor],
        add_up: _AddUp,
        parts: int,
    ) -> torch.Tensor:
        mean, inverse = moments
        centered = (x - _along(mean, x)) * _along(inverse, x)
        ctx.save_for_backward(x, mean, inverse, weight)
        ctx.add_up, ctx.parts, ctx.has_bias = add_up, parts, bias is not None
        out = centered if weight is None else centered * _along(weight, x)
        return (out if bias is None else out + _along(bias, x)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, mean, inverse, weight = ctx.saved_tensors
        gradient, dims = gradients[0].to(mean.dtype), _others(x)
        centered = (x - _along(mean, x)) * _along(inverse, x)
        of_bias, of_weight = gradient.sum(dims), (gradient * centered).sum(dims)
        both = ctx.add_up(torch.cat([of_bias, of_weight]).double(), "backward").to(inverse.dtype)
        count = x.numel() // x.shape[1] * ctx.parts
        means = [_along(total / count, x) for total in both.chunk(2)]
        scale = inverse if weight is None else inverse * weight
        of_x = (gradient - means[0] - centered * means[1]) * _along(scale, x)
        return (
            of_x.to(x.dtype),
            None if weight is None else of_weight.to(weight.dtype),
            of_bias.to(mean.dtype) if ctx.has_bias else None,
            None,
            None,
            None,
        )


def _others(x: torch.Tensor) -> list[int]:
    """All dims but that of the channels."""
    return [dim for dim in range(x.dim()) if dim != 1]


def _along(statistic: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A tensor [channels] beside one of [samples, channels, ...]."""
    return statistic.view(1, -1, *[1] * (x.dim() - 2))


def batch_norm(local: Local, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """As torch.nn.functional's, on a device's samples or channels."""
    names = ["input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"]
    given: dict[str, Any] = {"weight": None, "bias": None, "training": False, "momentum": 0.1, "eps": 1e-5}
    given |= dict(zip(names, args, strict=False)) | dict(kwargs)
    x, axes = given["input"], local.axes_of("n")
    running = given.get("running_mean"), given.get("running_var")
    if not axes or not (given["training"] or running[0] is None):
        return F.batch_norm(**given)
    parts = 1
    for axis in axes:
        parts *= local.mesh_shape[axis]

    def add_up(part: torch.Tensor, why: str) -> torch.Tensor:
        for axis in axes:
            part = local.moves.all_reduce(part, axis, local.operator.makes[0].name, why)
        return part

    kept = x.dtype if x.dtype == torch.float64 else torch.float32
    with torch.no_grad():
        variance, mean = (statistic.double() for statistic in torch.var_mean(x.to(kept), _others(x), correction=0))
        mean, square = (add_up(torch.cat([mean, variance + mean.square()]), "forward") / parts).chunk(2)
        variance = (square - mean.square()).clamp_min(0.0)
        count = x.numel() // x.shape[1] * parts
        for own, found in zip(running, (mean, variance * count / max(count - 1, 1)), strict=True):
            if own is not None:
                own.lerp_(found.to(own.dtype), given["momentum"])
        moments = mean.to(kept), (variance + given["eps"]).rsqrt().to(kept)
    out: torch.Tensor = _Normalized.apply(x, given["weight"], given["bias"], moments, add_up, parts)  # type: ignore[no-untyped-call]
    return out
