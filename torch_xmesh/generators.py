"""Torch's default generators of random numbers: the CPU's, and that of a device."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

Drawn = tuple[torch.Tensor, ...]
"""How far generators have drawn: the state of the CPU's, and of a device's."""


class Generators:
    """The CPU's default generator, and that of a device which has one of its own."""

    def __init__(self, device: torch.device | None) -> None:
        module: Any = None if device is None or device.type == "cpu" else torch.get_device_module(device.type)
        self._module = module if hasattr(module, "set_rng_state") else None
        is_only = device is None or not hasattr(module, "device")  # there is one device of the kind
        self._which = () if is_only else (device,)

    def states(self) -> Drawn:
        """How far they have drawn."""
        of_cpu = torch.random.get_rng_state()
        return (of_cpu,) if self._module is None else (of_cpu, self._module.get_rng_state(*self._which))

    def set_states(self, states: Drawn) -> None:
        """They go on from there."""
        torch.random.set_rng_state(states[0])
        if self._module is not None:
            self._module.set_rng_state(states[1], *self._which)

    def seed(self, seed: int) -> None:
        """They begin anew."""
        torch.default_generator.manual_seed(seed)
        if self._module is not None:
            with self._module.device(*self._which) if self._which else contextlib.nullcontext():
                self._module.manual_seed(seed)


@contextlib.contextmanager
def rng_kept(device: torch.device | None) -> Iterator[None]:
    """Leaves them as they were."""
    generators = Generators(device)
    before = generators.states()
    try:
        yield
    finally:
        generators.set_states(before)
