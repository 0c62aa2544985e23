"""What keeps a reshard's order on a device, and a pipeline's: with it none of 100 turns is wrong. `mutants.py` counts
them without it."""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from device_ranks import on_device
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import torch_xmesh as xm

pytestmark = pytest.mark.timeout(900)  # the first test builds the device
SOURCE, TARGET = xm.Mesh([0], device_type="emu"), xm.Mesh([1], device_type="emu")
SHAPE = (64, 48)
TURNS = 100
PATIENCE = 0.05
"""Seconds that a mistake gets to happen in. What is right never ends before, so every turn takes so long."""


def tell(what: str) -> None:
    dist.distributed_c10d._get_default_store().set(what, "")


def is_told(what: str) -> bool:
    return bool(dist.distributed_c10d._get_default_store().check([what]))


def await_told(what: str) -> None:
    dist.distributed_c10d._get_default_store().wait([what], datetime.timedelta(seconds=60))


def give_time(has_happened: Callable[[], bool]) -> None:
    """Returns once it has happened, which is the mistake, or after PATIENCE."""
    deadline = time.monotonic() + PATIENCE
    while not has_happened() and time.monotonic() < deadline:
        time.sleep(0.001)


def source(rank: int, local: torch.Tensor | None, placement: Placement) -> Any:
    if local is None:
        return xm.Spec(SHAPE, torch.float32, SOURCE, [placement])
    return DTensor.from_local(local, xm.device_mesh(SOURCE, "emu"), [placement], run_check=False)


def value_is(local: torch.Tensor, value: float) -> bool:
    return bool((local.cpu() == value).all())


def producer(rank: int, turn: int) -> bool:
    """The line waits for what the caller's stream held when it called."""
    import emu_device

    local = torch.zeros(SHAPE) if rank == 0 else None
    torch.accelerator.synchronize()
    gate = emu_device.hold() if rank == 0 else None
    if local is not None:
        local.fill_(turn + 1)
    y, work = xm.reshard(source(rank, local, Replicate()), TARGET, [Replicate()], async_op=True)
    if gate is not None:
        give_time(work.is_completed)
        gate.release()
    work.wait()
    return rank == 0 or value_is(y.to_local(), turn + 1)


def consumer(rank: int, turn: int) -> bool:
    """The caller's stream waits for the end of the call."""
    return _looked_at_early(rank, turn, Replicate())


def unpacking(rank: int, turn: int) -> bool:
    """The line waits for the inner backend's stream before it unpacks."""
    return _looked_at_early(rank, turn, Shard(1))


def _looked_at_early(rank: int, turn: int, placement: Placement) -> bool:
    import emu_device

    if rank == 0:
        local = torch.zeros(SHAPE)
        torch.accelerator.synchronize()
        gate = emu_device.hold()
        local.fill_(turn + 1)
        give_time(lambda: is_told(f"{turn} has returned"))  # not before this rank has called
        _, work = xm.reshard(source(rank, local, placement), TARGET, [placement], async_op=True)
        await_told(f"{turn} has looked")
        gate.release()
        work.wait()
        torch.accelerator.synchronize()
        return True
    mesh = xm.device_mesh(TARGET, "emu")
    wide = torch.zeros(SHAPE[0], 2 * SHAPE[1])
    out = wide[:, : SHAPE[1]] if placement == Shard(1) else torch.zeros(SHAPE)  # what has gaps is staged
    torch.accelerator.synchronize()
    xm.reshard(
        source(rank, None, placement),
        TARGET,
        [placement],
        out=DTensor.from_local(out, mesh, [placement], run_check=False),
    )
    seen = out + 0
    tell(f"{turn} has returned")
    give_time(torch.accelerator.current_stream().query)
    tell(f"{turn} has looked")
    return value_is(seen, turn + 1)


def gradient(rank: int, turn: int) -> bool:
    """What looks at a gradient waits for it."""
    import emu_device

    if rank == 0:
        x = source(rank, torch.ones(SHAPE), Replicate()).requires_grad_()
    else:
        x = xm.Spec(SHAPE, torch.float32, SOURCE, [Replicate()], requires_grad=True)
    y = xm.reshard(x, TARGET, [Replicate()])
    torch.accelerator.synchronize()
    if rank == 1:
        weight = torch.zeros(SHAPE)
        torch.accelerator.synchronize()
        gate = emu_device.hold()
        weight.fill_(turn + 1)
        (y.to_local() * weight).sum().backward()
        await_told(f"{turn} has looked")
        gate.release()
        torch.accelerator.synchronize()
        return True
    y.to_local().sum().backward()
    seen = x.grad.to_local() + 0
    give_time(torch.accelerator.current_stream().query)
    tell(f"{turn} has looked")
    return value_is(seen, turn + 1)


