"""Forwards that are easy to record wrongly: each is the model's own on other values, or refused by name."""

import copy
import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from torch_xmesh.pipeline.cut.partition import Partition, partition, split_at


class Leaf(nn.Module):
    """Calls a function with its linear layer and what it is given."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.run = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self.linear, *args, **kwargs)


def _linear(linear: nn.Linear, x: torch.Tensor) -> Any:
    return linear(x)


class Model(nn.Module):
    """`first`, what `between` does with both, `second`; a stage starts at `second`."""

    def __init__(self, between: Callable[..., Any], first: Any = _linear, second: Any = _linear) -> None:
        super().__init__()
        self.first, self.second = Leaf(first), Leaf(second)
        self.between = between
        self.register_buffer("table", torch.ones(4))
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.between(self, *args, **kwargs)

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def cut(model: nn.Module, *args: Any) -> Partition:
    return partition(model, args, None, split_at("second"))


def check(model: nn.Module, batches: Any, text: str = "") -> None:
    """The stages, cut with the first batch, give the model's output and gradients for each."""
    reference = copy.deepcopy(model)
    parts = cut(model, *batches[0])
    for batch in batches:
        for one in (model, reference):
            one.zero_grad()
        torch.manual_seed(1)
        made = parts.run(*copy.deepcopy(batch))
        torch.manual_seed(1)
        expected = reference(*copy.deepcopy(batch))
        assert torch.equal(made, expected), text
        assert made.requires_grad == expected.requires_grad
        made.sum().backward()
        expected.sum().backward()
        for (name, mine), other in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert (mine.grad is None) == (other.grad is None), f"{text}: {name}"
            assert mine.grad is None or other.grad is None or torch.equal(mine.grad, other.grad), f"{text}: {name}"


def rows(*values: float) -> torch.Tensor:
    return torch.tensor([[value] * 4 for value in values])


ROWS = [(rows(1.0, 2.0),), (rows(-1.0, 3.0),), (rows(-1.0, -2.0),), (rows(5.0, 1.0, -1.0),), (rows(1.0, 2.0),)]


def _hides_a_mask(linear: nn.Linear, x: torch.Tensor, context: dict[str, Any]) -> Any:
    context["mask"] = (x > 0).float()
    return linear(x)


def _through_a_dict(model: Model, x: torch.Tensor) -> Any:
    context: dict[str, Any] = {}
    y = model.first(x, context)
    return model.second(y * context["mask"])


def _keeps_a_mask(linear: Any, x: torch.Tensor) -> Any:
    linear.mask = (x > 0).float()
    return linear(x)


def _through_an_attribute(model: Any, x: torch.Tensor) -> Any:
    y = model.first(x)
    return model.second(y * model.first.linear.mask)


def _pops(linear: nn.Linear, x: torch.Tensor, skips: list[torch.Tensor]) -> Any:
    return linear(x + skips.pop())


def _skips(model: Model, x: torch.Tensor) -> Any:
    skips = [x, x * 2, x * 3]
    return model.second(model.first(x, skips), skips)


def _shortens(linear: nn.Linear, x: torch.Tensor) -> Any:
    return linear(x), None if bool((x > 0).all()) else (x > 0).float()


def _uses_what_may_be_none(model: Model, x: torch.Tensor) -> Any:
    y, mask = model.first(x)
    return model.second(y if mask is None else y * mask)


def _by_class(model: Model, x: torch.Tensor) -> Any:
    y = x * 2 if type(model.first) is Leaf and model.first.__class__ is Leaf else x
    return model.second(model.first(y))


def _detached_in_place(model: Model, x: torch.Tensor) -> Any:
    y = model.first(x)
    y.detach_()
    return model.second(y)


def _force(model: Model, x: torch.Tensor) -> Any:
    x = x.detach().requires_grad_(True)
    energy = (model.first(x) ** 2).sum()
    (force,) = torch.autograd.grad(energy, x, create_graph=True)
    return model.second(force)


def _selects(model: Model, x: torch.Tensor) -> Any:
    y = model.first(x)
    last = y[torch.arange(len(y)), torch.full((len(y),), 2)]
    return model.second(y * last[:, None])


def _fills(model: Model, x: torch.Tensor) -> Any:
    y = x.new_zeros(x.shape)
    y[:, :] = model.first(x)
    return model.second(y)


def _fills_row_by_row(model: Model, x: torch.Tensor) -> Any:
    y = torch.zeros_like(x)
    for row in range(len(x)):
        y[row] = model.first(x[row])
    return model.second(y)


