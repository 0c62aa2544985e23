"""A model's shadow: a copy whose tensors are fakes, of which forwards can be recorded whatever becomes of the model."""

import copy
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from torch_xmesh.pipeline.capture.hooks import (
    BACKWARD_HOOKS,
    FORWARD_HOOKS,
    MODULE_HOOKS,
    is_of_library,
    make_recordable,
)
from torch_xmesh.pipeline.capture.opened import numbers_of
from torch_xmesh.pipeline.capture.sandbox import held_tensors, hooks_off, module_tensors, of_kind


class Shadow:
    """A copy of a model with fakes for its tensors; torch.compile and users' hooks are left out, hooks that are defined
    in installed libraries belong to the model and are kept. With `records_hooks` all hooks around forwards are.

    All fakes are on `device`: stages may be on several, which one process never runs. Threading: one thread at a time.

    Attributes:
        model: the copy. Its tensors need no fake mode around them: what has a fake among its operands gives fakes,
            everything else is computed.
        device: that of the fakes.
        own: ids of the tensors that its modules hold as long as no forward has changed that.
        names: names of its modules, by id; the first one of each.
    """

    def __init__(self, model: nn.Module, device: torch.device, *, records_hooks: bool = False) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.device = device
        memo: dict[int, Any] = {}
        for module in model.modules():
            for _, tensor in module_tensors(module):
                if id(tensor) not in memo:
                    memo[id(tensor)] = self._fake(tensor)
        kept = [{} if records_hooks else _library_hooks(module) for module in model.modules()]
        self._originals = _paths_of(model)
        try:
            with hooks_off(model, BACKWARD_HOOKS if records_hooks else MODULE_HOOKS):
                self.model = copy.deepcopy(model, memo)
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(f"{type(model).__name__} cannot be copied: {type(error).__name__}: {reason}") from error
        self.own = {id(tensor) for module in self.model.modules() for _, tensor in module_tensors(module)}
        self.names: dict[int, str] = {}
        for (name, module), hooks in zip(self.model.named_modules(), kept, strict=True):
            self.names[id(module)] = name
            for kind, found in hooks.items():
                getattr(module, kind).update(found)
            if records_hooks:
                make_recordable(module, name)
            module._compiled_call_impl = None

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        with self.mode:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device)
        return of_kind(made, tensor)

    def tensors(self) -> dict[int, tuple[str, torch.Tensor]]:
        """Path and tensor of what the modules hold, by id; the first path of each."""
        found: dict[int, tuple[str, torch.Tensor]] = {}
        for name, module in self.model.named_modules():
            for key, tensor in module_tensors(module):
                found.setdefault(id(tensor), (f"{name}.{key}" if name else key, tensor))
        return found

    def path_of_original(self, tensor: torch.Tensor) -> str | None:
        """The path of a tensor of the model itself, of which this is a copy: functions may hold it."""
        reference, path = self._originals.get(id(tensor), (None, ""))
        return path if reference is not None and reference() is tensor else None

    def numbers(self, names: Iterable[str]) -> dict[str, float]:
        """The numbers that are attributes of the named modules."""
        return numbers_of({name: self.model.get_submodule(name) for name in names})

    def run_on_memory(self, module: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The result, as fakes, of a module that looks at its data: it runs on zeros."""
        made: dict[int, torch.Tensor] = {}

        def zeros(fake: torch.Tensor) -> torch.Tensor:
            if not isinstance(fake, FakeTensor):
                return fake
            if id(fake) not in made:
                zero = torch.zeros(fake.shape, dtype=fake.dtype, device=fake.device)
                kept = isinstance(fake, nn.Parameter) or not fake.requires_grad
                made[id(fake)] = of_kind(zero, fake) if kept else zero.requires_grad_().clone()
            return made[id(fake)]

        swapped = [
            (holder, key, tensor)
            for child in module.modules()
            for holder, key, tensor in held_tensors(child)
            if isinstance(tensor, FakeTensor)
        ]
        try:
            for holder, key, tensor in swapped:
                holder[key] = zeros(tensor)
            args, kwargs = pytree.tree_map_only(torch.Tensor, zeros, (args, kwargs))
            result = run(*args, **kwargs)
        finally:
            for holder, key, tensor in swapped:
                holder[key] = tensor
        return pytree.tree_map_only(torch.Tensor, self.fake_like, result)

    def fake_like(self, real: torch.Tensor) -> torch.Tensor:
        """A fake for a tensor that was made of zeros; no leaf, as what a module returns is none."""
        with self.mode:
            made = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=real.device)
            return made.requires_grad_().clone() if real.requires_grad else made


def _library_hooks(module: nn.Module) -> dict[str, dict[int, Any]]:
    """The forward hooks of a module that are functions of an installed library."""
    found = {}
    for kind in FORWARD_HOOKS:
        hooks = getattr(module, kind).items()
        found[kind] = {key: hook for key, hook in hooks if hasattr(hook, "__code__") and is_of_library(hook)}
    return found


def _paths_of(model: nn.Module) -> dict[int, tuple["weakref.ref[torch.Tensor]", str]]:
    """By id of a parameter or buffer, a weak reference to it and its path in the model."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {id(tensor): (weakref.ref(tensor), path) for path, tensor in named}