def source_memory(rank: int, turn: int) -> bool:
    """The source's memory stays until the line has passed the call, even if nobody else keeps it."""
    import emu_device

    if rank == 0:
        local = torch.full(SHAPE, turn + 1.0)
        torch.accelerator.synchronize()
        _, work = xm.reshard(source(rank, local, Replicate()), TARGET, [Replicate()], async_op=True)
        await_told(f"{turn} is in the call")
        _wait_enqueued(work)
        del local, work
        overwritten = torch.full(SHAPE, -1.0)
        torch.accelerator.current_stream().synchronize()
        tell(f"{turn} is overwritten")
        await_told(f"{turn} has come")
        return value_is(overwritten, -1)
    gate = emu_device.hold()
    y, work = xm.reshard(source(rank, None, Replicate()), TARGET, [Replicate()], async_op=True)
    tell(f"{turn} is in the call")
    await_told(f"{turn} is overwritten")
    gate.release()
    work.wait()
    is_right = value_is(y.to_local(), turn + 1)
    tell(f"{turn} has come")
    return is_right


def target_memory(rank: int, turn: int) -> bool:
    """So does the destination's."""
    import emu_device

    if rank == 0:
        local = torch.full(SHAPE, turn + 1.0)
        gate = emu_device.hold()
        _, work = xm.reshard(source(rank, local, Replicate()), TARGET, [Replicate()], async_op=True)
        await_told(f"{turn} is taken again")
        gate.release()
        work.wait()
        torch.accelerator.synchronize()
        tell(f"{turn} has come")
        return True
    y, work = xm.reshard(source(rank, None, Replicate()), TARGET, [Replicate()], async_op=True)
    _wait_enqueued(work)
    give_time(work.is_completed)
    del y, work
    taken = torch.full(SHAPE, -1.0)
    torch.accelerator.current_stream().synchronize()
    tell(f"{turn} is taken again")
    await_told(f"{turn} has come")
    return value_is(taken, -1)


ON_HOST = {"source": xm.Mesh([0], device_type="cpu"), "target": xm.Mesh([1], device_type="cpu")}


def mirrored_source(rank: int, turn: int) -> bool:
    """What goes to the host waits for what the caller's stream held, and leaves once it is there."""
    import emu_device

    local = torch.zeros(SHAPE) if rank == 0 else None
    torch.accelerator.synchronize()
    gate = emu_device.hold() if rank == 0 else None
    if local is not None:
        local.fill_(turn + 1)
    y, work = xm.reshard(source(rank, local, Replicate()), ON_HOST["target"], [Replicate()], async_op=True)
    if gate is not None:
        give_time(work.is_completed)
        gate.release()
    work.wait()
    return rank == 0 or value_is(y.to_local(), turn + 1)


def _from_host(rank: int, turn: int) -> Any:
    if rank == 1:
        return xm.Spec(SHAPE, torch.float32, ON_HOST["source"], [Replicate()])
    local = torch.full(SHAPE, turn + 1.0, device="cpu")
    return DTensor.from_local(local, xm.device_mesh(ON_HOST["source"], "cpu"), [Replicate()], run_check=False)


def _zeros_to_fill() -> DTensor:
    local = torch.zeros(SHAPE)
    torch.accelerator.synchronize()
    return DTensor.from_local(local, xm.device_mesh(TARGET, "emu"), [Replicate()], run_check=False)


def mirrored_target(rank: int, turn: int) -> bool:
    """What comes from the host waits for what the caller's stream held."""
    import emu_device

    x = _from_host(rank, turn)
    if rank == 0:
        xm.reshard(x, TARGET, [Replicate()])
        return True
    out = _zeros_to_fill()
    local = out.to_local()
    gate = emu_device.hold()
    before = local + 0
    _, work = xm.reshard(x, TARGET, [Replicate()], out=out, async_op=True)
    give_time(work.is_completed)
    gate.release()
    work.wait()
    return value_is(before, 0) and value_is(local, turn + 1)


def mirrored_consumer(rank: int, turn: int) -> bool:
    """The caller's stream waits for what comes from the host."""
    import emu_device

    x = _from_host(rank, turn)
    if rank == 0:
        xm.reshard(x, TARGET, [Replicate()])
        return True
    out = _zeros_to_fill()
    with emu_device.own_stream():  # the call's, which is late
        gate = emu_device.hold()
        _, work = xm.reshard(x, TARGET, [Replicate()], out=out, async_op=True)
    work.wait()
    seen = out.to_local() + 0
    give_time(torch.accelerator.current_stream().query)
    gate.release()
    return value_is(seen, turn + 1)


