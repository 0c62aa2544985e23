"""A recorded forward as operators that read tensors: what the search looks at."""

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from torch_xmesh.parallelism.loops import Labels, Loops, check_loops
from torch_xmesh.parallelism.rows import rows
from torch_xmesh.parallelism.rows.registry import Call, Tensor
from torch_xmesh.pipeline.capture.recorded import RecordedModel
from torch_xmesh.pipeline.capture.recording import NodeFacts, Recording


@dataclasses.dataclass(frozen=True)
class Value:
    """A tensor that flows: a parameter or a buffer of the model, an argument, or what an operator makes.

    Attributes:
        maker: the operator's number; None for what is there from the beginning.
        is_parameter: of the model.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    maker: int | None = None
    is_parameter: bool = False

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def is_trained(self) -> bool:
        """A parameter whose gradient is wanted."""
        return self.is_parameter and self.requires_grad


@dataclasses.dataclass(frozen=True)
class Operator:
    """One operator of a forward.

    Attributes:
        name: the innermost module's that it is in, and the operator's own; unique.
        kind: the operator's own name.
        reads: the tensors, in the order of those of `loops.inputs` that are read.
        is_known: it has a row; else every device does all of it.
    """

    name: str
    kind: str
    reads: tuple[Value, ...]
    makes: Value
    loops: Loops
    is_known: bool


@dataclasses.dataclass(frozen=True)
class Forward:
    """What a model does: operators in the order in which they ran, and the tensors that it returns."""

    operators: tuple[Operator, ...]
    outputs: tuple[Value, ...]


def forward_of(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> Forward:
    """The operators of a forward. Modules are looked into, all of them; nothing of the model is changed.

    Raises:
        CaptureError: (a ValueError) the model cannot be recorded.
    """
    arguments = (tuple(args), dict(kwargs or {}))
    tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
    names = [f"input {i}" for i in range(len(tensors))]
    opened = frozenset(name for name, _ in model.named_modules())
    device = torch.device("cpu")
    stand_ins = [torch.zeros_like(tensor, device=device) if tensor.is_meta else tensor for tensor in tensors]
    recorded = RecordedModel(model, arguments, names=names, opened=opened, batch=(), device=device)
    with torch.enable_grad():
        return _Reader(recorded.record(stand_ins, None)).read()


class _Reader:
    """Walks over a recording's nodes."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._values: dict[fx.Node, Value] = {}
        self._several: dict[fx.Node, fx.Node] = {}
        self._operators: list[Operator] = []
        self._count_of: dict[str, int] = {}

    def read(self) -> Forward:
        for node in self._recording.graph.nodes:
            facts = self._recording.facts.get(node)
            if facts is None or not facts.tensors:
                continue
            if node.op in ("placeholder", "get_attr"):
                value = self._value(str(node.target), facts)
                self._values[node] = dataclasses.replace(value, is_parameter=node.op == "get_attr")
            elif node.target is operator.getitem and node.args[0] in self._several:
                self._add(node, facts, self._several[node.args[0]])
            elif not facts.structure.is_leaf():
                self._several[node] = node
            else:
                self._add(node, facts, node)
        leaves = pytree.tree_leaves(self._recording.output)
        outputs = {self._values[leaf]: None for leaf in leaves if isinstance(leaf, fx.Node) and leaf in self._values}
        return Forward(tuple(self._operators), tuple(outputs))

    @staticmethod
    def _value(name: str, facts: NodeFacts, maker: int | None = None) -> Value:
        tensor = facts.tensors[0]
        return Value(name, tensor.shape, tensor.dtype, tensor.requires_grad, maker)

    def _add(self, node: fx.Node, facts: NodeFacts, called: fx.Node) -> None:
        """The operator that `called` calls, as far as it makes `node`."""
        reads: list[Value] = []

        def given(argument: Any) -> Any:
            if not isinstance(argument, fx.Node):
                return argument
            value = self._values.get(argument)
            if value is None:
                return None
            reads.append(value)
            return Tensor(len(reads) - 1, value.shape)

        args = fx.node.map_aggregate(called.args, given)
        kwargs = fx.node.map_aggregate(called.kwargs, given)
        name = called.target if isinstance(called.target, str) else called.target.__name__
        call = Call(name, args, kwargs, len(reads), facts.tensors[0].shape)
        shapes = [value.shape for value in reads]
        loops, is_known = self._loops(call, shapes)
        read = tuple(value for value, labels in zip(reads, loops.inputs, strict=True) if labels is not None)
        full_name = self._name(called, name)
        makes = self._value(full_name, facts, len(self._operators))
        self._operators.append(Operator(full_name, name, read, makes, loops, is_known))
        self._values[node] = makes

    @staticmethod
    def _loops(call: Call, shapes: Sequence[tuple[int, ...]]) -> tuple[Loops, bool]:
        """Those of its row, where that knows the call; else every device does all of it."""
        if call.name in rows:
            try:
                found = rows[call.name](call)
                check_loops(found, shapes, call.shape)
                return found, True
            except ValueError:
                pass
        inputs: list[Labels] = [(None,) * len(shape) for shape in shapes]
        return Loops(tuple(inputs), (None,) * len(call.shape), {}), False

    def _name(self, node: fx.Node, name: str) -> str:
        modules = [module for module in node.meta.get("modules", []) if module]
        full = ".".join([*modules[-1:], name])
        count = self._count_of[full] = self._count_of.get(full, 0) + 1
        return full if count == 1 else f"{full}.{count}"
