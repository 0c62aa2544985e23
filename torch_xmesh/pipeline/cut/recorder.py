"""One forward of a model, recorded as a torch.fx graph of module calls and torch functions.

A `Recorder` is a torch function mode around a forward of the model's shadow, on real inputs. A module in which no
split point lies is called as a module, and is one node. Every other torch function that is called between such modules
is one node as well. What follows from the inputs alone is computed on the way; what follows from parameters is fake.
"""

import contextlib
import enum
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from torch_xmesh.pipeline.cut.node_forms import (
    as_node,
    builder,
    is_effect,
    name_of,
    part_of,
    run_function,
    shapes_of,
    tensors_of,
)
from torch_xmesh.pipeline.cut.opaque_calls import checkpoint_of, run_checkpoint, told_opaque_calls
from torch_xmesh.pipeline.cut.recording import CaptureError, Guard, NodeFacts, Recording, memory_of, structure_of
from torch_xmesh.pipeline.cut.regions import current_modes
from torch_xmesh.pipeline.cut.shadow import Shadow
from torch_xmesh.pipeline.cut.source_lines import user_line
from torch_xmesh.pipeline.cut.watch import OperatorWatch

_READS = frozenset(
    "__bool__ __int__ __float__ __index__ __complex__ __contains__ __array__ item tolist numpy equal allclose "
    "is_nonzero".split()
)
"""Functions that tell a tensor's values as something that is no tensor."""

