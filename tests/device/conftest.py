"""Builds the emulated device once, before its tests, and lets the ranks that they start import it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent / "emu"
sys.path.insert(0, str(PACKAGE))


@pytest.fixture(scope="session", autouse=True)
def _emulated_device() -> None:
    """In a process of its own: a process that imports the device keeps it."""
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE)}
    built = subprocess.run(
        [sys.executable, "-c", "import emu_device"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
