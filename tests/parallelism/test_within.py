"""Operators that run collectives of their own: with those, parts make the whole; as many as the row says."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torch_xmesh.parallelism.loops import Choice, choices_of
from torch_xmesh.parallelism.operators import Operator
from torch_xmesh.parallelism.recorded_forwards import forward_of

SIZE = 2
Parts = list[torch.Tensor]


class Devices:
    """A mesh axis in one process: what is brought together is one tensor that all devices read on from."""

    def __init__(self) -> None:
        self.num_forward = self.num_backward = 0

    def together(self, parts: Parts, how: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        self.num_forward += 1
        out = how(torch.stack(parts))
        if out.requires_grad:
            out.register_hook(self._count)  # type: ignore[no-untyped-call]
        return out

    def _count(self, _: torch.Tensor) -> None:
        self.num_backward += 1

    def greatest(self, parts: Parts) -> torch.Tensor:
        return self.together([part.detach() for part in parts], lambda one: one.amax(0))

    def sum(self, parts: Parts) -> torch.Tensor:
        return self.together(parts, lambda one: one.sum(0))


def softmax(devices: Devices, xs: Parts) -> Parts:
    most = devices.greatest([x.amax(-1, keepdim=True) for x in xs])
    raised = [(x - most).exp() for x in xs]
    total = devices.sum([one.sum(-1, keepdim=True) for one in raised])
    return [one / total for one in raised]


def log_softmax(devices: Devices, xs: Parts) -> Parts:
    most = devices.greatest([x.amax(-1, keepdim=True) for x in xs])
    total = devices.sum([(x - most).exp().sum(-1, keepdim=True) for x in xs])
    return [x - most - total.log() for x in xs]


def batch_norm(devices: Devices, xs: Parts) -> Parts:
    """Sums of elements and of their squares are one message."""
    count = sum(x.numel() / x.shape[1] for x in xs)
    both = devices.sum([torch.stack([x.sum((0, 2)), (x * x).sum((0, 2))]) for x in xs]) / count
    mean, variance = both[0], both[1] - both[0] ** 2
    return [(x - mean[:, None]) * (variance[:, None] + 1e-5).rsqrt() for x in xs]


CASES: dict[str, tuple[Callable[..., torch.Tensor], tuple[int, ...], Callable[[Devices, Parts], Parts]]] = {
    "softmax": (lambda x: x.softmax(-1), (4, 8), softmax),
    "log_softmax": (lambda x: F.log_softmax(x, -1), (4, 8), log_softmax),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), (4, 3, 5), batch_norm),
}


class Applied(nn.Module):
    def __init__(self, function: Callable[..., Any], x: torch.Tensor) -> None:
        super().__init__()
        self.x, self.function = nn.Parameter(x), function

    def forward(self) -> Any:
        return self.function(self.x)


def sharded_by(operator: Operator, label: str) -> Choice:
    (found,) = (choice for choice in choices_of(operator.loops, (SIZE,)) if choice.axes == (label,))
    return found


@pytest.mark.parametrize("name", CASES)
def test_with_them_parts_make_the_whole(name: str) -> None:
    function, shape, on_parts = CASES[name]
    x = torch.randn(shape, dtype=torch.float64)
    (operator,) = forward_of(Applied(function, x), ()).operators
    (within,) = operator.loops.within
    choice = sharded_by(operator, within.label)
    dim = choice.inputs[0].value[0]
    whole = x.clone().requires_grad_()
    wanted = function(whole)
    gradient = torch.randn_like(wanted)
    wanted.backward(gradient)  # type: ignore[no-untyped-call]
    xs = [one.clone().requires_grad_() for one in x.chunk(SIZE, dim)]
    devices = Devices()
    made = on_parts(devices, xs)
    torch.testing.assert_close(torch.cat(made, choice.outputs[0].value[0]), wanted.detach())
    torch.autograd.backward(made, list(gradient.chunk(SIZE, choice.outputs[0].gradient[0])))
    assert whole.grad is not None
    for one, part in zip(xs, whole.grad.chunk(SIZE, choice.inputs[0].gradient[0]), strict=True):
        assert one.grad is not None
        torch.testing.assert_close(one.grad, part)
    assert (devices.num_forward, devices.num_backward) == (within.num_forward, within.num_backward)


def test_classes_of_a_loss() -> None:
    """Each device has some classes' logits; the loss is the sum of what they make, and gradients stay where they are:
    a logit's follows from the sum that all have."""
    x, target = torch.randn(8, 6, dtype=torch.float64), torch.tensor([0, 5, 3, 2, 1, 4, 0, 3])
    (operator,) = forward_of(Applied(lambda x: F.cross_entropy(x, target), x), ()).operators
    (within,) = (one for one in operator.loops.within if one.label == "c")
    choice = sharded_by(operator, within.label)
    assert (choice.inputs[0].value, choice.outputs[0].value) == ((1,), (-2,))
    whole = x.clone().requires_grad_()
    loss = F.cross_entropy(whole, target)
    loss.backward()  # type: ignore[no-untyped-call]
    devices = Devices()
    parts = list(x.chunk(SIZE, 1))
    most = devices.greatest([part.amax(1, keepdim=True) for part in parts])
    total = devices.sum([(part - most).exp().sum(1, keepdim=True) for part in parts])
    assert devices.num_forward == within.num_forward
    found = torch.zeros((), dtype=torch.float64)
    for device, part in enumerate(parts):
        own = F.one_hot(target, 6).chunk(SIZE, 1)[device]
        once = (most + total.log()).mean() if device == 0 else 0.0
        found += once - (part * own).sum() / len(x)
        gradient = ((part - most).exp() / total - own) / len(x)
        assert whole.grad is not None
        torch.testing.assert_close(gradient, whole.grad.chunk(SIZE, 1)[device])
    torch.testing.assert_close(found, loss.detach())


