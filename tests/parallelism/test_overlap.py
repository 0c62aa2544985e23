"""Plans in which one microbatch computes while another communicates."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from planned_cases import whole_of
from small_models import Gpt
from test_planned_segments import Adds
from torch import nn
from torch.nn import functional as F

import torch_xmesh as xm
from torch_xmesh.parallelism.overlap import simulated
from torch_xmesh.testing import spawn

SLOW = xm.Topology(devices_per_host=2, nic_bytes_per_s=10**7, local_bytes_per_s=10**9)
OPTIONS: dict[str, Any] = {
    "devices": xm.Mesh([[0, 1], [2, 3]]),
    "num_microbatches": 4,
    "compute": xm.Compute(flops=1e9, bytes_per_s=1e10),
    "topology": SLOW,
    "loss_fn": F.mse_loss,
}
ACROSS_HOSTS: dict[str, Any] = {**OPTIONS, "tensor_parallel": 4}
X = torch.zeros(16, 64)


def megatron(model: nn.Module | None = None, **options: Any) -> xm.ParallelPlan:
    return xm.presets.megatron(model or Adds(), (X,), **{**ACROSS_HOSTS, **options})


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
    assert "with segments one after the other a step takes" in text
    assert "one after the other" not in str(megatron(overlap=False))
    alone = xm.presets.data_parallel(Adds(), (X,), **{**OPTIONS, "schedule": "duplex"})
    assert "note: schedule duplex: nothing can be hidden" in str(alone)


def _gpt(schedule: str) -> dict[str, Any]:
    return {**OPTIONS, "loss_fn": None, "tensor_parallel": 2, "schedule": schedule}


def test_the_limit_of_memory_is_kept() -> None:
    free = megatron(num_microbatches=8)
    held = {number: stage.bytes for number, stage in enumerate(free.stages)}[0]
    for in_flight in (1, 2, 3):
        limit = round(held.total(in_flight)) + 1
        plan = megatron(num_microbatches=8, memory_limit_bytes=limit)
        assert plan.stages[0].in_flight <= in_flight
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
    plan = xm.presets.megatron(model, (x,), **{**ACROSS_HOSTS, **options})
    assert max(segments_of(plan)) > 2
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


@pytest.mark.parametrize(
    "options", [{}, {"num_microbatches": 1}, {"num_microbatches": 3}, {"schedule": "duplex"}], ids=str
)
def test_training_is_exact(options: dict[str, Any]) -> None:
    spawn(trains, 4, options)
