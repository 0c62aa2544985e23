"""The benchmark of automatic plans, on small models."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import parallelism_perf
import parallelism_speed
import pytest
import torch
from parallelism_speed import SpeedCase, SpeedRecord


def test_parts_that_take_too_long_are_named() -> None:
    near = SpeedRecord("a", "tables", 0.4, 0.5, bar_seconds=0.5, alpa_seconds=None, runs=1)
    far = dataclasses.replace(near, part="solution", bar_seconds=0.1)
    free = dataclasses.replace(near, part="recording", bar_seconds=None)
    assert parallelism_speed.missed([near, far, free]) == ["a, solution"]
    assert [parallelism_speed.speed_row(one)[-1] for one in (near, far, free)] == ["met", "NOT met", ""]


def test_one_core_until_the_end() -> None:
    before = torch.get_num_threads(), os.sched_getaffinity(0)
    with parallelism_speed.one_core():
        assert torch.get_num_threads() == 1
        assert len(os.sched_getaffinity(0)) == 1
    assert (torch.get_num_threads(), os.sched_getaffinity(0)) == before


def test_every_part_of_a_small_search_is_measured() -> None:
    parts = parallelism_speed.shardings(2, 64, 4)
    assert set(parts) == {"recording", "tables", "solution"}
    parts |= parallelism_speed.stage_search((2, 4), 6, 8, powers_of_two=False)
    parts |= parallelism_speed.clustering(100, 5)
    parts |= parallelism_speed.whole(2, 2, 64, 4, 4, num_devices=2)
    for name, (seconds, wall) in parts.items():
        assert 0 < seconds < 60, name
        assert wall > 0, name


def test_speed_from_end_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SpeedCase("slow", lambda: {"all": (2.0, 2.5)}, {"all": 1.0}, {"all": 60.0}, is_whole=True)
    (quick,) = (case for case in parallelism_speed.SPEED_CASES if case.name.startswith("operators"))
    monkeypatch.setattr(parallelism_perf, "SPEED_CASES", (slow, quick))
    path = tmp_path / "speed.json"
    assert parallelism_perf.main(["--suite", "speed", "--runs", "5", "--json", str(path)]) == 0
    written = json.loads(path.read_text())
    assert written["about"]["suite"] == "speed"
    records = [SpeedRecord(**one) for one in written["records"]]
    assert [(one.case, one.part, one.runs) for one in records] == [("slow", "all", 3), (quick.name, "layers", 5)]
    assert "# bars not met: slow, all" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        parallelism_perf.main(["--suite", "speed", "--cases", "other"])
