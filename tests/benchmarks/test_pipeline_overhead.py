"""The overhead benchmark counts actions as torch does, and takes the bare stage away."""

import math

import pytest
import torch
from parts.pipeline import overhead


@pytest.mark.parametrize(("stage", "expected"), [(0, (32, 32)), (1, (32, 64)), (3, (32, 32))])
def test_actions_of_a_stage(stage: int, expected: tuple[int, int]) -> None:
    assert overhead.num_actions(stage, 4, 16) == expected


def test_a_split_backward_is_two_actions() -> None:
    assert overhead.num_actions(1, 4, 16, is_split=True) == (48, 64)


def test_one_stage_sends_nothing() -> None:
    assert overhead.num_actions(0, 1, 4) == (8, 0)


def test_records_are_sums_over_ranks_beyond_the_bare_stage() -> None:
    everyone = [
        torch.tensor([[100.0, 120.0], [260.0, 360.0]], dtype=torch.float64),
        torch.tensor([[60.0, 80.0], [220.0, 320.0]], dtype=torch.float64),
    ]
    (record,) = overhead._records(["bare", "1f1b"], everyone, 2)
    assert record.cpu_us_per_action == pytest.approx(320 / 16)
    assert record.cpu_us_per_compute_action == pytest.approx(320 / 8)
    assert record.cpu_us_all_threads_per_action == pytest.approx(480 / 16)
    assert record.bare_us == pytest.approx(160 / 8)
    assert (record.method, record.stages, record.microbatches) == ("1f1b", 2, 2)


def test_every_method_is_measured_end_to_end() -> None:
    records = overhead.run(stages=(2,), rounds=1, steps_per_round=2)
    assert [record.method for record in records] == ["1f1b", "eager_1f1b", "zb_h1", "torch_1f1b"]
    for record in records:
        assert (record.stages, record.microbatches) == (2, 16)
        assert record.bare_us > 0
        assert all(math.isfinite(value) for key, value in record.to_json().items() if key.startswith("cpu_us"))
        ratio = 5 / 3 if record.method == "zb_h1" else 2  # three or two compute actions, a send and a receive
        assert record.cpu_us_per_compute_action == pytest.approx(ratio * record.cpu_us_per_action)
