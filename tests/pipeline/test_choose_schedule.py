"""Choosing a schedule by simulation: never slower than any other, within its limit, the same every time."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st

import torch_xmesh as xm
from torch_xmesh.pipeline.schedule.schedule import chain_edges
from xmesh_cli.main import main


def costs_of(num_stages: int, ratio: float, seed: int | None = None, **options: object) -> xm.Costs:
    """Stages of 100 ms for F, I and W each, or of random costs; transfers take `ratio` of F."""
    rng = random.Random(seed)

    def about() -> float:
        return 0.1 if seed is None else rng.uniform(0.05, 0.2)

    stages = [
        xm.StageCosts(
            forward_seconds=about(),
            backward_input_seconds=about(),
            backward_weight_seconds=about(),
            activation_bytes=100,
            weight_bytes=60,
            fixed_bytes=10,
        )
        for _ in range(num_stages)
    ]
    return xm.Costs(stages=stages, edges=dict.fromkeys(chain_edges(num_stages), 0.1 * ratio), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("microbatches", "ratio"), [(16, 0.0), (16, 0.5), (16, 1.0), (8, 0.5), (8, 1.0)])
@pytest.mark.parametrize("early", [False, True])
def test_nearly_as_fast_as_possible(microbatches: int, ratio: float, early: bool) -> None:
    """No order is faster than the last stage, which begins when the first microbatch has come and never waits."""
    choice = xm.choose_schedule(costs_of(4, ratio, early_weights=early), num_stages=4, num_microbatches=microbatches)
    bound = 0.1 * (3 * microbatches + 3 * (1 + ratio))
    assert bound <= choice.predicted_seconds + 1e-9
    assert choice.predicted_seconds <= 1.02 * bound


@hypothesis.given(
    places=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    skips=st.sets(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=3),
    microbatches=st.integers(1, 9),
    ratio=st.sampled_from([0.0, 0.5, 1.5]),
    seed=st.integers(0, 99),
)
@hypothesis.settings(max_examples=40)
def test_never_slower_than_a_named_one(
    places: list[int], skips: set[tuple[int, int]], microbatches: int, ratio: float, seed: int
) -> None:
    """Also where values skip stages, some of them without a gradient."""
    places = [sorted(set(places)).index(place) for place in places]
    costs = costs_of(len(places), ratio, seed)
    more = {
        (first, last): xm.EdgeCosts(forward_seconds=0.1 * ratio, has_gradient=(first + last) % 2 == 0)
        for first, last in sorted(skips)
        if first + 1 < last < len(places)
    }
    costs = dataclasses.replace(costs, edges={**(costs.edges or {}), **more})
    options = {"num_stages": len(places), "num_microbatches": microbatches, "place_of_stage": places}
    choice = xm.choose_schedule(costs, **options)  # type: ignore[arg-type]
    best = choice.candidates[0]
    for name in xm.Schedule.names():
        named = xm.Schedule.make(name, len(places), microbatches, place_of_stage=places)
        runs = [costs, *(dataclasses.replace(costs, noise=0.04, noise_seed=number) for number in range(1, 5))]
        steps = [xm.simulate(named, run).makespan_seconds for run in runs]
        assert best.noisy_seconds <= sum(steps) / len(steps) + 1e-9
    for one in choice.candidates:
        one.schedule.validate()
        simulation = xm.simulate(one.schedule, costs)
        assert simulation.makespan_seconds == pytest.approx(one.step_seconds)
        assert simulation.peak_bytes == one.peak_bytes
        assert one.noisy_seconds >= best.noisy_seconds
    assert str(xm.choose_schedule(costs, **options)) == str(choice)  # type: ignore[arg-type]
    least = min(max(one.peak_bytes) for one in choice.candidates)
    tight = xm.choose_schedule(costs, memory_limit_bytes=least, **options)  # type: ignore[arg-type]
    assert max(tight.predicted_peak_bytes) <= least


def test_a_limit() -> None:
    costs = costs_of(4, 1.0)
    free = xm.choose_schedule(costs, num_stages=4, num_microbatches=16)
    assert max(free.predicted_peak_bytes) > 510
    tight = xm.choose_schedule(costs, num_stages=4, num_microbatches=16, memory_limit_bytes=510)
    assert max(tight.predicted_peak_bytes) <= 510
    assert tight.predicted_seconds > free.predicted_seconds
    assert "over the limit" in str(tight)
    assert tight.predicted_seconds < xm.simulate(xm.Schedule.make("1f1b", 4, 16), costs).makespan_seconds
    with pytest.raises(ValueError, match="no schedule keeps memory_limit_bytes=109: the smallest limit .* is 110"):
        xm.choose_schedule(costs, num_stages=4, num_microbatches=16, memory_limit_bytes=109)
    assert xm.choose_schedule(costs, num_stages=4, num_microbatches=16, memory_limit_bytes=110)


def test_early_weights_are_what_the_simulation_says() -> None:
    """Stage 0 waits for its gradients from 2 s on; its only W is ready only after them, the other stage's at once."""
    stage = xm.StageCosts(forward_seconds=1.0, backward_input_seconds=1.0, backward_weight_seconds=1.0)
    schedule = xm.Schedule.from_csv("0F0,0F1,0I0,0I1,0W0,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n")
    plain = xm.Costs(stages=[stage] * 2, edges={(0, 1): 1.5})
    late, early = (
        xm.simulate(schedule, costs)
        for costs in (plain, xm.Costs(stages=[stage] * 2, edges={(0, 1): 1.5}, early_weights=True))
    )
    assert early.makespan_seconds < late.makespan_seconds
    for simulation in (late, early):
        assert sorted(span.action for span in simulation.actions) == sorted(
            action for place in (0, 1) for action in schedule.actions(place)
        )
    only_first = xm.simulate(schedule, xm.Costs(stages=[stage] * 2, edges={(0, 1): 1.5}, early_weights=[0]))
    assert early.makespan_seconds <= only_first.makespan_seconds <= late.makespan_seconds


