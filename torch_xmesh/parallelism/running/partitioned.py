"""A plan's stages as the pipeline engine takes a model that is cut."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.tensor import Placement
from torch.utils import _pytree as pytree

from torch_xmesh.parallelism.forward_modes import ForwardModes
from torch_xmesh.parallelism.judge import placements_of
from torch_xmesh.parallelism.operators import Recorded, Value
from torch_xmesh.parallelism.plan import ParallelPlan
from torch_xmesh.parallelism.program import ARGUMENT, EVALUATION, STAGE, TRAINING, PlannedProgram
from torch_xmesh.parallelism.recorded_forwards import recorded_forward
from torch_xmesh.parallelism.running.stage import ShardedStage
from torch_xmesh.parallelism.running.stage_segments import stage_segments, with_types
from torch_xmesh.parallelism.stage_parts import outputs_of
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
    modes: ForwardModes,
    plan: ParallelPlan,
    modules: Sequence[ShardedStage | None],
    arguments: Arguments,
    chunk_specs: Mapping[str, Any],
    *,
    device: torch.device,
) -> Partition:
    """The stages of a plan, each with its module, or None where that is another rank's. Values have the names that
    the plan gives them. `device`: this process's."""
    specs = leaf_specs(arguments[0], chunk_specs["args"], "args")
    specs += leaf_specs(arguments[1], chunk_specs["kwargs"], "kwargs")
    samples = batch_size(*arguments, chunk_specs["args"], chunk_specs["kwargs"])
    taken = {operator.name for operator in modes.recorded.forward.operators}
    named = [(f"{name}_" if name in taken else name, path) for name, path in input_names(model, arguments)]
    dims = [spec.split_dim if isinstance(spec, Chunk) else None for spec in _tensor_specs(arguments, specs)]
    crossing = _Crossing(programs_of(plan, modes), [name for name, _ in named], dims, samples)
    names, values = crossing.values(modes.recorded)
    programs = [crossing.stage(number, module, names, modes) for number, module in enumerate(modules)]
    result = finish_partition(
        programs, values, arguments=arguments, named=named, samples=samples, fixed_batch=samples is not None
    )
    leaves, structure = pytree.tree_flatten(modes.recorded.recording.output)
    found = modes.recorded.values
    of_values = tuple(
        ValueName(names.get(found[leaf].name, found[leaf].name)) if isinstance(leaf, fx.Node) else leaf
        for leaf in leaves
    )
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
        recorded = recorded_forward(copy, *examples, device=device)
        _, others = crossing.values(recorded)
        stages = [
            dataclasses.replace(stage, segments=with_types(stage.segments, recorded))
            if stage.segments is not None
            else stage
            for stage in result.stages
        ]
        return SizedStages(others, result.outputs, result.fixed_batch, stages)

    result.resize = resize
    return result


def programs_of(plan: ParallelPlan, modes: ForwardModes) -> list[PlannedProgram]:
    """By stage that of the mode in which the model came."""
    mode = TRAINING if modes.is_training else EVALUATION
    return [next(program for program in stage.programs if program.does(mode)) for stage in plan.stages]


