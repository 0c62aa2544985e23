"""What overlap_perf.py trains: models of examples/models, with a step's batch and its loss."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

sys.path.append(str(Path(__file__).resolve().parents[3] / "examples" / "models"))
import sparse


@dataclass(frozen=True)
class Subject:
    """Attributes:
    make: the model, equal each time.
    batch, target: of a step.
    """

    make: Callable[[], nn.Module]
    batch: torch.Tensor
    target: torch.Tensor
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def token_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of logits [batch, length, vocabulary] and targets [batch, length]."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def subject(name: str, samples: int) -> Subject:
    """By name, with so many samples a step: "BERT SGMoE", "BERT Switch", "ViT SGMoE", "ViT Switch", "BERT dense"."""
    generator = torch.Generator().manual_seed(1)
    kind, _, network = name.partition(" ")
    routed = {"SGMoE": (2, 2.5), "Switch": (1, 1.25)}
    if kind == "ViT":
        images = torch.randn(samples, 3, 32, 32, generator=generator)
        classes = torch.randint(10, (samples,), generator=generator)
        top, factor = routed[network]
        return Subject(lambda: _seeded(lambda: sparse.vit(top, factor)), images, classes, F.cross_entropy)
    tokens = torch.randint(256, (samples, 64), generator=generator)
    following = torch.randint(256, (samples, 64), generator=generator)
    if network == "dense":
        return Subject(lambda: _seeded(lambda: sparse.dense_bert()), tokens, following, token_loss)
    top, factor = routed[network]
    return Subject(lambda: _seeded(lambda: sparse.bert(top, factor)), tokens, following, token_loss)


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()
