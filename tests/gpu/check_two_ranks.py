"""Two ranks, which share a GPU where there is one only."""

from __future__ import annotations

from check_one_rank import cases, prepare
from ranks import run_cases

__all__ = ["prepare", "run"]


def run(device: str) -> bool:
    return run_cases(device, 2, cases(2), case_s=25)
