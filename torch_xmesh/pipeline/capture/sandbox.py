"""Where a model can run and nothing of it is real: fake tensors, no hooks."""

import contextlib
import copy
import logging
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils import _pytree as pytree

from torch_xmesh.generators import rng_kept
from torch_xmesh.pipeline.capture.hooks import BACKWARD_HOOKS, MODULE_HOOKS


@contextlib.contextmanager
def hooks_off(model: nn.Module, kinds: Sequence[str] = MODULE_HOOKS) -> Iterator[None]:
    """Run modules without their forward and backward hooks, whose side effects are for training only."""
    kept = [(module, name, getattr(module, name)) for module in model.modules() for name in kinds]
    try:
        for module, name, _ in kept:
            module.__dict__[name] = OrderedDict()
        yield
    finally:
        for module, name, hooks in kept:
            module.__dict__[name] = hooks


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """torch logs the traceback of each operation that fakes refuse; here that is a question, whose answer is raised."""
    logger = logging.getLogger(torch._subclasses.fake_tensor.__name__)

    def drop(record: logging.LogRecord) -> bool:
        return record.exc_info is None

    logger.addFilter(drop)
    try:
        yield
    finally:
        logger.removeFilter(drop)


_compiling_lock = threading.Lock()
_compiling_before: list[bool] = []
_uncompiled_lock = threading.Lock()
_uncompiled_users: list[contextlib.ExitStack] = []


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """torch.compile is off: what it has seen with fakes it runs uncompiled ever after. Its switch is the process's, so
    threads that are in here together share one."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled
        yield
        return
    with _uncompiled_lock:
        stance = _uncompiled_users[-1] if _uncompiled_users else contextlib.ExitStack()
        if not _uncompiled_users:
            stance.enter_context(torch.compiler.set_stance("force_eager"))
        _uncompiled_users.append(stance)
    try:
        yield
    finally:
        with _uncompiled_lock:
            _uncompiled_users.remove(stance)
            if not _uncompiled_users:
                stance.close()


@contextlib.contextmanager
def as_if_compiling() -> Iterator[None]:
    """``torch.compiler.is_compiling()`` is true, as while torch.export traces: a model whose author asks for it leaves
    out what hangs on values, as a shortcut for masks that hide nothing. The flag is the process's: threads that are
    in here together share it, and no other may export, or step an optimizer, meanwhile."""
    with _compiling_lock:
        _compiling_before.append(torch.compiler._is_compiling_flag)
        torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        with _compiling_lock:
            before = _compiling_before.pop()
            if not _compiling_before:
                torch.compiler._is_compiling_flag = before


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Whatever is done inside to attributes of the model's modules, and to what is in them, is undone."""
    kept = [(container, container.copy()) for container in _containers(model)]
    try:
        yield
    finally:
        for container, content in kept:
            if not _is_same(container, content):
                container.clear()
                container.extend(content) if isinstance(container, list) else container.update(content)


def _containers(model: nn.Module) -> list[Any]:
    """The dicts, lists and sets in which a model's modules, and objects that are their attributes, keep what they
    have."""
    found: dict[int, Any] = {}
    left: list[tuple[Any, bool]] = [(vars(module), True) for module in model.modules()]
    while left:
        value, is_of_module = left.pop()
        if isinstance(value, dict | list | set):
            if id(value) in found:
                continue
            found[id(value)] = value
            inside = value.values() if isinstance(value, dict) else () if isinstance(value, set) else value
            left += [(part, is_of_module) for part in inside]
        elif isinstance(value, tuple):
            left += [(part, is_of_module) for part in value]
        elif is_of_module and _has_own_state(value):
            left.append((vars(value), False))
    return list(found.values())


def _has_own_state(value: Any) -> bool:
    """Whether it is an object with attributes, but no module, of a class that is not torch's and not the language's."""
    if isinstance(value, nn.Module) or not isinstance(getattr(value, "__dict__", None), dict):
        return False
    return type(value).__module__.partition(".")[0] not in ("torch", "builtins", "types", "functools", "enum")


def _is_same(container: Any, content: Any) -> bool:
    if len(container) != len(content):
        return False
    if isinstance(container, dict):
        return all(key in container and container[key] is value for key, value in content.items())
    return (
        container == content
        if isinstance(container, set)
        else all(a is b for a, b in zip(container, content, strict=True))
    )


