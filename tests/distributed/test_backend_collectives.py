"""Every call of c10d on xmesh gives, bit for bit, what plain gloo gives, its refusals included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from backend_cases import CASES

from torch_xmesh.testing import spawn


def _outcome(case: str, rank: int, size: int, group: Any) -> Any:
    try:
        return CASES[case](rank, size, group)
    except (RuntimeError, ValueError, AttributeError, NotImplementedError) as error:
        return type(error).__name__, str(error).splitlines()[0]


def _equal(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, torch.Tensor):
        return (
            isinstance(theirs, torch.Tensor)
            and ours.dtype == theirs.dtype
            and ours.shape == theirs.shape
            and torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))
        )
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(map(_equal, ours, theirs))
    if isinstance(ours, str):
        return ours.lower().replace("xmesh", "gloo") == str(theirs).lower()
    return bool(ours == theirs)


def _compare(rank: int, size: int, cases: list[str]) -> dict[str, Any]:
    xmesh, gloo = dist.new_group(backend="xmesh"), dist.new_group(backend="gloo")
    different = {}
    for case in cases:
        ours = _outcome(case, rank, size, xmesh)
        theirs = _outcome(case, rank, size, gloo)
        if not _equal(ours, theirs):
            different[case] = (ours, theirs)
    return different


@pytest.mark.parametrize("size", [1, 2, 5])
def test_every_form_as_gloo(size: int) -> None:
    cases = [
        case for case in CASES if size > 1 or case not in ("objects", "send_recv_with_tags", "batched_point_to_point")
    ]
    for rank, different in enumerate(spawn(_compare, size, cases)):
        assert not different, f"rank {rank}"


def _what_is_refused(rank: int, size: int) -> list[str]:
    group: Any = dist.group.WORLD
    backend = group._get_backend(torch.device("cpu"))
    said = []
    calls: list[Callable[[], Any]] = [
        lambda: backend.allreduce([torch.ones(1), torch.ones(1, device="meta")]),
        lambda: backend.broadcast([torch.ones(1, device="meta")]),
        lambda: backend._start_coalescing(),
    ]
    for call in calls:
        try:
            call()
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}".splitlines()[0])
        else:
            said.append("nothing")
    return said


def test_refusals_name_xmesh() -> None:
    mixed, meta, coalescing = spawn(_what_is_refused, 1)[0]
    assert mixed.startswith("ValueError: xmesh: all_reduce got tensors on cpu and on meta")
    assert "xmesh" in meta
    assert "meta" in meta
    if not torch.cuda.is_available():
        assert coalescing == "RuntimeError: Backend xmesh does not implement startCoalescing"
