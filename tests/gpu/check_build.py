"""Builds the extension in place, with all cores, and kernels for the architecture that is here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from report import found

ROOT = Path(__file__).resolve().parents[2]


def run(device: str) -> bool:
    environment = {**os.environ, "PYTHON": sys.executable, "MAX_JOBS": str(os.cpu_count())}
    if device == "cuda":
        import torch

        environment["XMESH_CUDA_ARCHITECTURES"] = "".join(map(str, torch.cuda.get_device_capability()))
    command = ["bash", "-c", "source scripts/setup.sh && build_in_place"]
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True)
    print(done.stdout + done.stderr, flush=True)
    found(
        "built" if done.returncode == 0 else f"not built: {(done.stdout + done.stderr).strip().splitlines()[-1][:300]}"
    )
    return done.returncode == 0
