"""Every copy of a parameter or buffer starts from the same values: those of the first rank that holds one."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from torch_xmesh.digests import checksum, digest_of
from torch_xmesh.pipeline.ranks.dtensors import slice_of, spanned_axes
from torch_xmesh.pipeline.ranks.stage_mesh import StageMesh
from torch_xmesh.pipeline.ranks.transfers import Transfers
from torch_xmesh.pipeline.state.gradient_sync import GradientSync, local_of, plain_name
from torch_xmesh.plan_cache import Move
from torch_xmesh.spec import Mesh

_BUCKET_BYTES = 25 << 20
InitSync = bool | str


def check_option(given: InitSync) -> None:
    """Raises ValueError for what is no value of the engine's `init_sync`."""
    if given is not True and given is not False and given != "check":
        raise ValueError(f'init_sync is True (broadcast), "check" (compare) or False, got {given!r}')


@dataclasses.dataclass(frozen=True)
class Copy:
    """A tensor that other ranks have too.

    Attributes:
        name: the same on all of them.
        local: this rank's memory.
        ranks: those that have it, in one order; the first one's values count.
    """

    name: str
    local: torch.Tensor
    ranks: tuple[int, ...]

    @property
    def kind(self) -> str:
        return f"a {self.local.dtype} tensor of shape {list(self.local.shape)}"


def copies_on_mesh(stage: int, module: nn.Module, mesh: StageMesh) -> list[Copy]:
    """The plain tensors of a stage that no `parallelize` has seen yet: equal on its whole mesh."""
    found = _tensors_of(module)
    return [Copy(_named(stage, name), tensor, mesh.ranks) for name, tensor in found if not isinstance(tensor, DTensor)]


def copies_of_parts(stage: int, module: nn.Module, mesh: StageMesh) -> list[Copy]:
    """The tensors of a stage as it trains: a plain one is equal over the data axis (over the others it may be a shard
    that the module makes itself), a DTensor where it is replicated."""
    found = []
    for name, tensor in _tensors_of(module):
        ranks = _ranks_of_part(tensor, mesh)
        if len(ranks) > 1:
            found.append(Copy(_named(stage, name), local_of(tensor), ranks))
    return found


