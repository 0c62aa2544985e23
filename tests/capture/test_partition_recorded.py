"""Forwards that are easy to record wrongly: each is the model's own on other values."""

import copy
import functools
from typing import Any

import numpy as np
import pytest
import torch
from recorded_cases import ROWS, Leaf, Model, check, cut, linear_of, rows
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from torch_xmesh.pipeline.cut.partition import partition, split_at


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
    "a mask in a dict": (_through_a_dict, _hides_a_mask, linear_of),
    "a mask in an attribute": (_through_an_attribute, _keeps_a_mask, linear_of),
    "skips in a list": (_skips, _pops, _pops),
    "classes": (_by_class, linear_of, linear_of),
    "detach_": (_detached_in_place, linear_of, linear_of),
    "forces": (_force, linear_of, linear_of),
    "indices": (_selects, linear_of, linear_of),
    "a filled tensor": (_fills, linear_of, linear_of),
    "row by row": (_fills_row_by_row, linear_of, linear_of),
    "an array": (_array, linear_of, linear_of),
    "a closure": (_closes_over, lambda linear, x, f: f(linear(x)), linear_of),
    "a partial": (_binds, lambda linear, x, f: f(linear(x)), linear_of),
    "checkpoints of functions": (_checkpoints_a_function, linear_of, linear_of),
    "vmap": (_maps, linear_of, linear_of),
    "an activation": (_hands_an_activation_on, lambda linear, x, f: f(linear(x)), linear_of),
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