@pytest.mark.parametrize("name", ["cross_entropy", "nll_loss"])
@pytest.mark.parametrize("dim", [0, 2])
def test_samples_of_a_loss_that_are_not_ignored(name: str, dim: int) -> None:
    """A mean is over those of all devices, which count them together; by its own count each device's part would weigh
    otherwise. A sum needs none, nor do losses that stay apart."""
    x = torch.randn(4, 3, 2, dtype=torch.float64)
    target = torch.tensor([[0, 1], [-100, -100], [2, 0], [1, -100]]) if dim == 0 else torch.tensor([[0, -100]] * 4)
    loss = getattr(F, name)

    def operator_of(reduction: str) -> Operator:
        (found,) = forward_of(Applied(lambda x: loss(x, target, reduction=reduction), x), ()).operators
        return found

    operator = operator_of("mean")
    labels = operator.loops.inputs[0]
    assert labels is not None
    label = str(labels[dim])
    (within,) = (one for one in operator.loops.within if one.label == label)
    choice = sharded_by(operator, label)
    assert (choice.inputs[0].value, choice.inputs[1].value[0], choice.outputs[0].value) == ((dim,), dim // 2, (-2,))
    assert (within.collective, within.num_bytes) == ("all-reduce", 4)
    for reduction in ("sum", "none"):
        assert {one.label for one in operator_of(reduction).loops.within} <= {"c"}
    whole = x.clone().requires_grad_()
    wanted = loss(whole, target)
    wanted.backward()
    assert whole.grad is not None
    devices = Devices()
    xs = [one.clone().requires_grad_() for one in x.chunk(SIZE, dim)]
    targets = target.chunk(SIZE, dim // 2)
    counts = [(one != -100).sum() for one in targets]
    count = devices.sum(counts)
    made = [loss(one, own, reduction="sum") / count for one, own in zip(xs, targets, strict=True)]
    torch.testing.assert_close(sum(made), wanted)
    for one, part in zip(made, xs, strict=True):
        one.backward()
        assert part.grad is not None
    torch.testing.assert_close(torch.cat([one.grad for one in xs if one.grad is not None], dim), whole.grad)
    assert (devices.num_forward, devices.num_backward) == (within.num_forward, within.num_backward)
    apart = [one * count / (own * SIZE) for one, own in zip(made, counts, strict=True)]
    assert not torch.allclose(sum(apart, torch.zeros(())), wanted)


def test_a_dim_is_cut_by_all_axes_that_shard_it() -> None:
    """By different loops too: four experts have no eight parts, sixteen tokens do."""
    library = pytest.importorskip("transformers", reason="transformers is not installed: pip install -e .[models]")
    config = library.MixtralConfig(
        vocab_size=32,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    model, tokens = library.MixtralForCausalLM(config), torch.zeros(2, 8, dtype=torch.long)
    (experts,) = (one for one in forward_of(model, (tokens,)).operators if one.kind == "MixtralExperts")
    sizes = (2, 4)
    choices = choices_of(experts.loops, sizes)
    for choice in choices:
        for value, end in zip((*experts.reads, *experts.makes), (*choice.inputs, *choice.outputs), strict=True):
            for dim, extent in enumerate(value.shape):
                cut = math.prod(size for size, held in zip(sizes, end.value, strict=True) if held == dim)
                assert extent % cut == 0, f"{choice}: {value.name}"
    axes = {choice.axes for choice in choices}
    assert {("t", "routed"), ("t", "shown")} <= axes
    assert not {("shown", "routed"), ("routed", "shown")} & axes


def test_experts_are_shown_all_tokens_or_sent_theirs() -> None:
    library = pytest.importorskip("transformers", reason="transformers is not installed: pip install -e .[models]")
    config = library.MixtralConfig(hidden_size=8, intermediate_size=16, num_local_experts=4)
    experts = library.models.mixtral.modeling_mixtral.MixtralExperts(config)
    for parameter in experts.parameters():
        nn.init.normal_(parameter)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.experts = nn.Parameter(torch.ones(8)), experts

        def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.experts(x * self.scale, index, weights)
            return out

    x, weights = torch.randn(6, 8), torch.rand(6, 2)
    index = torch.tensor([[0, 1], [2, 3], [1, 3], [0, 2], [3, 0], [1, 2]])
    operator = forward_of(Layer(), (x, index, weights)).operators[-1]
    assert operator.is_known
    shown, routed, tokens = (sharded_by(operator, label) for label in ("shown", "routed", "t"))
    assert shown.outputs[0].value == (-2,)
    assert [end.value for end in shown.inputs] == [(-1,), (-1,), (-1,), (0,), (0,)]
    assert shown.inputs[0].gradient == (-2,), "a token's gradient comes from all of its experts"
    assert [end.value for end in routed.inputs] == [(0,)] * 5
    assert [end.gradient for end in routed.inputs[3:]] == [(0,)] * 2
    assert [end.gradient for end in tokens.inputs[3:]] == [(-2,)] * 2
    with torch.no_grad():
        wanted = experts(x, index, weights)
        made = []
        for device in range(SIZE):
            mine = index // (config.num_local_experts // SIZE) == device
            made.append(experts(x, index, weights * mine))
        torch.testing.assert_close(sum(made), wanted)
