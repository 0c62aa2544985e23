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
        self._device = device

    def states(self) -> Drawn:
        """How far they have drawn."""
        of_cpu = torch.random.get_rng_state()
        return (of_cpu,) if self._module is None else (of_cpu, self._module.get_rng_state(self._device))

    def set_states(self, states: Drawn) -> None:
        """They go on from there."""
        torch.random.set_rng_state(states[0])
        if self._module is not None:
            self._module.set_rng_state(states[1], self._device)

    def seed(self, seed: int) -> None:
        """They begin anew; of a device that is the current one of its kind."""
        torch.default_generator.manual_seed(seed)
        if self._module is not None:
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
