"""How operators run on parts where that is not the call itself."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from torch_xmesh.parallelism.loops import PARTIAL, PASS
from torch_xmesh.parallelism.operators import Operator
from torch_xmesh.parallelism.program import ProgramOperator
from torch_xmesh.parallelism.running.collectives import Moves, Summed


@dataclasses.dataclass(frozen=True)
class Local:
    """An operator on one device.

    Attributes:
        function: the call itself.
        order: for an operator that draws random numbers, the output's dims as they lie in memory in one process, the
            outermost first: numbers are drawn in that order.
    """

    operator: Operator
    planned: ProgramOperator
    moves: Moves
    function: Callable[..., Any]
    order: Sequence[int] | None = None

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        return self.moves.shape

    @property
    def coordinate(self) -> tuple[int, ...]:
        """The device's position along each mesh axis."""
        return self.moves.coordinate

    def axes_of(self, label: str) -> list[int]:
        """The mesh axes that shard a loop."""
        return [axis for axis, own in enumerate(self.planned.axes) if own == label]

    def place_along(self, axes: Sequence[int]) -> int:
        """The how many-th of what these axes cut together is the device's."""
        place = 0
        for axis in axes:
            place = place * self.mesh_shape[axis] + self.coordinate[axis]
        return place

    def summed(self, part: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
        """Over devices along these axes; its gradient is added up, too."""
        for axis in axes:
            part = Summed.apply(part, self.moves, axis, self.operator.makes[0].name)  # type: ignore[no-untyped-call]
        return part

    def greatest(self, part: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
        """Over devices along these axes; it has no gradient."""
        part = part.detach()
        for axis in axes:
            part = self.moves.all_reduce(part, axis, self.operator.makes[0].name, "forward", is_max=True)
        return part

    @property
    def summands(self) -> int:
        """How many devices make summands of the output."""
        held = zip(self.mesh_shape, self.planned.axes, self.planned.results[0].state, strict=True)
        return math.prod(size for size, label, state in held if state == PARTIAL and label != PASS)

    @property
    def is_first_summand(self) -> bool:
        """Whether this device's is the first of them."""
        held = zip(self.coordinate, self.planned.axes, self.planned.results[0].state, strict=True)
        return all(at == 0 for at, label, state in held if state == PARTIAL and label != PASS)

    def ones(self, like: torch.Tensor) -> torch.Tensor:
        """As large as the whole output, and in memory as one process has it."""
        shape = self.operator.makes[0].shape
        order = list(range(len(shape)) if self.order is None else self.order)
        return like.new_ones([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(len(order))])

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """This device's part of a tensor that lies as the output does."""
        for held, size, place in zip(self.planned.results[0].state, self.mesh_shape, self.coordinate, strict=True):
            whole = whole.chunk(size, held)[place] if held >= 0 else whole
        return whole

    def local_shape(self) -> list[int]:
        """The shape of this device's part of the output."""
        shape = list(self.operator.makes[0].shape)
        for held, size in zip(self.planned.results[0].state, self.mesh_shape, strict=True):
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
    """Adds a tensor to an output of which several devices make summands. Only the first of them adds it; all compute
    its gradient."""

    @staticmethod
    def forward(ctx: Any, sum_of: torch.Tensor, added: torch.Tensor, is_first: bool) -> torch.Tensor:
        ctx.shape, ctx.dtype = added.shape, added.dtype
        return sum_of + added.to(sum_of.dtype) if is_first else sum_of.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        return gradient, gradient.sum_to_size(ctx.shape).to(ctx.dtype), None


_CHANNELS = ("dropout1d", "dropout2d", "dropout3d")
DRAWING = frozenset({"dropout", "rand_like", "randn_like", "scaled_dot_product_attention", *_CHANNELS})
"""Kinds that draw random numbers for the whole on every device, and take the device's part: they are one process's, as
long as all devices of a stage have drawn as many before. Others that draw are done whole by every device."""


@rule("dropout")
def dropout(local: Local, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    x, p, is_training = (*args, *(kwargs.get(n, d) for n, d in (("p", 0.5), ("training", True))[len(args) - 1 :]))[:3]
    if not is_training:
        return x
    return x * local.part_of(F.dropout(local.ones(x), p, training=True))


@rule(*_CHANNELS)
def channel_dropout(local: Local, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A number is drawn for each channel of each sample."""
    x, p, is_training = (*args, *(kwargs.get(n, d) for n, d in (("p", 0.5), ("training", True))[len(args) - 1 :]))[:3]
    if not is_training:
        return x
    shape = local.operator.makes[0].shape
    ones = x.new_ones([*shape[:2], *[1] * (len(shape) - 2)])
    return x * local.part_of(local.function(ones, p, True))


@rule("rand_like", "randn_like")
def drawn_like(local: Local, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return local.part_of(local.function(local.ones(args[0]), *args[1:], **kwargs))


@rule("linear")
def linear(local: Local, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The bias is added once."""
    x, weight, bias = (*args, *(kwargs.get(name) for name in ("weight", "bias")[len(args) - 1 :]))[:3]
    if bias is None or local.summands == 1:
        return F.linear(x, weight, bias)
    out: torch.Tensor = _AddedOnce.apply(F.linear(x, weight), bias, local.is_first_summand)  # type: ignore[no-untyped-call]
    return out


@rule("bilinear")
def bilinear(local: Local, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The bias is added once."""
    given = dict(zip(["input1", "input2", "weight", "bias"], args, strict=False)) | dict(kwargs)
    bias = given.get("bias")
    if bias is None or local.summands == 1:
        return local.function(**given)
    made = local.function(**{**given, "bias": None})
    out: torch.Tensor = _AddedOnce.apply(made, bias, local.is_first_summand)  # type: ignore[no-untyped-call]
    return out


@rule("addmm", "addmv", "baddbmm")
def addmm(local: Local, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What is added to the product is added once."""
    if local.summands == 1:
        return local.function(*args, **kwargs)
    added, a, b = args[:3]
    product, kept = torch.matmul(a, b) * kwargs.get("alpha", 1), added * kwargs.get("beta", 1)
    out: torch.Tensor = _AddedOnce.apply(product, kept, local.is_first_summand)  # type: ignore[no-untyped-call]
    return out


@rule("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def convolution(local: Local, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The bias is added once; a device that has some of the groups has as many fewer."""
    after = ["output_padding", "groups", "dilation"] if "transpose" in local.operator.kind else ["dilation", "groups"]
    given = dict(zip(["input", "weight", "bias", "stride", "padding", *after], args, strict=False)) | dict(kwargs)
    axes = local.axes_of("g")
    if axes:
        given["groups"] = given["groups"] // math.prod(local.mesh_shape[axis] for axis in axes)
    bias = given.get("bias")
    if bias is None or local.summands == 1:
        return local.function(**given)
    made = local.function(**{**given, "bias": None})
    kept = bias.view(-1, *[1] * (made.dim() - 2))
    out: torch.Tensor = _AddedOnce.apply(made, kept, local.is_first_summand)  # type: ignore[no-untyped-call]
    return out


_VIEWS = frozenset("view reshape flatten unflatten squeeze unsqueeze _unsafe_view view_as reshape_as ravel".split())
_OWN_LOOPS = {"embedding": "v", "cross_entropy": "c", "nll_loss": "c"} | {
    f"conv{kind}{dims}d": "g" for kind in ("", "_transpose") for dims in (1, 2, 3)
}
"""By an operator's kind, the loop that needs another call than the recorded one where it is sharded."""
_EXPANDS = frozenset("expand expand_as broadcast_to".split())


def shape_made(local: Local) -> tuple[str, list[int]] | None:
    """The tensor's method that makes a device's part of a view, and the part's shape; None of other operators."""
    kind = local.operator.kind
    method = "reshape" if kind in _VIEWS else "expand" if kind in _EXPANDS else None
    return None if method is None else (method, local.local_shape())


def is_plain(local: Local) -> bool:
    """Whether, with these parts, it is a view or the call itself."""
    kind, axes = local.operator.kind, {*local.planned.axes}
    if shape_made(local) is not None:
        return True
    own = {*local.planned.loops.within} | {_OWN_LOOPS.get(kind, "")}
    return local.summands == 1 and axes.isdisjoint(own) and kind != "batch_norm"


@rule(*_VIEWS)
def view(local: Local, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return args[0].reshape(local.local_shape())


@rule(*_EXPANDS)
def expand(local: Local, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return args[0].expand(local.local_shape())


@rule("mean")
def mean(local: Local, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The local mean divided by the number of devices that make summands, so that the sum over them is the global
    mean."""
    return local.function(*args, **kwargs) / local.summands


@rule(
    *(
        "mse_loss",
        "l1_loss",
        "smooth_l1_loss",
        "huber_loss",
        "binary_cross_entropy_with_logits",
        "binary_cross_entropy",
    ),
    *("soft_margin_loss", "poisson_nll_loss"),
)
def distances(local: Local, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A mean is over as many as the whole has."""
    made = local.function(*args, **kwargs)
    given = [kwargs.get("reduction", "mean"), *(argument for argument in args if isinstance(argument, str))]
    is_mean = given[-1] == "mean"
    return made / local.summands if is_mean else made


@rule("kl_div")
def kl_div(local: Local, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A mean is over as many elements, or samples, as the whole has."""
    names = ["input", "target", "size_average", "reduce", "reduction", "log_target"]
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    reduction, shape = given.get("reduction", "mean"), local.operator.reads[0].shape
    if reduction not in ("mean", "batchmean"):
        return local.function(**given)
    return local.function(**{**given, "reduction": "sum"}) / (math.prod(shape) if reduction == "mean" else shape[0])


@rule("embedding")
def embedding(local: Local, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Rows that the device does not have are zeros."""
    axes = local.axes_of("v")
    if not axes:
        return local.function(*args, **kwargs)
    indices, weight, padding = (*args, kwargs.get("padding_idx"))[:3]
    place = local.place_along(axes)
    own = indices - place * weight.shape[0]
    is_here = (own >= 0) & (own < weight.shape[0])
    if padding is not None:  # its row has no gradient
        padding = padding % (math.prod(local.mesh_shape[axis] for axis in axes) * weight.shape[0])
        padding -= place * weight.shape[0]
    found = F.embedding(
        own.clamp(0, weight.shape[0] - 1), weight, padding if padding in range(weight.shape[0]) else None
    )
    return found * is_here.unsqueeze(-1).to(found.dtype)


@rule("softmax", "log_softmax")
def softmax(local: Local, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Over a sharded dim devices bring together the greatest element and the sum."""
    axes = [axis for axis, label in enumerate(local.planned.axes) if label == _own_label(local)]
    if not axes:
        return local.function(*args, **kwargs)
    x = _in_single(args[0])
    dim = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else None))
    raised = x - local.greatest(x.amax(dim, keepdim=True), axes)
    total = local.summed(raised.exp().sum(dim, keepdim=True), axes)
    made = raised.exp() / total if local.operator.kind == "softmax" else raised - total.log()
    return made.to(_dtype_of(local, (args[0].new_empty([1] * args[0].dim()), *args[1:]), kwargs))


def _dtype_of(local: Local, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.dtype:
    """The dtype that the call gives for small arguments like these. Under autocast it may differ from the recorded
    one."""
    with torch.no_grad():
        made: torch.Tensor = local.function(*args, **kwargs)
    return made.dtype


def _in_single(x: torch.Tensor) -> torch.Tensor:
    """Sums of exponentials are computed in 32 bits at least."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _own_label(local: Local) -> str | None:
    within = local.planned.loops.within
    return within[0] if within else None


class _ClassLosses(torch.autograd.Function):
    """A device's summand of each sample's loss, where each device has some of the classes. `raised`: logits of its
    classes less the greatest of all classes; `total`: the sum of the exponentials of these over all classes. Each
    device computes the gradient of its own logits; backward runs no collective."""

    @staticmethod
    def forward(
        ctx: Any,
        raised: torch.Tensor,
        total: torch.Tensor,
        own: torch.Tensor,
        counted: torch.Tensor,
        is_first: bool,
        shares: tuple[float, float],
    ) -> torch.Tensor:
        """`shares`: the weight of the target's class, and what each class has besides, by label smoothing."""
        is_here = (counted & (own >= 0) & (own < raised.shape[1])).unsqueeze(1)
        places = own.clamp(0, raised.shape[1] - 1).unsqueeze(1)
        ctx.save_for_backward(raised, total, is_here, places, counted)
        ctx.shares = shares
        picked = shares[0] * torch.where(is_here, raised.gather(1, places), 0.0).squeeze(1)
        if shares[1]:
            picked = picked + shares[1] * torch.where(counted, raised.sum(1), 0.0)
        return torch.where(counted, total.log(), 0.0) - picked if is_first else -picked

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        raised, total, is_here, places, counted = ctx.saved_tensors
        out = raised.exp() / total.unsqueeze(1) - ctx.shares[1]
        out.scatter_add_(1, places, -ctx.shares[0] * is_here.to(out.dtype))
        return out * (gradients[0] * counted).unsqueeze(1), None, None, None, None, None


@rule("cross_entropy", "nll_loss")
def cross_entropy(local: Local, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Where classes are sharded, all-reduces give every device the greatest logit and the sum of exponentials over all
    classes. For a mean, devices with different samples add up how many samples are not ignored."""
    is_raw = local.operator.kind == "cross_entropy"
    names = ["input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing"]
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    x, target = given["input"], given["target"]
    reduction, ignored = given.get("reduction", "mean"), given.get("ignore_index", -100)
    classes = local.axes_of("c")
    samples = [axis for axis, label in enumerate(local.planned.axes) if label.startswith("n")]
    if not classes and (not samples or reduction != "mean"):
        return local.function(*args, **kwargs)
    smoothing = given.get("label_smoothing", 0.0)
    counted = target != ignored
    x = _in_single(x)
    if classes:
        own = target - local.place_along(classes) * x.shape[1]
        total = torch.ones_like(target, dtype=x.dtype)
        if is_raw:
            x = x - local.greatest(x.amax(1, keepdim=True), classes)
            total = local.summed(x.detach().exp().sum(1), classes)
        is_first = is_raw and local.place_along(classes) == 0
        num_classes = x.shape[1] * math.prod(local.mesh_shape[axis] for axis in classes)
        shares = (1.0 - smoothing, smoothing / num_classes)
        losses: torch.Tensor = _picked_losses(x, total, own, counted, shares, is_first=is_first, is_raw=is_raw)
    else:
        whole = functools.partial(F.cross_entropy, label_smoothing=smoothing) if is_raw else F.nll_loss
        losses = whole(x, target, reduction="none", ignore_index=ignored)
    few = {**given, "input": given["input"][:0], "target": target[:0], "weight": None}
    dtype = _dtype_of(local, (), few)
    if reduction != "mean":
        return (losses.sum() if reduction == "sum" else losses).to(dtype)
    return (losses.sum() / local.summed(counted.sum().to(torch.float32), samples)).to(dtype)


def _picked_losses(
    x: torch.Tensor,
    total: torch.Tensor,
    own: torch.Tensor,
    counted: torch.Tensor,
    shares: tuple[float, float],
    *,
    is_first: bool,
    is_raw: bool,
) -> torch.Tensor:
    if is_raw:
        out: torch.Tensor = _ClassLosses.apply(x, total, own, counted, is_first, shares)  # type: ignore[no-untyped-call]
        return out
    is_here = counted & (own >= 0) & (own < x.shape[1])
    picked = x.gather(1, own.clamp(0, x.shape[1] - 1).unsqueeze(1)).squeeze(1)
    return -torch.where(is_here, picked, 0.0)
