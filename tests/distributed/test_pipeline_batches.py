"""Batches in every form, plain and sharded: samples meet their own targets and outputs. Batches that do not fit: every
rank gets the same ValueError, nothing is computed, and the next step is as if they had never been."""

from __future__ import annotations

import copy
import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from pipeline_cases import compare
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional as F

import torch_xmesh as xm
from torch_xmesh.pipeline.cut.partition import partition
from torch_xmesh.pipeline.engine.sample_order import SampleOrder
from torch_xmesh.testing import serial_step, spawn


class Two(nn.Module):
    """Takes x on the first stage and bias on the second; returns one row and two rows for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, *, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.second(torch.tanh(self.first(x))) + bias
        return y, torch.stack([y, -y], 1).flatten(0, 1)


def loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output[0], target) + output[1].square().mean()  # type: ignore[no-any-return]


def sharded(whole: torch.Tensor, mesh: xm.Mesh, axis: int | None) -> DTensor:
    """The tensor over a stage's mesh, on this rank; an empty local tensor elsewhere."""
    on = xm.device_mesh(mesh)
    placements = [Shard(0) if index == axis else Replicate() for index in range(on.ndim)]
    rank = torch.distributed.get_rank()
    local = whole
    if axis is not None and rank in mesh.ranks:
        index = (torch.tensor(mesh.ranks).reshape(mesh.shape) == rank).nonzero()[0][axis]
        local = whole.chunk(mesh.shape[axis])[index]
    return DTensor.from_local(local, on, placements, run_check=False, shape=whole.shape, stride=whole.stride())


PLACES: dict[str, tuple[tuple[Any, Any], tuple[int | None, int | None]]] = {
    "2-2": (([0, 1], [2, 3]), (0, 0)),
    "2-1": (([0, 1], [2]), (0, 0)),
    "1-2": (([0], [1, 2]), (0, 0)),
    "1-4": (([3], [0, 1, 2, 4]), (0, 0)),
    "same": (([0, 1], [0, 1]), (0, 0)),
    "2x2-2": (([[0, 1], [2, 3]], [4, 5]), (1, 0)),
    "4-2 apart": (([0, 1, 2, 3], [4, 5]), (0, 0)),
}


def pairs(rank: int, world_size: int, name: str) -> set[str]:
    """All forms of x, bias and target: outputs, losses and gradients are the serial run's, or all ranks refuse."""
    grids, axes = PLACES[name]
    meshes = [xm.Mesh(grid) for grid in grids]
    if rank not in {r for mesh in meshes for r in mesh.ranks}:
        return set()
    counts = [1 if axis is None else mesh.shape[axis] for mesh, axis in zip(meshes, axes, strict=True)]
    torch.manual_seed(0)
    model = Two()
    reference = copy.deepcopy(model)
    engine = xm.PipelineEngine(
        model,
        (torch.empty(2, 3),),
        {"bias": torch.empty(2, 3)},
        meshes=meshes,
        split=xm.split_at("second"),
        data_axis=list(axes),
        num_microbatches=2,
        loss_fn=loss,
    )
    seen = set()
    for kinds in itertools.product((False, True), repeat=3):
        x, bias, y = (torch.randn(16, 3) for _ in range(3))
        # Each rank passes what its stage takes in that stage's form; bias is taken by the second stage.
        stages = (0, 1, 1)
        given = [
            sharded(one, meshes[stage], axes[stage]) if kind and rank in meshes[stage].ranks else one
            for kind, stage, one in zip(kinds, stages, (x, bias, y), strict=True)
        ]
        parts = {counts[stage] for kind, stage in zip(kinds, stages, strict=True) if kind and counts[stage] > 1}
        for parameter in (*engine.parameters(), *reference.parameters()):
            parameter.grad = None
        if len(parts) > 1:
            with pytest.raises(ValueError, match="the batch is sharded over"):
                engine.step(given[0], bias=given[1], target=given[2])
            seen.add("refused")
            continue
        shards = max(parts, default=1)
        losses: list[torch.Tensor] = []
        output = engine.step(given[0], bias=given[1], target=given[2], losses=losses)
        options: dict[str, Any] = {"num_microbatches": 2, "num_data_shards": shards, "shard_first": shards > 1}
        expected = serial_step(reference, (x,), {"bias": bias}, target=y, loss_fn=loss, **options)
        compare(engine, reference, expected, output, losses, f"{name}, sharded: {kinds}")
        torch.testing.assert_close(expected.output, reference(x, bias=bias))  # in the batch's order
        seen.add(f"{shards} shards")
    engine.close()
    return seen


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("2-2", {"1 shards", "2 shards"}),
        ("2-1", {"1 shards", "2 shards"}),
        ("1-2", {"1 shards", "2 shards"}),
        ("1-4", {"1 shards", "4 shards"}),
        ("same", {"1 shards", "2 shards"}),
        ("2x2-2", {"1 shards", "2 shards"}),
        ("4-2 apart", {"1 shards", "2 shards", "4 shards", "refused"}),
    ],
)
def test_samples_meet_their_own(name: str, expected: set[str]) -> None:
    found = [seen for seen in spawn(pairs, 6, name, timeout=60) if seen]
    assert all(seen == expected for seen in found), found


