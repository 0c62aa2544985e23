"""Engines on every kind of mesh, their data axis given by name, and on schedules of the user's own; one process is the
oracle for loss, output and every gradient."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipeline_cases import Run, compare, train_and_compare
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

import torch_xmesh as xm
from torch_xmesh.testing import serial_step, spawn


def steps_match(meshes: Sequence[Any], num_shards: int, **options: Any) -> xm.PipelineEngine:
    """Two steps of nine samples in four microbatches, uneven on data shards too; the engine is left open."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    reference = copy.deepcopy(model)
    engine = xm.PipelineEngine(
        model,
        (torch.empty(2, 4),),
        meshes=meshes,
        split=xm.split_at("3"),
        num_microbatches=4,
        loss_fn=F.mse_loss,
        **options,
    )
    for step in range(2):
        torch.manual_seed(step)
        x, y = torch.randn(9, 4), torch.randn(9, 3)
        losses: list[torch.Tensor] = []
        output = engine.step(x, target=y, losses=losses)
        expected = serial_step(
            reference, (x,), target=y, loss_fn=F.mse_loss, num_microbatches=4, num_data_shards=num_shards
        )
        compare(engine, reference, expected, output, losses, f"step {step}")
    return engine


def on_stage_meshes(rank: int, world_size: int) -> None:
    """The stages of one DeviceMesh, in which the data axis is not the first one that is left."""
    world = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "tp", "dp"))

    def parallelize(stage: int, module: nn.Module, mesh: Any) -> nn.Module:
        plan = {str(3 * stage): ColwiseParallel(), str(3 * stage + 2): RowwiseParallel()}
        return parallelize_module(module, world["tp"], plan)

    meshes = xm.stage_meshes(world, "pp")
    with pytest.raises(ValueError, match=r"stage 0's mesh has no axis 'pp'; its axes are \('tp', 'dp'\)"):
        steps_match(meshes, 2, data_axis="pp")
    steps_match(meshes, 2, data_axis="dp", parallelize=parallelize).close()


def on_slices(rank: int, world_size: int) -> None:
    """Each rank's own slices: rows of the mesh would train alone. As whole meshes, spelled out or of one stage they are
    meant."""
    grid = [[0, 1], [2, 3]]
    names = ("pp", "dp")
    for world in (init_device_mesh("cpu", (2, 2), mesh_dim_names=names), xm.Mesh(grid, axis_names=names)):
        row = list(grid[rank // 2])
        text = rf"ranks \[{row[0]}, {row[1]}\] would train .* and ranks \[.*stage_meshes"
        with pytest.raises(ValueError, match=text):
            steps_match([world["dp"], world["dp"]], 2)
        dist.barrier()  # every rank has raised
    steps_match(xm.stage_meshes(world, "pp"), 2).close()
    steps_match([xm.Mesh(row), xm.Mesh(row)], 2).close()
    whole = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    steps_match([whole["dp"], whole["dp"]], 4).close()
    with pytest.raises(ValueError, match=r"would train a model by themselves|ranks disagree on meshes"):
        steps_match([world["dp"], world["pp"]], 2)


def test_slices_of_a_mesh() -> None:
    spawn(on_slices, 4, timeout=60)


def test_stage_meshes_with_a_named_data_axis() -> None:
    spawn(on_stage_meshes, 8, timeout=120)


def on_device_meshes(rank: int, world_size: int) -> None:
    """DeviceMeshes without process groups; names are each rank's own business, and some give them to an xm.Mesh."""
    grids, names = ([[0, 1]], [[2], [3]]), ("tp", "dp")
    meshes = [
        DeviceMesh("cpu", torch.tensor(grid), mesh_dim_names=names, _init_backend=False)
        if rank % 2
        else xm.Mesh(grid, axis_names=names)
        for grid in grids
    ]
    assert xm.device_mesh(xm.Mesh(grids[0], axis_names=names)) is xm.device_mesh(xm.Mesh(grids[0]))
    engine = steps_match(meshes, 1, data_axis="dp" if rank else [1, "dp"])
    for tensor in engine.state_dict().values():
        assert tensor.device_mesh == xm.device_mesh(meshes[rank // 2])
    engine.close()


def test_device_meshes() -> None:
    spawn(on_device_meshes, 4, timeout=90)


REORDERED = "0F2,0F0,0F3,,0F1,0B1,0B3,0B0,0B2\n1F2,1F0,1F3,1F1,,1B1,1B3,1B0,1B2\n"
SHARED = "0F0,2F0,0F1,2F1,2B0,0B0,2B1,0B1\n" "1F0,1F1,1B0,1B1\n"
RUNS = [
    Run("mlp", ("layers.2",), ([0], [1]), REORDERED, 4, 13),
    Run("mlp", ("layers.2",), ([0, 1], [2]), xm.Schedule.from_csv(REORDERED), 4, 16),
    Run("mlp", ("layers.1", "layers.3"), ([0], [1], [0]), xm.Schedule.from_csv(SHARED), 2, 5),
    Run("mlp", ("layers.2",), ([0], [1, 2]), xm.Schedule.make("1f1b", 2, 3), 3, 12),
]


def own_schedules(rank: int, world_size: int) -> None:
    for run in RUNS:
        if rank in run.ranks:
            train_and_compare(run)


def test_schedules_of_the_users_own() -> None:
    for run in RUNS:
        given = run.schedule
        schedule = given if isinstance(given, xm.Schedule) else xm.Schedule.from_csv(given)
        schedule.validate()
    spawn(own_schedules, 3, timeout=90)
