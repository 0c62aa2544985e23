"""What a PyTorch user writes today to reshard between meshes, in its best honest form, over plain gloo.

`torch_p2p`: every rank that needs something receives the exact overlaps from their first holder by isend/irecv; all are
in flight at once and what a rank holds itself it copies. `torch_broadcast`: as that, but a part that several ranks need
goes through one asynchronous `dist.broadcast` from its first holder on a sub-group of holder and receivers; the groups
are made before the clock starts.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from parts.resharding.methods import Method, RankData
from parts.resharding.overlaps import Overlap, overlaps, slices_within


class _Rival(Method):
    """Shared by both: which parts exist, where they lie in this rank's tensors, and buffers for those that are not
    contiguous there."""

    def __init__(self, data: RankData, group: dist.ProcessGroup) -> None:
        self._data = data
        self._group = group
        self._parts = overlaps(data.case)

    def _source_view(self, part: Overlap) -> torch.Tensor:
        outer = self._data.src_boxes[part.tensor]
        assert outer is not None
        return self._data.sources[part.tensor][slices_within(part.box, outer)]

    def _out_view(self, part: Overlap) -> torch.Tensor:
        outer = self._data.dst_boxes[part.tensor]
        assert outer is not None
        return self._data.outs[part.tensor][slices_within(part.box, outer)]

    def _landing(self, part: Overlap) -> torch.Tensor:
        """Where the part is received: in place where its place is contiguous, else a buffer."""
        view = self._out_view(part)
        return view if view.is_contiguous() else torch.empty(view.shape, dtype=view.dtype)

    def _finish(self, landed: Sequence[tuple[Overlap, torch.Tensor]]) -> Sequence[torch.Tensor]:
        for part, buffer in landed:
            view = self._out_view(part)
            if view.data_ptr() != buffer.data_ptr():
                view.copy_(buffer)
        return self._data.outs

    def _copy_own(self, part: Overlap) -> None:
        if self._data.rank in part.needers and self._data.rank in part.holders:
            self._out_view(part).copy_(self._source_view(part))


class TorchP2P(_Rival):
    def __init__(self, data: RankData, group: dist.ProcessGroup) -> None:
        super().__init__(data, group)
        self.num_messages = sum(len(set(part.needers) - set(part.holders)) for part in self._parts)

    def run(self) -> Sequence[torch.Tensor]:
        rank = self._data.rank
        works: list[Any] = []
        landed = []
        keep = []
        for part in self._parts:
            receivers = [needer for needer in part.needers if needer not in part.holders]
            if rank in receivers:
                buffer = self._landing(part)
                landed.append((part, buffer))
                works.append(dist.irecv(buffer, part.holders[0], group=self._group))
            elif rank == part.holders[0] and receivers:
                keep.append(self._source_view(part).contiguous())
                works += [dist.isend(keep[-1], receiver, group=self._group) for receiver in receivers]
        for part in self._parts:
            self._copy_own(part)
        for work in works:
            work.wait()
        return self._finish(landed)


class TorchBroadcast(_Rival):
    def __init__(self, data: RankData, group: dist.ProcessGroup) -> None:
        """Makes the sub-groups; all ranks of the cluster call this."""
        super().__init__(data, group)
        self._groups: dict[tuple[int, ...], Any] = {}
        for part in self._parts:
            members = _members(part)
            self.num_messages += len(members) - 1
            if len(members) > 2 and members not in self._groups:
                self._groups[members] = dist.new_group(list(members), backend="gloo")

    def close(self) -> None:
        for members, group in self._groups.items():
            if self._data.rank in members:
                dist.destroy_process_group(group)

    def run(self) -> Sequence[torch.Tensor]:
        rank = self._data.rank
        works: list[Any] = []
        landed = []
        keep = []
        for part in self._parts:
            members = _members(part)
            if rank not in members or len(members) == 1:
                continue
            root = part.holders[0]
            if rank == root:
                keep.append(self._source_view(part).contiguous())
                buffer = keep[-1]
            else:
                buffer = self._landing(part)
                landed.append((part, buffer))
            if len(members) > 2:
                works.append(dist.broadcast(buffer, root, group=self._groups[members], async_op=True))
            elif rank == root:
                works += [dist.isend(buffer, member, group=self._group) for member in members if member != root]
            else:
                works.append(dist.irecv(buffer, root, group=self._group))
        for part in self._parts:
            self._copy_own(part)
        for work in works:
            work.wait()
        return self._finish(landed)


def _members(part: Overlap) -> tuple[int, ...]:
    """The first holder and the ranks that have to receive, ascending."""
    return tuple(sorted({part.holders[0], *(set(part.needers) - set(part.holders))}))


def make_rival(name: str, data: RankData, group: dist.ProcessGroup) -> Method:
    """The rival called `name`; every rank of the cluster must call this in the same order."""
    if name == "torch_p2p":
        return TorchP2P(data, group)
    return TorchBroadcast(data, group)


RIVALS = ("torch_p2p", "torch_broadcast")


def is_rival(name: str) -> bool:
    return name in RIVALS
