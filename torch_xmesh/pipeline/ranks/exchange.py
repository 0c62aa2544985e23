"""What the ranks of a pipeline tell each other in every step, planned once."""

import torch
from torch.distributed.tensor import Partial, Replicate

from torch_xmesh.pipeline.ranks.stage_mesh import StageMesh
from torch_xmesh.pipeline.ranks.transfers import Transfers
from torch_xmesh.plan_cache import Move


class TensorExchange:
    """A tensor that some ranks have and all ranks get, again and again."""

    def __init__(self, transfers: Transfers, lane: str, move: Move) -> None:
        self._transfers = transfers
        self._lane = lane
        self._shape, self._dtype, self._device = move.dst.shape, move.dst.dtype, move.dst_device
        self._plan = transfers.prepare([move])
        self._count = 0

    def exchange(self, mine: torch.Tensor | None) -> torch.Tensor:
        """Everybody's result; `mine` is this rank's part where it is on the source mesh."""
        received = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        traffic = self._transfers.traffic
        sources = [] if mine is None else [mine]
        call = traffic.begin(self._lane, self._count, self._plan, sources, [received])
        self._count += 1
        traffic.wait(call)
        return received


def exchange_of_shards(transfers: Transfers, lane: str, mesh: StageMesh, length: int) -> TensorExchange:
    """Doubles of a stage, summed over its data shards."""
    placements = tuple(
        Partial("sum") if axis == mesh.data_axis else Replicate() for axis in range(len(mesh.grid.shape))
    )
    move = Move.of((length,), torch.float64, (mesh.grid, placements), (transfers.everyone, [Replicate()]))
    return TensorExchange(transfers, lane, move)
