"""Forwards that write into memory which they have made, in every way that models do; [16, 8] to [16, 8]."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Write = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A function of the outputs of two layers, both [16, 8]."""


def _into_zeros(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = a.new_zeros(a.shape)
    out[:, :4], out[:, 6:] = b[:, 4:], a[:, :2]
    return out


def _by_copy(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = a.new_empty(len(a), 2, 4)
    out[..., :3].copy_(b.view(-1, 2, 4)[..., :3])
    out[..., 3:].copy_(a.view(-1, 2, 4)[..., 3:])
    return out.flatten(1)


def _after_clone(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = a.clone()
    out[:, 2:5] = b[:, 2:5] * 2
    out[:, 0] = 1.0
    return out + a


def _scaled(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    h = a + b
    h[:, 4:8].mul_(3)
    return h


def _scaled_part(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    h = a + b
    part = h[:, 4:8]
    part += b[:, :4]
    return torch.cat([h, part.sin()], 1)[:, 2:10]


def _viewed_whole(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    h = a + b
    part, rows = h.t()[1:3], h.view(-1, 2, 4)
    h.mul_(2)
    return h + rows.flatten(1).cos() + F.pad(part.t(), (3, 3))


def _through_views(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    h = (a * b).clone()
    h.view(-1, 2, 4).transpose(1, 2)[:, 1:3].add_(b.view(-1, 4, 2)[:, 1:3])
    h.view(-1, 2, 4)[:, 1] = a[:, :4]
    return h


def _two_parts(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    h = a + b
    left, right = h[:, :4], h[:, 4:]
    left.mul_(2)
    right.copy_(left)
    left += right
    return torch.cat([right, left], 1) * h


def _what_it_returns(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    h = (a + b).mul_(1.5)
    part = h[:, :4].add_(1)
    part[:, 0] = 0.5
    return h + F.pad(part, (4, 0))


def _rows(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A number of row, as a loop over tokens writes them."""
    out = torch.zeros_like(a).view(-1, 4, 2)
    for i in range(4):
        out[:, i] = a[:, 2 * i : 2 * i + 2] + (out[:, i - 1] if i else b[:, :2])
    return out.reshape(len(a), 8)


def _narrow(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    h = a + b
    h.narrow(1, 2, 4).masked_fill_(b[:, :4] > 0, 0.25)
    h.select(1, 0).zero_()
    return h


def _broadcast(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = a.new_zeros(len(a), 3, 8)
    out[:, :2] = a[:, None]
    out[:, 2, None] = b[:, None]
    return out.sum(1)


def _constant(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(8, dtype=a.dtype)
    part = mask[:4]
    part *= 0.5
    mask[6] = 3.0
    return a * mask + F.pad(part, (2, 2)) * b


def _returned(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    h = a + b
    part = h[:]
    h[:, 1:2] = b[:, :1]
    return part


def _without_gradients(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    h = a + b
    part = h[:, 4:]
    with torch.no_grad():
        h.mul_(2)
    return torch.cat([part.sin(), part], 1)


def _in_a_checkpoint(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    def inside(x: torch.Tensor) -> torch.Tensor:
        h = x * b
        part = h[:, 2:4]
        part.add_(x[:, :2])
        return h.sin() + F.pad(part, (3, 3))

    made: torch.Tensor = checkpoint(inside, a, use_reentrant=False)
    out = made.clone()
    out[:, 1:3] = b[:, :2]
    return out


def _copies_of_some(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """With one sample the transposed tensor is contiguous already, and contiguous() copies nothing."""
    c = a.t() * 2
    d = c.contiguous()
    d.mul_(3)
    e = c.contiguous()
    e[:4] = 0
    return (c + d + e).t() * b


def _by_positions(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A view of what is recorded in one layout and may lie in another."""
    h = (a.t() * 2).view(2, 4, -1)
    h.permute(2, 0, 1).select(1, 1)[:, 1:3].fill_(7.0)
    h.transpose(0, 1)[1:3, 0].copy_(b.t()[:2])
    return h.reshape(8, -1).t() * b


def _pieces(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    h = a * b
    with torch.no_grad():
        first, second = h.tensor_split([3], 1)
        first.zero_()
        second.add_(1)
    return h.sin()


WRITES: dict[str, Write] = {
    write.__name__[1:].replace("_", " "): write
    for write in (
        *(_into_zeros, _by_copy, _after_clone, _scaled, _scaled_part, _viewed_whole, _through_views, _two_parts),
        *(_what_it_returns, _rows, _narrow, _broadcast, _constant, _returned, _without_gradients, _in_a_checkpoint),
        *(_copies_of_some, _by_positions, _pieces),
    )
}


class Slices(nn.Module):
    """Two layers, a write, and a layer of what it makes."""

    def __init__(self, write: Write) -> None:
        super().__init__()
        self.a, self.b, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self._write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self._write(self.a(x), self.b(x.cos())))
        return out
