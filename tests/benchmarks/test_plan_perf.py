"""The planning benchmark: its bars are judged right on made-up records, and a small run writes what it says."""

import json
import math
from pathlib import Path

import plan_perf
import pytest
from parts.resharding.hard import BROADCASTS
from parts.resharding.plan_bars import PlanRecord, percentile, quality_lines, time_line

STRIPED_64, STRIPED_256 = "striped:num_chunks=64", "striped:num_chunks=256"


def records_of(case: str, ratios: tuple[float | None, ...]) -> list[PlanRecord]:
    """`ratios` of striped in 64 and 256 chunks and of the four broadcasts."""
    names = (STRIPED_64, STRIPED_256, *BROADCASTS)
    return [PlanRecord(case, name, None, ratio, 0.001) for name, ratio in zip(names, ratios, strict=True)]


def verdicts(lines: list[str]) -> dict[str, str]:
    """What every line says of its bar, by all that comes before the bar."""
    return {line.split(";")[0].removeprefix("# "): line.split(": ")[-1] for line in lines[1:]}


@pytest.mark.parametrize("count", [1, 2, 7, 100, 995])
@pytest.mark.parametrize("percent", [1, 50, 95, 99, 100])
def test_a_percentile_is_the_least_that_so_many_do_not_exceed(count: int, percent: int) -> None:
    values = [float((index * 37) % 1009) for index in range(count)]
    enough = [value for value in values if 100 * sum(other <= value for other in values) >= percent * count]
    assert percentile(values, percent) == min(enough)


def test_the_slowest_plan_is_held_against_the_bar() -> None:
    plans = [PlanRecord("a", "striped", 64, 1.0, 0.001), PlanRecord("b", "striped", 64, 1.0, 0.006)]
    assert time_line("two", plans, 6.0) == "# two: slowest 6.0 ms (b); bar 6 ms: met"
    assert time_line("two", plans, 5.0) == "# two: slowest 6.0 ms (b); bar 5 ms: NOT met, 1 ms above"


def test_good_plans_meet_every_bar() -> None:
    near = records_of("near", (1.03, 1.005, 1.2, 1.05, 1.0, 1.0))
    far = records_of("far", (1.035, 1.01, 4.0, 2.0, 1.5, 1.4))
    nothing_to_send = records_of("idle", (None,) * 6)
    lines = quality_lines(near + far + nothing_to_send, {"near": 1, "far": 3, "idle": 0}, {"near": 1e6, "far": 1e6})
    assert lines[0].endswith("fewer elements than chunks: none")
    where = "where that is above 1.3 (1 layouts, 0 not reached)"
    assert verdicts(lines) == dict.fromkeys(
        [
            f"{STRIPED_64} p99 1.0350",
            f"{STRIPED_64} p100 1.0350",
            f"{STRIPED_256} p99 1.0100",
            f"{STRIPED_64} excess over the finite-chunk bound 1.92 chunks (near)",
            f"{STRIPED_256} excess over the finite-chunk bound 1.56 chunks (far)",
            f"{STRIPED_64} over the best broadcast plan 1.0300 (near)",
            f"{STRIPED_64} of the best broadcast plan {where} 0.7393 (far)",
            f"{STRIPED_256} over the best broadcast plan 1.0050 (near)",
            f"{STRIPED_256} of the best broadcast plan {where} 0.7214 (far)",
        ],
        "met",
    )


def test_bars_that_are_missed_name_the_worst_layout() -> None:
    layouts = records_of("a", (1.0, 1.0, 2.0, 2.0, 2.0, 2.0)) + records_of("b", (1.3, 1.2, 1.4, 1.4, 1.4, 1.35))
    layouts += records_of("c", (1.1, 1.0, 1.0, 1.0, 1.0, 1.0))
    found = verdicts(quality_lines(layouts, {"a": 1, "b": 2, "c": 7}, {"a": 1e6, "b": 1e6, "c": 1e6}))
    assert found[f"{STRIPED_64} p100 1.3000"] == "NOT met, 0.25 above"
    # Two hosts need two rounds: one chunk more than the bound is free.
    assert found[f"{STRIPED_64} excess over the finite-chunk bound 18.20 chunks (b)"] == "NOT met, 16.2 above"
    assert found[f"{STRIPED_64} over the best broadcast plan 1.1000 (c)"] == "NOT met, 0.05 above"
    where = "where that is above 1.3 (2 layouts, 1 not reached)"
    assert found[f"{STRIPED_64} of the best broadcast plan {where} 0.9630 (b)"] == "NOT met, 0.163 above"


def test_layouts_too_small_for_their_chunks_are_named_and_left_out() -> None:
    layouts = records_of("fine", (1.0,) * 6) + records_of("tiny", (9.0, 9.0, 1.0, 1.0, 1.0, 1.0))
    lines = quality_lines(layouts, {"fine": 1, "tiny": 1}, {"fine": 256.0, "tiny": 255.0})
    assert lines[0].endswith(": tiny (255)")
    assert set(verdicts(lines).values()) == {"met"}
    assert not any("above 1.3" in line for line in lines)


def test_a_small_run_writes_every_family(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plans.json"
    assert plan_perf.main(["--seeds", "8", "--hosts", "64", "--repeats", "1", "--json", str(path)]) == 0
    written = json.loads(path.read_text())
    about = written["about"]
    assert (about["repeats"], about["hosts"], about["seeds"]) == (1, [64], 8)
    assert about["machine"][0].startswith("torch ")
    records = [PlanRecord(**record) for record in written["records"]]
    by_case: dict[str, list[PlanRecord]] = {}
    for record in records:
        by_case.setdefault(record.case, []).append(record)
    assert {f"c{i}" for i in range(1, 10)} <= set(by_case)
    assert {"one_to_all-64", "transposed-64", "random3-64"} <= set(by_case)
    assert {f"seed{seed}{model}" for seed in range(8) for model in ("", " latency")} <= set(by_case)
    assert len(by_case) == 9 + 11 + 16
    for record in records:
        assert record.plan_seconds > 0
        assert record.predicted_ratio is None or record.predicted_ratio > 1 - 1e-9, record
        if record.strategy == STRIPED_64 and record.case.startswith("seed") and record.predicted_ratio is not None:
            assert record.num_chunks_bound is not None
            assert math.isfinite(record.num_chunks_bound)
            assert record.num_chunks_bound >= 1
    printed = capsys.readouterr().out
    assert printed.startswith("# torch_xmesh plan_perf\n# torch ")
    for title in ("# nine cases, striped: slowest", "# 64 hosts, striped: slowest", "# random layouts, bytes only"):
        assert title in printed
    assert "not in this build" not in printed
