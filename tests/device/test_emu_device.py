"""The emulated device itself: streams, events, gates, memory, operators. Each test runs in a process of its own."""

from __future__ import annotations

import copy
import importlib
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from torch_xmesh.testing import spawn

pytestmark = pytest.mark.timeout(900)  # the first test builds the device
REPETITIONS = 30
NUM_ELEMENTS = 4096


def on_device(body: Callable[[], None]) -> None:
    spawn(_run, 1, body, backend=None)


def _run(rank: int, world_size: int, body: Callable[[], None]) -> None:
    importlib.import_module("emu_device")
    body()


def streams_and_events() -> None:
    import emu_device

    assert torch.accelerator.current_accelerator() == torch.device("emu")
    assert torch.accelerator.device_count() == 2
    x = torch.ones(NUM_ELEMENTS, device="emu")
    side = emu_device.own_stream()
    side.wait_stream(torch.accelerator.current_stream())
    gate = emu_device.hold(side)
    with side:
        y = x + 1
    event = side.record_event()
    assert not event.query()
    assert not side.query()
    torch.accelerator.current_stream().wait_event(event)
    z = y + 1
    assert not torch.accelerator.current_stream().query()
    gate.release()
    event.synchronize()
    assert event.query()
    assert z.eq(3).all().item()
    before, after = torch.Event(device="emu", enable_timing=True), torch.Event(device="emu", enable_timing=True)
    before.record()
    after.record()
    after.synchronize()
    assert torch.get_device_module("emu").default_stream(1).stream_id == 0
    assert before.elapsed_time(after) >= 0


def test_streams_and_events() -> None:
    on_device(streams_and_events)


def synchronize_waits() -> None:
    import emu_device

    x = torch.zeros(NUM_ELEMENTS, device="emu")
    host = torch.empty(NUM_ELEMENTS)
    gate = emu_device.hold()
    host.copy_(x.add_(1), non_blocking=True)
    timer = threading.Timer(0.2, gate.release)
    timer.start()
    torch.accelerator.synchronize()
    assert host.eq(1).all()
    timer.join()


def test_accelerator_synchronize_waits() -> None:
    on_device(synchronize_waits)


def gates_expire() -> None:
    import emu_device

    gate = emu_device.hold(max_ms=20)
    torch.accelerator.synchronize()
    assert gate.expired
    assert emu_device.expired_gates() == 1
    with pytest.raises(RuntimeError, match="opened by itself after 20 ms"):
        gate.release()


def test_a_gate_that_nobody_releases_says_so() -> None:
    on_device(gates_expire)


def pool_of_streams() -> None:
    import emu_device

    pooled = {torch.Stream(device="emu:0").stream_id for _ in range(20)}
    assert len(pooled) == 8
    own = [emu_device.own_stream(1) for _ in range(20)]
    assert len({stream.stream_id for stream in own} | pooled) == 28
    gates = [emu_device.hold(stream) for stream in own]
    assert all(gate.wait_until_reached() for gate in gates)  # none waits for another one's thread
    for gate in gates:
        gate.release()
    torch.accelerator.synchronize()


def test_own_streams_have_threads_of_their_own() -> None:
    on_device(pool_of_streams)


def memory_is_poisoned() -> None:
    import emu_device

    x = torch.ones(100, device="emu")
    assert emu_device.memory()["live"] == 512
    address = x.data_ptr()
    del x
    torch.accelerator.synchronize()
    assert emu_device.memory() == {"live": 0, "peak": 512, "pending": 0, "cached": 512}
    y = torch.empty(100, device="emu")
    assert y.data_ptr() == address
    assert y.isnan().all().item()
    emu_device.poison(False)
    y.fill_(7)
    del y
    assert torch.empty(100, device="emu").eq(7).all().item()
    emu_device.empty_cache()
    assert emu_device.memory()["cached"] == 0


def test_freed_memory_is_poisoned() -> None:
    on_device(memory_is_poisoned)


def record_stream_keeps_memory() -> None:
    import emu_device

    side = emu_device.own_stream()
    x = torch.full((NUM_ELEMENTS,), 5.0, device="emu")
    address = x.data_ptr()
    side.wait_stream(torch.accelerator.current_stream())
    gate = emu_device.hold(side)
    with side:
        y = x * 2
    x.record_stream(side)
    del x
    assert emu_device.memory()["pending"] == NUM_ELEMENTS * 4
    assert torch.empty(NUM_ELEMENTS, device="emu").data_ptr() != address
    gate.release()
    side.synchronize()
    assert y.cpu().eq(10).all()
    assert emu_device.memory()["pending"] == 0


def test_record_stream_keeps_memory() -> None:
    on_device(record_stream_keeps_memory)


def operators_run_later() -> None:
    import emu_device

    x = torch.arange(12.0, device="emu").view(3, 4)
    before = emu_device.counters()
    y = (x.t() @ x).softmax(0)[1:, ::2].contiguous()
    after = emu_device.counters()
    assert after["async"] > before["async"]
    assert after["synced"] == before["synced"]
    host = torch.arange(12.0).view(3, 4)
    assert torch.equal(y.cpu(), (host.t() @ host).softmax(0)[1:, ::2])
    assert x.gt(3).nonzero().shape == (8, 2)
    assert emu_device.counters()["synced"] == before["synced"] + 1


def test_operators_run_later() -> None:
    on_device(operators_run_later)


