"""A stage's program and the recorded forward that it is of: which operator and which tensor is which."""

from torch_xmesh.parallelism.operators import Recorded, Value
from torch_xmesh.parallelism.program import (
    ARGUMENT,
    CONSTANT,
    OPERATOR,
    PARAMETER,
    STAGE,
    PlannedProgram,
    ProgramOperator,
    ProgramValue,
)


class BoundProgram:
    """Attributes:
        operators: by operator of the program its number in the forward.
        values: by value of the program, the forward's.

    Raises:
        ValueError: the forward has other operators, or other tensors.
    """

    def __init__(self, recorded: Recorded, program: PlannedProgram) -> None:
        self._recorded, self._program = recorded, program
        self._by_name = {operator.name: number for number, operator in enumerate(recorded.forward.operators)}
        self._made = {value.name: value for operator in recorded.forward.operators for value in operator.makes}
        self._parameters: dict[str, Value] = {}
        self._constants: dict[str, Value] = {}
        self._arguments: dict[str, Value] = {}
        for node, value in recorded.given.items():
            of_kind = self._parameters if value.is_parameter else self._constants
            (self._arguments if node.op == "placeholder" else of_kind)[value.name] = value
        self.values = tuple(map(self._value, program.values))
        self.operators = tuple(map(self._number, program.operators))

    def numbers(self, source: str) -> list[int]:
        """The program's values of a source."""
        return [number for number, value in enumerate(self._program.values) if value.source == source]

    def shape_reads(self) -> list[tuple[int, int]]:
        """Operators of the program with values of which they look at the shape, or the type, alone."""
        numbers = {value: number for number, value in enumerate(self.values)}
        out = []
        for place, number in enumerate(self.operators):
            site = self._recorded.sites[number]
            for value, is_read in zip(site.sources, site.is_read, strict=True):
                if not is_read and value in numbers:
                    out.append((place, numbers[value]))
        return out

    def _value(self, planned: ProgramValue) -> Value:
        by_source = {
            ARGUMENT: self._arguments,
            PARAMETER: self._parameters,
            CONSTANT: self._constants,
            STAGE: self._made,
            OPERATOR: self._made,
        }
        found = by_source[planned.source].get(planned.name)
        if found is None or found.shape != planned.shape:
            what = "none" if found is None else f"one of {list(found.shape)}"
            raise ValueError(
                f"the plan is for another model: it has {planned.source} {planned.name} of {list(planned.shape)}, the "
                f"model has {what}"
            )
        if found.requires_grad != planned.has_gradient:
            had, has = ("a gradient", "none") if planned.has_gradient else ("no gradient", "one")
            raise ValueError(
                f"{planned.source} {planned.name} had {had} when the plan was made, and has {has} now: plan the model "
                "as it is trained"
            )
        return found

    def _number(self, planned: ProgramOperator) -> int:
        number = self._by_name.get(planned.name)
        if number is None:
            raise ValueError(f"the plan is for another model: there is no operator {planned.name}")
        operator = self._recorded.forward.operators[number]
        reads = tuple(self.values[read.value] for read in planned.reads)
        makes = tuple(self.values[result.value] for result in planned.results)
        if (operator.reads, operator.makes) != (reads, makes):
            raise ValueError(f"the plan is for another model: operator {planned.name} reads or makes other tensors")
        return number