class Gated(nn.Module):
    """A stage that adds nothing. In a microbatch the test has its turn, before or behind the addition."""

    __module__ = "torch.nn.gated"  # not looked into

    def __init__(self) -> None:
        super().__init__()
        self.microbatch = -1
        self.before: Callable[[int], None] = lambda microbatch: None
        self.behind: Callable[[int, torch.Tensor], None] = lambda microbatch, out: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.before(self.microbatch)
        out = x + 0
        self.behind(self.microbatch, out)
        self.microbatch += 1
        return out


def _pipeline(rank: int, kinds: tuple[str, str]) -> tuple[xm.PipelineEngine, Gated]:
    """Two stages, each of which adds nothing; two microbatches. Made once."""
    if kinds not in _PIPELINES:
        with torch.device("cpu"):
            stages = [Gated(), Gated()]
            meshes = [xm.Mesh([stage], device_type=kind) for stage, kind in enumerate(kinds)]
            engine = xm.PipelineEngine(
                stages,
                (torch.zeros(*SHAPE),),
                meshes=meshes,
                num_microbatches=2,
                loss_fn=lambda y, target: y.mean(),
                schedule="gpipe",
            )
        _PIPELINES[kinds] = engine, stages[rank]
    return _PIPELINES[kinds]


_PIPELINES: dict[tuple[str, str], tuple[xm.PipelineEngine, Gated]] = {}


def pipeline_producer(rank: int, turn: int) -> bool:
    """What a stage sends to the host waits for what makes it."""
    import emu_device

    engine, stage = _pipeline(rank, ("emu", "cpu"))
    stage.microbatch = 0
    seen: list[torch.Tensor] = []

    def holds(microbatch: int) -> None:
        if microbatch == 0:
            gate = emu_device.hold()

            def release() -> None:
                give_time(lambda: is_told(f"{turn} has come"))
                gate.release()

            threading.Thread(target=release).start()

    def looks(microbatch: int, out: torch.Tensor) -> None:
        tell(f"{turn} has come")
        seen.append(out.clone())

    if rank == 0:
        stage.before = holds
    else:
        stage.behind = looks
    engine.evaluate(torch.full((2 * SHAPE[0], SHAPE[1]), turn + 1.0, device="cpu"))
    return all(value_is(one, turn + 1) for one in seen)


def pipeline_consumer(rank: int, turn: int) -> bool:
    """A stage's stream waits for what comes from the host."""
    import emu_device

    engine, stage = _pipeline(rank, ("cpu", "emu"))
    stage.microbatch = 0
    usual, other = torch.accelerator.current_stream(), emu_device.own_stream()
    gate = emu_device.hold() if rank == 1 else None
    seen: list[torch.Tensor] = []

    def switches(microbatch: int, out: torch.Tensor) -> None:
        if microbatch == 0:  # room for the next microbatch was made on the usual stream, which is late
            other.__enter__()
            return
        seen.append(out)
        give_time(other.query)
        assert gate is not None
        gate.release()
        other.__exit__(None, None, None)
        usual.wait_stream(other)

    if rank == 1:
        stage.behind = switches
    engine.evaluate(torch.full((2 * SHAPE[0], SHAPE[1]), turn + 1.0, device="cpu"))
    return all(value_is(one, turn + 1) for one in seen)


def _wait_enqueued(work: Any) -> None:
    """On a stream that nobody uses: what waits for the call there is of no account."""
    import emu_device

    with emu_device.own_stream():
        work.wait()


CASES = [
    producer,
    consumer,
    unpacking,
    gradient,
    source_memory,
    target_memory,
    mirrored_source,
    mirrored_target,
    mirrored_consumer,
    pipeline_producer,
    pipeline_consumer,
]


def count_wrong(rank: int, world_size: int, case: Callable[[int, int], bool]) -> int:
    wrong = 0
    for turn in range(TURNS):
        wrong += not case(rank, turn)
        dist.barrier()
    for engine, _ in _PIPELINES.values():
        engine.close()
    return wrong


@pytest.mark.parametrize("case", CASES)
def test_guard(case: Callable[[int, int], bool]) -> None:
    wrong = sum(on_device(count_wrong, 2, case))
    print(f"{case.__name__}: {wrong} of {TURNS} wrong")
    assert wrong == 0
