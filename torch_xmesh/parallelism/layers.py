"""Operators cut into layers, which stages are made of (Alpa, section 5.2, eq. 6)."""

import dataclasses
import re
from collections import Counter
from collections.abc import Sequence

from torch_xmesh import _C
from torch_xmesh.parallelism.operators import Forward, Operator, Value

SLACK = 0.6
"""By how much a layer may have more operations than the mean."""

_MOST_LAYERS = 64
_FEWEST_LAYERS = 8


@dataclasses.dataclass(frozen=True)
class Layers:
    """Stretches of a forward.

    Attributes:
        numbers: the operators of each, constants left out.
    """

    forward: Forward
    numbers: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        return len(self.numbers)

    def operators(self, first: int, end: int) -> list[int]:
        """The numbers of the operators of layers [first, end), and of the constants that these follow from."""
        chosen = {number for layer in self.numbers[first:end] for number in layer}
        left = list(chosen)
        while left:
            for value in self.forward.operators[left.pop()].reads:
                maker = value.maker
                if maker is not None and maker not in chosen and self.forward.operators[maker].is_constant:
                    chosen.add(maker)
                    left.append(maker)
        return sorted(chosen)

    def layer_of(self) -> dict[int, int]:
        """By operator, constants left out."""
        return {number: layer for layer, numbers in enumerate(self.numbers) for number in numbers}

    def name(self, layer: int) -> str:
        """The module in which it begins."""
        operator = self.forward.operators[self.numbers[layer][0]]
        return operator.module or operator.name


def layers_of(forward: Forward, num_layers: int | None = None) -> Layers:
    """A forward's operators as layers.

    Raises:
        ValueError: it computes nothing from parameters, or there are fewer operators than layers.
    """
    varied = [number for number, candidate in enumerate(forward.operators) if not candidate.is_constant]
    if not varied:
        raise ValueError("the model computes nothing from its parameters: there is nothing to share out")
    place = {number: i for i, number in enumerate(varied)}
    values: dict[Value, int] = {}
    rows: list[tuple[int | None, int]] = []
    operators: list[tuple[int, list[int]]] = []
    for number in varied:
        operator = forward.operators[number]
        for value in operator.reads:
            if value not in values:
                values[value] = len(rows)
                rows.append((place.get(-1 if value.maker is None else value.maker), value.num_bytes))
        operators.append((_num_flops(operator), [values[value] for value in operator.reads]))
    count = num_layers or min(len(varied), _number_of_layers([forward.operators[number] for number in varied]))
    starts, _, _ = _C.cluster_operators(operators, rows, count, SLACK)
    ends = [*starts[1:], len(varied)]
    return Layers(forward, tuple(tuple(varied[start:end]) for start, end in zip(starts, ends, strict=True)))


def _num_flops(operator: Operator) -> int:
    """FLOPs of an operator's forward, at least a thousandth of the bytes that it reads and makes: operators that are no
    products have a cost, too."""
    num_bytes = sum(value.num_bytes for value in (*operator.reads, *operator.makes))
    return max(round(operator.loops.flops), num_bytes // 1000)


def _number_of_layers(operators: Sequence[Operator]) -> int:
    """As many as the model repeats a block, where it does; else a quarter of its products."""
    blocks: dict[str, set[int]] = {}
    for operator in operators:
        for found in re.finditer(r"(?:^|\.)(\d+)(?=\.|$)", operator.module):
            blocks.setdefault(operator.module[: found.start(1)], set()).add(int(found.group(1)))
    repeated = sum(
        len(numbers) for name, numbers in blocks.items() if not _is_inside(name, blocks) and len(numbers) > 1
    )
    heavy = Counter(counted.loops.is_heavy for counted in operators)[True]
    wanted = repeated if repeated >= 2 else heavy // 4
    return max(min(wanted, _MOST_LAYERS), min(heavy, _FEWEST_LAYERS), 1)


def _is_inside(name: str, blocks: dict[str, set[int]]) -> bool:
    """Whether the blocks under this name are inside a block that is itself repeated."""
    return any(other != name and name.startswith(other) and len(blocks[other]) > 1 for other in blocks)
