"""What a process's heap holds, as glibc counts it."""

import ctypes
import threading
from typing import Any

_BETWEEN_LOOKS_S = 0.001


class _Mallinfo2(ctypes.Structure):
    """glibc's struct of this name, 2.33 or newer."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    )


def held_bytes() -> int:
    """What is allocated by this process and not freed. Raises AttributeError on systems without mallinfo2."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Mallinfo2
    found = mallinfo()
    return int(found.uordblks + found.hblkhd)


class PeakMemory:
    """Inside, the heap is looked at every millisecond.

    Attributes:
        peak_bytes: the most that it held beyond what it held at the start.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        while True:
            self.peak_bytes = max(self.peak_bytes, held_bytes() - self._before)
            if self._has_ended.wait(_BETWEEN_LOOKS_S):
                return

    def __enter__(self) -> "PeakMemory":
        self._before = held_bytes()
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._has_ended.set()
        self._thread.join()
