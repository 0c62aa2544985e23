"""Plans played with their schedules: no schedule beats the bound, and the best of several is as good as each alone."""

from __future__ import annotations

import itertools

import pytest
import torch
from small_models import Gpt

import torch_xmesh as xm
from torch_xmesh.parallelism.judge import Judge
from torch_xmesh.parallelism.stages import FoundPlan, StageSearch, in_flight_of
from torch_xmesh.parallelism.subjects import subject_of
from torch_xmesh.pipeline.schedule.schedule import Schedule
from torch_xmesh.pipeline.schedule.simulation import simulate

TOKENS = torch.zeros(8, 16, dtype=torch.int64)
MICROBATCHES = 6


@pytest.fixture(scope="module", params=[10**8, 10**10])
def judge_and_plans(request: pytest.FixtureRequest) -> tuple[Judge, list[FoundPlan]]:
    subject = subject_of(
        Gpt(num_layers=4),
        (TOKENS,),
        devices=xm.Mesh([[0, 1], [2, 3]]),
        num_microbatches=MICROBATCHES,
        compute=xm.Compute(flops=1e11, bytes_per_s=1e10),
        topology=xm.Topology(devices_per_host=2, nic_bytes_per_s=request.param, local_bytes_per_s=10**10),
    )
    search = StageSearch(
        subject.layers,
        subject.cluster,
        num_microbatches=MICROBATCHES,
        collectives=subject.collectives,
        in_flight=in_flight_of(subject.schedule, subject.layers, subject.cluster, MICROBATCHES),
    )
    return Judge(subject.cluster, MICROBATCHES, subject.schedule), search.best(10)


def test_no_schedule_takes_less_than_the_bound(judge_and_plans: tuple[Judge, list[FoundPlan]]) -> None:
    judge, plans = judge_and_plans
    assert len({len(plan.stages) for plan in plans}) > 1
    for plan in plans:
        played = judge._played(plan)
        for name in Schedule.names():
            try:
                schedule = Schedule.make(name, len(plan.stages), MICROBATCHES)
            except ValueError:
                continue  # it is for another number of stages
            judged = judge._judged(played, schedule)
            assert judged is not None
            assert judged.step_seconds >= played.least_seconds * (1 - 1e-12)
            assert judged.step_seconds >= simulate(schedule, played.costs).makespan_seconds * (1 - 1e-12)


def test_the_best_is_as_good_as_each(judge_and_plans: tuple[Judge, list[FoundPlan]]) -> None:
    judge, plans = judge_and_plans
    best = judge.best(plans)
    assert best is not None
    alone = [judged for judged in map(judge.judged, plans) if judged is not None]
    assert len(alone) == len(plans)
    assert best.step_seconds == pytest.approx(min(one.step_seconds for one in alone), rel=1e-12)
    assert judge.best([]) is None


def test_the_end_of_the_time_leaves_the_best_so_far(judge_and_plans: tuple[Judge, list[FoundPlan]]) -> None:
    judge, plans = judge_and_plans
    asked = itertools.count()
    first = judge.best(plans, lambda: next(asked) < 0)
    assert first is not None
    assert first.plan is plans[0]
    assert first.schedule.name in ("1f1b", "eager_1f1b")


def test_an_interrupt_leaves_the_best_so_far(judge_and_plans: tuple[Judge, list[FoundPlan]]) -> None:
    judge, plans = judge_and_plans
    asked = itertools.count()

    def interrupted() -> bool:
        if next(asked) == 2:
            raise KeyboardInterrupt
        return True

    best = judge.best(plans, interrupted)
    assert best is not None
    assert best.plan in plans[:3]

    def at_once(plan: FoundPlan) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judge, "_played", at_once)
        with pytest.raises(KeyboardInterrupt):
            judge.best(plans)
