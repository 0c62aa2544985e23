"""Planned stages that are divided into segments: what goes between those goes by transfers, and all else is as if they
were not."""

from __future__ import annotations

import copy
import itertools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from planned_cases import OPTIONS, train_alike, whole_of
from small_models import Gpt, Mlp
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import torch_xmesh as xm
from torch_xmesh.parallelism.running import parcels
from torch_xmesh.parallelism.running.calls import OperatorCall
from torch_xmesh.parallelism.running.collectives import Moves
from torch_xmesh.parallelism.running.fetching import FetchedLayer, Underway
from torch_xmesh.parallelism.running.parameters import StageParameters
from torch_xmesh.parallelism.running.parcels import Parcel, Sent
from torch_xmesh.testing import spawn

PLANS: dict[str, Callable[..., xm.ParallelPlan]] = {
    "megatron": lambda *args: xm.presets.megatron(*args, tensor_parallel=2, **OPTIONS),
    "two stages": lambda *args: xm.presets.pipeline(*args, num_stages=2, tensor_parallel=2, **OPTIONS),
}


def undivided(plan: xm.ParallelPlan) -> xm.ParallelPlan:
    """The same plan; collectives run inside of its stages."""
    fields = json.loads(plan.to_json())
    for stage in fields["stages"]:
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
    assert {"0F0, segment 1", "0B1, segment 3"} <= names, names
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


class Shares(nn.Module):
    """One layer, several times, each time in another segment."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 256), nn.Linear(256, 64)
        self.last = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for last in self.last:
            x = x + last(self.second(self.first(x).relu()).relu())
        return x


def gradients_leave(rank: int, world_size: int) -> None:
    """Those to which nothing is added any more are on their way while backward goes on; a layer of several segments has
    an accumulator in each, and is whole when the first of them is through."""
    torch.manual_seed(1)
    model, x = Shares().double(), torch.randn(16, 64, dtype=torch.float64)
    events: list[tuple[str, Any]] = []
    start, done = Parcel.start, StageParameters.weights_done

    def started(self: Parcel, transfers: Any, lane: str, parts: Any, why: str) -> Sent:
        events.append((why, [member.name for member in self.members]))
        return start(self, transfers, lane, parts, why)

    def told(self: StageParameters, segment: int, microbatch: int, is_last: bool) -> None:
        events.append(("done", (segment, microbatch, is_last)))
        done(self, segment, microbatch, is_last)

    Parcel.start, StageParameters.weights_done = started, told  # type: ignore[method-assign]
    parcels._PARCEL_BYTES = 1 << 12
    train_alike(model, torch.cat([x, x]), torch.ones(32, 64, dtype=torch.float64), PLANS["megatron"](model, (x,)), 1)
    left = {name: at for at, (why, names) in enumerate(events) if why == "gradient" for name in names}
    ends = {what[0]: at for at, (why, what) in enumerate(events) if why == "done" and what[2]}
    assert set(left) == {name for name, _ in model.named_parameters()}
    assert left["last.2.weight"] < ends[0], "the last layer's leave before the first segment's are there"
    assert left["last.2.weight"] < left["last.1.weight"] < left["last.0.weight"]
    assert left["first.weight"] > max(ends[segment] for segment in ends if segment > 0)
    assert [what for why, what in events if why == "done" and what[2]] == [(at, 1, True) for at in sorted(ends)[::-1]]


def test_gradients_leave_once_they_are_there() -> None:
    spawn(gradients_leave, 4)


class Again(nn.Module):
    """Layers that backward computes again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def fetches_ahead(rank: int, world_size: int, is_again: bool) -> None:
    """While a layer is computed the next one's parameters are on their way, forward and backward, and the gradients of
    the one behind it; no others are. Layers that are computed again are fetched by each for itself."""
    torch.manual_seed(1)
    model = (Again() if is_again else Mlp(64, 4)).double()
    x = torch.randn(16, 64, dtype=torch.float64)
    events: list[str] = []
    start, wait, run = FetchedLayer.start, Underway.wait, OperatorCall.run

    def started(self: FetchedLayer, parts: Any, why: str, *, is_back: bool = False) -> Underway:
        out = start(self, parts, why, is_back=is_back)
        named[id(out)] = f"{'gradients' if is_back else why} {self.parameters[0].name.split('.')[1]}"
        kept.append(out)
        events.append(f"start {named[id(out)]}")
        return out

    def waited(self: Underway) -> Any:
        events.append(f"wait {named[id(self)]}")
        return wait(self)

    def ran(self: OperatorCall, parts: Any) -> None:
        events.append("run")
        run(self, parts)

    named: dict[int, str] = {}
    kept: list[Underway] = []
    FetchedLayer.start, Underway.wait, OperatorCall.run = started, waited, ran  # type: ignore[method-assign]
    plan = xm.presets.zero_3(model, (x,), **{**OPTIONS, "num_layers": 4, "num_microbatches": 2})
    with xm.PipelineEngine(model, (x,), plan=plan, loss_fn=F.mse_loss) as engine:
        engine.step(torch.cat([x, x]), target=torch.cat([x, x]))
    assert whole_of(next(iter(engine.parameters())).grad).any()
    half = (len(events) - 2) // 2  # the last gradients of both come in the second half
    for mine in (events[:half], events[half:]):
        of_forward = mine.index("run", mine.index("wait forward 3")) + 1
        assert [event for event, _ in itertools.groupby(mine[:of_forward])] == [
            *("start forward 0", "wait forward 0", "start forward 1", "run", "wait forward 1", "start forward 2"),
            *("run", "wait forward 2", "start forward 3", "run", "wait forward 3", "run"),
        ], events
        backward = [event for event in mine[of_forward:] if event not in {"run", "wait gradients 0"}]
        again = [
            *("start forward 3", "wait forward 3", "start gradients 3", "start forward 2", "wait forward 2"),
            *("wait gradients 3", "start gradients 2", "start forward 1", "wait forward 1", "wait gradients 2"),
            *("start gradients 1", "start forward 0", "wait forward 0", "wait gradients 1", "start gradients 0"),
        ]
        read = [  # nobody wants the input's gradient: layer 0's parameters are not read
            *("start backward 3", "wait backward 3", "start backward 2", "start gradients 3"),
            *("wait backward 2", "start backward 1", "wait gradients 3", "start gradients 2"),
            *("wait backward 1", "wait gradients 2", "start gradients 1", "wait gradients 1", "start gradients 0"),
        ]
        assert backward == (again if is_again else read), events