class Sandbox:
    """A context in which `model` holds fakes of its parameters and buffers; on leaving it is what it was before, also
    where a forward has given it something (a cache of fakes would be in its way ever after).

    Fakes have the device of the tensor they stand for; of a tensor on meta, `device` (default: the first real device
    among the model's tensors, else the CPU), so that autocast and device checks see what they will see in training.
    """

    def __init__(self, model: nn.Module, device: torch.device | None = None) -> None:
        self._model = model
        self._is_shadow = _SHADOW in model.__dict__
        tensors = [*model.parameters(), *model.buffers()]
        self._is_on_meta = any(tensor.is_meta for tensor in tensors)
        devices = [tensor.device for tensor in tensors if not tensor.is_meta]
        self._device = device or next(iter(devices), torch.device("cpu"))
        self._fakes: dict[torch.Tensor, torch.Tensor] = {}
        self._swaps: list[tuple[Any, Any, torch.Tensor, torch.Tensor]] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Sandbox":
        with self._stack as stack:
            stack.enter_context(unchanged(self._model))
            stack.enter_context(hooks_off(self._model))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(quiet())
            stack.enter_context(uncompiled())
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            for module in self._model.modules():
                self._swaps += [
                    (holder, key, tensor, self.fake(tensor)) for holder, key, tensor in held_tensors(module)
                ]
            self._put_fakes()
            stack.callback(self._put_real)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake that stands for a tensor here, always the same one."""
        if tensor not in self._fakes:
            device = self._device if tensor.is_meta else tensor.device
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            self._fakes[tensor] = of_kind(made, tensor)
        return self._fakes[tensor]

    def call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The result of a module of the model on fakes.

        A module that looks at its data runs on zeros, unless the model is on meta; one of a shadow with zeros for
        parameters.
        """
        try:
            return module(*args, **kwargs)
        except Exception as error:
            if self._is_on_meta and not self._is_shadow:
                raise
            try:
                return self._call_on_zeros(module, args, kwargs)
            except Exception:
                raise error from None

    def _call_on_zeros(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        def zeros(fake: torch.Tensor) -> torch.Tensor:
            made = torch.zeros(fake.shape, dtype=fake.dtype, device=fake.device)
            return made.requires_grad_().clone() if fake.requires_grad else made

        def fake(real: torch.Tensor) -> torch.Tensor:
            made = torch.empty(real.shape, dtype=real.dtype, device=real.device, requires_grad=real.requires_grad)
            return made.clone()

        self._put_real()
        try:
            with unset_fake_temporarily(), rng_kept(self._device), self._zeros_for_meta(module):
                kept = {buffer: buffer.detach().clone() for buffer in module.buffers()}
                try:
                    args, kwargs = pytree.tree_map_only(torch.Tensor, zeros, (args, kwargs))
                    result = module(*args, **kwargs)
                finally:
                    with torch.no_grad():
                        for buffer, value in kept.items():
                            buffer.copy_(value)
        finally:
            self._put_fakes()
        return pytree.tree_map_only(torch.Tensor, fake, result)

    @contextlib.contextmanager
    def _zeros_for_meta(self, module: nn.Module) -> Iterator[None]:
        """Zeros where a module holds tensors on meta."""
        within = {id(holder) for child in module.modules() for holder in holders(child)}
        swaps = [swap for swap in self._swaps if id(swap[0]) in within and swap[2].is_meta]
        made: dict[torch.Tensor, torch.Tensor] = {}
        try:
            for holder, key, meta, fake in swaps:
                if meta not in made:
                    zeros = torch.zeros(meta.shape, dtype=meta.dtype, device=fake.device)
                    made[meta] = of_kind(zeros, meta)
                holder[key] = made[meta]
            yield
        finally:
            for holder, key, meta, _ in swaps:
                holder[key] = meta

    def _put_fakes(self) -> None:
        for holder, key, _, fake in self._swaps:
            holder[key] = fake

    def _put_real(self) -> None:
        for holder, key, real, _ in self._swaps:
            holder[key] = real


_SHADOW = "_xmesh_shadow"


def meta_copy(model: nn.Module, *, keeps_forward_hooks: bool = False) -> nn.Module:
    """A copy of a model with all its tensors on meta: where its shapes can be found whatever becomes of the model.

    Raises:
        ValueError: it cannot be copied.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        for _, _, tensor in held_tensors(module):
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            memo.setdefault(id(tensor), of_kind(made, tensor))
    try:
        with hooks_off(model, BACKWARD_HOOKS if keeps_forward_hooks else MODULE_HOOKS):
            copied = copy.deepcopy(model, memo)
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{type(model).__name__} cannot be copied: {type(error).__name__}: {reason}") from error
    copied.__dict__[_SHADOW] = True
    return copied


def of_kind(made: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """`made` as a parameter, and with a gradient, where `tensor` is one."""
    grad = tensor.requires_grad
    return nn.Parameter(made, grad) if isinstance(tensor, nn.Parameter) else made.requires_grad_(grad)


def module_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that is an attribute of a module, with the attribute's name."""
    for holder, key, tensor in held_tensors(module):
        if isinstance(holder, dict):
            yield key, tensor


def held_tensors(module: nn.Module) -> Iterator[tuple[Any, Any, torch.Tensor]]:
    """Every tensor through which a module's forward reaches its own, with what holds it and under which key."""
    for holder in holders(module):
        pairs = list(holder.items()) if isinstance(holder, dict) else list(enumerate(holder))
        yield from [(holder, key, value) for key, value in pairs if isinstance(value, torch.Tensor)]


def holders(module: nn.Module) -> Iterator[Any]:
    """Everything in a module through which its forward reaches its own tensors."""
    yield module._parameters
    yield module._buffers
    yield module.__dict__
    if isinstance(module, nn.RNNBase):
        yield module._flat_weights
