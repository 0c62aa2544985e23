"""The two halves of a split backward against one whole backward, to the bit."""

from __future__ import annotations

import copy
import gc
import random
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from models import Case
from models.backward import CASES, BackwardCase
from models.random_backward import WIDTH, RandomModule, random_plan
from partition_cases import SPLITS, cut, twin
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from torch_xmesh.split_backward import split_backward

Gradients = list[torch.Tensor | None]


def leaves(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [one.detach().clone().requires_grad_(one.is_floating_point()) for one in inputs]


def outputs_of(module: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    torch.manual_seed(3)
    found = pytree.tree_leaves(module(*inputs))
    return [one for one in found if isinstance(one, torch.Tensor) and one.requires_grad]


def gradients_of(module: nn.Module) -> Gradients:
    return [parameter.grad for parameter in module.parameters()]


def assert_equal(found: Gradients, expected: Gradients) -> None:
    assert [one is None for one in found] == [one is None for one in expected]
    for one, other in zip(found, expected, strict=True):
        if one is not None and other is not None:
            assert one.dtype == other.dtype
            assert torch.equal(one, other), (one - other).abs().max()


def compare(
    whole: nn.Module,
    split: nn.Module,
    inputs: Sequence[torch.Tensor],
    run: Callable[[nn.Module], Callable[..., Any]] = lambda module: module,
) -> str | None:
    """Runs both over two microbatches, so that gradients accumulate; returns why the backward was whole."""
    reason = None
    earlier: list[tuple[Gradients, Gradients]] = []
    for _ in range(2):
        theirs, mine = leaves(inputs), leaves(inputs)
        outputs = outputs_of(run(whole), theirs)
        torch.manual_seed(5)
        grads = [torch.randn_like(one) for one in outputs]
        if outputs:
            torch.autograd.backward(outputs, [one.clone() for one in grads])
        outputs = outputs_of(run(split), mine)
        before = [None if one is None else one.clone() for one in gradients_of(split)]
        wanted = [one for one in mine if one.requires_grad]
        given, run_weight_grads = split_backward(outputs, grads, wanted)
        reason = run_weight_grads.whole_because
        if reason is None:
            assert_equal(gradients_of(split), before)
        assert_equal(given, [one.grad for one in theirs if one.requires_grad])
        assert all(one.grad is None for one in mine)
        earlier.append((given, [None if one is None else one.clone() for one in given]))
        run_weight_grads()
        assert_equal(gradients_of(split), gradients_of(whole))
        assert_equal(list(split.buffers()), list(whole.buffers()))
        for found, kept in earlier:
            assert_equal(found, kept)
    return reason


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_one_backward(case: BackwardCase) -> None:
    torch.manual_seed(0)
    whole = case.build()
    inputs = case.inputs()
    reason = compare(whole, copy.deepcopy(whole), inputs)
    if case.is_whole is None:
        assert reason is None
    else:
        assert reason is not None
        assert case.is_whole in reason


@pytest.mark.parametrize(("case", "names"), SPLITS)
def test_stages_of_the_zoo(case: Case, names: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    whole = case.build()
    split = twin(case, whole)
    parts = [cut(case, model, names) for model in (whole, split)]
    args, kwargs, _ = case.batch(3)
    values = parts[0].bind(args, kwargs)
    for one, other in zip(parts[0].stages, parts[1].stages, strict=True):
        received = [values[name].detach() for name in one.input_values]
        inputs = [
            value.requires_grad_() if parts[0].values[name].requires_grad else value
            for name, value in zip(one.input_values, received, strict=True)
        ]
        torch.manual_seed(1)
        values.update(zip(one.output_values, one(*[value.detach() for value in inputs]), strict=True))
        other.module.load_state_dict(one.module.state_dict())  # what that changed
        programs = {id(one.module): one, id(other.module): other}
        assert compare(one.module, other.module, inputs, lambda module: programs[id(module)]) is None  # noqa: B023


def run_random(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    whole = RandomModule(random_plan(rng))
    inputs = [torch.randn(3, WIDTH) for _ in range(rng.randint(1, 3))]
    reason = compare(whole, copy.deepcopy(whole), inputs)
    assert reason is None or (reason.startswith("a checkpoint") and any(kind == "checkpoint" for kind, _ in whole.plan))


@pytest.mark.parametrize("block", range(10))
def test_random_modules(block: int) -> None:
    for seed in range(40 * block, 40 * (block + 1)):
        run_random(seed)


@pytest.mark.soak
def test_many_random_modules() -> None:
    for seed in range(1000, 5000):
        run_random(seed)


def test_hooks_run_once_and_where_they_belong() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4))
    calls: list[str] = []
    model[0].weight.register_hook(lambda gradient: calls.append("weight"))
    model[0].weight.register_post_accumulate_grad_hook(lambda parameter: calls.append("accumulated"))
    model[1].register_full_backward_hook(lambda module, given, taken: calls.append("module"))
    x = torch.randn(3, 4, requires_grad=True)
    x.register_hook(lambda gradient: calls.append("input"))  # type: ignore[no-untyped-call]
    middle = model[0](x)
    middle.register_hook(lambda gradient: calls.append("middle"))
    middle.retain_grad()
    output = model[2](model[1](middle))
    _, run_weight_grads = split_backward(output, torch.randn(3, 4), x)
    assert calls == ["module", "middle", "input"]
    assert middle.grad is not None
    run_weight_grads()
    assert calls == ["module", "middle", "input", "weight", "accumulated"]


def test_checkpoints_compute_forward_once_more() -> None:
    calls = []

    def block(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return torch.tanh(model[1](torch.tanh(model[0](x))))

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.randn(3, 4, requires_grad=True)
    output = checkpoint(block, x, use_reentrant=False)
    _, run_weight_grads = split_backward(output, torch.randn(3, 4), x)
    run_weight_grads()
    assert len(calls) == 2


def test_checkpoints_of_computed_weights_are_whole() -> None:
    """A weight's own graph would be unpacked, and so the region run, once more in the second half."""
    calls = []

    def block(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return torch.tanh(model(x))

    model: Any = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    x = torch.randn(3, 4, requires_grad=True)
    _, run_weight_grads = split_backward(checkpoint(block, x, use_reentrant=False), torch.randn(3, 4), x)
    assert run_weight_grads.whole_because is not None
    assert "once more" in run_weight_grads.whole_because
    run_weight_grads()
    assert len(calls) == 2


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_module(backend: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, 4))
    whole, split = (torch.compile(copy.deepcopy(model), backend=backend) for _ in range(2))
    assert compare(whole, split, [torch.randn(3, 4)]) is None  # type: ignore[arg-type]


def test_a_weights_hooks_see_missing_gradients_too() -> None:
    class Ignores(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return x * weight

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
            return gradient, None

    calls = []
    weight = torch.randn(4, requires_grad=True)
    weight.register_post_accumulate_grad_hook(lambda parameter: calls.append(parameter.grad))  # type: ignore[no-untyped-call]
    for run in (lambda y, x: y.sum().backward(), lambda y, x: split_backward(y.sum(), None, x)[1]()):
        x = torch.randn(3, 4, requires_grad=True)
        run(Ignores.apply(x, weight), x)  # type: ignore[no-untyped-call]
    assert calls == [None, None]


def test_the_graph_is_the_calls_own() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    x = torch.randn(3, 4, requires_grad=True)
    output = model(x)
    _, run_weight_grads = split_backward(output, torch.ones(3, 4), x)
    for attempt in (lambda: output.sum().backward(), lambda: split_backward(output.sum(), None, x)[1]()):
        with pytest.raises(RuntimeError, match="second time|belongs to a split backward"):
            attempt()
    run_weight_grads()
    linear = nn.Linear(4, 4)
    output = linear(x) + 1
    split_backward(output.sum(), None, x)
    with pytest.raises(RuntimeError, match="belongs to a split backward"):
        output.sum().backward()


def test_a_failed_first_half_leaves_the_graph_whole() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    fails = [True]

    def hook(gradient: torch.Tensor) -> None:
        if fails.pop() if fails else False:
            raise KeyError("once")

    x = torch.randn(3, 4, requires_grad=True)
    y = x * 2
    output = model(y) + y
    output.register_hook(hook)
    with pytest.raises(KeyError, match="once"):
        split_backward(output, torch.ones(3, 4), x)
    output.backward(torch.ones(3, 4))
    assert x.grad is not None
    assert model[0].weight.grad is not None


def test_inputs_with_a_history_end_the_backward() -> None:
    torch.manual_seed(0)
    front, back = nn.Linear(4, 4), nn.Linear(4, 4)
    hidden = torch.tanh(front(torch.randn(3, 4)))
    (given,), run_weight_grads = split_backward(back(hidden).sum(), None, hidden)
    run_weight_grads()
    assert given is not None
    assert front.weight.grad is None
    assert back.weight.grad is not None
    split_backward(hidden, given, [])[1]()
    assert front.weight.grad is not None


def test_one_piece_of_a_tensor_is_the_input() -> None:
    weight = torch.ones(4, requires_grad=True)
    one, two = (weight * 2).chunk(2)
    (given,), run_weight_grads = split_backward((one * 3 + two).sum(), None, one)
    assert torch.equal(given, torch.full((2,), 3.0))  # type: ignore[arg-type]
    run_weight_grads()
    assert torch.equal(weight.grad, torch.tensor([0.0, 0.0, 2.0, 2.0]))  # type: ignore[arg-type]


def test_halves_on_two_threads() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.randn(3, 4, requires_grad=True)
    _, run_weight_grads = split_backward(model(x), torch.ones(3, 4), x)
    thread = threading.Thread(target=run_weight_grads)
    thread.start()
    thread.join()
    assert model[0].weight.grad is not None


def test_what_forward_left_goes_with_the_second_half() -> None:
    """Nothing but what weights need lives on, and after the second half nothing does."""
    kept: dict[str, weakref.ref[torch.Tensor]] = {}

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, name: str) -> torch.Tensor:
            made = x.clone()
            kept[name] = weakref.ref(made)
            ctx.save_for_backward(made)
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
            return gradient * ctx.saved_tensors[0], None

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.randn(3, 4, requires_grad=True)
    output = Keeps.apply(model[1](Keeps.apply(model[0](x), "first")), "second")  # type: ignore[no-untyped-call]
    _, run_weight_grads = split_backward(output, torch.ones(3, 4), x)
    gc.collect()
    assert [reference() for reference in kept.values()] == [None, None]
    mine = weakref.ref(x)
    del x, output
    gc.collect()
    assert mine() is not None  # the first layer's weight gradient needs it
    run_weight_grads()
    del run_weight_grads
    gc.collect()
    assert mine() is None


def test_anomaly_mode_finds_nothing_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks for NaN in all that a node gives, also in what sets off the second half."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)  # with NaN
    torch.use_deterministic_algorithms(True)
    try:
        with torch.autograd.set_detect_anomaly(True):
            x = torch.randn(3, 4, requires_grad=True)
            _, run_weight_grads = split_backward(module(x).sum(), None, x)
            run_weight_grads()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(weight.grad is not None for weight in module.parameters())


def test_second_half_runs_once() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    _, run_weight_grads = split_backward(nn.Linear(4, 4)(x).sum(), None, x)
    run_weight_grads()
    with pytest.raises(RuntimeError, match="runs once"):
        run_weight_grads()


def test_python_errors_come_through() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            raise KeyError("mine")

    x = torch.randn(3, 4, requires_grad=True)
    with pytest.raises(KeyError, match="mine"):
        split_backward(Fails.apply(x), torch.ones(3, 4), x)  # type: ignore[no-untyped-call]
    weight = torch.randn(3, 4, requires_grad=True)
    _, run_weight_grads = split_backward(x * Fails.apply(weight), torch.ones(3, 4), x)  # type: ignore[no-untyped-call]
    with pytest.raises(KeyError, match="mine"):
        run_weight_grads()


def test_mistakes() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    layer = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"outputs\[0\] does not require grad"):
        split_backward(torch.ones(2), torch.ones(2), x)
    with pytest.raises(ValueError, match=r"inputs\[0\] does not require grad"):
        split_backward(layer(x), torch.ones(3, 4), torch.ones(2))
    with pytest.raises(ValueError, match=r"grads\[0\] is missing: outputs\[0\] has 12 elements"):
        split_backward(layer(x), None, x)
    with pytest.raises(ValueError, match=r"grads\[0\] is missing: outputs\[0\] is complex"):
        split_backward((x * 1j).sum(), None, x)
    with pytest.raises(ValueError, match=r"grads\[0\] has shape \(4, 3\), outputs\[0\] has \(3, 4\)"):
        split_backward(layer(x), torch.ones(4, 3), x)
    with pytest.raises(ValueError, match="grads has 2 gradients, expected one for each of 1 outputs"):
        split_backward([layer(x)], [torch.ones(3, 4)] * 2, x)
    with pytest.raises(ValueError, match=r"inputs\[1\] is inputs\[0\] again"):
        split_backward(layer(x), torch.ones(3, 4), [x, x])
    hidden = torch.tanh(x)
    for inputs in ([x, hidden], [hidden, x]):
        with pytest.raises(ValueError, match=r"inputs\[\d\] is computed from another of the inputs"):
            split_backward(layer(hidden), torch.ones(3, 4), inputs)
    output = checkpoint(layer, hidden, use_reentrant=True)
    with pytest.raises(ValueError, match=r"inputs that are leaves, but inputs\[0\] is not"):
        split_backward(output, torch.ones(3, 4), hidden)


def test_graphs_that_share_how_weights_are_computed() -> None:
    """Autocast casts a weight once for both."""
    layer = nn.Linear(4, 4)
    first, second, third = (torch.randn(2, 4, requires_grad=True) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        one, other, whole = layer(first), layer(second), layer(third)
    for output, given in ((one, first), (other, second)):
        split_backward(output.sum(), None, given)[1]()
    whole.sum().backward()
    assert layer.weight.grad is not None
    torch.testing.assert_close(
        layer.weight.grad, (first + second + third).detach().sum(0).expand(4, 4), rtol=0.02, atol=0.05
    )


@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize("how", ["whole", "inside", "split"])
def test_another_backward_through_the_graph(how: str, has_run: bool) -> None:
    """It would find a part of the graph: it raises, whatever of both halves has run, and adds nothing."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    x = torch.randn(2, 4, requires_grad=True)
    hidden = first(x)
    y = second(hidden.tanh())
    _, weights = split_backward(y, torch.ones_like(y), x)
    if has_run:
        weights()
    before = [parameter.grad for parameter in (*first.parameters(), *second.parameters())]
    again: dict[str, Callable[[], Any]] = {
        "whole": lambda: y.sum().backward(),
        "inside": lambda: hidden.sum().backward(),
        "split": lambda: split_backward(y, torch.ones_like(y), x),
    }
    with pytest.raises(RuntimeError, match="this graph belongs to a split backward"):
        again[how]()
    assert [parameter.grad for parameter in (*first.parameters(), *second.parameters())] == before
    if not has_run:
        weights()
        assert all(parameter.grad is not None for parameter in (*first.parameters(), *second.parameters()))