def _tensors_of(module: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if not tensor.is_meta:
            yield plain_name(name), tensor.detach()


def _named(stage: int, name: str) -> str:
    return f"{name} of stage {stage}"


def _ranks_of_part(tensor: torch.Tensor, mesh: StageMesh) -> tuple[int, ...]:
    copied = set(mesh.data_axes)
    if isinstance(tensor, DTensor):
        axes = spanned_axes(mesh, tensor.device_mesh)
        if axes is None:
            return (mesh.rank,)
        replicated = (isinstance(placement, Replicate) for placement in tensor.placements)
        copied = (copied - set(axes)) | {axis for axis, is_copy in zip(axes, replicated, strict=True) if is_copy}
    return slice_of(mesh, sorted(copied)).ranks


def make_equal(transfers: Transfers, copies: Sequence[Copy], mode: InitSync) -> None:
    """Compares the copies of all ranks by checksum, and gives those that differ the values of their first rank.

    Called by all ranks of the pipeline. Nothing but checksums moves where all are equal.

    Raises:
        ValueError: on all ranks that hold it, a tensor that is there with another shape or dtype, or, with
            mode="check", with other values.
    """
    mine: dict[tuple[int, ...], dict[str, tuple[str, bytes]]] = {}
    for copy in copies if mode is not False else ():
        mine.setdefault(copy.ranks, {})[copy.name] = (copy.kind, checksum(copy.local))
    sums = {} if mode is False else {ranks: digest_of(repr(sorted(found.items()))) for ranks, found in mine.items()}
    told = {}
    for rank, (other, found) in _gather(transfers, "init/sums", (mode, sums)).items():
        if other != mode:
            raise ValueError(f"init_sync is {mode!r} on rank {transfers.rank} and {other!r} on rank {rank}")
        told[rank] = found
    odd = {ranks for by_ranks in told.values() for ranks in by_ranks if len({told[r].get(ranks) for r in ranks}) > 1}
    if not odd:
        return
    details = _gather(transfers, "init/details", {ranks: mine[ranks] for ranks in odd if ranks in mine})
    differing = {ranks: _compare(ranks, {r: details[r].get(ranks, {}) for r in ranks}, mode) for ranks in sorted(odd)}
    for ranks, names in differing.items():
        if transfers.rank in ranks:
            held = {copy.name: copy.local for copy in copies if copy.ranks == ranks}
            _broadcast(transfers, ranks, [(name, held[name]) for name in names])


def make_ties_equal(transfers: Transfers, sync: GradientSync, mode: InitSync) -> None:
    """Gives every copy of a tied parameter the values that its first stage has; "check" compares.

    Raises:
        ValueError: with mode="check", on the ranks that have other values.
    """
    for tie in sync.tied if mode is not False else ():
        stage, owner = tie.holders[0]
        for number, (other, mesh) in enumerate(tie.holders[1:], 1):
            if transfers.rank not in (*owner.ranks, *mesh.ranks) or tie.parameter is None:
                continue
            mine = local_of(tie.parameter.detach())
            sent = [mine] if transfers.rank in owner.ranks else []
            received = transfers.start(f"init/tied/{tie.name}/{other}", [sync.tied_move(tie, 0, number)], sent).wait()
            if transfers.rank not in mesh.ranks or checksum(received[0]) == checksum(mine):
                continue
            if mode == "check":
                raise ValueError(
                    f"tied parameter {tie.name} has other values on stage {other}, rank {transfers.rank}, than on "
                    f"stage {stage}: seed alike before the engine is made, or let init_sync=True broadcast them"
                )
            mine.copy_(received[0].view(mine.shape))


def _gather(transfers: Transfers, lane: str, mine: Any) -> Mapping[int, Any]:
    return dict(zip(transfers.ranks, transfers.gather(lane, mine), strict=True))


def _compare(ranks: tuple[int, ...], found: Mapping[int, Mapping[str, tuple[str, str]]], mode: InitSync) -> list[str]:
    """The names of the tensors that differ between ranks."""
    first = found[ranks[0]]
    names = []
    for rank in ranks[1:]:
        other = found[rank]
        for name in (*first, *other):
            kinds = [told[name][0] if name in told else "nothing" for told in (first, other)]
            if kinds[0] != kinds[1]:
                raise ValueError(
                    f"ranks disagree on the model: {name} is {kinds[0]} on rank {ranks[0]}, {kinds[1]} on rank {rank}"
                )
            if first[name][1] != other[name][1]:
                if mode == "check":
                    raise ValueError(
                        f"{name} has other values on rank {rank} than on rank {ranks[0]}: seed alike or load the same "
                        "checkpoint before the engine is made, or let init_sync=True broadcast them"
                    )
                names.append(name)
    return list(dict.fromkeys(names))


def _broadcast(transfers: Transfers, ranks: tuple[int, ...], held: Sequence[tuple[str, torch.Tensor]]) -> None:
    everywhere = (Replicate(),)
    is_first = transfers.rank == ranks[0]
    start = 0
    while start < len(held):
        end, filled = start, 0
        while end < len(held) and (end == start or filled < _BUCKET_BYTES):
            filled += held[end][1].numel() * held[end][1].element_size()
            end += 1
        tensors = [tensor for _, tensor in held[start:end]]
        moves = []
        for tensor in tensors:
            src, dst = (Mesh(list(part), device_type=tensor.device.type) for part in (ranks[:1], ranks[1:]))
            moves.append(Move.of(tensor.shape, tensor.dtype, (src, everywhere), (dst, everywhere)))
        received = transfers.start("init/values", moves, tensors if is_first else []).wait()
        if not is_first:
            for tensor, value in zip(tensors, received, strict=True):
                tensor.copy_(value.view(tensor.shape))
        start = end
