"""What auto_parallel.py trains."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """A block of a GPT. Attention is written out, so that heads may be sharded over devices."""

    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.head = head
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        query, key, value = (
            one(y).unflatten(-1, (-1, self.head)).transpose(1, 2) for one in (self.query, self.key, self.value)
        )
        weights = (query @ key.transpose(-1, -2) * self.head**-0.5).softmax(-1)
        x = x + self.out((weights @ value).transpose(1, 2).flatten(2))
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class Gpt(nn.Module):
    """Tokens [batch, length] to logits [batch, length, vocabulary]."""

    def __init__(self, width: int, depth: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*[Block(width, width // 8) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(self.blocks(self.tokens(tokens))))
        return logits


def token_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of logits [batch, length, vocabulary] and targets [batch, length]."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


class WideThenDense(nn.Module):
    """Convolutions with much that flows and few weights, then dense layers with many: [batch, 4, size, size] to
    [batch, classes]."""

    def __init__(self, channels: int, num_convolutions: int, size: int, hidden: int, classes: int) -> None:
        super().__init__()
        first = nn.Conv2d(4, channels, 3, padding=1)
        rest = [nn.Conv2d(channels, channels, 3, padding=1) for _ in range(num_convolutions - 1)]
        self.convolutions = nn.Sequential(*[part for one in (first, *rest) for part in (one, nn.ReLU())])
        self.pool = nn.AvgPool2d(size // 8)
        self.dense = nn.Sequential(
            nn.Linear(channels * 64, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, classes),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.dense(self.pool(self.convolutions(x)).flatten(1))
        return out


@dataclass(frozen=True)
class Subject:
    """A model with a step's batch.

    Attributes:
        make: the model, equal each time.
        blocks: of a model, what FSDP2 wraps by itself.
        tensor_parallel: how DTensor's tensor parallelism places modules, by name: "column", "row"; None: it is not
            written for this model.
    """

    make: Callable[[], nn.Module]
    batch: torch.Tensor
    target: torch.Tensor
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    num_microbatches: int
    blocks: Callable[[Any], list[nn.Module]]
    tensor_parallel: Callable[[Any], dict[str, str]] | None

    @property
    def example(self) -> torch.Tensor:
        """One microbatch."""
        return self.batch[: len(self.batch) // self.num_microbatches]


def subject(name: str) -> Subject:
    """By name: "gpt" or "wide-dense"."""
    generator = torch.Generator().manual_seed(1)
    if name == "gpt":
        width, depth, vocabulary, samples, length, microbatches = 192, 8, 64, 8, 16, 4
        tokens = torch.randint(vocabulary, (samples * microbatches, length), generator=generator)
        target = torch.randint(vocabulary, (samples * microbatches, length), generator=generator)
        columns, rows = ("query", "key", "value", "up"), ("out", "down")
        placed = {f"blocks.{i}.{one}": "column" for i in range(depth) for one in columns}
        placed |= {f"blocks.{i}.{one}": "row" for i in range(depth) for one in rows}
        return Subject(
            lambda: _seeded(lambda: Gpt(width, depth, vocabulary)),
            tokens,
            target,
            token_loss,
            microbatches,
            lambda model: list(model.blocks),
            lambda model: placed,
        )
    if name == "wide-dense":
        channels, size, samples, microbatches, classes = 8, 64, 32, 4, 64
        images = torch.randn(samples * microbatches, 4, size, size, generator=generator)
        labels = torch.randint(classes, (samples * microbatches,), generator=generator)
        return Subject(
            lambda: _seeded(lambda: WideThenDense(channels, 6, size, 1024, classes)),
            images,
            labels,
            F.cross_entropy,
            microbatches,
            lambda model: [model.convolutions, *(one for one in model.dense if isinstance(one, nn.Linear))],
            lambda model: {"dense.0": "column", "dense.2": "row"},
        )
    raise ValueError(f"there is no model {name!r}: there are gpt and wide-dense")


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()
