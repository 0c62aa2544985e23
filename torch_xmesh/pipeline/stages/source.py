"""What an engine asks of a source of stages, and what most sources answer. There are three: a model that is cut, a list
of ready modules, a plan."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import Placement

from torch_xmesh.pipeline.cut.values import Partition
from torch_xmesh.pipeline.cut.ways import Ways
from torch_xmesh.pipeline.ranks.stage_mesh import StageMesh
from torch_xmesh.pipeline.ranks.transfers import Transfers
from torch_xmesh.pipeline.stages.batch_parts import ByShard
from torch_xmesh.pipeline.stages.live_model import LiveModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageRequest:
    """What stages are made for; the same on all ranks.

    Attributes:
        meshes: by stage.
        chunk_specs: how "args", "kwargs" and "target" are cut into microbatches.
        is_mean: the loss is a mean over samples, which parts of them can share.
        memory_limit_bytes: what no stage may exceed.
        is_auto: the schedule is chosen later, and keeps the limit.
        in_flight: by stage, the most microbatches that the schedule has there at once.
    """

    transfers: Transfers
    meshes: Sequence[StageMesh]
    chunk_specs: Mapping[str, Any]
    is_mean: bool
    memory_limit_bytes: int | None
    is_auto: bool
    in_flight: Sequence[int]


class SharedLoss(Protocol):
    """How the devices of the last stage share a loss that is computed outside of the model."""

    @property
    def number(self) -> int:
        """Parts of a microbatch's samples."""

    def targets(self, targets: Sequence[Any], specs: Sequence[Any]) -> list[Any]:
        """Those of this device's samples, of each microbatch."""

    def total(self, losses: torch.Tensor) -> torch.Tensor:
        """The sum of all devices' losses, written into `losses`."""

    def gather(self, outputs: Mapping[int, dict[str, torch.Tensor]]) -> None:
        """Puts the samples of all devices where this device's are: by microbatch, the stage's outputs in order."""


class StageSource:
    """Where an engine's stages come from.

    In the order in which an engine uses it: `ways` are compared by all ranks, then `fields`; `partition` makes the
    stages, and `release` lets go of the model; around each step come `check_step`, `begin_step` and `end_step`, within
    it `weights_done`; `close` is last.

    Attributes:
        model: the model whose own tensors the stages have, under its names; copies of a stage begin with the same. None
            where stages have others, and once it is let go of.
        names_stages: the parameters' names begin with the stage's number, there being no one model that names them.
        parts: who gives a part of a batch with ``sharded=True``.
        sums_gradients: stages bring their gradients home themselves: from `weights_done` on, until `end_step`.
        ways: what recordings compute that are there before any stage is made.
        placements: by value and stage, where a value that crosses lies on the stage, if the source says so.
    """

    names_stages = False
    sums_gradients = False
    parts = ByShard()

    def __init__(self, model: nn.Module | None = None) -> None:
        self.model = model
        self.ways = Ways()
        self.placements: Mapping[tuple[str, int], tuple[Placement, ...]] = {}

    def check(self) -> None:
        """Raises ValueError for what a user may not give."""

    def fields(self) -> list[tuple[str, str]]:
        """What of it must be equal on all ranks, by name: the same names from all sources."""
        raise NotImplementedError

    def partition(self, request: StageRequest) -> Partition:
        """The stages, those of this rank with modules. Called by all ranks together.

        Raises:
            ValueError: the model cannot be cut so, or ranks disagree.
        """
        raise NotImplementedError

    def release(self) -> None:
        """The stages are made: what they were made of is let go of, as far as they do not need it."""
        self.model = None

    def live(self, partition: Partition) -> LiveModel | None:
        """The user's model, of which stages would not notice some changes; None where they notice all."""
        return None

    def loss_shares(self, stage: int) -> SharedLoss | None:
        """How the devices of a stage of this rank share the loss; None where each computes that of its data shard."""
        return None

    def check_step(self, samples: int | None, *, is_sync: bool, is_train: bool) -> None:
        """Whether a step may begin; nothing is changed. `samples`: of the whole batch, None where this rank sees none.

        Raises:
            ValueError: something of it cannot be run.
        """

    def begin_step(self, is_train: bool) -> None:
        """Before a step's first microbatch."""

    def weights_done(self, stage: int, segment: int, microbatch: int, is_last: bool) -> None:
        """A B or W of a segment of this rank's has run; `is_last`: of the step. Called where `sums_gradients`."""

    def end_step(self, is_train: bool) -> None:
        """After a step's last microbatch."""

    def close(self) -> None:
        """No step comes any more on this rank."""
