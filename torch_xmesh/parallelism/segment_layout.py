"""The segments of a stage, and what goes from one to the next.

program, where segments begin --> values that are handed over, or sent by a transfer among the stage's devices
"""

import bisect
import dataclasses
from collections.abc import Iterator

from torch_xmesh import _C
from torch_xmesh.parallelism.bound_program import BoundProgram
from torch_xmesh.parallelism.loops import State
from torch_xmesh.parallelism.operators import Value
from torch_xmesh.parallelism.program import ARGUMENT, OPERATOR, STAGE, Moves, PlannedProgram, ProgramRead


@dataclasses.dataclass(frozen=True)
class Passed:
    """A value that goes from a segment to a later one.

    Attributes:
        name: the program's.
        source: it as the first one leaves it.
        key: it as the later one reads it: another value where it lies otherwise for this reader alone.
        there, back: the moves that the plan has priced for that, none where it is handed over.
        is_sent: by a transfer.
        ends: how it lies at the first and at the later one, and how its gradient lies there and comes back.
    """

    name: str
    from_segment: int
    to_segment: int
    source: Value
    key: Value
    is_sent: bool
    has_gradient: bool
    ends: tuple[State, State, State, State]
    there: Moves = ()
    back: Moves = ()

    @property
    def text(self) -> tuple[object, ...]:
        """Equal for two that are alike, of any recordings."""
        names = self.source.name, self.key.name
        return self.from_segment, self.to_segment, *names, self.is_sent, self.has_gradient, self.ends


@dataclasses.dataclass
class _Version:
    """A value as some readers find it.

    Attributes:
        home: the first segment that has it.
        readers: by segment whether one of its readers there gives a gradient.
    """

    name: str
    key: Value
    home: int
    state: State
    gradient: State
    readers: dict[int, bool] = dataclasses.field(default_factory=dict)

    def read_in(self, segment: int, gives_gradient: bool) -> None:
        self.readers[segment] = self.readers.get(segment, False) or gives_gradient


