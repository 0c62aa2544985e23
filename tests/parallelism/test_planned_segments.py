"""Planned stages that are divided into segments: what goes between those goes by transfers, and all else is as if they
were not."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from planned_cases import OPTIONS, whole_of
from small_models import Gpt, Mlp
from torch import nn
from torch.nn import functional as F

import torch_xmesh as xm
from torch_xmesh.parallelism.running.collectives import Moves
from torch_xmesh.testing import spawn

PLANS: dict[str, Callable[..., xm.ParallelPlan]] = {
    "megatron": lambda *args: xm.presets.megatron(*args, tensor_parallel=2, **OPTIONS),
    "two stages": lambda *args: xm.presets.pipeline(*args, num_stages=2, tensor_parallel=2, **OPTIONS),
}


def undivided(plan: xm.ParallelPlan) -> xm.ParallelPlan:
    """The same plan; collectives run inside of its stages."""
    fields = json.loads(plan.to_json())
    fields["schedule_csv"] = xm.Schedule.make("1f1b", len(plan.stages), plan.num_microbatches).to_csv()
    for stage in fields["stages"]:
        stage["segments"], stage["edges"] = [], []
        for program in stage["programs"]:
            program["segments"] = []
    return xm.ParallelPlan.from_json(json.dumps(fields))


class Drops(nn.Module):
    """Weights are dropped in every layer: in one segment and in the next."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.Linear(64, 256) for _ in range(3))
        self.second = nn.ModuleList(nn.Linear(256, 64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for first, second in zip(self.first, self.second, strict=True):
            x = x + F.dropout(second(F.dropout(first(x).relu(), 0.2, self.training)), 0.2, self.training)
        return x


def draws_alike(rank: int, world_size: int, name: str) -> None:
    """Losses and gradients, step by step, and no collective of a microbatch is called where transfers are."""
    torch.manual_seed(1)
    model, x = Drops().double(), torch.randn(16, 64, dtype=torch.float64)
    plan = PLANS[name](model, (x,))
    counts = [len(program.segments) for stage in plan.stages for program in stage.programs]
    assert min(counts) > 2, counts
    found: list[list[Any]] = []
    called: Counter[str] = Counter()
    tell = Moves._tell

    def counted(self: Moves, name: str, why: str, kind: str, axis: int, num_bytes: int) -> None:
        called[f"{len(found)} {why}"] += 1
        tell(self, name, why, kind, axis, num_bytes)

    Moves._tell = counted  # type: ignore[method-assign]
    for one in (undivided(plan), plan, plan):
        torch.manual_seed(5)
        kept = []
        with xm.PipelineEngine(copy.deepcopy(model), (x,), plan=one, loss_fn=F.mse_loss) as engine:
            for _ in range(2):
                engine.step(torch.cat([x, x.flip(0)]), target=torch.ones(32, 64, dtype=torch.float64))
                kept.append([engine.last_loss(), *(whole_of(p.grad).clone() for p in engine.parameters())])
                engine.zero_grad()
            engine.eval()
            engine.evaluate(torch.cat([x, x]), target=torch.ones(32, 64, dtype=torch.float64))
            kept.append([engine.last_loss()])
        found.append(kept)
    Moves._tell = tell  # type: ignore[method-assign]
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found[2], found[1], rtol=0, atol=0)  # bit for bit
    assert called["0 forward"] > 0
    assert called["1 forward"] == called["1 backward"] == 0, called


@pytest.mark.parametrize("name", PLANS)
def test_masks_do_not_hang_on_segments(name: str) -> None:
    spawn(draws_alike, 4, name)


class Adds(nn.Module):
    """What a layer adds is brought together, and nothing of backward reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.Linear(64, 256, bias=False) for _ in range(4))
        self.second = nn.ModuleList(nn.Linear(256, 64, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for first, second in zip(self.first, self.second, strict=True):
            x = x + second(first(x).relu())
        return x


def holds_little(rank: int, world_size: int) -> None:
    """All microbatches' forwards come before the first backward. Of what is received in one what products read is saved
    until then, a tensor for each layer and microbatch; what layers add is not."""
    torch.manual_seed(1)
    model, x = Adds().double(), torch.randn(16, 64, dtype=torch.float64)
    options = {**OPTIONS, "num_microbatches": 8, "schedule": "gpipe", "num_layers": 1}
    plan = xm.presets.megatron(model, (x,), tensor_parallel=2, **options)
    whole, batch = copy.deepcopy(model), torch.randn(128, 64, dtype=torch.float64)
    with xm.PipelineEngine(model, (x,), plan=plan, loss_fn=F.mse_loss) as engine:
        engine.step(batch, target=torch.ones_like(batch))
        F.mse_loss(whole(batch), torch.ones_like(batch)).backward()  # type: ignore[no-untyped-call]
        for name, parameter in engine.named_parameters():
            torch.testing.assert_close(whole_of(parameter.grad), whole.get_parameter(name).grad)
        assert 32 <= engine.buffer_counts[0] < 40, engine.buffer_counts


def test_what_nobody_saves_is_not_held() -> None:
    spawn(holds_little, 4)


def transfers_as_predicted(rank: int, world_size: int) -> None:
    """As many as the plan says, each of them a forward's or a backward's, and a microbatch's."""
    torch.manual_seed(2)
    model, tokens = Gpt(num_layers=4).double(), torch.randint(0, 16, (8, 8))
    plan = PLANS["megatron"](model, (tokens[:4],))
    (stage,) = plan.stages
    predicted = Counter[str]()
    for one in stage.collectives:
        predicted[one.why] += one.count
    with xm.PipelineEngine(model, (tokens[:4],), plan=plan, loss_fn=F.mse_loss) as engine:
        engine.step(tokens, target=torch.zeros(8, 8, 96, dtype=torch.float64))
        sent = Counter("backward" if one[3] else "forward" for one in engine._place.core.transfers)
        names = {name for _, name, _, _ in engine._place.core.spans}
        engine.timeline("timeline.png")
        engine.trace("trace.json")
        traced = {event["name"] for event in json.loads(Path("trace.json").read_text())["traceEvents"]}
    assert sent["forward"] == 2 * predicted["forward"], (sent, predicted)
    # A way back that each device goes by itself is a transfer, too, in which nothing is sent.
    assert 2 * predicted["backward"] <= sent["backward"] <= sent["forward"], (sent, predicted)
    assert "0F0, segment 1" in names, names
    assert names & {"0B1, segment 3", "0I1, segment 3"}, names
    assert {"value 0, segment 0>1 mb0 out", "gradient 0, segment 1>0 mb1 out"} <= traced, traced


def test_transfers_are_those_that_were_predicted(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    spawn(transfers_as_predicted, 4)


class Raises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = Mlp(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


def is_named(rank: int, world_size: int) -> str:
    torch.manual_seed(1)
    model, x = Raises().double(), torch.randn(16, 64, dtype=torch.float64)
    plan = PLANS["megatron"](model, (x,))
    engine = xm.PipelineEngine(model, (x,), plan=plan, loss_fn=F.mse_loss)
    stage: Any = engine.stage_module(0)
    if rank == 2:
        run = stage.run_segment

        def fails(segment: int, given: Any) -> Any:
            if segment == 2:
                raise FileNotFoundError("no such shard")
            return run(segment, given)

        stage.run_segment = fails
    with pytest.raises(xm.StageError) as caught:
        engine.step(torch.cat([x, x]), target=torch.cat([x, x]))
    engine.close()
    return str(caught.value)


def test_a_segment_is_named() -> None:
    for text in spawn(is_named, 4):
        assert "stage 0, segment 2 failed on rank 2 in microbatch 0 of step 0: FileNotFoundError" in text, text


def is_refused(rank: int, world_size: int) -> None:
    """A file whose segments begin within a layer that each microbatch fetches, and a hook that would not be called."""
    torch.manual_seed(1)
    model, x = Mlp(64, 4).double(), torch.randn(16, 64, dtype=torch.float64)
    plan = xm.presets.zero_3(model, (x,), **{**OPTIONS, "num_layers": 1})
    fields = json.loads(plan.to_json())
    operators = [one["name"] for one in fields["stages"][0]["programs"][0]["operators"]]
    inside = [at for at, name in enumerate(operators) if "linear" in name][1]
    fields["stages"][0]["programs"][0]["segments"] = [0, inside]
    with pytest.raises(ValueError, match=f"a segment that begins with {operators[inside]}, which must be in one with"):
        xm.PipelineEngine(model, (x,), plan=xm.ParallelPlan.from_json(json.dumps(fields)), loss_fn=F.mse_loss)
    with xm.PipelineEngine(model, (x,), plan=PLANS["megatron"](model, (x,)), loss_fn=F.mse_loss) as engine:
        hook = engine.stage_module(0).register_forward_hook(lambda *given: None)
        with pytest.raises(ValueError, match="has a forward hook, which would not be called"):
            engine.step(torch.cat([x, x]), target=torch.cat([x, x]))
        hook.remove()
        engine.step(torch.cat([x, x]), target=torch.cat([x, x]))


def test_what_would_be_divided_is_refused() -> None:
    spawn(is_refused, 4)


def has_many(rank: int, world_size: int) -> None:
    """A stage of 96 segments and more trains."""
    torch.manual_seed(1)
    model, x = Mlp(32, 110).double(), torch.randn(8, 32, dtype=torch.float64)
    plan = xm.presets.megatron(model, (x,), tensor_parallel=2, **{**OPTIONS, "num_layers": 1})
    assert len(plan.stages[0].programs[0].segments) >= 96, plan.stages[0].programs[0].segments
    whole = copy.deepcopy(model)
    with xm.PipelineEngine(model, (x,), plan=plan, loss_fn=F.mse_loss) as engine:
        engine.step(torch.cat([x, x]), target=torch.zeros(16, 32, dtype=torch.float64))
        F.mse_loss(whole(x), torch.zeros_like(x)).backward()  # type: ignore[no-untyped-call]
        for name, parameter in engine.named_parameters():
            torch.testing.assert_close(whole_of(parameter.grad), whole.get_parameter(name).grad)


def test_a_stage_of_many_segments() -> None:
    spawn(has_many, 4, timeout=120)
