"""A transformer whose layers have several experts each, one of which takes a token: as in GShard (D. Lepikhin et al.,
2021), dispatch and combination are products, so that experts may lie on different devices.

xmesh parallelize examples/models/moe.py:make --mesh 2x2 --run
"""

import torch
from gpt import Block
from torch import nn
from torch.nn import functional as F


class Experts(nn.Module):
    """[batch, length, width] to the same. An expert takes at most `capacity` tokens of a sample, the first ones."""

    def __init__(self, width: int, number: int, capacity: int) -> None:
        super().__init__()
        self.number, self.capacity = number, capacity
        self.gate = nn.Linear(width, number, bias=False)
        self.up = nn.Parameter(torch.randn(number, width, 4 * width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(number, 4 * width, width) * (4 * width) ** -0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates = self.gate(x).softmax(-1)
        weight, chosen = gates.max(-1)
        taken = F.one_hot(chosen, self.number).to(x.dtype)
        place = ((taken.cumsum(1) - 1) * taken).sum(-1).long()
        is_kept = (place < self.capacity).to(x.dtype)
        slot = F.one_hot(place.clamp(max=self.capacity - 1), self.capacity).to(x.dtype) * is_kept.unsqueeze(-1)
        dispatch = torch.einsum("ble,blc->blec", taken, slot)
        given = torch.einsum("blec,blw->ebcw", dispatch, x)
        made = torch.einsum("ebch,ehw->ebcw", F.gelu(torch.einsum("ebcw,ewh->ebch", given, self.up)), self.down)
        return torch.einsum("blec,ebcw->blw", dispatch * weight.unsqueeze(-1).unsqueeze(-1), made)


class MoELayer(nn.Module):
    """Attention as in a GPT's block, then experts."""

    def __init__(self, width: int, heads: int, number: int, capacity: int) -> None:
        super().__init__()
        self.block, self.norm = Block(width, heads), nn.LayerNorm(width)
        self.experts = Experts(width, number, capacity)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.block(x)
        out: torch.Tensor = x + self.experts(self.norm(x))
        return out


class MoE(nn.Module):
    """Tokens [batch, length] and those that follow them to the loss []."""

    def __init__(self, vocabulary: int, width: int, depth: int, heads: int, number: int, capacity: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.Sequential(*[MoELayer(width, heads, number, capacity) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.norm(self.layers(self.tokens(tokens))))
        return F.cross_entropy(logits.flatten(0, 1), following.flatten())


def make() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A small one with a microbatch of four samples."""
    text = torch.randint(512, (4, 33))
    return MoE(512, 64, 2, 4, 8, 8), (text[:, :-1], text[:, 1:])
