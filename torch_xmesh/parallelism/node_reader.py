"""A recording's nodes as operators: what each reads, makes and changes."""

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from torch_xmesh.parallelism.loops import Loops, check_loops
from torch_xmesh.parallelism.memory import with_checkpoints
from torch_xmesh.parallelism.operators import Forward, Operator, Recorded, Site, Value
from torch_xmesh.parallelism.rows import rows
from torch_xmesh.parallelism.rows.experts import has_row
from torch_xmesh.parallelism.rows.registry import CallForm, Tensor
from torch_xmesh.parallelism.running.calls import runs_in_parts
from torch_xmesh.pipeline.capture.name_order import NameOrder
from torch_xmesh.pipeline.capture.recorder import DROPS
from torch_xmesh.pipeline.capture.recording import NodeFacts, Recording, TensorFacts, structure_of

_DONE_ANYWAY = DROPS | {"scaled_dot_product_attention", "batch_norm", "instance_norm"}
"""Kinds that draw random numbers, or change buffers, if only in training."""


_WRITES_ITS_PARTS = frozenset({"batch_norm"})
"""Kinds that write to buffers of the model what the whole batch would have them write, whatever part a device has."""


_HANG_ON_TENSORS = frozenset({"register_hook", "register_post_accumulate_grad_hook", "retain_grad", "backward"})
"""Methods that give no tensor, and do something once there is a gradient."""


@dataclasses.dataclass
class _Change:
    """What a change in place changes.

    Attributes:
        others: nodes of this memory that are read afterwards, its first argument left out.
        first: the first argument, if it is of this memory: it is a new value from then on.
    """

    others: list[fx.Node]
    first: fx.Node | None


