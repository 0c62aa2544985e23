"""The number of microbatches by simulation: costs of sizes that were not measured, and the best of all numbers."""

from __future__ import annotations

import itertools

import hypothesis
import pytest
from hypothesis import strategies as st

import torch_xmesh as xm
from torch_xmesh.pipeline.engine.auto import MOST_PER_PLACE, numbers_of
from torch_xmesh.pipeline.schedule.choice import choose_microbatches
from torch_xmesh.pipeline.schedule.fit import costs_at
from torch_xmesh.pipeline.schedule.schedule import chain_edges


def costs_of(size: int, start: float = 0.01, num_stages: int = 3) -> xm.Costs:
    """Costs with microbatches of `size` samples; every action takes `start` seconds besides."""
    stage = xm.StageCosts(
        forward_seconds=start + 0.001 * size,
        backward_input_seconds=start + 0.001 * size,
        backward_weight_seconds=start + 0.0005 * size,
        activation_bytes=1000 * size,
        weight_bytes=500 * size,
        fixed_bytes=7000 + 10 * size,
    )
    edge = xm.EdgeCosts(forward_seconds=0.001 + 1e-5 * size, backward_seconds=2e-5 * size, has_gradient=True)
    return xm.Costs(stages=[stage] * num_stages, edges=dict.fromkeys(chain_edges(num_stages), edge))


@hypothesis.given(sizes=st.lists(st.integers(1, 64), min_size=2, max_size=3, unique=True), size=st.integers(1, 128))
def test_what_grows_evenly_is_found_exactly(sizes: list[int], size: int) -> None:
    found, expected = costs_at([(one, costs_of(one)) for one in sizes], size), costs_of(size)
    for mine, theirs in zip(found.stages, expected.stages, strict=True):
        assert mine.forward_seconds == pytest.approx(theirs.forward_seconds)
        assert mine.backward_input_seconds == pytest.approx(theirs.backward_input_seconds)
        assert mine.backward_weight_seconds == pytest.approx(theirs.backward_weight_seconds)
        assert mine.activation_bytes == pytest.approx(theirs.activation_bytes, abs=1)
        assert mine.weight_bytes == pytest.approx(theirs.weight_bytes, abs=1)
        assert mine.fixed_bytes == pytest.approx(theirs.fixed_bytes, abs=1)
    assert found.edges is not None
    assert expected.edges is not None
    for ends, cost in found.edges.items():
        theirs_edge = expected.edges[ends]
        assert isinstance(cost, xm.EdgeCosts)
        assert isinstance(theirs_edge, xm.EdgeCosts)
        assert cost.forward_seconds == pytest.approx(theirs_edge.forward_seconds)
        assert cost.backward_seconds == pytest.approx(theirs_edge.backward_seconds)


def test_nothing_falls_below_zero() -> None:
    """One size tells what a sample takes; times that shrink with the size are noise, and none starts below 0."""
    one = costs_at([(8, costs_of(8))], 4).stages[0]
    assert one.forward_seconds == pytest.approx((0.01 + 0.008) / 2)
    steep = costs_at([(8, costs_of(0, start=0.001)), (16, costs_of(15, start=0.001))], 32).stages[0]
    assert steep.forward_seconds > 0.032  # more than in proportion: it goes on so
    shrinking = costs_at([(8, costs_of(16)), (16, costs_of(8))], 64).stages[0]
    assert shrinking.forward_seconds == pytest.approx(0.01 + 0.012)
    steep = costs_at([(8, costs_of(1, start=0.0)), (16, costs_of(16, start=0.0))], 1).stages[0]
    assert steep.forward_seconds > 0


@pytest.mark.parametrize("start", [0.0, 0.001, 0.02])
def test_the_best_of_all_numbers(start: float) -> None:
    """The more an action takes besides its samples, the fewer microbatches."""
    numbers = numbers_of(64, 1, 3)
    choice = choose_microbatches(lambda number: costs_of(64 // number, start), numbers, [0, 1, 2], None)
    seconds = {}
    for number in numbers:
        alone = xm.choose_schedule(costs_of(64 // number, start), num_stages=3, num_microbatches=number)
        seconds[number] = alone.candidates[0].noisy_seconds
    assert choice.chosen.noisy_seconds <= 1.003**2 * min(seconds.values())
    assert f"num_microbatches {choice.schedule.num_microbatches}; the best of others" in str(choice)


def test_fewer_where_actions_are_long() -> None:
    def number(start: float) -> int:
        numbers = numbers_of(64, 1, 3)
        choice = choose_microbatches(lambda one: costs_of(64 // one, start), numbers, [0, 1, 2], None)
        return choice.schedule.num_microbatches

    assert number(0.1) < number(0.001)


def test_a_limit() -> None:
    numbers = [2, 4, 8, 16]
    limit = 7000 + 10 * 4 + 3 * 4000
    choice = choose_microbatches(lambda number: costs_of(64 // number), numbers, [0, 1, 2], limit)
    assert choice.schedule.num_microbatches == 16
    assert max(choice.predicted_peak_bytes) <= limit
    with pytest.raises(ValueError, match=r"no schedule keeps memory_limit_bytes=100: .* 11040 .* with 16 microbatches"):
        choose_microbatches(lambda number: costs_of(64 // number), numbers, [0, 1, 2], 100)


@hypothesis.given(samples=st.integers(1, 500), shards=st.integers(1, 4), places=st.integers(1, 8))
def test_numbers_worth_a_try(samples: int, shards: int, places: int) -> None:
    found = numbers_of(samples, shards, places)
    assert list(found) == sorted(set(found))
    assert found[0] == 1
    assert found[-1] <= MOST_PER_PLACE * places
    assert found == (1,) or samples // found[-1] >= 2 * shards
    for one, other in itertools.pairwise(found):
        assert other <= 2.5 * one + 1
