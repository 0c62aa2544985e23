"""What a forward did, as a graph: see recorder.py for how it is recorded."""

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import fx
from torch.utils import _pytree as pytree

from torch_xmesh.digests import checksum, digest_of


class TensorFacts(NamedTuple):
    """What a tensor was."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclasses.dataclass(frozen=True)
class NodeFacts:
    """What a node was in one recording.

    Attributes:
        leaves: the leaves of its value, tensors as TensorFacts.
        structure: the pytree structure of its value.
        memory: keys of the storages of its tensors.
        is_real: it follows from the model's inputs and constants alone, and was computed.
        is_random: it depends on random numbers.
        draws: it draws some.
        varies: it follows from samples of the batch.
    """

    leaves: tuple[Any, ...]
    structure: pytree.TreeSpec
    memory: frozenset[int]
    is_real: bool
    is_random: bool
    draws: bool
    varies: bool

    @property
    def requires_grad(self) -> bool:
        return any(leaf.requires_grad for leaf in self.tensors)

    @property
    def tensors(self) -> list[TensorFacts]:
        """Those of its leaves that are tensors."""
        return [leaf for leaf in self.leaves if type(leaf) is TensorFacts]

    @staticmethod
    def of(
        value: Any, *, is_real: bool, is_random: bool = False, draws: bool = False, varies: bool = False
    ) -> "NodeFacts":
        leaves, structure = pytree.tree_flatten(value)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        described = tuple(
            TensorFacts(tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in leaves
        )
        memory = frozenset(map(memory_of, tensors))
        return NodeFacts(described, structure, memory, is_real, is_random, draws, varies)


@dataclasses.dataclass(frozen=True)
class Guard:
    """Something that was read from the values of tensors: ``function(*args, **kwargs)`` gave `value`."""

    function: Any
    args: Any
    kwargs: Any
    value: Any
    source: str
    nodes: tuple[fx.Node, ...]

    def gave(self, value: Any) -> bool:
        """Whether it is the value that was read."""
        if isinstance(value, np.ndarray):
            return np.array_equal(value, self.value)
        return type(value) is type(self.value) and bool(value == self.value)


@dataclasses.dataclass
class Recording:
    """A model's graph without its output node, as one forward ran it.

    Attributes:
        graph: placeholders (one per tensor of the arguments, in pytree order), then nodes in canonical order
            (canonical.py), which is that in which they ran, loops over sets apart; ``meta["modules"]`` has the names of
            the modules that a node is in, ``meta["source"]`` its line and ``meta["modes"]`` what of grad mode and
            autocast differs from outside the model, or None; ``meta["changes_to_gradient"]`` whether what it changes in
            place requires a gradient then.
        output: the model's output, any pytree with nodes as leaves.
        constants: what the graph reads and the model does not hold, by name.
        facts: what every node was.
        device: on which the forward ran.
        guards: in the order in which values were read.
        mutations: (storage, number of nodes then, node that changed it).
        changed_tensors: the first node that changes a buffer or a parameter, by its name.
        opened: the modules that were looked into.
        has_gradients: gradients were enabled.
        numbers: that were attributes of opened modules after the forward.
        closed_checkpoints: where activation checkpoints are called in what is not looked into.
    """

    graph: fx.Graph
    device: torch.device
    output: Any
    constants: dict[str, Any]
    facts: dict[fx.Node, NodeFacts]
    guards: list[Guard]
    mutations: list[tuple[int, int, fx.Node]]
    changed_tensors: dict[str, fx.Node]
    opened: frozenset[str]
    has_gradients: bool
    numbers: dict[str, float]
    closed_checkpoints: tuple[str, ...] = ()

    @functools.cached_property
    def way(self) -> str:
        """What was read of tensors' values, in words that are the same in every process."""
        return "\n".join(sorted(map(_text_of_guard, self.guards)))

    @functools.cached_property
    def lines(self) -> list[str]:
        """What the graph computes, a node each, in words that are the same in every process."""
        return [f"{self.text_of(node)}{_text_of_facts(node, self.facts[node])}" for node in self.graph.nodes]

    @functools.cached_property
    def digest(self) -> str:
        """Equal for recordings of equal `lines`."""
        return digest_of(*self.lines)

    @property
    def value_guards(self) -> list[Guard]:
        """Those that read what follows from arguments."""
        return [
            guard
            for guard in self.guards
            if any(source.op == "placeholder" for node in guard.nodes for source in nodes_behind(node))
        ]

    def text_of(self, node: fx.Node) -> str:
        """A node as text that is the same in every process."""
        if node.op == "get_attr" and str(node.target) in self.constants:
            return f"{node.name} = {_text_of_object(self.constants[str(node.target)])}"
        target = node.target if isinstance(node.target, str) else getattr(node.target, "__qualname__", "")
        return f"{node.name} = {node.op} {target} {_text(node.args)} {_text(node.kwargs)}"


