"""The models of Alpa's evaluation as plain modules: GPT-3, GShard's mixture of experts, Wide-ResNet.

L. Zheng et al., Alpa, OSDI 2022, section 8.1 and appendix B (Tables 6 to 8). Where the paper gives no more than the
number of parameters, a model's inner widths are those that lead to it: experts and other MLPs of the mixture are 8
times as wide as the model, and of Wide-ResNet's blocks only the 3 x 3 convolution makes `width_factor` times as many
channels. Attention draws and masks nothing but what comes later.
"""

import torch
from torch import nn
from torch.nn import functional as F

_CHOICES = 2
"""Experts that a token goes to, and places that all experts have together, over the tokens."""
_RESNET_BLOCKS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}
_EXPANSION = 4


class Attention(nn.Module):
    """Each token looks at those before it."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            linear(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Mlp(nn.Module):
    """Wider within by a factor."""

    def __init__(self, width: int, factor: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, factor * width), nn.Linear(factor * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(F.gelu(self.up(x)))
        return out


class Experts(nn.Module):
    """A mixture of experts, each of which takes a fixed number of tokens of each sequence (D. Lepikhin et al., GShard,
    2020)."""

    def __init__(self, width: int, factor: int, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.gate = nn.Linear(width, num_experts, bias=False)
        self.up = nn.Parameter(torch.empty(num_experts, width, factor * width))
        self.down = nn.Parameter(torch.empty(num_experts, factor * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        combine = self.combine(self.gate(x).softmax(-1))
        dispatch = (combine > 0).to(x.dtype)
        taken = torch.einsum("gsec,gsm->egcm", dispatch, x)
        made = torch.einsum("egch,ehm->egcm", F.gelu(torch.einsum("egcm,emh->egch", taken, self.up)), self.down)
        return torch.einsum("gsec,egcm->gsm", combine, made)

    def combine(self, gates: torch.Tensor) -> torch.Tensor:
        """From what tokens want of experts, [sequence, token, expert], what they get, [sequence, token, expert, place]:
        first choices find places before second ones, earlier tokens before later ones, and some none."""
        places = max(1, _CHOICES * gates.shape[1] // self.num_experts)
        weights, experts = gates.topk(_CHOICES)
        chosen = F.one_hot(experts.transpose(1, 2), self.num_experts).to(gates.dtype)
        place = (chosen.flatten(1, 2).cumsum(1) * chosen.flatten(1, 2)).sum(-1).clamp(max=places + 1)
        taken = F.one_hot(place.long(), places + 2).narrow(-1, 1, places).to(gates.dtype)
        weighted = weights.transpose(1, 2).unsqueeze(-1) * chosen
        taken = taken.view(len(gates), _CHOICES, -1, places)
        return torch.einsum("gkse,gksc->gsec", weighted, taken)


class Block(nn.Module):
    """Attention and an MLP, or experts, with norms before them."""

    def __init__(self, width: int, num_heads: int, mlp: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = Attention(width, num_heads), mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        out: torch.Tensor = x + self.mlp(self.norm2(x))
        return out


class LanguageModel(nn.Module):
    """Embeddings, blocks and logits."""

    def __init__(self, vocabulary: int, length: int, width: int, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks, self.norm = nn.Sequential(*blocks), nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        x = self.tokens(indices) + self.positions(torch.arange(indices.shape[1], device=indices.device))
        logits: torch.Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def gpt(
    num_layers: int, width: int, num_heads: int, *, vocabulary: int = 51200, length: int = 1024, factor: int = 4
) -> nn.Module:
    """GPT-3, in half precision, on meta."""
    with torch.device("meta"):
        blocks: list[nn.Module] = [Block(width, num_heads, Mlp(width, factor)) for _ in range(num_layers)]
        return LanguageModel(vocabulary, length, width, blocks).half()


def moe(
    num_layers: int,
    width: int,
    num_heads: int,
    num_experts: int,
    *,
    vocabulary: int = 32000,
    length: int = 1024,
    factor: int = 8,
) -> nn.Module:
    """GShard's mixture: experts in every second block. In half precision, on meta."""
    with torch.device("meta"):
        blocks: list[nn.Module] = []
        for number in range(num_layers):
            mlp = Experts(width, factor, num_experts) if number % 2 else Mlp(width, factor)
            blocks.append(Block(width, num_heads, mlp))
        return LanguageModel(vocabulary, length, width, blocks).half()


class Bottleneck(nn.Module):
    """Three convolutions beside a shortcut."""

    def __init__(self, channels: int, width: int, width_factor: int, stride: int) -> None:
        super().__init__()
        inner, out = width * width_factor, width * _EXPANSION
        self.conv1, self.norm1 = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv3, self.norm3 = nn.Conv2d(inner, out, 1, bias=False), nn.BatchNorm2d(out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


class WideResNet(nn.Module):
    """Four groups of bottlenecks, each of twice the channels and half the image of the one before."""

    def __init__(self, blocks: tuple[int, ...], channels: int, width_factor: int, num_classes: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, channels, 7, 2, 3, bias=False), nn.BatchNorm2d(channels)
        made: list[nn.Module] = []
        entering = channels
        for group, count in enumerate(blocks):
            width = channels * 2**group
            for number in range(count):
                stride = 2 if group and not number else 1
                made.append(Bottleneck(entering, width, width_factor, stride))
                entering = width * _EXPANSION
        self.blocks, self.head = nn.Sequential(*made), nn.Linear(entering, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.conv(images))), 3, 2, 1)
        logits: torch.Tensor = self.head(self.blocks(x).mean((2, 3)))
        return logits


def wide_resnet(num_layers: int, channels: int, width_factor: int, *, num_classes: int = 1024) -> nn.Module:
    """In single precision, on meta."""
    with torch.device("meta"):
        return WideResNet(_RESNET_BLOCKS[num_layers], channels, width_factor, num_classes)