def _gradient_mode(model: Model, x: torch.Tensor) -> Any:
    y = model.first(x)
    return model.second(y * 2 if torch.is_grad_enabled() and y.requires_grad else y)


def _array(model: Model, x: torch.Tensor) -> Any:
    count = int(np.count_nonzero(x.detach().numpy() > 0))
    return model.second(model.first(x) * (count + 1))


def _closes_over(model: Model, x: torch.Tensor) -> Any:
    mask = (x > 0).float()
    return model.second(model.first(x, lambda y: y * mask))


def _binds(model: Model, x: torch.Tensor) -> Any:
    return model.second(model.first(x, functools.partial(torch.mul, (x > 0).float())))


def _checkpoints_a_function(model: Model, x: torch.Tensor) -> Any:
    factor = x.sum()

    def run(module: Any) -> Any:
        def forward(y: torch.Tensor) -> Any:
            return module(y) * factor

        return forward

    y = checkpoint(run(model.first), x, use_reentrant=False)
    y = checkpoint(functools.partial(model.first, x), use_reentrant=False) + y
    return model.second(checkpoint(model.first.forward, y, use_reentrant=False))


def _maps(model: Model, x: torch.Tensor) -> Any:
    mask = (x > 0).float()
    rows = torch.vmap(lambda row, keep: row * keep + mask.sum(0))(x, mask)
    return model.second(model.first(x) + rows)


