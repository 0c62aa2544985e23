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

from torch_xmesh.pipeline.capture.errors import CaptureError
from torch_xmesh.pipeline.capture.library_models import without_caches
from torch_xmesh.pipeline.capture.opened import check_opened, opened_modules
from torch_xmesh.pipeline.capture.recorded import RecordedModel, grown, record_checked, stand_ins
from torch_xmesh.pipeline.capture.recording import Recording
from torch_xmesh.pipeline.cut.assembled import Assembled, cut_recording, infos_like, infos_of
from torch_xmesh.pipeline.cut.chunk_specs import Chunk
from torch_xmesh.pipeline.cut.infos import NotLinearError, TensorInfo
from torch_xmesh.pipeline.cut.microbatch import batch_size, leaf_specs
from torch_xmesh.pipeline.cut.partition_parts import check_buffers, finish_partition, input_names, unused_parameters
from torch_xmesh.pipeline.cut.ready import Exchange, MetaCopies, StageSignature, chain_ready_stages
from torch_xmesh.pipeline.cut.stage_module import stage_module
from torch_xmesh.pipeline.cut.stage_program import StageProgram
from torch_xmesh.pipeline.cut.value_info import ValueInfo
from torch_xmesh.pipeline.cut.values import InputInfo, OutputStructure, Partition, Shapes, SizedStages, sorted_arguments
from torch_xmesh.pipeline.cut.variants import StageCodes, Variants

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
        names: module names, as in ``model.named_modules()``.

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
        device: where a model on meta will run; default: the device of what is not on meta, else the CPU.

    Raises:
        ValueError: the model cannot be captured, a split point is unknown or out of order, the number of stages
            differs, or a value cannot cross.
    """
    check_example(model, example_args, example_kwargs, split)
    arguments = sorted_arguments(example_args, example_kwargs)
    specs = leaf_specs(arguments[0], args_chunk_spec, "args") + leaf_specs(arguments[1], kwargs_chunk_spec, "kwargs")
    samples = batch_size(*arguments, args_chunk_spec, kwargs_chunk_spec)
    _check_split(model, split, num_stages)
    device = _device_of(model) or device or _device_of_tensors(pytree.tree_leaves(arguments)) or torch.device("cpu")
    if not isinstance(model, nn.Module):
        return _partition_ready(list(model), arguments, specs, samples=samples, exchange=exchange, device=device)
    assert isinstance(split, SplitAt | None)
    if split is None or not split.names:
        return _partition_ready([model], arguments, specs, samples=samples, exchange=exchange, device=device)
    return _partition_recorded(model, arguments, specs, samples=samples, split=split, device=device)


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


def _device_of(model: Any) -> torch.device | None:
    modules = [model] if isinstance(model, nn.Module) else [stage for stage in model if stage is not None]
    return _device_of_tensors([tensor for module in modules for tensor in (*module.parameters(), *module.buffers())])


def _device_of_tensors(leaves: Sequence[Any]) -> torch.device | None:
    """That of the first one that is not on meta."""
    return next((leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor) and not leaf.is_meta), None)


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


def _partition_recorded(
    model: nn.Module, arguments: Any, specs: list[Any], *, samples: int | None, split: SplitAt, device: torch.device
) -> Partition:
    check_opened(model, [""])
    without_caches(model)
    names = [_canonical_name(model, name) for name in split.names]
    opened = opened_modules(names)
    check_opened(model, opened)
    named = input_names(model, arguments)
    leaves = pytree.tree_leaves(arguments)
    examples = stand_ins([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)], device)
    tensor_specs = [spec for leaf, spec in zip(leaves, specs, strict=True) if isinstance(leaf, torch.Tensor)]
    dims = [spec.split_dim if isinstance(spec, Chunk) else None for spec in tensor_specs]
    batch = {name for (name, _), dim in zip(named, dims, strict=True) if dim is not None}
    recorded = RecordedModel(
        model, arguments, names=[name for name, _ in named], opened=opened, batch=batch, device=device
    )

    def cut(recording: Recording) -> Assembled:
        return cut_recording(recording, starts_of=lambda found: _stage_starts(found, names))

    with torch.enable_grad():
        base = cut(record_checked(recorded, examples, dims))
        infos, is_fixed = _infos(recorded, base, examples, dims=dims, samples=samples)
        values = base.values(infos, samples or 0, is_fixed)
        variants = Variants(recorded, base, examples=examples, cut=cut)
        trained = base if model.training else _in_training(variants, {name: values[name].shape for name, _ in named})
    inputs = {name: values[name] for name, _ in named}
    stages = []
    for stage, ports in enumerate(base.ports):
        module = stage_module(model, base.code(stage, ports))
        stages.append(
            StageProgram(
                index=stage,
                module=module,
                input_values=ports.inputs,
                output_values=ports.outputs,
                model_inputs=ports.model_inputs,
                uses_rng=trained is None or trained.code(stage, ports).uses_rng,
                codes=StageCodes(variants, stage, ports, inputs),
                infos=[values[name] for name in ports.inputs],
                inner=module,
            )
        )
    changed = {**base.cut.changed_tensors(), **({} if trained is None else trained.cut.changed_tensors())}
    check_buffers(stages, changed)
    result = finish_partition(
        stages, values, arguments=arguments, named=named, samples=samples, fixed_batch=is_fixed and samples is not None
    )

    def resize(shapes: Shapes, usual: Mapping[str, torch.Tensor]) -> SizedStages:
        found = variants.at(shapes, result.training, usual)
        others = found.values(infos_like(values, found, samples or 0), samples or 0, result.fixed_batch)
        given = {name: others[name] for name, _ in named}
        programs = [
            dataclasses.replace(
                program,
                codes=StageCodes(variants, program.index, base.ports[program.index], given),
                infos=[others[name] for name in program.input_values],
            )
            for program in stages
        ]
        return SizedStages(others, found.outputs, result.fixed_batch, programs)

    parameters = dict(model.named_parameters(remove_duplicate=False))
    return dataclasses.replace(
        result,
        outputs=base.outputs,
        unused_parameters=unused_parameters(model, stages),
        resize=resize,
        opened=base.recording.opened,
        ways=variants.ways,
        changed_parameters={name: stage for name, stage in changed.items() if name in parameters},
    )


def _in_training(variants: Variants, shapes: Shapes) -> Assembled | None:
    """What a model that came in evaluation mode does in training; None where that cannot be recorded: its first
    training step says why."""
    try:
        return variants.at(shapes, True, {})
    except CaptureError:
        return None


def _infos(
    recorded: RecordedModel,
    base: Assembled,
    examples: Sequence[torch.Tensor],
    *,
    dims: Sequence[int | None],
    samples: int | None,
) -> tuple[dict[str, TensorInfo], bool]:
    """What the values are at any number of samples; and whether that is known at the example's only."""
    runs = [base.recording]
    if samples is not None:
        try:
            for extra in (1, 2):
                more = [grown(example, dim, extra) for example, dim in zip(examples, dims, strict=True)]
                runs.append(recorded.record(more, recorded.training))
                infos = infos_of(runs, base, samples)
                _check_output(runs)
                sizes = [size for info in infos.values() for size in info.sizes]
                if extra == 2 or all(size.per_sample == 0 or size.fixed == 0 for size in sizes):
                    return infos, False
        except (CaptureError, NotLinearError):
            pass
    return infos_of(runs[:1], base, samples or 0), True


