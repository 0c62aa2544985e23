"""The stages' modules, the values between them and the output, out of a graph that is cut."""

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from torch_xmesh.pipeline.cut.propagate import Constant, NodeInfo, Propagation, TensorInfo
from torch_xmesh.pipeline.cut.stage_module import GraphCut, Leaf, StageBuilder, stage_module
from torch_xmesh.pipeline.cut.stage_numbers import OtherSizesError
from torch_xmesh.pipeline.cut.values import (
    InputInfo,
    OutputStructure,
    Partition,
    SizedStages,
    StageProgram,
    ValueInfo,
    ValueName,
)


def assemble(
    model: nn.Module,
    arguments: Any,
    cut: GraphCut,
    *,
    samples: int | None,
    propagation: Propagation,
    random: set[int] | None,
) -> tuple[Partition, Callable[[Propagation], SizedStages]]:
    """The partition, and what its stages are for inputs of other sizes; OtherSizesError where they do not hold."""
    last = cut.num_stages - 1
    outputs = _output_structure(cut)
    placeholders = [node for node in cut.captured.graph.nodes if node.op == "placeholder"]
    named = dict(zip(placeholders, input_names(model, arguments), strict=True))
    received: dict[Leaf, list[int]] = {Leaf(node, 0): [] for node in placeholders}
    for stage, needs in enumerate(cut.needs):
        for leaf in needs.leaves:
            received.setdefault(leaf, []).append(stage)
    for leaf in outputs:
        received.setdefault(leaf, [])

    def producer(leaf: Leaf) -> int | None:
        if leaf.node.op == "placeholder":
            return None
        home = cut.home[leaf.node]
        return last if home is None or (cut.is_local(leaf.node, last) and not received[leaf]) else home

    order = {node: index for index, node in enumerate(cut.captured.graph.nodes)}
    ranked = sorted(
        received, key=lambda leaf: (-1 if producer(leaf) is None else producer(leaf), order[leaf.node], leaf.index)
    )
    names = {leaf: _value_name(cut, leaf, named) for leaf in ranked}

    def values_of(found: Propagation) -> dict[str, ValueInfo]:
        made = {}
        for leaf in ranked:
            tensor = found.info[leaf.node].leaves[leaf.index]
            if not isinstance(tensor, TensorInfo):
                raise OtherSizesError(f"value {names[leaf]} is no tensor")
            made[names[leaf]] = _value_info(
                names[leaf],
                tensor,
                producer=producer(leaf),
                received=received[leaf],
                is_output=leaf in outputs,
                samples=samples,
                fixed=found.fixed_batch,
                depends=cut.depends_on_samples(leaf.node),
            )
        return made

    values = values_of(propagation)
    stages = []
    for stage in range(cut.num_stages):
        made = (
            list(outputs) if stage == last else [leaf for leaf in ranked if producer(leaf) == stage and received[leaf]]
        )
        graph = StageBuilder(cut, stage, names).build(made)
        needed = tuple(names[leaf] for leaf in cut.needs[stage].leaves)
        stages.append(
            StageProgram(
                index=stage,
                module=stage_module(model, cut.captured, graph, stage),
                input_values=needed,
                output_values=tuple(names[leaf] for leaf in made),
                model_inputs=tuple(name for name in needed if values[name].producer is None),
                uses_rng=random is None or stage in random,
                only_mode=cut.captured.training,
                use=functools.partial(cut.numbers.use, cut.info),
            )
        )
    _check_buffers(stages, propagation)
    result = finish_partition(
        stages,
        values,
        arguments=arguments,
        named=list(named.values()),
        samples=samples,
        fixed_batch=propagation.fixed_batch,
    )
    result = dataclasses.replace(
        result,
        outputs=_named_outputs(cut, names, cut.info),
        unused_parameters=_unused_parameters(model, stages),
    )

    def at(found: Propagation) -> SizedStages:
        _check_structures(cut, found.info)
        cut.numbers.check(found.info)
        use = functools.partial(cut.numbers.use, found.info)
        programs = [dataclasses.replace(program, use=use) for program in stages]
        return SizedStages(values_of(found), _named_outputs(cut, names, found.info), found.fixed_batch, programs)

    return result, at


def _check_structures(cut: GraphCut, found: Mapping[fx.Node, NodeInfo]) -> None:
    for node, info in cut.info.items():
        if info.has_tensors:
            kinds = [[isinstance(leaf, TensorInfo) for leaf in one.leaves] for one in (info, found[node])]
            if info.structure != found[node].structure or kinds[0] != kinds[1]:
                raise OtherSizesError(f"node {node.name} ({node.target}) returns another structure")


def _output_structure(cut: GraphCut) -> dict[Leaf, None]:
    """The tensors of the model's output, each once, in order."""
    for node in cut.output_leaves:
        for info in cut.info[node].leaves:
            if not isinstance(info, TensorInfo | Constant):
                raise ValueError(
                    f"the model's output contains the result of node {node.name}, which is no tensor and depends "
                    "on the batch size: return a tensor"
                )
    return dict.fromkeys(leaf for node in cut.output_leaves for leaf in cut.leaves_of(node))


