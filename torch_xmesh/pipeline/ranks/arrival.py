"""How the ranks of a pipeline come together: which they are, and what a rank says that cannot come."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch_xmesh.errors import PeerError, StageError
from torch_xmesh.group import GroupReshards
from torch_xmesh.pipeline.ranks.stage_mesh import StageMesh, stage_mesh
from torch_xmesh.pipeline.ranks.transfers import Transfers
from torch_xmesh.spec import AnyMesh, mesh_grid, sliced_from


def stage_meshes_of(
    reshards: GroupReshards, meshes: Any, data_axis: Any, has_parallelize: bool
) -> tuple[list[StageMesh], list[int]]:
    """The stages' meshes as this rank sees them, and the ranks of all, ascending.

    Raises:
        ValueError: meshes or data axes that are none, a rank outside the group, or this rank is on no mesh.
    """
    if not isinstance(meshes, Sequence) or isinstance(meshes, str):
        raise ValueError(f"meshes is a list of meshes, one per stage, got {type(meshes).__name__}")
    if not meshes:
        raise ValueError("a pipeline has at least one stage: meshes is empty")
    axes = list(data_axis) if isinstance(data_axis, list | tuple) else [data_axis] * len(meshes)
    if len(axes) != len(meshes):
        raise ValueError(f"data_axis has {len(axes)} entries for {len(meshes)} meshes")
    rank = reshards.core.global_rank
    found = [
        stage_mesh(mesh, data_axis=axis, has_parallelize=has_parallelize, stage=stage, rank=rank)
        for stage, (mesh, axis) in enumerate(zip(meshes, axes, strict=True))
    ]
    ranks = sorted({r for mesh in found for r in mesh.ranks})
    if strangers := [r for r in ranks if r not in reshards.ranks]:
        raise ValueError(f"rank {strangers[0]} of a mesh is not in the group, which has {len(reshards.ranks)} ranks")
    if rank not in ranks:
        raise ValueError(f"rank {rank} is on no stage's mesh: only ranks {ranks} make this pipeline")
    _check_slices(meshes, rank, ranks)
    return found, ranks


def _check_slices(meshes: Sequence[AnyMesh], rank: int, ranks: Sequence[int]) -> None:
    """Raises ValueError where every stage is this rank's own slice of a larger mesh: other ranks see other slices, and
    would make a pipeline apart, with a model of their own."""
    larger = [sliced_from(mesh) for mesh in meshes]
    others = {member for mesh in larger if mesh is not None for member in mesh_grid(mesh).ranks} - set(ranks)
    if len(meshes) > 1 and others and None not in larger and all(rank in mesh_grid(mesh).ranks for mesh in meshes):
        raise ValueError(
            f"every mesh is what rank {rank} sees of a larger one: ranks {list(ranks)} would train a model by "
            f"themselves, and ranks {sorted(others)} others. Pass the same meshes on all ranks: "
            "xm.stage_meshes(mesh, axis) makes one per stage; if models apart are meant, spell the meshes out, as in "
            f"xm.Mesh({list(ranks)})"
        )


@contextlib.contextmanager
def telling(reshards: GroupReshards, meshes: Any) -> Iterator[None]:
    """Around what a rank does before it has arrived: those that may wait for it hear of a failure."""
    try:
        yield
    except BaseException as error:
        is_mistake = isinstance(error, ValueError | TypeError)
        reshards.core.refuse_pipeline(_ranks_in(meshes), _refusal(reshards.core.global_rank, error), is_mistake)
        raise


@contextlib.contextmanager
def abandoning(transfers: Transfers) -> Iterator[None]:
    """Around what a rank does once it has arrived: a failure ends the pipeline on all ranks."""
    try:
        yield
    except BaseException as error:
        if not transfers.traffic.has_failed and not isinstance(error, PeerError | StageError):
            text = _refusal(transfers.rank, error)
            if isinstance(error, ValueError):
                transfers.traffic.refuse(text)
            else:
                transfers.traffic.fail_stage(text, -1, -1)
        raise


def _refusal(rank: int, error: BaseException) -> str:
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return f"rank {rank} could not make the pipeline: {kind}{error}"


def _ranks_in(meshes: Any) -> list[int]:
    """The ranks of the meshes; none where something among them is no mesh."""
    try:
        return sorted({rank for mesh in meshes for rank in mesh_grid(mesh).ranks})
    except Exception:
        return []
