"""What a forward does, written down as a torch.fx graph while it runs."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from torch_xmesh.pipeline.capture.arguments import Lifted, Lifter, is_plain, plain_number
from torch_xmesh.pipeline.capture.call_sites import CallSite, CallSites
from torch_xmesh.pipeline.capture.errors import READY_STAGES, CaptureError, LookInsideError
from torch_xmesh.pipeline.capture.node_forms import builder, part_of, tensors_of
from torch_xmesh.pipeline.capture.recording import NodeFacts, memory_of
from torch_xmesh.pipeline.capture.regions import current_modes
from torch_xmesh.pipeline.capture.shadow import Shadow
from torch_xmesh.pipeline.capture.source_lines import user_line
from torch_xmesh.pipeline.capture.watch import OperatorWatch


class GraphWriter:
    """Makes nodes of calls, and knows which node a tensor is. Threading: that of the forward.

    Attributes:
        graph, facts, constants: as a Recording has them.
        attributes: path and tensor of what the model's modules hold, by id.
        sites: by node, the way to the call that made it.
        stack: the names of the opened modules in which the forward is.
        makers: by id of a tensor that a module inside of a leaf returns, the innermost module that returns it.
    """

    def __init__(self, shadow: Shadow, watch: OperatorWatch, opened: frozenset[str]) -> None:
        self._shadow, self._watch, self._opened = shadow, watch, opened
        self.graph = fx.Graph()
        self.facts: dict[fx.Node, NodeFacts] = {}
        self.constants: dict[str, Any] = {}
        self.attributes = shadow.tensors()
        self.stack: list[str] = []
        self.makers: dict[int, str] = {}
        self._nodes: dict[int, fx.Node] = {}
        self._alive: list[torch.Tensor] = []  # or ids are used again
        self._base_modes = current_modes()
        self.calls = CallSites()
        self.sites: dict[fx.Node, tuple[CallSite, ...]] = {}
        self._num_checkpoints = 0
        self._checkpoint: int | None = None

    def new(self, op: str, target: Any, args: Any, kwargs: Any) -> fx.Node:
        """A node in the module and the modes in which the forward is."""
        node = self.graph.create_node(op, target, args, kwargs)
        modules = [*self.stack, str(target)] if op == "call_module" else list(self.stack)
        modes = current_modes()
        node.meta.update(source=user_line(), modules=modules, modes=None if modes == self._base_modes else modes)
        node.meta["checkpoint"] = self._checkpoint
        self.sites[node] = self.calls.here()
        return node

    @contextlib.contextmanager
    def checkpoint(self) -> Iterator[None]:
        """Nodes made inside are those of a checkpoint, or of the outermost of several."""
        before = self._checkpoint
        if before is None:
            self._checkpoint = self._num_checkpoints
            self._num_checkpoints += 1
        try:
            yield
        finally:
            self._checkpoint = before

    def define(self, node: fx.Node, value: Any, *, draws: bool = False, keeps: bool = False) -> None:
        """`node` is `value`: each of its tensors gets a node of its own; `keeps`: but for those that have one."""
        sources = [self.facts[source] for source in node.all_input_nodes]
        tensors = tensors_of(value)
        is_real = not any(isinstance(tensor, FakeTensor) for tensor in tensors)
        is_real = is_real and all(source.is_real for source in sources)
        is_real = is_real and (node.op != "call_module" or self.is_without_parameters(str(node.target)))
        is_random = draws or any(source.is_random for source in sources)
        varies = any(map(self._watch.follows_from_samples, tensors))
        self.facts[node] = NodeFacts.of(value, is_real=is_real, is_random=is_random, draws=draws, varies=varies)
        if isinstance(value, torch.Tensor):
            self._bind(node, value, keeps)
            return
        for path, leaf in pytree.tree_flatten_with_path(value)[0]:
            if isinstance(leaf, torch.Tensor):
                target, given, keys = part_of(node, path)
                part = self.graph.call_function(target, given)
                part.meta.update(node.meta, path=keys)
                varies = self._watch.follows_from_samples(leaf)
                self.facts[part] = NodeFacts.of(leaf, is_real=is_real, is_random=is_random, varies=varies)
                self._bind(part, leaf, keeps)

    def _bind(self, node: fx.Node, tensor: torch.Tensor, keeps: bool) -> None:
        known = self._nodes.get(id(tensor))
        if known is not None and (keeps or self.facts[known].is_real):
            return
        self._nodes[id(tensor)] = node
        self._alive.append(tensor)

    def node_of(self, tensor: torch.Tensor) -> fx.Node:
        """The node that a tensor is."""
        node = self._nodes.get(id(tensor))
        if node is None:
            node = self._get_attribute(tensor)
        return node

    def _get_attribute(self, tensor: torch.Tensor) -> fx.Node:
        original = self._shadow.path_of_original(tensor)
        if original is not None:
            node = self.new("get_attr", original, (), {})
            self.facts[node] = NodeFacts.of(tensor, is_real=False)
            self._bind(node, tensor, keeps=False)
            return node
        if id(tensor) in self.attributes:
            path = self.attributes[id(tensor)][0]
            if id(tensor) not in self._shadow.own and (isinstance(tensor, FakeTensor) or tensor.requires_grad):
                raise CaptureError(
                    f"{path} is set in a forward and read in the next, at {user_line()}: in a stage it would stay as "
                    f"it is; change a buffer in place for that (self.buffer.copy_(...)), or {READY_STAGES}"
                )
        elif isinstance(tensor, FakeTensor) or id(tensor) in self.makers or self._watch.leaf_of(tensor) is not None:
            raise LookInsideError(
                "a tensor comes out of a module in another way than as its result",
                user_line(),
                maker=self.makers.get(id(tensor)),
                leaf=self._watch.leaf_of(tensor),
            )
        elif self._watch.follows_from_samples(tensor):
            raise CaptureError(f"a tensor at {user_line()} follows from the batch in a way that cannot be recorded")
        elif tensor.requires_grad:
            raise CaptureError(
                f"a tensor of shape {tuple(tensor.shape)} that requires a gradient is no parameter of the model: "
                f"{user_line()}; make it a parameter"
            )
        else:
            path = f"_constant{len(self.constants)}"
            self.constants[path] = tensor
        node = self.new("get_attr", path, (), {})
        self.define(node, tensor)
        return node

    def argument(self, value: Any) -> Any:
        """What a node is given: nodes for tensors, constants for what has none."""
        if isinstance(value, fx.Node):
            return value
        if isinstance(value, torch.Tensor):
            return self.node_of(value)
        if type(value) in (tuple, list):
            return type(value)(self.argument(item) for item in value)
        if isinstance(value, torch.Size):
            return tuple(value)
        if type(value) is dict and all(isinstance(key, str) for key in value):
            return {key: self.argument(item) for key, item in value.items()}
        if isinstance(value, slice):
            return slice(self.argument(value.start), self.argument(value.stop), self.argument(value.step))
        value = plain_number(value)
        if is_plain(value):
            return value
        leaves, structure = pytree.tree_flatten(value)
        if structure.is_leaf():
            return self._object(value)
        node = self.new("call_function", builder(structure), tuple(self.argument(leaf) for leaf in leaves), {})
        self.define(node, value)
        return node

    def module(self, module: nn.Module) -> fx.Node:
        """A module as an argument."""
        node = self.new("get_attr", self._shadow.names[id(module)], (), {})
        self.facts[node] = NodeFacts.of(None, is_real=True)
        return node

    def lift(self, function: Any) -> Lifted | str:
        """See Lifter."""
        return Lifter(self._is_whole).lift(function)

    def _is_whole(self, module: nn.Module) -> bool:
        name = self._shadow.names.get(id(module))
        return name is not None and name not in self._opened

    def _object(self, value: Any) -> fx.Node:
        """An object as an argument: a function or the like."""
        if isinstance(value, nn.Module) and self._is_whole(value):
            return self.module(value)
        is_stateless = isinstance(value, nn.Module) and not any(True for _ in (*value.parameters(), *value.buffers()))
        if not is_stateless:
            found = self.lift(value)
            if isinstance(found, str):
                raise CaptureError(
                    f"{found} is handed on at {user_line()}: what it holds would be the same in each step; hand on "
                    f"tensors or plain values, or {READY_STAGES}"
                )
            held, rebuild = found
            if held:
                given = tuple(self.module(item) if isinstance(item, nn.Module) else self.node_of(item) for item in held)
                node = self.new("call_function", rebuild, given, {})
                self.facts[node] = NodeFacts.of(None, is_real=all(self.facts[source].is_real for source in given))
                return node
        path = next((path for path, known in self.constants.items() if known is value), None)
        if path is None:
            path = f"_constant{len(self.constants)}"
            self.constants[path] = value
        node = self.new("get_attr", path, (), {})
        self.facts[node] = NodeFacts.of(None, is_real=True)
        return node

    def check_changeable(self, memory: int) -> None:
        """Raises CaptureError for memory of a tensor that is neither of the forward nor of the model."""
        for path, value in self.constants.items():
            if isinstance(value, torch.Tensor) and memory_of(value) == memory:
                raise CaptureError(
                    f"a tensor of shape {tuple(value.shape)} ({path}) that is no parameter and no buffer is changed in "
                    f"place, at {user_line()}: make it a buffer of the model, or {READY_STAGES}"
                )

    def is_without_parameters(self, name: str) -> bool:
        """Whether a module holds no tensors."""
        module = self._shadow.model.get_submodule(name)
        return not any(True for _ in (*module.parameters(), *module.buffers()))
