"""A pipeline whose stages are on the emulated device, step by step against the same pipeline on cpu, which its own
tests hold against one process: equal to the last bit."""

from __future__ import annotations

from typing import Any

import torch
from pipeline_cases import Run, about, case_of, example, make_engine
from torch import nn

import torch_xmesh as xm
from torch_xmesh.pipeline.cut.partition import partition


def on_cpu(value: Any) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu().clone(), value)


def place(model: nn.Module, run: Run, kinds: tuple[str, ...]) -> nn.Module:
    """The model with each stage's parameters and buffers on its kind of device. A tensor of several names stays one on
    a device, as with .to("cuda"), though not with .to() of devices whose tensors are of another class."""
    args, kwargs = example(case_of(run.model), run.samples // run.microbatches)
    made = partition(model, args, kwargs, xm.split_at(*run.split))
    moved: dict[tuple[torch.Tensor, str], torch.Tensor] = {}
    names: dict[str, str] = {}
    for stage, kind in zip(made.stages, kinds, strict=True):
        for name, _ in (*stage.module.named_parameters(remove_duplicate=False), *stage.module.named_buffers()):
            names.setdefault(name, kind)
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers()):
        owner, _, key = name.rpartition(".")
        holder = model.get_submodule(owner)
        kind = names.get(name, kinds[0])
        if (tensor, kind) not in moved:
            there = tensor.detach().to(kind)
            is_parameter = isinstance(tensor, nn.Parameter)
            moved[tensor, kind] = nn.Parameter(there, tensor.requires_grad) if is_parameter else there
        held: dict[str, Any] = holder._parameters if key in holder._parameters else holder._buffers
        held[key] = moved[tensor, kind]
    return model


def build(run: Run) -> nn.Module:
    torch.manual_seed(0)
    with torch.device("cpu"):
        return case_of(run.model).build()


def batch_of(run: Run, step: int) -> tuple[Any, Any, Any]:
    torch.manual_seed(10 + step)
    with torch.device("cpu"):
        return case_of(run.model).batch(run.samples)


def train_both(run: Run, kinds: tuple[str, ...] | None = None, **options: Any) -> None:
    """Steps of SGD on cpu and on the device. Losses, outputs, gradients, parameters and buffers have the same bits."""
    kinds = kinds or ("emu",) * len(run.meshes)
    engines = [
        make_engine(run, build(run), **options),
        make_engine(run, place(build(run), run, kinds), **options),
    ]
    optimizers = [torch.optim.SGD(engine.parameters(), 1e-3) for engine in engines]
    for step in range(run.steps):
        found = []
        for number, (engine, optimizer) in enumerate(zip(engines, optimizers, strict=True)):
            args, kwargs, target = batch_of(run, step)
            if number and step % 2:  # a batch may be on the device already
                args, kwargs, target = torch.utils._pytree.tree_map_only(
                    torch.Tensor, lambda tensor: tensor.to("emu"), (args, kwargs, target)
                )
            optimizer.zero_grad()
            losses: list[torch.Tensor] = []
            output = engine.step(*args, target=target, losses=losses, **kwargs)
            if number and output is not None:
                last = torch.device(kinds[-1]).type
                assert all(loss.device.type == last for loss in losses)
                assert all(
                    leaf.device.type == last
                    for leaf in torch.utils._pytree.tree_leaves(output)
                    if isinstance(leaf, torch.Tensor)
                )
            gradients = {name: parameter.grad for name, parameter in engine.named_parameters()}
            found.append(on_cpu((engine.last_loss(), losses, output, gradients)))
            optimizer.step()
        assert_same(found, f"{run} on {kinds}, step {step}")
    states = [on_cpu(dict(engine.named_parameters())) for engine in engines]
    assert_same(states, f"{run} on {kinds}, parameters")
    for stage in engines[0].stages:
        buffers = [on_cpu(dict(engine.stage_module(stage).named_buffers())) for engine in engines]
        assert_same(buffers, f"{run} on {kinds}, buffers")
    for engine in engines:
        engine.close()


def assert_same(several: list[Any], where: str, rtol: float = 0) -> None:
    torch.testing.assert_close(several[1], several[0], rtol=rtol, atol=rtol / 100, equal_nan=True, msg=about(where))
