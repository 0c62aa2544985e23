"""Models whose forwards iterate over sets, and so do the same in another order in each process."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

KINDS = ("sliding", "full", "sliding", "full", "linear", "strided")


class Rotary(nn.Module):
    """Cosines and sines of a kind, as transformers' models with layers of several kinds have them."""

    def __init__(self, kinds: tuple[str, ...], width: int = 4) -> None:
        super().__init__()
        for number, kind in enumerate(sorted(set(kinds))):
            self.register_buffer(f"{kind}_frequencies", torch.arange(1.0, width + 1) / (2 + 3 * number))

    def forward(self, x: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
        angles = torch.arange(x.shape[1])[:, None] * getattr(self, f"{kind}_frequencies")
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class RotaryLayer(nn.Module):
    """A layer that reads the values of its kind."""

    def __init__(self, kind: str, width: int = 4) -> None:
        super().__init__()
        self.kind: str = kind
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, values: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        cos, sin = values
        return x + torch.tanh(self.linear(x) * cos + x * sin)


class RotaryModel(nn.Module):
    """Values of each kind are made in the order of a set of strings. `reads_mask`: and values of the mask are read."""

    def __init__(self, kinds: tuple[str, ...] = KINDS[:4], *, reads_mask: bool = True, width: int = 4) -> None:
        super().__init__()
        self.kinds, self.reads_mask = kinds, reads_mask
        self.rotary = Rotary(kinds, width)
        self.layers = nn.ModuleList(RotaryLayer(kind, width) for kind in kinds)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if not self.reads_mask or not mask.all():
            x = x * mask[..., None]
        values = {kind: self.rotary(x, kind) for kind in set(self.kinds)}
        for layer in self.layers:
            x = layer(x, values[str(layer.kind)])
        return x


class LoopsOverSets(nn.Module):
    """Loops over sets of all forms, with turns of other lengths, in functions, with constants, and in one another."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({name: nn.Linear(width, width) for name in KINDS[1:]})
        self.scales = nn.ParameterDict({name: nn.Parameter(torch.ones(width)) for name in KINDS[1:]})
        self.last = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: dict[str, torch.Tensor] = {}
        for name in set(KINDS):
            head = self.heads[name](x)
            if name in ("full", "linear"):
                head = torch.relu(head)
            made[name] = head * self.scales[name]
        more = {name: _scaled(value, name) for name, value in made.items()}
        inner: dict[tuple[str, str], torch.Tensor] = {}
        for name in frozenset(KINDS[:2]):
            for other in set(KINDS[3:]):
                inner[name, other] = more[name] * more[other]
        pairs = [inner[name, other].tanh() for name in sorted(KINDS[:2]) for other in sorted(KINDS[3:])]
        listed = list(map(torch.sigmoid, more.values()))
        by_name = dict(zip(more, listed, strict=True))
        total: Any = x
        for one in (*pairs, *(by_name[name] for name in sorted(by_name))):
            total = total + one
        return self.last(total)  # type: ignore[no-any-return]


def _scaled(value: torch.Tensor, name: str) -> torch.Tensor:
    return torch.nn.functional.pad(value, (0, 0), mode="constant") * len(name) if name != "full" else value


class SetInSetOrder(nn.Module):
    """Parts and buffers are set in the order of a set; each has values of its own, that do not depend on the order."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.towers = nn.ModuleDict({name: Tower(width, len(name)) for name in set(KINDS)})
        self.last = nn.Linear(width, width)
        with torch.no_grad():
            for parameter in self.last.parameters():
                parameter.copy_(torch.linspace(-0.5, 0.5, parameter.numel()).view_as(parameter))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = {name: tower(x) for name, tower in self.towers.items()}
        return self.last(torch.stack([made[name] for name in sorted(made)]).sum(0))  # type: ignore[no-any-return]


class Tower(nn.Module):
    def __init__(self, width: int, number: int) -> None:
        super().__init__()
        for name in set(KINDS):
            weight = torch.linspace(-1, 1, width * width).view(width, width) * (len(name) + number) / 10
            self.register_parameter(f"{name}_weight", nn.Parameter(weight))
            self.register_buffer(f"{name}_count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in sorted(set(KINDS)):
            count = getattr(self, f"{name}_count")
            if self.training:
                count += len(name)
            x = torch.tanh(x @ getattr(self, f"{name}_weight")) + 0.1
        return x


class SumOverSet(nn.Module):
    """Adds up in the order of a set: another number in each process."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({name: nn.Linear(width, width) for name in KINDS[1:]})
        self.last = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x
        for name in set(KINDS):
            total = total + self.heads[name](x)
        return self.last(total)  # type: ignore[no-any-return]
