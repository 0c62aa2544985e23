"""One rank's place in a pipeline: all that an engine has of the model, the meshes and the schedule between steps."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from torch_xmesh import _C
from torch_xmesh.pipeline.cut.partition import Partition
from torch_xmesh.pipeline.engine.auto import AutoSchedule, Cuts, StepPlan
from torch_xmesh.pipeline.engine.boundary import Boundaries, Edge
from torch_xmesh.pipeline.engine.outputs import BufferSync
from torch_xmesh.pipeline.engine.own_stages import OwnStages
from torch_xmesh.pipeline.engine.stage import StageForward, StageWork
from torch_xmesh.pipeline.engine.way_comparison import WayComparison
from torch_xmesh.pipeline.ranks.stage_mesh import StageMesh
from torch_xmesh.pipeline.ranks.transfers import Transfers
from torch_xmesh.pipeline.schedule.schedule import Schedule
from torch_xmesh.pipeline.stages.live_model import LiveModel
from torch_xmesh.pipeline.stages.source import StageSource
from torch_xmesh.pipeline.state.fully_sharded import FullySharded
from torch_xmesh.pipeline.state.gradient_sync import GradientSync


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class EnginePlace:
    """The stages of one rank, what crosses their boundaries, and the C++ engine that runs them. See build_place.

    Attributes:
        transfers: all that moves between the ranks.
        meshes: the mesh of every stage.
        partition, schedule, boundaries: those of the whole model. The schedule is that of the last training step, or
            what was chosen after it.
        early_weights: W may run before its turn.
        auto: chooses the schedule after the first training step, or None.
        ways: compares what recorded stages run with other ranks.
        index: this rank's place in the schedule.
        stages: those of this rank, ascending. The place may have more, on its other ranks.
        works: by stage of this rank.
        edges: those that begin or end here, as `core` counts them.
        forward: what `core` calls to compute a forward.
        live: the user's model, if it was recorded.
        own: the stages of this rank as a user sees them.
        source: where the stages come from.
        unset: tensors of a model on meta that still have no values, by name.
    """

    transfers: Transfers
    meshes: list[StageMesh]
    loss_fn: Callable[..., torch.Tensor] | None
    scale_grads: bool
    chunk_specs: Mapping[str, Any]
    overlap: bool
    schedule: Schedule
    early_weights: bool
    auto: AutoSchedule | None
    partition: Partition
    boundaries: Boundaries
    ways: WayComparison
    index: int
    stages: list[int]
    works: dict[int, StageWork]
    named: dict[int, dict[str, nn.Parameter]]
    live: LiveModel | None
    unset: dict[str, torch.Tensor]
    edges: list[Edge]
    forward: StageForward
    core: "_C.PipelinePlace"
    own: OwnStages
    sharded: FullySharded
    source: StageSource
    sync: GradientSync
    buffers: BufferSync

    def numbers(self, batch: tuple[int, int]) -> tuple[int, ...]:
        """The numbers of microbatches into which a batch may be cut. `batch`: its samples, and its data shards."""
        samples, shards = batch
        if self.auto is None:
            return (self.schedule.num_microbatches,)
        numbers = self.auto.numbers(samples, max(shards, self.most_shards))
        if len(numbers) > 1 and self.partition.fixed_batch and self.partition.batch_size:
            return (max(1, samples // self.partition.batch_size),)
        return numbers

    def plan(self, cuts: Cuts, *, is_train: bool) -> StepPlan:
        """What a step with such a batch runs. Called by all ranks."""
        if self.auto is None:
            return StepPlan(self.schedule, self.early_weights)
        return self.auto.plan(self, cuts, is_train=is_train)

    @property
    def most_shards(self) -> int:
        """The most data shards of any stage."""
        return max(mesh.num_shards for mesh in self.meshes)

    @property
    def has_last(self) -> bool:
        """Whether the last stage is here."""
        return len(self.meshes) - 1 in self.stages
