"""Operators that run together, with what is around them."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from torch_xmesh.parallelism.memory import Kept, is_read_back, kept_again_by, kept_by, kept_views_of, with_checkpoints
from torch_xmesh.parallelism.operators import Forward, Operator, Value


@dataclasses.dataclass(frozen=True, eq=False)
class Stretch:
    """Operators that run together, in order.

    Attributes:
        entering: values that they read and others make.
        leaving: values that they make and others read, or that are the model's outputs.
        kept: what backward needs.
        again: what backward needs of what it computes anew, in activation checkpoints.
        by_samples: for values that leave and go to a loss outside of the model, whether they have samples; these may
            be left sharded over samples.
    """

    operators: tuple[Operator, ...]
    entering: tuple[Value, ...]
    leaving: tuple[Value, ...]
    kept: tuple[Kept, ...]
    again: tuple[Kept, ...] = ()
    by_samples: Mapping[Value, bool] = dataclasses.field(default_factory=dict)

    @staticmethod
    def of(forward: Forward, numbers: Sequence[int] | None = None) -> "Stretch":
        """Those of the operators with these numbers, ascending; by default all. Of constants each stretch has its
        own: they are no values on the way."""
        chosen = set(range(len(forward.operators)) if numbers is None else numbers)
        operators = tuple(operator for number, operator in enumerate(forward.operators) if number in chosen)
        if len(operators) < len(forward.operators) and any(operator.checkpoint is not None for operator in operators):
            # A checkpoint may be in halves.
            operators = with_checkpoints(operators, [operator.checkpoint for operator in operators])
        makers = {operator.makes[0].maker for operator in operators}
        constant = {operator.makes[0].maker for operator in forward.operators if operator.is_constant}
        entering = {
            value: None
            for operator in operators
            for value in operator.reads
            if value.maker is not None and value.maker not in makers and value.maker not in constant
        }
        outside = (operator for number, operator in enumerate(forward.operators) if number not in chosen)
        wanted = {value for operator in outside for value in operator.reads} | set(forward.outputs)
        made = (value for operator in operators if not operator.is_constant for value in operator.makes)
        leaving = tuple(value for value in made if value in wanted)
        to_loss = () if forward.num_samples is None else set(leaving).intersection(forward.outputs)
        by_samples = {value: value.shape[:1] == (forward.num_samples,) for value in to_loss}
        kept, again = kept_by(operators, set(leaving)), kept_again_by(operators)
        return Stretch(operators, tuple(entering), leaving, tuple(kept), tuple(again), by_samples)

    @functools.cached_property
    def readers(self) -> dict[Value, list[tuple[int, int]]]:
        """For each value that is read, its readers: an operator's place, and the value's position among what that
        operator reads."""
        out: dict[Value, list[tuple[int, int]]] = {}
        for number, operator in enumerate(self.operators):
            for place, value in enumerate(operator.reads):
                out.setdefault(value, []).append((number, place))
        return out

    @functools.cached_property
    def parameters(self) -> dict[str, tuple[Value, int, int]]:
        """By name a parameter, its first reader, and its place among what that reads."""
        return {value.name: (value, *places[0]) for value, places in self.readers.items() if value.is_parameter}

    @functools.cached_property
    def read_back(self) -> frozenset[Value]:
        """Parameters that the backward of an operator reads again."""
        return frozenset(
            value
            for value, places in self.readers.items()
            if value.is_parameter and any(is_read_back(self.operators[number], place) for number, place in places)
        )

    @functools.cached_property
    def read_in_checkpoints(self) -> dict[tuple[int, str], tuple[int, Value]]:
        """By checkpoint and name the parameters that its operators read, with the first of these."""
        out: dict[tuple[int, str], tuple[int, Value]] = {}
        for number, operator in enumerate(self.operators):
            for value in operator.reads:
                if operator.checkpoint is not None and value.is_parameter:
                    out.setdefault((operator.checkpoint, value.name), (number, value))
        return out

    @functools.cached_property
    def kept_views(self) -> frozenset[Value]:
        """Parameters of which operators keep views: they stay whole between forward and backward."""
        return kept_views_of(self.operators)

    @functools.cached_property
    def tied(self) -> set[Value]:
        """Parameters that several operators read."""
        return {value for value, places in self.readers.items() if value.is_parameter and len(places) > 1}

    @functools.cached_property
    def summed(self) -> list[tuple[int, ...]]:
        """By operator the places of trained parameters that it alone reads: it adds their gradients up."""
        return [
            tuple(place for place, value in enumerate(operator.reads) if value.is_trained and value not in self.tied)
            for operator in self.operators
        ]
