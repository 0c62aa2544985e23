"""Stages on parts of their tensors, in processes: outputs, gradients and collectives are those of the plan."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest
import torch
from random_plans import any_sharding
from running_models import MODELS, RANDOM
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import torch_xmesh as xm
from torch_xmesh.group import reshards_of
from torch_xmesh.parallelism.assembly import planned_stage
from torch_xmesh.parallelism.cluster import HostKind
from torch_xmesh.parallelism.conversions import AxisMove
from torch_xmesh.parallelism.forward_modes import ForwardModes
from torch_xmesh.parallelism.graph import ShardingGraph
from torch_xmesh.parallelism.judge import placements_of
from torch_xmesh.parallelism.layers import layers_of
from torch_xmesh.parallelism.loops import State
from torch_xmesh.parallelism.operators import Value
from torch_xmesh.parallelism.plan import PlannedStage
from torch_xmesh.parallelism.program import ProgramRead
from torch_xmesh.parallelism.program_writer import with_programs
from torch_xmesh.parallelism.recorded_forwards import forward_of, recorded_forward
from torch_xmesh.parallelism.running.stage import ShardedStage
from torch_xmesh.parallelism.space import CollectiveUse, Space
from torch_xmesh.parallelism.stages import FoundStage, Shape
from torch_xmesh.parallelism.stretch import Stretch
from torch_xmesh.pipeline.ranks.transfers import Transfers
from torch_xmesh.spec import mesh_grid
from torch_xmesh.testing import spawn

OPTIONS: dict[str, Any] = {
    "num_microbatches": 2,
    "compute": xm.Compute(flops=1e11, bytes_per_s=1e10),
    "topology": xm.Topology(devices_per_host=2, nic_bytes_per_s=10**8, local_bytes_per_s=10**10),
    "collectives": "ring",
}


PLANS: dict[str, Callable[..., xm.ParallelPlan]] = {
    "data": lambda *args, **more: xm.presets.data_parallel(*args, **more),
    "megatron 2": lambda *args, **more: xm.presets.megatron(*args, tensor_parallel=2, **more),
    "ZeRO-2": lambda *args, **more: xm.presets.zero_2(*args, **more),
    "ZeRO-3": lambda *args, **more: xm.presets.zero_3(*args, **more),
    "megatron 4": lambda *args, **more: xm.presets.megatron(*args, tensor_parallel=4, **more),
}


def part_of(whole: torch.Tensor, state: tuple[int, ...], shape: tuple[int, ...], at: tuple[int, ...]) -> torch.Tensor:
    for held, size, place in zip(state, shape, at, strict=True):
        if held >= 0:
            whole = whole.chunk(size, held)[place]
    return whole


def transfers_of(mesh: DeviceMesh) -> Transfers:
    """As an engine has them."""
    out = Transfers(reshards_of(None), mesh_grid(mesh).ranks)
    out.traffic.meet([])
    return out


def tell_of_shared(stage: ShardedStage, planned: PlannedStage) -> None:
    """A plan prices moves for each reader of a value; those that take it alike in other segments share one. What the
    others would have moved is told, too."""
    (program,), segments = planned.programs, stage.first.segments
    readers: dict[Value, list[ProgramRead]] = {}
    for (operator, place), key in segments.taken.items():
        readers.setdefault(key, []).append(program.operators[operator].reads[place])
    for place, key in segments.left.items():
        readers.setdefault(key, []).append(program.leaving[place])

    def tell(moves: Sequence[AxisMove], key: Value, state: State, why: str) -> None:
        own = math.prod(planned.mesh_shape[axis] for axis, dim in enumerate(state) if dim >= 0)
        stage._moves.tell(moves, math.prod(key.shape) * key.dtype.itemsize // own, key.name, why)

    for key, reads in readers.items():
        for read in reads[1:]:
            tell(read.there, key, program.values[read.value].state, "forward")
        for read in [read for read in reads if read.gives_gradient][1:]:
            tell(read.back, key, read.gradient, "backward")


def check(plan: xm.ParallelPlan, model: nn.Module, x: torch.Tensor, mesh: DeviceMesh) -> None:
    """Two microbatches against one process; the second one's collectives, and those of the end, are predicted. Of what
    experts exchange the bytes are predicted at most: how many rows go where hangs on the router."""
    whole = copy.deepcopy(model)
    seen: list[CollectiveUse] = []
    (planned,) = plan.stages
    modes = ForwardModes(recorded_forward(model, (x,)), None)
    plan = plan if planned.programs else with_programs(plan, modes, None)
    stage = ShardedStage(model, modes, plan, 0, mesh, transfers_of(mesh), on_collective=seen.append)
    stage.begin_step()
    at = tuple(mesh.get_coordinate() or ())
    parameters = dict(stage.named_parameters())
    assert set(parameters) == {name for name, _ in model.named_parameters()}
    assert set(stage.state_dict()) == set(model.state_dict())
    inputs = [x, torch.randn_like(x) if x.is_floating_point() else x.flip(0)]
    for number, one in enumerate(inputs):
        torch.manual_seed(number)
        wanted = whole(one)
        seed = torch.Generator().manual_seed(number)
        gradient = torch.randn(wanted.shape, generator=seed, dtype=torch.float64)
        wanted.backward(gradient)
        if number == 1:
            seen[:] = [use for use in seen if use.why == "parameter"]  # once a step
        torch.manual_seed(number)
        (made,) = stage(one)
        (state,) = stage.first.left_states.values()
        torch.testing.assert_close(made, part_of(wanted.detach(), state, planned.mesh_shape, at))
        made.backward(part_of(gradient, state, planned.mesh_shape, at))
        for segment in reversed(range(stage.first.segments.count)):
            stage.own.weights_done(segment, number, is_last=number == 1)
    stage.own.end_step(is_train=True)
    for name, buffer in whole.named_buffers():
        if not name.endswith("num_batches_tracked"):
            state = next(one.state for one in planned.parameters if one.name == name)
            kept_buffer = stage.get_buffer(name)
            assert isinstance(kept_buffer, DTensor)
            torch.testing.assert_close(kept_buffer.to_local(), part_of(buffer, state, planned.mesh_shape, at))
    for kept in planned.parameters:
        if kept.name not in parameters:
            continue
        found, expected = parameters[kept.name].grad, whole.get_parameter(kept.name).grad
        assert isinstance(found, DTensor)
        assert expected is not None
        assert found.placements == tuple(placements_of(kept.zero_state or kept.state))
        found = found.to_local()
        expected = part_of(expected, kept.zero_state or kept.state, planned.mesh_shape, at)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-10, msg=kept.name)  # a key's bias has none
    tell_of_shared(stage, plan.stages[0])
    counted: Counter[tuple[str, str, int]] = Counter()
    num_bytes: Counter[tuple[str, str, int]] = Counter()
    for use in seen:
        counted[use.why, use.collective, use.axis] += 1
        num_bytes[use.why, use.collective, use.axis] += round(use.num_bytes)
    predicted = {(one.why, one.collective, one.axis): (one.count, round(one.num_bytes)) for one in planned.collectives}
    if not any(
        operator.loops.within for operator in stage.first.recorded.forward.operators
    ):  # in halves of these bytes
        assert {key: (count, num_bytes[key]) for key, count in counted.items()} == predicted
    for key in counted:
        assert key[1] != "all-to-all" or num_bytes[key] <= predicted[key][1], key
    differing = {key: (counted[key], predicted.get(key)) for key in {*counted, *predicted}}
    assert dict(counted) == {key: count for key, (count, _) in predicted.items()}, differing


def model_of(name: str) -> tuple[nn.Module, torch.Tensor]:
    model, x = RANDOM[name]()
    return model.double(), x.double() if x.is_floating_point() else x


def runs(rank: int, world_size: int, name: str, plan_name: str) -> None:
    torch.manual_seed(3)
    model, x = model_of(name)
    plan = PLANS[plan_name](model, (x,), devices=xm.Mesh([[0, 1], [2, 3]]), **OPTIONS)
    check(plan, model, x, init_device_mesh("cpu", plan.stages[0].mesh_shape))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", MODELS)
def test_a_stage_on_parts_is_the_model(name: str, plan: str) -> None:
    spawn(runs, 4, name, plan, timeout=120)


def runs_any(rank: int, world_size: int, name: str, seeds: range) -> None:
    torch.manual_seed(3)
    model, x = model_of(name)
    layers = layers_of(forward_of(model, (x,)), 1)
    kind = HostKind(4, xm.Compute(1e11, 1e10), None, 1e8)
    meshes = {shape: init_device_mesh("cpu", shape) for shape in ((4,), (2, 2))}
    for seed in seeds:
        shape = (4,) if seed % 3 == 0 else (2, 2)
        links = [(size, 1e-5 / (axis + 1), 1e-9 / (axis + 1)) for axis, size in enumerate(shape)]
        space = Space(links, "ring", compute=kind.compute, num_microbatches=2)
        sharded = any_sharding(ShardingGraph(Stretch.of(layers.forward), space, zero=seed % 5 % 4), Random(seed))
        found = FoundStage(0, 1, Shape((), kind, (space,)), (0, 1, 2, 3), space, sharded, 1)
        try:
            whole = xm.presets.data_parallel(model, (x,), devices=xm.Mesh(range(4)), num_layers=1, **OPTIONS)
            plan = dataclasses.replace(whole, stages=(planned_stage(layers, found, 1, 0),))
            check(plan, model, x, meshes[shape])
        except Exception as error:
            pairs = zip(sharded.operators, sharded.choices, strict=True)
            raise AssertionError(
                f"seed {seed}: {', '.join(f'{one.name} {choice}' for one, choice in pairs)}"
            ) from error


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("name", RANDOM)
def test_any_sharding_is_the_model(name: str) -> None:
    spawn(runs_any, 4, name, range(8), timeout=300)


@pytest.mark.soak
@pytest.mark.parametrize("name", RANDOM)
def test_many_shardings_are_the_model(name: str) -> None:
    spawn(runs_any, 4, name, range(8, 48), timeout=900)


def trains(rank: int, world_size: int, name: str, plan_of: str) -> None:
    """Two steps of an engine of a plan's stages against one process."""
    torch.manual_seed(3)
    model, x = model_of(name)
    whole = copy.deepcopy(model)
    options = {**OPTIONS, "devices": xm.Mesh([[0, 1], [2, 3]]), "num_microbatches": 4}
    makers: dict[str, Callable[..., xm.ParallelPlan]] = {
        "found": xm.plan_parallel,
        "pipeline": functools.partial(xm.presets.pipeline, num_stages=2),
        "pipeline 4": functools.partial(xm.presets.pipeline, num_stages=4),
        "pipeline with ZeRO-2": functools.partial(xm.presets.pipeline, num_stages=2, zero=2),
        "pipeline with ZeRO-3": functools.partial(xm.presets.pipeline, num_stages=2, zero=3),
    }
    plan = makers[plan_of](model, (x,), **options)
    engine = xm.PipelineEngine(model, (x,), plan=plan, loss_fn=F.mse_loss)
    names = {one.name for stage in plan.stages if rank in stage.ranks for one in stage.parameters}
    assert {key for key, _ in engine.named_parameters()} == names
    optimizer = torch.optim.SGD(engine.parameters(), 0.1)
    reference = torch.optim.SGD(whole.parameters(), 0.1)
    batch = torch.cat([x, x.flip(0), x, x.roll(1, 0)])
    target = torch.randn_like(whole(batch))
    for _ in range(2):
        engine.step(batch, target=target)
        wanted = F.mse_loss(whole(batch), target)
        reference.zero_grad()
        wanted.backward()  # type: ignore[no-untyped-call]
        if engine.last_loss() is not None:
            assert engine.last_loss() == pytest.approx(wanted.item(), rel=1e-9)
        for stage in engine.stages:
            part = engine.stage_module(stage)
            assert isinstance(part, ShardedStage)
            found, expected = list(part.named_parameters()), dict(whole.named_parameters())
            states = {one.name: one.zero_state or one.state for one in plan.stages[stage].parameters}
            at, shape = part.coordinate, plan.stages[stage].mesh_shape
            for key, parameter in found:
                gradient = expected[key].grad
                assert isinstance(parameter.grad, DTensor)
                assert gradient is not None
                torch.testing.assert_close(
                    parameter.grad.to_local(), part_of(gradient, states[key], shape, at), msg=key
                )
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
    engine.close()


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("plan", ["found", "pipeline", "pipeline 4", "pipeline with ZeRO-2", "pipeline with ZeRO-3"])
@pytest.mark.parametrize("name", ["mlp", "gpt", "checkpointed alike"])
def test_stages_of_a_plan_train(name: str, plan: str) -> None:
    spawn(trains, 4, name, plan, timeout=120)


def runs_in_low_precision(rank: int, world_size: int) -> None:
    """A bias that is added once does not change the type of what devices add up."""
    torch.manual_seed(3)
    model, x = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)), torch.randn(16, 64)
    whole = copy.deepcopy(model)

    class Cast(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                out: torch.Tensor = self.inner(x)
            return out.float()

    plan = xm.presets.megatron(Cast(model), (x,), tensor_parallel=4, devices=xm.Mesh(range(4)), num_layers=1, **OPTIONS)
    mesh = init_device_mesh("cpu", plan.stages[0].mesh_shape)
    modes = ForwardModes(recorded_forward(Cast(model), (x,)), None)
    stage = ShardedStage(Cast(model), modes, plan, 0, mesh, transfers_of(mesh), is_by_samples=False)
    stage.begin_step()
    (made,), wanted = stage(x), Cast(whole)(x)
    torch.testing.assert_close(made, wanted, rtol=0.05, atol=0.05)
    made.sum().backward()


def test_low_precision() -> None:
    spawn(runs_in_low_precision, 4, timeout=60)