class SegmentLayout:
    """What each segment of a stage is given, computes and leaves.

    Args:
        core: the same program in C++, with what leaves.
        is_whole: every device is left all of what leaves.

    Attributes:
        operators: by segment the numbers of its operators in the forward.
        arguments: by segment those of the model's arguments that it reads, by their places among the stage's.
        inputs: by segment: the model's arguments that it reads, on the first all that other stages make, and what
            earlier segments pass on.
        outputs: by segment what later ones are passed; the last one's are what leaves the stage.
        passed: all of that.
        taken: by operator of the program and place the value that it reads instead, which comes as it takes it.
        sent: operators of the program with places of results that are sent as they are made.
        left: by place what leaves as another value, which comes as it leaves.
    """

    def __init__(self, bound: BoundProgram, program: PlannedProgram, core: "_C.Program", *, is_whole: bool) -> None:
        self._program, self._core, self._values = program, core, bound.values
        self._begins = list(program.segments) or [0]
        self._leaving = program.leaving_whole if is_whole and program.leaving_whole else program.leaving
        count = len(program.operators)
        ends = [*self._begins[1:], count]
        self._of_operator = [bisect.bisect_right(self._begins, number) - 1 for number in range(count)]
        self.operators = [list(bound.operators[begin:end]) for begin, end in zip(self._begins, ends, strict=True)]
        self.taken: dict[tuple[int, int], Value] = {}
        self.sent: set[tuple[int, int]] = set()
        self.left: dict[int, Value] = {}
        self.passed: list[Passed] = []
        self._shape_reads = bound.shape_reads()
        self._held = self._versions()
        self._pass_on()
        given = [number for number, value in enumerate(program.values) if value.source == ARGUMENT]
        entering = [bound.values[number] for number, value in enumerate(program.values) if value.source == STAGE]
        self.inputs: list[list[Value]] = []
        self.arguments: list[list[int]] = []
        for segment in range(self.count):
            own = [place for place, number in enumerate(given) if segment in self._held[number].readers]
            passed = [one.key for one in self.passed if one.to_segment == segment]
            self.arguments.append(own)
            self.inputs.append(
                [*(bound.values[given[place]] for place in own), *(entering if segment == 0 else []), *passed]
            )
        self.outputs = [
            list(dict.fromkeys(one.source for one in self.passed if one.from_segment == segment))
            for segment in range(self.count - 1)
        ]
        self.outputs.append(
            [self.left.get(place, bound.values[read.value]) for place, read in enumerate(self._leaving)]
        )

    @property
    def count(self) -> int:
        return len(self._begins)

    def segment_of(self, operator: int) -> int:
        """Of an operator of the program."""
        return self._of_operator[operator]

    @property
    def text(self) -> tuple[object, ...]:
        """Equal for two between whose segments the same goes, of any recordings."""
        ports = [[value.name for value in values] for values in (*self.inputs, *self.outputs)]
        return self.arguments, ports, [one.text for one in self.passed]

    def _reads(self) -> Iterator[tuple[int | None, int, int, ProgramRead]]:
        """Operator, or None of what leaves, place, segment, and the read."""
        for number, operator in enumerate(self._program.operators):
            for place, read in enumerate(operator.reads):
                yield number, place, self._of_operator[number], read
        for place, read in enumerate(self._leaving):
            yield None, place, self.count - 1, read

    def _versions(self) -> dict[int, _Version]:
        """By value, how it is held; a value is sent there only if nobody reads it in the segment that makes it."""
        readers: dict[int, set[int]] = {}
        for _, _, segment, read in self._reads():
            readers.setdefault(read.value, set()).add(segment)
        for number, read_value in self._shape_reads:
            readers.setdefault(read_value, set()).add(self._of_operator[number])
        maker = {
            result.value: (number, place)
            for number, operator in enumerate(self._program.operators)
            for place, result in enumerate(operator.results)
        }
        out = {}
        for number, value in enumerate(self._program.values):
            home = 0
            if number in maker:
                home = self._of_operator[maker[number][0]]
                later = min(readers.get(number, {home}))
                if later > home and self._core.is_transfer(*maker[number], is_result=True):
                    self.sent.add(maker[number])
                    home = later
            out[number] = _Version(value.name, self._values[number], home, value.state, value.gradient)
        return out

    def _pass_on(self) -> None:
        taken: dict[tuple[int, State, State], _Version] = {}
        ways: dict[tuple[int, State, State], ProgramRead] = {}  # with a way back, if one of the readers has one
        for number, place, segment, read in self._reads():
            held = self._held[read.value]
            if segment == held.home or not self._is_passed(read.value) or not self._core.is_transfer(number, place):
                held.read_in(segment, read.gives_gradient)
                continue
            found = read.value, read.state, read.gradient
            if found not in taken:
                key = dataclasses.replace(
                    held.key, name=f"{held.key.name} as {list(read.state)}, {list(read.gradient)}"
                )
                taken[found] = _Version(held.name, key, segment, read.state, read.gradient)
            taken[found].read_in(segment, read.gives_gradient)
            if found not in ways or read.gives_gradient:
                ways[found] = read
            if number is None:
                self.left[place] = taken[found].key
            else:
                self.taken[number, place] = taken[found].key
        for number, value in self._shape_reads:
            self._held[value].read_in(self._of_operator[number], False)
        for number, place in sorted(self.sent):
            result = self._program.operators[number].results[place]
            held, has_gradient = self._held[result.value], self._program.values[result.value].has_gradient
            made = _Version(held.name, held.key, self._of_operator[number], result.state, result.gradient)
            self._send(made, held, has_gradient, result.there, result.back)
        for found, version in taken.items():
            self._send(
                self._held[found[0]], version, any(version.readers.values()), ways[found].there, ways[found].back
            )
        for version in (*(self._held[number] for number in self._held if self._is_passed(number)), *taken.values()):
            for segment, has_gradient in sorted(version.readers.items()):
                if segment != version.home:
                    ends = version.state, version.state, version.gradient, version.gradient
                    self.passed.append(
                        Passed(version.name, version.home, segment, version.key, version.key, False, has_gradient, ends)
                    )

    def _is_passed(self, number: int) -> bool:
        """Arguments are given to each segment, and parameters and constants are there."""
        return self._program.values[number].source in (OPERATOR, STAGE)

    def _send(self, before: _Version, after: _Version, has_gradient: bool, there: Moves, back: Moves) -> None:
        ends = before.state, after.state, after.gradient, before.gradient
        self.passed.append(
            Passed(before.name, before.home, after.home, before.key, after.key, True, has_gradient, ends, there, back)
        )
