"""Random modules for backwards: views, in-place operations, norms, shared weights, several inputs, parts
without grad."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from models.backward import Gated

WIDTH = 4
KINDS = (
    "linear", "shared", "matmul", "bmm", "conv", "layer_norm", "batch_norm", "scale", "in_place", "in_place_view",
    "copy_into_weights", "view", "parts", "detached", "no_grad", "function", "dropout", "weights_only", "checkpoint",
    "hook", "retain", "attention", "unused",
)  # fmt: skip
Plan = list[tuple[str, list[int]]]


def random_plan(rng: random.Random) -> Plan:
    """Steps (kind, indices of earlier values), few or many."""
    return [
        (rng.choice(KINDS), [rng.randint(0, 9) for _ in range(rng.randint(1, 3))]) for _ in range(rng.randint(1, 12))
    ]


class RandomModule(nn.Module):
    """Runs a plan over inputs of shape [3, WIDTH]; returns the last values, of which some may not need a gradient."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.steps = nn.ModuleList(self._module(kind) for kind, _ in plan)
        self.tables = nn.ParameterList(nn.Parameter(torch.randn(WIDTH)) for _ in plan)
        self.squares = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in plan)

    @staticmethod
    def _module(kind: str) -> nn.Module:
        if kind == "conv":
            return nn.Conv1d(1, 1, 3, padding=1)
        if kind == "layer_norm":
            return nn.LayerNorm(WIDTH)
        if kind == "batch_norm":
            return nn.BatchNorm1d(WIDTH)
        if kind == "attention":
            return nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        return nn.Linear(WIDTH, WIDTH)

    def forward(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        values = list(inputs)
        for index, (kind, sources) in enumerate(self.plan):
            received = values[sources[0] % len(values)]
            for source in sources[1:]:
                received = received + values[source % len(values)]
            values.append(self._step(index, kind, received, values[sources[-1] % len(values)]))
        return [*values[-2:], values[len(values) // 2].sum(1)]

    def _step(self, index: int, kind: str, x: torch.Tensor, other: torch.Tensor) -> Any:
        step: Any = self.steps[index]
        table: Any = self.tables[index]
        square: Any = self.squares[index]
        match kind:
            case "shared":
                return self.shared(torch.tanh(x))
            case "matmul":
                return torch.tanh(x @ square) @ self.squares[0]
            case "bmm":
                return torch.bmm(x.expand(2, -1, -1), torch.stack([square, self.shared.weight])).mean(0)
            case "conv":
                return step(x.unsqueeze(1)).squeeze(1)
            case "scale":
                return x * table + self.shared.bias
            case "in_place":
                return step(x).mul_(2).add_(table)
            case "in_place_view":
                made = step(x)
                made[:, 1:].mul_(table[1:])
                made[0] = other[0]
                return made
            case "copy_into_weights":
                made = square[:3].clone()
                made[:, :2] = x[:, :2]
                return made
            case "view":
                return step(x.t().reshape(-1).view(WIDTH, 3).t())
            case "parts":
                one, two = step(x).chunk(2, 1)
                return torch.cat([two * one.detach(), one + table[:2]], 1)
            case "detached":
                return step(x.detach()) + other
            case "no_grad":
                with torch.no_grad():
                    return step(x).sigmoid()
            case "function":
                return Gated.apply(step(x), table)  # type: ignore[no-untyped-call]
            case "dropout":
                return F.dropout(step(x), 0.5)
            case "weights_only":
                return step(square[:3]) * table
            case "checkpoint":
                return checkpoint(lambda y: torch.tanh(self.shared(step(y))) * table, x, use_reentrant=False)
            case "hook":
                made = step(x)
                if made.requires_grad:
                    made.register_hook(lambda gradient: gradient * 2)
                return made
            case "retain":
                made = step(x)
                if made.requires_grad:
                    made.retain_grad()
                return made
            case "attention":
                return step(x[None], x[None], other[None])[0].squeeze(0)
            case "unused":
                step(x).sum()
                return x
            case _:
                return step(x)
