"""What a stage does between collectives, as functions that torch.compile compiles.

calls in a row without collectives --> fx graph --> torch.compile (once for equal graphs) --> run in their place
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from torch_xmesh.parallelism.operators import Value
from torch_xmesh.parallelism.running.calls import OperatorCall

_LEAST_CALLS = 2


@dataclasses.dataclass(frozen=True, eq=False)
class CompiledRun:
    """Some calls in a row.

    Attributes:
        takes: values that they read and others make; `leaves`: those that they make and others read.
    """

    numbers: tuple[int, ...]
    takes: tuple[Value, ...]
    leaves: tuple[Value, ...]
    function: Any

    def run(self, parts: dict[Value, Any]) -> None:
        """In place of the calls."""
        made = self.function(*(parts[value] for value in self.takes))
        parts.update(zip(self.leaves, made, strict=True))


class Compiler:
    """Makes runs; equal ones share what is compiled.

    Args:
        options: keyword arguments for torch.compile.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def runs(
        self, numbers: Sequence[int], calls: Mapping[int, OperatorCall], dead_after: Mapping[int, Collection[Value]]
    ) -> list[CompiledRun]:
        """Runs to compile: two or more of the operators, in a row, whose calls run no collective."""
        out: list[CompiledRun] = []
        row: list[int] = []
        for number in (*numbers, None):
            if number is not None and calls[number].is_plain:
                row.append(number)
                continue
            if len(row) >= _LEAST_CALLS:
                out.append(self._run(row, calls, dead_after))
            row = []
        return out

    def _run(
        self, numbers: Sequence[int], calls: Mapping[int, OperatorCall], dead_after: Mapping[int, Collection[Value]]
    ) -> CompiledRun:
        made = {value for number in numbers for value in calls[number].makes}
        takes = dict.fromkeys(value for number in numbers for value in calls[number].reads if value not in made)
        graph = fx.Graph()
        nodes = {value: graph.placeholder(f"value_{i}") for i, value in enumerate(takes)}
        for number in numbers:
            calls[number].write(graph, nodes)
        dead = {value for number in numbers for value in dead_after.get(number, ())}
        leaves = tuple(value for number in numbers for value in calls[number].makes if value not in dead)
        graph.output(tuple(nodes[value] for value in leaves))
        kinds = tuple((value.shape, value.dtype, value.requires_grad) for value in takes)
        function = self._of(fx.GraphModule(nn.Module(), graph), kinds)
        return CompiledRun(tuple(numbers), tuple(takes), leaves, function)

    def _of(self, module: fx.GraphModule, kinds: tuple[Any, ...]) -> Any:
        key = kinds, module.code, *(id(node.target) for node in module.graph.nodes if node.op == "call_function")
        if key not in self._compiled:
            self._compiled[key] = torch.compile(module, **self._options)
        return self._compiled[key]
