"""The benchmark of automatic plans, on small models."""

from __future__ import annotations

import dataclasses
import json
import os
from functools import partial
from pathlib import Path

import parallelism_perf
import pytest
import torch
from parts.parallelism import alpa, alpa_models, speed
from parts.parallelism.alpa import ALPA_CASES, AlpaCase, AlpaRecord
from parts.parallelism.cluster import half_precision
from parts.parallelism.speed import SpeedCase, SpeedRecord
from redraw import redraw

SMALL = AlpaCase(
    "gpt-3", "small", 1, partial(alpa_models.gpt, 2, 64, 4), ((16,), torch.int64), 8, (2, 4), half_precision()
)


def test_parts_that_take_too_long_are_named() -> None:
    near = SpeedRecord("a", "tables", 0.4, 0.5, bar_seconds=0.5, alpa_seconds=None, runs=1)
    far = dataclasses.replace(near, part="solution", bar_seconds=0.1)
    free = dataclasses.replace(near, part="recording", bar_seconds=None)
    assert speed.missed([near, far, free]) == ["a, solution"]
    assert [speed.speed_row(one)[-1] for one in (near, far, free)] == ["met", "NOT met", ""]


def test_one_core_until_the_end() -> None:
    before = torch.get_num_threads(), os.sched_getaffinity(0)
    with speed.one_core():
        assert torch.get_num_threads() == 1
        assert len(os.sched_getaffinity(0)) == 1
    assert (torch.get_num_threads(), os.sched_getaffinity(0)) == before


def test_every_part_of_a_small_search_is_measured() -> None:
    parts = speed.shardings(2, 64, 4)
    assert set(parts) == {"recording", "tables", "solution"}
    parts |= speed.stage_search((2, 4), 6, 8, powers_of_two=False)
    parts |= speed.clustering(100, 5)
    parts |= speed.whole(2, 2, 64, 4, 4, num_devices=2)
    for name, (seconds, wall) in parts.items():
        assert 0 < seconds < 60, name
        assert wall > 0, name


def test_speed_from_end_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SpeedCase("slow", lambda: {"all": (2.0, 2.5)}, {"all": 1.0}, {"all": 60.0}, is_whole=True)
    (quick,) = (case for case in speed.SPEED_CASES if case.name.startswith("operators"))
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


@pytest.mark.parametrize("case", ALPA_CASES, ids=lambda case: case.name)
def test_models_are_as_large_as_the_paper_says(case: AlpaCase) -> None:
    """Which counts one of embedding and head, and rounds."""
    model = case.make()
    count = sum(one.numel() for one in model.parameters())
    if case.family != "wide-resnet":
        count -= next(model.parameters()).numel()
    number, unit = float(case.model[:-1]), {"M": 1e6, "B": 1e9}[case.model[-1]]
    assert count == pytest.approx(number * unit, rel=0.1)


def test_each_place_of_an_expert_takes_one_token() -> None:
    experts = alpa_models.Experts(8, 2, 4)
    gates = torch.rand(3, 16, 4, generator=torch.Generator().manual_seed(0)).softmax(-1)
    combine = experts.combine(gates)
    assert combine.shape == (3, 16, 4, 8)
    assert (combine > 0).sum(1).max() == 1
    given, wanted = combine.sum(-1), gates
    assert torch.all((given == 0) | (given == wanted))
    assert torch.all((given > 0).sum(-1) <= 2)
    assert torch.all(given[:, 0].sum(-1) == gates[:, 0].topk(2).values.sum(-1))


@pytest.mark.parametrize(
    ("model", "example"),
    [
        (alpa_models.moe(2, 64, 4, 4, vocabulary=96, length=16), torch.zeros(4, 16, dtype=torch.int64, device="meta")),
        (alpa_models.wide_resnet(50, 8, 2, num_classes=16), torch.zeros(4, 3, 32, 32, device="meta")),
    ],
    ids=["moe", "wide-resnet"],
)
def test_models_run(model: torch.nn.Module, example: torch.Tensor) -> None:
    assert model(example).shape[0] == 4


def test_a_plan_in_a_line() -> None:
    made = AlpaRecord("gpt-3", "1B", 8, 10**9, 4, 2, paper_scaling=None, schedule="1f1b")
    stages = ((2, (("batch / 2", 3), ("rows / 2", 1))), (2, (("batch / 2", 4),)), (4, (("rows / 4", 4),)))
    line = alpa.plan_line(dataclasses.replace(made, stages=stages))
    assert line == "3 stages, 1f1b: 2 x 2 GPUs [batch / 2], 4 GPUs [rows / 4]"
    refused = dataclasses.replace(made, error="no plan keeps it\nat all")
    assert alpa.plan_line(refused) == "not planned: no plan keeps it"


def test_a_search_that_takes_too_long_is_given_up() -> None:
    record = alpa.planned_within(SMALL, 2, 0.01)
    assert record.error == "no plan after 0.01 s"
    assert record.num_microbatches == 4


def test_alpa_from_end_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    more = dataclasses.replace(SMALL, model="twice", num_devices=2, microbatches=(2,), scaling=0.9, account="like this")
    monkeypatch.setattr(parallelism_perf, "ALPA_CASES", (SMALL, more))
    path, picture = tmp_path / "alpa.json", tmp_path / "alpa.png"
    assert parallelism_perf.main(["--suite", "alpa", "--json", str(path), "--plot", str(picture)]) == 0
    records = json.loads(path.read_text())["records"]
    assert [(one["model"], one["microbatch"]) for one in records] == [
        ("small", 2),
        ("small", 4),
        ("twice", 2),
    ]
    for one in records:
        assert one["error"] is None
        assert one["petaflops"] > 0
        assert sum(devices for devices, _ in one["stages"]) == one["num_devices"]
    best = [one for one in records if one["is_best"]]
    assert [one["model"] for one in best] == ["small", "twice"]
    assert best[0]["scaling"] == 1
    drawn = picture.read_bytes()
    assert drawn.startswith(b"\x89PNG")
    picture.unlink()
    assert redraw(path).read_bytes() == drawn
    assert "#   Alpa: like this\n" in capsys.readouterr().out
    for refused in (["--runs", "3"], ["--cases", "other"]):
        with pytest.raises(SystemExit, match="2"):
            parallelism_perf.main(["--suite", "alpa", *refused])
