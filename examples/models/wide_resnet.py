"""A wide residual network (S. Zagoruyko, N. Komodakis, 2016) with its own loss.

xmesh parallelize examples/models/wide_resnet.py:make --mesh 2x2 --run
"""

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.second(F.relu(self.norm1(self.first(x)))))
        return F.relu(y + self.shortcut(x))


class WideResNet(nn.Module):
    """Images [batch, 3, size, size] and their classes [batch] to the loss []."""

    def __init__(self, channels: int, depth: int, classes: int) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, channels, 3, 1, 1, bias=False), nn.BatchNorm2d(channels)
        widths = [channels, channels, 2 * channels, 4 * channels]
        blocks = []
        for group in range(3):
            for number in range(depth):
                inputs = widths[group] if number == 0 else widths[group + 1]
                blocks.append(Block(inputs, widths[group + 1], 2 if group > 0 and number == 0 else 1))
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, images: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        features = self.blocks(F.relu(self.norm(self.stem(images)))).mean((2, 3))
        return F.cross_entropy(self.head(features), classes)


def make() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A small one with a microbatch of eight images."""
    return WideResNet(16, 1, 10), (torch.randn(8, 3, 16, 16), torch.randint(10, (8,)))
