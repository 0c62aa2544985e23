"""One rank: what a device does with the library's kernels, streams and gradients, without a network."""

from __future__ import annotations

import device_cases
import device_collectives
import mixed_cases
from ranks import Case, run_cases


def cases(size: int) -> list[Case]:
    """Those that any number of ranks can run."""
    return [
        Case("collectives", device_collectives.collectives),
        *(Case(case.__name__, case) for case in device_cases.CALLS),
        *(Case(f"from cpu and back: {case.__name__}", case) for case in mixed_cases.CASES),
        Case("30 random layouts from cpu and back", mixed_cases.random_layouts, (2, 30)),
    ]


def prepare() -> None:
    cases(1)


def run(device: str) -> bool:
    layouts = [Case("50 random layouts", device_cases.random_layouts, (1, 50))]
    return run_cases(device, 1, cases(1) + layouts, case_s=25)
