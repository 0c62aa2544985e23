"""Forwards that cannot be recorded for every step: refused, by name, and nothing is changed by the attempt."""

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from recorded_cases import ROWS, Model, check, cut, linear_of, rows
from torch import nn
from torch.utils.checkpoint import checkpoint

from torch_xmesh.pipeline.cut.partition import partition, split_at


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
    "random.random()": (_draws, linear_of, "draws random numbers of Python's or numpy's"),
    "numpy": (_draws_with_numpy, linear_of, "draws random numbers of Python's or numpy's"),
    "a counter": (_counts, linear_of, "changes count each time it is called"),
    "a buffer that is replaced": (_replaces_a_buffer, linear_of, "table is set in a forward and read in the next"),
    "a value of the last forward": (_remembers, linear_of, "before is set in a forward and read in the next"),
    "a warm-up": (_warms_up, linear_of, "changes steps each time it is called"),
    "a counter in a dict": (_counts_in_a_dict, linear_of, "no parameter and no buffer is changed in place"),
    "values of the hidden state": (
        _reads_the_hidden_state,
        linear_of,
        r"reads values .* follows from the model's param",
    ),
    "values that were changed": (_reads_what_was_changed, linear_of, "was changed in place"),
    "a parameter's values": (_writes_a_parameter, linear_of, r"reads values .* follows from the model's parameters"),
    "a method": (_hands_a_method_on, _two_arguments, "a method of an object of class Model is handed on"),
    "a closure over an object": (
        _closes_over_a_cache,
        _two_arguments,
        "a function that holds an object of class Cache",
    ),
    "a cache": (_hands_a_cache_on, _two_arguments, "an object of class Cache is handed on"),
    "a checkpoint around the cut": (
        _cuts_a_checkpoint,
        linear_of,
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
