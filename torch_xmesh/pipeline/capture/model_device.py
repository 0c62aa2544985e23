"""Where a whole model is."""

import itertools

import torch
from torch import nn


def device_of_model(model: nn.Module) -> torch.device | None:
    """Where a model's parameters and buffers are; None where all of them are on meta.

    Raises:
        ValueError: they are on several devices.
    """
    out: tuple[str, torch.device] | None = None
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_meta:
            continue
        if out is not None and tensor.device != out[1]:
            raise ValueError(
                f"the model is on several devices: {out[0]} on {out[1]}, {name} on {tensor.device}: move all of it to "
                "one, as model.to(device) does; a plan's stages are on one kind of device"
            )
        out = out or (name, tensor.device)
    return None if out is None else out[1]
