"""Numbers that are on devices, brought to the host together."""

from collections.abc import Sequence

import torch


def numbers_of(scalars: Sequence[torch.Tensor]) -> list[float]:
    """The values of tensors of one element, in their order. A device is waited for once for all that are of one
    dtype."""
    out = [0.0] * len(scalars)
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for position, scalar in enumerate(scalars):
        groups.setdefault((scalar.device, scalar.dtype), []).append(position)
    for positions in groups.values():
        values = torch.stack([scalars[position].detach().reshape(()) for position in positions]).tolist()
        for position, value in zip(positions, values, strict=True):
            out[position] = float(value)
    return out
