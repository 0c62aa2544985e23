"""Whether arguments meet the targets of the same samples, where one rank reads the arguments and another the target."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from torch_xmesh.digests import number_of, number_of_tensor
from torch_xmesh.pipeline.cut.chunk_specs import Chunk
from torch_xmesh.pipeline.cut.microbatch import leaf_specs

if TYPE_CHECKING:
    from torch_xmesh.pipeline.engine.place import EnginePlace
    from torch_xmesh.pipeline.engine.step_batch import StepBatch

_MOST_PIECES = 1024
_OFF = "; where that is meant, make the engine with compare_batches=False"


class Pairing:
    """Numbers of the samples that ranks of the first and of the last stage are given, by their place in the batch. A
    rank has some where it is given both sides, though its stage reads one. Those of the side that it does not read tell
    where the other stage's ranks have other samples at that place.

    Attributes:
        texts: by name of a number, what a person is told who has others.
    """

    def __init__(self, place: "EnginePlace") -> None:
        self._place = place
        takers = {stage for info in place.partition.inputs.values() for stage in info.stages}
        self._ends = sorted(takers | {len(place.meshes) - 1}) if place.loss_fn is not None and takers else []
        by_rank, counted = place.planned is not None, "the ranks of a stage"
        numbers = {len(place.meshes[k].ranks) if by_rank else place.meshes[k].num_shards for k in self._ends}
        if not by_rank:
            counted = "the data shards of a stage"
        self._pieces = math.lcm(*numbers) if numbers else 1
        if self._pieces > _MOST_PIECES:
            self._ends = []
        whole = f"pass the same batch on every rank: draw its order from one seed{_OFF}"
        part = f"count {counted} in the sampler (DistributedSampler's num_replicas and rank), not the job's ranks{_OFF}"
        self.texts = {
            _name(side, piece, pieces): f"{side} would meet {others} of other samples: {part if pieces > 1 else whole}"
            for side, others in (("arguments", "targets"), ("targets", "arguments"))
            for pieces in ({1, self._pieces} if self._ends else ())
            for piece in range(pieces)
        }

    def numbers(self, batch: "StepBatch") -> dict[str, int]:
        """What ranks compare; nothing where this rank is given one side alone, or DTensors."""
        stage = next((stage for stage in self._ends if stage in self._place.works), None)
        if stage is None or batch.given[1] is None:
            return {}
        mesh, specs = self._place.meshes[stage], self._place.chunk_specs
        number, at = 1, 0
        if batch.is_sharded:
            number, at = mesh.num_shards, mesh.shard
            if self._place.planned is not None:
                number, at = len(mesh.ranks), sorted(mesh.ranks).index(self._place.transfers.rank)
        pieces = self._pieces if batch.is_sharded else 1
        (args, kwargs), target = batch.given
        try:
            sides = {
                "arguments": _cut(args, specs["args"], "args") + _cut(kwargs, specs["kwargs"], "kwargs"),
                "targets": _cut(target, specs["target"], "target"),
            }
        except ValueError:
            return {}  # of a side that is not read nothing need be right
        sizes = {leaf.size(dim) for leaves in sides.values() for leaf, dim in leaves}
        each = pieces // number
        if not all(sides.values()) or len(sizes) != 1 or min(sizes) % each or pieces % number:
            return {}
        length = min(sizes) // each
        return {
            _name(side, at * each + i, pieces): number_of(
                *(str(number_of_tensor(leaf.narrow(dim, i * length, length))) for leaf, dim in leaves)
            )
            for side, leaves in sides.items()
            for i in range(each)
        }


def _name(side: str, piece: int, pieces: int) -> str:
    return f"{side} of samples {piece} of {pieces}"


def _cut(tree: Any, spec: Any, what: str) -> list[tuple[torch.Tensor, int]]:
    """The tensors that are cut into microbatches, each with the dim. ValueError for what cannot be compared."""
    leaves: Sequence[Any] = pytree.tree_leaves(tree)
    found = []
    for leaf, how in zip(leaves, leaf_specs(tree, spec, what), strict=True):
        if isinstance(leaf, DTensor) or (isinstance(leaf, torch.Tensor) and leaf.layout != torch.strided):
            raise ValueError(f"{what} has a tensor that is not compared")
        if isinstance(leaf, torch.Tensor) and isinstance(how, Chunk):
            found.append((leaf.detach(), how.split_dim % leaf.dim()))
    return found
