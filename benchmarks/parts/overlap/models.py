"""What overlap_perf.py trains: models of examples/models, with a step's batch and its loss, and whose plan is run in
different orders."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

sys.path.append(str(Path(__file__).resolve().parents[3] / "examples" / "models"))
import sparse

import torch_xmesh as xm

Planner = Callable[..., xm.ParallelPlan]


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


@dataclass(frozen=True)
class Workload:
    """Attributes:
    subject: with so many samples a step.
    planner: for so many devices, who makes its plan.
    least_microbatches: that a step has.
    """

    subject: Callable[[int], Subject]
    planner: Callable[[int], Planner]
    least_microbatches: int = 1


def _bert(make: Callable[[], nn.Module], samples: int) -> Subject:
    generator = torch.Generator().manual_seed(1)
    tokens, following = (torch.randint(256, (samples, 64), generator=generator) for _ in range(2))
    return Subject(partial(_seeded, make), tokens, following, token_loss)


def _vit(make: Callable[[], nn.Module], samples: int) -> Subject:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(samples, 3, 32, 32, generator=generator)
    classes = torch.randint(10, (samples,), generator=generator)
    return Subject(partial(_seeded, make), images, classes, F.cross_entropy)


def paper_subject(name: str, devices: int) -> Subject:
    """HiDup's model of that name in its size, without memory for its parameters; with 32 samples a device."""
    kind, _, network = name.partition(" ")
    top, factor = {"SGMoE": (2, 2.5), "Switch": (1, 1.25)}[network]
    size: dict[str, Any] = {"width": 768, "experts": 2 * devices}
    with torch.device("meta"):
        if kind == "ViT":
            images, classes = torch.empty(32 * devices, 3, 32, 32), torch.empty(32 * devices, dtype=torch.int64)
            return Subject(lambda: _on_meta(lambda: sparse.vit(top, factor, **size)), images, classes, F.cross_entropy)
        tokens = torch.empty(32 * devices, 128, dtype=torch.int64)
        make = partial(sparse.bert, top, factor, length=128, **size)
        return Subject(lambda: _on_meta(make), tokens, tokens, token_loss)


def _on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def _one_stage(_devices: int) -> Planner:
    """The plan that is found among those of one stage: experts lie on different devices."""
    return partial(xm.plan_parallel, num_layers=1)


def _megatron(devices: int) -> Planner:
    return partial(xm.presets.megatron, tensor_parallel=devices)


def _two_stages(devices: int) -> Planner:
    return partial(xm.presets.pipeline, num_stages=2, tensor_parallel=devices // 2)


WORKLOADS = {
    "BERT SGMoE": Workload(partial(_bert, lambda: sparse.bert(2, 2.5)), _one_stage),
    "BERT Switch": Workload(partial(_bert, lambda: sparse.bert(1, 1.25)), _one_stage),
    "ViT SGMoE": Workload(partial(_vit, lambda: sparse.vit(2, 2.5)), _one_stage),
    "ViT Switch": Workload(partial(_vit, lambda: sparse.vit(1, 1.25)), _one_stage),
    "BERT Megatron": Workload(partial(_bert, sparse.dense_bert), _megatron),
    "BERT two stages": Workload(partial(_bert, sparse.dense_bert), _two_stages, least_microbatches=4),
}
"""By name."""


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()
