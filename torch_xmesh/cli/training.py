"""``xmesh parallelize --run``: three steps of a plan, predicted beside measured; where one microbatch computes while
another communicates, also of the plan without that.

Without torchrun the command starts itself under it, with a process for each device of the mesh on this machine."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from torch_xmesh.calibration import calibrate
from torch_xmesh.parallelism import Compute, ParallelPlan
from torch_xmesh.parallelism.plan_text import seconds_text
from torch_xmesh.pipeline.engine.engine import PipelineEngine
from torch_xmesh.spec import Mesh

_STEPS = 3
_CALIBRATION_BYTES = 4 << 20

Planned = Callable[[Mapping[str, Any]], ParallelPlan]
"""Makes the plan, with options that were measured."""


def is_rank() -> bool:
    """Whether torchrun, or somebody like it, has started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def start_ranks(number: int, arguments: Sequence[str]) -> int:
    """The same command in so many processes on this machine; their exit status."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(number)]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    return subprocess.run([*command, "-m", "--", "xmesh_cli", *arguments], env=environment, check=False).returncode


def output_loss(output: Any) -> torch.Tensor:
    """What is trained on where nobody gives a loss: the model's own, the first tensor without dims that it returns; or
    the mean squares of all that it returns."""
    tensors = [
        leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    ]
    own = next((tensor for tensor in tensors if tensor.dim() == 0), None)
    return own if own is not None else torch.stack([tensor.float().square().mean() for tensor in tensors]).sum()


def run_plan(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], given: Mapping[str, Any], make: Planned
) -> None:
    """Trains some steps on each rank; the first one prints.

    Raises:
        ValueError: the model has no values, or the processes are not as many as the devices.
    """
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise ValueError("--run trains: the function must return a model with values, not on meta")
    dist.init_process_group("xmesh")
    try:
        number = given["devices"].size()
        if dist.get_world_size() != number:
            raise ValueError(f"--mesh has {number} devices, torchrun started {dist.get_world_size()} processes")
        measured = _measured(model, given)
        plan = make(measured)
        if dist.get_rank() == 0:
            print(plan, flush=True)
        _train(model, args, kwargs, plan)
        if plan.step.serial > plan.predicted_seconds:
            if dist.get_rank() == 0:
                print("without overlap:", flush=True)
            _train(model, args, kwargs, make({**measured, "overlap": False}))
    finally:
        dist.destroy_process_group()


def _measured(model: nn.Module, given: Mapping[str, Any]) -> dict[str, Any]:
    """Options, with what was not said measured: by all ranks at the same time, as they will run."""
    out = dict(given)
    if out["compute"] is None:
        dist.barrier()
        dtype = next((parameter.dtype for parameter in model.parameters()), torch.float32)
        own = Compute.measured(dtype)
        rates = torch.tensor([own.flops, own.bytes_per_s], dtype=torch.float64)
        dist.all_reduce(rates)
        flops, num_bytes = (rates / dist.get_world_size()).tolist()
        out["compute"] = Compute(flops, num_bytes)
    if out["topology"] is None and dist.get_world_size() > 1:
        out["topology"] = calibrate(num_bytes=_CALIBRATION_BYTES)
        # The hosts are those that the processes are on, whatever rows they were asked for in.
        out["devices"] = Mesh(out["devices"].ranks, device_type=out["devices"].device_type)
    return out


def _train(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], plan: ParallelPlan) -> None:
    def repeated(leaf: Any) -> Any:
        is_cut = isinstance(leaf, torch.Tensor) and leaf.dim() > 0
        return torch.cat([leaf] * (plan.num_microbatches // plan.parts)) if is_cut else leaf

    batch, named = pytree.tree_map(repeated, (args, kwargs))
    with PipelineEngine(model, args, kwargs, plan=plan, loss_fn=output_loss) as engine:
        optimizer = torch.optim.SGD(engine.parameters(), 1e-3)
        for step in range(_STEPS):
            dist.barrier()
            begin = time.perf_counter()
            engine.step(*batch, return_outputs=False, **named)
            dist.barrier()
            taken = time.perf_counter() - begin
            optimizer.step()
            engine.zero_grad()
            if dist.get_rank() == 0:
                predicted = seconds_text(plan.predicted_seconds)
                print(
                    f"step {step}: {seconds_text(taken)}, predicted {predicted}, loss {engine.last_loss():.6g}",
                    flush=True,
                )
