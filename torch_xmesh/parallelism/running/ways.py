"""How a value comes from one sharding to another on a device, and its gradient back."""

import dataclasses

import torch

from torch_xmesh.parallelism.conversions import AxisMove
from torch_xmesh.parallelism.running.collectives import Moved, Moves


@dataclasses.dataclass(frozen=True)
class Way:
    """The moves of one value.

    Attributes:
        has_gradient: somebody wants it.
    """

    name: str
    there: tuple[AxisMove, ...] = ()
    back: tuple[AxisMove, ...] = ()
    has_gradient: bool = False

    def moved(self, part: torch.Tensor, moves: Moves) -> torch.Tensor:
        """The device's part afterwards."""
        if not self.there and not self.back:
            return part
        if self.has_gradient and torch.is_grad_enabled():
            out: torch.Tensor = Moved.apply(part, moves, self.there, self.back, self.name)  # type: ignore[no-untyped-call]
            return out
        return moves.run(part.detach(), self.there, self.name, "forward")
