"""Pipelines and plans of two ranks, which may share a GPU, against one process on it; and what a backward in two halves
takes beside a whole one."""

from __future__ import annotations

import copy
import statistics
import time
from typing import Any

import torch
from ranks import Case, run_cases
from report import found
from small_models import Gpt, transformer
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import torch_xmesh as xm
from torch_xmesh.testing import serial_step

BAR = 1.03
"""What I and W together may take of a whole backward, of a transformer's block in bfloat16."""


def compared(engine: xm.PipelineEngine, whole: nn.Module, tokens: torch.Tensor, target: torch.Tensor) -> float:
    """Steps with SGD beside one process's, whose losses and gradients are the same but for rounding; the loss."""
    loss = 0.0
    for step in range(3):
        engine.zero_grad()
        whole.zero_grad()
        engine.step(tokens, target=target)
        expected = serial_step(whole, (tokens,), target=target, loss_fn=F.mse_loss, num_microbatches=4, step=step)
        loss = float(expected.loss)
        if engine.last_loss() is not None:
            torch.testing.assert_close(engine.last_loss(), loss, rtol=1e-4, atol=1e-5)
        for name, parameter in engine.named_parameters():
            gradient: Any = parameter.grad
            given = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            torch.testing.assert_close(given, whole.get_parameter(name).grad, rtol=1e-3, atol=1e-5, msg=name)
        for parameters in (list(engine.parameters()), list(whole.parameters())):
            torch.optim.SGD(parameters, 0.1).step()
    return loss


def made() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    device = torch.get_default_device()
    with torch.device("cpu"):
        model, tokens, target = Gpt(num_layers=4), torch.randint(0, 96, (16, 16)), torch.randn(16, 16, 96)
    return model.to(device), tokens.to(device), target.to(device)


def pipeline(rank: int, world_size: int, schedule: str) -> str:
    model, tokens, target = made()
    whole = copy.deepcopy(model)
    engine = xm.PipelineEngine(
        model,
        (tokens[:4],),
        meshes=[xm.Mesh([0]), xm.Mesh([1])],
        split=xm.split_at("layers.2"),
        num_microbatches=4,
        schedule=schedule,
        loss_fn=F.mse_loss,
    )
    loss = compared(engine, whole, tokens, target)
    engine.close()
    return f"loss {loss:.6f}"


def plan(rank: int, world_size: int, name: str, compiler: str | None) -> str:
    model, tokens, target = made()
    whole = copy.deepcopy(model)
    preset: Any = {"megatron": xm.presets.megatron, "ZeRO-3": xm.presets.zero_3}[name]
    options = {"tensor_parallel": 2} if name == "megatron" else {}
    planned: xm.ParallelPlan = preset(model, (tokens[:4],), devices=xm.Mesh([[0, 1]]), num_microbatches=4, **options)
    engine = xm.PipelineEngine(model, (tokens[:4],), plan=planned, loss_fn=F.mse_loss)
    if compiler is not None:
        engine.stage_module(0).compile(backend=compiler)
    loss = compared(engine, whole, tokens, target)
    engine.close()
    return f"loss {loss:.6f}"


def cases(device: str) -> list[Case]:
    compiler = "inductor" if device == "cuda" else "aot_eager"
    return [
        *(Case(f"pipeline, {schedule}", pipeline, (schedule,)) for schedule in ("1f1b", "zb_h1", "gpipe")),
        *(Case(f"plan, {name}", plan, (name, None)) for name in ("megatron", "ZeRO-3")),
        Case(f"plan, megatron, compiled by {compiler}", plan, ("megatron", compiler)),
    ]


def halves(device: str, width: int) -> float:
    """Seconds of I and W over those of a whole backward: the median of turns that alternate."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32  # the emulated device lacks some of it
    block = transformer(1, width, num_heads=8).to(device, dtype)
    x = torch.randn(8, 512 if device == "cuda" else 16, width, device=device, dtype=dtype)
    gradient = torch.randn_like(x)
    ratios = []
    for turn in range(15):
        seconds = []
        for is_split in (False, True):
            given = x.detach().requires_grad_()
            output = block(given)
            torch.accelerator.synchronize()
            begin = time.monotonic()
            if is_split:
                _, run_weight_grads = xm.split_backward(output, gradient, given)
                run_weight_grads()
            else:
                output.backward(gradient)
            torch.accelerator.synchronize()
            seconds.append(time.monotonic() - begin)
            block.zero_grad()
        if turn >= 5:
            ratios.append(seconds[1] / seconds[0])
    return statistics.median(ratios)


def run(device: str) -> bool:
    is_well = run_cases(device, 2, cases(device), case_s=25)
    if device != "cuda":
        import emu_device  # noqa: F401  # gives this process the device
    ratio = halves(device, 2048 if device == "cuda" else 64)
    found(f"I and W take {ratio:.3f} of a whole backward; on cuda, in bfloat16, the bar is {BAR}", ratio=ratio)
    return is_well and (ratio <= BAR or device != "cuda")


def prepare() -> None:
    cases("cuda")