class _Crossing:
    """What the engine is told of values that enter the model, cross stages or leave it.

    Args:
        programs: by stage.
        inputs: names of the model's tensor arguments, in order.
        dims: the dim along which each of them is cut into microbatches.
        samples: number of samples in a microbatch.
    """

    def __init__(
        self,
        programs: Sequence[PlannedProgram],
        inputs: Sequence[str],
        dims: Sequence[int | None],
        samples: int | None,
    ) -> None:
        self._programs, self._inputs, self._dims, self._samples = programs, inputs, dims, samples

    def values(self, recorded: Recorded) -> tuple[dict[str, str], dict[str, ValueInfo]]:
        """The engine's names of the model's arguments, and by name what values are. Others have the plan's names."""
        placeholders = [value for node, value in recorded.given.items() if node.op == "placeholder"]
        names = {value.name: name for value, name in zip(placeholders, self._inputs, strict=True)}
        others = {value.name: value for value in recorded.given.values() if value not in placeholders}
        others |= {value.name: value for operator in recorded.forward.operators for value in operator.makes}
        outputs = outputs_of(recorded)
        out: dict[str, ValueInfo] = {}

        def add(name: str, value: Value, sizes: Sequence[Affine], readers: Sequence[int], producer: int | None) -> None:
            tensor = TensorInfo(tuple(sizes), value.dtype, value.requires_grad)
            out[name] = ValueInfo(
                name=name,
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
            add(names[value.name], value, sizes, self._readers(value.name, ARGUMENT), None)
        maker = {name: stage for stage in range(len(self._programs) - 1) for name in self._left(stage, names)}
        returned = self._left(len(self._programs) - 1, names)
        for name in dict.fromkeys((*maker, *returned)):
            if name not in out:  # else an argument, returned as it is
                sizes = [Affine(0, size) for size in others[name].shape]
                producer = maker.get(name, len(self._programs) - 1)
                add(name, others[name], sizes, self._readers(name, STAGE), producer)
        return names, out

    def _left(self, stage: int, names: Mapping[str, str]) -> list[str]:
        """What leaves a stage, as the engine names it."""
        program = self._programs[stage]
        left = [program.values[read.value] for read in program.leaving]
        return [names[value.name] if value.source == ARGUMENT else value.name for value in left]

    def stage(
        self, number: int, module: ShardedStage | None, names: Mapping[str, str], modes: ForwardModes
    ) -> StageProgram:
        """A stage as the engine calls it. `names`: of the model's arguments."""
        program = self._programs[number]
        arguments = [names[value.name] for value in program.given(ARGUMENT)]
        taken = [*arguments, *(value.name for value in program.given(STAGE))]
        left = self._left(number, names)
        own = {operator.name for operator in program.operators}
        positions = tuple(range(len(taken)))
        adapter = ReadyAdapter(
            positions,
            pytree.tree_structure((positions, {})),
            pytree.tree_structure((0,) * len(left)),
            tuple(range(len(left))),
        )
        return StageProgram(
            number,
            module if module is not None else nn.Module(),
            tuple(taken),
            tuple(left),
            tuple(arguments),
            any(
                operator.draws and operator.name in own
                for recorded in modes.runnable
                for operator in recorded.forward.operators
            ),
            adapter,
            is_always_seeded=True,  # devices of a stage draw alike
            whole_because="" if module is None else next(filter(None, module.whole_because), ""),
            waits_in_weights=module is not None and bool(module.own.waiting),
            num_segments=max(1, len(program.segments)),
            segments=None if module is None else stage_segments(module, modes.recorded, taken, left),
        )

    def _readers(self, name: str, source: str) -> list[int]:
        return [
            stage
            for stage, program in enumerate(self._programs)
            if any(value.name == name for value in program.given(source))
        ]


def _tensor_specs(arguments: Arguments, specs: Sequence[Any]) -> list[Any]:
    leaves = pytree.tree_leaves(arguments)
    return [spec for leaf, spec in zip(leaves, specs, strict=True) if isinstance(leaf, torch.Tensor)]


def crossing_placements(plan: ParallelPlan) -> dict[tuple[str, int], tuple[Placement, ...]]:
    """How values that cross stages lie, by name and stage."""
    out: dict[tuple[str, int], tuple[Placement, ...]] = {}
    for number, stage in enumerate(plan.stages):
        program = stage.programs[0]  # in both modes alike
        out.update(((value.name, number), tuple(placements_of(value.state))) for value in program.given(STAGE))
        if stage is not plan.stages[-1]:
            left = ((program.values[read.value].name, read.state) for read in program.leaving)
            out.update(((name, number), tuple(placements_of(state))) for name, state in left)
    return out
