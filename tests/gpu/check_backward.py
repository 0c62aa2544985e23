"""Modules whose backward is split, against one whole backward, to the bit; each is named."""

from __future__ import annotations

import copy
import os

import torch
from models.backward import CASES
from report import found

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def run(device: str) -> bool:
    from test_split_backward import compare

    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    bad = 0
    for case in CASES:
        try:
            torch.manual_seed(0)
            whole = case.build().to(device)
            inputs = [one.to(device) if isinstance(one, torch.Tensor) else one for one in case.inputs()]
            reason = compare(whole, copy.deepcopy(whole), inputs)
            if (reason is None) != (case.is_whole is None):
                raise AssertionError(f"whole because {reason}; on cpu {case.is_whole}")
        except Exception as error:
            bad += 1
            found(f"{case.name}: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
    found(f"{len(CASES) - bad} of {len(CASES)} modules are equal to the bit", passed=len(CASES) - bad, cases=len(CASES))
    return bad == 0


def prepare() -> None:
    for case in CASES:
        case.build()
