"""Nobody waits for a rank that will not come: mistakes in the engine's constructor, engines closed, processes gone.

The group's timeout is half an hour in all of them."""

from __future__ import annotations

import itertools
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional as F
from wait_until import wait_until

import torch_xmesh as xm
from torch_xmesh.testing import World, mark, spawn

THREE = ([0], [1], [2])


def make(meshes: Any = THREE, model: Any = None, **options: Any) -> xm.PipelineEngine:
    torch.manual_seed(0)
    if model is None:
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    count = len(meshes) if isinstance(meshes, tuple) else 3
    settings: dict[str, Any] = {
        "meshes": [xm.Mesh(mesh) for mesh in meshes] if isinstance(meshes, tuple) else meshes,
        "num_microbatches": 2,
        "loss_fn": F.mse_loss,
        "split": xm.split_at(*("1", "2")[: count - 1]),
    }
    return xm.PipelineEngine(model, (torch.empty(2, 4),), **{**settings, **options})


def step(engine: xm.PipelineEngine) -> float | None:
    engine.step(torch.ones(4, 4), target=torch.ones(4, 4))
    return engine.last_loss()


def fails(stage: int, module: nn.Module, mesh: Any) -> nn.Module:
    raise KeyError("no such plan")


# What rank 1 does otherwise: arguments, what the others get.
MISTAKES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"data_axis": 5}, ValueError, "rank 1 could not make the pipeline: data_axis 5 is out of range"),
    ({"data_axis": [0]}, ValueError, "rank 1 could not make the pipeline: data_axis has 1 entries for 3 meshes"),
    ({"meshes": None}, ValueError, "rank 1 could not make the pipeline: meshes is a list of meshes"),
    ({"meshes": [object()] * 3}, ValueError, "rank 1 could not make the pipeline"),
    ({"meshes": ([0], [1])}, ValueError, r"ranks disagree on meshes: rank \d makes .*\[0, 1\]|of ranks \[0, 1\]"),
    ({"meshes": ([0], [2])}, ValueError, "rank 1 could not make the pipeline: rank 1 is on no stage's mesh"),
    ({"meshes": ([0], [1], [7])}, ValueError, "rank 1 could not make the pipeline: rank 7 of a mesh is not in the"),
    ({"meshes": ([0], [2], [1])}, ValueError, r"ranks disagree on the mesh of stage 1: rank \d has Mesh\(\[\d\]\)"),
    ({"num_microbatches": 3}, ValueError, "ranks disagree on number of microbatches"),
    ({"num_microbatches": "2"}, ValueError, "rank 1 could not make the pipeline: num_microbatches"),
    ({"init_sync": "check"}, ValueError, "ranks disagree on init_sync"),
    ({"loss_fn": None}, ValueError, "ranks disagree on loss_fn"),
    ({"model": 5}, ValueError, "rank 1 could not make the pipeline"),
    ({"split": 7}, ValueError, "rank 1 could not make the pipeline"),
    ({"schedule": "9f9b"}, ValueError, "rank 1 could not make the pipeline"),
    ({"parallelize": fails}, (ValueError, xm.StageError), "ranks disagree on parallelize"),  # type: ignore[list-item]
]


NUM_ROUNDS = 3  # what came of one mistake is still on its way when the next is made, now and then


def mistakes(rank: int, world_size: int) -> list[str]:
    texts = []
    for number, (options, kind, _) in enumerate(NUM_ROUNDS * MISTAKES):
        with pytest.raises(kind if rank != 1 else Exception) as caught:
            make(**(options if rank == 1 else {}))
        texts.append(f"{number}: {caught.value}")
        dist.barrier()  # every rank has raised while all of them live
    with pytest.raises((xm.StageError, KeyError)) as caught:
        make(parallelize=lambda stage, module, mesh: fails(stage, module, mesh) if rank == 2 else module)
    texts.append(str(caught.value))
    dist.barrier()
    engine = make()
    assert step(engine) is not None
    engine.close()
    return texts


def test_mistakes_of_one_rank() -> None:
    for rank, texts in enumerate(spawn(mistakes, 3, timeout=120)):
        for number, (_, _, text) in enumerate(NUM_ROUNDS * MISTAKES):
            assert rank == 1 or re.search(text, texts[number]), (rank, texts[number])
        assert rank == 2 or "rank 2 could not make the pipeline: KeyError: 'no such plan'" in texts[-1]


def others_make_one_too(rank: int, world_size: int) -> list[float | None]:
    """A rank on no mesh gets its ValueError, and harms neither that pipeline nor the next."""
    losses = []
    for _ in range(2):
        if rank == 2:
            with pytest.raises(ValueError, match="rank 2 is on no stage's mesh"):
                make(([0], [1]))
        else:
            engine = make(([0], [1]))
            losses.append(step(engine))
            engine.close()
    engine = make()
    losses.append(step(engine))
    other = make(([1], [2])) if rank > 0 else None  # two ranks' second, while the first rank is at none
    losses.append(step(other) if other is not None else None)
    engine.close()
    return losses


def test_ranks_outside() -> None:
    first, second, third = spawn(others_make_one_too, 3, timeout=60)
    assert first[0] == second[0] == first[1]
    assert first[2] == second[2] == third[0]
    assert second[3] == third[1]


def leaves(rank: int, world_size: int, how: str, has_used: bool) -> str:
    if has_used:
        engine = make()
        step(engine)
        dist.barrier()
    if rank == 1:
        mark("here")
        if how == "destroy":
            dist.destroy_process_group()
            mark("left")
            signal.pause()
        elif how == "exit":
            os._exit(3)
        else:
            signal.pause()
    with pytest.raises(xm.PeerError) as caught:
        make()
    if has_used:
        with pytest.raises(xm.PeerError, match=r"\b1\b"):
            step(engine)
    return f"{caught.value.ranks} {caught.value}"