def _named_outputs(cut: GraphCut, names: dict[Leaf, str], known: Mapping[fx.Node, NodeInfo]) -> OutputStructure:
    def expand(leaf: Any) -> Any:
        if not isinstance(leaf, fx.Node):
            return leaf
        info = known[leaf]
        flat = [
            one.value if isinstance(one, Constant) else _named(leaf, names.get(Leaf(leaf, index)))
            for index, one in enumerate(info.leaves)
        ]
        return pytree.tree_unflatten(flat, info.structure)

    leaves, structure = pytree.tree_flatten(pytree.tree_map(expand, cut.captured.output))
    return OutputStructure(tuple(leaves), structure)


def _named(node: fx.Node, name: str | None) -> ValueName:
    if name is None:
        raise OtherSizesError(f"the model's output has the result of node {node.name}, which is no constant any more")
    return ValueName(name)


def _value_name(cut: GraphCut, leaf: Leaf, named: dict[fx.Node, tuple[str, Any]]) -> str:
    if leaf.node in named:
        return named[leaf.node][0]
    return leaf.node.name if cut.info[leaf.node].is_leaf else f"{leaf.node.name}.{leaf.index}"


def _value_info(
    name: str,
    tensor: TensorInfo,
    *,
    producer: int | None,
    received: list[int],
    is_output: bool,
    samples: int | None,
    fixed: bool,
    depends: bool,
) -> ValueInfo:
    return ValueInfo(
        name=name,
        producer=producer,
        consumers=tuple(sorted(stage for stage in received if stage != producer)),
        shape=tensor.shape(samples or 0),
        dtype=tensor.dtype,
        requires_grad=tensor.requires_grad,
        batch_dim=tensor.batch_dim,
        is_output=is_output,
        tensor=tensor,
        samples=samples or 0,
        fixed_batch=fixed,
        varies=depends and producer is not None and tensor.batch_dim is None,
    )


def finish_partition(
    stages: list[StageProgram],
    values: dict[str, ValueInfo],
    *,
    arguments: Any,
    named: Sequence[tuple[str, tuple[Any, ...]]],
    samples: int | None,
    fixed_batch: bool,
) -> Partition:
    """What all partitions have in common: inputs, their structure, tied parameters. The caller adds the outputs."""
    inputs = {}
    for name, path in named:
        info = values[name]
        inputs[name] = InputInfo(name, path, info.shape, info.dtype, info.batch_dim, info.consumers)
    flat, structure = pytree.tree_flatten_with_path(arguments)
    names = iter(name for name, _ in named)
    leaves = tuple(
        ValueName(next(names)) if isinstance(leaf, torch.Tensor) else (leaf, pytree.keystr(keys)) for keys, leaf in flat
    )
    empty = OutputStructure((), pytree.tree_structure(()))
    return Partition(
        stages, values, inputs, empty, _tied_parameters(stages), (), samples, fixed_batch, leaves, structure
    )


def _tied_parameters(stages: Sequence[StageProgram]) -> list[list[tuple[int, str]]]:
    holders: dict[int, list[tuple[int, str]]] = {}
    for stage in stages:
        for name, parameter in stage.module.named_parameters():
            holders.setdefault(id(parameter), []).append((stage.index, name))
    return [group for group in holders.values() if len(group) > 1]


def _unused_parameters(model: nn.Module, stages: Sequence[StageProgram]) -> tuple[str, ...]:
    held = {id(parameter) for stage in stages for parameter in stage.module.parameters()}
    return tuple(name for name, parameter in model.named_parameters() if id(parameter) not in held)


def _check_buffers(stages: Sequence[StageProgram], propagation: Propagation) -> None:
    """Refuse a buffer in several stages if it changes.

    Batch norm hides all changes but its counter's, so a module's buffers count as one.
    """
    changed = {name.rpartition(".")[0]: min(changing) for name, changing in propagation.changed_buffers.items()}
    holders: dict[str, list[int]] = {}
    for stage in stages:
        for name, _ in stage.module.named_buffers(remove_duplicate=False):
            holders.setdefault(name, []).append(stage.index)
    for name, found in holders.items():
        owner = name.rpartition(".")[0]
        if len(found) > 1 and owner in changed:
            raise ValueError(
                f"buffer {name!r} is changed in stage {changed[owner]} and read in stages {found}: their copies "
                "would differ; "
                "keep its users in one stage"
            )


def input_names(
    model: nn.Module, arguments: tuple[tuple[Any, ...], dict[str, Any]]
) -> list[tuple[str, tuple[Any, ...]]]:
    """A name and a path for each tensor argument, after the parameters of the model's forward."""
    parameters = [
        p.name
        for p in inspect.signature(model.forward).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    taken: set[str] = set()
    named = []
    for keys, leaf in pytree.tree_flatten_with_path(arguments)[0]:
        if not isinstance(leaf, torch.Tensor):
            continue
        plain: list[Any] = [getattr(key, "idx", getattr(key, "key", getattr(key, "name", None))) for key in keys]
        path = ("args" if plain[0] == 0 else "kwargs", *plain[1:])
        first = plain[1]
        if plain[0] == 0:
            first = parameters[first] if first < len(parameters) else f"arg{first}"
        name = re.sub(r"\W", "_", "_".join(str(word) for word in (first, *plain[2:])))
        name = name if not name[:1].isdigit() else f"_{name}"
        while name in taken:
            name += "_"
        taken.add(name)
        named.append((name, path))
    return named