def memory_of(tensor: torch.Tensor) -> int:
    """What tells a tensor's storage from all others that are alive."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def structure_of(node: fx.Node) -> fx.Node | None:
    """The node of whose result, a structure, this one is a part."""
    return node.args[0] if "path" in node.meta else None  # type: ignore[return-value]


def nodes_behind(node: fx.Node) -> set[fx.Node]:
    """A node and all from which it follows."""
    found, left = {node}, [node]
    while left:
        more = [source for source in left.pop().all_input_nodes if source not in found]
        found.update(more)
        left += more
    return found


def difference(recording: Recording, other: Recording) -> str:
    """The first node that differs between two recordings, or what they return, in words; empty without any."""
    for mine, theirs in itertools.zip_longest(recording.graph.nodes, other.graph.nodes):
        texts = [run.text_of(node) if node is not None else "" for node, run in ((mine, recording), (theirs, other))]
        if texts[0] != texts[1]:
            where = (mine if mine is not None else theirs).meta["source"]
            return f"{texts[0] or 'nothing'}, then {texts[1] or 'nothing'}{', at ' + where if where else ''}"
    returned = [_returned(run) for run in (recording, other)]
    return "" if returned[0] == returned[1] else "one output, then one of other tensors or another structure"


def _returned(recording: Recording) -> tuple[Any, ...]:
    leaves, structure = pytree.tree_flatten(recording.output)
    return [leaf.name for leaf in leaves if isinstance(leaf, fx.Node)], structure


def _text_of_guard(guard: Guard) -> str:
    function = getattr(guard.function, "__name__", "")
    value = guard.value.tolist() if isinstance(guard.value, np.ndarray) else guard.value
    return f"{function} {_text(guard.args)} {_text(guard.kwargs)} = {value!r}"


def _text_of_facts(node: fx.Node, facts: NodeFacts) -> str:
    tensors = ", ".join(
        f"{tensor.dtype} {list(tensor.shape)}{' with gradient' if tensor.requires_grad else ''}"
        for tensor in facts.tensors
    )
    modes = node.meta.get("modes")
    return f" -> {tensors}{f' in {modes}' if modes is not None else ''}"


def _text(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_text, value))})"
    if isinstance(value, dict):
        return f"({', '.join(f'{key}={_text(value[key])}' for key in sorted(value, key=str))})"
    if isinstance(value, slice):
        return f"{_text(value.start)}:{_text(value.stop)}:{_text(value.step)}"
    if isinstance(value, torch.device):
        return "a device"  # ranks have other ones
    return repr(value)


def _summary(value: torch.Tensor) -> str:
    is_plain = value.layout == torch.strided and not value.is_quantized
    return checksum(value).hex() if is_plain else str(float(value.double().sum()))


def _text_of_object(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"array {value.dtype} {value.shape} {digest_of(value.tobytes())}"
    if isinstance(value, torch.Tensor):
        content = value.tolist() if value.numel() < 100 else (tuple(value.shape), _summary(value))
        return f"tensor {value.dtype} {content}"
    return str(getattr(value, "__qualname__", type(value).__qualname__))
