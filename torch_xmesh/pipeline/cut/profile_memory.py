"""What stages would hold: parameters, what backward keeps of a microbatch, and what they receive."""

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from torch_xmesh.pipeline.capture.node_forms import tensors_of
from torch_xmesh.pipeline.capture.recording import memory_of

PARAMETER_COPIES = 4
"""Parameter, gradient and two optimizer states."""


class Read(NamedTuple):
    """A value that another module call has made: the number of that call, the value's storages, its bytes."""

    maker: int
    storages: frozenset[int]
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class UnitCost:
    """One module call with the operations that follow it up to the next: where a stage may start.

    Attributes:
        name: the module to start a stage at.
        seconds: forward and backward, measured; for a model on meta, a figure proportional to the operations.
        parameters: bytes by parameter; units of one stage hold what they share once.
        kept: what backward keeps of one microbatch, bytes by storage; as above.
        reads: by name, values of other units: a stage that does not have their maker receives and holds them.
    """

    name: str
    seconds: float
    parameters: Mapping[int, int] = dataclasses.field(default_factory=dict)
    kept: Mapping[int, int] = dataclasses.field(default_factory=dict)
    reads: Mapping[str, Read] = dataclasses.field(default_factory=dict)


class Needed(NamedTuple):
    """Bytes of a stage: those of its parameters with all that belongs to them, and those of one microbatch."""

    fixed: int
    per_microbatch: int

    def total(self, microbatches_in_flight: int) -> int:
        """With so many microbatches."""
        return self.fixed + self.per_microbatch * microbatches_in_flight


def needed_bytes(units: Sequence[UnitCost]) -> dict[tuple[int, int], Needed]:
    """What a stage of units `first` up to but not including `end` holds, by (first, end)."""
    needed = {}
    for first in range(len(units)):
        parameters: set[int] = set()
        storages: set[int] = set()
        received: set[str] = set()
        fixed = per_microbatch = 0
        for end, unit in enumerate(units[first:], first + 1):
            fixed += sum(size for parameter, size in unit.parameters.items() if parameter not in parameters)
            parameters.update(unit.parameters)
            for name, read in unit.reads.items():
                if read.maker < first and name not in received:
                    received.add(name)
                    storages |= read.storages
                    per_microbatch += read.num_bytes
            per_microbatch += sum(size for storage, size in unit.kept.items() if storage not in storages)
            storages.update(unit.kept)
            needed[first, end] = Needed(fixed * PARAMETER_COPIES, per_microbatch)
    return needed


class NodeMemory(NamedTuple):
    """What backward keeps of a node, bytes by storage; the storages of its value, and the value's bytes."""

    kept: dict[int, int]
    storages: frozenset[int]
    num_bytes: int


class KeptMeter:
    """Finds what autograd keeps of a graph's nodes, run one after another, as long as all their values are alive.

    Tensors that are there without the microbatch, and the model's inputs, cost nothing.
    """

    def __init__(self, free: Iterable[torch.Tensor]) -> None:
        self._free = list(free)
        self._numbers: dict[int, int | None] = {storage_of(tensor)[0]: None for tensor in self._free}
        self._bytes: list[int] = []  # by number

    def __call__(self, call: Callable[[], Any], given: Any, copies: Any) -> tuple[Any, NodeMemory]:
        """Runs a node on `copies` of the values that it is `given`.

        Returns:
            its value without the graph, and what the graph kept.
        """
        pairs = zip(tensors_of(given), tensors_of(copies), strict=True)
        numbers = {storage_of(copy)[0]: self._numbers.get(storage_of(tensor)[0]) for tensor, copy in pairs}
        saved: list[weakref.ref[_Saved]] = []

        def pack(tensor: torch.Tensor) -> _Saved:
            holder = _Saved(tensor)
            saved.append(weakref.ref(holder))
            return holder

        def number(tensor: torch.Tensor) -> int | None:
            address, num_bytes = storage_of(tensor)
            if address not in numbers and address in self._numbers:
                numbers[address] = self._numbers[address]
            elif address not in numbers:
                numbers[address] = len(self._bytes)
                self._bytes.append(num_bytes)
            return numbers[address]

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda holder: holder.tensor):
            value = call()
        alive = [holder.tensor for holder in (reference() for reference in saved) if holder is not None]
        kept = {found: self._bytes[found] for found in map(number, alive) if found is not None}
        made = tensors_of(value)
        for tensor in made:
            self._numbers[storage_of(tensor)[0]] = number(tensor)
        storages = frozenset(found for found in map(number, made) if found is not None)
        value = pytree.tree_map_only(torch.Tensor, _without_graph, value)
        return value, NodeMemory(kept, storages, sum(tensor.numel() * tensor.element_size() for tensor in made))


class _Saved:
    """A tensor that a graph keeps, for as long as the graph is there."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def storage_of(tensor: torch.Tensor) -> tuple[int, int]:
    """What tells a storage from all others that are alive, and its bytes."""
    is_strided = tensor.layout is torch.strided
    num_bytes = tensor.untyped_storage().nbytes() if is_strided else tensor.numel() * tensor.element_size()
    return memory_of(tensor), num_bytes


def _without_graph(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)
