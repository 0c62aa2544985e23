"""Which of the parameters that several ranks hold are trained: found out anew in every step, by all of these ranks."""

from collections.abc import Collection, Sequence

import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate

from torch_xmesh.pipeline.ranks.transfers import Pending, Transfers
from torch_xmesh.plan_cache import Move
from torch_xmesh.spec import Mesh


class TrainedTogether:
    """Parameters of which every rank of a mesh holds a copy: a step sums the gradients of those that all of them train.

    Freezing and unfreezing is the user's, at any time; this keeps ranks that disagree from waiting for each other.
    """

    def __init__(
        self, transfers: Transfers, lane: str, mesh: Mesh, members: Sequence[tuple[str, nn.Parameter]]
    ) -> None:
        self.parameters = [parameter for _, parameter in members]
        self._names = [name for name, _ in members]
        self._transfers = transfers
        self._lane = lane
        self._mesh = mesh
        self._pending: Pending | None = None

    def begin(self, trained: Collection[nn.Parameter]) -> None:
        """Tells the other ranks which parameters are trained here; waits for nobody."""
        mine = torch.tensor([int(parameter in trained) for parameter in self.parameters], device="cpu")
        move = Move.of(mine.shape, mine.dtype, (self._mesh, [Partial("sum")]), (self._mesh, [Replicate()]))
        self._pending = self._transfers.start(self._lane, [move], [mine])

    def end(self) -> tuple[bool, ...]:
        """Whether each parameter is trained.

        Raises:
            ValueError: on all ranks of the mesh, where one is on some of them only.
        """
        assert self._pending is not None
        counts = self._pending.wait()[0].tolist()
        self._pending = None
        for name, count in zip(self._names, counts, strict=True):
            if 0 < count < len(self._mesh.ranks):
                raise ValueError(
                    f"{name} requires grad on {count} of the {len(self._mesh.ranks)} ranks {list(self._mesh.ranks)}: "
                    "freeze or unfreeze it on all of them in the same step"
                )
        return tuple(count > 0 for count in counts)
