"""Cases from a JSON file in the form of `xmesh plan --case-file`: a list of objects with name, shape,
dtype, src_mesh, src, dst_mesh and dst."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from torch.distributed.tensor import Placement, Replicate, Shard

from parts.resharding.cases import ITEM_BYTES, Case, Ranks, TensorLayout

_FIELDS = ("shape", "src_mesh", "src", "dst_mesh", "dst")


def read_cases(path: Path) -> list[Case]:
    """The cases of the file. Raises ValueError naming the case and what is wrong with it."""
    try:
        listed = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(listed, list) or not listed or not all(isinstance(entry, dict) for entry in listed):
        raise ValueError(f"{path}: expected a list of objects with {', '.join(_FIELDS)}")
    return [_case(entry, f"{path}: {entry.get('name', f'case {i}')}", f"case{i}") for i, entry in enumerate(listed)]


def _case(entry: dict[str, Any], where: str, default_name: str) -> Case:
    from torch_xmesh.cli.plan import parse_mesh, parse_placements, parse_shape

    missing = [field for field in _FIELDS if field not in entry]
    if missing:
        raise ValueError(f"{where}: missing {', '.join(missing)}")
    dtype = str(entry.get("dtype", "float32"))
    if dtype not in ITEM_BYTES:
        raise ValueError(f"{where}: expected a dtype of {', '.join(ITEM_BYTES)}, got {dtype}")
    meshes: list[Ranks] = []
    sides: list[tuple[str, ...]] = []
    try:
        shape = tuple(parse_shape(entry["shape"]))
        for side in ("src", "dst"):
            mesh = parse_mesh(entry[f"{side}_mesh"])
            meshes.append(np.asarray(mesh.ranks, dtype=np.int64).reshape(mesh.shape))
            sides.append(tuple(_text(placement) for placement in parse_placements(entry[side])))
            if len(sides[-1]) != meshes[-1].ndim:
                raise ValueError(
                    f"expected {meshes[-1].ndim} {side} placements, one per mesh axis, got {len(sides[-1])}"
                )
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    tensor = TensorLayout(shape, dtype, sides[0], sides[1])
    return Case(str(entry.get("name", default_name)), meshes[0], meshes[1], (tensor,))


def _text(placement: Placement) -> str:
    if type(placement) is Shard:
        return f"Shard({placement.dim})"
    if isinstance(placement, Replicate):
        return "Replicate()"
    raise ValueError(f"expected Shard or Replicate, got {placement!r}: others are not measured")
