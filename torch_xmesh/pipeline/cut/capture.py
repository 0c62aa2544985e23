"""A model as a graph of module calls: torch.fx, opened only as far down as stages start, torch.export where fx cannot.

Modules in which no stage starts stay whole, so their hooks, control flow, checkpoints and Python functions run as
written. Inside an opened module's forward, what torch.fx would lose without a word is recorded: autocast and no_grad
regions, ``torch.autograd.Function``, non-reentrant checkpoints of submodules, tensor factories and random numbers,
and constants that differ between train() and eval().
"""

import contextlib
import dataclasses
import functools
import inspect
import linecache
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch import fx, nn
from torch.utils import _pytree as pytree

Modes = tuple[bool, tuple[tuple[str, bool, torch.dtype], ...]]
RANDOM_FACTORIES = ("rand", "randn", "randint", "randperm", "normal", "bernoulli")
_FACTORIES = (
    "arange",
    "zeros",
    "ones",
    "full",
    "empty",
    "eye",
    "linspace",
    "tril_indices",
    "triu_indices",
    *RANDOM_FACTORIES,
)
_LIBRARY = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(os.path.dirname(__file__)) + os.sep,  # the pipeline's own code
)
_CONTAINERS = (tuple, list, dict, slice)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclasses.dataclass
class Captured:
    """A model's graph without its output node.

    Attributes:
        graph: placeholders (one per tensor of the example arguments, in pytree order), then nodes in execution order.
            A node's ``meta["modules"]`` has the names of the modules that it is in, ``meta["source"]`` its line and
            ``meta["modes"]`` its Modes or None.
        output: the model's output, any pytree with nodes as leaves.
        constants: tensors (and torch.export's subgraphs) that the graph reads and the model does not hold, by name.
        fixed_batch: the graph holds for the example's batch size only.
        training: the only mode in which the graph may run, or None for both.
        why_fixed: why the graph holds for the example's sizes (the batch dim apart) only, or None.
    """

    graph: fx.Graph
    output: Any
    constants: dict[str, Any]
    fixed_batch: bool = False
    training: bool | None = None
    why_fixed: str | None = None


class CaptureError(ValueError):
    """torch.fx cannot trace the model: the message has module, line and reason."""


def capture_fx(
    model: nn.Module, arguments: tuple[tuple[Any, ...], dict[str, Any]], names: Sequence[str], opened: frozenset[str]
) -> Captured:
    """Trace `model`, opening the modules named in `opened` (the root ``""`` among them) and no other.

    Args:
        arguments: example (args, kwargs); their tensors become placeholders called `names`, everything else is
            constant.

    Raises:
        CaptureError: see there.
        ValueError: an opened module has hooks.
    """
    refuse_compiled(model, opened)
    for name in sorted(opened):
        if any(getattr(model.get_submodule(name), hooks) for hooks in _HOOKS):
            raise ValueError(
                f"a stage starts inside {_called(name)} ({type(model.get_submodule(name)).__name__}), which has "
                "hooks: they would run "
                "while tracing, not in training; move the split point out of it or register the hooks on the "
                "modules inside"
            )
    training = model.training
    own, other = _trace_mode(model, arguments, names, opened=opened, training=training), None
    with contextlib.suppress(CaptureError):
        other = _trace_mode(model, arguments, names, opened=opened, training=not training)
    if other is None or not merge_modes(own, other, training):
        own.training = training
    return own


def refuse_compiled(model: nn.Module, names: Iterable[str]) -> None:
    """Raises ValueError for a compiled module among those that tracing looks into: it would run uncompiled."""
    for name in sorted(names):
        module = model.get_submodule(name)
        if "_orig_mod" in module._modules or module._compiled_call_impl is not None:
            raise ValueError(
                f"a stage starts inside {_called(name)} ({type(module).__name__}), which is compiled: it would run "
                "uncompiled; compile the modules inside that no stage cuts, or whole stages: "
                "parallelize=lambda stage, module, mesh: torch.compile(module)"
            )


def source_line(error: BaseException) -> str:
    """Where the user's code raised: ``file:line in function: `code```, or an empty string."""
    found = ""
    frame = error.__traceback__
    while frame is not None:
        code = frame.tb_frame.f_code
        if not code.co_filename.startswith(_LIBRARY) and not code.co_filename.startswith("<"):
            found = _describe_line(code, frame.tb_lineno)
        frame = frame.tb_next
    return found


def enter_modes(grad: bool, autocasts: tuple[tuple[str, bool, torch.dtype], ...]) -> contextlib.ExitStack:
    """Start a region with this grad mode and these autocasts; `exit_modes` ends it."""
    stack = contextlib.ExitStack()
    stack.enter_context(torch.set_grad_enabled(grad))
    for device, enabled, dtype in autocasts:
        stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
    return stack


def exit_modes(stack: contextlib.ExitStack) -> None:
    """End the region that `enter_modes` started."""
    stack.close()


