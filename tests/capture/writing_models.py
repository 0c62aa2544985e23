"""Models whose forwards write to what they hold, mostly by operators without an underscore in their names."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F


class Writing(nn.Module):
    """A layer, what `write` does to its own tensors with the layer's result, and a last layer."""

    mean: torch.Tensor
    other: torch.Tensor
    var: torch.Tensor

    def __init__(self, write: Write) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 4)
        self.write = write
        for name in ("mean", "other"):
            self.register_buffer(name, torch.zeros(8))
        self.register_buffer("var", torch.ones(8))
        self.table = nn.Parameter(torch.arange(64.0).view(8, 8) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.write(self, self.first(x)))  # type: ignore[no-any-return]


Write = Callable[["Writing", torch.Tensor], torch.Tensor]


def _batch_norm(model: Writing, x: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(x, model.mean, model.var, training=model.training)


def _batch_norm_twice(model: Writing, x: torch.Tensor) -> torch.Tensor:
    return _batch_norm(model, x) * _batch_norm(model, x + 1)


def _batch_norm_in_evaluation(model: Writing, x: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(x, model.mean, model.var)


def _instance_norm(model: Writing, x: torch.Tensor) -> torch.Tensor:
    return F.instance_norm(x[..., None].expand(-1, -1, 3) * torch.arange(3), model.mean, model.var).sum(-1)


def _max_norm(model: Writing, x: torch.Tensor) -> torch.Tensor:
    return x + F.embedding(torch.arange(x.shape[0]) % 8, model.table, max_norm=1.0)


def _max_norm_of_bags(model: Writing, x: torch.Tensor) -> torch.Tensor:
    return x + F.embedding_bag(torch.arange(x.shape[0])[:, None] % 8, model.table, max_norm=1.0)


def _for_each(model: Writing, x: torch.Tensor) -> torch.Tensor:
    torch._foreach_add_([model.mean, model.other], [torch.ones(8), torch.ones(8) * 2])
    return x * model.mean + model.other


def _into(model: Writing, x: torch.Tensor) -> torch.Tensor:
    torch.add(model.mean, 1, out=model.mean)
    return x + model.mean


def _normalized_into(model: Writing, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        F.normalize(model.var, dim=0, out=model.var)
    return x + model.var


def _of_a_view(model: Writing, x: torch.Tensor) -> torch.Tensor:
    model.mean[2:4].add_(1)
    return x + model.mean


def _item(model: Writing, x: torch.Tensor) -> torch.Tensor:
    model.mean[0] = 3.0
    return x + model.mean


def _only_reads(model: Writing, x: torch.Tensor) -> torch.Tensor:
    return torch.addcmul(x, model.mean, model.var) + F.layer_norm(x, [8], model.var, model.mean) @ model.table


WRITES: dict[str, tuple[Write, set[str]]] = {
    "batch norm": (_batch_norm, {"mean", "var"}),
    "batch norm, twice": (_batch_norm_twice, {"mean", "var"}),
    "batch norm in evaluation": (_batch_norm_in_evaluation, set()),
    "instance norm": (_instance_norm, {"mean", "var"}),
    "max_norm": (_max_norm, {"table"}),
    "max_norm of bags": (_max_norm_of_bags, {"table"}),
    "for each": (_for_each, {"mean", "other"}),
    "out=": (_into, {"mean"}),
    "normalize(out=)": (_normalized_into, {"var"}),
    "a view": (_of_a_view, {"mean"}),
    "an item": (_item, {"mean"}),
    "only reads": (_only_reads, set()),
}
"""What is done, and which of the model's tensors are written to."""
