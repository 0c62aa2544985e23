"""All shardings of operators on one mesh, and what each costs; equal operators and values share what is computed."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from torch_xmesh import _C
from torch_xmesh.parallelism.compute import Compute, ComputeSeconds
from torch_xmesh.parallelism.loops import PARTIAL, REPLICATED, Choice, End, State, choices_of, num_parts, whole_choice
from torch_xmesh.parallelism.memory import Kept, fixed_bytes
from torch_xmesh.parallelism.objective import Objective, Seconds, objectives
from torch_xmesh.parallelism.operators import Operator, Value

Array = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]
Links = tuple[int, float, float] | tuple[int, float, float, float]
"""The links of a mesh axis: its size, the latency of a message, what a byte takes one device that sends to its
neighbor, and, if that is more, one where all send to all."""
Allowed = Callable[[Operator, Choice], bool]


@dataclasses.dataclass(frozen=True)
class CollectiveUse:
    """A collective that a plan runs.

    Attributes:
        value: what it moves.
        why: "forward", "backward", or, once a step, "gradient" and "parameter", of a parameter.
        axis: the mesh axis along which it runs.
        num_bytes: see the C++ CollectiveCostModel.
    """

    value: str
    why: str
    collective: str
    axis: int
    num_bytes: float


class Space:
    """Shardings on one mesh.

    Args:
        axes: the links of each mesh axis, one or two.
        model: name of the cost model of collectives.
        compute: what each device computes in which time; None: computing costs nothing.
        num_microbatches: microbatches per step.
        allowed: leaves choices of operators out.
        is_lenient: an operator of which none is left is done by fewer devices, by each as a whole in the end.
        is_direct: values are brought from one sharding to another axis by axis, as in Alpa, not over a third one.
        objective: by name.

    Raises:
        ValueError: an unknown model or objective, or a mesh of no or more axes.
    """

    def __init__(
        self,
        axes: Sequence[Links],
        model: str,
        *,
        compute: Compute | None = None,
        num_microbatches: int = 1,
        allowed: Allowed | None = None,
        is_lenient: bool = False,
        is_direct: bool = False,
        objective: str = "serial",
    ) -> None:
        if not 1 <= len(axes) <= 2:
            raise ValueError(f"a mesh of one or two axes, got {len(axes)}")
        if objective not in objectives:
            raise ValueError(f"no objective named {objective!r}: they are {', '.join(objectives)}")
        self.axes, self.model, self.compute = list(axes), model, compute
        self.shape = tuple(axis[0] for axis in axes)
        self.num_microbatches = num_microbatches
        self._objective: Objective = objectives[objective]
        self._allowed, self._is_lenient, self._is_direct = allowed, is_lenient, is_direct
        self._kept: dict[tuple[Any, ...], Any] = {}
        self._numbers: dict[State, int] = {}
        self._alive: list[Any] = []  # what ids in keys stand for

    def once(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """What `make` gives, the first time it is asked for under this key."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def choices(self, operator: Operator) -> list[Choice]:
        """The allowed choices of an operator, at least one. Raises ValueError where none is allowed."""
        if operator.is_constant:
            return [whole_choice(operator.loops, len(self.axes))]
        found: list[Choice] = self.once(("choices", operator.loops.key), lambda: choices_of(operator.loops, self.shape))
        if operator.loops.is_linear:
            held = tuple(place for place, value in enumerate(operator.reads) if value.is_parameter)
            found = self.once(("choices", operator.loops.key, held), lambda: _without_summands(found, held))
        if self._allowed is not None:
            allowed = self._allowed
            found = [choice for choice in found if allowed(operator, choice)]
            if not found and self._is_lenient:
                more = choices_of(operator.loops, self.shape, may_idle=True)
                found = [choice for choice in more if allowed(operator, choice)]
                found = found or [whole_choice(operator.loops, len(self.axes))]
            if not found:
                raise ValueError(f"no sharding of {operator.name} is left")
        return found

    def made_ends(self, choices: list[Choice], number: int) -> list[End]:
        """How the choices leave an output."""
        return self._ends(("made", id(choices), number), choices, lambda choice: choice.outputs[number])

    def taken_ends(self, choices: list[Choice], place: int) -> list[End]:
        """How they take an input."""
        return self._ends(("taken", id(choices), place), choices, lambda choice: choice.inputs[place])

    def _ends(self, key: tuple[Any, ...], choices: list[Choice], of: Callable[[Choice], End]) -> list[End]:
        def make() -> list[End]:
            self._alive.append(choices)
            return [of(choice) for choice in choices]

        out: list[End] = self.once(key, make)
        return out

    def hub(self, value: Value, *, is_whole: bool = False) -> list[End]:
        """How a value that several read may be held: whole, with its gradient whole or in summands; or sharded.
        `is_whole`: its gradient is not in summands."""

        def make() -> list[End]:
            summands = [(REPLICATED, PARTIAL)] if value.requires_grad and not is_whole else []
            per_axis = [(REPLICATED, REPLICATED), *summands, *((dim, dim) for dim in range(len(value.shape)))]
            ends = (
                End(tuple(held for held, _ in pairs), tuple(gradient for _, gradient in pairs))
                for pairs in itertools.product(per_axis, repeat=len(self.shape))
            )
            return [end for end in ends if self._divides(value, end.value)]

        out: list[End] = self.once(("hub", value.shape, value.requires_grad and not is_whole), make)
        return out

    def _divides(self, value: Value, state: State) -> bool:
        parts: dict[int, int] = {}
        for held, size in zip(state, self.shape, strict=True):
            if held >= 0:
                if size == 1:
                    return False
                parts[held] = parts.get(held, 1) * size
        return all(value.shape[dim] % count == 0 for dim, count in parts.items())

    def conversions(self, value: Value) -> "_C.ConversionCosts":
        key = (value.shape, value.num_bytes)
        out: _C.ConversionCosts = self.once(
            ("conversions", *key), lambda: _C.ConversionCosts(*key, self.axes, self.model, self._is_direct)
        )
        return out

    def table(
        self, value: Value, made: list[End], taken: list[End], has_gradient: bool, times: int = 1
    ) -> "_C.CostTable":
        """What it costs to bring a value so often from each of one's ends to each of another's, and its gradient back
        once."""

        def make() -> "_C.CostTable":
            self._alive += [made, taken]
            left, right = ([(end.value, end.gradient) for end in ends] for ends in (made, taken))
            return _C.conversion_table(self.conversions(value), left, right, has_gradient, times)

        key = ("table", value.shape, value.num_bytes, has_gradient, times, id(made), id(taken))
        out: _C.CostTable = self.once(key, make)
        return out

    def compute_seconds(self, operator: Operator, choice: Choice) -> ComputeSeconds:
        if self.compute is None:
            return ComputeSeconds()
        return self.compute.of_operator(operator, choice, self.shape)

    def within(self, operator: Operator, choice: Choice) -> list[CollectiveUse]:
        """The collectives that an operator runs by itself."""
        out: list[CollectiveUse] = []
        name = operator.makes[0].name
        for axis, label in enumerate(choice.axes):
            for own in operator.loops.within:
                if own.label != label:
                    continue
                others = enumerate(zip(choice.axes, self.shape, strict=True))
                cuts = math.prod(size for place, (other, size) in others if place != axis and other in own.cut_by)
                once = CollectiveUse(name, "forward", own.collective, axis, own.num_bytes / cuts)
                out += [once] * own.num_forward
                back = own.num_backward * operator.requires_grad + own.num_forward * operator.is_computed_again
                out += [dataclasses.replace(once, why="backward")] * back
        return out

    def steps(self, value: Value, why: str, before: State, after: State) -> list[CollectiveUse]:
        """The collectives that bring a value from one sharding to another."""
        if before == after:
            return []
        return [
            CollectiveUse(value.name, why, collective, axis, num_bytes)
            for axis, _, collective, num_bytes in self.conversions(value).steps(before, after)
            if collective is not None and self.shape[axis] > 1
        ]

    def collective_seconds(self, use: CollectiveUse) -> float:
        return _C.collective_cost(self.model, use.collective, use.num_bytes, self.axes[use.axis])

    def shared_seconds(self, use: CollectiveUse) -> float:
        """Seconds of a collective on a parameter or its gradient. Parameters share collectives, so none is counted with
        a message's latency, except by the "alpa" model, which takes each by itself."""
        axis = self.axes[use.axis]
        if self.model != "alpa":
            axis = (axis[0], 0.0, *axis[2:])
        return _C.collective_cost(self.model, use.collective, use.num_bytes, axis)

    def node_seconds(self, operator: Operator, choice: Choice, summed: Sequence[int]) -> Seconds:
        """What an operator spends with a choice, its own collectives and the sums of gradients of the parameters at
        `summed` among those that it reads, which lie as the parameters do then."""
        computed = self.compute_seconds(operator, choice)
        own = self.within(operator, choice)
        forward, backward = (
            sum(self.collective_seconds(use) for use in own if use.why == why) for why in ("forward", "backward")
        )
        ends = [(operator.reads[place], choice.inputs[place]) for place in summed]
        sums = (use for value, end in ends for use in self.steps(value, "gradient", end.gradient, end.value))
        gradients = sum(map(self.shared_seconds, sums))
        return Seconds(
            computed.forward, computed.backward_input, computed.backward_weight, forward, backward, gradients
        )

    def cost(self, seconds: Seconds) -> float:
        return self._objective.of(seconds, self.num_microbatches)

    def all_seconds(self, operator: Operator, choices: list[Choice], summed: Sequence[int]) -> list[Seconds]:
        """The same of each choice."""

        def make() -> list[Seconds]:
            self._alive.append(choices)
            return [self.node_seconds(operator, choice, summed) for choice in choices]

        out: list[Seconds] = self.once(("seconds", *self._kind(operator, choices), tuple(summed)), make)
        return out

    def node_costs(self, operator: Operator, choices: list[Choice], summed: Sequence[int]) -> Array:
        """What they cost."""
        seconds = self.all_seconds(operator, choices, summed)
        out: Array = self.once(("costs", id(seconds)), lambda: np.array([self.cost(spent) for spent in seconds]))
        return out

    def _kind(self, operator: Operator, choices: list[Choice]) -> tuple[Any, ...]:
        """What operators have in common that cost the same."""
        read = tuple((value.shape, value.dtype, value.requires_grad, value.is_parameter) for value in operator.reads)
        made = tuple((value.shape, value.dtype, value.requires_grad) for value in operator.makes)
        more = () if self.compute is None else self.compute.kind_of(operator)
        return id(choices), operator.loops.key, read, made, operator.views, operator.again, *more

    def held_bytes(self, operator: Operator, choices: list[Choice], places: tuple[int, ...]) -> Array:
        """What a device holds of the parameters at these places among what the operator reads, by choice."""
        if not places:
            return self.nothing(len(choices))

        def make() -> Array:
            self._alive.append(choices)
            held = [
                [fixed_bytes(operator.reads[place], choice.inputs[place].value, self.shape) for place in places]
                for choice in choices
            ]
            return np.array([sum(row) for row in held])

        out: Array = self.once(("held", *self._kind(operator, choices), places), make)
        return out

    def part_bytes(self, kept: Kept, choices: list[Choice]) -> Array:
        """What a device keeps of a tensor, by choice."""

        def make() -> Array:
            self._alive.append(choices)
            return np.array([kept.memory.num_bytes / self.num_parts(kept.state(choice)) for choice in choices])

        out: Array = self.once(("part", id(choices), kept.is_made, kept.place, kept.memory.num_bytes), make)
        return out

    def part_states(self, kept: Kept, choices: list[Choice]) -> Numbers:
        """How it lies on a device, by choice: equal states have equal numbers."""

        def make() -> Numbers:
            self._alive.append(choices)
            states = (kept.state(choice) for choice in choices)
            return np.array([self._numbers.setdefault(state, len(self._numbers)) for state in states], np.int64)

        out: Numbers = self.once(("states", id(choices), kept.is_made, kept.place), make)
        return out

    def num_parts(self, state: State) -> int:
        """Into how many parts a value is cut."""
        return num_parts(state, self.shape)

    def nothing(self, count: int) -> Array:
        """Zeros, by choice."""
        out: Array = self.once(("nothing", count), lambda: np.zeros(count))
        return out


def _without_summands(choices: list[Choice], places: Sequence[int]) -> list[Choice]:
    """Those that take none of the inputs at these places as a partial sum: a parameter is no sum, so that optimizers
    can step what a device has of it."""
    return [choice for choice in choices if not any(PARTIAL in choice.inputs[place].value for place in places)]


def sums_by(numbers: Numbers, values: Array, count: int) -> Array:
    """Sums of the values of each number below `count`, added in their order on every machine."""
    return np.asarray(np.bincount(numbers, values, count), np.float64)