def by_mode(training: bool, in_training: Any, in_evaluation: Any) -> Any:
    """A constant of the model's forward that depends on ``module.training``."""
    return in_training if training else in_evaluation


def _called(name: str) -> str:
    return f"module {name!r}" if name else "the model"


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True

    def __init__(self, opened: frozenset[str], arguments: Any, names: Sequence[str]) -> None:
        super().__init__()
        self._opened, self._arguments, self._names = opened, arguments, names
        self._base_modes = _current_modes()
        self.tensor_constants: dict[str, torch.Tensor] = {}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self._opened

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        leaves, structure = pytree.tree_flatten(self._arguments)
        names = iter(self._names)
        bound = [
            self.create_proxy("placeholder", next(names), (), {}) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in leaves
        ]
        args, kwargs = pytree.tree_unflatten(bound, structure)

        def run() -> Any:
            return root_fn(self.root, *args, **kwargs)

        return run, []

    def create_node(
        self, kind: str, target: Any, args: Any, kwargs: Any, name: str | None = None, type_expr: Any = None
    ) -> fx.Node:
        node = super().create_node(kind, target, args, kwargs, name, type_expr)
        node.meta["source"] = _user_line()
        stack = [path for path, _ in self.module_stack.values()]
        node.meta["modules"] = [*stack, target] if kind == "call_module" else stack
        modes = _current_modes()
        node.meta["modes"] = None if modes == self._base_modes else modes
        return node

    def get_fresh_qualname(self, prefix: str) -> str:
        index = 0
        while hasattr(self.root, f"{prefix}{index}"):
            index += 1
        return f"{prefix}{index}"

    def create_arg(self, a: Any) -> Any:
        before = set(self.root.__dict__)
        result = super().create_arg(a)
        for name in set(self.root.__dict__) - before:
            self.tensor_constants[name] = getattr(self.root, name)
        return result

    def is_opened(self, module: nn.Module) -> bool:
        return self.path_of_module(module) in self._opened


def _trace_mode(
    model: nn.Module, arguments: Any, names: Sequence[str], *, opened: frozenset[str], training: bool
) -> Captured:
    tracer = _Tracer(opened, arguments, names)
    flags = {module: module.training for module in model.modules()}
    try:
        if training != model.training:
            for module in model.modules():
                module.training = training
        with torch.enable_grad(), _recorded_calls(tracer, model, opened):
            graph = tracer.trace(model)
    except Exception as error:
        inside = next(reversed(tracer.module_stack.values()))[0] if tracer.module_stack else ""
        where = source_line(error)
        raise CaptureError(
            f"torch.fx cannot trace {_called(inside)} "
            f"({type(model.get_submodule(inside)).__name__}){' at ' + where if where else ''}: "
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        ) from error
    finally:
        for module, flag in flags.items():
            module.training = flag
        for name in tracer.tensor_constants:
            if hasattr(model, name):
                delattr(model, name)
    output = next(node for node in graph.nodes if node.op == "output")
    structure = _plain(output.args[0])
    graph.erase_node(output)
    return Captured(graph, structure, dict(tracer.tensor_constants))


def merge_modes(own: Captured, other: Captured, training: bool) -> bool:
    """Make `own` (of mode ``training``) hold for both modes; False if `other` differs in more than constants."""
    pairs = list(zip(own.graph.nodes, other.graph.nodes, strict=False))
    if len(own.graph.nodes) != len(other.graph.nodes) or len(own.constants) != len(other.constants):
        return False
    twin = {theirs: mine for mine, theirs in pairs}
    try:
        for mine, theirs in pairs:
            if mine.op != theirs.op or mine.target != theirs.target or mine.meta["modes"] != theirs.meta["modes"]:
                return False
            merge = _ConstantMerge(own.graph, mine, twin, training)
            args, kwargs = merge(mine.args, theirs.args), merge(mine.kwargs, theirs.kwargs)
            mine.args, mine.kwargs = args, kwargs
    except _ModesDifferError:
        return False
    mine_out, theirs_out = pytree.tree_leaves(own.output), pytree.tree_leaves(other.output)
    theirs_out = [twin.get(leaf) if isinstance(leaf, fx.Node) else leaf for leaf in theirs_out]
    return len(mine_out) == len(theirs_out) and all(map(_same_constant, mine_out, theirs_out))


class _ModesDifferError(Exception):
    """The graphs of train() and eval() differ in more than constants."""


