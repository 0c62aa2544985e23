"""Models made of random steps with random skips: what property tests cut at random."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn

KINDS = ("linear", "pair", "table", "mask", "integer", "inplace", "product")


class Step(nn.Module):
    """A module of one kind; "pair" returns a tuple, "table" a dict with an integer tensor."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> Any:
        y = torch.tanh(self.linear(x))
        if self.kind == "pair":
            return y, x.detach() * 2
        if self.kind == "table":
            return {"y": y, "best": y.argmax(1)}
        return y


class Graph(nn.Module):
    """Steps whose inputs are sums of earlier values; `plan[i]` is (kind, indices of earlier values)."""

    def __init__(self, plan: list[tuple[str, list[int]]], width: int = 3) -> None:
        super().__init__()
        self.plan = plan
        self.steps = nn.ModuleList(Step(kind, width) for kind, _ in plan)
        self.table = nn.Parameter(torch.randn(width))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        values, masks, length = [x, y], [x > 0], x.shape[0]
        for (kind, sources), step in zip(self.plan, self.steps, strict=True):
            received = values[sources[0] % len(values)]
            for source in sources[1:]:
                received = received + values[source % len(values)]
            made = step(received)
            if kind == "pair":
                made = made[0] * made[1]
            elif kind == "table":
                made = made["y"] + torch.nn.functional.one_hot(made["best"], made["y"].shape[1])
            elif kind == "mask":
                masks.append(made > 0.1)
            elif kind == "integer":
                made = made.reshape(length, -1) / length
            elif kind == "inplace":
                made = made.mul(1).add_(self.table)
            elif kind == "product":
                made = made * masks[sources[0] % len(masks)]
            values.append(made)
        return {"last": values[-1], "middle": values[len(values) // 2], "sum": values[-1].sum(1)}


def random_plan(rng: random.Random, length: int) -> list[tuple[str, list[int]]]:
    """A plan without a step that looks at the number of samples, which differs between microbatches and shards."""
    kinds = [kind for kind in KINDS if kind != "integer"]
    return [(rng.choice(kinds), [rng.randint(0, 9) for _ in range(rng.randint(1, 3))]) for _ in range(length)]
