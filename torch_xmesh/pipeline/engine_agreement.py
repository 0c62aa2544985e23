"""What the ranks of a pipeline find out together about their models: of what kind they are, what ready stages return,
and which parameters stages share."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import nn

from torch_xmesh.pipeline.boundary import StageMesh, Transfers
from torch_xmesh.pipeline.partition import Partition, StageSignature
from torch_xmesh.pipeline.partition_ready import Exchange


def check_kind(transfers: Transfers, model: Any, split: Any) -> None:
    """Raises ValueError where ranks disagree on what decides who tells whom what."""
    mine = "a module" if isinstance(model, nn.Module) else "a list of stage modules"
    if isinstance(split, str):
        mine += f" with split={split!r}"
    told = transfers.gather("model", mine)
    for rank, other in zip(transfers.ranks, told, strict=True):
        if other != told[0]:
            raise ValueError(
                f"ranks disagree on the model: rank {transfers.ranks[0]} has {told[0]}, rank {rank} has {other}"
            )


def exchange_of(transfers: Transfers, meshes: Sequence[StageMesh]) -> Exchange:
    """For ready stages: who has a stage's module tells all what the stage returns, or why it fails; all compare.

    Its ValueErrors: a rank of the stage's mesh has no module, or a rank has another one.
    """

    def exchange(stage: int, found: StageSignature | ValueError | None) -> StageSignature:
        root = meshes[stage].ranks[0]
        mine = f"rank {transfers.rank}: {found}" if isinstance(found, ValueError) else found
        told = dict(zip(transfers.ranks, transfers.gather(f"signature/{stage}", mine), strict=True))
        for rank, one in told.items():
            if isinstance(one, str):
                raise found if isinstance(found, ValueError) else ValueError(one)
            if rank in meshes[stage].ranks and one is None:
                raise ValueError(f"stage {stage} is None on rank {rank}, which is on its mesh: pass its module there")
        first: StageSignature = told[root]
        for rank, one in told.items():
            if one is not None and _of_tensors(one) != _of_tensors(first):
                raise ValueError(
                    f"ranks disagree on stage {stage}: on rank {root} it returns {_of_tensors(first)}, on rank "
                    f"{rank} {_of_tensors(one)}"
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
