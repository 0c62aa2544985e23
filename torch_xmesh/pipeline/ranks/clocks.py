"""One clock for all ranks of a pipeline: what each rank's steady clock is ahead of the first rank's."""

import time
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.distributed.tensor import Replicate

from torch_xmesh.pipeline.ranks.transfers import Transfers
from torch_xmesh.plan_cache import Move
from torch_xmesh.spec import Mesh

_ROUNDS = 10
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def machine() -> str:
    """Processes of one machine, in containers or network namespaces too, share its steady clock."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def now_ns() -> int:
    """The clock of which all times of a step are."""
    return time.monotonic_ns()


def clock_offsets(transfers: Transfers) -> Mapping[int, tuple[int, int]]:
    """By rank: nanoseconds that its clock is ahead of the first rank's, and by how many this may be wrong.

    Ranks of one machine have one clock. For other machines the first rank asks one rank of each for the time, as
    Cristian's algorithm (1989) does: the answer was given somewhere between question and reply; the quickest of ten
    rounds counts, and half of it is the possible error. Called by all ranks.
    """
    machines = dict(zip(transfers.ranks, transfers.gather("machines", machine()), strict=True))
    first = transfers.ranks[0]
    found = {machines[first]: (0, 0)}
    for rank, where in machines.items():
        if where not in found:
            found[where] = _ask(transfers, first, rank)
    told = transfers.broadcast("clocks", first, found)
    return {rank: told[where] for rank, where in machines.items()}


def _ask(transfers: Transfers, first: int, other: int) -> tuple[int, int]:
    """Meaningful on `first`; ranks that are neither take no part."""
    if transfers.rank not in (first, other):
        return 0, 0
    best = None
    for _ in range(_ROUNDS):
        begin = now_ns()
        _tell(transfers, f"clock/{other}/ask", source=first, target=other, value=begin)
        theirs = _tell(transfers, f"clock/{other}/answer", source=other, target=first, value=now_ns())
        trip = now_ns() - begin
        if best is None or trip < best[1]:
            best = (theirs - begin - trip // 2, trip)
    assert best is not None
    return best[0], (best[1] + 1) // 2


def _tell(transfers: Transfers, lane: str, *, source: int, target: int, value: int) -> int:
    move = Move.of((1,), torch.int64, (Mesh([source]), [Replicate()]), (Mesh([target]), [Replicate()]))
    received = transfers.start(
        lane, [move], [torch.tensor([value], device="cpu")] if transfers.rank == source else []
    ).wait()
    return int(received[0][0]) if transfers.rank == target else value
