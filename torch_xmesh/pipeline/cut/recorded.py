"""A model that can be recorded for inputs of any sizes, in any mode, whatever has become of it."""

import contextlib
import random
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from torch_xmesh.pipeline.cut.chunk_specs import Chunk
from torch_xmesh.pipeline.cut.recorder import LeafFailedError, LeakedError, Recorder
from torch_xmesh.pipeline.cut.recording import CaptureError, Recording, difference
from torch_xmesh.pipeline.cut.sandbox import quiet, unchanged, uncompiled
from torch_xmesh.pipeline.cut.shadow import Shadow
from torch_xmesh.pipeline.cut.source_lines import source_line


class RecordedModel:
    """Records forwards of a model's shadow.

    Attributes:
        names: of the tensor arguments, in pytree order.
        opened: the modules that are looked into; more, once one turns out to need it.
    `batch` names the arguments that are cut into microbatches.
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
    ) -> None:
        self.names, self.opened, self._batch = list(names), opened, batch
        self.type_name = type(model).__name__
        self._shadow = Shadow(model, device)
        self._flags = [module.training for module in self._shadow.model.modules()]
        self._on_memory: frozenset[type] = frozenset()
        self._leaves, self._structure = pytree.tree_flatten(arguments)
        self.device = device

    @property
    def training(self) -> bool:
        """The model's mode when this was made."""
        return self._flags[0]

    def record(self, inputs: Sequence[torch.Tensor], training: bool, *, turn: int = 0) -> Recording:
        """The forward with `inputs` as the tensor arguments, as the model does it after so many others (`turn`), each
        with random numbers of its own.

        Raises:
            CaptureError: it cannot be recorded.
        """
        given = iter(inputs)
        leaves = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in self._leaves]
        arguments = pytree.tree_unflatten(leaves, self._structure)
        for module, flag in zip(self._shadow.model.modules(), self._flags, strict=True):
            module.training = flag if training == self.training else training
        while True:
            try:
                with self._undisturbed():
                    for seed in range(turn + 1):
                        _seed(seed)
                        recording = self._recorder().record(self.names, arguments)
                return recording
            except LeafFailedError as failed:
                if failed.kind in self._on_memory:
                    what = f"module {failed.name!r} ({failed.kind.__name__})"
                    raise self._refusal(failed.error, what, failed.where) from failed.error
                self._on_memory |= {failed.kind}
            except LeakedError as leaked:
                self._look_into(leaked)
            except CaptureError:
                raise
            except Exception as error:
                raise self._refusal(error) from error

    def _recorder(self) -> Recorder:
        return Recorder(self._shadow, opened=self.opened, on_memory=self._on_memory, batch=self._batch)

    def _refusal(self, error: Exception, what: str = "the model", called: str = "") -> CaptureError:
        where = source_line(error) or called
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return CaptureError(
            f"{self.type_name} cannot be recorded: {what} fails{' at ' + where if where else ''}: "
            f"{type(error).__name__}: {reason}. Where the example is right, pass ready stage modules (a list of "
            "modules as model), or start stages at other modules"
        )

    def _look_into(self, leaked: LeakedError) -> None:
        """From now on what is around the module that made a tensor, which came out by a side door, is recorded."""
        parts = (leaked.maker or "").split(".")
        around = {".".join(parts[:depth]) for depth in range(len(parts))}
        if leaked.maker is None or around <= self.opened:
            raise CaptureError(
                f"a tensor at {leaked.where} came out of a module in another way than as its result; return it, or "
                "pass ready stage modules (a list of modules as model)"
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
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.callback(random.setstate, random.getstate())
            stack.enter_context(quiet())
            stack.enter_context(uncompiled())
            yield


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)


def check_repeats(
    recorded: RecordedModel, recording: Recording, examples: Sequence[torch.Tensor], specs: Sequence[Any]
) -> None:
    """Raises CaptureError for a forward that does something else the next time, with the same samples in another order
    and other random numbers."""
    turned = [
        one.detach().roll(1, spec.split_dim).requires_grad_(one.requires_grad) if isinstance(spec, Chunk) else one
        for one, spec in zip(examples, specs, strict=True)
    ]
    again = recorded.record(turned, recording.training, turn=1)
    if [guard.value for guard in recording.guards] != [guard.value for guard in again.guards]:
        return
    found = difference(recording, again)
    if not found:
        return
    settled = recorded.record(turned, recording.training, turn=2)
    if difference(again, settled):  # else it keeps what it has made at first
        raise CaptureError(
            f"{recorded.type_name}'s forward does something else each time it is called: {found}. What is not in its "
            "arguments, its parameters or its buffers must not change what it does; pass ready stage modules (a list "
            "of modules as model) where that is meant"
        )


def stand_ins(examples: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """The example's tensors; for those on meta real ones, of ones, which are valid as masks, tokens and positions."""
    return [
        torch.ones(one.shape, dtype=one.dtype, device=device).requires_grad_(one.requires_grad) if one.is_meta else one
        for one in examples
    ]


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


def grown(tensor: torch.Tensor, spec: Any, extra: int) -> torch.Tensor:
    """With more samples, where they are cut."""
    if not isinstance(spec, Chunk):
        return tensor
    shape = list(tensor.shape)
    shape[spec.split_dim] += extra
    return resized(tensor, shape)
