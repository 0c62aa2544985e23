"""A model that can be recorded for inputs of any sizes, in any mode, whatever has become of it."""

import contextlib
import random
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.utils import _pytree as pytree

from torch_xmesh.generators import rng_kept
from torch_xmesh.pipeline.capture.errors import (
    READY_STAGES,
    CaptureError,
    FakeNeededError,
    LeafFailedError,
    LookInsideError,
)
from torch_xmesh.pipeline.capture.hooks import HookRefusedError
from torch_xmesh.pipeline.capture.library_models import without_caches
from torch_xmesh.pipeline.capture.opened import why_closed
from torch_xmesh.pipeline.capture.recorder import Recorder
from torch_xmesh.pipeline.capture.recording import Recording, difference
from torch_xmesh.pipeline.capture.sandbox import quiet, unchanged, uncompiled
from torch_xmesh.pipeline.capture.shadow import Shadow
from torch_xmesh.pipeline.capture.source_lines import source_line

_PATIENCE_SECONDS = 2.0
_USUAL_RECORDINGS = 3
"""Recordings of a model before its first step: two that are compared, and one with another number of samples."""


def _is_later_rank() -> bool:
    return dist.is_initialized() and dist.get_rank() > 0


class RecordedModel:
    """Records forwards of a model's shadow.

    Attributes:
        names: names of the tensor arguments, in pytree order.
        opened: the modules that are looked into; more, once one turns out to need it.
    """

    def __init__(
        self,
        model: nn.Module,
        arguments: Any,
        *,
        names: Sequence[str],
        opened: frozenset[str],
        batch: Collection[str],
        device: torch.device,
        closes_what_fails: bool = False,
        opens_functions: bool = False,
    ) -> None:
        """`batch` names the arguments that are cut into microbatches. `closes_what_fails`: a module whose insides
        cannot be run on fakes is not looked into, nor are others of its class. `opens_functions`: see Recorder."""
        self.names, self.opened, self._batch = list(names), opened, batch
        self.type_name = type(model).__name__
        self._shadow = Shadow(model, device, records_hooks=opens_functions)
        self._flags = [module.training for module in self._shadow.model.modules()]
        looked = {module.training for name, module in self._shadow.model.named_modules() if name in {"", *opened}}
        self._own_mode = self._flags[0] if len(looked) == 1 else None
        self._on_memory: frozenset[type] = frozenset()
        self._as_fakes: frozenset[str] = frozenset()
        self._closed = {name: why for name, module in model.named_modules() if (why := why_closed(module)) is not None}
        self._leaves, self._structure = pytree.tree_flatten(arguments)
        self._closes_what_fails, self._failed_in = closes_what_fails, ""
        self._opens_functions = opens_functions
        self.device = device
        self._begun, self._num_recorded = time.monotonic(), 0

    @property
    def training(self) -> bool | None:
        """The mode of the modules that are looked into when this was made; None where they had several."""
        return self._own_mode

    def switch_caches_off(self) -> None:
        """What is recorded fills no caches for generation; the model itself stays as it is."""
        without_caches(self._shadow.model)

    def record(self, inputs: Sequence[torch.Tensor], training: bool | None) -> Recording:
        """The forward with `inputs` as the tensor arguments, in training mode or not, or (None) as the model came.

        Raises:
            CaptureError: it cannot be recorded.
        """
        return self.record_turns([inputs], training)[0]

    def record_turns(
        self,
        several: Sequence[Sequence[torch.Tensor]],
        training: bool | None,
        is_last: Callable[[Recording], bool] = lambda recording: False,
    ) -> list[Recording]:
        """Forwards one after another, each with random numbers of its own: a later one finds what an earlier one has
        kept in the model's attributes. None comes behind one that `is_last`.

        Raises:
            CaptureError: see `record`.
        """
        for module, flag in zip(self._shadow.model.modules(), self._flags, strict=True):
            module.training = flag if training is None or training == self.training else training
        while True:
            try:
                with self._undisturbed():
                    recordings = []
                    for seed, inputs in enumerate(several):
                        recordings.append(self._record_once(inputs, seed))
                        self._tell_progress()
                        if is_last(recordings[-1]):
                            break
                    return recordings
            except LeafFailedError as failed:
                if failed.kind in self._on_memory:
                    what = f"module {failed.name!r} ({failed.kind.__name__})"
                    raise self._refusal(failed.error, what, failed.where) from failed.error
                self._on_memory |= {failed.kind}
            except LookInsideError as found:
                self._look_into(found)
            except FakeNeededError as needed:
                self._as_fakes |= {needed.node}
            except HookRefusedError:
                raise
            except CaptureError as error:
                if not self._close(error):
                    raise
            except Exception as error:
                if not self._close(error):
                    raise self._refusal(error) from error

    def _close(self, error: Exception) -> bool:
        """From now on the module in which that was raised is called as one, as are those of its class; False where it
        cannot be."""
        if not self._closes_what_fails or not self._failed_in:
            return False
        modules = dict(self._shadow.model.named_modules())
        kind = type(modules[self._failed_in])
        alike = [name for name in self.opened if type(modules[name]) is kind]
        reason = (
            f"cannot be looked into ({type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]})"
        )
        self._closed |= dict.fromkeys(alike, reason)
        self.opened -= {name for name in self.opened for outer in alike if f"{name}.".startswith(f"{outer}.")}
        return True

    def _tell_progress(self) -> None:
        """A line, on the first rank, where recording takes long."""
        self._num_recorded += 1
        seconds = time.monotonic() - self._begun
        if seconds > _PATIENCE_SECONDS and self._num_recorded <= _USUAL_RECORDINGS and not _is_later_rank():
            print(
                f"torch_xmesh: recorded {self.type_name} {self._num_recorded} of about {_USUAL_RECORDINGS} times, "
                f"{seconds:.0f} s",
                file=sys.stderr,
                flush=True,
            )

    def _record_once(self, inputs: Sequence[torch.Tensor], seed: int) -> Recording:
        given = iter(inputs)
        leaves = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in self._leaves]
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # models draw from the global one
        recorder = Recorder(
            self._shadow,
            opened=self.opened,
            on_memory=self._on_memory,
            as_fakes=self._as_fakes,
            batch=self._batch,
            opens_functions=self._opens_functions,
        )
        try:
            return recorder.record(self.names, pytree.tree_unflatten(leaves, self._structure))
        finally:
            self._failed_in = recorder.failed_in

    def _refusal(self, error: Exception, what: str = "the model", called: str = "") -> CaptureError:
        where = source_line(error) or called
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if isinstance(error, DynamicOutputShapeException):
            reason = "the size of a result would follow from values; select inside of a module, or in loss_fn"
        return CaptureError(
            f"{self.type_name} cannot be recorded: {what} fails{' at ' + where if where else ''}: "
            f"{type(error).__name__}: {reason}. Where the example is right, "
            f"{READY_STAGES}, or start stages at other modules"
        )

    def _look_into(self, found: LookInsideError) -> None:
        """From now on the insides of a module, and of all of its kind, are recorded."""
        if found.maker is not None:
            parts = found.maker.split(".")
            around = {".".join(parts[:depth]) for depth in range(len(parts))}
        else:
            parts = (found.leaf or "").split(".")
            around = {".".join(parts[:depth]) for depth in range(len(parts) + 1)}
        if (found.leaf is None and found.maker is None) or around <= self.opened:
            raise CaptureError(f"{found.reason}, at {found.where}: return it, or {READY_STAGES}")
        for name in around - self.opened:
            if name in self._closed:
                raise CaptureError(
                    f"{found.reason}, at {found.where}; module {name!r} must be looked into for that, which "
                    f"{self._closed[name]}: {READY_STAGES}"
                )
        modules = dict(self._shadow.model.named_modules())
        for outer in around - self.opened:  # and of its kind, as all layers of a model do the same
            inner = {name[len(outer) :] for name in around if name.startswith(outer)}
            alike = [name for name, module in modules.items() if type(module) is type(modules[outer])]
            self.opened |= {name + path for name in alike for path in inner if name + path in modules}

    @contextlib.contextmanager
    def _undisturbed(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(unchanged(self._shadow.model))
            has_gradients = torch.is_grad_enabled()
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.set_grad_enabled(has_gradients))
            stack.enter_context(rng_kept(self.device))
            stack.callback(random.setstate, random.getstate())
            stack.callback(np.random.set_state, np.random.get_state())
            stack.enter_context(quiet())
            stack.enter_context(uncompiled())
            yield


