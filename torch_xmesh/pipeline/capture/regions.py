"""Regions of a stage's graph in which grad mode or autocast are others than outside the model."""

import contextlib
import functools

import torch

Autocasts = tuple[tuple[str, bool, torch.dtype], ...]
Modes = tuple[bool, Autocasts]


@functools.cache
def _kinds() -> tuple[str, ...]:
    """The kinds of device that this process may have: alike on all ranks of one installation."""
    of_torch = ("cpu", *(("cuda",) if torch.version.cuda is not None else ()))
    accelerator = torch.accelerator.current_accelerator()
    is_other = accelerator is not None and accelerator.type not in of_torch and _has_autocast(accelerator.type)
    return (*of_torch, accelerator.type) if accelerator is not None and is_other else of_torch


def _has_autocast(kind: str) -> bool:
    return hasattr(torch.get_device_module(kind), "get_amp_supported_dtype") or kind in ("xpu", "mps", "hpu", "mtia")


def autocasts() -> Autocasts:
    """By kind of device, whether autocast is on and for which dtype."""
    return tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _kinds())


def current_modes() -> Modes:
    """The grad mode, and `autocasts`."""
    return torch.is_grad_enabled(), autocasts()


def enter_modes(grad: bool, entered: Autocasts) -> contextlib.ExitStack:
    """Start a region with this grad mode and these autocasts; `exit_modes` ends it."""
    stack = contextlib.ExitStack()
    stack.enter_context(torch.set_grad_enabled(grad))
    for device, enabled, dtype in entered:
        stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
    return stack


def exit_modes(stack: contextlib.ExitStack) -> None:
    """End the region that `enter_modes` started."""
    stack.close()
