"""What ranks pass otherwise than others without a word: parts of a batch as if they were the whole, another loss
function, modules in another mode; and a rank's own data shard where that is meant."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

import torch_xmesh as xm
from torch_xmesh.pipeline.ranks.functions import described
from torch_xmesh.testing import spawn


def make(model: nn.Module, **options: Any) -> xm.PipelineEngine:
    given: dict[str, Any] = {"meshes": [xm.Mesh([0, 1]), xm.Mesh([2, 3])], "loss_fn": F.mse_loss} | options
    return xm.PipelineEngine(
        model, (torch.empty(2, 4),), split=xm.split_at("2"), schedule="1f1b", num_microbatches=2, **given
    )


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def check(engine: xm.PipelineEngine, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    """The gradients are those of the whole batch in one process."""
    model.zero_grad()
    F.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
    expected = dict(model.named_parameters())
    for name, parameter in engine.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-4, atol=1e-6)


def peers_of_a_shard(rank: int, world_size: int) -> None:
    """Stage 0 on two data shards of two ranks each, stage 1 on the same mesh."""
    meshes = [xm.Mesh([[0, 1], [2, 3]])] * 2
    engine = make(model_of(), meshes=meshes, data_axis=0, parallelize=lambda stage, module, mesh: module)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    mine = slice(4 * (rank // 2), 4 * (rank // 2) + 4)
    other = x[mine] + 1 if rank == 3 else x[mine]
    with pytest.raises(
        ValueError, match=r"ranks 2 and 3 disagree: argument args.0. has other values, but both are on data shard 1"
    ):
        engine.step(other, target=y[mine], sharded=True)
    with pytest.raises(
        ValueError, match="ranks 0 and 1 disagree: the target has other values, but both are on data shard 0"
    ):
        engine.step(x[mine], target=y[mine] + int(rank == 1), sharded=True)
    for _ in range(3):
        engine.zero_grad()
        engine.step(x[mine], target=y[mine], sharded=True)
        check(engine, model_of(), x, y)


def test_ranks_of_one_data_shard_pass_the_same() -> None:
    spawn(peers_of_a_shard, 4, timeout=60)


def own_samples(rank: int, world_size: int) -> None:
    model = model_of()
    engine = make(copy.deepcopy(model))
    x, y = torch.randn(16, 4), torch.randn(16, 4)
    mine = slice(8 * (rank % 2), 8 * (rank % 2) + 8)
    other = y + 1 if rank == 3 else y
    half = "ranks 0 and 1 disagree: argument args.0. has other values: .*sharded=True"
    for arguments, target, text in (
        (x[mine], y[mine], half),
        (x, other, "ranks 2 and 3 disagree: the target has other values"),
    ):
        with pytest.raises(ValueError, match=text):
            engine.step(arguments, target=target)
    with pytest.raises(ValueError, match=r"sharded=True \(1\) or not \(0\)"):
        engine.step(x[mine], target=y[mine], sharded=rank != 2)
    for step in range(3):
        engine.zero_grad()
        if step == 2:
            on = xm.device_mesh(xm.Mesh([0, 1]) if rank < 2 else xm.Mesh([2, 3]))
            shards = [DTensor.from_local(one[mine], on, [Shard(0)], run_check=False) for one in (x, y)]
            engine.step(shards[0], target=shards[1], sharded=True)
        else:
            engine.step(x[mine], target=y[mine], sharded=True)
        check(engine, model, x, y)
    output = engine.evaluate(x[mine], target=y[mine], sharded=True)
    if rank > 1:
        torch.testing.assert_close(output, model(x).detach())
    # Plain batches are compared in the first steps, and again where sizes change.
    for size in (8, 8, 8, 12):
        x, y = torch.randn(size, 4), torch.randn(size, 4)
        engine.zero_grad()
        engine.step(x, target=y)
        check(engine, model, x, y)
    torch.manual_seed(rank)
    with pytest.raises(ValueError, match="ranks 0 and 1 disagree: argument args.0. has other values"):
        engine.step(torch.randn(20, 4), target=torch.ones(20, 4))
    engine.close()
    engine = make(copy.deepcopy(model), compare_batches=False)
    engine.step(torch.randn(20, 4), target=torch.ones(20, 4))
    engine.close()


class Looking(nn.Module):
    """Takes another way for a batch without padding."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y = self.first(x) if mask.all() else self.first(x * mask)
        return self.second(y)  # type: ignore[no-any-return]