def test_an_order_has_every_sample_once() -> None:
    """By brute force: whoever cuts shards first and microbatches then has the same samples, or the order is refused."""
    taken = 0
    for samples, microbatches, shards in itertools.product(range(1, 25), range(1, 6), range(1, 5)):
        whole = torch.arange(samples)
        chunks = list(whole.chunk(shards))
        fits = samples >= microbatches and len(chunks) == shards
        parts = [list(chunk.tensor_split(microbatches)) for chunk in chunks]
        try:
            order = SampleOrder.of(samples, microbatches, shards)
        except ValueError:
            assert shards > 1 or samples < microbatches
            even = fits and all(len(chunk) % microbatches == 0 for chunk in chunks) and samples % shards == 0
            assert not even
            continue
        taken += 1
        found = [order.part(whole, 0, microbatch=i, begin=0, end=order.sizes[i]) for i in range(microbatches)]
        assert torch.equal(torch.cat(found).sort().values, whole)
        assert torch.equal(order.restored(torch.cat(found), 0), whole)
        if fits and samples % (shards * microbatches) == 0:
            for index, one in enumerate(found):
                assert torch.equal(one, torch.cat([part[index] for part in parts]))
    assert taken > 100


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(3, 3) for _ in range(3))
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.third(self.drop(self.second(torch.tanh(self.first(x)) * scale)))  # type: ignore[no-any-return]


def refusals(rank: int, world_size: int) -> list[str]:
    """Three stages on [0, 1], [2], [3, 4]; only one rank's arguments are wrong."""
    grids = ([0, 1], [2], [3, 4])
    split = xm.split_at("second", "third")
    reference = Noisy()
    cut = partition(reference, (torch.empty(2, 3),), split=split)
    engine = xm.PipelineEngine(
        Noisy(),
        (torch.empty(2, 3),),
        meshes=[xm.Mesh(grid) for grid in grids],
        split=split,
        num_microbatches=2,
        loss_fn=F.mse_loss,
        seed=5,
    )
    x, y = torch.randn(8, 3), torch.randn(8, 3)
    frozen = next(iter(engine.parameters()))
    wrong: list[tuple[int, Any, str]] = [
        (3, lambda: engine.step(x), "target is missing on rank 3"),
        (
            4,
            lambda: engine.step(x, target=y[:6]),
            "the target has 8 samples on rank 3, the target has 6",
        ),
        (0, lambda: engine.step(x[:6], target=y), "ranks disagree: the arguments have 6 samples on rank 0"),
        (1, lambda: engine.step(target=y), "the batch is missing on rank 1"),
        (0, lambda: engine.step(x.double(), target=y), "has dtype torch.float64"),
        (1, lambda: engine.step(x[:, :2], target=y), "argument args[0] has 3 entries along dim 1 on rank 0"),
        (0, lambda: engine.step(x, target=y, scale=2.0), "unknown argument 'scale'"),
        (
            2,
            lambda: engine.evaluate(x, target=y),
            "all ranks make the same call together, but rank 0 calls step(), rank 2 calls evaluate()",
        ),
        (
            4,
            lambda: engine.evaluate(x),
            "all ranks make the same call together, but rank 0 calls step(), rank 4 calls evaluate()",
        ),
        (3, lambda: engine.step(x, target=y, return_outputs=False), "return_outputs (1) or not (0): 0 on rank 3"),
        (3, lambda: engine.step(x, target={"y": y, "z": y[:5]}), "disagree on the number of samples"),
    ]
    texts = []
    for step, (where, call, _) in enumerate(wrong):
        with pytest.raises(ValueError) as caught:
            call() if rank == where else engine.step(x, target=y)
        texts.append(str(caught.value))
        with pytest.raises(ValueError, match="cannot be split into 2 microbatches"):
            engine.step(x[:1], target=y[:1])
        with engine.no_sync() if rank == where else nullcontext(), pytest.raises(ValueError, match="in no_sync"):
            engine.step(x, target=y)
        for parameter in (*engine.parameters(), *reference.parameters()):
            parameter.grad = None
        losses: list[torch.Tensor] = []
        output = engine.step(x, target=y, losses=losses)
        options: dict[str, Any] = {"num_microbatches": 2, "seed": 5, "step": step, "partition": cut}
        expected = serial_step(reference, (x,), target=y, loss_fn=F.mse_loss, **options)
        compare(engine, reference, expected, output, losses, f"after refusal {step}")
        assert frozen.grad is not None
    engine.close()
    for text, (_, _, part) in zip(texts, wrong, strict=True):
        assert part in text, (text, part)
    return texts


def test_a_wrong_batch_leaves_the_engine_usable() -> None:
    """Also a batch too small for all, and no_sync on one rank; dropout's step number counts none of them."""
    spawn(refusals, 5, timeout=60)
