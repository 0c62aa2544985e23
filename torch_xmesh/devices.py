"""The devices of this process, by kind: "cpu", "cuda" or what torch calls another one."""

import functools

import torch

_CPU = torch.device("cpu")


@functools.cache
def is_device_here(kind: str) -> bool:
    """Whether this process has such a device."""
    module = getattr(torch, kind, None)
    is_available = getattr(module, "is_available", None)
    return module is not None and (is_available is None or is_available())


def device_here(kind: str) -> torch.device:
    """This process's current device of a kind."""
    return _CPU if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())


@functools.cache
def has_pinned_memory(kind: str) -> bool:
    """Whether torch has host memory here that this kind of device copies from by itself, while the host goes on."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != kind:
        return False
    try:
        return torch.empty(1, device="cpu", pin_memory=True).is_pinned()
    except RuntimeError:
        return False
