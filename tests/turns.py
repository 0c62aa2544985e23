"""Which part of a long test's cases a commit runs, so that all are run over a few commits."""

import functools
import subprocess
import zlib
from pathlib import Path


@functools.cache
def part_of_commit(parts: int, test: str = "") -> int:
    """Of so many parts of a test's cases, the one of the commit that is checked out, by its hash."""
    root = Path(__file__).resolve().parents[1]
    shown = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
    return (int(shown.stdout or "0", 16) + zlib.crc32(test.encode())) % parts
