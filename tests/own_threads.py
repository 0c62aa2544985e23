"""The threads of this process, by the names that the kernel has for them."""

from __future__ import annotations

from pathlib import Path


def own_threads() -> dict[Path, str]:
    """Names by each thread's folder in /proc; without those that end meanwhile."""
    found: dict[Path, str] = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            found[task] = (task / "comm").read_text().strip()
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found
