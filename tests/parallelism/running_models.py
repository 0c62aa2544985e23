"""Models whose stages test_running.py runs in parts: by name, with an argument."""

from __future__ import annotations

from collections.abc import Callable

import torch
from small_models import Gpt, Layer, Mlp
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


def mlp() -> tuple[nn.Module, torch.Tensor]:
    return Mlp(64, 4), torch.randn(16, 64)


def gpt() -> tuple[nn.Module, torch.Tensor]:
    return Gpt(num_layers=2), torch.randint(0, 96, (8, 16))


def tied_gpt() -> tuple[nn.Module, torch.Tensor]:
    model = Gpt(num_layers=1)
    model.head.weight = model.tokens.weight
    return model, torch.randint(0, 96, (8, 16))


class Classifier(nn.Module):
    """Its own loss, some of whose samples are ignored; a softmax over a dim that may be sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(32, 64), nn.Linear(64, 48)
        self.register_buffer("scale", torch.linspace(0.5, 2, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(x).softmax(-1) * self.scale
        target = (x.sum(-1) * 1000).long() % 48
        target = target.masked_fill(x[:, 0] > 1, -100)
        loss: torch.Tensor = F.cross_entropy(self.head(hidden), target) + hidden.square().mean()
        return loss


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(32, 64), nn.Linear(64, 48)
        self.drop = nn.Dropout(0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(self.inner(x + 0.1 * torch.randn_like(x)).relu())
        out: torch.Tensor = F.dropout(self.head(hidden), p=0.5)
        return out


class Odd(nn.Module):
    """Forms of calls that are seldom."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.table = nn.Linear(32, 64), nn.Parameter(torch.randn(12, 64))
        self.down = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(x)
        hidden[:, :2] = 0.0
        weights = torch.softmax(hidden, axis=-1)  # type: ignore[call-overload]
        bits = self.table.detach().view(torch.int64).remainder(7).to(hidden.dtype).sum(0)
        rows = F.embedding((x[:, 0].abs() * 10).long() % 12, self.table, padding_idx=-1)
        out: torch.Tensor = self.down(weights * (1 + bits) + rows) + F.mse_loss(rows, hidden, reduction="sum")
        return out


