"""A step's batch on one rank: taken from the arguments of a call, made whole, cut into microbatches."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from torch_xmesh.pipeline.cut.losses import needs_target
from torch_xmesh.pipeline.cut.microbatch import leaf_specs
from torch_xmesh.pipeline.cut.values import Shapes
from torch_xmesh.pipeline.engine.batch import (
    as_shards,
    local_microbatches,
    microbatch_columns,
    model_inputs,
    num_batch_shards,
    num_samples,
)
from torch_xmesh.pipeline.engine.place import EnginePlace
from torch_xmesh.pipeline.engine.rank_shards import RankShards, number_of_shapes, without_parts
from torch_xmesh.pipeline.engine.sample_order import SampleOrder
from torch_xmesh.pipeline.engine.sizes import SizedPlace
from torch_xmesh.pipeline.ranks.stage_mesh import StageMesh
from torch_xmesh.pipeline.stages.source import SharedLoss


@dataclasses.dataclass(frozen=True)
class StepArguments:
    """What PipelineEngine.step (`is_train`) or evaluate was called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    losses: list[torch.Tensor] | None
    return_outputs: bool
    is_train: bool
    is_sharded: bool = False


class Side:
    """The arguments of a batch, or its target, as far as this rank's stages read them.

    Attributes:
        tree: with data shards as DTensors; of a planned stage this rank's part with ``sharded=True``, until `complete`.
        specs: how each leaf is cut into microbatches; empty where no stage of this rank reads any.
        samples: number in the whole batch, None where nothing is to cut.
        shards: into how many data shards it comes cut, None where it comes whole.
    """

    def __init__(self, tree: Any, specs: list[Any], meshes: Sequence[StageMesh], name: str, what: str) -> None:
        """`meshes` of the stages that read it; messages call its leaves `name`, and all of it `what`."""
        self.tree, self.specs = tree, specs
        self._meshes = meshes if specs else []
        self._name, self._what = name, what
        self._whole: Any = None  # of a part the whole batch without values, else None
        self._rank_shards: RankShards | None = None

    def take_shard(self) -> None:
        """What was given is this rank's data shard."""
        self.tree = as_shards(self.tree, self.specs, self._meshes, self._what)

    def take_part(self, rank_shards: RankShards) -> None:
        """What was given is this rank's part of what a planned stage takes."""
        if self.specs:
            self._whole = rank_shards.shapes(self.tree, self.specs, self._meshes[0])
            self._rank_shards = rank_shards

    def count(self) -> None:
        """Counts samples. ValueError where its tensors disagree."""
        self.samples = num_samples(self.whole, self.specs, self._name)

    def count_shards(self) -> set[int | None]:
        """Into how many data shards it is cut for each stage, None for whole. ValueError for a DTensor that lies
        otherwise than a stage's batch."""
        return {num_batch_shards(self.tree, self.specs, mesh, self._what) for mesh in self._meshes}

    @property
    def whole(self) -> Any:
        """All of it; of a part without values."""
        return self.tree if self._whole is None else self._whole

    @property
    def alike(self) -> Any:
        """What ranks that read it have in common."""
        return self.tree if self._whole is None else without_parts(self.tree, self.specs)

    @property
    def shapes_number(self) -> int | None:
        """A number of the whole's shapes, which ranks compare that give parts of it."""
        return None if self._whole is None else number_of_shapes(self._whole)

    def first_microbatch(self, number: int) -> Any:
        """Of a part: the first of `number` microbatches, without values."""
        assert self._rank_shards is not None, "the batch is no part"
        return self._rank_shards.microbatch(self._whole, self.specs, number)

    def complete(self, lane: str) -> None:
        """Gathers the parts of all ranks that read it, who call this together."""
        if self._rank_shards is not None:
            self.tree = self._rank_shards.gather(self.tree, self.specs, self._meshes[0], lane)
            self._whole = self._rank_shards = None


