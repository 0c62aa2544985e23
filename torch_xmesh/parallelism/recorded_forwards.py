"""A model's forward, recorded, as operators."""

import contextlib
import inspect
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from torch_xmesh.devices import device_of
from torch_xmesh.parallelism.called_whole import modules_called_whole
from torch_xmesh.parallelism.node_reader import NodeReader
from torch_xmesh.parallelism.operators import Forward, Recorded
from torch_xmesh.parallelism.plannable import check_plannable
from torch_xmesh.parallelism.rows.experts import has_row
from torch_xmesh.parallelism.view_writes import with_direct_writes
from torch_xmesh.pipeline.capture.errors import CaptureError
from torch_xmesh.pipeline.capture.recorded import RecordedModel, stand_ins
from torch_xmesh.pipeline.capture.recording import Recording
from torch_xmesh.pipeline.capture.sandbox import as_if_compiling
from torch_xmesh.pipeline.cut.microbatch import batch_size
from torch_xmesh.pipeline.cut.partition_parts import input_names


def forward_of(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> Forward:
    """The operators of a forward. Modules are looked into, all of them that can be; nothing of the model is changed.

    Raises:
        CaptureError: (a ValueError) the model cannot be recorded.
    """
    return recorded_forward(model, args, kwargs).forward


def recorded_forward(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    *,
    device: torch.device | None = None,
) -> Recorded:
    """The same with the recording. `device`: where a model on meta will run, None for the CPU."""
    with torch.enable_grad():
        (recorded,) = _Readings(model, args, kwargs, device).read(1, None)
        return recorded


def samples_of(args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """How many samples the arguments have along dim 0; 0 where they do not agree."""
    try:
        return batch_size(args, kwargs) or 0
    except ValueError:
        return 0


def part_of_samples(
    args: Sequence[Any], kwargs: Mapping[str, Any], parts: int
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments of the first of so many equal parts of the samples, which are along dim 0; None where they do not
    divide. What has no samples is in every part."""
    samples = samples_of(args, dict(kwargs))
    if samples == 0 or samples % parts:
        return None

    def part(leaf: Any) -> Any:
        has_samples = isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == samples
        return leaf[: samples // parts] if has_samples else leaf

    return pytree.tree_map(part, tuple(args)), pytree.tree_map(part, dict(kwargs))


def recorded_turns(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any] | None,
    count: int,
    *,
    device: torch.device | None = None,
) -> tuple[list[Recorded], Recorded | ValueError]:
    """The forward, so many times, and in the other mode, of training and evaluation, where it can be recorded in
    that. `device`: where a model on meta will run, None for the CPU."""
    with torch.enable_grad():
        readings = _Readings(model, args, kwargs, device)
        turns = readings.read(count, None)
        try:
            (other,) = readings.read(1, not model.training)
            return turns, other
        except ValueError as error:
            return turns, error


class _Readings:
    """Forwards of a model with the same arguments. What is found in one is used for the later ones: which modules have
    to be called as one, in both modes alike, and how the model is recorded without looking at values."""

    def __init__(
        self,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: dict[str, Any] | None,
        device: torch.device | None = None,
    ) -> None:
        self._model, self._args, self._kwargs = model, args, kwargs
        self._device = device_of(model, "the model") or device or torch.device("cpu")
        self._closed: set[str] = set()
        self._compiles = False
        if not model.training and any(True for _ in model.buffers()):
            with contextlib.suppress(ValueError):
                self.read(1, True)  # modules that change buffers do it in training

    def read(self, count: int, training: bool | None) -> list[Recorded]:
        """So many, one after another."""
        while True:
            recordings = map(with_direct_writes, self._recordings(count, training))
            found = [NodeReader(recording, self._model).read() for recording in recordings]
            more = {name for recorded in found for name in modules_called_whole(recorded, self._model)} - self._closed
            if not more:
                return found
            self._closed |= more

    def _recordings(self, count: int, training: bool | None) -> list[Recording]:
        """Where forwards hang on values of their arguments they are recorded as if compiling, if they hang on none
        then: transformers' models keep a mask that hides nothing in the example."""
        if self._compiles and (general := self._as_if_compiling(count, training, frozenset())) is not None:
            return general
        recorded, inputs = self._recorder()
        found = recorded.record_turns([inputs] * count, training, is_last=_looks_at_values)
        if not any(map(_looks_at_values, found)):
            return found
        general = self._as_if_compiling(count, training, found[-1].opened)
        self._compiles = general is not None
        return general or (found if len(found) == count else recorded.record_turns([inputs] * count, training))

    def _as_if_compiling(self, count: int, training: bool | None, opened: frozenset[str]) -> list[Recording] | None:
        """None where that looks at values, too, or into fewer modules than those `opened`."""
        recorded, inputs = self._recorder()
        try:
            with as_if_compiling():
                found = recorded.record_turns([inputs] * count, training, is_last=_looks_at_values)
        except CaptureError:
            return None
        return None if any(map(_looks_at_values, found)) or not opened <= found[-1].opened else found

    def _recorder(self) -> tuple[RecordedModel, list[torch.Tensor]]:
        """Who records, and the tensors to do it with.

        Raises:
            ValueError: something hangs on the model that a plan cannot have.
        """
        check_plannable(self._model)
        arguments = (tuple(self._args), dict(self._kwargs or {}))
        tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
        recorded = RecordedModel(
            self._model,
            arguments,
            names=_names_of(self._model, arguments),
            opened=_opened(self._model, self._closed),
            batch=(),
            device=self._device,
            closes_what_fails=True,
            opens_functions=True,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            recorded.switch_caches_off()
        return recorded, list(stand_ins(tensors, self._device))


def _looks_at_values(recording: Recording) -> bool:
    return bool(recording.value_guards)


def _names_of(model: nn.Module, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> list[str]:
    """Names of the tensors among the arguments, in their order: numbered as the forward's parameters are, however each
    is passed."""
    parameters = list(inspect.signature(model.forward).parameters)
    order = {name: at for at, name in enumerate(parameters)}
    paths = [path for _, path in input_names(model, arguments)]
    firsts = [parameters[path[1]] if path[0] == "args" and path[1] < len(parameters) else path[1] for path in paths]
    keys = [(order.get(str(first), len(order)), str(first), number) for number, first in enumerate(firsts)]
    place = {key: at for at, key in enumerate(sorted(keys))}
    return [f"input {place[key]}" for key in keys]


def _opened(model: nn.Module, closed: Collection[str]) -> frozenset[str]:
    """The modules that are looked into: all but those whose class has a row, and `closed` ones."""
    out: set[str] = set()
    outer: list[str] = []
    for name, module in model.named_modules():
        if name and (has_row(module) or name in closed):
            outer.append(f"{name}.")
        elif not any(name.startswith(prefix) for prefix in outer):
            out.add(name)
    return frozenset(out)
