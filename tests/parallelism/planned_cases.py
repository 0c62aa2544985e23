"""Plans for four processes on two hosts, as tests of planned engines need them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

import torch_xmesh as xm

OPTIONS: dict[str, Any] = {
    "devices": xm.Mesh([[0, 1], [2, 3]]),
    "num_microbatches": 2,
    "compute": xm.Compute(flops=1e11, bytes_per_s=1e10),
    "topology": xm.Topology(devices_per_host=2, nic_bytes_per_s=10**8, local_bytes_per_s=10**10),
}
PLANS: dict[str, Callable[..., xm.ParallelPlan]] = {
    "data": lambda *args: xm.presets.data_parallel(*args, **OPTIONS),
    "ZeRO-2": lambda *args: xm.presets.zero_2(*args, **OPTIONS),
    "ZeRO-3": lambda *args: xm.presets.zero_3(*args, **OPTIONS),
    "megatron": lambda *args: xm.presets.megatron(*args, tensor_parallel=4, **OPTIONS),
    "pipeline": lambda *args: xm.presets.pipeline(*args, num_stages=2, tensor_parallel=2, **OPTIONS),
    "pipeline with ZeRO-3": lambda *args: xm.presets.pipeline(*args, num_stages=2, zero=3, **OPTIONS),
    "found": lambda *args: xm.plan_parallel(*args, **OPTIONS),
}
"""By name, of a model and its arguments."""


def whole_of(tensor: Any) -> torch.Tensor:
    """All of a tensor of which devices have parts; called by those of its mesh."""
    out: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return out
