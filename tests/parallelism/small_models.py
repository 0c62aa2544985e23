"""Models whose cheapest shardings are known, from Alpa's own tests."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Mlp(nn.Module):
    """Linear layers of one width, in a row."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Layer(nn.Module):
    """A transformer layer with attention written out. Its norms are before attention and MLP (`is_pre`), or after
    them."""

    def __init__(self, width: int, num_heads: int, is_pre: bool) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.num_heads, self.is_pre = num_heads, is_pre

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        query, key, value = (
            linear(x).view(batch, length, self.num_heads, width // self.num_heads).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        weights = (query @ key.transpose(-1, -2) * (width // self.num_heads) ** -0.5).softmax(-1)
        out: torch.Tensor = self.out((weights @ value).transpose(1, 2).reshape(batch, length, width))
        return out

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(F.gelu(self.up(x)))
        return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_pre:
            x = x + self.attention(self.norm1(x))
            return x + self.mlp(self.norm2(x))
        x = self.norm1(x + self.attention(x))
        out: torch.Tensor = self.norm2(x + self.mlp(x))
        return out


def transformer(num_layers: int, width: int, num_heads: int = 8, *, is_pre: bool = False) -> nn.Module:
    return nn.Sequential(*[Layer(width, num_heads, is_pre) for _ in range(num_layers)])


class Gpt(nn.Module):
    """Embeddings, pre-norm layers, and logits."""

    def __init__(self, vocabulary: int = 96, width: int = 64, num_layers: int = 2, length: int = 16) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = transformer(num_layers, width, is_pre=True)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        x = self.tokens(indices) + self.positions(torch.arange(indices.shape[1], device=indices.device))
        logits: torch.Tensor = self.head(self.norm(self.layers(x)))
        return logits
