"""schedule="auto": measured in the first step, the same on all ranks, within its limit."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from pipeline_cases import Run, case_of, engine_of_layers, make_engine, train_and_compare
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_xmesh as xm
from torch_xmesh.testing import spawn

RUNS = [
    Run("gpt", ("blocks.1", "blocks.2", "head"), ([0], [1], [2], [3])),
    Run("gpt", ("blocks.2",), ([0, 1], [2, 3]), samples=16),
    Run("unet", ("bottom", "decoders.0", "head"), ([0], [1], [1], [0]), microbatches=5, samples=11),
    Run("conv", ("norm1", "body.1", "body.2"), ([0], [1], [0], [1]), microbatches=3, samples=7),
    Run("lstm", ("second",), ([0], [1]), microbatches=1, samples=3),
    Run("mlp", ("layers.2",), ([0], [1]), overlap=False),
]


def train_all(rank: int, world_size: int) -> None:
    for run in RUNS:
        if rank in run.ranks:
            train_and_compare(run)


def test_losses_and_gradients_are_those_of_one_process() -> None:
    spawn(train_all, 4, timeout=120)


def choose(rank: int, world_size: int) -> tuple[list[str], str]:
    run = Run("mlp", ("layers.1", "layers.2", "layers.3"), ([0], [1], [2], [3]), microbatches=8, samples=16)
    torch.manual_seed(0)
    case = case_of(run.model)
    engine = make_engine(run, case.build())
    args, kwargs, target = case.batch(run.samples)
    before = str(engine.schedule)
    assert "chosen after the first training step" in engine.summary()
    engine.evaluate(*args, target=target, **kwargs)
    assert str(engine.schedule) == before
    texts = [before]
    for _ in range(3):
        engine.step(*args, target=target, **kwargs)
        texts.append(str(engine.schedule))
    text = engine.summary()
    engine.close()
    return texts, text


def test_chosen_once_and_alike() -> None:
    found = spawn(choose, 4, timeout=60)
    assert all(one == found[0] for one in found)
    (before, *after), text = found[0]
    assert before.startswith("zb_h1: 4 stages")
    assert after[0] == after[1] == after[2]
    name = after[0].split(":")[0]
    assert f"{name}: predicted" in text
    for known in (*xm.Schedule.names(), "planned_1", "one_in_flight"):
        assert f" {known} " in text or known in ("interleaved_1f1b", "looped_bfs", "interleaved_zb")


LIMIT = 260_000


def limited(rank: int, world_size: int) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    x, y = torch.randn(256, 64), torch.randn(256, 64)

    def make(limit: int) -> xm.PipelineEngine:
        return engine_of_layers(copy.deepcopy(model), (32, 64), "2", num_microbatches=8, memory_limit_bytes=limit)

    engine = make(LIMIT)
    assert max(engine.schedule.peak_in_flight) == 1
    engine.step(x, target=y)
    fixed = 4 * 2 * 65 * 64 * 4 + 5 * 32 * 64 * 4  # two layers with all copies, five receives posted ahead
    peak = engine.schedule.peak_in_flight[rank]
    assert peak > 1
    assert fixed + peak * (1 + rank) * 32 * 64 * 4 <= LIMIT  # the inputs of its layers; the batch is there anyway
    engine.close()
    engine = make(100)
    engine.step(x, target=y)
    with pytest.raises(ValueError, match="no schedule keeps memory_limit_bytes=100: the smallest limit") as caught:
        engine.step(x, target=y)
    engine.evaluate(x)
    assert str(caught.value) in engine.summary()
    engine.close()
    return str(caught.value)


def test_a_limit() -> None:
    texts = spawn(limited, 2, timeout=60)
    assert texts[0] == texts[1]


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.seen: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "cache" not in self.seen:
            self.seen["cache"] = torch.zeros(1 << 16)  # once, not per microbatch
        y: torch.Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return y


def smallest_limit(model: list[nn.Module], x: torch.Tensor, y: torch.Tensor) -> int:
    engine = xm.PipelineEngine(
        model,
        (torch.empty(32, 64),),
        meshes=[xm.Mesh([0]), xm.Mesh([1])],
        schedule="auto",
        num_microbatches=8,
        loss_fn=nn.MSELoss(),
        memory_limit_bytes=100,
    )
    engine.step(x, target=y)
    with pytest.raises(ValueError, match="the smallest limit") as caught:
        engine.step(x, target=y)
    engine.close()
    found = re.search(r"the smallest limit that one keeps is (\d+)", str(caught.value))
    assert found
    return int(found[1])


def checkpointed(rank: int, world_size: int) -> tuple[int, int]:
    x, y = torch.randn(256, 64), torch.randn(256, 64)
    layers = [[nn.Linear(64, 64) for _ in range(3)] for _ in range(2)]
    plain = smallest_limit([nn.Sequential(*one) for one in layers], x, y)
    again = smallest_limit([nn.Sequential(*map(Checkpointed, one)) for one in layers], x, y)
    return plain, again


def test_what_checkpoints_keep_is_counted() -> None:
    """The inputs of checkpointed layers, in closures; with each a state of the random numbers, of 5 KB."""
    (plain, again), other = spawn(checkpointed, 2, timeout=60)
    assert (plain, again) == other
    caches, states = 3 * 4 << 16, 3 * 5056
    assert plain + caches <= again <= plain + caches + states


def waits(rank: int, world_size: int) -> dict[int, int]:
    """Bytes that wait for W on this rank's stage: two layers and a ReLU, whose result is the second layer's input."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)) for _ in range(3)]
    engine = engine_of_layers(nn.Sequential(*layers), (32, 64), "1", "2", num_microbatches=4)
    x, y = torch.randn(128, 64), torch.randn(128, 64)
    engine.step(x, target=y)
    assert engine._place.auto is not None
    found = {stage: sum(one.values()) for stage, one in engine._place.core.weight_storages.items()}
    engine.close()
    return found


def test_what_waits_is_the_products_inputs_and_gradients() -> None:
    """On the stage between: its received value, the second layer's input, and the gradients of both layers' outputs;
    beside both weights, which are there anyway."""
    block, weight = 32 * 64 * 4, 64 * 64 * 4
    assert spawn(waits, 3, timeout=60)[1] == {1: 4 * block + 2 * weight}


def disagree(rank: int, world_size: int, limit: object) -> str:
    """One rank measures, the other does not; or a limit that is none."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    schedule = "zb_h1" if rank == 1 and limit is None else "auto"
    with pytest.raises(ValueError) as caught:
        engine_of_layers(model, (2, 4), "1", num_microbatches=2, memory_limit_bytes=limit, schedule=schedule)
    return str(caught.value)


def test_auto_on_one_rank_only() -> None:
    for text in spawn(disagree, 2, None, timeout=60):
        assert "ranks disagree on schedule" in text
        assert "rank 0 has auto: zb_h1" in text


@pytest.mark.parametrize("limit", [1.5, True, -5, "1GB"])
def test_a_limit_that_is_none(limit: object) -> None:
    for text in spawn(disagree, 2, limit, timeout=60):
        assert "memory_limit_bytes is a positive int or None, got" in text
