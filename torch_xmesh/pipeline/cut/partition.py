"""A model cut into pipeline stages: `partition` captures it once and gives each stage a module and the tensors that
cross.

Tensors go straight from the stage that makes them to every stage that reads them. Integers and shapes are constants
or follow from the batch size; values made of buffers and constants alone are computed again where they are read.
Nothing of the model is run, copied or changed.
"""

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from torch_xmesh.pipeline.cut.assemble import assemble, finish_partition, input_names
from torch_xmesh.pipeline.cut.capture import Captured, CaptureError, capture_fx, refuse_compiled, source_line
from torch_xmesh.pipeline.cut.capture_export import capture_with_export
from torch_xmesh.pipeline.cut.microbatch import batch_size, leaf_specs
from torch_xmesh.pipeline.cut.propagate import propagate, training_effects
from torch_xmesh.pipeline.cut.ready import Exchange, StageSignature, chain_ready_stages
from torch_xmesh.pipeline.cut.sandbox import shadow, unchanged
from torch_xmesh.pipeline.cut.stage_module import GraphCut
from torch_xmesh.pipeline.cut.values import (
    InputInfo,
    OutputStructure,
    Partition,
    Shapes,
    SizedStages,
    StageProgram,
    ValueInfo,
    sorted_arguments,
)

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
    """Start a stage BEFORE each named module, in the order in which the model calls them: n names give n + 1 stages.

    Args:
        names: of modules, as in ``model.named_modules()``.

    Returns:
        what ``PipelineEngine(split=...)`` takes.

    Raises:
        ValueError: something is no name.
    """
    for name in names:
        if not isinstance(name, str):
            hint = f': did you mean split_at("{name}")?' if isinstance(name, int) else ""
            raise ValueError(f"split_at takes names of modules, got {name!r} ({type(name).__name__}){hint}")
    return SplitAt(tuple(names))


def partition(
    model: nn.Module | Sequence[nn.Module | None],
    example_args: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    split: SplitAt | str | None = None,
    *,
    num_stages: int | None = None,
    args_chunk_spec: Any = None,
    kwargs_chunk_spec: Any = None,
    exchange: Exchange | None = None,
    device: torch.device | None = None,
) -> Partition:
    """Cut `model` into stages.

    Args:
        model: a module, or the list of ready stage modules: stage k gets what stage k - 1 returns (a tuple's or
            list's items as arguments); None where another process holds the stage.
        example_args, example_kwargs: one microbatch's arguments; tensors count by shape and dtype only.
        split: `split_at(...)`, for example what `choose_split` found; None for a list or one stage.
        num_stages: checked against `split` where that says it.
        args_chunk_spec: which dim holds the samples, as for ``torch.distributed.pipelining``; dim 0 by default.
        exchange: needed for a list with None: see `Exchange`.
        device: where a model or arguments on meta will run; default: the device of what is not on meta, else the CPU.

    Raises:
        ValueError: the model cannot be captured, a split point is unknown or out of order, the number of stages
            differs, or a value cannot cross.
    """
    check_example(model, example_args, example_kwargs, split)
    arguments = sorted_arguments(example_args, example_kwargs)
    specs = leaf_specs(arguments[0], args_chunk_spec, "args") + leaf_specs(arguments[1], kwargs_chunk_spec, "kwargs")
    samples = batch_size(*arguments, args_chunk_spec, kwargs_chunk_spec)
    _check_split(model, split, num_stages)
    device = device or _device_of(model, arguments)
    if not isinstance(model, nn.Module):
        return _partition_ready(list(model), arguments, specs, samples=samples, exchange=exchange, device=device)
    assert isinstance(split, SplitAt | None)
    if split is None or not split.names:
        return _partition_ready([model], arguments, specs, samples=samples, exchange=exchange, device=device)
    return _partition_traced(model, arguments, specs, samples=samples, split=split, device=device)


def check_example(model: Any, example_args: Any, example_kwargs: Any, split: Any) -> None:
    """Raises ValueError for example arguments of another form, and for a model that cannot be cut without any."""
    if not isinstance(example_args, tuple | list):
        raise ValueError(
            "example_args is a tuple of one microbatch's positional arguments, got "
            f"{type(example_args).__name__}: pass (x,) for a model that is called as model(x)"
        )
    if not isinstance(example_kwargs, Mapping | None):
        raise ValueError(f"example_kwargs is a dict of keyword arguments or None, got {type(example_kwargs).__name__}")
    if isinstance(model, nn.Module) and split is not None and not example_args and not example_kwargs:
        raise ValueError(
            "example_args is missing: a model is cut by what it does with one microbatch's arguments; pass (x,) for a "
            "model that is called as model(x)"
        )


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


def capture_model(model: nn.Module, arguments: Any, specs: Sequence[Any], opened: frozenset[str]) -> Captured:
    """The model's graph by torch.fx, else by torch.export.

    Raises:
        ValueError: both fail; the message has both reasons.
    """
    names = [name for name, _ in input_names(model, arguments)]
    try:
        with unchanged(model):
            return capture_fx(model, arguments, names, opened)
    except CaptureError as fx_error:
        try:
            with unchanged(model):
                captured = capture_with_export(model, arguments, names, specs)
            captured.why_fixed = f"torch.export made its graph of the example's sizes, since {fx_error}"
            return captured
        except Exception as error:
            where = source_line(error)
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(
                f"{fx_error}; torch.export cannot either{' at ' + where if where else ''}: "
                f"{type(error).__name__}: {reason}. Start stages at modules whose "
                "parents are traceable, or pass a list of ready stage modules"
            ) from error


