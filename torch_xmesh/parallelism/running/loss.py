"""The loss outside of the model: each device of the last stage computes that of its samples."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torch_xmesh.parallelism.conversions import AxisMove
from torch_xmesh.parallelism.loops import REPLICATED, State
from torch_xmesh.parallelism.running.collectives import Moves
from torch_xmesh.pipeline.cut.chunk_specs import Chunk


class LossShares:
    """What a device of the last stage has of targets, losses and outputs.

    Args:
        states: how the stage leaves its outputs: along axes that shard one's first dim samples are shared out.
    """

    def __init__(self, moves: Moves, states: Sequence[State]) -> None:
        self._moves = moves
        self._axes = tuple(axis for axis in range(len(moves.shape)) if any(state[axis] == 0 for state in states))
        self._has_samples = tuple(0 in state for state in states)

    @property
    def number(self) -> int:
        """Parts of a microbatch's samples."""
        out = 1
        for axis in self._axes:
            out *= self._moves.shape[axis]
        return out

    def targets(self, targets: Sequence[Any], specs: Sequence[Any]) -> list[Any]:
        """Those of this device's samples, of each microbatch."""

        def part(leaf: Any, spec: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or not isinstance(spec, Chunk):
                return leaf
            for axis in self._axes:
                leaf = leaf.chunk(self._moves.shape[axis], spec.split_dim)[self._moves.coordinate[axis]]
            return leaf

        out = []
        for target in targets:
            leaves, structure = pytree.tree_flatten(target)
            parts = [part(leaf, spec) for leaf, spec in zip(leaves, specs, strict=True)]
            out.append(pytree.tree_unflatten(parts, structure))
        return out

    def total(self, losses: torch.Tensor) -> torch.Tensor:
        """The sum of all devices' losses, written into `losses`."""
        for axis in self._axes:
            self._moves.add_up(losses, axis)
        return losses

    @torch.no_grad()
    def gather(self, outputs: Mapping[int, dict[str, torch.Tensor]]) -> None:
        """Puts the samples of all devices where this device's are: by microbatch, the stage's outputs in order."""
        steps = [AxisMove(axis, 0, REPLICATED) for axis in reversed(self._axes)]
        for microbatch in sorted(outputs):
            for (name, part), has_some in zip(list(outputs[microbatch].items()), self._has_samples, strict=True):
                if has_some:
                    outputs[microbatch][name] = self._moves.run(part, steps, name, "output")