def test_early_weights_only_where_they_help() -> None:
    """In zb_h1 every wait of a W's length has its W: one begun just before a gradient comes delays all behind it. A
    list made for few microbatches in flight is helped by them."""
    costs = costs_of(4, 0.0, early_weights=True)
    choice = xm.choose_schedule(costs, num_stages=4, num_microbatches=8)
    zb_h1 = next(one for one in choice.candidates if one.schedule.name == "zb_h1")
    assert not zb_h1.early_weights
    costs = costs_of(4, 0.5, early_weights=True)
    choice = xm.choose_schedule(costs, num_stages=4, num_microbatches=16)
    planned = next(one for one in choice.candidates if one.schedule.name == "planned_4")
    assert planned.early_weights
    for one in choice.candidates:
        played = dataclasses.replace(costs, early_weights=one.early_weights)
        assert xm.simulate(one.schedule, played).makespan_seconds == pytest.approx(one.step_seconds)
    never = xm.choose_schedule(costs_of(4, 0.5), num_stages=4, num_microbatches=16)
    assert not any(one.early_weights for one in never.candidates)


def test_noise_is_repeatable() -> None:
    schedule = xm.Schedule.make("eager_split", 4, 8)
    steps = [
        xm.simulate(schedule, costs_of(4, 0.5, noise=noise, noise_seed=seed)).makespan_seconds
        for noise, seed in ((0.0, 0), (0.0, 1), (0.1, 1), (0.1, 1), (0.1, 2))
    ]
    assert steps[0] == steps[1]
    assert steps[2] == steps[3]
    assert len(set(steps)) == 3


def test_mistakes() -> None:
    with pytest.raises(ValueError, match="costs are for 4 stages, num_stages is 3"):
        xm.choose_schedule(costs_of(4, 1.0), num_stages=3, num_microbatches=4)
    with pytest.raises(ValueError, match="num_microbatches must be a positive int, got 0"):
        xm.choose_schedule(costs_of(4, 1.0), num_stages=4, num_microbatches=0)
    with pytest.raises(ValueError, match="each with a stage, got place 2 for stage 1"):
        xm.choose_schedule(costs_of(2, 1.0), num_stages=2, num_microbatches=4, place_of_stage=[0, 2])
    with pytest.raises(ValueError, match="noise is a part of the time"):
        xm.choose_schedule(costs_of(2, 1.0, noise=2.0), num_stages=2, num_microbatches=4)


COMMAND = [
    "schedule",
    "--stages",
    "4",
    "--microbatches",
    "8",
    "--forward-ms",
    "10",
    "--bytes",
    "32MiB",
    "--nic",
    "25gbit",
]


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--plot", str(tmp_path / "out.png"), "--csv", str(tmp_path / "out.csv")]
    assert main([*COMMAND, "--memory-limit", "200MiB", *files]) == 0
    printed = capsys.readouterr().out
    assert "at most 209715200 bytes on a place" in printed
    assert "eager_1f1b" in printed
    assert "stage 3 |" in printed
    assert (tmp_path / "out.png").stat().st_size > 1000
    assert xm.Schedule.from_csv(tmp_path / "out.csv").num_microbatches == 8
    assert main([*COMMAND, "--early-weights"]) == 0
    assert " yes " in capsys.readouterr().out
    assert main([*COMMAND[:7], "--bytes", "32MiB"]) == 2
    assert "--bytes needs --nic" in capsys.readouterr().err
    assert main([*COMMAND, "--memory-limit", "1MiB"]) == 2
    assert "the smallest limit that one keeps is 33554432" in capsys.readouterr().err
    assert main([*COMMAND, "--places", "0,1,1"]) == 2
    assert "--places is one place per stage" in capsys.readouterr().err
    for wrong in (["--nic", "fast"], ["--bytes", "3MiX"], ["--forward-ms", "-1"]):
        with pytest.raises(SystemExit):
            main([*COMMAND, *wrong])
