"""Calls that a torch function mode does not see, told to whoever records: modules, autograd functions, checkpoints."""

import contextlib
import functools
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, Protocol
from unittest import mock

import torch
import torch._functorch.apis
import torch.utils.checkpoint
from torch import nn


class CallRecorder(Protocol):
    """Who is told of the calls of its thread."""

    def call(self, module: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A module is called: ``run(*args, **kwargs)`` does it."""

    def opaque(self, function: Callable[..., Any], args: Any, kwargs: Any, compute: Callable[..., Any]) -> Any:
        """An autograd function is applied; `function` does that by a name, `compute` without being told again."""

    def checkpoint(self, run: Callable[..., Any], function: Any, args: Any, kwargs: Any) -> Any:
        """A function is checkpointed: ``run(function, *args, **kwargs)`` does it."""


CHECKPOINT_OPTIONS = frozenset("use_reentrant context_fn determinism_check debug early_stop preserve_rng_state".split())
"""Keyword arguments of torch's checkpoint itself; it hands all others to the function."""


def checkpoint_of(function: Any, *args: Any, **kwargs: Any) -> Any:
    """A checkpoint, as a graph calls it."""
    return torch.utils.checkpoint.checkpoint(function, *args, **kwargs)


def run_checkpoint(run: Callable[..., Any], function: Any, _: Any, *args: Any, **kwargs: Any) -> Any:
    """The same while it is recorded, with the node of what is checkpointed before its arguments."""
    return run(function, *args, **kwargs)


@functools.cache
def function_call(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` as something that a graph can call by name; the same object for the same function."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function.apply(*args, **kwargs)  # type: ignore[no-untyped-call]

    call.__name__ = call.__qualname__ = f"{function.__name__}_apply"
    call.__module__ = function.__module__
    return call


_recording = threading.RLock()
_recorders: dict[int, CallRecorder] = {}  # by thread: at most one, as what is patched is the process's


@contextlib.contextmanager
def told_calls(recorder: CallRecorder, model: nn.Module) -> Iterator[None]:
    """Inside, the calls that this thread makes, of modules of the classes in `model` among them, are told to
    `recorder`; other threads notice nothing."""
    apply = torch.autograd.Function.__dict__["apply"]

    def recorded_apply(cls: Any, /, *args: Any, **kwargs: Any) -> Any:
        call, here = apply.__get__(None, cls), _recorders.get(threading.get_ident())
        return call(*args, **kwargs) if here is None else here.opaque(function_call(cls), args, kwargs, call)

    with _recording, contextlib.ExitStack() as stack:
        _recorders[threading.get_ident()] = recorder
        stack.callback(_recorders.clear)
        stack.enter_context(mock.patch.object(torch.autograd.Function, "apply", classmethod(recorded_apply)))
        stack.enter_context(_told_checkpoints())
        vmap = torch._functorch.apis.vmap_impl
        stack.enter_context(mock.patch.object(torch._functorch.apis, "vmap_impl", functools.partial(_told_vmap, vmap)))
        bases = {base for module in model.modules() for base in type(module).__mro__ if "__call__" in vars(base)}
        entered: list[nn.Module] = []  # a class's __call__ may go on to that of its base
        for kind in bases:
            stack.enter_context(mock.patch.object(kind, "__call__", _told_call(vars(kind)["__call__"], entered)))
        yield


def _told_call(original: Any, entered: list[nn.Module]) -> Callable[..., Any]:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        here = _recorders.get(threading.get_ident())
        if here is None or (entered and entered[-1] is self):
            return original(self, *args, **kwargs)
        entered.append(self)
        try:
            return here.call(self, functools.partial(original, self), args, kwargs)
        finally:
            entered.pop()

    return call


def _told_vmap(vmap: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    here = _recorders.get(threading.get_ident())
    return vmap(*args, **kwargs) if here is None else here.opaque(vmap, args, kwargs, vmap)


@contextlib.contextmanager
def _told_checkpoints() -> Iterator[None]:
    """Inside, `told_checkpoint` runs in place of torch's checkpoint, whoever has imported it by whatever name."""
    function: Any = torch.utils.checkpoint.checkpoint.__wrapped__  # type: ignore[attr-defined]
    code = function.__code__
    try:
        function.__code__ = _told.__code__
        yield
    finally:
        function.__code__ = code


def _told(function: Any, *args: Any, **kwargs: Any) -> Any:
    from torch_xmesh.pipeline.capture.told_calls import told_checkpoint  # runs among the globals of torch's function

    return told_checkpoint(function, args, kwargs)


def told_checkpoint(function: Any, args: Any, kwargs: Any) -> Any:
    """``checkpoint(function, *args, **kwargs)``, recorded where this thread records."""
    wrapped: Any = torch.utils.checkpoint.checkpoint.__wrapped__  # type: ignore[attr-defined]
    original = types.FunctionType(_CHECKPOINT_CODE, wrapped.__globals__, "checkpoint", wrapped.__defaults__)
    original.__kwdefaults__ = wrapped.__kwdefaults__
    here = _recorders.get(threading.get_ident())
    if here is None:
        return original(function, *args, **kwargs)
    return here.checkpoint(original, function, args, kwargs)


_CHECKPOINT_CODE = torch.utils.checkpoint.checkpoint.__wrapped__.__code__  # type: ignore[attr-defined]
