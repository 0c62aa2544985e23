"""What hangs on modules and parameters and is called beside them: which of it a recording has, which it cannot have."""

import functools
import sys
import sysconfig
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
MODULE_HOOKS = (*FORWARD_HOOKS, *BACKWARD_HOOKS)

_LIBRARIES = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
_WORDS = {
    "_forward_hooks": "a forward hook",
    "_forward_pre_hooks": "a forward pre-hook",
    "_backward_hooks": "a backward hook",
    "_backward_pre_hooks": "a backward pre-hook",
}


class HookRefusedError(ValueError):
    """A hook that a plan cannot have."""


def is_of_library(hook: Any) -> bool:
    """Whether a hook was defined in an installed library: it belongs to the model."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    code = getattr(getattr(hook, "__func__", hook), "__code__", None)
    if code is not None:
        return str(code.co_filename).startswith(_LIBRARIES)
    module = sys.modules.get(type(hook).__module__)
    return str(getattr(module, "__file__", "")).startswith(_LIBRARIES)


def name_of_hook(hook: Any) -> str:
    """As its author calls it."""
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks are registered on it."""
    return any(getattr(module, kind) for kind in MODULE_HOOKS)


def hooks_of(module: nn.Module) -> frozenset[tuple[str, int]]:
    """The hooks that are registered on a module: kinds and numbers."""
    return frozenset((kind, number) for kind in MODULE_HOOKS for number in getattr(module, kind))


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Whether hooks are registered on a tensor, for when its gradient is there."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def make_recordable(module: nn.Module, name: str) -> None:
    """The hooks around a module's forward become such as can be recorded: one of a user's that only looks is refused
    once it is called, since nothing of it would be in the recording."""
    for kind in FORWARD_HOOKS:
        hooks = getattr(module, kind)
        for number, hook in hooks.items():
            if not is_of_library(hook):
                hooks[number] = _recorded(hook, f"{_where(name)} has {_WORDS[kind]}, {name_of_hook(hook)}")


def _recorded(hook: Callable[..., Any], what: str) -> Callable[..., Any]:
    def call(module: nn.Module, *given: Any) -> Any:
        tensors = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor)]
        before = [tensor._version for tensor in tensors], _held(module)
        result = hook(module, *given)
        if result is None and before == ([tensor._version for tensor in tensors], _held(module)):
            raise HookRefusedError(
                f"{what}, that changes nothing of the forward: with a plan it is not called in steps, where a device "
                "has a part of what it would look at; remove it, or look at the engine's outputs"
            )
        return result

    return call


def _held(module: nn.Module) -> dict[str, int]:
    """The tensors that a module has as attributes."""
    held = {**vars(module), **module._buffers}
    return {key: id(value) for key, value in held.items() if isinstance(value, torch.Tensor)}


def check_recordable(model: nn.Module) -> None:
    """Raises HookRefusedError for hooks of backwards and of parameters, and for a user's hooks on all modules at once:
    what they would be called with on a device is a part."""
    for name, module in model.named_modules():
        for kind in BACKWARD_HOOKS:
            for hook in getattr(module, kind).values():
                raise HookRefusedError(
                    f"{_where(name)} has {_WORDS[kind]}, {name_of_hook(hook)}: with a plan a device has a part of the "
                    "gradient; remove it"
                )
    for name, parameter in model.named_parameters():
        if has_gradient_hooks(parameter):
            raise HookRefusedError(
                f"parameter {name} has a hook: with a plan a device has a part of the gradient; remove it, or change "
                "gradients between engine.step and optimizer.step"
            )
    for hook in _hooks_on_all():
        raise HookRefusedError(
            f"a hook is registered on all modules, {name_of_hook(hook)}: with a plan modules are not called; remove it"
        )


def _hooks_on_all() -> Iterator[Any]:
    """A user's, that torch calls around every module."""
    kinds = (
        "_global_forward_hooks",
        "_global_forward_pre_hooks",
        "_global_backward_hooks",
        "_global_backward_pre_hooks",
    )
    for kind in kinds:
        hooks = getattr(torch.nn.modules.module, kind)
        yield from (hook for hook in hooks.values() if not is_of_library(hook))


def check_no_hook_on_all() -> None:
    """Raises ValueError for a user's hook on all modules, where some of these are looked into and so not called."""
    for hook in _hooks_on_all():
        raise ValueError(
            f"a hook is registered on all modules, {name_of_hook(hook)}: stages would call it for other modules than "
            "the model; register it on the modules that no stage cuts"
        )


def _where(name: str) -> str:
    return f"module {name!r}" if name else "the model"
