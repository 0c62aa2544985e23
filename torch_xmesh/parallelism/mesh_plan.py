"""A model's sharding on one mesh, as a person reads it."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import nn

from torch_xmesh.parallelism.loops import WHOLE
from torch_xmesh.parallelism.operators import forward_of
from torch_xmesh.parallelism.search import Links, Sharded, shard


@dataclasses.dataclass(frozen=True)
class MeshPlan:
    """The cheapest sharding of a model on a mesh; printed, it says what is sharded how, and what that costs."""

    title: str
    mesh_shape: tuple[int, ...]
    sharded: Sharded

    def __str__(self) -> str:
        operators, choices = self.sharded.operators, self.sharded.choices
        width = max((len(operator.name) for operator in operators), default=0)
        lines = [f"{self.title} on {' x '.join(map(str, self.mesh_shape))} devices, cost {self.sharded.cost:.6g}"]
        lines += [
            f"  {operator.name:{width}}  {_described(choice.axes, operator.makes[0].shape)}"
            for operator, choice in zip(operators, choices, strict=True)
        ]
        lines += ["collectives of a step", *(f"  {line}" for line in self._collectives())]

        held = self.sharded.bytes
        whole = sum(value.num_bytes for value, _ in self.sharded.parameters.values())
        lines.append(f"parameters {held.parameters / 2**20:.2f} MiB a device of {whole / 2**20:.2f} MiB")
        unknown = Counter(operator.kind for operator in operators if not operator.is_known and not operator.is_constant)
        if unknown:
            counted = ", ".join(f"{kind} ({count})" for kind, count in sorted(unknown.items()))
            lines.append(f"operators without a row, which every device computes whole: {counted}")
        return "\n".join(lines)

    def _collectives(self) -> list[str]:
        found: dict[tuple[str, str, int], list[float]] = {}
        for use in self.sharded.collectives:
            found.setdefault((use.why, use.collective, use.axis), []).append(use.num_bytes)
        return [
            f"{why:8}  {collective:14}  axis {axis}  {len(sizes):4} times  {sum(sizes) / 2**20:10.3f} MiB"
            for (why, collective, axis), sizes in sorted(found.items())
        ] or ["none"]


def _described(axes: Sequence[str], shape: Sequence[int]) -> str:
    """What each mesh axis does with the operator's loops."""
    parts = [f"axis {axis}: {'whole' if label == WHOLE else label}" for axis, label in enumerate(axes)]
    return f"{', '.join(parts):32}  {list(shape)}"


def plan_on_mesh(
    model: nn.Module, args: Sequence[Any], axes: Sequence[Links], *, collectives: str = "ring"
) -> MeshPlan:
    """The cheapest sharding of a model on one mesh.

    Args:
        model: any module, on any device, on meta too.
        args: an example of its arguments, as large as one step's.
        axes: of the mesh, one or two: (devices, latency of a message, what a byte takes).
        collectives: the cost model.

    Raises:
        ValueError: the model cannot be recorded, an unknown cost model, or a mesh of more axes.
    """
    if not 1 <= len(axes) <= 2:
        raise ValueError(f"a mesh of one or two axes, got {len(axes)}")
    sharded = shard(forward_of(model, args), axes, collectives)
    return MeshPlan(type(model).__name__, tuple(size for size, _, _ in axes), sharded)
