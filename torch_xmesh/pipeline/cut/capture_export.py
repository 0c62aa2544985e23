"""The fallback of capture.py: torch.export's graph of ATen operators, with the model's own parameters."""

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from torch_xmesh.pipeline.cut.capture import Captured, merge_modes, refuse_compiled
from torch_xmesh.pipeline.cut.chunk_specs import Chunk


def capture_with_export(
    model: nn.Module, arguments: tuple[tuple[Any, ...], dict[str, Any]], names: Sequence[str], specs: Sequence[Any]
) -> Captured:
    """Export `model`; parameters and buffers stay the model's, read by their names.

    Args:
        arguments: example (args, kwargs); their tensors become placeholders called `names`, everything else is
            constant.
        specs: a chunk spec per leaf of `arguments`; the dims to cut are dynamic where the model allows it.

    Raises:
        Exception: whatever torch.export raises; ValueError for compiled modules.
    """
    refuse_compiled(model, [name for name, _ in model.named_modules()])
    training = model.training
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        arguments = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), arguments)
    flags = {module: module.training for module in model.modules()}
    own, other = _export_mode(model, arguments, names, specs), None
    try:
        model.train(not training)
        with contextlib.suppress(Exception):
            other = _export_mode(model, arguments, names, specs)
    finally:
        for module, flag in flags.items():
            module.training = flag
    if other is None or not merge_modes(own, other, training):
        own.training = training
    own.fixed_batch = own.fixed_batch or (own.training is None and other is not None and other.fixed_batch)
    return own


def _export_mode(model: nn.Module, arguments: Any, names: Sequence[str], specs: Sequence[Any]) -> Captured:
    args, kwargs = arguments
    order = [name for name in inspect.signature(model.forward).parameters if name in kwargs]
    ordered = {name: kwargs[name] for name in [*order, *(name for name in kwargs if name not in order)]}
    dims = [
        {spec.split_dim % leaf.dim(): torch.export.Dim.AUTO} if isinstance(spec, Chunk) else None
        for leaf, spec in zip(pytree.tree_leaves(arguments), specs, strict=True)
    ]
    dynamic = pytree.tree_unflatten(dims, pytree.tree_structure(arguments))
    dynamic_kwargs = {name: dynamic[1][name] for name in ordered}
    with _refused_functions():
        exported = torch.export.export(
            model, args, ordered, dynamic_shapes=_by_name(model, dynamic[0], dynamic_kwargs), strict=False
        )
    return _to_traced(exported, model, arguments=arguments, ordered=ordered, names=names, specs=specs)


def _by_name(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """dynamic_shapes in the form that torch.export takes: by parameter name, variadic ones in one entry."""
    bound = inspect.signature(model.forward).bind_partial(*args, **kwargs)
    return dict(bound.arguments)


@contextlib.contextmanager
def _refused_functions() -> Iterator[None]:
    def apply(cls: Any, /, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(f"torch.export would lose the backward of autograd.Function {cls.__name__}")

    with mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)):
        yield


def _to_traced(
    exported: Any,
    model: nn.Module,
    *,
    arguments: Any,
    ordered: dict[str, Any],
    names: Sequence[str],
    specs: Sequence[Any],
) -> Captured:
    constants: dict[str, Any] = {}
    graph = fx.Graph()
    placeholders = [graph.placeholder(name) for name in names]
    # Each user input as its own placeholder or constant, in the order in which the exported program lists them.
    leaves, structure = pytree.tree_flatten(arguments)
    nodes = iter(placeholders)
    bound = pytree.tree_unflatten(
        [next(nodes) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], structure
    )
    user_inputs = iter(pytree.tree_leaves((bound[0], {name: bound[1][name] for name in ordered})))
    cut_specs = [spec for leaf, spec in zip(leaves, specs, strict=True) if isinstance(leaf, torch.Tensor)]
    cut = {node: spec.split_dim for node, spec in zip(placeholders, cut_specs, strict=True) if isinstance(spec, Chunk)}
    kinds = {spec.arg.name: spec for spec in exported.graph_signature.input_specs}
    copied: dict[fx.Node, Any] = {}
    output: Any = None
    fixed = False
    for node in exported.graph.nodes:
        if node.op == "placeholder" and kinds[node.name].kind == InputKind.USER_INPUT:
            copied[node] = next(user_inputs)
            fixed = fixed or (copied[node] in cut and isinstance(node.meta["val"].shape[cut[copied[node]]], int))
        elif node.op == "placeholder":
            copied[node] = graph.get_attr(_attribute(kinds[node.name], node.name, exported, constants))
        elif node.op == "get_attr":
            constants[f"_export_{node.target}"] = getattr(exported.graph_module, node.target)
            copied[node] = graph.get_attr(f"_export_{node.target}")
        elif node.op == "output":
            flat = [copied.get(leaf, leaf) if isinstance(leaf, fx.Node) else leaf for leaf in node.args[0]]
            output = pytree.tree_unflatten(flat, exported.call_spec.out_spec)
        else:
            copied[node] = graph.node_copy(node, lambda original: copied[original])
            copied[node].meta = {}
        if isinstance(copied.get(node), fx.Node):
            stack = (node.meta.get("nn_module_stack") or {}).values()
            source = " ".join(line.strip() for line in (node.stack_trace or "").strip().splitlines()[-2:])
            copied[node].meta.update(source=source, modules=[path.split("@")[0] for path, _ in stack], modes=None)
    return Captured(graph, output, constants, fixed_batch=fixed)


def _attribute(spec: Any, name: str, exported: Any, constants: dict[str, Any]) -> str:
    """The name under which a stage reads a parameter, buffer or constant of an exported program."""
    if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
        return str(spec.target)
    constants[f"_export_{name}"] = exported.constants[spec.target]
    return f"_export_{name}"
