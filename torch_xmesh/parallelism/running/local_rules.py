"""How operators run on parts where that is not the call itself."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from torch_xmesh.parallelism.loops import PARTIAL, PASS, Choice
from torch_xmesh.parallelism.operators import Operator


@dataclasses.dataclass(frozen=True)
class Local:
    """An operator on one device.

    Attributes:
        function: the call itself.
        coordinate: of the device, along each mesh axis.
    """

    operator: Operator
    choice: Choice
    mesh_shape: tuple[int, ...]
    coordinate: tuple[int, ...]
    function: Callable[..., Any]

    def axes_of(self, label: str) -> list[int]:
        """The mesh axes that shard a loop."""
        return [axis for axis, own in enumerate(self.choice.axes) if own == label]

    @property
    def summands(self) -> int:
        """How many devices make summands of the output."""
        held = zip(self.mesh_shape, self.choice.axes, self.choice.outputs[0].value, strict=True)
        return math.prod(size for size, label, state in held if state == PARTIAL and label != PASS)

    @property
    def is_first_summand(self) -> bool:
        """Whether this device's is the first of them."""
        held = zip(self.coordinate, self.choice.axes, self.choice.outputs[0].value, strict=True)
        return all(at == 0 for at, label, state in held if state == PARTIAL and label != PASS)

    def local_shape(self) -> list[int]:
        """Of the part of the output."""
        shape = list(self.operator.makes[0].shape)
        for held, size in zip(self.choice.outputs[0].value, self.mesh_shape, strict=True):
            if held >= 0:
                shape[held] //= size
        return shape


Rule = Callable[[Local, Sequence[Any], Mapping[str, Any]], Any]
rules: dict[str, Rule] = {}
"""By an operator's kind."""


def rule(*kinds: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        for kind in kinds:
            rules[kind] = function
        return function

    return register


class _AddedOnce(torch.autograd.Function):
    """Of devices that make summands one adds it; all have its gradient."""

    @staticmethod
    def forward(ctx: Any, sum_of: torch.Tensor, added: torch.Tensor, is_first: bool) -> torch.Tensor:
        ctx.shape = added.shape
        return sum_of + added if is_first else sum_of.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        return gradient, gradient.sum_to_size(ctx.shape), None


@rule("linear")
def linear(local: Local, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The bias is added once."""
    x, weight, bias = (*args, *(kwargs.get(name) for name in ("weight", "bias")[len(args) - 1 :]))[:3]
    if bias is None or local.summands == 1:
        return F.linear(x, weight, bias)
    out: torch.Tensor = _AddedOnce.apply(F.linear(x, weight), bias, local.is_first_summand)  # type: ignore[no-untyped-call]
    return out


@rule(
    "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "_unsafe_view", "view_as", "reshape_as", "ravel"
)
def view(local: Local, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return args[0].reshape(local.local_shape())


@rule("expand", "expand_as", "broadcast_to")
def expand(local: Local, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return args[0].expand(local.local_shape())


@rule("mean")
def mean(local: Local, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Of the whole: a part's mean over as many."""
    return local.function(*args, **kwargs) / local.summands


@rule("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits", "binary_cross_entropy")
def distances(local: Local, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A mean is over as many as the whole has."""
    made = local.function(*args, **kwargs)
    is_mean = kwargs.get("reduction", "mean") == "mean" and "sum" not in args and "none" not in args
    return made / local.summands if is_mean else made


@rule("embedding")
def embedding(local: Local, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Rows that the device does not have are zeros."""
    axes = local.axes_of("v")
    if not axes:
        return local.function(*args, **kwargs)
    indices, weight, padding = (*args, kwargs.get("padding_idx"))[:3]
    place = 0
    for axis in axes:
        place = place * local.mesh_shape[axis] + local.coordinate[axis]
    own = indices - place * weight.shape[0]
    is_here = (own >= 0) & (own < weight.shape[0])
    if padding is not None:  # its row has no gradient
        padding -= place * weight.shape[0]
    found = F.embedding(
        own.clamp(0, weight.shape[0] - 1), weight, padding if padding in range(weight.shape[0]) else None
    )
    return found * is_here.unsqueeze(-1).to(found.dtype)
