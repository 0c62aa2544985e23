"""Around a step: accumulation, clipping, loss scaling, evaluation, tensor parallelism, checkpoints, traces."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from pipeline_cases import Run, about, case_of, make_engine
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

import torch_xmesh as xm
from torch_xmesh.testing import serial_step, spawn


def built(run: Run, **options: Any) -> tuple[xm.PipelineEngine, nn.Module]:
    """An engine and a reference model with the same parameters."""
    torch.manual_seed(0)
    model = case_of(run.model).build()
    reference = copy.deepcopy(model)
    return make_engine(run, model, **options), reference


def batch(run: Run, step: int = 0) -> tuple[Any, Any, Any]:
    torch.manual_seed(10 + step)
    return case_of(run.model).batch(run.samples)


def oracle(run: Run, reference: nn.Module, step: int = 0, **options: Any) -> Any:
    args, kwargs, target = batch(run, step)
    return serial_step(
        reference,
        args,
        kwargs,
        target=target,
        loss_fn=case_of(run.model).loss,
        num_microbatches=run.microbatches,
        num_data_shards=run.num_shards,
        **options,
    )


def take_step(run: Run, engine: xm.PipelineEngine, step: int = 0) -> Any:
    args, kwargs, target = batch(run, step)
    return engine.step(*args, target=target, **kwargs)


def same_gradients(engine: xm.PipelineEngine, reference: nn.Module, rtol: float = 2e-5, atol: float = 2e-6) -> None:
    expected = dict(reference.named_parameters(remove_duplicate=False))
    assert list(engine.parameters())
    for name, parameter in engine.named_parameters():
        assert parameter.grad is not None, name
        found = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        torch.testing.assert_close(found, expected[name].grad, rtol=rtol, atol=atol, msg=about(name))


TIED = Run("gpt", ("blocks.2",), ([0, 1], [2, 3]), samples=16)


def accumulate(rank: int, world_size: int) -> None:
    engine, reference = built(TIED)
    for step, is_sync in enumerate((True, True, False, True)):
        if is_sync:
            take_step(TIED, engine, step)
        else:
            with engine.no_sync():
                take_step(TIED, engine, step)
        oracle(TIED, reference, step)
        if is_sync:
            same_gradients(engine, reference)
    engine.close()


def test_gradients_accumulate_and_no_sync() -> None:
    spawn(accumulate, 4, timeout=60)


def clip(rank: int, world_size: int) -> None:
    engine, reference = built(TIED)
    for norm_type in (2.0, float("inf")):
        for parameter in (*engine.parameters(), *reference.parameters()):
            parameter.grad = None
        take_step(TIED, engine)
        oracle(TIED, reference)
        norm = engine.clip_grad_norm_(0.1, norm_type)
        expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1, norm_type)
        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0.0)
        same_gradients(engine, reference)
    engine.close()


def test_clip_grad_norm() -> None:
    spawn(clip, 4, timeout=60)


def scale(rank: int, world_size: int) -> None:
    run = Run("mlp", ("layers.2",), ([0], [1]))
    engine, reference = built(run)
    optimizer = torch.optim.SGD(engine.parameters(), 0.1)
    scaler = engine.scaler(torch.amp.GradScaler("cpu", init_scale=1024.0))
    take_step(run, engine)
    oracle(run, reference)
    scaler.unscale_(optimizer)
    same_gradients(engine, reference)
    before = [parameter.detach().clone() for parameter in engine.parameters()]
    scaler.step(optimizer)
    scaler.update()
    assert any(not torch.equal(one, two) for one, two in zip(before, engine.parameters(), strict=True))
    optimizer.zero_grad()
    take_step(run, engine, 1)
    if rank == 0:
        next(engine.parameters()).grad[0] = float("inf")  # type: ignore[index]
    before = [parameter.detach().clone() for parameter in engine.parameters()]
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(one, two) for one, two in zip(before, engine.parameters(), strict=True))
    assert scaler.get_scale() == 512.0
    engine.close()


def test_scaler() -> None:
    spawn(scale, 2, timeout=60)


def scale_disabled(rank: int, world_size: int) -> None:
    run = Run("mlp", ("layers.2",), ([0], [1]))
    engine, reference = built(run)
    mine, theirs = torch.optim.SGD(engine.parameters(), 0.1), torch.optim.SGD(reference.parameters(), 0.1)
    scaler = engine.scaler(torch.amp.GradScaler("cpu", enabled=False))
    take_step(run, engine)
    oracle(run, reference)
    scaler.unscale_(mine)
    same_gradients(engine, reference)
    scaler.step(mine)
    scaler.update()
    theirs.step()
    assert scaler.get_scale() == 1.0
    expected = dict(reference.named_parameters())
    for name, parameter in engine.named_parameters():
        torch.testing.assert_close(parameter, expected[name], msg=about(name))
    engine.close()


def test_scaler_that_is_disabled() -> None:
    spawn(scale_disabled, 2, timeout=60)


def evaluate(rank: int, world_size: int) -> None:
    run = Run("mlp_dropout", ("layers.1", "layers.3"), ([0], [1], [2, 3]))
    engine, reference = built(run)
    engine.eval()
    reference.eval()
    args, kwargs, target = batch(run)
    losses: list[torch.Tensor] = []
    output = engine.evaluate(*args, target=target, losses=losses, **kwargs)
    expected = oracle(run, reference, backward=False)
    assert engine.last_loss() == pytest.approx(float(expected.loss), rel=1e-5)
    assert (output is not None) == (rank >= 2)
    if output is not None:
        torch.testing.assert_close(output, expected.output)
        torch.testing.assert_close(torch.stack(losses), torch.stack(expected.losses))
    assert all(parameter.grad is None for parameter in engine.parameters())
    engine.evaluate(*args, **kwargs)
    assert engine.last_loss() is None
    engine.train()
    reference.train()
    take_step(Run("mlp_dropout", ("layers.1",), ([0],)), engine)
    engine.close()


def test_evaluate() -> None:
    spawn(evaluate, 4, timeout=60)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


def tensor_parallel(rank: int, world_size: int) -> None:
    """Stage 0 on 2 data shards times 2 tensor shards, stage 1 on 2 tensor shards."""
    torch.manual_seed(0)
    model = nn.Sequential(Wide(), Wide(), nn.Linear(6, 3))
    reference = copy.deepcopy(model)
    world = init_device_mesh("cpu", (3, 2), mesh_dim_names=("row", "tp"))

    def parallelize(stage: int, module: nn.Module, mesh: Any) -> nn.Module:
        wide = module.get_submodule(str(stage))
        parallelize_module(wide, world["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return module

    meshes = [xm.Mesh([[0, 1], [2, 3]]), xm.Mesh([4, 5])]
    engine = xm.PipelineEngine(
        model,
        (torch.empty(2, 6),),
        meshes=meshes,
        split=xm.split_at("1"),
        num_microbatches=3,
        loss_fn=F.mse_loss,
        parallelize=parallelize,
    )
    torch.manual_seed(1)
    x, y = torch.randn(8, 6), torch.randn(8, 3)
    engine.step(x, target=y)
    serial_step(reference, (x,), target=y, loss_fn=F.mse_loss, num_microbatches=3)
    same_gradients(engine, reference)
    norm = engine.clip_grad_norm_(0.1)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1))
    same_gradients(engine, reference)
    engine.close()


def test_tensor_parallel_stages() -> None:
    spawn(tensor_parallel, 6, timeout=90)


def sharded_batch(rank: int, world_size: int) -> None:
    run = Run("mlp", ("layers.2",), ([0, 1], [2, 3]), samples=16)
    engine, reference = built(run)
    args, _, target = batch(run)
    mesh = xm.device_mesh(xm.Mesh([0, 1] if rank < 2 else [2, 3]))
    whole = args[0] if rank < 2 else target
    local = whole.chunk(2)[rank % 2]
    given = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
    output = engine.step(given) if rank < 2 else engine.step(target=given)
    serial_step(
        reference, args, target=target, loss_fn=F.mse_loss, num_microbatches=4, num_data_shards=2, shard_first=True
    )
    same_gradients(engine, reference)
    assert (output is not None) == (rank >= 2)
    engine.close()


def test_sharded_batch() -> None:
    spawn(sharded_batch, 4, timeout=60)


def ready_stages(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(4, 3))
    stages: list[nn.Module | None] = [module if stage == rank else None for stage, module in enumerate(whole)]
    engine = xm.PipelineEngine(
        copy.deepcopy(stages),
        (torch.empty(2, 6),),
        meshes=[xm.Mesh([stage]) for stage in range(3)],
        num_microbatches=4,
        loss_fn=F.mse_loss,
    )
    x, y = torch.ones(8, 6), torch.ones(8, 3)
    engine.step(x, target=y)
    serial_step(whole, (x,), target=y, loss_fn=F.mse_loss, num_microbatches=4)
    same_gradients(engine, whole)
    engine.close()


def test_ready_stages() -> None:
    spawn(ready_stages, 3, timeout=60)


def automatic(rank: int, world_size: int) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
    reference = copy.deepcopy(model)
    meshes = [xm.Mesh([0]), xm.Mesh([1])]
    engine = xm.PipelineEngine(
        model, (torch.empty(2, 16),), meshes=meshes, split="auto", num_microbatches=4, loss_fn=F.mse_loss
    )
    x, y = torch.ones(8, 16), torch.ones(8, 16)
    engine.step(x, target=y)
    serial_step(reference, (x,), target=y, loss_fn=F.mse_loss, num_microbatches=4)
    same_gradients(engine, reference)
    text = str(engine.partition)
    engine.close()
    return text


def test_automatic_split() -> None:
    one, other = spawn(automatic, 2, timeout=60)
    assert one == other


SAVED = Run("gpt", ("blocks.2",), ([0, 1], [2]))
LOADED = Run("gpt", ("blocks.1", "blocks.2", "head"), ([0], [1], [0], [1]), "interleaved_1f1b")


def save(rank: int, world_size: int, folder: str) -> None:
    engine, _ = built(SAVED)
    optimizer = torch.optim.Adam(engine.parameters(), 1e-2, eps=1e-2)
    take_step(SAVED, engine)
    optimizer.step()
    dcp.save(engine.state_dict(optimizer), checkpoint_id=folder)
    engine.close()


def load(rank: int, world_size: int, folder: str) -> None:
    """Another number of stages, other meshes: the next step is the serial run's second."""
    torch.manual_seed(99)
    engine = make_engine(LOADED, case_of("gpt").build())
    optimizer = torch.optim.Adam(engine.parameters(), 1e-2, eps=1e-2)
    state = engine.state_dict(optimizer)
    dcp.load(state, checkpoint_id=folder)
    engine.load_state_dict(state, optimizer)
    take_step(LOADED, engine, 1)
    optimizer.step()
    torch.manual_seed(0)
    reference = case_of("gpt").build()
    other = torch.optim.Adam(reference.parameters(), 1e-2, eps=1e-2)
    for step in range(2):
        other.zero_grad()
        oracle(LOADED, reference, step)
        other.step()
    expected = dict(reference.named_parameters(remove_duplicate=False))
    for name, parameter in engine.named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-4, atol=2e-5, msg=about(name))
    engine.close()


def test_checkpoint_into_other_stages(tmp_path: Path) -> None:
    spawn(save, 3, str(tmp_path / "saved"), timeout=90)
    spawn(load, 2, str(tmp_path / "saved"), timeout=90)


def on_meta(rank: int, world_size: int) -> None:
    """Each rank makes its own stage real; the whole model's state dict fills it."""
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))

    def make_real(stage: int, module: nn.Module, mesh: Any) -> nn.Module:
        return module.to_empty(device="cpu")

    engine = xm.PipelineEngine(
        model,
        (torch.empty(2, 6, device="meta"),),
        meshes=[xm.Mesh([0]), xm.Mesh([1])],
        split=xm.split_at("1"),
        num_microbatches=4,
        loss_fn=F.mse_loss,
        parallelize=make_real,
    )
    engine.load_state_dict(reference.state_dict())
    x, y = torch.ones(8, 6), torch.ones(8, 3)
    engine.step(x, target=y)
    serial_step(reference, (x,), target=y, loss_fn=F.mse_loss, num_microbatches=4)
    same_gradients(engine, reference)
    engine.close()


def test_model_on_meta() -> None:
    spawn(on_meta, 2, timeout=60)
