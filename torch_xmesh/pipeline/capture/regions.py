"""Regions of a stage's graph in which grad mode or autocast are others than outside the model."""

import contextlib

import torch

Autocasts = tuple[tuple[str, bool, torch.dtype], ...]
Modes = tuple[bool, Autocasts]
_KINDS = ("cpu", *(("cuda",) if torch.version.cuda is not None else ()))


def autocasts() -> Autocasts:
    """By kind of device, whether autocast is on and for which dtype."""
    return tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _KINDS)


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
