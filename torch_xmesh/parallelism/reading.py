"""A model's forward, recorded, as operators."""

import contextlib
import warnings
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from torch_xmesh.parallelism.called_whole import modules_called_whole
from torch_xmesh.parallelism.operators import Forward, Recorded
from torch_xmesh.parallelism.plannable import check_plannable
from torch_xmesh.parallelism.reader import Reader
from torch_xmesh.parallelism.rows.experts import has_row
from torch_xmesh.parallelism.view_writes import with_direct_writes
from torch_xmesh.pipeline.capture.errors import CaptureError
from torch_xmesh.pipeline.capture.recorded import RecordedModel, stand_ins
from torch_xmesh.pipeline.capture.recording import Recording
from torch_xmesh.pipeline.capture.sandbox import as_if_compiling
from torch_xmesh.pipeline.cut.microbatch import batch_size


def forward_of(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> Forward:
    """The operators of a forward. Modules are looked into, all of them that can be; nothing of the model is changed.

    Raises:
        CaptureError: (a ValueError) the model cannot be recorded.
    """
    return recorded_forward(model, args, kwargs).forward


def recorded_forward(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> Recorded:
    """The same with the recording."""
    with torch.enable_grad():
        closed = _closed_in_training(model, args, kwargs)
        (recorded,) = _read(model, args, kwargs, 1, None, closed)
        return recorded


def samples_of(args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """How many samples the arguments have along dim 0; 0 where they do not agree."""
    try:
        return batch_size(args, kwargs) or 0
    except ValueError:
        return 0


def recorded_turns(
    model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any] | None = None
) -> tuple[Recorded, Recorded, Recorded | ValueError]:
    """The forward, the forward once more, and in the other mode, of training and evaluation, where it can be recorded
    in that."""
    with torch.enable_grad():
        closed = _closed_in_training(model, args, kwargs)
        first, again = _read(model, args, kwargs, 2, None, closed)
        try:
            (other,) = _read(model, args, kwargs, 1, not model.training, closed)
            return first, again, other
        except ValueError as error:
            return first, again, error


def _closed_in_training(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any] | None) -> set[str]:
    """Modules that are called as one in both modes, since they have to be in training."""
    closed: set[str] = set()
    if not model.training and any(True for _ in model.buffers()):
        with contextlib.suppress(ValueError):
            _read(model, args, kwargs, 1, True, closed)
    return closed


def _read(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any] | None,
    count: int,
    training: bool | None,
    closed: set[str],
) -> list[Recorded]:
    """Forwards one after another; modules `closed` are called as one, and more that have to be, which are added."""
    while True:
        recordings = _recordings(model, args, kwargs, count, training, closed)
        found = [Reader(recording, model).read() for recording in recordings]
        more = {name for one in found for name in modules_called_whole(one, model)} - closed
        if not more:
            return found
        closed |= more


def _recordings(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any] | None,
    count: int,
    training: bool | None,
    closed: Collection[str],
) -> list[Recording]:
    """Forwards one after another, as operators are read from them."""
    return [*map(with_direct_writes, _as_they_ran(model, args, kwargs, count, training, closed))]


def _as_they_ran(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any] | None,
    count: int,
    training: bool | None,
    closed: Collection[str],
) -> list[Recording]:
    """Where forwards hang on values of their arguments they are recorded as if compiling, if they
    hang on none then: transformers' models keep a mask that hides nothing in the example."""
    recorded, inputs = _recorder(model, args, kwargs, closed)
    found = recorded.record_turns([inputs] * count, training)
    if not any(one.value_guards for one in found):
        return found
    recorded, inputs = _recorder(model, args, kwargs, closed)
    try:
        with as_if_compiling():
            general = recorded.record_turns([inputs] * count, training)
    except CaptureError:
        return found
    is_general = not any(one.value_guards for one in general) and found[-1].opened <= general[-1].opened
    return general if is_general else found


def _recorder(
    model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any] | None, closed: Collection[str]
) -> tuple[RecordedModel, list[torch.Tensor]]:
    """Who records, and the tensors to do it with.

    Raises:
        ValueError: something hangs on the model that a plan cannot have.
    """
    check_plannable(model)
    arguments = (tuple(args), dict(kwargs or {}))
    tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
    names = [f"input {i}" for i in range(len(tensors))]
    device = torch.device("cpu")
    recorded = RecordedModel(
        model,
        arguments,
        names=names,
        opened=_opened(model, closed),
        batch=(),
        device=device,
        closes_what_fails=True,
        opens_functions=True,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        recorded.switch_caches_off()
    return recorded, list(stand_ins(tensors, device))


def _opened(model: nn.Module, closed: Collection[str]) -> frozenset[str]:
    """The modules that are looked into: all but those whose class has a row, and `closed` ones."""
    out: set[str] = set()
    outer: list[str] = []
    for name, module in model.named_modules():
        if name and (has_row(module) or name in closed):
            outer.append(f"{name}.")
        elif not any(name.startswith(one) for one in outer):
            out.add(name)
    return frozenset(out)
