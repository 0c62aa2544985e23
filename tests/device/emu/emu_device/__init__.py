"""An accelerator without hardware, for tests: ``import emu_device`` gives this process ``emu:0`` and ``emu:1``.

Its memory is the host's, its streams are threads, every operator runs later on the current stream. A process keeps it:
import it in processes made for that. :func:`build` only builds, and may be called anywhere.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from emu_device._build import build
from emu_device._build import load as _load
from emu_device._module import make_module as _make_module

__all__ = [
    "Gate",
    "build",
    "communicator_bytes",
    "communicators",
    "counters",
    "delays",
    "empty_cache",
    "exchange_on_plain_thread",
    "expired_gates",
    "hold",
    "memory",
    "own_stream",
    "poison",
    "work_error",
]

_native = _load()
torch.set_num_threads(1)
torch.utils.rename_privateuse1_backend("emu")
torch._register_device_module("emu", _make_module(_native))  # type: ignore[no-untyped-call]
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)

if os.environ.get("EMU_POISON") == "0":  # for benchmarks: overwriting freed memory takes its time
    _native.poison(False)

Gate = _native.Gate


def hold(stream: torch.Stream | None = None, max_ms: int = 10_000) -> Any:
    """Stops a stream (the current one by default) at this point until ``release()`` of the gate that is returned.

    A gate that nobody releases opens by itself after ``max_ms``; its ``release()`` then raises.
    """
    held = torch.accelerator.current_stream() if stream is None else stream
    return _native.hold(held.stream_id, held.device_index, max_ms)


def own_stream(device: int = 0) -> torch.Stream:
    """A new stream with a thread of its own, outside the pool."""
    return torch.Stream(device=torch.device("emu", device), priority=-1)


def delays(probability: float, max_us: int = 500, seed: int = 0) -> None:
    """Lets tasks begin late at random, up to ``max_us``; a probability of 0 ends that."""
    _native.delays(probability, max_us, seed)


def poison(on: bool) -> None:
    """Whether freed memory is overwritten on the stream that it was allocated on. It is, unless this says otherwise."""
    _native.poison(on)


def counters() -> dict[str, int]:
    """Operators so far that ran as tasks (``async``), and that the host had to wait for and run itself (``synced``)."""
    return dict(_native.counters())


def memory(device: int = 0) -> dict[str, int]:
    """Bytes of a device: ``live``, their ``peak``, ``pending`` (freed, in use on a recorded stream) and ``cached``."""
    return dict(_native.memory(device))


def empty_cache() -> None:
    """Waits for the devices, then gives cached memory back to the system."""
    _native.empty_cache()


def expired_gates() -> int:
    """How many gates have opened by themselves."""
    return int(_native.expired_gates())


def communicators() -> int:
    """How many communicators of ``emunccl`` live in this process."""
    return int(_native.communicators())


def communicator_bytes() -> int:
    """The shared memory that they have mapped."""
    return int(_native.communicator_bytes())


def work_error(work: dist.Work) -> str | None:
    """What a work failed with, or None; ``work.exception()`` cannot be called from Python."""
    error: str | None = _native.work_error(work)
    return error


def exchange_on_plain_thread(backend: Any) -> str:
    """Lets a C++ thread exchange with the other of two ranks while this one keeps Python's lock; what was wrong."""
    return str(_native.exchange_on_plain_thread(backend))


def _make_backend(options: Any, _: Any) -> Any:
    timeout: timedelta = options.timeout
    return _native.EmuNccl(options.store, options.group_rank, options.group_size, timeout)


dist.Backend.register_backend("emunccl", _make_backend, extended_api=True, devices=["emu"])
