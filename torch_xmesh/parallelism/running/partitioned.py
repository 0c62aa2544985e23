"""A plan's stages as the pipeline engine takes a model that is cut."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.tensor import Placement
from torch.utils import _pytree as pytree

from torch_xmesh.parallelism.judge import placements_of
from torch_xmesh.parallelism.operators import Value
from torch_xmesh.parallelism.plan import ParallelPlan
from torch_xmesh.parallelism.running.crossing import Ports, outputs_of, ports_of
from torch_xmesh.parallelism.running.refusals import Turns
from torch_xmesh.pipeline.cut.chunk_specs import Chunk
from torch_xmesh.pipeline.cut.infos import Affine, TensorInfo
from torch_xmesh.pipeline.cut.microbatch import batch_size, leaf_specs
from torch_xmesh.pipeline.cut.partition_parts import finish_partition, input_names
from torch_xmesh.pipeline.cut.ready_adapter import ReadyAdapter
from torch_xmesh.pipeline.cut.stage_program import StageProgram
from torch_xmesh.pipeline.cut.value_info import ValueInfo
from torch_xmesh.pipeline.cut.values import OutputStructure, Partition, Shapes, SizedStages, ValueName

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Of a model, keyword arguments by name."""


def planned_partition(
    model: nn.Module,
    turns: Turns,
    plan: ParallelPlan,
    modules: Sequence[nn.Module | None],
    arguments: Arguments,
    chunk_specs: Mapping[str, Any],
) -> Partition:
    """The stages of a plan, each with its module, or None where that is another rank's. Values have the names that
    the plan gives them."""
    recorded = turns.recorded
    specs = leaf_specs(arguments[0], chunk_specs["args"], "args")
    specs += leaf_specs(arguments[1], chunk_specs["kwargs"], "kwargs")
    samples = batch_size(*arguments, chunk_specs["args"], chunk_specs["kwargs"])
    ports = ports_of(recorded, plan)
    taken = {one.name for one in recorded.forward.operators}
    named = [(f"{name}_" if name in taken else name, path) for name, path in input_names(model, arguments)]
    placeholders = [value for node, value in recorded.given.items() if node.op == "placeholder"]
    names = dict(zip(placeholders, (name for name, _ in named), strict=True))
    maker = {value: stage for stage, one in enumerate(ports[:-1]) for value in one.leaving}
    last, outputs = len(ports) - 1, outputs_of(recorded)
    dims = [spec.split_dim if isinstance(spec, Chunk) else None for spec in _tensor_specs(arguments, specs)]
    values: dict[str, ValueInfo] = {}

    def add(value: Value, sizes: Sequence[Affine], readers: Sequence[int], producer: int | None) -> None:
        tensor = TensorInfo(tuple(sizes), value.dtype, value.requires_grad)
        values[names[value]] = ValueInfo(
            name=names[value],
            producer=producer,
            consumers=tuple(stage for stage in readers if stage != producer),
            shape=value.shape,
            dtype=value.dtype,
            requires_grad=value.requires_grad,
            batch_dim=tensor.batch_dim,
            is_output=value in outputs,
            tensor=tensor,
            samples=samples or 0,
            fixed_batch=samples is not None,
        )

    for value, dim in zip(placeholders, dims, strict=True):
        sizes = [Affine(0, size) for size in value.shape]
        if dim is not None:
            sizes[dim] = Affine(value.shape[dim] // (samples or 1), 0)
        add(value, sizes, [stage for stage, one in enumerate(ports) if value in one.arguments], None)
    for value in (*maker, *(one for one in outputs if one not in maker and one not in names)):
        names[value] = value.name
        readers = [stage for stage, one in enumerate(ports) if value in one.entering]
        add(value, [Affine(0, size) for size in value.shape], readers, maker.get(value, last))
    programs = [_program(stage, one, modules[stage], turns, names) for stage, one in enumerate(ports)]
    result = finish_partition(
        programs, values, arguments=arguments, named=named, samples=samples, fixed_batch=samples is not None
    )
    leaves, structure = pytree.tree_flatten(recorded.recording.output)
    of_values = tuple(ValueName(names[recorded.values[leaf]]) if isinstance(leaf, fx.Node) else leaf for leaf in leaves)
    result.tied_parameters = [[(stage, one.name) for stage in one.stages] for one in plan.ties]
    result.outputs, result.resize = OutputStructure(of_values, structure), _refuse
    return result


def _tensor_specs(arguments: Arguments, specs: Sequence[Any]) -> list[Any]:
    leaves = pytree.tree_leaves(arguments)
    return [spec for leaf, spec in zip(leaves, specs, strict=True) if isinstance(leaf, torch.Tensor)]


def _refuse(shapes: Shapes, usual: Mapping[str, Any]) -> SizedStages:
    raise ValueError("a plan is for its example's sizes alone")


def _program(
    stage: int, ports: Ports, module: nn.Module | None, turns: Turns, names: Mapping[Value, str]
) -> StageProgram:
    taken = (*ports.arguments, *ports.entering)
    own = {turns.recorded.forward.operators[number].name for number in ports.operators}
    positions = tuple(range(len(taken)))
    adapter = ReadyAdapter(
        positions,
        pytree.tree_structure((positions, {})),
        pytree.tree_structure((0,) * len(ports.leaving)),
        tuple(range(len(ports.leaving))),
    )
    return StageProgram(
        stage,
        module if module is not None else nn.Module(),
        tuple(names[value] for value in taken),
        tuple(names[value] for value in ports.leaving),
        tuple(names[value] for value in ports.arguments),
        any(one.draws and one.name in own for recorded in turns.runnable for one in recorded.forward.operators),
        adapter,
        is_always_seeded=True,  # devices of a stage draw alike
    )


def crossing_placements(plan: ParallelPlan) -> dict[tuple[str, int], tuple[Placement, ...]]:
    """How values that cross stages lie, by name and stage; whole where it is not said."""
    return {
        (one.name, number): tuple(placements_of(one.state))
        for number, stage in enumerate(plan.stages)
        for one in stage.held
        if one.why in ("entering", "leaving")
    }
