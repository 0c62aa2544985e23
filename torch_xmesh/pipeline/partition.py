"""A model cut into pipeline stages: `partition` traces it once and gives each stage a module and the tensors that
cross.

Tensors go straight from the stage that makes them to every stage that reads them. Integers and shapes are constants
or follow from the batch size; values made of buffers and constants alone are computed again where they are read.
Nothing of the model is run, copied or changed.
"""

import dataclasses
import difflib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from torch_xmesh.pipeline.microbatch import batch_size, leaf_specs
from torch_xmesh.pipeline.partition_propagate import Constant, Propagation, TensorInfo, propagate, training_effects
from torch_xmesh.pipeline.partition_ready import Exchange, StageSignature, chain_ready_stages
from torch_xmesh.pipeline.partition_values import InputInfo, OutputStructure, StageProgram, ValueInfo, ValueName
from torch_xmesh.pipeline.stage_module import GraphCut, Leaf, StageBuilder, stage_module
from torch_xmesh.pipeline.trace import Traced, UntraceableError, source_line, trace_fx
from torch_xmesh.pipeline.trace_export import trace_export

__all__ = [
    "InputInfo",
    "OutputStructure",
    "Partition",
    "SplitAt",
    "StageProgram",
    "StageSignature",
    "ValueInfo",
    "partition",
    "split_at",
]


@dataclasses.dataclass(frozen=True)
class SplitAt:
    """Where stages start: before each of these modules; the first stage starts at the model's beginning."""

    names: tuple[str, ...]


def split_at(*names: str) -> SplitAt:
    """Start a stage BEFORE each named module, in the order in which the model calls them: n names give n + 1 stages."""
    return SplitAt(tuple(names))