@pytest.mark.parametrize("has_used", [False, True])
@pytest.mark.parametrize("how", ["destroy", "exit", "kill"])
def test_a_rank_leaves_before_the_constructor(how: str, has_used: bool) -> None:
    with World(leaves, 3, how, has_used) as world:
        world.wait_mark(1, "here")
        if how == "kill":
            world.signal(1, signal.SIGKILL)
        for rank in (0, 2):
            outcome = world.wait(rank, 40)
            assert outcome.error is None, outcome.error
            assert outcome.value.startswith("(1,)"), outcome.value
        world.signal(1, signal.SIGKILL)


WAITS_IN = {"step": "exchange", "summary": "exchange", "constructor": "__init__", "reshard": "_reshard"}


def interrupt_in(function: str) -> None:
    """Sends this process SIGINT once its main thread is in a function of that name."""
    main = threading.main_thread().ident or 0

    def is_there() -> bool:
        return any(one.f_code.co_name == function for one, _ in traceback.walk_stack(sys._current_frames()[main]))

    wait_until(is_there)
    os.kill(os.getpid(), signal.SIGINT)


def interrupted(rank: int, world_size: int, where: str) -> str:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    engine = make() if where in ("step", "summary") else None
    if rank > 0:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        mark("here")
        signal.sigwait({signal.SIGUSR1})
        if engine is not None:
            with pytest.raises(xm.StageError, match="rank 0, step 0: KeyboardInterrupt"):
                CALLS[where](engine)
        return "told"
    x = DTensor.from_local(torch.ones(2, 2), xm.device_mesh(xm.Mesh([0])), [Replicate()], run_check=False)
    calls: dict[str, Callable[[], Any]] = {
        "step": lambda: step(engine) if engine else None,
        "summary": lambda: engine.summary() if engine else None,
        "constructor": make,
        "reshard": lambda: xm.reshard(x, xm.Mesh([1]), [Replicate()]),
    }
    threading.Thread(target=interrupt_in, args=(WAITS_IN[where],)).start()
    with pytest.raises(KeyboardInterrupt):
        calls[where]()
    if engine is not None:
        with pytest.raises(RuntimeError, match="this engine ended"):
            step(engine)
    return "interrupted"


@pytest.mark.parametrize("where", list(WAITS_IN))
def test_an_interrupt_while_waiting(where: str) -> None:
    """The other ranks are there and do not call until rank 0 has been interrupted; the group's timeout is half an
    hour."""
    with World(interrupted, 3, where) as world:
        for rank in (1, 2):
            world.wait_mark(rank, "here")
        outcome = world.wait(0, 60)
        assert outcome.error is None, outcome.error
        assert outcome.value == "interrupted"
        for rank in (1, 2):
            world.signal(rank, signal.SIGUSR1)
            outcome = world.wait(rank, 60)
            assert outcome.error is None, outcome.error
            assert outcome.value == "told"


CALLS: dict[str, Callable[[xm.PipelineEngine], Any]] = {
    "step": step,
    "evaluate": lambda engine: engine.evaluate(torch.ones(4, 4)),
    "clip": lambda engine: engine.clip_grad_norm_(1.0),
    "infinity norm": lambda engine: engine.clip_grad_norm_(1.0, float("inf")),
    "summary": lambda engine: engine.summary(),
    "trace": lambda engine: engine.trace(Path(os.devnull)),
    "scaler": lambda engine: engine.scaler(torch.amp.GradScaler("cpu")).unscale_(
        torch.optim.SGD(engine.parameters(), 1.0)
    ),
}


TOGETHER: dict[str, Callable[[xm.PipelineEngine], Any]] = {
    "step()": step,
    "evaluate()": CALLS["evaluate"],
    "clip_grad_norm_()": CALLS["clip"],
    "summary()": CALLS["summary"],
    "trace()": CALLS["trace"],
    "timeline()": lambda engine: engine.timeline(Path(os.devnull)),
    "the scaler's unscale_() or step()": CALLS["scaler"],
    "state_dict()": lambda engine: engine.state_dict(),
    "load_state_dict()": lambda engine: engine.load_state_dict({}),
}


def different_calls(rank: int, world_size: int) -> None:
    """Every pair: all hear at once who called what, and the engine goes on."""
    engine = make()
    step(engine)
    for one, other in itertools.permutations(TOGETHER, 2):
        texts = rf"all ranks make the same call together, but rank 0 calls {re.escape(one)}, rank 1 calls"
        with pytest.raises(ValueError, match=f"{texts} {re.escape(other)}") as caught:
            TOGETHER[other if rank == 1 else one](engine)
        assert "refused" not in str(caught.value)
    assert step(engine) is not None
    engine.close()


def test_different_calls() -> None:
    spawn(different_calls, 3, timeout=120)


def closes(rank: int, world_size: int) -> dict[str, str]:
    texts = {}
    for name, call in CALLS.items():
        engine = make()
        step(engine)
        if rank == 1:
            engine.close()
            dist.barrier()
            continue
        with pytest.raises(xm.PeerError) as caught:
            call(engine)
        assert caught.value.ranks == (1,)
        texts[name] = str(caught.value)
        with pytest.raises(xm.PeerError, match=r"this engine ended: .*; make a new one"):
            call(engine)
        dist.barrier()
        engine.close()
    return texts


def test_a_rank_closes_its_engine() -> None:
    first, second, third = spawn(closes, 3, timeout=60)
    assert second == {}
    for texts in (first, third):
        assert set(texts) == set(CALLS)
        assert all("rank 1 has closed the pipeline's engine" in text for text in texts.values()), texts
