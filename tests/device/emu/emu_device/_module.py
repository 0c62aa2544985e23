"""The device module ``torch.emu``."""

from __future__ import annotations

import contextlib
from types import ModuleType
from typing import Any

import torch


def make_module(native: ModuleType) -> ModuleType:
    """What PyTorch and programs expect of ``torch.<device>``, over the built library."""
    module = ModuleType("torch.emu", "The emulated accelerator.")

    def index_of(device: Any) -> int:
        if device is None:
            return int(native.current_device())
        if isinstance(device, int):
            return device
        index = torch.device(device).index
        return int(native.current_device()) if index is None else index

    class Device:
        """Makes a device current within a ``with`` statement."""

        def __init__(self, device: Any) -> None:
            self.index = index_of(device)
            self.previous = -1

        def __enter__(self) -> None:
            self.previous = native.current_device()
            native.set_device(self.index)

        def __exit__(self, *_: object) -> None:
            native.set_device(self.previous)

    class Stream(torch.Stream):
        """A stream of the pool; with ``stream_id``, that stream."""

        def __new__(cls, device: Any = None, priority: int = 0, **known: Any) -> Any:
            if known:
                return super().__new__(cls, **known)
            return super().__new__(cls, device=torch.device("emu", index_of(device)), priority=priority)

    class Event(torch.Event):
        """An event of this device."""

        def __new__(cls, enable_timing: bool = False, **options: Any) -> Any:
            return super().__new__(cls, device="emu", enable_timing=enable_timing, **options)

    def current_stream(device: Any = None) -> torch.Stream:
        return torch.accelerator.current_stream(torch.device("emu", index_of(device)))

    def stream(stream: torch.Stream | None) -> Any:
        return contextlib.nullcontext() if stream is None else stream

    def default_stream(device: Any = None) -> torch.Stream:
        return torch.Stream(stream_id=0, device_index=index_of(device), device_type=current_stream(device).device_type)

    def manual_seed(seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def get_rng_state(device: Any = "emu") -> torch.Tensor:
        return torch.default_generator.get_state()

    def set_rng_state(state: torch.Tensor, device: Any = "emu") -> None:
        torch.default_generator.set_state(state)

    members: dict[str, Any] = {
        "Event": Event,
        "Stream": Stream,
        "_is_in_bad_fork": native.is_in_bad_fork,
        "_lazy_init": lambda: None,  # without it torch.accelerator.synchronize() returns at once
        "current_device": native.current_device,
        "current_stream": current_stream,
        "default_generators": (torch.default_generator,) * native.device_count(),
        "default_stream": default_stream,
        "device": Device,
        "device_count": native.device_count,
        "empty_cache": native.empty_cache,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "get_device_name": lambda device=None: f"emu:{index_of(device)}",
        "get_rng_state": get_rng_state,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "manual_seed": manual_seed,
        "manual_seed_all": manual_seed,
        "memory_allocated": lambda device=None: native.memory(index_of(device))["live"],
        "set_device": lambda device: native.set_device(index_of(device)),
        "set_rng_state": set_rng_state,
        "set_stream": torch.accelerator.set_stream,
        "stream": stream,
        "synchronize": lambda device=None: native.synchronize(index_of(device)),
    }
    for name, member in members.items():
        setattr(module, name, member)
    return module