@dataclasses.dataclass
class Partition:
    """A model as stages.

    Attributes:
        stages: what each stage runs.
        values: the tensors that enter the model, cross stages or leave it; inputs first, then by producer and order
            of execution.
        inputs: the tensor arguments of the model, by value name.
        outputs: the model's output over values.
        tied_parameters: groups of (stage, name) of one parameter object that several stages hold.
        unused_parameters: the model's parameters that no stage holds.
        batch_size: samples of the example arguments, None if no argument has a batch dim.
        fixed_batch: the stages work for `batch_size` samples only.
    """

    stages: list[StageProgram]
    values: dict[str, ValueInfo]
    inputs: dict[str, InputInfo]
    outputs: OutputStructure
    tied_parameters: list[list[tuple[int, str]]]
    unused_parameters: tuple[str, ...]
    batch_size: int | None
    fixed_batch: bool
    argument_leaves: tuple[Any, ...]
    argument_structure: pytree.TreeSpec

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    def bind(
        self, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, stage: int | None = None
    ) -> dict[str, torch.Tensor]:
        """The model's input values in one microbatch's arguments: all of them, or those that `stage` takes.

        Raises:
            ValueError: another structure, dtype or size (the batch dim apart) than the example's, or another
                constant.
        """
        leaves, structure = pytree.tree_flatten(sorted_arguments(args, kwargs))
        if structure != self.argument_structure:
            raise ValueError(
                f"the arguments have the structure {structure}, the example arguments had {self.argument_structure}"
            )
        wanted = set(self.inputs if stage is None else self.stages[stage].model_inputs)
        bound = {}
        for leaf, expected in zip(leaves, self.argument_leaves, strict=True):
            if not isinstance(expected, ValueName):
                _check_constant(leaf, expected[0], expected[1])
            elif expected.name in wanted:
                self._check_input(self.inputs[expected.name], leaf)
                bound[expected.name] = leaf
        return bound

    def _check_input(self, info: InputInfo, tensor: Any) -> None:
        where = f"argument {describe_path(info.path)}"
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(
                f"{where} must be a tensor of shape {info.shape} as in the example arguments, got "
                f"{type(tensor).__name__}"
            )
        if tensor.dtype != info.dtype:
            raise ValueError(f"{where} has dtype {tensor.dtype}, the example had {info.dtype}")
        free = None if self.fixed_batch else info.batch_dim
        shapes = [[size for dim, size in enumerate(shape) if dim != free] for shape in (tensor.shape, info.shape)]
        if tensor.dim() != len(info.shape) or shapes[0] != shapes[1]:
            raise ValueError(
                f"{where} has shape {tuple(tensor.shape)}, the example had {info.shape}"
                + (f" (dim {free}, the batch, may differ)" if free is not None else "")
            )

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output by running the stages one after another in this process, on one autograd graph."""
        values = self.bind(args, kwargs)
        for stage in self.stages:
            results = stage(*[values[name] for name in stage.input_values])
            values.update(zip(stage.output_values, results, strict=True))
        return self.outputs.unflatten(values)

    def __str__(self) -> str:
        lines = []
        for stage in self.stages:
            count = sum(parameter.numel() for parameter in stage.module.parameters())
            lines.append(
                f"stage {stage.index}: {count} parameters; {', '.join(stage.input_values)} -> "
                f"{', '.join(stage.output_values)}"
            )
        for value in self.values.values():
            source = "input" if value.producer is None else f"stage {value.producer}"
            readers = ", ".join(str(stage) for stage in value.consumers) + (
                " and the output" if value.is_output else ""
            )
            grad = ", differentiable" if value.is_differentiable else ""
            lines.append(
                f"{value.name}: {source} -> {readers or 'nobody'}; {value.dtype} {list(value.shape)}, batch dim "
                f"{value.batch_dim}{grad}"
            )
        return "\n".join(lines)


def partition(
    model: nn.Module | Sequence[nn.Module | None],
    example_args: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    split: SplitAt | str | None = None,
    *,
    num_stages: int | None = None,
    args_chunk_spec: Any = None,
    kwargs_chunk_spec: Any = None,
    memory_limit_bytes: int | None = None,
    exchange: Exchange | None = None,
    device: torch.device | None = None,
) -> Partition:
    """Cut `model` into stages.

    Args:
        model: a module, or the list of ready stage modules: stage k gets what stage k - 1 returns (a tuple's or
            list's items as arguments); None where another process holds the stage.
        example_args, example_kwargs: one microbatch's arguments; tensors count by shape and dtype only.
        split: `split_at(...)`, "auto" (with `num_stages`; measured here, so processes must agree on one result), or
            None for a list or one stage.
        num_stages: checked against `split` where that says it.
        args_chunk_spec: which dim holds the samples, as for ``torch.distributed.pipelining``; dim 0 by default.
        exchange: needed for a list with None: see `Exchange`.
        device: where a model or arguments on meta will run; default: the device of what is not on meta, else the CPU.

    Raises:
        ValueError: the model cannot be traced, a split point is unknown or out of order, the number of stages
            differs, or a value cannot cross.
    """
    arguments = sorted_arguments(example_args, example_kwargs)
    specs = leaf_specs(arguments[0], args_chunk_spec, "args") + leaf_specs(arguments[1], kwargs_chunk_spec, "kwargs")
    samples = batch_size(*arguments, args_chunk_spec, kwargs_chunk_spec)
    if isinstance(model, nn.Module) and split == "auto":
        from torch_xmesh.pipeline.profile import choose_split

        if num_stages is None:
            raise ValueError('split="auto" needs num_stages')
        split = choose_split(
            model,
            *arguments,
            num_stages,
            memory_limit_bytes=memory_limit_bytes,
            args_chunk_spec=args_chunk_spec,
            kwargs_chunk_spec=kwargs_chunk_spec,
        )
    _check_split(model, split, num_stages)
    device = device or _device_of(model, arguments)
    if not isinstance(model, nn.Module):
        return _partition_ready(list(model), arguments, specs, samples, exchange, device)
    assert isinstance(split, SplitAt | None)
    if split is None or not split.names:
        return _partition_ready([model], arguments, specs, samples, exchange, device)
    return _partition_traced(model, arguments, specs, samples, split, device)


def sorted_arguments(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments in the form that a partition compares: keyword arguments by name."""
    return tuple(args), dict(sorted((kwargs or {}).items()))


def describe_path(path: tuple[Any, ...]) -> str:
    """``("kwargs", "mask", 0)`` as ``kwargs['mask'][0]``."""
    return str(path[0]) + "".join(f"[{part!r}]" for part in path[1:])


def _device_of(model: Any, arguments: Any) -> torch.device:
    modules = [model] if isinstance(model, nn.Module) else [stage for stage in model if stage is not None]
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    tensors += [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
    return next((tensor.device for tensor in tensors if not tensor.is_meta), torch.device("cpu"))


def _check_split(model: Any, split: Any, num_stages: int | None) -> None:
    if isinstance(model, nn.Module):
        if not isinstance(split, SplitAt | None):
            raise ValueError(
                f'split must be split_at("module", ...), "auto", or None with a list of stage modules, got {split!r}'
            )
        found, what = len(split.names) + 1 if split else 1, f"split {list(split.names) if split else None}"
    else:
        if split is not None:
            raise ValueError(f"split must be None where the model is a list of ready stage modules, got {split!r}")
        if not model or not all(isinstance(stage, nn.Module | None) for stage in model):
            raise ValueError(
                f"a model given as stages is a list of modules or None, got {[type(stage).__name__ for stage in model]}"
            )
        found, what = len(model), "the list of stage modules"
    if num_stages is not None and found != num_stages:
        raise ValueError(
            f"{what} makes {found} stages, but there are {num_stages} meshes: one mesh per stage is needed"
        )


def trace_model(model: nn.Module, arguments: Any, specs: Sequence[Any], opened: frozenset[str]) -> Traced:
    """The model's graph by torch.fx, else by torch.export.

    Raises:
        ValueError: both fail; the message has both reasons.
    """
    names = [name for name, _ in _input_names(model, arguments)]
    try:
        return trace_fx(model, arguments, names, opened)
    except UntraceableError as fx_error:
        try:
            return trace_export(model, arguments, names, specs)
        except Exception as error:
            where = source_line(error)
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(
                f"{fx_error}; torch.export cannot either{' at ' + where if where else ''}: "
                f"{type(error).__name__}: {reason}. Start stages at modules whose "
                "parents are traceable, or pass a list of ready stage modules"
            ) from error


def opened_modules(names: Sequence[str]) -> frozenset[str]:
    """The modules that tracing must look into so that stages can start before the named ones: all that contain one."""
    parts = [name.split(".") for name in names]
    return frozenset(".".join(part[:depth]) for part in parts for depth in range(len(part)))


def _partition_traced(
    model: nn.Module, arguments: Any, specs: list[Any], samples: int | None, split: SplitAt, device: torch.device
) -> Partition:
    names = [_canonical_name(model, name) for name in split.names]
    traced = trace_model(model, arguments, specs, opened_modules(names))
    starts = _stage_starts(traced, names)
    position = {node: index for index, node in enumerate(traced.graph.nodes)}

    def stage_of(node: fx.Node) -> int:
        return sum(position[node] >= start for start in starts)

    leaves = pytree.tree_leaves(arguments)
    examples = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    tensor_specs = [spec for leaf, spec in zip(leaves, specs, strict=True) if isinstance(leaf, torch.Tensor)]
    propagation = propagate(model, traced, examples, tensor_specs, stage_of, device)
    random, changed_in_training = training_effects(model, traced, examples, tensor_specs, stage_of, device)
    propagation.changed_buffers.update(changed_in_training)
    cut = GraphCut(traced, propagation, stage_of, len(starts) + 1)
    return _assemble(model, arguments, cut, samples, propagation, random)


def _canonical_name(model: nn.Module, name: str) -> str:
    """The name under which tracing knows a module (the first one, if it has several)."""
    modules = dict(model.named_modules(remove_duplicate=False))
    if not name or name not in modules:
        close = difflib.get_close_matches(name, [known for known in modules if known], n=5, cutoff=0.4)
        hint = f"; close names: {', '.join(close)}" if close else f"; its modules are {', '.join(list(modules)[1:11])}"
        raise ValueError(f"split point {name!r} is no module of {type(model).__name__}{hint}")
    return next(str(known) for known, module in model.named_modules() if module is modules[name])


def _stage_starts(traced: Traced, names: Sequence[str]) -> list[int]:
    """For each split point the position of the first node in that module."""
    starts = []
    nodes = list(traced.graph.nodes)
    for name in names:
        inside = (
            at
            for at, node in enumerate(nodes)
            if any(path == name or path.startswith(name + ".") for path in node.meta["modules"])
        )
        start = next(inside, None)
        if start is None:
            raise ValueError(f"split point {name!r} is never called by the model's forward")
        starts.append(start)
    real = [node.op not in ("placeholder", "get_attr") for node in nodes]
    for index, start in enumerate(starts):
        previous = starts[index - 1] if index else 0
        if start < previous:
            raise ValueError(
                f"split points must be in the order of the model's calls: {names[index]!r} is called before "
                f"{names[index - 1]!r}"
            )
        if not any(real[previous:start]):
            raise ValueError(
                f"stage {index} would be empty: nothing runs before {names[index]!r}"
                + (f" and after the start of {names[index - 1]!r}" if index else "")
            )
    return starts


def _input_names(
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


def _assemble(
    model: nn.Module,
    arguments: Any,
    cut: GraphCut,
    samples: int | None,
    propagation: Propagation,
    random: set[int] | None,
) -> Partition:
    last = cut.num_stages - 1
    outputs = _output_structure(cut)
    placeholders = [node for node in cut.traced.graph.nodes if node.op == "placeholder"]
    named = dict(zip(placeholders, _input_names(model, arguments), strict=True))
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

    order = {node: index for index, node in enumerate(cut.traced.graph.nodes)}
    ranked = sorted(
        received, key=lambda leaf: (-1 if producer(leaf) is None else producer(leaf), order[leaf.node], leaf.index)
    )
    names = {leaf: _value_name(cut, leaf, named) for leaf in ranked}
    values = {
        names[leaf]: _value_info(
            names[leaf],
            cut.tensor(leaf),
            producer(leaf),
            received[leaf],
            leaf in outputs,
            samples,
            propagation.fixed_batch,
        )
        for leaf in ranked
    }
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
                module=stage_module(model, cut.traced, graph, stage),
                input_values=needed,
                output_values=tuple(names[leaf] for leaf in made),
                model_inputs=tuple(name for name in needed if values[name].producer is None),
                uses_rng=random is None or stage in random,
                only_mode=cut.traced.training,
            )
        )
    _check_buffers(stages, propagation)
    result = finish_partition(stages, values, arguments, list(named.values()), samples, propagation.fixed_batch)
    return dataclasses.replace(
        result, outputs=_named_outputs(cut, names), unused_parameters=_unused_parameters(model, stages)
    )


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


def _named_outputs(cut: GraphCut, names: dict[Leaf, str]) -> OutputStructure:
    def expand(leaf: Any) -> Any:
        if not isinstance(leaf, fx.Node):
            return leaf
        info = cut.info[leaf]
        flat = [
            one.value if isinstance(one, Constant) else ValueName(names[Leaf(leaf, index)])
            for index, one in enumerate(info.leaves)
        ]
        return pytree.tree_unflatten(flat, info.structure)

    leaves, structure = pytree.tree_flatten(pytree.tree_map(expand, cut.traced.output))
    return OutputStructure(tuple(leaves), structure)


def _value_name(cut: GraphCut, leaf: Leaf, named: dict[fx.Node, tuple[str, Any]]) -> str:
    if leaf.node in named:
        return named[leaf.node][0]
    return leaf.node.name if cut.info[leaf.node].is_leaf else f"{leaf.node.name}.{leaf.index}"


def _value_info(
    name: str,
    tensor: TensorInfo,
    producer: int | None,
    received: list[int],
    is_output: bool,
    samples: int | None,
    fixed: bool,
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
    )


def finish_partition(
    stages: list[StageProgram],
    values: dict[str, ValueInfo],
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


def _check_constant(found: Any, expected: Any, where: str) -> None:
    if isinstance(found, torch.Tensor) or type(found) is not type(expected) or found != expected:
        shown = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else repr(found)
        raise ValueError(
            f"argument {where} is a constant of the traced model: the example had {expected!r}, got {shown}; pass "
            "it as a tensor or partition again"
        )


def _partition_ready(
    modules: list[nn.Module | None],
    arguments: Any,
    specs: list[Any],
    samples: int | None,
    exchange: Callable[..., Any] | None,
    device: torch.device,
) -> Partition:
    named = _input_names(_Anything(), arguments)
    stages, values, outputs, fixed = chain_ready_stages(
        modules, arguments, specs, samples, [name for name, _ in named], exchange, device
    )
    result = finish_partition(stages, values, arguments, named, samples, fixed)
    return dataclasses.replace(result, outputs=outputs)


class _Anything(nn.Module):
    """Stands for a stage that another process may hold: its arguments have no names."""

    def forward(self, *args: Any, **kwargs: Any) -> None:
        """Takes anything."""
