"""Stages on parts of their tensors, in processes: outputs, gradients and collectives are those of the plan."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_models import Gpt, Mlp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import torch_xmesh as xm
from torch_xmesh.parallelism.reading import recorded_forward
from torch_xmesh.parallelism.running.stage import ShardedStage
from torch_xmesh.parallelism.space import CollectiveUse
from torch_xmesh.testing import spawn

OPTIONS: dict[str, Any] = {
    "num_microbatches": 2,
    "compute": xm.Compute(flops=1e11, bytes_per_s=1e10),
    "topology": xm.Topology(devices_per_host=2, nic_bytes_per_s=10**8, local_bytes_per_s=10**10),
    "collectives": "ring",
}


def mlp() -> tuple[nn.Module, torch.Tensor]:
    return Mlp(64, 4), torch.randn(16, 64)


def gpt() -> tuple[nn.Module, torch.Tensor]:
    return Gpt(num_layers=2), torch.randint(0, 96, (8, 16))


def tied_gpt() -> tuple[nn.Module, torch.Tensor]:
    model = Gpt(num_layers=1)
    model.head.weight = model.tokens.weight
    return model, torch.randint(0, 96, (8, 16))


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {"mlp": mlp, "gpt": gpt, "tied gpt": tied_gpt}
PLANS: dict[str, Callable[..., xm.ParallelPlan]] = {
    "data": lambda *args, **more: xm.presets.data_parallel(*args, **more),
    "megatron 2": lambda *args, **more: xm.presets.megatron(*args, tensor_parallel=2, **more),
    "megatron 4": lambda *args, **more: xm.presets.megatron(*args, tensor_parallel=4, **more),
}


def part_of(whole: torch.Tensor, state: tuple[int, ...], shape: tuple[int, ...], at: tuple[int, ...]) -> torch.Tensor:
    for held, size, place in zip(state, shape, at, strict=True):
        if held >= 0:
            whole = whole.chunk(size, held)[place]
    return whole


def runs(rank: int, world_size: int, name: str, plan_name: str) -> None:
    torch.manual_seed(3)
    model, x = MODELS[name]()
    model = model.double()
    x = x.double() if x.is_floating_point() else x
    whole = copy.deepcopy(model)
    devices = xm.Mesh([[0, 1], [2, 3]])
    plan = PLANS[plan_name](model, (x,), devices=devices, **OPTIONS)
    (planned,) = plan.stages
    mesh = init_device_mesh("cpu", planned.mesh_shape)
    seen: list[CollectiveUse] = []
    recorded = recorded_forward(model, (x,))
    stage = ShardedStage(model, recorded, planned, mesh, on_collective=seen.append)
    at = tuple(mesh.get_coordinate() or ())
    parameters = dict(stage.named_parameters())
    wanted_names = {one.name for one in planned.parameters}
    assert set(parameters) == wanted_names
    inputs = [x, torch.randn_like(x) if x.is_floating_point() else x.flip(0)]
    for number, one in enumerate(inputs):
        wanted = whole(one)
        gradient = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        wanted.backward(gradient)
        if number == 1:
            seen.clear()
        made = stage(one)
        ((_, state),) = stage.output_states().items()
        torch.testing.assert_close(made, part_of(wanted.detach(), state, planned.mesh_shape, at))
        made.backward(part_of(gradient, state, planned.mesh_shape, at))
    stage.finish_gradients()
    for kept in planned.parameters:
        found, expected = parameters[kept.name].grad, whole.get_parameter(kept.name).grad
        assert found is not None
        assert expected is not None
        expected = part_of(expected, kept.state, planned.mesh_shape, at)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10, msg=kept.name)  # a key's bias has none
    counted: Counter[tuple[str, str, int]] = Counter()
    num_bytes: Counter[tuple[str, str, int]] = Counter()
    for use in seen:
        counted[use.why, use.collective, use.axis] += 1
        num_bytes[use.why, use.collective, use.axis] += round(use.num_bytes)
    predicted = {(one.why, one.collective, one.axis): (one.count, round(one.num_bytes)) for one in planned.collectives}
    assert {key: (count, num_bytes[key]) for key, count in counted.items()} == predicted
    dist.barrier()


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", MODELS)
def test_a_stage_on_parts_is_the_model(name: str, plan: str) -> None:
    spawn(runs, 4, name, plan, timeout=120)