class _ConstantMerge:
    """Walks the arguments of a node in both modes; constants that differ become a `by_mode` node before it."""

    def __init__(self, graph: fx.Graph, node: fx.Node, twin: dict[fx.Node, fx.Node], training: bool) -> None:
        self._graph, self._node, self._twin, self._training = graph, node, twin, training

    def __call__(self, mine: Any, theirs: Any) -> Any:
        if isinstance(mine, fx.Node) or isinstance(theirs, fx.Node):
            if not isinstance(theirs, fx.Node) or self._twin.get(theirs) is not mine:
                raise _ModesDifferError
            return mine
        if isinstance(mine, tuple | list) and isinstance(theirs, tuple | list) and len(mine) == len(theirs):
            return type(mine)([self(a, b) for a, b in zip(mine, theirs, strict=True)])
        if isinstance(mine, dict) and isinstance(theirs, dict) and list(mine) == list(theirs):
            return {key: self(value, theirs[key]) for key, value in mine.items()}
        if isinstance(mine, slice) and isinstance(theirs, slice):
            return slice(self(mine.start, theirs.start), self(mine.stop, theirs.stop), self(mine.step, theirs.step))
        if _same_constant(mine, theirs):
            return mine
        if isinstance(mine, _CONTAINERS) or isinstance(theirs, _CONTAINERS):
            raise _ModesDifferError
        with self._graph.inserting_before(self._node):
            flag = self._graph.get_attr("training")
            choice = self._graph.call_function(
                by_mode, (flag, mine, theirs) if self._training else (flag, theirs, mine)
            )
        for node in (flag, choice):
            node.meta.update(self._node.meta, modes=None)
        return choice


def _same_constant(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, fx.Node) or isinstance(theirs, fx.Node):
        return mine is theirs
    return type(mine) is type(theirs) and bool(mine == theirs)


def _plain(structure: Any) -> Any:
    if isinstance(structure, dict):
        return {key: _plain(value) for key, value in structure.items()}
    if isinstance(structure, list):
        return [_plain(value) for value in structure]
    return tuple(_plain(value) for value in structure) if type(structure) is tuple else structure


def _current_modes() -> Modes:
    kinds = ["cpu", *(["cuda"] if torch.version.cuda is not None else [])]
    return torch.is_grad_enabled(), tuple(
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds
    )


@functools.cache
def function_call(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` as something that a graph can call by name; the same object for the same function."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function.apply(*args, **kwargs)  # type: ignore[no-untyped-call]

    call.__name__ = call.__qualname__ = f"{function.__name__}_apply"
    call.__module__ = function.__module__
    return call


@contextlib.contextmanager
def _recorded_calls(tracer: _Tracer, model: nn.Module, opened: frozenset[str]) -> Iterator[None]:
    """While tracing, calls that torch.fx does not see become nodes of the graph."""
    apply = torch.autograd.Function.__dict__["apply"]
    checkpoint = torch.utils.checkpoint.checkpoint

    def recorded_apply(cls: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not _has_proxy((args, kwargs)):
            return apply.__get__(None, cls)(*args, **kwargs)
        return tracer.create_proxy("call_function", function_call(cls), args, kwargs)

    def recorded_checkpoint(function: Any, *args: Any, **kwargs: Any) -> Any:
        if not _has_proxy((args, kwargs)):
            return checkpoint(function, *args, **kwargs)
        if isinstance(function, nn.Module) and tracer.is_opened(function):
            return function(*args)
        if not isinstance(function, nn.Module):
            raise ValueError("checkpoint of a function that is no module, in a module in which a stage starts")
        proxy = tracer.create_proxy("call_function", checkpoint, (function, *args), kwargs)
        proxy.node.meta["modules"] = [*proxy.node.meta["modules"], tracer.path_of_module(function)]
        return proxy

    def recorded(factory: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return tracer.create_proxy("call_function", factory, args, kwargs)

        return call

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.autograd.Function, "apply", classmethod(recorded_apply)))
        stack.enter_context(mock.patch.object(torch.utils.checkpoint, "checkpoint", recorded_checkpoint))
        for name in _FACTORIES:
            stack.enter_context(mock.patch.object(torch, name, recorded(getattr(torch, name))))
        for scope in {id(scope): scope for scope in _forward_globals(model, opened)}.values():
            for name in [name for name, value in scope.items() if value is checkpoint]:
                stack.enter_context(mock.patch.dict(scope, {name: recorded_checkpoint}))
        yield


def _forward_globals(model: nn.Module, opened: frozenset[str]) -> Iterator[dict[str, Any]]:
    for name in opened:
        forward = inspect.unwrap(type(model.get_submodule(name)).forward)
        if hasattr(forward, "__globals__"):
            yield forward.__globals__


def _has_proxy(tree: Any) -> bool:
    return any(isinstance(leaf, fx.Proxy) for leaf in pytree.tree_leaves(tree))


def _user_line() -> str:
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        filename = frame.f_code.co_filename
        if not filename.startswith(_LIBRARY) and not filename.startswith("<") and "/unittest/" not in filename:
            return _describe_line(frame.f_code, frame.f_lineno)
        frame = frame.f_back
    return ""


def _describe_line(code: types.CodeType, line: int) -> str:
    text = linecache.getline(code.co_filename, line).strip()
    return f"{code.co_filename}:{line} in {code.co_name}" + (f": `{text}`" if text else "")