def opened_modules(names: Iterable[str]) -> frozenset[str]:
    """The modules that tracing must look into so that stages can start before the named ones: all that contain one."""
    parts = [name.split(".") for name in names]
    return frozenset(".".join(part[:depth]) for part in parts for depth in range(len(part)))


def _partition_traced(
    model: nn.Module, arguments: Any, specs: list[Any], *, samples: int | None, split: SplitAt, device: torch.device
) -> Partition:
    refuse_compiled(model, [""])
    names = [_canonical_name(model, name) for name in split.names]
    captured = capture_model(model, arguments, specs, opened_modules(names))
    starts = _stage_starts(captured, names)
    position = {node: index for index, node in enumerate(captured.graph.nodes)}

    def stage_of(node: fx.Node) -> int:
        return sum(position[node] >= start for start in starts)

    leaves = pytree.tree_leaves(arguments)
    examples = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    tensor_specs = [spec for leaf, spec in zip(leaves, specs, strict=True) if isinstance(leaf, torch.Tensor)]
    propagation = propagate(model, captured, examples, specs=tensor_specs, stage_of=stage_of, device=device)
    random, changed_in_training = training_effects(
        model, captured, examples, specs=tensor_specs, stage_of=stage_of, device=device
    )
    propagation.changed_buffers.update(changed_in_training)
    cut = GraphCut(captured, propagation, stage_of, len(starts) + 1)
    result, at = assemble(model, arguments, cut, samples=samples, propagation=propagation, random=random)
    copied = Shadow([model])

    def resize(shapes: Shapes) -> SizedStages:
        if captured.why_fixed is not None:
            raise ValueError(captured.why_fixed)
        others = resized_examples(examples, shapes.values())
        return at(propagate(copied.module(), captured, others, specs=tensor_specs, stage_of=stage_of, device=device))

    result.resize = resize
    return result


def _canonical_name(model: nn.Module, name: str) -> str:
    """The name under which tracing knows a module (the first one, if it has several)."""
    modules = dict(model.named_modules(remove_duplicate=False))
    if not name or name not in modules:
        close = difflib.get_close_matches(name, [known for known in modules if known], n=5, cutoff=0.4)
        hint = f"; close names: {', '.join(close)}" if close else f"; its modules are {', '.join(list(modules)[1:11])}"
        raise ValueError(f"split point {name!r} is no module of {type(model).__name__}{hint}")
    return next(str(known) for known, module in model.named_modules() if module is modules[name])


def _stage_starts(captured: Captured, names: Sequence[str]) -> list[int]:
    """For each split point the position of the first node in that module."""
    starts = []
    nodes = list(captured.graph.nodes)
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


def _partition_ready(
    modules: list[nn.Module | None],
    arguments: Any,
    specs: list[Any],
    *,
    samples: int | None,
    exchange: Callable[..., Any] | None,
    device: torch.device,
) -> Partition:
    named = input_names(_Anything(), arguments)
    names = [name for name, _ in named]
    made = chain_ready_stages(modules, arguments, specs, samples=samples, names=names, exchange=exchange, device=device)
    result = finish_partition(
        made.programs, made.values, arguments=arguments, named=named, samples=samples, fixed_batch=made.fixed_batch
    )
    copied = Shadow(modules)

    def resize(shapes: Shapes) -> SizedStages:
        leaves, structure = pytree.tree_flatten(arguments)
        examples = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        others = iter(resized_examples(examples, shapes.values()))
        flat = [next(others) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        given = pytree.tree_unflatten(flat, structure)
        return chain_ready_stages(
            copied.modules(), given, specs, samples=samples, names=names, exchange=exchange, device=device
        )

    return dataclasses.replace(result, outputs=made.outputs, resize=resize)


def resized_examples(examples: Sequence[torch.Tensor], shapes: Iterable[tuple[int, ...]]) -> list[torch.Tensor]:
    """Tensors on meta that are like the examples, with other shapes."""
    return [
        torch.empty(shape, dtype=example.dtype, device="meta").requires_grad_(example.requires_grad)
        for example, shape in zip(examples, shapes, strict=True)
    ]


class Shadow:
    """Copies on meta of modules, taken when this is made."""

    def __init__(self, modules: Sequence[nn.Module | None]) -> None:
        self._modules: list[nn.Module | None] = []
        self._error: ValueError | None = None
        try:
            self._modules = [None if module is None else shadow(module) for module in modules]
        except ValueError as error:
            self._error = error

    def modules(self) -> list[nn.Module | None]:
        """Raises ValueError where they could not be copied."""
        if self._error is not None:
            raise self._error
        return self._modules

    def module(self) -> nn.Module:
        """The only one."""
        (module,) = self.modules()
        assert module is not None
        return module


class _Anything(nn.Module):
    """Stands for a stage that another process may hold: its arguments have no names."""

    def forward(self, *args: Any, **kwargs: Any) -> None:
        """Takes anything."""