class Attends(nn.Module):
    """With weights dropped: seen are keys that come before, or those of a mask, which leaves some queries none."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.shared = nn.Linear(32, 64), nn.Linear(32, 32)
        self.out = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            one.view(*x.shape[:2], -1, 16).transpose(1, 2) for one in (self.query(x), self.shared(x), x)
        )
        made = F.scaled_dot_product_attention(query, key, value, dropout_p=0.25, is_causal=True, enable_gqa=True)
        seen = (x[:, None, :, :1] > -0.5) & (x[:, None, :, 1:2] < 1).transpose(-1, -2)
        wide = key.repeat_interleave(2, 1)
        made = made + F.scaled_dot_product_attention(query, wide, wide, seen, 0.5, scale=0.3)
        bias = torch.zeros_like(seen, dtype=x.dtype).masked_fill(~seen, float("-inf"))
        made = made + F.scaled_dot_product_attention(query, wide, wide, bias, 0.5)
        out: torch.Tensor = self.out(made.transpose(1, 2).flatten(2))
        return out


class Encodes(nn.Module):
    """torch's own layers as they come, with weights dropped and masks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.attention = nn.MultiheadAttention(32, 2, dropout=0.3, bias=False, kdim=16, vdim=16)
        self.causal = nn.MultiheadAttention(32, 4, dropout=0.2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length, padding = x.shape[1], x[:, :, 0] > 1
        x = self.layer(x, src_key_padding_mask=padding)
        x = x.transpose(0, 1)
        made, weights = self.attention(x, x[:8, :, :16], x[:8, :, 16:], key_padding_mask=padding[:, :8])
        x = (x + made).transpose(0, 1) + weights.sum((1, 2))[:, None, None]
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        out: torch.Tensor = self.causal(x, x, x, attn_mask=hidden, need_weights=False, is_causal=True)[0]
        return out


def encodes() -> tuple[nn.Module, torch.Tensor]:
    return Encodes(), torch.randn(8, 12, 32).clamp(max=1.5)


def attends() -> tuple[nn.Module, torch.Tensor]:
    return Attends(), torch.randn(8, 12, 32)


def odd() -> tuple[nn.Module, torch.Tensor]:
    return Odd(), torch.randn(16, 32)


class Draws(nn.Module):
    """Random numbers of many kinds: some of each channel or sample, some in place, some of nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.aside = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(4, 8, 1)
        self.head, self.table = nn.Linear(8 * 16, 32), nn.Embedding(10, 32)
        self.drop = nn.Dropout2d(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.rrelu(self.drop(self.inner(x)), training=self.training)
        is_kept = hidden.new_empty(hidden.shape[0], 1, 1, 1).bernoulli_(0.75).div_(0.75)
        flat = (hidden * is_kept + self.aside(x)).flatten(1)
        flat = F.alpha_dropout(flat, 0.2, training=self.training)
        flat = flat * (1 + torch.rand(flat.shape[0], 1)) * torch.bernoulli(torch.full_like(flat, 0.9))
        flat = F.dropout1d(flat.view(-1, 8, 16), 0.2, training=self.training).flatten(1)
        out: torch.Tensor = self.head(flat) + self.table(torch.randint(0, 10, (flat.shape[0],)))
        return out


class Smoothed(nn.Module):
    """Losses of its own: smoothed labels, of which some are ignored, and distances between distributions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(32, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(x).relu()
        logits = self.head(hidden)
        target = (x[:, 0].abs() * 20).long() % 17 - 1
        out: torch.Tensor = F.cross_entropy(logits, target, ignore_index=-1, label_smoothing=0.1)
        out = out + F.cross_entropy(logits, target, ignore_index=-1, reduction="sum", label_smoothing=0.3) / 50
        wanted = torch.softmax(x[:, :16], 1)
        for reduction in ("batchmean", "mean", "sum"):
            out = out + F.kl_div(torch.log_softmax(logits, 1), wanted, reduction=reduction)
        weight = torch.linspace(0.5, 1.5, 16, dtype=x.dtype)
        out = out + F.cross_entropy(logits, target, weight, ignore_index=-1, label_smoothing=0.1)
        return out + F.cross_entropy(logits, wanted) + F.mse_loss(logits, wanted, size_average=False)


def draws() -> tuple[nn.Module, torch.Tensor]:
    return Draws(), torch.randn(16, 4, 4, 4)


def smoothed() -> tuple[nn.Module, torch.Tensor]:
    return Smoothed(), torch.randn(16, 32)


def noisy() -> tuple[nn.Module, torch.Tensor]:
    return Noisy(), torch.randn(16, 32)


def classifier() -> tuple[nn.Module, torch.Tensor]:
    return Classifier(), torch.randn(16, 32)


def convolutions() -> tuple[nn.Module, torch.Tensor]:
    layers = [nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=4), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(8 * 16, 16), nn.LogSoftmax(-1)), torch.randn(8, 4, 6, 6)


class Normed(nn.Module):
    """Batch norms over parts of the samples and of the channels, changed in place behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.norm2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8, affine=False)
        self.head, self.norm3 = nn.Linear(8, 16), nn.BatchNorm1d(16, track_running_stats=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm1(self.first(x)), inplace=True)
        x = x + self.norm2(self.second(x))
        out: torch.Tensor = self.norm3(self.head(x.mean((2, 3))))
        return out


def normed() -> tuple[nn.Module, torch.Tensor]:
    return Normed(), torch.randn(8, 4, 6, 6)


class Checkpointed(nn.Module):
    """Layers that backward computes once more, masks and all; of the last one a part."""

    def __init__(self, dropped: float) -> None:
        super().__init__()
        self.dropped = dropped
        self.layers = nn.ModuleList(Layer(64, 4, is_pre=True) for _ in range(2))
        self.inner, self.head = nn.Linear(64, 64), nn.Linear(64, 64)

    def last(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = F.dropout(self.inner(x).relu(), self.dropped)
        return self.head(x), x.mean((1, 2), keepdim=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        made, mean = checkpoint(self.last, x, use_reentrant=True)
        out: torch.Tensor = made * mean + x
        return out


def checkpointed() -> tuple[nn.Module, torch.Tensor]:
    return Checkpointed(0.25), torch.randn(8, 16, 64)


def checkpointed_alike() -> tuple[nn.Module, torch.Tensor]:
    """As one process would, without masks."""
    return Checkpointed(0.0), torch.randn(8, 16, 64)


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "mlp": mlp,
    "gpt": gpt,
    "tied gpt": tied_gpt,
    "checkpointed": checkpointed,
    "checkpointed alike": checkpointed_alike,
}
RANDOM = {
    **MODELS,
    "classifier": classifier,
    "convolutions": convolutions,
    "noisy": noisy,
    "odd": odd,
    "attends": attends,
    "encodes": encodes,
    "normed": normed,
    "draws": draws,
    "smoothed": smoothed,
}