def record_checked(recorded: RecordedModel, inputs: Sequence[torch.Tensor], dims: Sequence[int | None]) -> Recording:
    """A recording in the model's own mode; `dims`: where each input's samples are, None where it has none.

    Raises:
        CaptureError: the forward does something else the next time, with the same samples in another order and other
            random numbers.
    """
    turned = [
        tensor if dim is None else tensor.detach().roll(1, dim).requires_grad_(tensor.requires_grad)
        for tensor, dim in zip(inputs, dims, strict=True)
    ]
    first, again = recorded.record_turns([inputs, turned], recorded.training)
    pairs = zip(first.guards, again.guards, strict=False)
    if len(first.guards) != len(again.guards) or not all(guard.gave(other.value) for guard, other in pairs):
        return first
    counted = {name for name, value in first.numbers.items() if again.numbers.get(name) != value}
    if counted:
        raise CaptureError(
            f"{recorded.type_name}'s forward changes {min(counted)} each time it is called: in stages that would stay "
            f"as it is; count in a buffer, in place (self.count.add_(1)), or {READY_STAGES}"
        )
    found = difference(first, again)
    if found:
        _, again, settled = recorded.record_turns([inputs, turned, inputs], recorded.training)
        if difference(again, settled):  # else it keeps what it has made at first
            raise CaptureError(
                f"{recorded.type_name}'s forward does something else each time it is called: {found}. What is not in "
                "its arguments, its parameters or its buffers must not change what it does; where that "
                f"is meant, {READY_STAGES}"
            )
    return first


def stand_ins(examples: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """The example's tensors on a device; for those on meta real ones, of ones, which are valid as masks, tokens and
    positions."""
    found = []
    for example in examples:
        if example.is_meta:
            made = torch.ones(example.shape, dtype=example.dtype, device=device)
        elif example.device == device:
            found.append(example)
            continue
        else:
            made = example.detach().to(device)
        found.append(made.requires_grad_(example.requires_grad))
    return found


def resized(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A tensor with another shape, whose entries are those of `tensor`, again and again."""
    made = tensor.detach()
    for dim, size in enumerate(shape):
        if size != made.size(dim):
            if made.size(dim) == 0:
                made = made.new_ones([*made.shape[:dim], size, *made.shape[dim + 1 :]])
            else:
                made = made.index_select(dim, torch.arange(size, device=made.device) % made.size(dim))
    return made.requires_grad_(tensor.requires_grad) if made is not tensor else tensor


def grown(tensor: torch.Tensor, dim: int | None, extra: int) -> torch.Tensor:
    """With more samples, where it has some."""
    if dim is None:
        return tensor
    shape = list(tensor.shape)
    shape[dim] += extra
    return resized(tensor, shape)
