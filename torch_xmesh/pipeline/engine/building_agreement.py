"""What the ranks of a pipeline find out together before they work together: whether they were given the same, what
ready stages return, and which parameters stages share."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import nn

from torch_xmesh.digests import digest_of
from torch_xmesh.pipeline.cut.partition import Partition, StageSignature
from torch_xmesh.pipeline.cut.ready import Exchange
from torch_xmesh.pipeline.engine.boundary import Boundaries
from torch_xmesh.pipeline.engine.setup import PlaceOptions
from torch_xmesh.pipeline.ranks.functions import described
from torch_xmesh.pipeline.ranks.stage_mesh import StageMesh
from torch_xmesh.pipeline.ranks.transfers import Transfers
from torch_xmesh.pipeline.schedule.schedule import Schedule
from torch_xmesh.plan_cache import PlanOptions


def options_fields(
    meshes: Sequence[StageMesh], schedule: Schedule, *, model: Any, options: PlaceOptions, plan_options: PlanOptions
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
        ("the model", "a module" if isinstance(model, nn.Module) else "a list of stage modules"),
        ("split", repr(options.split)),
        ("loss_fn", given[options.loss_fn is not None]),
        ("init_sync", repr(options.init_sync)),
        ("init_fn", given[options.init_fn is not None]),
        ("strategy, topology", str(plan_options)),
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


def model_fields(cut: Partition, boundaries: Boundaries, model: Any) -> list[tuple[str, str]]:
    """What must be equal on all ranks in their models, stage by stage, value by value, parameter by parameter."""
    fields = []
    for stage in cut.stages:
        values = f"{list(stage.input_values)} -> {list(stage.output_values)}"
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
    if isinstance(model, nn.Module):
        for name, tensor in sorted((*model.named_parameters(), *model.named_buffers()), key=lambda item: item[0]):
            fields.append((f"the model's {name}", f"{tensor.dtype} {list(tensor.shape)}"))
    return fields


def exchange_of(transfers: Transfers, meshes: Sequence[StageMesh]) -> Exchange:
    """For ready stages: who has a stage's module tells all what the stage returns, or why it fails; all compare.

    Its ValueErrors: a rank of the stage's mesh has no module, or a rank has another one.
    """

    def exchange(stage: int, found: StageSignature | ValueError | None) -> StageSignature:
        root = meshes[stage].ranks[0]
        mine = f"rank {transfers.rank}: {found}" if isinstance(found, ValueError) else found
        told = dict(zip(transfers.ranks, transfers.gather(f"signature/{stage}", mine), strict=True))
        for rank, answer in told.items():
            if isinstance(answer, str):
                raise found if isinstance(found, ValueError) else ValueError(answer)
            if rank in meshes[stage].ranks and answer is None:
                raise ValueError(f"stage {stage} is None on rank {rank}, which is on its mesh: pass its module there")
        first: StageSignature = told[root]
        for rank, answer in told.items():
            if answer is not None and _of_tensors(answer) != _of_tensors(first):
                raise ValueError(
                    f"ranks disagree on stage {stage}: on rank {root} it returns {_of_tensors(first)}, on rank "
                    f"{rank} {_of_tensors(answer)}"
                )
        return first

    return exchange


def _of_tensors(signature: StageSignature) -> tuple[Any, ...]:
    positions = signature.tensor_positions
    return signature.structure, [(at, signature.leaves[at]) for at in positions], signature.fixed_batch


def with_agreed_ties(cut: Partition, transfers: Transfers, meshes: Sequence[StageMesh]) -> Partition:
    """The partition with the ties of all ranks: a rank sees those between stages whose modules it has.

    Raises:
        ValueError: on every rank, where a rank that runs one of the stages has not all of their modules, or has them
            with parameters of their own.
    """
    seen = [[tuple(group) for group in groups] for groups in transfers.gather("ties", cut.tied_parameters)]
    agreed: dict[tuple[tuple[int, str], ...], None] = {}
    for groups, finder in zip(seen, transfers.ranks, strict=True):
        for group in groups:
            stages = {stage for stage, _ in group}
            for rank in sorted({rank for stage in stages for rank in meshes[stage].ranks}):
                found = [other for other in seen[transfers.ranks.index(rank)] if set(group) <= set(other)]
                if not found:
                    raise ValueError(
                        f"ranks disagree on tied parameters: {_text(group)} are one on rank {finder}, not on rank "
                        f"{rank}; where stages share a parameter, every rank of their meshes needs the modules of all "
                        "of them, with that parameter in each"
                    )
                agreed.update(dict.fromkeys(found))
    return dataclasses.replace(cut, tied_parameters=[list(group) for group in sorted(agreed)])


def _text(group: Sequence[tuple[int, str]]) -> str:
    return " and ".join(f"{name} of stage {stage}" for stage, name in group)