def other_ways(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = Looking()
    reference = copy.deepcopy(model)
    engine = xm.PipelineEngine(
        model,
        (torch.empty(2, 4), torch.ones(2, 4)),
        meshes=[xm.Mesh([0, 1]), xm.Mesh([2, 3])],
        split=xm.split_at("second"),
        num_microbatches=2,
        loss_fn=F.mse_loss,
        compare_batches=False,
    )
    x, y, full = torch.ones(8, 4), torch.zeros(8, 4), torch.ones(8, 4)
    padded = full.clone()
    padded[0] = 0  # a sample in the first data shard's first microbatch
    for mask in (full, padded, full):
        engine.zero_grad()
        reference.zero_grad()
        engine.step(x, mask, target=y)
        F.mse_loss(reference(x, mask), y).backward()  # type: ignore[no-untyped-call]
        for name, parameter in engine.named_parameters():
            torch.testing.assert_close(parameter.grad, reference.get_parameter(name).grad, rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="ranks 0 and 2 disagree: the model takes another way for the batch"):
        engine.step(x, full if rank < 2 else padded, target=y)
    engine.step(x, padded, target=y)
    engine.close()


def test_ranks_that_would_take_other_ways_through_the_model() -> None:
    spawn(other_ways, 4, timeout=60)


class Scaled(nn.Module):
    """Has a number that a person may want to change, and a branch on its mode between modules."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
        self.alpha = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x) * self.alpha
        return y * 2 if self.training else y  # type: ignore[no-any-return]


def changes_to_the_model(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = Scaled().eval()
    options: dict[str, Any] = {"num_microbatches": 2, "loss_fn": F.mse_loss, "split": xm.split_at("inner.2")}
    engine = xm.PipelineEngine(model, (torch.empty(2, 4),), meshes=[xm.Mesh([0]), xm.Mesh([1])], **options)
    x = torch.ones(4, 4)

    def step() -> float:
        engine.step(x, target=x)
        return engine.last_loss() or 0.0

    in_evaluation = step()
    model.train()
    with pytest.raises(ValueError, match=r"train\(\) was called on the model, .* call engine.train\(\)"):
        step()
    engine.train()
    assert step() != in_evaluation
    engine.eval()
    assert step() == in_evaluation
    model.alpha = 0.25
    with pytest.raises(ValueError, match="alpha is 0.25; it was 0.5 when the engine was made"):
        step()
    model.alpha = 0.5
    hook = model.inner.register_forward_hook(lambda module, args, output: output)
    with pytest.raises(ValueError, match="module 'inner' has a hook since the engine was made"):
        step()
    hook.remove()
    assert step() == in_evaluation
    engine.close()


def test_changes_to_the_model_that_stages_would_not_notice() -> None:
    spawn(changes_to_the_model, 2, timeout=60)


def test_own_samples() -> None:
    spawn(own_samples, 4, timeout=90)


def modes(rank: int, world_size: int) -> None:
    engine = make(model_of())
    x, y = torch.ones(4, 4), torch.ones(4, 4)
    engine.step(x, target=y)
    if rank == 1:
        engine.eval()
    with pytest.raises(ValueError, match=r"disagree: engine.train\(\) \(1\) or engine.eval\(\) \(0\): 1 on rank 0"):
        engine.step(x, target=y)
    engine.train()
    if rank == 3:
        engine.stage_module(1).eval()
    with pytest.raises(ValueError, match="ranks 2 and 3 disagree: the modules of stage 1 are in other modes"):
        engine.step(x, target=y)
    if rank == 2:
        engine.stage_module(1).eval()
    engine.step(x, target=y)
    engine.close()


def test_modes() -> None:
    spawn(modes, 4, timeout=60)


def scaled(output: torch.Tensor, target: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    return factor * F.mse_loss(output, target)


def losses(rank: int, world_size: int) -> None:
    def of(factor: float) -> Any:
        return lambda output, target: factor * F.mse_loss(output, target)

    for one, other in (
        (F.mse_loss, F.l1_loss),
        (of(1.0), of(2.0)),
        (functools.partial(scaled, factor=1.0), functools.partial(scaled, factor=2.0)),
        (nn.MSELoss(), nn.MSELoss(reduction="sum")),
        (lambda output, target: F.mse_loss(output, target), lambda output, target: F.mse_loss(target, output)),
    ):
        with pytest.raises(ValueError, match="ranks disagree on loss_fn: rank"):
            make(model_of(), loss_fn=other if rank == 3 else one)
        make(model_of(), loss_fn=one if rank > 1 else other).close()  # the last stage's ranks call it


def test_losses() -> None:
    spawn(losses, 4, timeout=60)


def test_equal_functions_are_described_alike() -> None:
    def of(factor: Any) -> Any:
        def loss(output: torch.Tensor) -> torch.Tensor:
            return factor * output if factor else loss(output)

        return loss

    assert described(of(1.0)) == described(of(1.0)) != described(of(2.0))
    assert described(of(object())) == described(of(object()))
    assert described(of(0)) == described(of(1))  # a rank
    assert described(of("cuda:0")) == described(of("cuda:1"))
    assert described(scaled).startswith("scaled ")
    assert described(nn.MSELoss()) == described(nn.MSELoss())
    assert described(None) == "none"
    assert described(lambda x: x in {"a", "b", "c"}) == described(lambda x: x in {"c", "b", "a"})
