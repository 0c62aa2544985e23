"""What is here: the GPU, the versions, what torch_xmesh says of itself."""

from __future__ import annotations

import os
import platform
import subprocess

import torch
from report import found

import torch_xmesh as xm


def run(device: str) -> bool:
    found(
        f"python {platform.python_version()}, torch {torch.__version__}, {os.cpu_count()} cores, {platform.platform()}"
    )
    for line in str(xm.about()).splitlines():
        found(line)
    if device != "cuda":
        return True
    smi = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,compute_mode", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    found(f"nvidia-smi: {smi.stdout.strip() or smi.stderr.strip()}")
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    found(
        f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}, NCCL {nccl}",
        gpu=torch.cuda.get_device_name(0),
        gpus=torch.cuda.device_count(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        nccl=nccl,
    )
    return "cannot run here" not in xm.about().cuda_kernels
