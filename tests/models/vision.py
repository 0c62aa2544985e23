"""Convolutional models: batch norm, and a U-Transformer (a U-Net with attention)."""

import torch
from torch import nn
from torch.nn import functional as F


class ConvNet(nn.Module):
    """Convolutions with batch norm and in-place activations; [batch, 2, 8, 8] to [batch, 4]."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, width, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(width)
        self.act1 = nn.ReLU(inplace=True)
        self.body = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(width, 4)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.act1(self.norm1(self.stem(image)))
        x = self.body(x)
        x = self.pool(x)
        return self.head(x.view(image.size(0), -1))  # type: ignore[no-any-return]


class Convolutions(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.norm = nn.GroupNorm(2, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.norm(self.conv2(F.relu(self.conv1(x)))))


class SelfAttention2d(nn.Module):
    """Every pixel looks at every pixel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, width, height, length = x.shape
        pixels = self.norm(x.flatten(2).transpose(1, 2))
        seen, _ = self.attention(pixels, pixels, pixels, need_weights=False)
        return x + seen.transpose(1, 2).reshape(batch, width, height, length)  # type: ignore[no-any-return]


class SkipGate(nn.Module):
    """Cross attention of a skip with the level below: the skip is weighted by what the decoder looks for."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key = nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 1)

    def forward(self, skip: torch.Tensor, below: torch.Tensor) -> torch.Tensor:
        return skip * torch.sigmoid(self.query(skip) + self.key(below))


class UTransformer(nn.Module):
    """A U-Net whose bottom attends to itself and whose skips are gated; [batch, 1, 8, 8] to [batch, 2, 8, 8]."""

    def __init__(self, width: int = 4, levels: int = 2) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels + 1)]
        self.encoders = nn.ModuleList(
            Convolutions(first, second) for first, second in zip([1, *widths[:-2]], widths[:-1], strict=True)
        )
        self.bottom = Convolutions(widths[-2], widths[-1])
        self.attention = SelfAttention2d(widths[-1])
        self.ups = nn.ModuleList(nn.Conv2d(widths[i + 1], widths[i], 1) for i in reversed(range(levels)))
        self.gates = nn.ModuleList(SkipGate(widths[i]) for i in reversed(range(levels)))
        self.decoders = nn.ModuleList(Convolutions(2 * widths[i], widths[i]) for i in reversed(range(levels)))
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        skips = []
        x = image
        for encoder in self.encoders:
            x = encoder(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.attention(self.bottom(x))
        for up, gate, decoder in zip(self.ups, self.gates, self.decoders, strict=True):
            skip = skips.pop()
            x = up(F.interpolate(x, size=skip.shape[2:], mode="nearest"))
            x = decoder(torch.cat([gate(skip, x), x], dim=1))
        return self.head(x)  # type: ignore[no-any-return]
