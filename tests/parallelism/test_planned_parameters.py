"""What of a planned stage's parameters moves in a step: gradients while backward goes on, and what each microbatch
fetches (ZeRO-3) a layer ahead."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from planned_cases import OPTIONS, train_alike, whole_of
from small_models import Mlp
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import torch_xmesh as xm
from torch_xmesh.parallelism.running import parcels
from torch_xmesh.parallelism.running.calls import OperatorCall
from torch_xmesh.parallelism.running.fetching import FetchedLayer, Underway
from torch_xmesh.parallelism.running.parameters import StageParameters
from torch_xmesh.parallelism.running.parcels import Parcel, Sent
from torch_xmesh.testing import spawn


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
    train_alike(
        model,
        torch.cat([x, x]),
        torch.ones(32, 64, dtype=torch.float64),
        xm.presets.megatron(model, (x,), tensor_parallel=2, **OPTIONS),
        1,
    )
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
