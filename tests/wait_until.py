"""Waiting for what tells nobody: how the kernel sees a process, memory that another thread writes."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(holds: Callable[[], bool]) -> None:
    """Looks again until it holds. Nothing depends on how long that takes: the test's own timeout is the only bound."""
    while not holds():
        time.sleep(0.001)  # leaves the core to what it waits for