_PLAIN = (int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_PLAIN_CONTAINERS = (tuple, list, dict, slice)


class LeafFailedError(Exception):
    """A module that is not looked into raised `error` on fakes; `where` is the line that called it."""

    def __init__(self, kind: type, name: str, error: Exception, where: str) -> None:
        super().__init__(str(error))
        self.kind, self.name, self.error, self.where = kind, name, error, where


class LeakedError(Exception):
    """A tensor came out of a module in another way than as its result; `maker` is the module inside that returned it,
    None if none did."""

    def __init__(self, maker: str | None, where: str) -> None:
        super().__init__(where)
        self.maker, self.where = maker, where


class Recorder(TorchFunctionMode):
    """Records one forward; see `record`. Threading: that of the forward."""

    def __init__(
        self, shadow: Shadow, *, opened: frozenset[str], on_memory: frozenset[type], batch: Collection[str]
    ) -> None:
        """`batch`: the names of the inputs that are cut into microbatches."""
        super().__init__()
        self._batch = batch
        self._shadow, self._opened, self._on_memory = shadow, opened, on_memory
        self._graph = fx.Graph()
        self._nodes: dict[int, fx.Node] = {}
        self._alive: list[torch.Tensor] = []  # or ids are used again
        self._facts: dict[fx.Node, NodeFacts] = {}
        self._attributes = shadow.tensors()
        self._constants: dict[str, Any] = {}
        self._guards: list[Guard] = []
        self._mutations: list[tuple[int, int, fx.Node]] = []
        self._changed_buffers: dict[str, fx.Node] = {}
        self._stack: list[str] = []
        self._is_paused = False
        self._watch = OperatorWatch()
        self._base_modes = current_modes()
        self._makers: dict[int, str] = {}  # of the tensors that modules inside of leaves return

    # What is recorded.

    def record(self, names: Sequence[str], arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Recording:
        """Runs the model; its tensor arguments become placeholders called `names`."""
        leaves, structure = pytree.tree_flatten(arguments)
        given = iter(names)
        bound = [self._input(next(given), leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(bound, structure)
        with self._shadow.told(self), told_opaque_calls(self), self._watch, self:
            result = self._shadow.model(*args, **kwargs)
        output = pytree.tree_map_only(torch.Tensor, self._node_of, result)
        return Recording(
            graph=self._graph,
            output=output,
            constants=self._constants,
            facts=self._facts,
            guards=self._guards,
            mutations=self._mutations,
            changed_buffers=self._changed_buffers,
            training=self._shadow.model.training,
            opened=self._opened,
        )

    def _input(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        made = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        if made.requires_grad:
            made = made.view_as(made)  # a leaf could not be changed in place
        if name in self._batch:
            self._watch.mark([made])
        self._define(self._new("placeholder", name, (), {}), made)
        return made

    def call(self, module: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A module of the shadow is called."""
        name = self._shadow.names[id(module)]
        if self._is_paused:
            return self._note_maker(name, run(*args, **kwargs))
        if name in self._opened:
            self._stack.append(name)
            try:
                return run(*args, **kwargs)
            finally:
                self._stack.pop()
        compute = functools.partial(self._run_leaf, module, run)
        with self._paused():
            buffers = {f"{name}.{key}": (buffer, buffer._version) for key, buffer in module.named_buffers()}
            result = self._call("call_module", name, args, kwargs, compute)
            node = next(reversed(self._facts))
            for path, (buffer, version) in buffers.items():
                if buffer._version != version:
                    self._changed_buffers.setdefault(path, node)
        return result

    def _note_maker(self, name: str, result: Any) -> Any:
        for tensor in tensors_of(result):
            self._makers.setdefault(id(tensor), name)
            self._alive.append(tensor)
        return result

    def _run_leaf(self, module: nn.Module, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        kind = type(module)
        try:
            if kind in self._on_memory:
                result = self._shadow.run_on_memory(module, run, args, kwargs)
                if any(map(self._watch.follows_from_samples, tensors_of((args, kwargs)))):
                    self._watch.mark(tensors_of(result))
                return result
            return run(*args, **kwargs)
        except Exception as error:
            raise LeafFailedError(kind, self._shadow.names[id(module)], error, user_line()) from error

    def opaque(self, function: Callable[..., Any], args: Any, kwargs: Any, compute: Callable[..., Any]) -> Any:
        """A call that becomes one node though it is no torch function; `compute` is what runs now."""
        if self._is_paused:
            return compute(*args, **kwargs)
        return self._call("call_function", function, args, kwargs, compute)

    def checkpoint(self, run: Callable[..., Any], function: Any, args: Any, kwargs: Any) -> Any:
        """A checkpoint of a module is one node; `run` does it."""
        if self._is_paused:
            return run(function, *args, **kwargs)
        name = self._shadow.names.get(id(function))
        if name is None or name in self._opened:
            what = f"of module {name!r}, in which a stage starts" if name else "of a function that is no module"
            raise CaptureError(
                f"a checkpoint {what}, would be cut open at {user_line()}; checkpoint the modules inside of it, or "
                "start no stage there"
            )
        with self._paused():
            self._stack.append(name)
            try:
                compute = functools.partial(run_checkpoint, run, function)
                return self._call("call_function", checkpoint_of, (self._module(function), *args), kwargs, compute)
            finally:
                self._stack.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_paused:
            return func(*args, **kwargs)
        name = name_of(func)
        if name in _READS:
            return self._read(name, func, args, kwargs)
        return self._call(*as_node(func, name, args), kwargs, functools.partial(run_function, func, args))

    # How.

    def _call(self, op: str, target: Any, args: Any, kwargs: Any, compute: Callable[..., Any]) -> Any:
        """Runs a call, and makes a node of it where it gives tensors or changes some."""
        with self._paused():
            before = [(tensor, tensor._version) for tensor in tensors_of((args, kwargs))]
            self._watch.begin()
            result = compute(*args, **kwargs)
            changed = [tensor for tensor, version in before if tensor._version != version]
            has_tensors = bool(tensors_of(result))
            if op == "call_module" or has_tensors or changed or (before and is_effect(result)):
                node = self._new(op, target, *self._argument((args, kwargs)))
                self._define(node, result, draws=self._watch.is_random, keeps=op != "call_module" and not changed)
                self._note_changes(node, changed)
                if self._watch.is_sized_by_values and has_tensors and op != "call_module":
                    self._guard_sizes(node, result)
        return result

    def _note_changes(self, node: fx.Node, changed: Sequence[torch.Tensor]) -> None:
        for tensor in changed:
            self._mutations.append((memory_of(tensor), len(self._facts), node))
            found = self._attributes.get(id(tensor))
            if found is not None:
                self._changed_buffers.setdefault(found[0], node)

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def _read(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Values are read: what the recording takes for granted."""
        with self._paused():
            nodes = [self._node_of(tensor) for tensor in tensors_of((args, kwargs))]
            for node in nodes:
                self._check_readable(name, node)
            value = func(*args, **kwargs)
            if any(node.op != "get_attr" for node in nodes):
                given, options = self._argument((args, kwargs))
                self._guards.append(Guard(func, given, options, value, user_line(), tuple(nodes)))
        return value

    def _guard_sizes(self, node: fx.Node, value: Any) -> None:
        """The sizes of a result follow from values."""
        self._check_readable("its size", node)
        self._guards.append(Guard(shapes_of, (node,), {}, shapes_of(value), user_line(), (node,)))

    def _check_readable(self, name: str, node: fx.Node) -> None:
        fact = self._facts[node]
        if not fact.is_real or fact.is_random:
            raise CaptureError(self._why_unreadable(name, node))

    def _why_unreadable(self, name: str, node: fx.Node) -> str:
        path, where = (self._stack[-1] if self._stack else ""), user_line()
        source = structure_of(node) or node
        made = f"module {source.target!r} returned" if source.op == "call_module" else f"{source.name} is"
        follows = "random numbers" if self._facts[node].is_random else "the model's parameters"
        return (
            f"{f'module {path!r}' if path else 'the model'} reads values ({name}) of what {made}, which follows from "
            f"{follows}{', at ' + where if where else ''}: what runs next would depend on it. Pass ready stage modules "
            "(a list of modules as model), or start no stage inside of that module"
        )

    def _new(self, op: str, target: Any, args: Any, kwargs: Any) -> fx.Node:
        node = self._graph.create_node(op, target, args, kwargs)
        modules = [*self._stack, str(target)] if op == "call_module" else list(self._stack)
        modes = current_modes()
        node.meta.update(source=user_line(), modules=modules, modes=None if modes == self._base_modes else modes)
        return node

    def _define(self, node: fx.Node, value: Any, *, draws: bool = False, keeps: bool = False) -> None:
        """`node` is `value`: each of its tensors gets a node of its own; `keeps`: but for those that have one."""
        sources = [self._facts[one] for one in node.all_input_nodes]
        tensors = tensors_of(value)
        is_real = node.op != "call_module" and not any(isinstance(tensor, FakeTensor) for tensor in tensors)
        is_real = is_real and all(source.is_real for source in sources)
        is_random = draws or any(source.is_random for source in sources)
        varies = any(map(self._watch.follows_from_samples, tensors))
        self._facts[node] = NodeFacts.of(value, is_real=is_real, is_random=is_random, draws=draws, varies=varies)
        if isinstance(value, torch.Tensor):
            self._bind(node, value, keeps)
            return
        for path, leaf in pytree.tree_flatten_with_path(value)[0]:
            if isinstance(leaf, torch.Tensor):
                target, given, keys = part_of(node, path)
                part = self._graph.call_function(target, given)
                part.meta.update(node.meta, path=keys)
                varies = self._watch.follows_from_samples(leaf)
                self._facts[part] = NodeFacts.of(leaf, is_real=is_real, is_random=is_random, varies=varies)
                self._bind(part, leaf, keeps)

    def _bind(self, node: fx.Node, tensor: torch.Tensor, keeps: bool) -> None:
        known = self._nodes.get(id(tensor))
        if known is not None and (keeps or self._facts[known].is_real):
            return
        self._nodes[id(tensor)] = node
        self._alive.append(tensor)

    def _node_of(self, tensor: torch.Tensor) -> fx.Node:
        node = self._nodes.get(id(tensor))
        if node is None:
            node = self._get_attribute(tensor)
        return node

    def _get_attribute(self, tensor: torch.Tensor) -> fx.Node:
        if id(tensor) in self._attributes:
            path = self._attributes[id(tensor)][0]
        elif isinstance(tensor, FakeTensor) or id(tensor) in self._makers:
            raise LeakedError(self._makers.get(id(tensor)), user_line())
        elif tensor.requires_grad:
            raise CaptureError(
                f"a tensor of shape {tuple(tensor.shape)} that requires a gradient is no parameter of the model: "
                f"{user_line()}; make it a parameter"
            )
        else:
            path = f"_constant{len(self._constants)}"
            self._constants[path] = tensor
        node = self._new("get_attr", path, (), {})
        self._define(node, tensor)
        return node

    def _argument(self, value: Any) -> Any:
        """What a node is given: nodes for tensors, constants for what has none."""
        if isinstance(value, fx.Node):
            return value
        if isinstance(value, torch.Tensor):
            return self._node_of(value)
        if type(value) in (tuple, list):
            return type(value)(self._argument(one) for one in value)
        if isinstance(value, torch.Size):
            return tuple(value)
        if type(value) is dict and all(isinstance(key, str) for key in value):
            return {key: self._argument(one) for key, one in value.items()}
        if isinstance(value, slice):
            return slice(self._argument(value.start), self._argument(value.stop), self._argument(value.step))
        if value is Ellipsis or isinstance(value, _PLAIN):
            return value
        leaves, structure = pytree.tree_flatten(value)
        if structure.is_leaf():
            return self._object(value)
        node = self._new("call_function", builder(structure), tuple(self._argument(leaf) for leaf in leaves), {})
        self._define(node, value)
        return node

    def _module(self, module: nn.Module) -> fx.Node:
        """A module as an argument."""
        node = self._new("get_attr", self._shadow.names[id(module)], (), {})
        self._facts[node] = NodeFacts.of(None, is_real=True)
        return node

    def _object(self, value: Any) -> fx.Node:
        """An object as an argument: a function or the like."""
        if isinstance(value, nn.Module):
            return self._module(value)
        if not callable(value) and not isinstance(value, enum.Enum):
            raise CaptureError(
                f"an object of class {type(value).__qualname__} is handed on at {user_line()}: what it holds would be "
                "the same in each step; hand on tensors or plain values, or pass ready stage modules (a list of "
                "modules as model)"
            )
        path = next((path for path, known in self._constants.items() if known is value), None)
        if path is None:
            path = f"_constant{len(self._constants)}"
            self._constants[path] = value
        node = self._new("get_attr", path, (), {})
        self._facts[node] = NodeFacts.of(None, is_real=True)
        return node
