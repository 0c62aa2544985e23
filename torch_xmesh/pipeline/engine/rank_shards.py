"""Batches of which every rank of a planned stage gives an equal part."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils import _pytree as pytree

from torch_xmesh.digests import number_of
from torch_xmesh.pipeline.cut.chunk_specs import Chunk
from torch_xmesh.pipeline.ranks.exchange import TensorExchange
from torch_xmesh.pipeline.ranks.stage_mesh import StageMesh
from torch_xmesh.pipeline.ranks.transfers import Transfers
from torch_xmesh.plan_cache import Move
from torch_xmesh.spec import Mesh


class RankShards:
    """What a planned stage's ranks give with ``sharded=True``: rank after rank, the parts are the batch."""

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._exchanges: dict[str, TensorExchange] = {}

    def shapes(self, tree: Any, specs: Sequence[Any], mesh: StageMesh) -> Any:
        """The whole batch without values, on meta, from this rank's part of it."""
        return _mapped(tree, specs, lambda leaf, dim, _: leaf.new_empty(_whole(leaf, dim, mesh), device="meta"))

    def microbatch(self, whole: Any, specs: Sequence[Any], number: int) -> Any:
        """The first of `number`, of what `shapes` gives."""
        return _mapped(whole, specs, lambda leaf, dim, _: leaf.narrow(dim, 0, leaf.size(dim) // number))

    def gather(self, tree: Any, specs: Sequence[Any], mesh: StageMesh, what: str) -> Any:
        """The whole batch; called by all ranks of the stage, with parts of one shape."""

        def gathered(leaf: torch.Tensor, dim: int, position: int) -> torch.Tensor:
            shape = _whole(leaf, dim, mesh)
            lane = f"{what} {position} {tuple(shape)} {leaf.dtype}"
            if lane not in self._exchanges:
                ranks = Mesh(sorted(mesh.ranks))
                move = Move.of(shape, leaf.dtype, (ranks, [Shard(dim)]), (ranks, [Replicate()]))
                self._exchanges[lane] = TensorExchange(self._transfers, lane, move)
            return self._exchanges[lane].exchange(leaf.detach().contiguous())

        return _mapped(tree, specs, gathered)


def without_parts(tree: Any, specs: Sequence[Any]) -> Any:
    """What all ranks have alike of a batch of which each has a part: leaves that are not cut into microbatches."""
    leaves, structure = pytree.tree_flatten(tree)
    kept = [0 if isinstance(spec, Chunk) else leaf for leaf, spec in zip(leaves, specs, strict=True)]
    return pytree.tree_unflatten(kept, structure)


def number_of_shapes(tree: Any) -> int:
    """A hash of the whole batch's structure, shapes and dtypes, which ranks compare before they gather the batch."""
    leaves, structure = pytree.tree_flatten(tree)
    shapes = (f"{tuple(leaf.shape)} {leaf.dtype}" if isinstance(leaf, torch.Tensor) else "" for leaf in leaves)
    return number_of(str(structure), *shapes)


def _mapped(tree: Any, specs: Sequence[Any], change: Callable[[torch.Tensor, int, int], torch.Tensor]) -> Any:
    """Leaves that are to be cut into microbatches, changed; DTensors are refused."""
    leaves, structure = pytree.tree_flatten(tree)
    for position, (leaf, spec) in enumerate(zip(leaves, specs, strict=True)):
        if isinstance(leaf, DTensor):
            raise ValueError(
                "sharded=True with a plan takes plain tensors, this rank's part of the batch, not DTensors"
            )
        if isinstance(leaf, torch.Tensor) and isinstance(spec, Chunk):
            leaves[position] = change(leaf, spec.split_dim % leaf.dim(), position)
    return pytree.tree_unflatten(leaves, structure)


def _whole(leaf: torch.Tensor, dim: int, mesh: StageMesh) -> torch.Size:
    shape = list(leaf.shape)
    shape[dim] *= len(mesh.ranks)
    return torch.Size(shape)
