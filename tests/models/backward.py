"""Modules whose backwards have each a peculiarity: what a split backward must get right."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from models.small import Scaled

Forward = Callable[..., Any]


class Block(nn.Module):
    """Modules by name and a function that uses them."""

    def __init__(self, forward: Forward, **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self._forward = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self._forward(self, *inputs)


@dataclasses.dataclass(frozen=True)
class BackwardCase:
    """A module and what it reads.

    Attributes:
        inputs: by which the backward ends; those of floating point require grad.
        is_whole: part of the name that `whole_because` gives; None where the backward can be split.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], list[torch.Tensor]]
    is_whole: str | None = None


def _rows(*shape: int) -> Callable[[], list[torch.Tensor]]:
    return lambda: [torch.randn(*shape)]


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


def _conv(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), norm, nn.ReLU(), nn.Conv2d(4, 4, 3, bias=False), nn.Flatten())


def _transformer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True, norm_first=True)


def _attend(self: Any, x: torch.Tensor) -> torch.Tensor:
    q, k, v = (part.unflatten(2, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, 2))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    return x + self.out(y)  # type: ignore[no-any-return]


def _tied(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = torch.tanh(F.linear(x, self.w))
    x = torch.tanh(x @ self.w) * self.w[0]
    return F.linear(torch.relu(x), self.w) + self.w.sum()  # type: ignore[no-any-return]


def _in_place(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = self.first(x)
    x.add_(self.table).mul_(2)
    x[:, 1:3] = x[:, 1:3].clone() * self.table[1:3]
    made = self.table.expand(4, 6).clone()
    made[:, :2].copy_(x[:, :2])
    return self.second(x + made)  # type: ignore[no-any-return]


def _hooked_in_place(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y[:, :2] = self.table[:2]
    z = y[:, 1:]
    z.mul_(self.table[1:])
    y.register_hook(lambda gradient: gradient * 2)  # type: ignore[no-untyped-call]
    return self.first(y)  # type: ignore[no-any-return]


def _views(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = self.first(x.t().contiguous().t()).view(2, 2, 6).transpose(0, 1)
    parts = y.unbind(0)
    return parts[0].squeeze(), torch.cat([parts[1], self.table.view(1, 6)])


def _skips(self: Any, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    a = self.first(x)
    b = torch.tanh(self.second(y + a))
    return {"a": a, "b": self.first(b) + x, "weights": self.table.square().sum(), "constant": torch.ones(2)}


def _detached(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = self.first(x).abs().mean()
    return self.second(x.detach() + self.table) + self.first(y) * scale  # type: ignore[no-any-return]


def _embedding(self: Any, tokens: torch.Tensor) -> torch.Tensor:
    return self.first(self.words(tokens))  # type: ignore[no-any-return]


def _embedding_beside(self: Any, tokens: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return self.first(self.words(tokens) + x) @ self.words.weight.t()  # type: ignore[no-any-return]


def _recomputed(self: Any, x: torch.Tensor, use_reentrant: bool = False) -> torch.Tensor:
    for layer in self.layers:
        x = checkpoint(layer, x, use_reentrant=use_reentrant)
    return self.head(x)  # type: ignore[no-any-return]


def _functions(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = Scaled.apply(self.first(x), 2.0)  # type: ignore[no-untyped-call]
    x = Gated.apply(x, self.table)  # type: ignore[no-untyped-call]
    return Scaled.apply(self.second(x), 0.5)  # type: ignore[no-untyped-call, no-any-return]


class Gated(torch.autograd.Function):
    """A product with a weight, with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0) * 3


def _autocast(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = self.second(torch.relu(self.first(x))) + self.first(x)
    return x.float() * self.table  # type: ignore[no-any-return]


def _experts(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = torch.relu(torch.bmm(x.expand(3, -1, -1), self.up))
    return torch.baddbmm(self.bias, y, self.down).sum(0)


def _einsum(self: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.einsum("nd,hde,ne->nh", x, self.up, x)


def _added(self: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x + self.table.unsqueeze(0))  # x and table get one and the same gradient


def _modules() -> dict[str, nn.Module | nn.Parameter]:
    return {"first": nn.Linear(6, 6), "second": nn.Linear(6, 6), "table": nn.Parameter(torch.randn(6))}


def _block(forward: Forward) -> Callable[[], nn.Module]:
    return lambda: Block(forward, **_modules())


def _layers() -> nn.Module:
    return nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.LayerNorm(6), nn.Tanh()) for _ in range(3))


def _frozen() -> nn.Module:
    made: Any = _mlp()
    made[0].weight.requires_grad_(False)
    made[2].requires_grad_(False)
    return made  # type: ignore[no-any-return]


def _recurrent() -> nn.Module:
    lstm = nn.LSTM(6, 5, 2, bidirectional=True)
    return Block(lambda self, x: self.head(self.lstm(x)[0]), lstm=lstm, head=nn.Linear(10, 2))


def _normed() -> nn.Module:
    weight_norm = torch.nn.utils.parametrizations.weight_norm
    return nn.Sequential(weight_norm(nn.Linear(6, 6)), nn.GELU(), weight_norm(nn.Linear(6, 2)))


CASES = (
    BackwardCase("mlp", _mlp, _rows(4, 6)),
    BackwardCase("mlp_3d", _mlp, _rows(4, 5, 6)),
    BackwardCase("mlp_strided", lambda: Block(lambda self, x: self.m(x.transpose(0, 1)), m=_mlp()), _rows(4, 5, 6)),
    BackwardCase("one_linear", lambda: nn.Linear(6, 6), _rows(4, 6)),
    BackwardCase("no_bias", lambda: nn.Linear(6, 6, bias=False), _rows(4, 6)),
    BackwardCase("added_table", lambda: Block(_added, table=nn.Parameter(torch.randn(4, 6))), _rows(1, 4, 6)),
    BackwardCase(
        "sum",
        lambda: Block(lambda self, x: x.sum() + self.table.sum(), table=nn.Parameter(torch.randn(3))),
        _rows(2, 3),
    ),
    BackwardCase("no_weights", lambda: nn.ReLU(), _rows(4, 6)),
    BackwardCase("frozen", _frozen, _rows(4, 6)),
    BackwardCase("conv_batch_norm", lambda: _conv(nn.BatchNorm2d(4)), _rows(3, 2, 6, 6)),
    BackwardCase("conv_group_norm", lambda: _conv(nn.GroupNorm(2, 4)), _rows(3, 2, 6, 6)),
    BackwardCase("conv_transposed", lambda: nn.ConvTranspose1d(2, 3, 3), _rows(3, 2, 6)),
    BackwardCase("transformer", _transformer, _rows(2, 5, 8)),
    BackwardCase("attention", lambda: Block(_attend, qkv=nn.Linear(8, 24), out=nn.Linear(8, 8)), _rows(2, 5, 8)),
    BackwardCase("lstm", _recurrent, _rows(4, 3, 6)),
    BackwardCase("gru", lambda: Block(lambda self, x: self.gru(x), gru=nn.GRU(6, 4)), _rows(4, 3, 6)),
    BackwardCase("tied", lambda: Block(_tied, w=nn.Parameter(torch.randn(6, 6))), _rows(4, 6)),
    BackwardCase("in_place", _block(_in_place), _rows(4, 6)),
    BackwardCase("hooked_in_place", _block(_hooked_in_place), _rows(4, 6)),
    BackwardCase("views", _block(_views), _rows(4, 6)),
    BackwardCase("skips", _block(_skips), lambda: [torch.randn(4, 6), torch.randn(4, 6)]),
    BackwardCase("detached", _block(_detached), lambda: [torch.randn(4, 6), torch.randn(4, 6)]),
    BackwardCase(
        "unused_input", _block(lambda self, x, y: self.first(x)), lambda: [torch.randn(4, 6), torch.randn(4, 6)]
    ),
    BackwardCase(
        "embedding_first",
        lambda: Block(_embedding, words=nn.Embedding(7, 6), first=nn.Linear(6, 6)),
        lambda: [torch.randint(0, 7, (4, 5))],
    ),
    BackwardCase(
        "embedding_beside",
        lambda: Block(_embedding_beside, words=nn.Embedding(7, 6), first=nn.Linear(6, 6)),
        lambda: [torch.randint(0, 7, (4, 5)), torch.randn(4, 5, 6)],
    ),
    BackwardCase("functions", _block(_functions), _rows(4, 6)),
    BackwardCase("autocast", _block(_autocast), _rows(4, 6)),
    BackwardCase(
        "experts",
        lambda: Block(
            _experts,
            up=nn.Parameter(torch.randn(3, 6, 5)),
            down=nn.Parameter(torch.randn(3, 5, 6)),
            bias=nn.Parameter(torch.randn(3, 1, 6)),
        ),
        _rows(1, 4, 6),
    ),
    BackwardCase("einsum", lambda: Block(_einsum, up=nn.Parameter(torch.randn(2, 6, 6))), _rows(4, 6)),
    BackwardCase("weight_norm", _normed, _rows(4, 6)),
    BackwardCase("identity", lambda: Block(lambda self, x: x, first=nn.Linear(2, 2)), _rows(4, 6)),
    BackwardCase("checkpoint", lambda: Block(_recomputed, layers=_layers(), head=nn.Linear(6, 2)), _rows(4, 6)),
    BackwardCase(
        "reentrant_checkpoint",
        lambda: Block(lambda self, x: _recomputed(self, x, True), layers=_layers(), head=nn.Linear(6, 2)),
        _rows(4, 6),
        is_whole="CheckpointFunctionBackward",
    ),
)
