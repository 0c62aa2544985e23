"""W before their turn: only where a stage would wait, never in another order of sums, and not where another rank could
notice."""

from __future__ import annotations

import copy
import random
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipeline_cases import engine_of_layers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import torch_xmesh as xm
from torch_xmesh.testing import spawn

LIST = "0F0,0F1,0I0,0I1,0W0,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n"


def order_of(engine: xm.PipelineEngine) -> list[str]:
    """What this rank computed in its last step."""
    return [action for kind, action, *_ in engine._place.core.spans if kind == "compute"]


def waits_for_weights(rank: int, world_size: int) -> list[str]:
    """Stage 1 computes the second microbatch only once stage 0 has a weight gradient of the first: it waits for ever if
    W keeps its place, which is behind the gradients of the second."""
    store = dist.distributed_c10d._get_default_store()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    engine = engine_of_layers(model, (2, 6), "1", schedule=LIST, num_microbatches=2)
    weight = next(model.parameters())
    if rank == 0:
        weight.register_post_accumulate_grad_hook(lambda _: store.set("first W", "done"))  # type: ignore[no-untyped-call]
    forwards = iter(range(2))

    def hold(*_: Any) -> None:
        if next(forwards) == 1:
            store.wait(["first W"], timedelta(seconds=60))

    if rank == 1:
        engine.stage_module(1).register_forward_pre_hook(hold)
    engine.step(torch.randn(4, 6), target=torch.randn(4, 6))
    found = order_of(engine)
    engine.close()
    return found


def test_before_a_wait() -> None:
    assert spawn(waits_for_weights, 2, timeout=90)[0] == ["0F0", "0F1", "0I0", "0W0", "0I1", "0W1"]


def keeps_its_list(rank: int, world_size: int) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    engine = engine_of_layers(model, (2, 6), "1", schedule=LIST, num_microbatches=2, early_weights=False)
    for _ in range(20):
        engine.step(torch.randn(4, 6), target=torch.randn(4, 6))
        assert order_of(engine) == engine.schedule.actions(rank)
    engine.close()


def test_never_where_it_is_switched_off() -> None:
    spawn(keeps_its_list, 2, timeout=60)


def one_wants_it(rank: int, world_size: int) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    with pytest.raises(ValueError, match=r"ranks disagree on early_weights: rank \d has \w+, rank \d has \w+"):
        engine_of_layers(model, (2, 6), "1", num_microbatches=2, early_weights=rank == 0)


def test_the_same_on_all_ranks() -> None:
    spawn(one_wants_it, 2, timeout=60)


class SummedGradient(torch.autograd.Function):
    """The identity; its gradient is summed over a group."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        total = grads[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class SummedLinear(nn.Linear):
    """Its weight's gradient needs all ranks of its mesh: a collective within W."""

    group: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight if self.group is None else SummedGradient.apply(self.weight, self.group)  # type: ignore[no-untyped-call]
        return F.linear(x, weight, self.bias)


def collective_in_weights(rank: int, world_size: int, has_collective: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(SummedLinear(6, 6), SummedLinear(6, 6))
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    engine = xm.PipelineEngine(
        model,
        (torch.empty(2, 6),),
        meshes=[xm.Mesh([0, 1]), xm.Mesh([2, 3])],
        split=xm.split_at("1"),
        schedule=LIST,
        num_microbatches=2,
        loss_fn=F.mse_loss,
        data_axis=None,
    )
    stage = engine.stages[0]
    if has_collective:
        model[stage].group = groups[stage]
    batch = torch.randn(4, 6), torch.randn(4, 6)
    engine.step(batch[0], target=batch[1])
    assert engine._place.core.may_run_early(stage) is not has_collective
    once = {name: parameter.grad.clone() for name, parameter in engine.named_parameters() if parameter.grad is not None}
    engine.zero_grad()
    engine.step(batch[0], target=batch[1])
    if has_collective:
        assert order_of(engine) == engine.schedule.actions(stage)
    for name, parameter in engine.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, once[name])
    parameter = next(engine.parameters())
    parameter.requires_grad_(False)  # another set of trained parameters: nothing is known of their W
    engine.step(batch[0], target=batch[1])
    assert order_of(engine) == engine.schedule.actions(stage)
    engine.close()