class NodeReader:
    """Walks over a recording's nodes."""

    def __init__(self, recording: Recording, model: nn.Module) -> None:
        self._recording, self._model = recording, model
        self._values: dict[fx.Node, Value] = {}
        self._firsts: dict[fx.Node, Value] = {}
        self._of_modules: dict[str, Value] = {}  # parameters of modules that are called as one
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._operators: list[Operator] = []
        self._sites: list[Site] = []
        self._count_of: dict[str, int] = {}
        self._parts: dict[fx.Node, list[fx.Node]] = {}
        self._checkpoints: list[int | None] = []  # by operator
        own = {fact for node, facts in recording.facts.items() if node.op == "get_attr" for fact in facts.memory}
        self._writers = {node for memory, _, node in recording.mutations if memory in own}
        self._is_varied: set[Value] = set()  # parameters, products and random numbers are behind them

    def read(self) -> Recorded:
        nodes = list(self._recording.graph.nodes)
        for node in nodes:
            source = structure_of(node)
            if source is not None:
                self._parts.setdefault(source, []).append(node)
        wanted = self._wanted(nodes)
        changed = self._changed(nodes, wanted)
        for node in nodes:
            facts = self._recording.facts[node]
            if node.op in ("placeholder", "get_attr"):
                if facts.tensors:
                    self._value_of(node)
            elif structure_of(node) is None:
                name = self._kind(node)
                full_name = self._name(node, name)  # also of what is left out, which the other mode may not leave out
                if node in wanted:
                    self._add(node, name, full_name, facts, changed.get(node))
        known = {*self._firsts.values()}
        for name, value in self._of_modules.items():
            if value not in known:
                self._firsts[fx.Node(self._recording.graph, name, "get_attr", name, (), {})] = value
        leaves = pytree.tree_leaves(self._recording.output)
        outputs = {self._values[leaf]: None for leaf in leaves if isinstance(leaf, fx.Node) and leaf in self._values}
        parameters = tuple(
            Value(name, tuple(parameter.shape), parameter.dtype, True, is_parameter=True)
            for name, parameter in NameOrder(self._model).sorted(self._model.named_parameters())
            if parameter.requires_grad
        )
        forward = Forward(with_checkpoints(self._operators, self._checkpoints), tuple(outputs), parameters)
        return Recorded(forward, self._recording, tuple(self._sites), self._values, self._firsts)

    def _given(self, node: fx.Node, facts: NodeFacts) -> Value:
        (tensor,) = facts.tensors
        name = str(node.target)
        is_parameter = node.op == "get_attr" and name not in self._recording.constants
        value = Value(name, tensor.shape, tensor.dtype, tensor.requires_grad, None, is_parameter)
        if is_parameter and tensor.requires_grad:
            self._is_varied.add(value)
        return value

    def _changed(self, nodes: Sequence[fx.Node], wanted: set[fx.Node]) -> dict[fx.Node, "_Change"]:
        """By node that changes memory in place: what that means for those that read this memory later."""
        order = {node: i for i, node in enumerate(nodes)}
        returned = {leaf for leaf in pytree.tree_leaves(self._recording.output) if isinstance(leaf, fx.Node)}
        out: dict[fx.Node, _Change] = {}
        for memory, _, changer in self._recording.mutations:
            names = [
                node
                for i, node in enumerate(nodes)
                if memory in self._recording.facts[node].memory
                and node is not changer
                and (node.op == "get_attr" or i < order[changer])
                and (node in returned or any(order[user] > order[changer] for user in wanted.intersection(node.users)))
            ]
            first = changer.args[0] if changer.args and isinstance(changer.args[0], fx.Node) else None
            change = out.setdefault(changer, _Change([], None))
            if first is not None and memory in self._recording.facts[first].memory:
                change.first = first
            change.others += [node for node in names if node is not first and node not in change.others]
        return out

    def _wanted(self, nodes: Sequence[fx.Node]) -> set[fx.Node]:
        """Without known operators that make what nobody reads, as weights of attention. What changes memory or draws
        random numbers is done anyway, in both modes."""
        out = {leaf for leaf in pytree.tree_leaves(self._recording.output) if isinstance(leaf, fx.Node)}
        out |= {changer for _, _, changer in self._recording.mutations}
        for node in reversed(nodes):
            is_part = structure_of(node) is not None
            kind = self._kind(node) if node.op in ("call_function", "call_method") and not is_part else ""
            is_left = kind in rows and kind not in _DONE_ANYWAY and not self._recording.facts[node].draws
            if not (is_part or is_left) or not out.isdisjoint(node.users):
                out.add(node)
        return out

    def _add(self, node: fx.Node, name: str, full_name: str, facts: NodeFacts, change: "_Change | None") -> None:
        """The operator that `node` calls.

        Raises:
            ValueError: it changes memory in place that is read under another name later.
        """
        reads: list[Value] = []

        def given(argument: Any) -> Any:
            if not isinstance(argument, fx.Node):
                return argument
            value = self._values.get(argument)
            if value is None:
                return None
            reads.append(value)
            return Tensor(len(reads) - 1, value.shape, value.dtype)

        args = list(fx.node.map_aggregate(tuple(node.args), given))
        kwargs: dict[str, Any] = dict(fx.node.map_aggregate(node.kwargs, given))
        if node.target is getattr:
            args.pop()
        if node.op == "call_module":
            kwargs |= self._own_tensors(str(node.target), reads)
        places, tensors = self._made(node, facts)
        if change is not None and change.first is not None and not tensors:
            (first,) = self._recording.facts[change.first].tensors
            before = self._values[change.first].requires_grad
            has_gradient = before or bool(node.meta["changes_to_gradient"])
            places, tensors = [change.first], [first._replace(requires_grad=has_gradient)]
        if not tensors:
            if name in _HANG_ON_TENSORS:
                where = self._module(node) or "the model itself"
                raise ValueError(
                    f"{where} calls {name}() on a tensor that it makes: with a plan a device has a part of it, and of "
                    "its gradient; leave that out"
                )
            return
        shapes = tuple(tensor.shape for tensor in tensors)
        call = CallForm(name, args, kwargs, len(reads), shapes, None if node.op == "call_module" else node.target)
        loops = self._loops(node, call, reads)
        if node in self._writers and name not in _WRITES_ITS_PARTS:
            loops = None  # computed from a part of the batch, other values would be written
        if change is not None and change.others:
            loops = None
            reads += [self._value_of(other) for other in change.others]
            if not self._is_varied.isdisjoint(reads):
                raise ValueError(f"{name} in {self._module(node) or 'the model itself'} {_why_not_in_place(change)}")
            places = [*places, *change.others]
            tensors = [*tensors, *(self._recording.facts[other].tensors[0] for other in change.others)]
        made = self._append(node, call, full_name, tensors, reads, loops)
        is_read = tuple(labels is not None for labels in self._operators[-1].loops.inputs)
        self._sites.append(Site(node, tuple(reads), is_read, tuple(places)))
        self._values.update(zip(places, made, strict=False))
        if change is not None and change.first is not None:
            self._values[change.first] = made[0]

    def _value_of(self, node: fx.Node) -> Value:
        """The value that a node makes. A tensor of the model's own may be asked for before reading has come to it, and
        gets its value here."""
        if node not in self._values:
            self._values[node] = self._firsts[node] = self._given(node, self._recording.facts[node])
        return self._values[node]

    def _append(
        self,
        node: fx.Node,
        call: CallForm,
        full_name: str,
        tensors: Sequence[TensorFacts],
        reads: Sequence[Value],
        loops: Loops | None,
    ) -> tuple[Value, ...]:
        """What the operator makes; without loops every device does all of it."""
        is_known = loops is not None
        if loops is None:
            loops = _whole([value.shape for value in reads], [tensor.shape for tensor in tensors], self._flops(node))
        read = tuple(value for value, labels in zip(reads, loops.inputs, strict=True) if labels is not None)
        number = len(self._operators)
        makes = tuple(
            Value(full_name if len(tensors) == 1 else f"{full_name}[{i}]", *tensor, maker=number)
            for i, tensor in enumerate(tensors)
        )
        self._checkpoints.append(node.meta.get("checkpoint"))
        draws, views = self._recording.facts[node].draws, self._is_view(node)
        is_constant = not loops.is_heavy and not draws and not any(value in self._is_varied for value in read)
        if not is_constant:
            self._is_varied.update(makes)
        is_odd = node.op == "call_module" or node.target is getattr or node.meta.get("modes") is not None
        self._operators.append(
            Operator(
                full_name,
                call.name,
                self._module(node),
                read,
                makes,
                loops,
                is_known,
                is_constant,
                draws,
                views,
                call=None if is_odd else call,
            )
        )
        return makes

    def _flops(self, node: fx.Node) -> float:
        """FLOPs of an operator without a row, as torch's FlopCounterMode counts them on meta tensors; 0 where it
        cannot."""
        if node.op not in ("call_function", "call_method"):
            return 0.0
        from torch.utils.flop_counter import FlopCounterMode  # it brings triton along

        def stand_in(argument: Any) -> Any:
            value = self._values.get(argument) if isinstance(argument, fx.Node) else None
            return argument if value is None else torch.empty(value.shape, dtype=value.dtype, device="meta")

        args = list(fx.node.map_aggregate(tuple(node.args), stand_in))
        kwargs: dict[str, Any] = dict(fx.node.map_aggregate(node.kwargs, stand_in))
        with torch.no_grad(), warnings.catch_warnings(), FlopCounterMode(display=False) as counted:
            warnings.simplefilter("ignore")
            try:
                function = getattr(args.pop(0), node.target) if isinstance(node.target, str) else node.target
                function(*args, **kwargs)
            except Exception:  # it needs values
                return 0.0
        return float(counted.get_total_flops())

    def _is_view(self, node: fx.Node) -> bool:
        """Whether it makes the memory of the first tensor that it reads, and does not change it."""
        held = [self._recording.facts[source].memory for source in node.all_input_nodes[:1]]
        is_changed = any(changer is node for _, _, changer in self._recording.mutations)
        return bool(held and held[0] & self._recording.facts[node].memory) and not is_changed

    def _kind(self, node: fx.Node) -> str:
        """The operator's name: of a module its class's, of an attribute of a tensor the attribute's."""
        if node.op == "call_module":
            return type(self._model.get_submodule(str(node.target))).__name__
        if node.target is getattr:
            return str(node.args[-1])
        return node.target if isinstance(node.target, str) else node.target.__name__

    def _own_tensors(self, name: str, reads: list[Value]) -> dict[str, Tensor]:
        """The parameters of a module that is called as one, as arguments under their names."""
        out = {}
        module = self._model.get_submodule(name)
        for key, parameter in NameOrder(module).sorted(module.named_parameters()):
            full_name = self._names[id(parameter)]
            value = Value(
                full_name, tuple(parameter.shape), parameter.dtype, parameter.requires_grad, is_parameter=True
            )
            self._of_modules[full_name] = value
            if value.requires_grad:
                self._is_varied.add(value)
            out[key] = Tensor(len(reads), value.shape, value.dtype)
            reads.append(value)
        return out

    def _made(self, node: fx.Node, facts: NodeFacts) -> tuple[list[fx.Node], list[TensorFacts]]:
        """The nodes of the tensors that a node makes: it is one, or these are parts of what it gives."""
        parts = self._parts.get(node, [])
        if not parts:
            return [node], facts.tensors
        held = [(part, tensor) for part in parts for tensor in self._recording.facts[part].tensors[:1]]
        return [part for part, _ in held], [tensor for _, tensor in held]

    def _loops(self, node: fx.Node, call: CallForm, reads: Sequence[Value]) -> Loops | None:
        """Those of its row, where that knows the call."""
        if call.name not in rows:
            return None
        if node.op == "call_module" and not has_row(self._model.get_submodule(str(node.target))):
            return None
        try:
            found = rows[call.name](call)
            check_loops(found, [value.shape for value in reads], call.shapes)
        except (ValueError, TypeError, IndexError):  # arguments of a form that the row does not expect
            return None
        return found if runs_in_parts(call.name, found, draws=self._recording.facts[node].draws) else None

    @staticmethod
    def _module(node: fx.Node) -> str:
        modules = [module for module in node.meta.get("modules", []) if module]
        if node.op == "call_module":
            modules.append(str(node.target))
        return modules[-1] if modules else ""

    def _name(self, node: fx.Node, name: str) -> str:
        module = self._module(node)
        full = f"{module}.{name}" if module else name
        count = self._count_of[full] = self._count_of.get(full, 0) + 1
        return full if count == 1 else f"{full}.{count}"


def _why_not_in_place(change: _Change) -> str:
    names = ", ".join(str(node.target) if node.op == "get_attr" else node.name for node in change.others)
    if all(node.op == "get_attr" for node in change.others):
        return (
            f"writes to {names}, which the same forward reads again later: with a plan that cannot be run; call the "
            "module once, with all that it is called with (torch.cat)"
        )
    return f"changes memory in place that is read under another name later ({names}): write it out of place"


def _whole(inputs: Sequence[tuple[int, ...]], outputs: Sequence[tuple[int, ...]], flops: float = 0.0) -> Loops:
    """The loops of an operator that every device does whole, for inputs and outputs of these shapes."""
    read, made = (tuple((None,) * len(shape) for shape in shapes) for shapes in (inputs, outputs))
    return Loops(read, made, {}, flops=flops)
