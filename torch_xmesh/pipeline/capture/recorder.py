"""One forward of a model, recorded as a torch.fx graph of module calls and torch functions.

A `Recorder` is a torch function mode around a forward of the model's shadow, on real inputs. A module in which no
split point lies is called as a module, and is one node. Every other torch function that is called between such modules
is one node as well. What follows from the inputs alone is computed on the way; what follows from parameters is fake.
"""

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from torch_xmesh.pipeline.capture.arguments import contents_of, have_changed
from torch_xmesh.pipeline.capture.canonical import make_canonical
from torch_xmesh.pipeline.capture.errors import (
    READY_STAGES,
    CaptureError,
    FakeNeededError,
    LeafFailedError,
    LookInsideError,
)
from torch_xmesh.pipeline.capture.graph_writer import GraphWriter
from torch_xmesh.pipeline.capture.name_order import NameOrder
from torch_xmesh.pipeline.capture.node_forms import (
    as_node,
    describe,
    is_effect,
    is_in_place,
    name_of,
    run_function,
    shapes_of,
    tensors_of,
)
from torch_xmesh.pipeline.capture.opened_functions import OPENED
from torch_xmesh.pipeline.capture.recording import Guard, Recording, memory_of, nodes_behind, structure_of
from torch_xmesh.pipeline.capture.shadow import Shadow
from torch_xmesh.pipeline.capture.source_lines import user_line
from torch_xmesh.pipeline.capture.told_calls import CHECKPOINT_OPTIONS, checkpoint_of, run_checkpoint, told_calls
from torch_xmesh.pipeline.capture.watch import OperatorWatch, RandomStates

_READS = frozenset(
    "__bool__ __int__ __float__ __index__ __complex__ __contains__ __array__ item tolist numpy equal allclose "
    "is_nonzero".split()
)
"""Functions that tell a tensor's values as something that is no tensor."""

_WRITES = frozenset("__setitem__ __iadd__ __isub__ __imul__ __itruediv__ __iand__ __ior__ __ixor__".split())
"""Functions that change their first argument, besides those whose name ends in an underscore."""

DROPS = frozenset("dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout".split())
"""Functions that give back what they are given, where nothing is dropped."""