@pytest.mark.parametrize("has_collective", [False, True])
def test_a_collective_keeps_its_turn(has_collective: bool) -> None:
    spawn(collective_in_weights, 4, has_collective, timeout=90)


class Checkpointed(nn.Module):
    """A reentrant checkpoint, whose I is the whole backward."""

    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = checkpoint(lambda y: F.linear(y, self.weight), x, use_reentrant=True)
        return output


def whole_beside_split(rank: int, world_size: int, is_whole: bool) -> None:
    """Rank 0 has a stage that splits and one that does not, with one weight: were W of the first early, the order in
    which the weight's gradients are added would depend on what comes late."""
    torch.manual_seed(0)
    first = nn.Linear(6, 6, bias=False)
    last: nn.Module = Checkpointed(first.weight)
    if not is_whole:
        last = nn.Linear(6, 6, bias=False)
        last.weight = first.weight
    model = nn.Sequential(nn.Linear(6, 6), first, nn.Tanh(), last)
    engine = xm.PipelineEngine(
        model,
        (torch.empty(2, 6),),
        meshes=[xm.Mesh([1]), xm.Mesh([0]), xm.Mesh([1]), xm.Mesh([0])],
        split=xm.split_at("1", "2", "3"),
        schedule="eager_split",
        num_microbatches=6,
        loss_fn=F.mse_loss,
    )
    x, y = torch.randn(12, 6), torch.randn(12, 6)
    for step in range(4):
        engine.step(x, target=y)
        for stage in engine.stages:
            assert engine._place.core.may_run_early(stage) is (rank == 1 or not is_whole)
        if step == 0 or (rank == 0 and is_whole):  # on several stages nothing is known before a step without one
            assert order_of(engine) == engine.schedule.actions(engine._place.index)
    assert ("whole backward" in engine.summary()) is is_whole
    engine.close()


@pytest.mark.parametrize("is_whole", [False, True])
def test_not_beside_a_stage_that_does_not_split(is_whole: bool) -> None:
    spawn(whole_beside_split, 2, is_whole, timeout=60)


def delayed(rank: int, world_size: int, is_tensor_parallel: bool) -> list[torch.Tensor]:
    """Steps with and without random delays of what stages send: W run before their turn in other places, and every
    gradient is the same to the bit."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)) for _ in range(2)))
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "tp"))

    def parallelize(stage: int, module: nn.Module, mesh: Any) -> nn.Module:
        plan: Any = {f"{stage}.0": ColwiseParallel(), f"{stage}.2": RowwiseParallel()}
        return parallelize_module(module, world["tp"], plan)

    found = []
    for is_late in (False, True):
        mine = copy.deepcopy(model)
        engine = xm.PipelineEngine(
            mine,
            (torch.empty(2, 6),),
            meshes=[xm.Mesh([0, 1]), xm.Mesh([2, 3])],
            split=xm.split_at("1"),
            schedule="eager_split",
            num_microbatches=8,
            loss_fn=F.mse_loss,
            parallelize=parallelize if is_tensor_parallel else None,
        )
        rng = random.Random(rank)
        for stage in engine.stages:
            engine.stage_module(stage).register_forward_pre_hook(
                lambda *_: time.sleep(rng.choice((0.0, 0.003, 0.01)) if is_late else 0.0)  # noqa: B023
            )
        for step in range(6):
            torch.manual_seed(step)
            engine.step(torch.randn(16, 6), target=torch.randn(16, 6))
        found.append([parameter.grad for parameter in engine.parameters()])
        engine.close()
    for one, other in zip(*found, strict=True):
        assert one is not None
        assert other is not None
        one, other = (grad.to_local() if hasattr(grad, "to_local") else grad for grad in (one, other))
        assert torch.equal(one, other)
    return []


@pytest.mark.parametrize("is_tensor_parallel", [False, True], ids=["data", "tensor"])
def test_weights_before_their_turn_change_no_bit(is_tensor_parallel: bool) -> None:
    spawn(delayed, 4, is_tensor_parallel, timeout=120)
