"""What the ranks of a pipeline find out together as they cut it: what ready stages return, and which parameters stages
share."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch_xmesh.pipeline.cut.ready import Exchange, StageSignature
from torch_xmesh.pipeline.cut.values import Partition
from torch_xmesh.pipeline.ranks.stage_mesh import StageMesh
from torch_xmesh.pipeline.ranks.transfers import Transfers


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