class StepBatch:
    """A step's batch on this rank, checked as far as one rank can.

    Attributes:
        takers: this rank's stages that read arguments.
        arguments, target: what they and the loss read.
        given: arguments and target as the call has them, read by this rank's stages or not.
        is_sharded: what was given is this rank's part of the batch.
        is_part: that is so, and its stage is a plan's, whose parts are not gathered yet.
        shapes: of the model's inputs that this rank reads.
        shards: number of the batch's data shards, where it comes cut into some.
        order: how it is cut into microbatches; None before.
        inputs: the model's inputs that each stage takes, by microbatch.
        targets: by microbatch.
        codes: what recorded stages run for each microbatch.
    """

    def __init__(self, place: EnginePlace, call: StepArguments, rank_shards: RankShards) -> None:
        """ValueError for a batch that no ranks can step."""
        self._place = place
        self.given = (call.args, call.kwargs), call.target
        self.is_sharded = call.is_sharded
        partition, meshes = place.partition, place.meshes
        self.takers = [stage for stage in place.stages if partition.stages[stage].model_inputs]
        self.arguments = self._arguments(call)
        target, name = call.target if place.has_last else None, "target"
        specs = [] if target is None else leaf_specs(target, place.chunk_specs["target"], name)
        self.target = Side(target, specs, [meshes[-1]], name, name)
        self.is_part = call.is_sharded and place.source.parts.are_gathered
        sides = (self.arguments, self.target)
        for side in sides if call.is_sharded else ():
            if self.is_part:
                side.take_part(rank_shards)
            else:
                side.take_shard()
        for side in sides:
            side.count()
        samples, of_target = self.arguments.samples, self.target.samples
        if samples is not None and of_target is not None and samples != of_target:
            raise ValueError(f"the target has {of_target} samples, the arguments have {samples}")
        found = {shards for side in sides for shards in side.count_shards()}
        if len(found - {None}) > 1:
            raise ValueError(f"tensors of one batch are sharded over {sorted(s for s in found if s)} data shards")
        self.shards = next((shards for shards in found if shards), None)
        args, kwargs = self.arguments.whole
        self.shapes: Shapes = partition.shapes_of(args, kwargs, self.takers) if self.takers else {}
        self.order: SampleOrder | None = None
        self.inputs: dict[int, list[list[torch.Tensor]]] = {}
        self.targets: list[Any] = []
        self.codes: dict[int, list[Any]] = {}
        self._codes_of: SizedPlace | None = None

    def _arguments(self, call: StepArguments) -> Side:
        place, takers = self._place, self.takers
        tree: Any = (tuple(call.args), dict(sorted(call.kwargs.items()))) if takers else ((), {})
        specs = []
        if takers:
            specs = leaf_specs(tree[0], place.chunk_specs["args"], "args")
            specs += leaf_specs(tree[1], place.chunk_specs["kwargs"], "kwargs")
            if not specs:
                raise ValueError(
                    f"the batch is missing on rank {place.transfers.rank}: its stage {takers[0]} takes "
                    f"{list(place.partition.stages[takers[0]].model_inputs)}"
                )
        return Side(tree, specs, [place.meshes[stage] for stage in takers], "argument", "the batch")

    @property
    def samples(self) -> int | None:
        """Number in the whole batch, as far as this rank reads it."""
        return self.target.samples if self.arguments.samples is None else self.arguments.samples

    @property
    def is_read(self) -> bool:
        """Whether this rank reads any of the batch."""
        return bool(self.takers or self.target.specs)

    @property
    def has_loss(self) -> bool:
        """Whether a loss can be computed of it."""
        loss_fn = self._place.loss_fn
        return loss_fn is not None and (self.target.tree is not None or not needs_target(loss_fn))

    @property
    def situations(self) -> set[str]:
        """Those in which its microbatches run, as Ways have them."""
        return {code.situation for several in self.codes.values() for code in several if code is not None}

    def check_part(self) -> None:
        """Raises ValueError for a part of arguments that are not like the example's."""
        if not self.is_part:
            return
        place = self._place
        leaves, structure = pytree.tree_flatten(
            self.arguments.first_microbatch(place.schedule.num_microbatches) if self.takers else ((), {})
        )
        for stage in self.takers:
            place.partition.bind_leaves(leaves, structure, stage, any_size=True)

    def complete(self) -> None:
        """Gathers the batch of which each rank gave a part. Called once all ranks have agreed to the step."""
        if self.is_part:
            self.arguments.complete(f"batch of {self.takers[0]}" if self.takers else "")
            self.target.complete("target")
            self.is_part = False

    def named_inputs(self) -> dict[str, torch.Tensor]:
        """What this rank has of the batch, by the names of the model's inputs."""
        partition, leaves = self._place.partition, pytree.tree_leaves(self.arguments.tree)
        if len(leaves) != len(partition.argument_leaves):  # another rank's stages take the batch
            return {}
        found = partition.named_tensors(leaves)
        return {name: x.to_local() if isinstance(x, DTensor) else x for name, x in found.items()}

    def cut(self, order: SampleOrder, loss_shares: SharedLoss | None) -> None:
        """Cuts it into microbatches. ValueError where that cannot be."""
        if self.order == order:
            return
        place = self._place
        for stage in self.takers:
            columns, structure = microbatch_columns(
                self.arguments.tree, self.arguments.specs, order=order, mesh=place.meshes[stage], what="the batch"
            )
            self.inputs[stage] = model_inputs(
                place.partition, stage, columns=columns, structure=structure, sizes=order.sizes
            )
        if self.target.tree is not None:
            self.targets = local_microbatches(
                self.target.tree, self.target.specs, order=order, mesh=place.meshes[-1], what="target"
            )
            if loss_shares is not None:
                self.targets = loss_shares.targets(self.targets, self.target.specs)
        self.order, self._codes_of = order, None

    def find_codes(self, sized: SizedPlace) -> None:
        """What recorded stages of this place run for each microbatch; nothing before it is cut."""
        if self._codes_of is sized or self.order is None:
            return
        self.codes = {
            stage: work.codes(self.order.sizes, self.inputs.get(stage))
            for stage, work in sized.works.items()
            if work.is_recorded
        }
        self._codes_of = sized
