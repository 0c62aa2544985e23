"""What must be equal on all ranks of a pipeline before they work together."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from torch_xmesh.digests import digest_of
from torch_xmesh.pipeline.cut.partition import Partition
from torch_xmesh.pipeline.engine.boundary import Boundaries
from torch_xmesh.pipeline.engine.setup import PlaceOptions
from torch_xmesh.pipeline.ranks.functions import described
from torch_xmesh.pipeline.ranks.stage_mesh import StageMesh
from torch_xmesh.pipeline.ranks.transfers import Transfers
from torch_xmesh.pipeline.schedule.schedule import Schedule
from torch_xmesh.pipeline.stages.source import StageSource
from torch_xmesh.plan_cache import PlanOptions


def options_fields(
    meshes: Sequence[StageMesh], schedule: Schedule, *, source: StageSource, options: PlaceOptions, plan: PlanOptions
) -> list[tuple[str, str]]:
    """What must be equal on all ranks before they do anything together, by name."""
    given = {True: "given", False: "missing"}
    return [
        ("number of stages", str(len(meshes))),
        *((f"the mesh of stage {stage}", str(mesh.whole)) for stage, mesh in enumerate(meshes)),
        ("parallelize", given[options.parallelize is not None]),
        *((f"the data axes of stage {stage}", str(mesh.data_axes)) for stage, mesh in enumerate(meshes)),
        ("number of microbatches", str(options.num_microbatches)),
        ("schedule", f"{'auto: ' * (options.schedule == 'auto')}{schedule.name} {digest_of(schedule.to_csv())}"),
        *source.fields(),
        ("loss_fn", given[options.loss_fn is not None]),
        ("init_sync", repr(options.init_sync)),
        ("init_fn", given[options.init_fn is not None]),
        ("strategy, topology", str(plan)),
        ("memory_limit_bytes", repr(options.memory_limit_bytes)),
        ("scale_grads, overlap, seed", f"{options.scale_grads}, {options.overlap}, {options.seed}"),
        ("early_weights", str(options.early_weights)),
        ("compare_batches", str(options.compare_batches)),
    ]


def compare_losses(transfers: Transfers, last: StageMesh, loss_fn: Any) -> None:
    """Raises ValueError, on all ranks, where those of the last stage, which call it, have different loss functions."""
    mine = described(loss_fn) if transfers.rank in last.ranks else None
    told = zip(transfers.ranks, transfers.gather("loss_fn", mine), strict=True)
    found = [(text, rank) for rank, text in told if text is not None]
    for text, rank in found:
        if text != found[0][0]:
            raise ValueError(
                f"ranks disagree on loss_fn: rank {found[0][1]} has {found[0][0]}, rank {rank} has {text} (a name, and "
                "a number made of the code)"
            )


def model_fields(cut: Partition, boundaries: Boundaries, model: nn.Module | None) -> list[tuple[str, str]]:
    """What must be equal on all ranks in their models, stage by stage, value by value, parameter by parameter."""
    fields = []
    for stage in cut.stages:
        values = f"{list(stage.input_values)} -> {list(stage.output_values)}"
        values += f", in {stage.num_segments} segments" if stage.num_segments > 1 else ""
        fields.append((f"stage {stage.index} of the model, its values in and out", values))
    for info in cut.values.values():
        made = "the caller" if info.producer is None else f"stage {info.producer}"
        text = f"{info.dtype} {list(info.shape)}, made by {made}, read by stages {list(info.consumers)}"
        text += f", batch dim {info.batch_dim}, {'with' if info.requires_grad else 'without'} gradient"
        fields.append((f"value {info.name}", text))
    for edge in boundaries.edges:
        for info in edge.values:
            placed = [boundaries.placements(info, stage) for stage in (edge.from_stage, edge.to_stage)]
            where = f"value {info.name} from stage {edge.from_stage} to {edge.to_stage}"
            fields.append((where, f"{placed}{' as a DTensor' if boundaries.is_dtensor(info) else ''}"))
    if model is not None:
        for name, tensor in sorted((*model.named_parameters(), *model.named_buffers()), key=lambda item: item[0]):
            fields.append((f"the model's {name}", f"{tensor.dtype} {list(tensor.shape)}"))
    return fields
