"""Models on the meta device: every rank makes its own stages real, by init_fn, by the modules' own reset_parameters, or
from a checkpoint; what has no value is named before anything is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from pipeline_cases import about, compare, engine_of_layers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import torch_xmesh as xm
from torch_xmesh.testing import serial_step, spawn


class Scale(nn.Module):
    """A parameter and a persistent buffer that nothing resets."""

    shift: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + self.shift


class Table(nn.Module):
    """A buffer that no state dict has."""

    table: torch.Tensor
    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.register_buffer("mask", torch.zeros(4, dtype=torch.bool), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.table).masked_fill(self.mask, 0.0)


class Model(nn.Module):
    """The first and the last layer share their weight, `norm` and `idle` are ordinary; `scale` has no reset."""

    def __init__(self, has_table: bool = True) -> None:
        super().__init__()
        self.first, self.second, self.last, self.idle = (nn.Linear(4, 4) for _ in range(4))
        self.norm, self.scale = nn.BatchNorm1d(4), Scale()
        self.table = Table() if has_table else nn.Identity()
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.table(self.norm(torch.tanh(self.first(x))))
        return self.last(self.scale(torch.tanh(self.second(x))))  # type: ignore[no-any-return]


def init(module: nn.Module) -> None:
    """Values that depend on nothing but the module's kind and shapes."""
    for number, one in enumerate(module.parameters(recurse=False)):
        local = one.to_local() if isinstance(one, DTensor) else one
        local.fill_(0.1 + 0.2 * number)
    if isinstance(module, nn.BatchNorm1d):
        module.reset_running_stats()
    if isinstance(module, Scale):
        module.shift.fill_(0.5)
    if isinstance(module, Table):
        module.table.copy_(torch.arange(4.0))
        module.mask.zero_()  # a mask may be False throughout


def on_meta(has_table: bool = True) -> Model:
    with torch.device("meta"):
        return Model(has_table)


def make(model: nn.Module, meshes: Any, split: str = "second", **options: Any) -> xm.PipelineEngine:
    return xm.PipelineEngine(
        model,
        (torch.empty(2, 4),),
        meshes=[xm.Mesh(mesh) for mesh in meshes],
        split=xm.split_at(split),
        num_microbatches=2,
        loss_fn=F.mse_loss,
        **options,
    )


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(step)
    return torch.randn(8, 4), torch.randn(8, 4)


def train(engine: xm.PipelineEngine, reference: nn.Module, shards: int) -> None:
    for step in range(2):
        x, y = batch(step)
        for parameter in (*engine.parameters(), *reference.parameters()):
            parameter.grad = None
        losses: list[torch.Tensor] = []
        output = engine.step(x, target=y, losses=losses)
        options: dict[str, Any] = {"loss_fn": F.mse_loss, "num_microbatches": 2, "num_data_shards": shards}
        expected = serial_step(reference, (x,), target=y, **options)
        compare(engine, reference, expected, output, losses, f"step {step}")
        with torch.no_grad():
            for parameter in (*engine.parameters(), *reference.parameters()):
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.1)


def by_init_fn(rank: int, world_size: int, folder: str) -> None:
    reference = Model()
    with torch.no_grad():
        reference.apply(init)
    engine = make(on_meta(), ([0, 1], [2, 3]), init_fn=init)
    train(engine, reference, 2)
    state = engine.state_dict()
    assert ("idle.weight" in state) == (rank < 2)
    dcp.save({**state}, checkpoint_id=folder)
    engine.close()
    # Another layout is filled by the checkpoint; what it does not have is what it was saved with.
    if rank == 3:
        return
    other = make(on_meta(has_table=False), ([0], [1, 2]), split="scale")
    with pytest.raises(ValueError, match="scale.weight of stage 1 has no values on rank"):
        other.step(*batch(0)[:1], target=batch(0)[1])
    state = other.state_dict()
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    other.load_state_dict(state)
    named = dict(reference.named_parameters(remove_duplicate=False))
    for name, parameter in other.named_parameters():
        torch.testing.assert_close(parameter, named[name], rtol=2e-5, atol=2e-6, msg=about(name))
    reference.table = nn.Identity()
    train(other, reference, 1)
    other.close()


def test_init_fn_and_checkpoint(tmp_path: Path) -> None:
    spawn(by_init_fn, 4, str(tmp_path), timeout=60)


def by_reset(rank: int, world_size: int) -> None:
    """Modules reset themselves, alike on all ranks that hold them; FSDP2's shards draw their own numbers."""

    def plain() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    meshes = ([0, 1], [2, 3])
    own = [DeviceMesh("cpu", mesh) for mesh in meshes][rank // 2]

    def shard(stage: int, module: nn.Module, mesh: Any) -> nn.Module:
        for one in module.modules():
            if isinstance(one, nn.Linear):
                fully_shard(one, mesh=own)
        return module

    for parallelize in (None, shard):
        with torch.device("meta"):
            model = plain()
        engine = make(model, meshes, split="2", parallelize=parallelize, data_axis=0)
        before = torch.get_rng_state()
        mine = {
            name: one.full_tensor().detach() if isinstance(one, DTensor) else one.detach().clone()
            for name, one in engine.named_parameters()
        }
        assert torch.equal(before, torch.get_rng_state())
        assert all(len(set(value.flatten().tolist())) == value.numel() > 1 for value in mine.values())
        everyone: list[Any] = [None] * world_size
        torch.distributed.all_gather_object(everyone, mine)
        reference = plain()
        reference.load_state_dict({name: value for found in everyone for name, value in found.items()})
        assert everyone[rank ^ 1].keys() == mine.keys()
        for name, value in everyone[rank ^ 1].items():
            assert torch.equal(value, mine[name])
        train(engine, reference, 2)
        engine.close()


def test_modules_reset_themselves() -> None:
    spawn(by_reset, 4, timeout=60)


def no_values(rank: int, world_size: int) -> list[str]:
    found = []
    for has_table in (True, False):
        with pytest.raises(ValueError) as caught:  # noqa: PT012
            engine = make(on_meta(has_table), ([0], [1]))
            engine.step(*batch(0)[:1], target=batch(0)[1])
        found.append(str(caught.value))
    return found


def test_what_has_no_value_is_named() -> None:
    for table, scale in spawn(no_values, 2, timeout=60):
        assert "buffer table.table of stage 0 is on the meta device, no state dict will have it" in table
        assert "scale.weight of stage 1 has no values on rank 1" in scale


def early_optimizer(rank: int, world_size: int) -> None:
    """Made with the parameters that the engine has replaced: its steps would train nothing."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    engine = engine_of_layers(model, (2, 4), "1", num_microbatches=2)
    engine.step(torch.ones(4, 4), target=torch.ones(4, 4))
    with pytest.raises(ValueError, match=r"made before the engine, .*: make it with engine.parameters\(\)"):
        optimizer.step()
    torch.optim.SGD(engine.parameters(), 0.1).step()
    engine.close()


def test_an_optimizer_made_before_the_engine() -> None:
    spawn(early_optimizer, 2, timeout=60)
