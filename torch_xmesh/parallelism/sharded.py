"""What was found: operators, each with a choice."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from torch_xmesh.parallelism.loops import Choice, End, State
from torch_xmesh.parallelism.memory import Bytes, Kept
from torch_xmesh.parallelism.objective import Seconds
from torch_xmesh.parallelism.operators import Operator, Value
from torch_xmesh.parallelism.space import Array, CollectiveUse, Numbers

if TYPE_CHECKING:
    from torch_xmesh.parallelism.graph import ShardingGraph


@dataclasses.dataclass(frozen=True)
class InParts:
    """What changes for a parameter that is held in parts: see zero.py.

    Attributes:
        state: how the parts lie.
        collectives: instead of the sum of its gradient; the value's name is left open.
        seconds, cost, bytes: more than without; some are less.
    """

    level: int
    state: State
    collectives: tuple[CollectiveUse, ...]
    seconds: Seconds
    cost: float
    bytes: Bytes


@dataclasses.dataclass(frozen=True, eq=False)
class Sharded:
    """Operators, each with the choice that was found for it. What else there is to know follows from the choices, and
    is looked up where it is asked for.

    Attributes:
        graph: the graph for whose nodes choices were found.
        chosen: a choice for each node.
        bytes: what a device holds.
        cost: the objective's, without prices of memory.
        in_parts: parameters in parts, by name.
        is_exact: at the prices at which it was found no other costs less.
    """

    graph: "ShardingGraph"
    chosen: tuple[int, ...]
    bytes: Bytes
    cost: float
    in_parts: Mapping[str, InParts] = dataclasses.field(default_factory=dict)
    is_exact: bool = True

    @property
    def operators(self) -> tuple[Operator, ...]:
        return self.graph.stretch.operators

    @property
    def kept(self) -> tuple[Kept, ...]:
        """What backward needs."""
        return self.graph.stretch.kept

    @functools.cached_property
    def choices(self) -> tuple[Choice, ...]:
        """By operator."""
        return self.graph.choices_of(self.chosen)

    @functools.cached_property
    def parameters(self) -> dict[str, tuple[Value, State]]:
        """How each that the operators read is kept, by name."""
        return {name: (value, end.value) for name, (value, end) in self.graph.parameter_ends(self.chosen).items()}

    @functools.cached_property
    def gradients(self) -> dict[str, State]:
        """How those of trained parameters are made, by name; along axes where they are in summands and the parameter is
        not they are added up, once a step."""
        ends = self.graph.parameter_ends(self.chosen)
        return {name: end.gradient for name, (value, end) in ends.items() if value.is_trained}

    @functools.cached_property
    def entering(self) -> dict[Value, State]:
        """How values that others make are taken from these; their gradients are sent back so too."""
        return self.graph.entering(self.chosen)

    @functools.cached_property
    def leaving(self) -> dict[Value, State]:
        """How values are left for others."""
        return self.graph.leaving(self.chosen)

    @functools.cached_property
    def held(self) -> tuple[tuple[str, Value, End], ...]:
        """Values that have a node of their own: why, and how they are held."""
        return self.graph.held(self.chosen)

    @functools.cached_property
    def collectives(self) -> tuple[CollectiveUse, ...]:
        """That they run."""
        own = [
            use
            for use in self.graph.collectives(self.chosen)
            if not (use.why == "gradient" and use.value in self.in_parts)
        ]
        for name, parts in self.in_parts.items():
            own += [dataclasses.replace(use, value=name) for use in parts.collectives]
        return tuple(own)

    @functools.cached_property
    def again(self) -> dict[int, tuple[Numbers, Array]]:
        """By checkpoint what a device holds while backward computes it anew: operators, and bytes. Parameters that are
        in parts at all times are whole there."""
        out = self.graph.again_bytes(self.chosen)
        for (checkpoint, name), (number, value) in self.graph.stretch.read_in_checkpoints.items():
            if name in self.in_parts and self.in_parts[name].level == 3:
                num_bytes = value.num_bytes / self.graph.space.num_parts(self.parameters[name][1])
                operators, num_bytes_of = out.get(checkpoint, (np.zeros(0, np.int64), np.zeros(0)))
                out[checkpoint] = np.append(operators, number), np.append(num_bytes_of, num_bytes)
        return out

    @property
    def again_bytes(self) -> float:
        """Bytes that a device holds while backward computes a checkpoint anew, for the largest checkpoint; 0 without
        any."""
        return max((math.fsum(num_bytes) for _, num_bytes in self.again.values()), default=0.0)

    @functools.cached_property
    def spent(self) -> tuple[Seconds, ...]:
        """What each operator spends, with what brings it its tensors; on parameters their first reader."""
        out = self.graph.spent(self.chosen)
        for name, parts in self.in_parts.items():
            out[self.graph.stretch.parameters[name][1]] += parts.seconds
        return tuple(out)

    @functools.cached_property
    def seconds(self) -> Seconds:
        """What all of them spend."""
        return sum(self.spent, Seconds())

    @property
    def zero_levels(self) -> dict[str, int]:
        """The ZeRO level of each parameter that is in parts, by its name."""
        return {name: parts.level for name, parts in self.in_parts.items()}

    @property
    def zero_states(self) -> dict[str, State]:
        """How these parts lie."""
        return {name: parts.state for name, parts in self.in_parts.items()}
