"""Which groups of messages does NCCL hang on? In torch alone, three ranks.

    A   group {send B, send B, recv C}
    B   group {recv A, recv A}, then group {send C}
    C   group {recv B}, then group {send A}

``grouped`` is that. A group runs the k-th messages of all its ways together, so the second one to B waits for the one
from C. ``packed`` sends both as one message. Each group sets its new connections up first, and waits until its peers
do so too. ``connected`` is packed, behind a group in which every rank sends a byte to each other. ``cut`` has no
group with two messages of one way, and none that connects two ways at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from ranks import world
from report import found

from torch_xmesh.testing import RankError, mark

LIMIT_S = 8.0
CASES = ("grouped", "packed", "connected", "cut")
ENDING = ("connected", "cut")
SIZES = (1 << 10, 16 << 20)


def body(rank: int, world_size: int, device: str, case: str, num_bytes: int) -> None:
    import os

    kind = torch.device("cpu")
    if device == "cuda":
        os.environ["NCCL_HOSTID"] = str(rank)
        kind = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(kind)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", device_id=kind if device == "cuda" else None)
    size = num_bytes // 4
    values = [torch.full((size,), float(rank * 10 + i), device=kind) for i in range(4)]
    got = [torch.zeros(size * (2 if case in ("packed", "connected") else 1), device=kind) for _ in range(2)]

    def group(*messages: tuple[Callable[..., Any], torch.Tensor, int]) -> None:
        for work in dist.batch_isend_irecv([dist.P2POp(*message) for message in messages]):
            work.wait()

    dist.all_reduce(torch.ones(1, device=kind))
    mark("connected")
    send, recv = dist.isend, dist.irecv
    if case == "connected":
        byte = torch.zeros(4, dtype=torch.uint8, device=kind)
        others = [other for other in range(3) if other != rank]
        group(
            *((send, byte[:1], other) for other in others),
            *((recv, byte[1 + other : 2 + other], other) for other in others),
        )
    if rank == 0:
        if case == "grouped":
            group((send, values[0], 1), (send, values[1], 1), (recv, got[0], 2))
        elif case == "cut":
            group((send, values[0], 1))
            group((send, values[1], 1), (recv, got[0], 2))
        else:
            group((send, torch.cat(values[:2]), 1), (recv, got[0][:size], 2))
    elif rank == 1:
        if case == "grouped":
            group((recv, got[0], 0), (recv, got[1], 0))
        elif case == "cut":
            group((recv, got[0], 0))
            group((recv, got[1], 0))
        else:
            group((recv, got[0], 0))
        group((send, values[2], 2))
    else:
        group((recv, got[0][:size], 1))
        group((send, values[3], 0))
    if device == "cuda":
        torch.cuda.synchronize()
    last = got[0][-1] if case in ("packed", "connected") else got[1][-1]
    seen = [float(got[0][0]), float(last)] if rank == 1 else [float(got[0][0])]
    assert seen == {0: [23.0], 1: [0.0, 1.0], 2: [12.0]}[rank], seen
    mark("ended")


def one(device: str, case: str, num_bytes: int, outcomes: dict[str, bool]) -> None:
    with world(body, 3, device, case, num_bytes) as running:
        ended = []
        text = "ends"
        try:
            for rank in range(3):
                running.wait_mark(rank, "connected", 60)
            since = time.monotonic()
            for rank in range(3):
                running.wait_mark(rank, "ended", max(0.1, since + LIMIT_S - time.monotonic()))
                ended.append(rank)
        except RankError as error:
            errors = [one.error for one in running.outcomes() if one.error is not None]
            text = f"HANGS (ended: {ended})" if not errors else f"fails: {errors[0].strip().splitlines()[-1][:200]}"
            print(error)
    outcomes[f"{case} {num_bytes}"] = text == "ends"
    found(f"{case}, {num_bytes} bytes: {text}", case=case, num_bytes=num_bytes, ends=text == "ends")


def run(device: str) -> bool:
    """Well is what the library relies on: that cut and packed groups end."""
    outcomes: dict[str, bool] = {}
    for num_bytes in SIZES:
        threads = [threading.Thread(target=one, args=(device, case, num_bytes, outcomes)) for case in CASES]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return all(outcomes.get(f"{case} {num_bytes}", False) for case in ENDING for num_bytes in SIZES)
