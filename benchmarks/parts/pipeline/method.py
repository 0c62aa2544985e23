"""The interface of the engines under measurement."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

import torch_xmesh as xm
from parts.pipeline.models import Workload

Grid = Any
"""Ranks of one stage's mesh: a list, or a list of lists."""

Groups = Mapping[tuple[int, ...], dist.ProcessGroup]
"""gloo's groups by their ranks, for rivals."""


def flat(grid: Grid) -> list[int]:
    """The ranks of a mesh, row-major."""
    return [int(rank) for rank in torch.tensor(grid).flatten()]


class Method:
    """One engine with a model of its own. `schedule` and the three flags are what the simulator plays for it."""

    schedule: xm.Schedule
    is_overlapped: bool
    blocks_receiver = True
    early_weights = False

    def __init__(self, workload: Workload) -> None:
        self.workload = workload

    def step(self) -> None:
        """One step; adds to the gradients. Called by the ranks of the meshes."""
        raise NotImplementedError

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """Gradients of this rank's parameters, by the parameters' names in the whole model."""
        raise NotImplementedError

    def zero_gradients(self) -> None:
        for parameter in self.workload.model.parameters():
            parameter.grad = None

    def close(self) -> None:
        """Ends the engine on this rank."""


def named_gradients(workload: Workload, module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Gradients of the parameters that `module` shares with the workload's model, under the model's names."""
    own = {id(parameter) for parameter in module.parameters()}
    return {name: p.grad for name, p in workload.model.named_parameters() if id(p) in own}
