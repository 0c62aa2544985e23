"""Plans for four processes on two hosts, as tests of planned engines need them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import torch_xmesh as xm
from torch_xmesh.testing import serial_step

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


def train_alike(model: nn.Module, x: torch.Tensor, target: torch.Tensor, plan: xm.ParallelPlan, num_steps: int) -> None:
    """Steps of two microbatches under a plan: losses, gradients, and all tensors of the model in the end, are those of
    one process."""
    whole, own = copy.deepcopy(model), copy.deepcopy(model)
    with xm.PipelineEngine(own, (x[: len(x) // 2],), plan=plan, loss_fn=F.mse_loss) as engine:
        for step in range(num_steps):
            engine.step(x, target=target)
            expected = serial_step(whole, (x,), target=target, loss_fn=F.mse_loss, num_microbatches=2, step=step)
            if engine.last_loss() is not None:
                torch.testing.assert_close(torch.tensor(engine.last_loss(), dtype=x.dtype), expected.loss)
            for name, parameter in engine.named_parameters():
                wanted = whole.get_parameter(name).grad
                torch.testing.assert_close(whole_of(parameter.grad), wanted, msg=name)
            for parameters in (list(engine.parameters()), list(whole.parameters())):
                if parameters:  # a stage may have none
                    torch.optim.SGD(parameters, 0.1).step()
        state = whole.state_dict()
        for name, value in engine.state_dict().items():
            torch.testing.assert_close(whole_of(value), state[name], msg=name)


Call = tuple[Callable[..., Any], tuple[Any, ...]]
"""``body(rank, world_size, *args)``."""


def in_turn(rank: int, world_size: int, calls: Sequence[Call]) -> None:
    """Several bodies in one world of processes; that which fails is named."""
    for body, args in calls:
        try:
            body(rank, world_size, *args)
        except Exception as error:
            raise AssertionError(f"{body.__name__}{args}: {error}") from error