def _as_new(compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result as a tensor of its own: recordings in both modes, of training and evaluation, have the same nodes."""
    result = compute(*args, **kwargs)
    return result.view_as(result) if any(result is argument for argument in (*args, *kwargs.values())) else result


class Recorder(TorchFunctionMode):
    """Records one forward; see `record`. Threading: that of the forward."""

    def __init__(
        self,
        shadow: Shadow,
        *,
        opened: frozenset[str],
        on_memory: frozenset[type],
        as_fakes: frozenset[str],
        batch: Collection[str],
        opens_functions: bool = False,
    ) -> None:
        """`as_fakes`: nodes whose results are fakes, whatever they are made of; `batch`: the names of the inputs that
        are cut into microbatches; with `opens_functions` what is checkpointed, and multi-head attention, is recorded
        by the functions that it calls. Nodes in a checkpoint have its number in ``meta["checkpoint"]``. Dropouts that
        drop nothing are nodes, too. A node that draws random numbers has in ``meta["order"]`` the dims of
        its tensor as they lie in memory, the outermost first."""
        super().__init__()
        self._batch, self._as_fakes, self._opens_functions = batch, as_fakes, opens_functions
        self._shadow, self._opened, self._on_memory = shadow, opened, on_memory
        self._alive: list[torch.Tensor] = []  # or ids are used again
        self._guards: list[Guard] = []
        self._closed_checkpoints: list[str] = []
        self._mutations: list[tuple[int, int, fx.Node]] = []
        self._changed_tensors: dict[str, fx.Node] = {}
        self._is_paused = False
        self.failed_in = ""  # the innermost module that is looked into and raised what went through all around it
        self._failed: Exception | None = None
        self._watch = OperatorWatch(shadow.model.buffers())
        self._writer = GraphWriter(shadow, self._watch, opened)
        self._random = RandomStates()
        self._has_read = False  # the leaf that runs has read values
        self._paths = {memory_of(tensor): path for path, tensor in reversed(self._writer.attributes.values())}

    # What is recorded.

    def record(self, names: Sequence[str], arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Recording:
        """Runs the model; its tensor arguments become placeholders called `names`."""
        leaves, structure = pytree.tree_flatten(arguments)
        given = iter(names)
        bound = [self._input(next(given), leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(bound, structure)
        writer = self._writer
        with writer.calls.beginning_here(), told_calls(self, self._shadow.model), self._watch, self:
            result = self._shadow.model(*args, **kwargs)
        self._check_random()
        output = pytree.tree_map_only(torch.Tensor, writer.node_of, result)
        order = NameOrder(self._shadow.model)
        constants = make_canonical(writer.graph, writer.sites, writer.facts, self._mutations, writer.constants, order)
        return Recording(
            graph=writer.graph,
            device=self._shadow.device,
            output=output,
            constants=constants,
            facts=writer.facts,
            guards=self._guards,
            mutations=self._mutations,
            changed_tensors=self._changed_tensors,
            opened=self._opened,
            has_gradients=torch.is_grad_enabled(),
            numbers=self._shadow.numbers(self._opened),
            closed_checkpoints=tuple(self._closed_checkpoints),
        )

    def _input(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        made = tensor.detach().to(self._shadow.device, copy=True).requires_grad_(tensor.requires_grad)
        if made.requires_grad:
            made = made.view_as(made)  # a leaf could not be changed in place
        made = self._shadow.fake_like(made) if name in self._as_fakes else made
        if name in self._batch:
            self._watch.mark([made])
        self._writer.define(self._writer.new("placeholder", name, (), {}), made)
        return made

    def call(self, module: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A module is called."""
        name = self._shadow.names.get(id(module))
        if name is None:  # made in the forward
            return run(*args, **kwargs)
        if self._is_paused:
            return self._note_maker(name, run(*args, **kwargs))
        if name in self._opened:
            self._writer.stack.append(name)
            try:
                return run(*args, **kwargs)
            except Exception as error:
                if error is not self._failed:
                    self._failed, self.failed_in = error, name
                raise
            finally:
                self._writer.stack.pop()
        with self._paused():
            self._check_random()
            contents = contents_of((args, kwargs))
            given = self._writer.argument((args, kwargs))  # before the module can change what is in a list
            self._has_read, self._watch.leaf = False, name
            compute = functools.partial(self._run_leaf, module, run)
            result = self._call("call_module", name, args, kwargs, compute, given=given, modules=[module])
            self._random.forget()
        if have_changed(contents):
            raise LookInsideError("a module changes a list or dict that it is given", user_line(), leaf=name)
        return result

    def _note_maker(self, name: str, result: Any) -> Any:
        for tensor in tensors_of(result):
            self._writer.makers.setdefault(id(tensor), name)
            self._alive.append(tensor)
        return result

    def _run_leaf(self, module: nn.Module, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        kind = type(module)
        try:
            if kind not in self._on_memory:
                return run(*args, **kwargs)
            result = self._shadow.run_on_memory(module, run, args, kwargs)
        except Exception as error:
            raise LeafFailedError(kind, self._shadow.names[id(module)], error, user_line()) from error
        self._has_read = True
        if any(map(self._watch.follows_from_samples, tensors_of((args, kwargs)))):
            self._watch.mark(tensors_of(result))
        return result

    def _check_random(self) -> None:
        """Raises CaptureError where random numbers of Python's or numpy's were drawn outside of leaves."""
        if self._random.have_changed():
            path = self._writer.stack[-1] if self._writer.stack else ""
            raise CaptureError(
                f"{f'module {path!r}' if path else 'the model'} draws random numbers of Python's or numpy's before "
                f"{user_line()}: they would be the same in each step; draw them of torch's, or "
                f"{READY_STAGES}"
            )

    def opaque(self, function: Callable[..., Any], args: Any, kwargs: Any, compute: Callable[..., Any]) -> Any:
        """A call that becomes one node though it is no torch function; `compute` is what runs now."""
        if self._is_paused:
            return compute(*args, **kwargs)
        return self._call("call_function", function, args, kwargs, compute)

    def checkpoint(self, run: Callable[..., Any], function: Any, args: Any, kwargs: Any) -> Any:
        """A checkpoint whose insides are not recorded is one node; `run` does it. What it runs must be modules in which
        no stage begins."""
        if self._is_paused:
            self._closed_checkpoints.append(user_line())
            return run(function, *args, **kwargs)
        if self._opens_functions:
            own = {name: argument for name, argument in kwargs.items() if name not in CHECKPOINT_OPTIONS}
            with self._writer.checkpoint():
                return function(*args, **own)
        with self._paused():
            found = self._writer.lift(function)
            if isinstance(found, str):
                raise CaptureError(
                    f"a checkpoint of {found} would be cut open at {user_line()}: checkpoint modules in which no stage "
                    f"begins, or {READY_STAGES}"
                )
            held, _ = found
            modules = [value for value in held if isinstance(value, nn.Module)]
            names = [self._shadow.names[id(module)] for module in modules]
            self._writer.stack += names
            try:
                compute = functools.partial(run_checkpoint, run, function)
                given = (self._writer.argument(function), *args)
                return self._call("call_function", checkpoint_of, given, kwargs, compute, modules=modules)
            finally:
                del self._writer.stack[len(self._writer.stack) - len(names) :]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        if self._is_paused:
            self._has_read = self._has_read or name in _READS
            return func(*args, **kwargs)
        if name in _READS:
            return self._read(name, func, args, kwargs)
        if self._opens_functions and func in OPENED:
            with self:
                return OPENED[func](*args, **kwargs)
        self._check_written(name, args, kwargs)
        compute = functools.partial(run_function, func, args)
        if self._opens_functions and name in DROPS:
            compute = functools.partial(_as_new, compute)
        return self._call(*as_node(func, name, args), kwargs, compute)

    # How.

    def _call(
        self,
        op: str,
        target: Any,
        args: Any,
        kwargs: Any,
        compute: Callable[..., Any],
        *,
        given: Any = None,
        modules: Sequence[nn.Module] = (),
    ) -> Any:
        """Runs a call, and makes a node of it where it gives tensors or changes some; those of `modules` among them.
        `given`: the arguments as nodes, where they are known before."""
        with self._paused():
            held = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
            before = [(tensor, tensor._version) for tensor in (*tensors_of((args, kwargs)), *held)]
            self._watch.begin()
            try:
                result = compute(*args, **kwargs)
            finally:
                self._watch.leaf = None
            written = self._watch.written
            changed = [
                tensor for tensor, version in before if tensor._version != version or memory_of(tensor) in written
            ]
            if op == "call_method" and is_in_place(target) and result is args[0]:
                changed.append(result)  # also those that count no version: requires_grad_()
            has_tensors = bool(tensors_of(result))
            if op == "call_module" or has_tensors or changed or (before and is_effect(result)):
                node = self._writer.new(op, target, *(given or self._writer.argument((args, kwargs))))
                if node.name in self._as_fakes:
                    result = pytree.tree_map_only(torch.Tensor, self._as_fake, result)
                if self._watch.is_random and self._opens_functions and isinstance(result, torch.Tensor):
                    strides = result.stride()
                    node.meta["order"] = sorted(range(result.dim()), key=lambda dim: -strides[dim])
                keeps = op != "call_module" and not changed
                self._writer.define(node, result, draws=self._watch.is_random, keeps=keeps)
                self._note_changes(node, changed)
                if op == "call_module" and self._has_read:
                    node.meta["expects"] = describe(result)
                elif self._watch.is_sized_by_values and has_tensors:
                    self._guard_sizes(node, result)
        return result

    def _as_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        made = self._shadow.fake_like(tensor)
        if self._watch.follows_from_samples(tensor):
            self._watch.mark([made])
        return made

    def _check_written(self, name: str, args: Any, kwargs: Any) -> None:
        """A fake is not written into a real tensor: that would stay as it is."""
        if not args or not (is_in_place(name) or name in _WRITES) or not isinstance(args[0], torch.Tensor):
            return
        with self._paused():
            given = tensors_of((args[1:], kwargs))
            if isinstance(args[0], FakeTensor) or not any(isinstance(leaf, FakeTensor) for leaf in given):
                return
            memory = memory_of(args[0])
            raise FakeNeededError(next(node.name for node, fact in self._writer.facts.items() if memory in fact.memory))

    def _note_changes(self, node: fx.Node, changed: Sequence[torch.Tensor]) -> None:
        node.meta["changes_to_gradient"] = any(tensor.requires_grad for tensor in changed)
        for tensor in changed:
            memory = memory_of(tensor)
            self._writer.check_changeable(memory)
            self._mutations.append((memory, len(self._writer.facts), node))
            if memory in self._paths:
                self._changed_tensors.setdefault(self._paths[memory], node)

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
            nodes = [self._writer.node_of(tensor) for tensor in tensors_of((args, kwargs))]
            for node in nodes:
                self._check_readable(name, node)
            value = func(*args, **kwargs)
            if any(node.op != "get_attr" for node in nodes):
                given, options = self._writer.argument((args, kwargs))
                self._guards.append(Guard(func, given, options, value, user_line(), tuple(nodes)))
        return value

    def _guard_sizes(self, node: fx.Node, value: Any) -> None:
        """The sizes of a result follow from values."""
        self._check_readable("its size", node)
        self._guards.append(Guard(shapes_of, (node,), {}, shapes_of(value), user_line(), (node,)))

    def _check_readable(self, name: str, node: fx.Node) -> None:
        """Values may be read of what follows from the inputs alone, as functions made it that can be called again."""
        fact = self._writer.facts[node]
        behind = nodes_behind(node)
        modules = [str(source.target) for source in behind if source.op == "call_module"]
        changed = {memory for memory, _, _ in self._mutations}
        is_changed = any(changed & self._writer.facts[source].memory for source in behind)
        if not fact.is_real or fact.is_random or is_changed:
            raise CaptureError(self._why_unreadable(name, node, is_changed))
        if modules:
            raise LookInsideError("values of a module's result are read", user_line(), leaf=modules[0])

    def _why_unreadable(self, name: str, node: fx.Node, is_changed: bool) -> str:
        path, where = (self._writer.stack[-1] if self._writer.stack else ""), user_line()
        source = structure_of(node) or node
        made = f"module {source.target!r} returned" if source.op == "call_module" else f"{source.name} is"
        fact = self._writer.facts[node]
        follows = "follows from random numbers" if fact.is_random else "follows from the model's parameters"
        follows = "was changed in place" if is_changed and fact.is_real else follows
        return (
            f"{f'module {path!r}' if path else 'the model'} reads values ({name}) of what {made}, which "
            f"{follows}{', at ' + where if where else ''}: what runs next would depend on it; "
            f"{READY_STAGES}, or start no stage inside of that module"
        )
