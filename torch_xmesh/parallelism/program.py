"""What was found for a stage, as a program: every value and its gradient, from where it is made to where it is read.

operators with choices, values with how they are held --> Program (C++), which is validated apart from the search
"""

from collections.abc import Sequence
from typing import Any

from torch_xmesh import _C
from torch_xmesh.parallelism.conversions import AxisMove, Conversions
from torch_xmesh.parallelism.loops import LATER, PASS, REPLICATED, WHOLE, Choice, End, Labels, Loops
from torch_xmesh.parallelism.operators import Operator, Value
from torch_xmesh.parallelism.sharded import Sharded

_CHOICES = {WHOLE: -1, PASS: -2, LATER: -3}
_Moves = list[tuple[int, int, int]]


def program_of(sharded: Sharded) -> "_C.Program":
    """The program of a stage."""
    return _Writer(sharded).write()


class _Writer:
    def __init__(self, sharded: Sharded) -> None:
        space = sharded.graph.space
        self._sharded = sharded
        self._conversions = Conversions(space.shape, [axis[1:] for axis in space.axes], space.model)
        self._whole = End((REPLICATED,) * len(space.shape), (REPLICATED,) * len(space.shape))
        self._held = {(why, value): end for why, value, end in sharded.held}
        self._program = _C.Program(space.shape)
        self._numbers: dict[Value, int] = {}
        self._ends: dict[Value, End] = {}

    def write(self) -> "_C.Program":
        sharded = self._sharded
        for operator, choice in zip(sharded.operators, sharded.choices, strict=True):
            self._enter(operator, choice)
            reads = [self._read(value, end, operator) for value, end in zip(operator.reads, choice.inputs, strict=True)]
            results = [self._result(value, end) for value, end in zip(operator.makes, choice.outputs, strict=True)]
            axes = [_number_of(operator.loops, label) for label in choice.axes]
            self._program.add_operator(operator.name, _loop_nest(operator.loops), axes, reads, results)
        for value in sharded.graph.stretch.leaving:
            end = self._held.get(("leaving", value), self._ends[value])
            there, back = self._way(value, self._ends[value], end, has_gradient=value.requires_grad)
            self._program.add_leaving((self._numbers[value], _pair(end), there, back, value.requires_grad))
        return self._program

    def _enter(self, operator: Operator, choice: Choice) -> None:
        """What the operator reads that is there from the beginning: a parameter that it alone reads lies as it takes
        it."""
        for value, end in zip(operator.reads, choice.inputs, strict=True):
            if value in self._numbers:
                continue
            is_own = value.is_parameter and ("parameter", value) not in self._held
            found = (self._held.get((why, value)) for why in ("readers", "entering", "parameter"))
            self._add(value, end if is_own else next(filter(None, found), self._whole), enters=True)

    def _add(self, value: Value, held: End, *, enters: bool) -> None:
        self._ends[value] = held
        self._numbers[value] = self._program.add_value(
            value.name, value.shape, _pair(held), has_gradient=value.requires_grad, enters=enters
        )

    def _read(self, value: Value, end: End, operator: Operator) -> tuple[int, Any, _Moves, _Moves, bool]:
        gives_gradient = value.requires_grad and operator.requires_grad
        there, back = self._way(value, self._ends[value], end, has_gradient=gives_gradient)
        return self._numbers[value], _pair(end), there, back, gives_gradient

    def _result(self, value: Value, made: End) -> tuple[int, Any, _Moves, _Moves]:
        held = self._held.get(("readers", value), made)
        self._add(value, held, enters=False)
        there, back = self._way(value, made, held, has_gradient=value.requires_grad)
        return self._numbers[value], _pair(made), there, back

    def _way(self, value: Value, before: End, after: End, *, has_gradient: bool) -> tuple[_Moves, _Moves]:
        there = self._conversions.steps(value, before.value, after.value)
        back = self._conversions.steps(value, after.gradient, before.gradient) if has_gradient else ()
        return _moves(there), _moves(back)


def _pair(end: End) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return end.value, end.gradient


def _moves(moves: Sequence[AxisMove]) -> _Moves:
    return [(move.axis, move.before, move.after) for move in moves]


def _number_of(loops: Loops, label: str) -> int:
    return _CHOICES[label] if label in _CHOICES else list(loops.extents).index(label)


def _loop_nest(loops: Loops) -> tuple[Any, ...]:
    """Loops by number. A dim that no loop runs over has none, nor has one whose loop has no extent: it is never
    sharded."""
    names = list(loops.extents)
    number = {name: at for at, name in enumerate(names)}

    def dims(labels: Labels) -> list[list[int]]:
        return [[number[name] for name in (own or "").split("|") if name in number] for own in labels]

    read = [at for at, labels in enumerate(loops.inputs) if labels is not None]
    return (
        names,
        list(loops.extents.values()),
        [dims(labels) for labels in loops.inputs if labels is not None],
        [dims(labels) for labels in loops.outputs],
        loops.is_linear,
        [place for place, at in enumerate(read) if at in loops.once],
    )