def mistakes_are_refused() -> None:
    x = torch.ones(3, 4, device="emu")
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(3, 4)
    with pytest.raises(RuntimeError, match="emu:1 and emu:0"):
        x.to("emu:1") + x
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        x @ x
    torch.nn.functional.embedding(torch.tensor([7], device="emu"), x)
    with pytest.raises(RuntimeError, match="an earlier operation failed"):
        torch.accelerator.synchronize()


def test_mistakes_are_refused() -> None:
    on_device(mistakes_are_refused)


def every_dtype() -> None:
    dtypes = [
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
        torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
    ]  # fmt: skip
    for dtype in dtypes:
        host = torch.arange(8).to(dtype)
        x = host.to("emu")
        assert torch.equal(x.cpu().view(torch.uint8), host.view(torch.uint8)), dtype
        assert torch.equal(x.to("emu:1")[::2].cpu().view(torch.uint8), host[::2].contiguous().view(torch.uint8)), dtype
        wide = torch.complex128 if dtype.is_complex else torch.float64
        assert torch.equal(x.to(wide).cpu(), host.to(wide)), dtype


def test_every_dtype() -> None:
    on_device(every_dtype)


def training_is_bitwise_equal() -> None:
    import emu_device

    torch.manual_seed(0)
    host = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4))
    device = copy.deepcopy(host).to("emu")
    optimizers = [torch.optim.AdamW(model.parameters(), foreach=False) for model in (host, device)]
    before = emu_device.counters()["synced"]
    for probability in (0.0, 0.3, 0.7):
        emu_device.delays(probability, max_us=300, seed=1)
        x, target = torch.randn(5, 8), torch.randn(5, 4)
        losses = [torch.nn.functional.mse_loss(m(x.to(d)), target.to(d)) for m, d in ((host, "cpu"), (device, "emu"))]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        assert losses[0].item() == losses[1].item()
    for (name, expected), got in zip(host.named_parameters(), device.parameters(), strict=True):
        assert torch.equal(expected, got.cpu()), name
    assert emu_device.counters()["synced"] == before


def test_training_is_bitwise_equal_to_the_cpu() -> None:
    on_device(training_is_bitwise_equal)


def _no_event_wait(correct: bool) -> bool:
    """A consumer on another stream, with or without an event of the producer's."""
    import emu_device

    side = emu_device.own_stream()
    x = torch.zeros(NUM_ELEMENTS, device="emu")
    torch.accelerator.synchronize()
    gate = emu_device.hold()
    x.fill_(1)
    if correct:
        side.wait_stream(torch.accelerator.current_stream())
    with side:
        y = x * 1
    if not correct:
        side.synchronize()
    gate.release()
    side.synchronize()
    return bool(y.cpu().eq(1).all())


def _no_record_stream(correct: bool) -> bool:
    """Memory given back while another stream is about to read it."""
    import emu_device

    side = emu_device.own_stream()
    x = torch.ones(NUM_ELEMENTS, device="emu")
    side.wait_stream(torch.accelerator.current_stream())
    gate = emu_device.hold(side)
    with side:
        y = x * 1
    if correct:
        x.record_stream(side)
    del x
    torch.accelerator.current_stream().synchronize()
    gate.release()
    side.synchronize()
    return bool(y.cpu().eq(1).all())


def _read_early(correct: bool) -> bool:
    """A side stream's result, read on the current stream without waiting."""
    import emu_device

    side = emu_device.own_stream()
    x = torch.ones(NUM_ELEMENTS, device="emu")
    y = torch.zeros(NUM_ELEMENTS, device="emu")
    side.wait_stream(torch.accelerator.current_stream())
    gate = emu_device.hold(side)
    with side:
        y.copy_(x)
    if correct:
        torch.accelerator.current_stream().wait_stream(side)
    z = y * 1
    if not correct:
        torch.accelerator.current_stream().synchronize()
    gate.release()
    side.synchronize()
    return bool(z.cpu().eq(1).all())


def _host_read_early(correct: bool) -> bool:
    """A pinned host buffer, read before the copy to it has run."""
    import emu_device

    host = torch.zeros(NUM_ELEMENTS, pin_memory=True)
    assert host.is_pinned()
    x = torch.ones(NUM_ELEMENTS, device="emu")
    gate = emu_device.hold()
    host.copy_(x, non_blocking=True)
    if correct:
        gate.release()
        torch.accelerator.current_stream().synchronize()
    right = bool(host.eq(1).all())
    if not correct:
        gate.release()
    return right


MISTAKES = [_no_event_wait, _no_record_stream, _read_early, _host_read_early]


def mistakes_are_caught() -> None:
    for program in MISTAKES:
        right = [program(True) for _ in range(REPETITIONS)]
        wrong = [program(False) for _ in range(REPETITIONS)]
        assert all(right), (program.__name__, right.count(False))
        assert not any(wrong), (program.__name__, wrong.count(True))


def test_gates_catch_the_classic_mistakes_every_time() -> None:
    on_device(mistakes_are_caught)


EXITS = {
    "held": "x = torch.ones(9, device='emu'); emu_device.hold(max_ms=600_000); x.add_(1)",
    "busy": "x = torch.ones(512, 512, device='emu'); [x.mm(x) for _ in range(500)]",
    "delayed": "emu_device.delays(1.0, 5000, 1); x = torch.ones(9, device='emu'); [x.add_(1) for _ in range(300)]",
}


@pytest.mark.parametrize("how", sorted(EXITS))
def test_a_process_ends_whatever_its_streams_do(how: str) -> None:
    script = f"import torch, emu_device\n{EXITS[how]}"
    environment = {"PYTHONPATH": str(Path(__file__).resolve().parent / "emu"), "PATH": "/usr/bin:/bin"}
    ran = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, "")
