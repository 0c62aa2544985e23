"""What a step leaves on the data shards, made one: the model's output for the whole batch, and the buffers."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.utils import _pytree as pytree

from torch_xmesh.pipeline.cut.chunk_specs import Chunk
from torch_xmesh.pipeline.cut.microbatch import merge_outputs, output_specs, shard_sizes
from torch_xmesh.pipeline.cut.partition import Partition, ValueInfo
from torch_xmesh.pipeline.cut.values import ValueName
from torch_xmesh.pipeline.engine.sample_order import SampleOrder
from torch_xmesh.pipeline.ranks.stage_mesh import StageMesh
from torch_xmesh.pipeline.ranks.transfers import Pending, Transfers
from torch_xmesh.pipeline.state.gradient_sync import local_of
from torch_xmesh.plan_cache import Move
from torch_xmesh.spec import Mesh


def whole_outputs(
    transfers: Transfers,
    partition: Partition,
    *,
    meshes: Sequence[StageMesh],
    order: SampleOrder,
    outputs: Mapping[int, Mapping[str, torch.Tensor]],
    merge_spec: Any,
) -> Any:
    """The model's output for the whole batch, on every rank of the last stage.

    Args:
        order: the samples of each microbatch.
        outputs: this rank's output values by microbatch and name; a microbatch of which it has no sample is missing.
        merge_spec: as for `merge_outputs`, which merges data shards as it merges microbatches.
    """
    last, sizes = meshes[-1], order.sizes
    infos = [_as_made(partition.values[name], meshes) for name in partition.outputs.names]
    moving = [info for info in infos if info.batch_dim is not None or info.varies] if last.num_shards > 1 else []
    pending: list[Pending | None] = []
    for microbatch, size in enumerate(sizes):
        mine = outputs.get(microbatch, {})
        moves = [_to_whole(info, last, size) for info in moving]
        pending.append(
            transfers.start("outputs", moves, [_part(info, mine, last, size) for info in moving]) if moves else None
        )
    trees: list[Any] = []
    for microbatch, size in enumerate(sizes):
        values = dict(outputs.get(microbatch, {}))
        transfer = pending[microbatch]
        if transfer is not None:
            values.update(zip((info.name for info in moving), transfer.wait(), strict=True))
        if any(info.varies for info in moving):
            trees.extend(partition.outputs.unflatten(part) for part in _by_shard(infos, values, last, size))
        else:
            trees.append(partition.outputs.unflatten(values))
    merged = merge_outputs(trees, merge_spec)
    return (
        merged
        if order.num_shards == 1
        else _in_batch_order(merged, example=trees[0], partition=partition, merge_spec=merge_spec, order=order)
    )


def _in_batch_order(merged: Any, *, example: Any, partition: Partition, merge_spec: Any, order: SampleOrder) -> Any:
    """Puts the samples of what was concatenated along its batch dim where the batch has them."""
    leaves, structure = pytree.tree_flatten(merged)
    specs = output_specs(example, merge_spec)
    for position, (spec, leaf) in enumerate(zip(specs, partition.outputs.leaves, strict=True)):
        dim = partition.values[leaf.name].batch_dim if isinstance(leaf, ValueName) else None
        if dim is not None and isinstance(spec, Chunk) and spec.split_dim % leaves[position].dim() == dim:
            leaves[position] = order.restored(leaves[position], dim)
    return pytree.tree_unflatten(leaves, structure)


def _as_made(info: ValueInfo, meshes: Sequence[StageMesh]) -> ValueInfo:
    """A value that a stage without data shards made is the same on all shards of the last stage."""
    is_one = info.producer is None or meshes[info.producer].num_shards == 1
    return dataclasses.replace(info, varies=False) if is_one else info


def _to_whole(info: ValueInfo, last: StageMesh, num_samples: int) -> Move:
    everywhere = (Replicate(),) * len(last.grid.shape)
    shape = last.global_shape(info, num_samples)
    return Move.of(shape, info.dtype, (last.values_grid, last.placements(info)), (last.values_grid, everywhere))


def _part(info: ValueInfo, mine: Mapping[str, torch.Tensor], last: StageMesh, num_samples: int) -> torch.Tensor:
    if info.name in mine:
        if mine[info.name].dtype != info.dtype:
            raise ValueError(
                f"output {info.name} has dtype {mine[info.name].dtype}, expected {info.dtype} as the model gives it: "
                "convert it back where it was changed since the engine was made"
            )
        return mine[info.name].unsqueeze(0) if info.varies else mine[info.name]
    shape = (1, *last.global_shape(info, num_samples)[1:]) if info.varies else info.shape_for(0)
    return torch.zeros(shape, dtype=info.dtype, device=last.device)


def _by_shard(
    infos: Sequence[ValueInfo], values: Mapping[str, torch.Tensor], last: StageMesh, num_samples: int
) -> list[dict[str, torch.Tensor]]:
    """Whole values as each data shard had them."""
    samples = shard_sizes(num_samples, last.num_shards)
    parts: list[dict[str, torch.Tensor]] = [{} for _ in samples]
    for info in infos:
        value = values[info.name]
        if info.varies:
            pieces: Sequence[torch.Tensor] = value.unbind(0)
        elif info.batch_dim is not None:
            pieces = torch.split(value, [info.shape_for(n)[info.batch_dim] for n in samples], info.batch_dim)
        else:
            pieces = [value] * len(samples)
        for part, piece in zip(parts, pieces, strict=True):
            part[info.name] = piece
    return [part for part, n in zip(parts, samples, strict=True) if n > 0]


class BufferSync:
    """Gives every data shard the buffers that data shard 0 has after a step (batch norm's running statistics), as
    DistributedDataParallel does with ``broadcast_buffers=True``.

    Shard 0 tells which modules' buffers changed; only those are sent.
    """

    def __init__(self, transfers: Transfers, modules: Mapping[int, nn.Module], meshes: Sequence[StageMesh]) -> None:
        self._transfers = transfers
        self._owners: list[tuple[int, StageMesh, list[nn.Module]]] = []
        seen: set[int] = set()
        for stage, module in sorted(modules.items()):
            by_name = sorted(module.named_modules(), key=lambda item: item[0])
            owners = [owner for _, owner in by_name if _own_buffers(owner) and id(owner) not in seen]
            seen.update(map(id, owners))
            if owners and meshes[stage].num_shards > 1:
                self._owners.append((stage, meshes[stage], owners))
        self._seen = {stage: [_stamp(owner) for owner in owners] for stage, _, owners in self._owners}

    def run(self) -> None:
        """Called by all ranks after a step."""
        told = []
        for stage, mesh, owners in self._owners:
            stamps = [_stamp(owner) for owner in owners]
            pairs = zip(owners, stamps, self._seen[stage], strict=True)
            changed = [stamp != old or _hides_changes(owner) for owner, stamp, old in pairs]
            move = _from_first(mesh, (len(owners),), torch.uint8, "cpu")
            flags = [torch.tensor(changed, dtype=torch.uint8, device="cpu")] if mesh.shard == 0 else []
            told.append(self._transfers.start(f"buffers/{stage}/changed", [move], flags))
        started = []
        for (stage, mesh, owners), flags_there in zip(self._owners, told, strict=True):
            flags_now = flags_there.wait()[0].tolist()
            buffers = [b for owner, flag in zip(owners, flags_now, strict=True) if flag for b in _own_buffers(owner)]
            if buffers:
                moves = [_from_first(mesh, tuple(b.shape), b.dtype, b.device.type) for b in buffers]
                mine = buffers if mesh.shard == 0 else []
                started.append((mesh, buffers, self._transfers.start(f"buffers/{stage}", moves, mine)))
        for mesh, buffers, pending in started:
            received = pending.wait()
            if mesh.shard != 0:
                for buffer, value in zip(buffers, received, strict=True):
                    buffer.copy_(value.view(buffer.shape))
        self._seen = {stage: [_stamp(owner) for owner in owners] for stage, _, owners in self._owners}


def _from_first(mesh: StageMesh, shape: tuple[int, ...], dtype: torch.dtype, kind: str) -> Move:
    line, everywhere = Mesh(mesh.line, device_type=kind), (Replicate(),)
    return Move.of(shape, dtype, (Mesh([line.ranks[0]], device_type=kind), everywhere), (line, everywhere))


def _own_buffers(module: nn.Module) -> list[torch.Tensor]:
    """The local tensors of a module's own buffers, by name."""
    found = [local_of(b).detach() for _, b in sorted(module._buffers.items()) if b is not None]
    return [b for b in found if not b.is_meta]


def _stamp(module: nn.Module) -> list[tuple[int, int]]:
    """Changes when a buffer of the module is changed in place or replaced."""
    held = [b for b in module._buffers.values() if b is not None and not b.is_inference()]
    return [(id(b), b._version) for b in held]


def _hides_changes(module: nn.Module) -> bool:
    """Whether the module's buffers may change without a new version: batch norm's kernels write them unseen."""
    return module.training and module._buffers.get("running_mean") is not None
