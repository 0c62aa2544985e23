"""Four ranks, and six; the calls of the tests on cpu too."""

from __future__ import annotations

import device_cases
import test_reshard_autograd
from check_one_rank import cases
from ranks import Case, run_cases


def all_cases() -> list[Case]:
    return [*cases(4), *(Case(f"as on cpu: {case.__name__}", case) for case in device_cases.CALLS_OF_CPU)]


def prepare() -> None:
    all_cases()


def run(device: str) -> bool:
    is_well = run_cases(device, 4, all_cases(), case_s=25)
    return run_cases(device, 6, [Case("gradients as on cpu", test_reshard_autograd.everything)], case_s=30) and is_well
