"""BERT and ViT with experts in every second layer, as HiDup's experiments have them (S. Zhang et al., SoCC 2022): SGMoE
takes two experts for a token (capacity factor 2.5), Switch one (1.25). Experts have places for a fixed number of each
sample's tokens, so that halves of a batch are routed as the whole one is.

xmesh parallelize examples/models/sparse.py:bert_switch --mesh 2x2 --run
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F


class Experts(nn.Module):
    """[batch, length, width] to the same: each token goes to the `top` experts with the highest gates. An expert takes
    the first `capacity` tokens of a sample, `factor` times length over the number of experts."""

    def __init__(self, width: int, hidden: int, number: int, top: int, factor: float, length: int) -> None:
        super().__init__()
        self.number, self.top, self.capacity = number, top, -(-int(length * factor) // number)
        self.gate = nn.Linear(width, number, bias=False)
        self.up = nn.Parameter(torch.randn(number, width, hidden) * width**-0.5)
        self.down = nn.Parameter(torch.randn(number, hidden, width) * hidden**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        combine = self._combine(self.gate(x).softmax(-1))
        given = torch.einsum("blec,blw->ebcw", (combine > 0).to(x.dtype), x)
        made = torch.einsum("ebch,ehw->ebcw", F.gelu(torch.einsum("ebcw,ewh->ebch", given, self.up)), self.down)
        return torch.einsum("blec,ebcw->blw", combine, made)

    def _combine(self, gates: torch.Tensor) -> torch.Tensor:
        """[batch, length, expert, place]: what an expert's result counts for a token."""
        left, parts = gates, []
        before = torch.zeros_like(gates[:, :1])
        for _ in range(self.top):
            taken = F.one_hot(left.argmax(-1), self.number).to(gates.dtype)
            place = (taken.cumsum(1) - taken + before) * taken
            kept = gates * taken * (place < self.capacity).to(gates.dtype)
            slots = F.one_hot(place.sum(-1).long().clamp(max=self.capacity - 1), self.capacity).to(gates.dtype)
            parts.append(kept.unsqueeze(-1) * slots.unsqueeze(-2))
            before, left = before + taken.sum(1, keepdim=True), left * (1 - taken)
        return torch.stack(parts).sum(0)


class Layer(nn.Module):
    """[batch, length, width] to the same: attention, then a dense network or experts."""

    def __init__(self, width: int, heads: int, network: nn.Module, *, is_causal: bool) -> None:
        super().__init__()
        self.heads, self.is_causal, self.network = heads, is_causal, network
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        query, key, value = (
            one(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        out: torch.Tensor = x + self.network(self.norm2(x))
        return out


def layers_of(width: int, heads: int, depth: int, experts: Callable[[], Experts], *, is_causal: bool) -> nn.Sequential:
    """Every second layer has experts."""

    def network(number: int) -> nn.Module:
        dense = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        return experts() if number % 2 else nn.Sequential(*dense)

    return nn.Sequential(*[Layer(width, heads, network(number), is_causal=is_causal) for number in range(depth)])


class Bert(nn.Module):
    """Tokens [batch, length] to logits [batch, length, vocabulary], each of what was before."""

    def __init__(self, vocabulary: int, length: int, width: int, layers: nn.Sequential) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Parameter(torch.randn(length, width) * 0.02)
        self.layers, self.norm = layers, nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(self.layers(self.tokens(tokens) + self.places)))
        return logits


class Vit(nn.Module):
    """Images [batch, 3, size, size], in patches of 4 by 4, to logits [batch, classes]."""

    def __init__(self, classes: int, size: int, width: int, layers: nn.Sequential) -> None:
        super().__init__()
        self.patches = nn.Linear(3 * 16, width)
        self.places = nn.Parameter(torch.randn((size // 4) ** 2, width) * 0.02)
        self.layers, self.norm, self.head = layers, nn.LayerNorm(width), nn.Linear(width, classes, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        count = images.shape[-1] // 4
        patches = images.view(-1, 3, count, 4, count, 4).permute(0, 2, 4, 1, 3, 5).reshape(-1, count**2, 48)
        logits: torch.Tensor = self.head(self.norm(self.layers(self.patches(patches) + self.places)).mean(1))
        return logits


def bert(top: int, factor: float, *, width: int = 32, depth: int = 8, length: int = 64, experts: int = 64) -> Bert:
    """A small one; HiDup's has width 768."""
    layers = layers_of(width, 4, depth, lambda: Experts(width, 4 * width, experts, top, factor, length), is_causal=True)
    return Bert(256, length, width, layers)


def dense_bert(*, width: int = 32, depth: int = 8, length: int = 64) -> Bert:
    """Without experts."""
    dense = [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(depth)]
    layers = nn.Sequential(*[Layer(width, 4, network, is_causal=True) for network in dense])
    return Bert(256, length, width, layers)


def vit(top: int, factor: float, *, width: int = 32, depth: int = 8, size: int = 32, experts: int = 64) -> Vit:
    """A small one; HiDup's has width 768."""
    length = (size // 4) ** 2
    layers = layers_of(
        width, 4, depth, lambda: Experts(width, 4 * width, experts, top, factor, length), is_causal=False
    )
    return Vit(10, size, width, layers)


def bert_sgmoe() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """With a microbatch of eight samples."""
    return bert(2, 2.5), (torch.randint(256, (8, 64)),)


def bert_switch() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """With a microbatch of eight samples."""
    return bert(1, 1.25), (torch.randint(256, (8, 64)),)


def vit_sgmoe() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """With a microbatch of eight samples."""
    return vit(2, 2.5), (torch.randn(8, 3, 32, 32),)


def vit_switch() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """With a microbatch of eight samples."""
    return vit(1, 1.25), (torch.randn(8, 3, 32, 32),)
