"""A plan's stages as the pipeline engine takes a model that is cut."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.tensor import Placement
from torch.utils import _pytree as pytree

from torch_xmesh.parallelism.judge import placements_of
from torch_xmesh.parallelism.operators import Recorded, Value
from torch_xmesh.parallelism.plan import ParallelPlan
from torch_xmesh.parallelism.recorded_forwards import recorded_forward
from torch_xmesh.parallelism.running.refusals import ForwardModes
from torch_xmesh.parallelism.running.stage import ShardedStage
from torch_xmesh.parallelism.running.stage_parts import StagePart, outputs_of, stage_parts
from torch_xmesh.pipeline.cut.chunk_specs import Chunk
from torch_xmesh.pipeline.cut.infos import Affine, TensorInfo
from torch_xmesh.pipeline.cut.microbatch import batch_size, leaf_specs
from torch_xmesh.pipeline.cut.partition_parts import finish_partition, input_names
from torch_xmesh.pipeline.cut.ready import MetaCopies
from torch_xmesh.pipeline.cut.ready_adapter import ReadyAdapter
from torch_xmesh.pipeline.cut.stage_program import StageProgram
from torch_xmesh.pipeline.cut.value_info import ValueInfo
from torch_xmesh.pipeline.cut.values import OutputStructure, Partition, Shapes, SizedStages, ValueName

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""A model's positional arguments, and its keyword arguments by name."""


def planned_partition(
    model: nn.Module,
    turns: ForwardModes,
    plan: ParallelPlan,
    modules: Sequence[ShardedStage | None],
    arguments: Arguments,
    chunk_specs: Mapping[str, Any],
) -> Partition:
    """The stages of a plan, each with its module, or None where that is another rank's. Values have the names that
    the plan gives them."""
    specs = leaf_specs(arguments[0], chunk_specs["args"], "args")
    specs += leaf_specs(arguments[1], chunk_specs["kwargs"], "kwargs")
    samples = batch_size(*arguments, chunk_specs["args"], chunk_specs["kwargs"])
    ports = stage_parts(turns.recorded, plan)
    taken = {operator.name for operator in turns.recorded.forward.operators}
    named = [(f"{name}_" if name in taken else name, path) for name, path in input_names(model, arguments)]
    dims = [spec.split_dim if isinstance(spec, Chunk) else None for spec in _tensor_specs(arguments, specs)]
    crossing = _Crossing(plan, [name for name, _ in named], dims, samples)
    names, values = crossing.values(turns.recorded)
    programs = [_program(stage, own_ports, modules[stage], turns, names) for stage, own_ports in enumerate(ports)]
    result = finish_partition(
        programs, values, arguments=arguments, named=named, samples=samples, fixed_batch=samples is not None
    )
    leaves, structure = pytree.tree_flatten(turns.recorded.recording.output)
    node_values = turns.recorded.values
    of_values = tuple(ValueName(names[node_values[leaf]]) if isinstance(leaf, fx.Node) else leaf for leaf in leaves)
    result.tied_parameters = [[(stage, tie.name) for stage in tie.stages] for tie in plan.ties]
    result.outputs = OutputStructure(of_values, structure)
    copies = MetaCopies([model], keep_forward_hooks=True)
    examples = pytree.tree_map_only(torch.Tensor, lambda tensor: torch.empty_like(tensor, device="meta"), arguments)

    def resize(shapes: Shapes, usual: Mapping[str, torch.Tensor]) -> SizedStages:
        """Under another autocast, for other types."""
        if any(values[name].shape != shape for name, shape in shapes.items()):
            raise ValueError("a plan is for its example's sizes alone")
        (copy,) = copies.modules()
        assert copy is not None
        _, others = crossing.values(recorded_forward(copy, *examples))
        return SizedStages(others, result.outputs, result.fixed_batch, result.stages)

    result.resize = resize
    return result


class _Crossing:
    """What the engine is told of values that enter the model, cross stages or leave it.

    Args:
        inputs: names of the model's tensor arguments, in order.
        dims: the dim along which each of them is cut into microbatches.
        samples: number of samples in a microbatch.
    """

    def __init__(
        self, plan: ParallelPlan, inputs: Sequence[str], dims: Sequence[int | None], samples: int | None
    ) -> None:
        self._plan, self._inputs, self._dims, self._samples = plan, inputs, dims, samples

    def values(self, recorded: Recorded) -> tuple[dict[Value, str], dict[str, ValueInfo]]:
        """Their names, and by name what they are."""
        ports = stage_parts(recorded, self._plan)
        placeholders = [value for node, value in recorded.given.items() if node.op == "placeholder"]
        names = dict(zip(placeholders, self._inputs, strict=True))
        maker = {value: stage for stage, own_ports in enumerate(ports[:-1]) for value in own_ports.leaving}
        outputs = outputs_of(recorded)
        out: dict[str, ValueInfo] = {}

        def add(value: Value, sizes: Sequence[Affine], readers: Sequence[int], producer: int | None) -> None:
            tensor = TensorInfo(tuple(sizes), value.dtype, value.requires_grad)
            out[names[value]] = ValueInfo(
                name=names[value],
                producer=producer,
                consumers=tuple(stage for stage in readers if stage != producer),
                shape=value.shape,
                dtype=value.dtype,
                requires_grad=value.requires_grad,
                batch_dim=tensor.batch_dim,
                is_output=value in outputs,
                tensor=tensor,
                samples=self._samples or 0,
                fixed_batch=self._samples is not None,
            )

        for value, dim in zip(placeholders, self._dims, strict=True):
            sizes = [Affine(0, size) for size in value.shape]
            if dim is not None:
                sizes[dim] = Affine(value.shape[dim] // (self._samples or 1), 0)
            add(value, sizes, [stage for stage, own_ports in enumerate(ports) if value in own_ports.arguments], None)
        for value in (*maker, *(output for output in outputs if output not in maker and output not in names)):
            names[value] = value.name
            readers = [stage for stage, own_ports in enumerate(ports) if value in own_ports.entering]
            add(value, [Affine(0, size) for size in value.shape], readers, maker.get(value, len(ports) - 1))
        return names, out


def _tensor_specs(arguments: Arguments, specs: Sequence[Any]) -> list[Any]:
    leaves = pytree.tree_leaves(arguments)
    return [spec for leaf, spec in zip(leaves, specs, strict=True) if isinstance(leaf, torch.Tensor)]


def _program(
    stage: int, ports: StagePart, module: ShardedStage | None, turns: ForwardModes, names: Mapping[Value, str]
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
        any(
            operator.draws and operator.name in own
            for recorded in turns.runnable
            for operator in recorded.forward.operators
        ),
        adapter,
        is_always_seeded=True,  # devices of a stage draw alike
        whole_because="" if module is None else module.whole_because,
    )


def crossing_placements(plan: ParallelPlan) -> dict[tuple[str, int], tuple[Placement, ...]]:
    """How values that cross stages lie, by name and stage; whole where it is not said."""
    return {
        (held.name, number): tuple(placements_of(held.state))
        for number, stage in enumerate(plan.stages)
        for held in stage.held
        if held.why in ("entering", "leaving")
    }