def _check_output(runs: Sequence[Recording]) -> None:
    """Raises ValueError where the model's output has something that depends on the number of samples, and no tensor."""
    for leaf, other in zip(*(pytree.tree_leaves(run.output) for run in runs[:2]), strict=True):
        if not isinstance(leaf, fx.Node) and type(leaf) is type(other) and leaf != other:
            raise ValueError(
                f"the model's output contains {leaf!r}, which is no tensor and depends on the batch size: return a "
                "tensor"
            )


def _canonical_name(model: nn.Module, name: str) -> str:
    """The name under which tracing knows a module (the first one, if it has several)."""
    modules = dict(model.named_modules(remove_duplicate=False))
    if not name or name not in modules:
        close = difflib.get_close_matches(name, [known for known in modules if known], n=5, cutoff=0.4)
        hint = f"; close names: {', '.join(close)}" if close else f"; its modules are {', '.join(list(modules)[1:11])}"
        raise ValueError(f"split point {name!r} is no module of {type(model).__name__}{hint}")
    return next(str(known) for known, module in model.named_modules() if module is modules[name])


def _stage_starts(captured: Recording, names: Sequence[str]) -> list[int]:
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
                f"stage {index} would be empty: nothing runs before {names[index]!r}, which begins with "
                f"{nodes[start].target}" + (f" and after the start of {names[index - 1]!r}" if index else "")
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
    copied = MetaCopies(modules)

    def resize(shapes: Shapes, _: Mapping[str, torch.Tensor]) -> SizedStages:
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


class _Anything(nn.Module):
    """Stands for a stage that another process may hold: its arguments have no names."""

    def forward(self, *args: Any, **kwargs: Any) -> None:
        """Takes anything."""