def test_layers_are_fetched_ahead() -> None:
    spawn(fetches_ahead, 4, False)


def test_layers_of_checkpoints_are_fetched_ahead() -> None:
    spawn(fetches_ahead, 4, True)


def same_bits(rank: int, world_size: int) -> None:
    """A layer that several segments read has the same gradients, whatever the order of the schedule."""
    torch.manual_seed(1)
    model, x = Shares().double(), torch.randn(16, 64, dtype=torch.float64)
    for more in ({}, {"zero": 2}, {"zero": 3}):
        found = []
        for schedule in ("gpipe", "1f1b", "interleaved_zb"):
            options = {**OPTIONS, "num_microbatches": 4, "schedule": schedule, **more}
            plan = xm.presets.pipeline(model, (x,), num_stages=1, tensor_parallel=2, **options)
            assert len(plan.stages[0].programs[0].segments) > 6 or more == {"zero": 3}
            with xm.PipelineEngine(copy.deepcopy(model), (x,), plan=plan, loss_fn=F.mse_loss) as engine:
                engine.step(torch.cat([x, x + 1, x.flip(0), -x]), target=torch.ones(64, 64, dtype=torch.float64))
                engine.evaluate(torch.cat([x, x, x, x]), target=torch.ones(64, 64, dtype=torch.float64))
                found.append({name: whole_of(one.grad) for name, one in engine.named_parameters()})
        for other in found[1:]:
            torch.testing.assert_close(other, found[0], rtol=0, atol=0)


def test_the_order_of_actions_changes_no_bit() -> None:
    spawn(same_bits, 4)


class Auxiliary(nn.Module):
    """A layer that training alone has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.extra, self.last = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).relu()
        if self.training:
            hidden = hidden + self.extra(hidden)
        out: torch.Tensor = self.last(hidden)
        return out


def evaluates_without(rank: int, world_size: int) -> None:
    """What an evaluation fetches and does not read keeps nobody."""
    parcels._PARCEL_BYTES = 1
    torch.manual_seed(1)
    model, x = Auxiliary().double(), torch.randn(16, 64, dtype=torch.float64)
    whole, batch, target = copy.deepcopy(model), torch.cat([x, x + 1]), torch.ones(32, 64, dtype=torch.float64)
    plan = xm.presets.zero_2(model, (x,), **OPTIONS)
    assert plan.one_mode_because is None or not plan.one_mode_because, plan.one_mode_because
    with xm.PipelineEngine(model, (x,), plan=plan, loss_fn=F.mse_loss) as engine:
        for _ in range(2):
            engine.train()
            engine.step(batch, target=target)
            engine.eval()
            engine.evaluate(batch, target=target)
            whole.train()
            F.mse_loss(whole(batch), target).backward()  # type: ignore[no-untyped-call]
            assert engine.last_loss() == pytest.approx(F.mse_loss(whole.eval()(batch), target).item())
            for parameters in (list(engine.parameters()), list(whole.parameters())):
                torch.optim.SGD(parameters, 0.1).step()
                for parameter in parameters:
                    parameter.grad = None
        for name, parameter in engine.named_parameters():
            torch.testing.assert_close(whole_of(parameter), whole.get_parameter(name).data)


def test_what_evaluation_does_not_read() -> None:
    spawn(evaluates_without, 4)


def waits_for_nobody(rank: int, world_size: int) -> None:
    """The W of a first stage that fetches its parameters is all of its backward: none runs before its turn, where
    another device of the stage is not."""
    torch.manual_seed(1)
    model, x = Mlp(64, 4).double(), torch.randn(16, 64, dtype=torch.float64)
    options = {**OPTIONS, "num_microbatches": 8, "schedule": "eager_split"}
    plan = xm.presets.pipeline(model, (x,), num_stages=2, zero=3, **options)
    whole, batch = copy.deepcopy(model), torch.randn(128, 64, dtype=torch.float64)
    early = 0
    with xm.PipelineEngine(model, (x,), plan=plan, loss_fn=F.mse_loss) as engine:
        for _ in range(3):
            engine.step(batch, target=torch.ones_like(batch))
            F.mse_loss(whole(batch), torch.ones_like(batch)).backward()  # type: ignore[no-untyped-call]
            early += sum(engine._place.core.may_run_early(stage) for stage in engine._place.stages)
        for name, parameter in engine.named_parameters():
            torch.testing.assert_close(whole_of(parameter.grad), whole.get_parameter(name).grad)
    assert early == 0


def test_what_is_fetched_is_in_no_early_weights() -> None:
    spawn(waits_for_nobody, 4)
