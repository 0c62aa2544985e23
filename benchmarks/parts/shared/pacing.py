"""Devices of a given speed: products are computed, and then take as long as such a device would take for the operations
of this process's parts."""

import math
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

_LEAST_SLEEP_S = 0.002
_PRODUCTS: dict[str, Callable[[Sequence[Any]], int]] = {
    "mm": lambda args: args[0].numel() * args[1].shape[-1],
    "bmm": lambda args: args[0].numel() * args[1].shape[-1],
    "addmm": lambda args: args[1].numel() * args[2].shape[-1],
    "baddbmm": lambda args: args[1].numel() * args[2].shape[-1],
    "convolution": lambda args: args[0].numel() // args[0].shape[1] * args[1].numel(),  # as large as its input
    "convolution_backward": lambda args: sum(args[-1][:2]) * (args[0].numel() * args[2][0].numel()),
}
"""Kernels by name, with the multiplications of their arguments."""


class Paced:
    """Inside, this process is a device of `flops` operations per second: products start when the one before has ended,
    and take their operations over `flops`. Sleeping holds no core, so many devices can share few. What a thread really
    computes between two products counts as done meanwhile, as by a host that launches kernels ahead; what it waits for
    does not. What is faster than two milliseconds is slept for later.

    torch's kernels of products on cpu are replaced inside, for every thread of the process."""

    def __init__(self) -> None:
        self.flops = 1.0
        self.operations = 0
        self.sleep = time.sleep
        self._busy_until, self._threads = 0.0, threading.local()
        self._replaced = ExitStack()

    def _paced(self, kernel: Any, count: Callable[[Sequence[Any]], int]) -> Callable[..., Any]:
        def run(keys: Any, *args: Any) -> Any:
            begin = time.monotonic()
            ahead = time.thread_time() - getattr(self._threads, "ended", math.inf)
            out = kernel.call_boxed(keys, *args)
            operations = 2 * count(args)
            self.operations += operations
            seconds = operations / self.flops
            self._busy_until = max(self._busy_until, begin - max(ahead, 0.0)) + seconds
            left = self._busy_until - time.monotonic()
            if left > _LEAST_SLEEP_S:
                self.sleep(left)
            self._threads.ended = time.thread_time()
            return out

        return run

    def __enter__(self) -> None:
        library = self._replaced.enter_context(torch.library._scoped_library("aten", "IMPL"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that kernels are replaced
            for name, count in _PRODUCTS.items():
                kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
                library.impl(name, self._paced(kernel, count), "CPU", with_keyset=True)

    def __exit__(self, *error: object) -> None:
        self._replaced.close()
