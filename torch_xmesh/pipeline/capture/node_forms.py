"""How calls and structures are written as nodes of a torch.fx graph."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree


def run_function(func: Any, args: Any, *_: Any, **kwargs: Any) -> Any:
    """Calls a function with the arguments that it was given, whatever those of its node are."""
    return func(*args, **kwargs)


def name_of(func: Any) -> str:
    """A torch function's name; that of a property's getter ends in ".__get__"."""
    name = getattr(func, "__name__", "")
    return f"{func.__self__.__name__}.{name}" if name in ("__get__", "__set__") else name


_METHODS = {id(getattr(torch.Tensor, name)): name for name in dir(torch.Tensor)}
"""By method, its name: some have another one than they are called by."""


def as_node(func: Any, name: str, args: Any) -> tuple[str, Any, Any]:
    """A torch function as a node's op, target and arguments."""
    if name.endswith(".__get__"):
        return "call_function", getattr, (args[0], name.removesuffix(".__get__"))
    if name.endswith(".__set__"):
        return "call_function", setattr, (args[0], name.removesuffix(".__set__"), args[1])
    if id(func) in _METHODS and args:
        return "call_method", _METHODS[id(func)], args
    return "call_function", func if _is_found_by_name(func) else _caller(func), args


@functools.cache
def _is_found_by_name(func: Any) -> bool:
    """Whether torch.fx, which writes functions of torch by their names in the code of a graph, finds this one."""
    path = fx.node._get_qualified_name(func).split(".")
    if path[0] != "torch":
        return True
    found: Any = torch
    for name in path[1:]:
        found = getattr(found, name, None)
    return found is func


@functools.cache
def _caller(func: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return func(*args, **kwargs)

    call.__name__ = call.__qualname__ = getattr(func, "__name__", "call")
    return call


def is_in_place(name: Any) -> bool:
    """Whether a method of this name changes its tensor."""
    return isinstance(name, str) and name.endswith("_") and not name.endswith("__")


def describe(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """A value's leaves, tensors as their shapes, and its structure."""
    leaves, structure = pytree.tree_flatten(value)
    return [leaf.shape if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], structure


def expecter(module: str, expected: tuple[list[Any], pytree.TreeSpec]) -> Callable[[Any], Any]:
    """Hands a module's result on, and raises RuntimeError where it is built otherwise than it was recorded."""

    def expect(value: Any) -> Any:
        leaves, structure = describe(value)
        same = structure == expected[1] and all(
            type(leaf) is type(other) and bool(leaf == other) for leaf, other in zip(leaves, expected[0], strict=True)
        )
        if not same:
            raise RuntimeError(
                f"module {module!r} looks at values, and returned {leaves} where its recording has {expected[0]}: what "
                "follows would be wrong; return tensors of sizes that do not depend on values, or pass ready stages"
            )
        return value

    return expect


def is_effect(result: Any) -> bool:
    """Whether a call that gives no tensor is made for what it does."""
    return result is None or isinstance(result, torch.utils.hooks.RemovableHandle)


def shapes_of(value: Any) -> list[tuple[int, ...]]:
    """The shapes of the tensors in a value."""
    return [tuple(tensor.shape) for tensor in tensors_of(value)]


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors in a value."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def part_of(node: fx.Node, path: Sequence[Any]) -> tuple[Callable[..., Any], Any, list[Any]]:
    """A leaf of the structure that a node is, found by pytree's `path`: the function and arguments of its node, and the
    plain keys of the way."""
    keys = [getattr(key, "idx", getattr(key, "key", getattr(key, "name", None))) for key in path]
    if len(keys) == 1 and not isinstance(path[0], pytree.GetAttrKey):
        return operator.getitem, (node, keys[0]), keys
    steps = tuple((isinstance(step, pytree.GetAttrKey), key) for step, key in zip(path, keys, strict=True))
    return take, (node, steps), keys


def take(value: Any, steps: Sequence[tuple[bool, Any]]) -> Any:
    """What is found in a structure on the way of `steps`: (whether it is an attribute, its name or key)."""
    for is_attribute, key in steps:
        value = getattr(value, key) if is_attribute else value[key]
    return value


def builder(structure: pytree.TreeSpec) -> Callable[..., Any]:
    """Makes a structure of its leaves."""

    def build(*leaves: Any) -> Any:
        return pytree.tree_unflatten(leaves, structure)

    return build
