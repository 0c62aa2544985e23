"""Plans in which one microbatch computes while another communicates."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from planned_cases import whole_of
from small_models import Gpt
from test_planned_segments import Adds
from torch import nn
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.nn import functional as F

import torch_xmesh as xm
from torch_xmesh.parallelism.overlap import simulated
from torch_xmesh.testing import spawn

plan_parallel_module = importlib.import_module("torch_xmesh.parallelism.plan_parallel")
SLOW = xm.Topology(devices_per_host=2, nic_bytes_per_s=10**7, local_bytes_per_s=10**9)
OPTIONS: dict[str, Any] = {
    "devices": xm.Mesh([[0, 1], [2, 3]]),
    "num_microbatches": 4,
    "compute": xm.Compute(flops=1e9, bytes_per_s=1e10),
    "topology": SLOW,
    "loss_fn": F.mse_loss,
}
DATA_PARALLEL = {"gradient all-reduce", "gradient reduce-scatter", "parameter all-gather"}
ACROSS_HOSTS: dict[str, Any] = {**OPTIONS, "tensor_parallel": 4}
X = torch.zeros(16, 64)


def megatron(model: nn.Module | None = None, x: torch.Tensor = X, **options: Any) -> xm.ParallelPlan:
    return xm.presets.megatron(model or Adds(), (x,), **{**ACROSS_HOSTS, **options})


def segments_of(plan: xm.ParallelPlan) -> tuple[int, ...]:
    return xm.Schedule.from_csv(plan.schedule_csv).num_segments


def test_a_step_is_shorter_and_says_by_how_much() -> None:
    serial, found = megatron(overlap=False), megatron()
    assert max(segments_of(serial)) == 1
    assert max(segments_of(found)) > 2
    assert found.predicted_seconds < 0.9 * serial.predicted_seconds
    assert found.step.serial == serial.predicted_seconds
    assert found.step.compute == serial.step.compute
    assert found.step.collectives == serial.step.collectives
    step = found.step
    assert step.total == pytest.approx(step.compute + step.collectives + step.sums + step.bubble - step.hidden)
    assert step.hidden > 0.5 * min(step.compute, step.collectives)
    assert simulated(found).makespan_seconds == pytest.approx(step.total)


def test_halves_of_the_only_microbatch() -> None:
    found = megatron(num_microbatches=1)
    assert (found.num_microbatches, found.parts) == (2, 2)
    assert [note for note in found.notes if "batch norm" in note]
    assert megatron(num_microbatches=1, overlap=False).num_microbatches == 1
    assert xm.ParallelPlan.from_json(found.to_json()) == found
    other = xm.plan_parallel(Adds(), (X,), **{**OPTIONS, "num_microbatches": 1, "overlap": True})
    assert other.num_microbatches == 2
    odd = xm.presets.megatron(Adds(), (X[:15],), **{**ACROSS_HOSTS, "num_microbatches": 1})
    assert (odd.num_microbatches, odd.parts) == (1, 1)


def refusing_halves() -> dict[str, tuple[nn.Module, torch.Tensor, str]]:
    """Models that cannot be planned in halves."""

    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.linear(x.view(4, 64))
            return out

    normed = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    return {
        "a view of all samples": (Views(), torch.zeros(4, 64), ""),
        "batch norm of one sample": (normed, torch.zeros(2, 64), ""),
        "an odd number": (Adds(), torch.zeros(15, 64), "do not divide into two parts"),
    }


@pytest.mark.parametrize("name", refusing_halves())
def test_halves_that_cannot_be_planned_are_left_out(name: str) -> None:
    model, x, reason = refusing_halves()[name]
    options = {**OPTIONS, "num_microbatches": 1}
    assert xm.plan_parallel(model, (x,), **options).num_microbatches == 1
    asked = xm.plan_parallel(model, (x,), **options, overlap=True)
    assert asked.num_microbatches == 1
    assert [note for note in asked.notes if "not computed in halves" in note and reason in note]


def test_samples_that_do_not_divide_into_as_many_halves() -> None:
    """Four samples are one for each device, and two are not."""
    plan = xm.presets.data_parallel(Adds(), (X[:4],), **{**OPTIONS, "num_microbatches": 1})
    assert (plan.num_microbatches, plan.parts) == (1, 1)


def test_halves_keep_a_limit_that_the_whole_does_not() -> None:
    whole = megatron(num_microbatches=1, overlap=False).stages[0].bytes
    half = megatron(num_microbatches=2, x=X[:8], overlap=False).stages[0].bytes
    between = round((whole.total(1) + half.total(1)) / 2)
    plan = megatron(num_microbatches=1, memory_limit_bytes=between)
    assert plan.parts == 2
    assert plan.predicted_bytes(0) <= between
    with pytest.raises(ValueError, match="does not keep memory_limit_bytes"):
        megatron(num_microbatches=1, memory_limit_bytes=between, overlap=False)
    with pytest.raises(ValueError, match=f"a device would hold {round(half.total(1))} bytes"):
        megatron(num_microbatches=1, memory_limit_bytes=round(half.total(1)) - 1)


def test_microbatches_of_which_memory_holds_one_are_halved() -> None:
    """They are not where two fit, nor for a plan that moves nothing among a stage's devices."""
    serial = megatron(overlap=False)
    one = serial.stages[0].peak_bytes
    for schedule in ("auto", "duplex"):
        plan = megatron(memory_limit_bytes=one, schedule=schedule)
        assert (plan.num_microbatches, plan.parts) == (8, 2)
        assert plan.stages[0].peak_bytes <= one
        assert plan.stages[0].in_flight == 2
        assert plan.predicted_seconds < 0.9 * serial.predicted_seconds
        assert megatron(memory_limit_bytes=2 * one, schedule=schedule).parts == 1
    copies = xm.presets.data_parallel(Adds(), (X,), **OPTIONS, overlap=False)
    assert xm.presets.data_parallel(Adds(), (X,), **OPTIONS, memory_limit_bytes=copies.stages[0].peak_bytes).parts == 1
    assert megatron(memory_limit_bytes=one, overlap=False).parts == 1
    odd = megatron(x=X[:15], overlap=False).stages[0].peak_bytes
    assert megatron(x=X[:15], memory_limit_bytes=odd).parts == 1
    with pytest.raises(ValueError, match="does not keep memory_limit_bytes"):
        megatron(memory_limit_bytes=one // 2, schedule="duplex")


def test_the_time_that_ends_in_halves_leaves_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    made = plan_parallel_module._searched

    def searched(subject: Any, *others: Any) -> Any:
        if subject.parts > 1:
            raise ValueError("max_seconds were over before a plan was found")
        return made(subject, *others)

    monkeypatch.setattr(plan_parallel_module, "_searched", searched)
    plan = xm.plan_parallel(Adds(), (X,), **{**OPTIONS, "num_microbatches": 1}, max_seconds=100)
    assert plan.num_microbatches == 1


def test_duplex_keeps_the_limit_or_is_refused() -> None:
    """Where a limit has no room for a pair of microbatches there may be room for a pair of halves."""
    held = megatron(schedule="duplex").stages[0].peak_bytes
    kept = megatron(schedule="duplex", memory_limit_bytes=held)
    assert (kept.schedule, kept.parts) == ("duplex", 1)
    halved = megatron(schedule="duplex", memory_limit_bytes=held - 1)
    assert (halved.schedule, halved.parts) == ("duplex", 2)
    least = halved.stages[0].peak_bytes
    assert least < held
    with pytest.raises(ValueError, match=f"a device would hold {least} bytes"):
        megatron(schedule="duplex", memory_limit_bytes=least - 1)


def test_what_is_asked_for_and_cannot_be_is_noted() -> None:
    long = megatron(num_microbatches=3000, overlap=True)
    assert max(segments_of(long)) == 1
    assert [note for note in long.notes if "no order is searched for" in note]


def test_collectives_have_one_price() -> None:
    plan = megatron()
    seconds = plan.stages[0].seconds
    assert plan.step.collectives == pytest.approx(4 * (seconds.forward_collectives + seconds.backward_collectives))


def test_torn_files() -> None:
    plan = megatron()
    fields = json.loads(plan.to_json())
    count = len(plan.stages[0].segments)
    for change, expected in (
        ({"segments": fields["stages"][0]["segments"][:-1]}, f"{count - 1} segments, its program has {count}"),
        ({"segments": [], "edges": []}, "an order of segments, of which"),
        ({"edges": [{**fields["stages"][0]["edges"][0], "to_segment": 99}]}, "to 99 of"),
        ({"edges": [{**fields["stages"][0]["edges"][0], "from_segment": -1}]}, "from segment -1"),
        ({"edges": 2 * fields["stages"][0]["edges"]}, "edges"),
    ):
        torn = {**fields, "stages": [{**fields["stages"][0], **change}]}
        with pytest.raises(ValueError, match=expected):
            xm.ParallelPlan.from_json(json.dumps(torn))


def test_nothing_is_split_where_that_is_slower() -> None:
    """Links whose messages take long: twice as many take twice as long."""
    late = xm.Topology(devices_per_host=2, nic_bytes_per_s=10**12, local_bytes_per_s=10**12, latency_us=5000)
    assert megatron(num_microbatches=1, topology=late).num_microbatches == 1


def test_duplex_by_name() -> None:
    plan = megatron(schedule="duplex")
    assert plan.schedule == "duplex"
    count = segments_of(plan)[0]
    actions = xm.Schedule.from_csv(plan.schedule_csv).actions(0)
    forward = [f"0.{segment}F{microbatch}" for segment in range(count) for microbatch in (0, 1)]
    backward = [f"0.{segment}B{microbatch}" for segment in reversed(range(count)) for microbatch in (0, 1)]
    assert actions[: 4 * count] == [*forward, *backward]
    three = megatron(schedule="duplex", num_microbatches=3)
    assert xm.Schedule.from_csv(three.schedule_csv).actions(0)[-1] == "0.0B2"
    two = xm.presets.pipeline(
        Gpt(num_layers=4), (torch.zeros(8, 16, dtype=torch.int64),), num_stages=2, **_gpt("duplex")
    )
    assert two.schedule == "duplex"


def test_what_says_how_much_is_hidden() -> None:
    text = str(megatron())
    assert "of its collectives are under computation" in text
    assert "without that a step takes" in text
    assert "without that" not in str(megatron(overlap=False))
    alone = xm.presets.data_parallel(Adds(), (X,), **{**OPTIONS, "schedule": "duplex"})
    assert "note: schedule='duplex': nothing is hidden" in str(alone)


def _gpt(schedule: str) -> dict[str, Any]:
    return {**OPTIONS, "loss_fn": None, "tensor_parallel": 2, "schedule": schedule}


def test_the_limit_of_memory_is_kept() -> None:
    free = megatron(num_microbatches=8)
    held = {number: stage.bytes for number, stage in enumerate(free.stages)}[0]
    for in_flight in (1, 2, 3):
        limit = round(held.total(in_flight)) + 1
        plan = megatron(num_microbatches=8, memory_limit_bytes=limit)
        assert plan.stages[0].in_flight <= in_flight * plan.parts
        assert plan.predicted_bytes(0) <= limit


def test_mistakes() -> None:
    with pytest.raises(ValueError, match='overlap is "auto", True or False, got 2'):
        megatron(overlap=2)
    with pytest.raises(ValueError, match="overlap=True orders segments itself"):
        megatron(overlap=True, schedule="1f1b")
    with pytest.raises(ValueError, match='schedule="duplex"'):
        megatron(overlap=False, schedule="duplex")
    with pytest.raises(ValueError, match="plan_parallel or presets"):
        xm.Schedule.make("duplex", 2, 4)
    plan = megatron()
    last = segments_of(plan)[0] - 1
    actions = xm.Schedule.from_csv(plan.schedule_csv).actions(0)
    torn = ",".join(action for action in actions if not action.startswith(f"0.{last}"))
    with pytest.raises(ValueError, match=f"{last} segments of stage 0, its programs have"):
        xm.ParallelPlan.from_json(dataclasses.replace(plan, schedule_csv=torn).to_json())


def trains(rank: int, world_size: int, options: dict[str, Any]) -> None:
    """Losses and gradients are those of accumulation over the same microbatches, bit for bit those of the same plan in
    the order of whole stages; and those of one process."""
    torch.manual_seed(1)
    model, x = Adds().double(), torch.randn(16, 64, dtype=torch.float64)
    if "memory_limit_bytes" in options:
        options["memory_limit_bytes"] = megatron(model, x, overlap=False).stages[0].peak_bytes
    plan = megatron(model, x, **options)
    assert max(segments_of(plan)) > 2
    assert plan.parts == (2 if "memory_limit_bytes" in options or options.get("num_microbatches") == 1 else 1)
    serial = xm.Schedule.make("1f1b", 1, plan.num_microbatches)
    split = xm.Schedule.make("zb_h1", 1, plan.num_microbatches)
    kept = []
    for schedule in (None, split if "I0" in plan.schedule_csv else serial):
        own = (
            plan
            if schedule is None
            else dataclasses.replace(plan, schedule="of stages", schedule_csv=schedule.to_csv())
        )
        batch = torch.cat([x] * (plan.num_microbatches // plan.parts))
        losses: list[torch.Tensor] = []
        with xm.PipelineEngine(copy.deepcopy(model), (x,), plan=own, loss_fn=F.mse_loss) as engine:
            engine.step(batch, target=torch.ones_like(batch), losses=losses)
            assert len(losses) == plan.num_microbatches
            kept.append([*losses, *(whole_of(parameter.grad).clone() for _, parameter in engine.named_parameters())])
            names = [name for name, _ in engine.named_parameters()]
    torch.testing.assert_close(kept[0], kept[1], rtol=0, atol=0)
    F.mse_loss(model(batch), torch.ones_like(batch)).backward()  # type: ignore[no-untyped-call]
    for name, found in zip(names, kept[0][plan.num_microbatches :], strict=True):
        torch.testing.assert_close(found, model.get_parameter(name).grad, rtol=1e-9, atol=1e-12)


def refuses_other_dims(rank: int, world_size: int) -> None:
    plan = megatron(num_microbatches=1)
    assert plan.parts == 2
    with pytest.raises(ValueError, match="cuts each microbatch into 2 parts along dim 0"):
        xm.PipelineEngine(Adds(), (X,), plan=plan, loss_fn=F.mse_loss, args_chunk_spec=(TensorChunkSpec(1),))  # type: ignore[no-untyped-call]


def test_halves_of_samples_along_another_dim_are_refused() -> None:
    spawn(refuses_other_dims, 4)


@pytest.mark.parametrize(
    "options",
    [{}, {"num_microbatches": 1}, {"num_microbatches": 3}, {"schedule": "duplex"}, {"memory_limit_bytes": "one"}],
    ids=str,
)
def test_training_is_exact(options: dict[str, Any]) -> None:
    spawn(trains, 4, options)


def sparse_models() -> Any:
    """Those of examples/models."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "models"))
    return importlib.import_module("sparse")


def learns(rank: int, world_size: int, num_steps: int) -> None:
    """A step's loss is one process's, step by step, to the last one."""
    torch.manual_seed(0)
    model = sparse_models().bert(1, 1.25, width=16, depth=4, length=16, experts=8).double()
    tokens, following = torch.randint(256, (2, 16, 16)).unbind()

    def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())

    options = {**OPTIONS, "devices": xm.Mesh([[0], [1]]), "num_microbatches": 1, "loss_fn": loss_of}
    options |= {"overlap": True, "num_layers": 1}
    options["topology"] = xm.Topology(devices_per_host=1, nic_bytes_per_s=10**7, local_bytes_per_s=10**9)
    plan = xm.plan_parallel(model, (tokens,), **options)
    assert plan.parts == 2
    assert max(segments_of(plan)) > 2, str(plan)
    whole = copy.deepcopy(model)
    with xm.PipelineEngine(model, (tokens,), plan=plan, loss_fn=loss_of) as engine:
        optimizers = [torch.optim.Adam(parameters, 1e-2) for parameters in (engine.parameters(), whole.parameters())]
        losses = []
        for _ in range(num_steps):
            engine.step(tokens, target=following)
            loss = loss_of(whole(tokens), following)
            loss.backward()  # type: ignore[no-untyped-call]
            assert engine.last_loss() == pytest.approx(loss.item(), rel=1e-6)
            losses.append(loss.item())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("num_steps", [10, pytest.param(200, marks=pytest.mark.soak)])
def test_training_goes_as_in_one_process(num_steps: int) -> None:
    spawn(learns, 2, num_steps, timeout=300)


def strategy_of(model: nn.Module, tokens: torch.Tensor, hosts: int, nic_bytes_per_s: int) -> set[str]:
    """The collectives of the plan that is found, which is no slower than data parallel by hand."""
    options: dict[str, Any] = {
        "devices": xm.Mesh(torch.arange(hosts)[:, None]),
        "num_microbatches": 2,
        "compute": xm.Compute(flops=1e10, bytes_per_s=1e12),
        "topology": xm.Topology(devices_per_host=1, nic_bytes_per_s=nic_bytes_per_s),
        "schedule": "1f1b",
    }
    plan = xm.plan_parallel(model, (tokens,), **options)
    by_hand = xm.presets.data_parallel(model, (tokens,), **options)
    assert plan.predicted_seconds <= 1.01 * by_hand.predicted_seconds
    return {f"{one.why} {one.collective}" for stage in plan.stages for one in stage.collectives}


def test_clusters_and_models_get_the_strategies_that_people_give_them() -> None:
    """Many experts lie on different devices, and tokens go to them by all-to-all; few are copied, and the batch is
    divided, as a model without experts has it."""
    sparse = sparse_models()
    tokens = torch.zeros(16, 64, dtype=torch.int64)
    many, few = (sparse.bert(2, 2.5, depth=4, experts=number) for number in (64, 4))
    assert "forward all-to-all" in strategy_of(many, tokens, 4, 10**7)
    assert strategy_of(few, torch.cat([tokens] * 16), 4, 10**10) <= DATA_PARALLEL
    assert strategy_of(sparse.dense_bert(depth=4), torch.cat([tokens] * 16), 4, 10**10) <= DATA_PARALLEL
