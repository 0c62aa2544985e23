"""A pipeline whose stages are on the emulated device, step by step against the same pipeline on cpu, which its own
tests hold against one process: equal to the last bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pipeline_random
import torch
from pipeline_cases import Graph, Run, about, case_of, example, make_engine
from torch import nn
from torch.distributed.tensor import DTensor

import torch_xmesh as xm
from torch_xmesh.pipeline.cut.partition import Partition, partition


def on_cpu(value: Any) -> Any:
    """Copies; of a DTensor of this rank's part."""

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return local.detach().cpu().clone()

    return torch.utils._pytree.tree_map_only(torch.Tensor, copied, value)


def place(model: nn.Module, made: Partition, kinds: Sequence[str]) -> nn.Module:
    """The model with each stage's parameters and buffers on its kind of device."""
    names: dict[str, str] = {}
    for stage, kind in zip(made.stages, kinds, strict=True):
        for name, _ in (*stage.module.named_parameters(remove_duplicate=False), *stage.module.named_buffers()):
            names.setdefault(name, kind)
    return move(model, lambda name: names.get(name, kinds[0]))


def move(model: nn.Module, kind_of: Callable[[str], str]) -> nn.Module:
    """The model with each parameter and buffer on a kind of device, by name. A tensor of several names stays one on a
    device, as with .to("cuda"), though not with .to() of devices whose tensors are of another class."""
    moved: dict[tuple[torch.Tensor, str], torch.Tensor] = {}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers()):
        owner, _, key = name.rpartition(".")
        holder, kind = model.get_submodule(owner), kind_of(name)
        if (tensor, kind) not in moved:
            there = tensor.detach().to(kind)
            is_parameter = isinstance(tensor, nn.Parameter)
            moved[tensor, kind] = nn.Parameter(there, tensor.requires_grad) if is_parameter else there
        held: dict[str, Any] = holder._parameters if key in holder._parameters else holder._buffers
        held[key] = moved[tensor, kind]
    return model


def placed(run: Run, kinds: Sequence[str]) -> nn.Module:
    """A run's model, each stage on its kind of device."""
    model = build(run)
    args, kwargs = example(case_of(run.model), run.samples // run.microbatches)
    return place(model, partition(model, args, kwargs, xm.split_at(*run.split)), kinds)


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
        make_engine(run, placed(run, kinds), **options),
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


def _share_tensors(kinds: Sequence[str], plan: Any, split: Sequence[str]) -> bool:
    """Whether stages on both kinds of device have a parameter or buffer in common."""
    with torch.device("cpu"):
        model, given = Graph(plan, pipeline_random.WIDTH), (torch.empty(2, pipeline_random.WIDTH),) * 2
    held: dict[str, set[str]] = {"emu": set(), "cpu": set()}
    for stage, kind in zip(partition(model, given, {}, xm.split_at(*split)).stages, kinds, strict=True):
        held[kind].update(stage.module.state_dict())
    return bool(held["emu"] & held["cpu"])


def train_random(seed: int, rank: int, world_size: int) -> None:
    """A pipeline drawn from a seed, on cpu and with each stage on a kind of device that is drawn, too."""
    case = pipeline_random.draw(seed, world_size)
    if rank not in case.ranks:
        return
    where = f"seed {seed}: {case}"
    print(f"at seed {seed}", flush=True)  # shown of a rank that hangs
    rng = random.Random(f"{seed} kinds")
    of_place = {ranks: rng.choice(("emu", "emu", "cpu")) for ranks in sorted({xm.Mesh(m).ranks for m in case.meshes})}
    kinds = [of_place[xm.Mesh(mesh).ranks] for mesh in case.meshes]
    if _share_tensors(kinds, case.plan, case.split):
        kinds = ["emu"] * len(kinds)

    def made(kinds: Sequence[str]) -> xm.PipelineEngine:
        torch.manual_seed(seed)
        with torch.device("cpu"):
            model = Graph(case.plan, pipeline_random.WIDTH)
            given = (torch.empty(2, pipeline_random.WIDTH), torch.empty(2, pipeline_random.WIDTH))
        return xm.PipelineEngine(
            place(model, partition(model, given, {}, xm.split_at(*case.split)), kinds),
            given,
            meshes=[xm.Mesh(mesh) for mesh in case.meshes],
            split=xm.split_at(*case.split),
            data_axis=case.axes,
            schedule=case.schedule,
            num_microbatches=case.microbatches,
            loss_fn=pipeline_random._loss,
            overlap=case.overlap,
        )

    def step(engine: xm.PipelineEngine, number: int) -> Any:
        torch.manual_seed(1000 * seed + number)
        with torch.device("cpu"):
            first, second, target = (torch.randn(case.samples, pipeline_random.WIDTH) for _ in range(3))
        losses: list[torch.Tensor] = []
        return engine.step(first, second, target=target, losses=losses), losses

    compare_steps(made(["cpu"] * len(kinds)), made(kinds), step, 2, f"{where} on {kinds}")


def compare_steps(
    on_host: xm.PipelineEngine, engine: xm.PipelineEngine, step: Callable[[Any, int], Any], steps: int, where: str
) -> None:
    """Both engines' steps, with SGD behind each, have the same bits; the engines are closed."""
    engines = [on_host, engine]
    optimizers = [torch.optim.SGD(one.parameters(), 1e-2) for one in engines]
    for number in range(steps):
        found = []
        for one, optimizer in zip(engines, optimizers, strict=True):
            optimizer.zero_grad()
            result = step(one, number)
            gradients = {name: parameter.grad for name, parameter in one.named_parameters()}
            found.append(on_cpu([result, one.last_loss(), gradients]))
            optimizer.step()
        assert_same(found, f"{where}, step {number}")
    for one in engines:
        one.close()
