"""What a sharding is judged by: the seconds of a microbatch as one number, to be made least."""

import dataclasses
from collections.abc import Callable

from torch_xmesh.pipeline.schedule.simulation import StageCosts


@dataclasses.dataclass(frozen=True)
class Seconds:
    """What a device spends.

    Attributes:
        forward: computing the forward of one microbatch.
        backward_input: computing inputs' gradients of one microbatch.
        backward_weight: computing parameters' gradients of one microbatch.
        forward_collectives: collectives in the forward of one microbatch.
        backward_collectives: collectives in the backward of one microbatch.
        step_collectives: collectives on gradients and parameters, once a step.
    """

    forward: float = 0.0
    backward_input: float = 0.0
    backward_weight: float = 0.0
    forward_collectives: float = 0.0
    backward_collectives: float = 0.0
    step_collectives: float = 0.0

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(
            self.forward + other.forward,
            self.backward_input + other.backward_input,
            self.backward_weight + other.backward_weight,
            self.forward_collectives + other.forward_collectives,
            self.backward_collectives + other.backward_collectives,
            self.step_collectives + other.step_collectives,
        )

    def __neg__(self) -> "Seconds":
        return Seconds(
            -self.forward,
            -self.backward_input,
            -self.backward_weight,
            -self.forward_collectives,
            -self.backward_collectives,
            -self.step_collectives,
        )

    def costs(
        self, *, is_whole: bool, is_hidden: bool = False, activation_bytes: int = 0, fixed_bytes: int = 0
    ) -> StageCosts:
        """What actions on one microbatch take. Collectives in backward are counted with the inputs' gradients, and so
        are the parameters' gradients of a backward that `is_whole`: not split. `is_hidden`: collectives are another
        microbatch's while this one computes, so that a pass takes the longer of the two."""
        later = 0.0 if is_whole else self.backward_weight
        take = max if is_hidden else sum
        return StageCosts(
            forward_seconds=take((self.forward, self.forward_collectives)),
            backward_input_seconds=take((self.backward, self.backward_collectives)) - later,
            backward_weight_seconds=later,
            activation_bytes=activation_bytes,
            fixed_bytes=fixed_bytes,
        )

    @property
    def backward(self) -> float:
        return self.backward_input + self.backward_weight


@dataclasses.dataclass(frozen=True)
class Objective:
    """A registered way to judge.

    Attributes:
        of: seconds of what a node does, and the number of microbatches of a step, to its cost. Costs of nodes and of
            conversions between them add up; a conversion's is what its collectives take, forward and backward.
    """

    name: str
    summary: str
    of: Callable[[Seconds, int], float]


def _serial(seconds: Seconds, num_microbatches: int) -> float:
    collectives = seconds.forward_collectives + seconds.backward_collectives
    return seconds.forward + seconds.backward + collectives + seconds.step_collectives / num_microbatches


objectives = {
    objective.name: objective
    for objective in (
        Objective("serial", "a device computes or communicates; what is once a step is shared out", _serial),
    )
}
"""By name. One that hides collectives under computation would be another entry."""
