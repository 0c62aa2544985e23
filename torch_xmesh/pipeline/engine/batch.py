"""A step's arguments on one rank: how many samples they hold, and each stage's part of each microbatch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.utils import _pytree as pytree

from torch_xmesh.devices import has_pinned_memory
from torch_xmesh.pipeline.cut.chunk_specs import Chunk
from torch_xmesh.pipeline.cut.microbatch import common_size, shard_sizes
from torch_xmesh.pipeline.cut.partition import Partition
from torch_xmesh.pipeline.cut.values import ValueName
from torch_xmesh.pipeline.engine.sample_order import SampleOrder
from torch_xmesh.pipeline.ranks.stage_mesh import StageMesh
from torch_xmesh.spec import mesh_grid, wrap_local


def num_samples(tree: Any, specs: Sequence[Any], what: str) -> int | None:
    """Samples in a tree of arguments, None where nothing of it is to cut; messages call its leaves `what`.

    Raises:
        ValueError: its tensors disagree.
    """
    return common_size(tree, specs, what) if specs else None


def as_shards(tree: Any, specs: Sequence[Any], meshes: Sequence[StageMesh], what: str) -> Any:
    """Plain tensors that are this rank's data shard as DTensors, where they are to be cut into microbatches and the
    stages that take them, on `meshes`, have several data shards. All shards have equally many samples.

    Raises:
        ValueError: the stages have other data shards than each other.
    """
    cut = list(dict.fromkeys(mesh for mesh in meshes if mesh.num_shards > 1))
    if not cut:
        return tree
    if len({(mesh.whole, mesh.data_axes) for mesh in cut}) > 1 or len(cut) < len(set(meshes)):
        raise ValueError(f"{what} is read by stages with other data shards than each other: pass DTensors")
    mesh = cut[0]
    on = mesh.device_mesh
    leaves, structure = pytree.tree_flatten(tree)
    for position, (leaf, spec) in enumerate(zip(leaves, specs, strict=True)):
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor) and isinstance(spec, Chunk):
            dim = spec.split_dim % leaf.dim()
            shape = list(leaf.shape)
            shape[dim] *= mesh.num_shards
            leaves[position] = wrap_local(leaf, torch.Size(shape), on, _batch_placements(mesh, dim))
    return pytree.tree_unflatten(leaves, structure)


def num_batch_shards(tree: Any, specs: Sequence[Any], mesh: StageMesh, what: str) -> int | None:
    """Into how many shards the DTensors of a tree are cut that are to be cut into microbatches; None if none is.

    Raises:
        ValueError: a DTensor that lies otherwise than the stage's batch.
    """
    for position, (leaf, spec) in enumerate(zip(pytree.tree_leaves(tree), specs, strict=True)):
        if isinstance(leaf, DTensor) and isinstance(spec, Chunk):
            _check_placed(leaf, spec.split_dim, mesh, f"{what}, tensor {position}")
            if mesh.num_shards > 1:
                return mesh.num_shards
    return None


def local_microbatches(tree: Any, specs: Sequence[Any], *, order: SampleOrder, mesh: StageMesh, what: str) -> list[Any]:
    """This rank's data shard of every microbatch of `tree`, one tree per microbatch; views of the tensors given, where
    they can be.

    A plain tensor is the whole batch, in its samples' order; a DTensor is sharded as the stage's batch.

    Raises:
        ValueError: a DTensor that lies otherwise than the stage's batch.
    """
    columns, structure = microbatch_columns(tree, specs, order=order, mesh=mesh, what=what)
    return [pytree.tree_unflatten([column[i] for column in columns], structure) for i in range(len(order.sizes))]


def microbatch_columns(
    tree: Any, specs: Sequence[Any], *, order: SampleOrder, mesh: StageMesh, what: str
) -> tuple[list[Sequence[Any]], pytree.TreeSpec]:
    """What `local_microbatches` cuts, by leaf: its part of every microbatch; and the structure of the leaves."""
    leaves, structure = pytree.tree_flatten(tree)
    columns: list[Sequence[Any]] = []
    for position, (leaf, spec) in enumerate(zip(leaves, specs, strict=True)):
        where = f"{what}, tensor {position}"
        if not isinstance(spec, Chunk):
            whole = leaf.full_tensor() if isinstance(leaf, DTensor) else leaf
            one = _on(mesh, [whole.detach()]) if isinstance(whole, torch.Tensor) else [whole]
            columns.append([*one] * len(order.sizes))
        elif not isinstance(leaf, DTensor):
            columns.append(_on(mesh, _shards_of_whole(leaf, spec.split_dim, order=order, mesh=mesh, what=where)))
        elif mesh.num_shards == 1:
            whole = leaf.to_local()
            columns.append(_on(mesh, _shards_of_whole(whole, spec.split_dim, order=order, mesh=mesh, what=where)))
        else:
            columns.append(_on(mesh, _shards_of_dtensor(leaf, spec.split_dim, order=order, mesh=mesh, what=where)))
    return columns, structure


def model_inputs(
    partition: Partition,
    stage: int,
    *,
    columns: Sequence[Sequence[Any]],
    structure: pytree.TreeSpec,
    sizes: Sequence[int],
) -> list[list[torch.Tensor]]:
    """By microbatch, the model's inputs that a stage takes, in its order; checked once for each size of microbatch.

    Raises:
        ValueError: arguments that are not like the example's, their sizes apart.
    """
    for size in dict.fromkeys(sizes):
        first = sizes.index(size)
        partition.bind_leaves([column[first] for column in columns], structure, stage, any_size=True)
    names = [leaf.name if isinstance(leaf, ValueName) else None for leaf in partition.argument_leaves]
    chosen = [columns[names.index(name)] for name in partition.stages[stage].model_inputs]
    return [list(parts) for parts in zip(*chosen, strict=True)]


def _on(mesh: StageMesh, parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """On the stage's device: batches come from anywhere. Once this returns the caller may write to the batch.

    The host waits for the device that a batch comes from, and not for the one that it goes to, which may have work of
    the last step, or of one whose peer is lost, before it.
    """
    if not parts or parts[0].device == mesh.device:
        return parts
    if parts[0].is_cpu and has_pinned_memory(mesh.device.type):
        pinned = [torch.empty_like(part, device="cpu", pin_memory=True).copy_(part) for part in parts]
        return [part.to(mesh.device, non_blocking=True) for part in pinned]
    return [part.to(mesh.device) for part in parts]


def _shards_of_whole(
    tensor: torch.Tensor, dim: int, *, order: SampleOrder, mesh: StageMesh, what: str
) -> Sequence[torch.Tensor]:
    if tensor.size(dim) != sum(order.sizes):
        raise ValueError(f"{what} has {tensor.size(dim)} samples along dim {dim}, expected {sum(order.sizes)}")
    tensor, num_shards = tensor.detach(), mesh.num_shards
    if order.num_shards == 1:
        if num_shards == 1:
            return torch.split(tensor, list(order.sizes), dim)
        parts = [part for size in order.sizes for part in shard_sizes(size, num_shards)]
        return torch.split(tensor, parts, dim)[mesh.shard :: num_shards]
    found = []
    for microbatch, size in enumerate(order.sizes):
        shards = shard_sizes(size, num_shards)
        begin = sum(shards[: mesh.shard])
        found.append(order.part(tensor, dim, microbatch=microbatch, begin=begin, end=begin + shards[mesh.shard]))
    return found


def _batch_placements(mesh: StageMesh, dim: int) -> tuple[Placement, ...]:
    return tuple(Shard(dim) if axis in mesh.data_axes else Replicate() for axis in range(len(mesh.whole.shape)))


def _check_placed(tensor: DTensor, dim: int, mesh: StageMesh, what: str) -> None:
    expected = _batch_placements(mesh, dim % tensor.dim())
    if mesh_grid(tensor.device_mesh) != mesh.whole or tuple(tensor.placements) != expected:
        raise ValueError(
            f"{what} is a DTensor on {mesh_grid(tensor.device_mesh)} as {tuple(tensor.placements)}, "
            f"expected {expected} on the stage's {mesh.whole}"
        )


def _shards_of_dtensor(
    tensor: DTensor, dim: int, *, order: SampleOrder, mesh: StageMesh, what: str
) -> list[torch.Tensor]:
    _check_placed(tensor, dim, mesh, what)
    mine = [shard_sizes(size, mesh.num_shards)[mesh.shard] for size in order.sizes]
    local = tensor.to_local().detach()
    if local.size(dim) != sum(mine):
        raise ValueError(
            f"{what} has {local.size(dim)} samples in data shard {mesh.shard}, which microbatches of "
            f"{list(order.sizes)} samples would cut into {mine}: pass a batch whose shards divide evenly into "
            "microbatches"
        )
    return list(torch.split(local, mine, dim))
