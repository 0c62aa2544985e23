"""DDP, FSDP2, tensor parallelism, functional collectives and checkpoints give on xmesh what they give on gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from torch_xmesh.testing import spawn


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 20), nn.ReLU(), nn.Linear(20, 4))


def _train(model: nn.Module, seed: int, steps: int = 3) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(6, 12, generator=generator)).square().mean().backward()
        optimizer.step()
    return [p.full_tensor().detach() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]


def ddp(rank: int, size: int, folder: str) -> Any:
    return _train(DistributedDataParallel(_model(), bucket_cap_mb=1), rank)


def ddp_of_a_subgroup(rank: int, size: int, folder: str) -> Any:
    group = dist.new_group([0, size - 1])
    if rank not in (0, size - 1):
        return []
    return _train(DistributedDataParallel(_model(), process_group=group, find_unused_parameters=True), rank)


def fsdp2(rank: int, size: int, folder: str) -> Any:
    model = _model()
    mesh = dist.init_device_mesh("cpu", (size,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _train(model, rank)


def hybrid_fsdp2_with_tensor_parallelism(rank: int, size: int, folder: str) -> Any:
    mesh = dist.init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(_model(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return _train(model, mesh.get_local_rank("dp"))


def tensor_parallel(rank: int, size: int, folder: str) -> Any:
    mesh = dist.init_device_mesh("cpu", (size,))
    model = parallelize_module(_model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return _train(model, 0)


def redistributions(rank: int, size: int, folder: str) -> Any:
    mesh = dist.init_device_mesh("cpu", (2, size // 2))
    whole = torch.arange(7.0 * 5 * 6).reshape(7, 5, 6)
    found = []
    for source in ([Shard(0), Shard(1)], [Replicate(), Shard(2)], [Shard(0), Shard(0)]):
        tensor = distribute_tensor(whole, mesh, source)
        for target in ([Replicate(), Replicate()], [Shard(2), Replicate()], [Shard(1), Shard(0)]):
            found.append(tensor.redistribute(mesh, target).to_local())
    partial = DTensor.from_local(whole + rank, mesh, [Partial(), Partial()])
    return [*found, partial.redistribute(mesh, [Shard(0), Replicate()]).to_local()]


def functional_collectives(rank: int, size: int, folder: str) -> Any:
    group: Any = dist.group.WORLD
    tensor = torch.arange(4.0 * size) + rank
    found: list[Any] = [
        funcol.all_reduce(tensor, "sum", group),
        funcol.all_gather_tensor(tensor, 0, group),
        funcol.reduce_scatter_tensor(tensor, "sum", 0, group),
        funcol.all_to_all_single(tensor, None, None, group),
        funcol.broadcast(tensor, 1, group),
        *funcol.all_reduce_coalesced([tensor, tensor * 2], "sum", group),
        *funcol.all_gather_into_tensor_coalesced([tensor, tensor * 2], group),
        *funcol.reduce_scatter_tensor_coalesced([tensor, tensor * 2], "sum", [0, 0], group),
    ]
    return [funcol.wait_tensor(value) for value in found]


def checkpoint(rank: int, size: int, folder: str) -> Any:
    mesh = dist.init_device_mesh("cpu", (size,))
    whole = torch.arange(10.0 * 3).reshape(10, 3)
    path = f"{folder}/{dist.get_backend()}"
    dcp.save({"weight": distribute_tensor(whole, mesh, [Shard(0)]), "step": 5}, checkpoint_id=path)
    state = {"weight": distribute_tensor(torch.zeros(10, 3), mesh, [Shard(1)]), "step": 0}
    dcp.load(state, checkpoint_id=path)
    return [state["weight"].full_tensor(), torch.tensor(state["step"])]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "job",
    [
        ddp,
        ddp_of_a_subgroup,
        fsdp2,
        hybrid_fsdp2_with_tensor_parallelism,
        tensor_parallel,
        redistributions,
        functional_collectives,
        checkpoint,
    ],
)
def test_as_on_gloo(job: Any, tmp_path: Path) -> None:
    on_xmesh = spawn(job, 4, str(tmp_path), backend="xmesh")
    on_gloo = spawn(job, 4, str(tmp_path), backend="gloo")
    for rank in range(4):
        assert len(on_xmesh[rank]) == len(on_gloo[rank])
        for index, (ours, theirs) in enumerate(zip(on_xmesh[rank], on_gloo[rank], strict=True)):
            assert torch.equal(ours, theirs), f"rank {rank}, tensor {index}"
