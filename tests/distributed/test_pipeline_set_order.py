"""Models that iterate over sets: every process meets what they compute in another order, and all agree all the same."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from set_order_models import KINDS, LoopsOverSets, RotaryModel, SetInSetOrder, SumOverSet
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import torch_xmesh as xm
from torch_xmesh.testing import spawn

SEEDS = [[1, 1, 0, 0], [1, 2, 3, 4], [5, 6, 6, 5]]


def trained(
    engine: xm.PipelineEngine, model: nn.Module, batches: Sequence[tuple[torch.Tensor, ...]], rtol: float
) -> None:
    for *args, target in batches:
        model.zero_grad()
        engine.zero_grad()
        loss = F.mse_loss(model(*args), target)
        loss.backward()  # type: ignore[no-untyped-call]
        engine.step(*args, target=target)
        assert engine.last_loss() == pytest.approx(loss.item(), rel=rtol)
        for name, parameter in engine.named_parameters():
            expected = model.get_parameter(name).grad
            found = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol * 1e-2)


def rotary(rank: int, world_size: int, kinds: tuple[str, ...], reads_mask: bool) -> None:
    torch.manual_seed(0)
    model = RotaryModel(kinds, reads_mask=reads_mask).double()
    x, mask = torch.randn(8, 5, 4, dtype=torch.float64), torch.ones(8, 5)
    padded, some = mask.clone(), mask.clone()
    padded[:, -2:] = 0
    some[:2, -1] = 0  # the first data shard's samples alone
    longer, longer_mask = torch.randn(8, 7, 4, dtype=torch.float64), torch.ones(8, 7)
    batches = [(one, m, torch.randn_like(one)) for one, m in ((x, mask), (x, padded), (x, some), (longer, longer_mask))]
    whole = copy.deepcopy(model)
    engine = xm.PipelineEngine(
        model,
        (x[:4], mask[:4]),
        meshes=[xm.Mesh([0, 1]), xm.Mesh([2, 3])],
        split=xm.split_at(f"layers.{len(kinds) // 2}"),
        num_microbatches=2,
        loss_fn=F.mse_loss,
    )
    assert len({name for name in engine.partition.values if "rotary" in name}) == 2 * len(set(kinds[len(kinds) // 2 :]))
    trained(engine, whole, batches, 1e-9)
    engine.eval()
    engine.evaluate(x, mask, target=batches[0][-1])
    engine.close()


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("reads_mask", [False, True])
def test_values_made_in_the_order_of_a_set(seeds: list[int], reads_mask: bool) -> None:
    """Values of two kinds, each read by other layers, whether or not a mask decides what runs."""
    spawn(rotary, 4, KINDS[:4], reads_mask, hash_seeds=seeds)


def test_values_of_four_kinds() -> None:
    spawn(rotary, 4, KINDS * 2, True)


def loops(rank: int, world_size: int, kind: str) -> None:
    torch.manual_seed(0)
    model = LoopsOverSets().double()
    x = torch.randn(8, 4, dtype=torch.float64)
    whole = copy.deepcopy(model)
    if kind == "stages":
        meshes = [xm.Mesh([0, 1]), xm.Mesh([2, 3])]
        engine = xm.PipelineEngine(
            model, (x[:4],), meshes=meshes, split=xm.split_at("last"), num_microbatches=2, loss_fn=F.mse_loss
        )
    else:
        plan = xm.plan_parallel(model, (x[:4],), devices=xm.Mesh([[0, 1], [2, 3]]), num_microbatches=2)
        engine = xm.PipelineEngine(model, (x[:4],), plan=plan, loss_fn=F.mse_loss)
    trained(engine, whole, [(x, torch.randn_like(x))] * 2, 1e-9)
    engine.close()


@pytest.mark.parametrize("kind", ["stages", "a plan"])
def test_loops_over_sets(kind: str) -> None:
    """Turns of different lengths, in one another, over what earlier ones made: in stages and in a plan that every rank
    finds by itself."""
    spawn(loops, 4, kind)


def set_in_set_order(rank: int, world_size: int, kind: str) -> None:
    model = SetInSetOrder().double()
    x = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = copy.deepcopy(model)
    if kind == "stages":
        meshes = [xm.Mesh([0, 1]), xm.Mesh([2, 3])]
        engine = xm.PipelineEngine(
            model, (x[:4],), meshes=meshes, split=xm.split_at("last"), num_microbatches=1, loss_fn=F.mse_loss
        )
    else:
        plan = xm.presets.zero_2(model.eval(), (x[:4],), devices=xm.Mesh([[0, 1], [2, 3]]), num_microbatches=2)
        engine = xm.PipelineEngine(model, (x[:4],), plan=plan, loss_fn=F.mse_loss)
    trained(engine, whole, [(x, torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator()))] * 2, 1e-9)
    if kind == "stages":
        for stage in engine.stages:
            for name, one in engine.stage_module(stage).named_buffers():
                assert one == whole.get_buffer(name), name
    engine.close()


@pytest.mark.parametrize("kind", ["stages", "a plan"])
def test_parts_set_in_the_order_of_a_set(kind: str) -> None:
    """Parameters and buffers that data shards share are matched by name."""
    spawn(set_in_set_order, 4, kind)


def engine_of_sums(kind: str) -> xm.PipelineEngine:
    torch.manual_seed(0)
    model, x = SumOverSet(), torch.randn(4, 4)
    if kind == "stages":
        meshes = [xm.Mesh([0, 1]), xm.Mesh([2, 3])]
        return xm.PipelineEngine(
            model, (x,), meshes=meshes, split=xm.split_at("last"), num_microbatches=2, loss_fn=F.mse_loss
        )
    plan = xm.presets.data_parallel(model, (x,), devices=xm.Mesh(range(4)), num_microbatches=2)
    return xm.PipelineEngine(model, (x,), plan=plan, loss_fn=F.mse_loss)


def sums(rank: int, world_size: int, kind: str) -> None:
    text = r"ranks disagree on what the model's forward does: on rank 0 .*PYTHONHASHSEED=0 torchrun"
    with pytest.raises(ValueError, match=text):
        engine_of_sums(kind)


@pytest.mark.parametrize("kind", ["stages", "a plan"])
def test_a_sum_in_the_order_of_a_set_is_refused(kind: str) -> None:
    """Its value depends on the order, so that ranks would compute something else: they say what helps."""
    spawn(sums, 4, kind)


def late(rank: int, world_size: int) -> None:
    """In evaluation the model adds up in the order of a set, in training it does not: the first evaluation is refused,
    and training goes on."""
    torch.manual_seed(0)
    model = LateSum()
    x = torch.randn(8, 4)
    engine = xm.PipelineEngine(
        model,
        (x[:4],),
        meshes=[xm.Mesh([0, 1]), xm.Mesh([2, 3])],
        split=xm.split_at("inner.last"),
        num_microbatches=2,
        loss_fn=F.mse_loss,
    )
    engine.step(x, target=x)
    engine.eval()
    for _ in range(2):
        with pytest.raises(ValueError, match="ranks disagree on what the model's forward does"):
            engine.evaluate(x, target=x)
    engine.train()
    engine.step(x, target=x)
    engine.close()


class LateSum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = SumOverSet()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [head(x) for head in self.inner.heads.values()]
        if self.training:
            total = sum(heads[1:], heads[0])
        else:
            by_name = dict(zip(self.inner.heads, heads, strict=True))
            total = heads[0]
            for name in set(KINDS[2:]):
                total = total + by_name[name]
        return self.inner.last(total)  # type: ignore[no-any-return]


def test_a_later_way_is_compared_before_it_runs() -> None:
    spawn(late, 4)
