"""What the four scripts beside this one train, and their options; the same for all of them."""

import argparse
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

FEATURES, CLASSES = 16, 4


class Points(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Random points, and the class that a fixed random function gives each."""

    def __init__(self, samples: int, seed: int) -> None:
        self.x = torch.randn(samples, FEATURES, generator=torch.Generator().manual_seed(seed))
        generator = torch.Generator().manual_seed(0)
        hidden = torch.tanh(self.x @ torch.randn(FEATURES, 32, generator=generator))
        self.y = (hidden @ torch.randn(32, CLASSES, generator=generator)).argmax(1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


class Block(nn.Module):
    """x + MLP(x)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return result


class Classifier(nn.Module):
    """[samples, FEATURES] to [samples, CLASSES]."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(4)))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.blocks(self.first(x)))
        return result


class Log:
    """Shows the loss of each training step, and writes it into a file. Made by all ranks; one of them shows."""

    def __init__(self, path: Path, *, is_shown: bool) -> None:
        self._file = path.open("w") if is_shown else None

    def step(self, epoch: int, step: int, steps: int, loss: float | None) -> None:
        if self._file is None:
            return
        self._file.write(f"{epoch} {step} {loss:.9f}\n")
        text = f"epoch {epoch}, step {step + 1}/{steps}, loss {loss:.4f}"
        if sys.stdout.isatty():  # one line that is written over; elsewhere one line per 10 steps
            print(f"\r{text}", end="" if step + 1 < steps else "\n", flush=True)
        elif (step + 1) % 10 == 0 or step + 1 == steps:
            print(text, flush=True)

    def epoch(self, epoch: int, loss: float, accuracy: float) -> None:
        if self._file is not None:
            print(f"epoch {epoch}: test loss {loss:.4f}, {accuracy:.1%} right", flush=True)
            self._file.flush()


def parsed(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--samples", type=int, default=1024, help="to train on; a quarter as many to test")
    parser.add_argument("--batch", type=int, default=64, help="samples of a step, over all ranks")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"), help="one per epoch goes here")
    parser.add_argument("--resume", type=Path, help="go on from this checkpoint")
    parser.add_argument("--losses", type=Path, default=Path("losses.txt"), help="epoch, step and loss, line by line")
    return parser.parse_args()
