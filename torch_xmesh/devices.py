"""The devices of this process, by kind: "cpu", "cuda" or what torch calls another one."""

import functools
import itertools

import torch
from torch import nn

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


def device_of(module: nn.Module, what: str) -> torch.device | None:
    """Where a module's parameters and buffers are; None where all of them are on meta, or there are none.

    Raises:
        ValueError: `what`, as messages call the module, is on several devices.
    """
    out: tuple[str, torch.device] | None = None
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        if tensor.is_meta:
            continue
        if out is not None and tensor.device != out[1]:
            raise ValueError(
                f"{what} is on several devices: {out[0]} on {out[1]}, {name} on {tensor.device}: move all of it to "
                "one, as module.to(device) does"
            )
        out = out or (name, tensor.device)
    return None if out is None else out[1]


def check_current(device: torch.device, what: str) -> None:
    """Raises ValueError where `what` is on another device than this process's current one of its kind."""
    current = device_here(device.type)
    if device != current:
        raise ValueError(
            f"{what} is on {device}, the current device is {current}: a rank has one device of a kind, and is told "
            f"which before anything else, as torch.{device.type}.set_device({device.index}) does"
        )