class _Parameterless(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x > 0


def _asks_a_module(model: Any, x: torch.Tensor) -> Any:
    return model.second(model.first(x) * (2 if model.mask(x).all() else 1))


def _hands_an_activation_on(model: Model, x: torch.Tensor) -> Any:
    return model.second(model.first(x, nn.GELU()))


CASES = {
    "a mask in a dict": (_through_a_dict, _hides_a_mask, _linear),
    "a mask in an attribute": (_through_an_attribute, _keeps_a_mask, _linear),
    "skips in a list": (_skips, _pops, _pops),
    "classes": (_by_class, _linear, _linear),
    "detach_": (_detached_in_place, _linear, _linear),
    "forces": (_force, _linear, _linear),
    "indices": (_selects, _linear, _linear),
    "a filled tensor": (_fills, _linear, _linear),
    "row by row": (_fills_row_by_row, _linear, _linear),
    "an array": (_array, _linear, _linear),
    "a closure": (_closes_over, lambda linear, x, f: f(linear(x)), _linear),
    "a partial": (_binds, lambda linear, x, f: f(linear(x)), _linear),
    "checkpoints of functions": (_checkpoints_a_function, _linear, _linear),
    "vmap": (_maps, _linear, _linear),
    "an activation": (_hands_an_activation_on, lambda linear, x, f: f(linear(x)), _linear),
}


@pytest.mark.parametrize("name", CASES)
def test_is_the_models_own_on_other_values(name: str) -> None:
    torch.manual_seed(0)
    check(Model(*CASES[name]), ROWS, name)


def test_a_module_without_parameters_is_asked_again() -> None:
    torch.manual_seed(0)
    model = Model(_asks_a_module)
    model.mask = _Parameterless()
    check(model, ROWS)


def test_gradient_mode_is_looked_at_again() -> None:
    torch.manual_seed(0)
    model = Model(_gradient_mode)
    parts = cut(model, rows(1.0, 2.0))
    for _ in range(2):
        assert torch.equal(parts.run(rows(1.0, 2.0)), model(rows(1.0, 2.0)))
        with torch.no_grad():
            made = parts.run(rows(1.0, 2.0))
            assert torch.equal(made, model(rows(1.0, 2.0)))
            assert not made.requires_grad
    with torch.inference_mode():
        assert torch.equal(parts.run(rows(1.0, 2.0, 3.0)), model(rows(1.0, 2.0, 3.0)))


def test_a_leaf_that_returns_none_for_some_values() -> None:
    """Looks at its input where nobody sees it: an error in place of the other way."""
    torch.manual_seed(0)
    model = Model(_uses_what_may_be_none, _shortens)
    parts = cut(model, rows(1.0, 2.0))
    assert torch.equal(parts.run(rows(3.0, 2.0)), model(rows(3.0, 2.0)))
    with pytest.raises(RuntimeError, match="module 'first' looks at values, and returned"):
        parts.run(rows(-1.0, 2.0))


def _draws(model: Model, x: torch.Tensor) -> Any:
    y = model.first(x)
    return model.second(y * 2 if random.random() < 1e-6 else y)


def _draws_with_numpy(model: Model, x: torch.Tensor) -> Any:
    return model.second(model.first(x) * float(np.random.rand()))


def _counts(model: Any, x: torch.Tensor) -> Any:
    model.count = getattr(model, "count", 0) + 1
    return model.second(model.first(x) * model.count)


def _reads_the_hidden_state(model: Model, x: torch.Tensor) -> Any:
    y = model.first(x)
    return model.second(y if y.sum() > 0 else -y)


def _reads_what_was_changed(model: Model, x: torch.Tensor) -> Any:
    mask = torch.zeros_like(x)
    mask[:] = x
    return model.second(model.first(x) * (2 if mask.sum() > 0 else 1))


def _writes_a_parameter(model: Model, x: torch.Tensor) -> Any:
    kept = torch.zeros(4)
    kept += model.weight.detach()
    return model.second(model.first(x) * (2 if (kept > 0).any() else 1))


class Cache:
    """As transformers' are: an object that layers put tensors into."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []


def _closes_over_a_cache(model: Model, x: torch.Tensor) -> Any:
    cache = Cache()
    return model.second(model.first(x, lambda y: y * len(cache.kept)))


def _hands_a_method_on(model: Model, x: torch.Tensor) -> Any:
    return model.second(model.first(x, model.scaled))


def _hands_a_cache_on(model: Model, x: torch.Tensor) -> Any:
    return model.second(model.first(x, Cache()))


def _cuts_a_checkpoint(model: Model, x: torch.Tensor) -> Any:
    return checkpoint(lambda y: model.second(model.first(y)), x, use_reentrant=False)


def _replaces_a_buffer(model: Any, x: torch.Tensor) -> Any:
    model.table = model.table + 1
    return model.second(model.first(x) * model.table)


def _remembers(model: Any, x: torch.Tensor) -> Any:
    y = model.first(x)
    before = getattr(model, "before", None)
    model.before = y.detach().mean()
    return model.second(y if before is None else y + before)


def _warms_up(model: Any, x: torch.Tensor) -> Any:
    model.steps = getattr(model, "steps", 0) + 1
    return model.second(model.first(x) * (1 if model.steps < 1000 else 2))


def _counts_in_a_dict(model: Any, x: torch.Tensor) -> Any:
    state = vars(model).setdefault("state", {"steps": torch.zeros(1)})
    state["steps"] += 1
    return model.second(model.first(x) * state["steps"])


def _two_arguments(linear: nn.Linear, x: torch.Tensor, _: Any) -> Any:
    return linear(x)


REFUSED = {
    "random.random()": (_draws, _linear, "draws random numbers of Python's or numpy's"),
    "numpy": (_draws_with_numpy, _linear, "draws random numbers of Python's or numpy's"),
    "a counter": (_counts, _linear, "changes count each time it is called"),
    "a buffer that is replaced": (_replaces_a_buffer, _linear, "table is set in a forward and read in the next"),
    "a value of the last forward": (_remembers, _linear, "before is set in a forward and read in the next"),
    "a warm-up": (_warms_up, _linear, "changes steps each time it is called"),
    "a counter in a dict": (_counts_in_a_dict, _linear, "no parameter and no buffer is changed in place"),
    "values of the hidden state": (_reads_the_hidden_state, _linear, r"reads values .* follows from the model's param"),
    "values that were changed": (_reads_what_was_changed, _linear, "was changed in place"),
    "a parameter's values": (_writes_a_parameter, _linear, r"reads values .* follows from the model's parameters"),
    "a method": (_hands_a_method_on, _two_arguments, "a method of an object of class Model is handed on"),
    "a closure over an object": (
        _closes_over_a_cache,
        _two_arguments,
        "a function that holds an object of class Cache",
    ),
    "a cache": (_hands_a_cache_on, _two_arguments, "an object of class Cache is handed on"),
    "a checkpoint around the cut": (
        _cuts_a_checkpoint,
        _linear,
        "a checkpoint of a function that holds .* would be cut open",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_what_would_go_wrong(name: str) -> None:
    between, first, text = REFUSED[name]
    states = random.getstate(), str(np.random.get_state())
    with pytest.raises(ValueError, match=text):
        cut(Model(between, first), rows(1.0, 2.0))
    assert random.getstate() == states[0]
    assert str(np.random.get_state()) == states[1]


def _changes_a_view(model: Any, x: torch.Tensor) -> Any:
    y = model.first(x)
    with torch.no_grad():
        model.table[:2].add_(1.0)
    return model.second(y * model.table)


def test_a_buffer_changed_through_a_view_in_another_stage_is_refused() -> None:
    def later(model: Any, x: torch.Tensor) -> Any:
        y = model.first(x)
        with torch.no_grad():
            model.table[:2].add_(1.0)
        return model.second(y) * model.table

    torch.manual_seed(0)
    check(Model(_changes_a_view), ROWS)
    with pytest.raises(ValueError, match="buffer 'table' is changed in stage 0 and read in stages"):
        cut(Model(later), rows(1.0, 2.0))


def test_a_batch_of_one_is_no_excuse() -> None:
    """The samples in another order are the same: what follows from them is known by how it was made."""
    torch.manual_seed(0)
    check(Model(*CASES["a mask in a dict"]), [(rows(1.0),), (rows(-1.0),)])


def test_other_threads_notice_nothing() -> None:
    import threading

    torch.manual_seed(0)
    model = Model(_by_class)
    done = threading.Event()
    failed: list[BaseException] = []

    def use() -> None:
        other, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(2, 4)
        try:
            while not done.is_set():
                checkpoint(other, x, use_reentrant=False).sum().backward()
                F.relu(other(x))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    for _ in range(5):
        check(model, ROWS[:2])
    done.set()
    thread.join()
    assert not failed


class _Recomputed(nn.Module):
    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, *inputs: torch.Tensor) -> Any:
        return checkpoint(self.stage, *inputs, use_reentrant=False)


def _looks_at_its_input(model: Model, x: torch.Tensor) -> Any:
    factor = 2.0 if (x > 4).any() else 1.0
    return model.second((model.first(x) * factor).sin())


def test_a_checkpoint_around_a_stage_runs_what_ran() -> None:
    """Two microbatches of other sizes and modes in flight; of other values it is refused."""
    torch.manual_seed(0)
    model = Model(_looks_at_its_input)
    reference = copy.deepcopy(model)
    parts = cut(model, rows(1.0, 2.0))
    for stage in parts.stages:
        stage.module = _Recomputed(stage.module)
    for batches in ([rows(1.0, 2.0), rows(5.0, 2.0, 1.0)], [rows(1.0, 2.0, 3.0, 4.0), rows(2.0)]):
        with torch.no_grad():
            parts.run(batches[0])
        made = [parts.run(batch) for batch in batches]
        for one, batch in zip(made, batches, strict=True):
            one.sum().backward()
            reference(batch).sum().backward()
        for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
            assert mine.grad is None or other.grad is None or torch.equal(mine.grad, other.grad)
    made = [parts.run(rows(1.0, 2.0)), parts.run(rows(5.0, 2.0))]
    with pytest.raises(RuntimeError, match="cannot know which way the model took"):
        made[0].sum().backward()


def test_another_way_that_uses_another_module_is_refused() -> None:
    def between(model: Model, x: torch.Tensor) -> Any:
        y = model.first(x)
        return model.second(y * model.weight if (x > 4).any() else y)

    parts = cut(Model(between), rows(1.0, 2.0))
    with pytest.raises(
        ValueError, match="stage 0 would use weight, which it did not for the example: .* another way at"
    ):
        parts.run(rows(5.0))


def test_wrappers_that_would_be_cut_open_are_refused() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    wrapped = nn.Sequential(nn.Linear(4, 4), checkpoint_wrapper(inner))
    with pytest.raises(ValueError, match="a checkpoint of an object of class Sequential would be cut open at"):
        partition(wrapped, (rows(1.0, 2.0),), None, split_at("1._checkpoint_wrapped_module.1"))
    check_whole = partition(wrapped, (rows(1.0, 2.0),), None, split_at("1"))
    assert torch.equal(check_whole.run(rows(3.0)), wrapped(rows(3.0)))
    compiled = nn.Sequential(nn.Linear(4, 4), copy.deepcopy(inner))
    compiled[1].compile(backend="eager")
    with pytest.raises(ValueError, match="a stage starts inside module '1' .* which is compiled"):
        partition(compiled, (rows(1.0, 2.0),), None, split_at("1.1"))


class Nested(nn.Module):
    """A part that may be in another mode than the whole, with a branch on its mode between modules."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) * (2 if self.training else 1)
        return x


def test_parts_in_another_mode_than_the_whole() -> None:
    model = nn.Sequential(Nested(), nn.Linear(4, 4))
    model[0].eval()
    parts = partition(model, (rows(1.0, 2.0),), None, split_at("0.layers.1"))
    assert torch.equal(parts.run(rows(3.0)), model(rows(3.0)))
    for training in (True, False, True):
        model.train(training)
        for stage in parts.stages:
            stage.module.train(training)
        assert torch.equal(parts.run(rows(3.0)), model(rows(3.0)))
