"""Whether arguments meet the targets of the same samples, where one rank reads the arguments and another the target."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from torch_xmesh.digests import number_of_tensor
from torch_xmesh.pipeline.cut.chunk_specs import Chunk
from torch_xmesh.pipeline.cut.microbatch import leaf_specs
from torch_xmesh.pipeline.cut.values import ValueName, describe_path

if TYPE_CHECKING:
    from torch_xmesh.pipeline.engine.place import EnginePlace
    from torch_xmesh.pipeline.engine.step_batch import StepBatch

_MOST_PIECES = 1024
_OFF = "; where that is meant, make the engine with compare_batches=False"


class Pairing:
    """Numbers made of targets, by their place in the batch. Ranks of the first stage have some where they are given
    targets: with their arguments, though their stage does not read them. They tell where the last stage's ranks have
    other samples at that place. Arguments that later stages read and the first does not (labels of a model that
    computes its loss) count as targets. What the first stage reads is not compared: it may be augmented at random.
    """

    def __init__(self, place: "EnginePlace") -> None:
        self._place = place
        infos = [info for info in place.partition.inputs.values() if info.stages]
        self._first = min((min(info.stages) for info in infos), default=len(place.meshes) - 1)
        self._readers = {info.name: set(info.stages) for info in infos if self._first not in info.stages}
        self._texts = {info.name: f"argument {describe_path(info.path)}" for info in infos}

    def numbers(self, batch: "StepBatch") -> dict[str, int]:
        """What ranks compare, each by what a person is told who has another."""
        found = {}
        for what, leaf, dim, readers in self._targets(batch):
            own = readers & self._place.works.keys() or {self._first} & self._place.works.keys()
            if not own or self._first in readers:
                continue
            pieces = math.lcm(*(self._num_parts(batch, stage) for stage in {self._first, *readers}))
            each, at = pieces // self._num_parts(batch, min(own)), self._part(batch, min(own))
            if pieces > _MOST_PIECES or leaf.size(dim) % each:
                continue
            length = leaf.size(dim) // each
            for i in range(each):
                where = f" in part {at * each + i + 1} of {pieces} of the batch" if pieces > 1 else ""
                text = f"{what}{where} is of other samples than the arguments that it would meet: {self._advice(batch)}"
                try:
                    found[text] = number_of_tensor(leaf.narrow(dim, i * length, length))
                except RuntimeError:
                    break  # a tensor without values, or of a kind that has none to hash; nobody need read it here
        return found

    def _targets(self, batch: "StepBatch") -> Iterator[tuple[str, torch.Tensor, int, set[int]]]:
        """What it is called, itself, the dim of samples, and the stages that read it."""
        (args, kwargs), target = batch.given
        specs, expected = self._place.chunk_specs, self._place.partition.argument_leaves
        kwargs = dict(sorted(kwargs.items()))
        leaves, cuts = pytree.tree_leaves((args, kwargs)), _cuts(args, specs["args"]) + _cuts(kwargs, specs["kwargs"])
        if len(leaves) == len(cuts) == len(expected):
            for leaf, cut, name in zip(leaves, cuts, expected, strict=True):
                readers = self._readers.get(name.name) if isinstance(name, ValueName) else None
                if readers and _is_comparable(leaf, cut):
                    yield self._texts[name.name], leaf.detach(), cut.split_dim % leaf.dim(), readers
        named, cuts = pytree.tree_flatten_with_path(target)[0], _cuts(target, specs["target"])
        if len(named) == len(cuts):
            for (path, leaf), cut in zip(named, cuts, strict=True):
                if _is_comparable(leaf, cut):
                    last = len(self._place.meshes) - 1
                    yield f"target{pytree.keystr(path)}", leaf.detach(), cut.split_dim % leaf.dim(), {last}

    def _num_parts(self, batch: "StepBatch", stage: int) -> int:
        """Into how many parts a stage's ranks cut the batch."""
        mesh = self._place.meshes[stage]
        return self._place.source.parts.number(mesh) if batch.is_sharded else 1

    def _part(self, batch: "StepBatch", stage: int) -> int:
        """Which of them this rank has, of a stage of its own."""
        return self._place.source.parts.index(self._place.meshes[stage]) if batch.is_sharded else 0

    def _advice(self, batch: "StepBatch") -> str:
        if not batch.is_sharded:
            return f"pass the same batch on every rank, its order drawn from one seed{_OFF}"
        counted = self._place.source.parts.counted
        return f"count the {counted} in the sampler (DistributedSampler's num_replicas and rank), not the job's{_OFF}"


def _cuts(tree: Any, spec: Any) -> list[Any]:
    """Specs of the leaves; none for a tree that is not as they are, which is read by nobody here."""
    try:
        return leaf_specs(tree, spec, "")
    except ValueError:
        return []


def _is_comparable(leaf: Any, cut: Any) -> bool:
    return (
        isinstance(leaf, torch.Tensor)
        and isinstance(cut, Chunk)
        and not isinstance(leaf, DTensor)
        and leaf.layout == torch.strided
        and not (leaf.is_meta or leaf.is_nested or leaf.is_quantized)
    )
