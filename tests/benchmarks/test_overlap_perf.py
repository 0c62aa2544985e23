"""The benchmark of one microbatch under another."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import overlap_perf
import pytest
import torch
from parts.overlap.models import WORKLOADS
from parts.overlap.records import Record, breakdown, hidden_part, rows
from redraw import redraw

RESULTS = Path(overlap_perf.__file__).parent / "results"
STEP = {"total": 1.5, "compute": 1.0, "collectives": 0.5, "sums": 0.0}
UNSPLIT = Record(
    "a case", "unsplit", "2 1f1b", 1.6, 1.5, 1.7, runs=3, wrong=0, peak_bytes=100, computed_seconds=1.0, predicted=STEP
)


def test_what_is_hidden() -> None:
    """HiDup's figures: its ratios of communication are .10, .49 and 1.47, what it hides of them .92, .41 and .26."""
    for unsplit, computed, seconds, expected in ((1.10, 1.0, 1.008, 0.92), (1.49, 1.0, 1.289, 0.41)):
        assert hidden_part(seconds, unsplit, computed) == pytest.approx(expected, abs=0.005)
    assert hidden_part(2.21, 2.47, 1.0) == pytest.approx(0.26, abs=0.005)


def test_rows_compare_with_the_unsplit_step() -> None:
    other = dataclasses.replace(UNSPLIT, method="overlap", seconds=1.2, peak_bytes=50, predicted={**STEP, "total": 1.1})
    rival = dataclasses.replace(UNSPLIT, method="DDP", seconds=2.4, predicted=None)
    found = rows([UNSPLIT, other, rival])
    assert [row[6:11] for row in found] == [
        ["1.07", "1.00", "-", "-", "1.00"],
        ["1.09", "0.75", "0.67", "0.80", "0.50"],
        ["-", "1.50", "-", "-", "1.00"],
    ]


def test_what_steps_consist_of() -> None:
    """A step of 1.6 s computes for 1 s, and another one hides .4 s of the .6 s that it communicates."""
    other = dataclasses.replace(UNSPLIT, method="overlap", seconds=1.2)
    rival = dataclasses.replace(UNSPLIT, method="DDP", predicted=None)
    records = [UNSPLIT, other, rival]
    assert breakdown(records, UNSPLIT) == pytest.approx((1.0, 0.0, 0.6))
    assert breakdown(records, other) == pytest.approx((0.6, 0.4, 0.2))
    assert breakdown(records, rival) is None


def test_halves_are_routed_as_the_whole_is() -> None:
    for name in ("BERT SGMoE", "ViT Switch"):
        one = WORKLOADS[name].subject(4)
        model = one.make()
        halves = torch.cat([model(half) for half in one.batch.chunk(2)])
        torch.testing.assert_close(halves, model(one.batch), rtol=1e-4, atol=1e-5)


def test_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, expected in (
        (["--models", "GPT"], "there are no models ['GPT']"),
        (["--methods", "unsplit,DPP"], "there are no methods ['DPP']"),
        (["--methods", "overlap"], "the first method is unsplit"),
    ):
        with pytest.raises(SystemExit):
            overlap_perf.main(arguments)
        assert expected in capsys.readouterr().err


def test_plans_and_rivals_train_and_are_drawn(tmp_path: Path) -> None:
    path, picture = tmp_path / "out.json", tmp_path / "out.png"
    command = [
        "--models",
        "BERT Megatron,ViT Switch",
        "--methods",
        "unsplit,duplex,DDP,auto",
        "--ratios",
        "1",
        "--samples",
        "8",
    ]
    given = [*command, "--runs", "1", "--no-shaping", "--json", str(path), "--plot", str(picture)]
    assert overlap_perf.main(given) == 0
    records = json.loads(path.read_text())["records"]
    assert [record["method"] for record in records] == [
        *("unsplit", "duplex", "DDP", "auto"),
        *("unsplit", "duplex", "DDP", "auto"),
    ]
    assert all(record["peak_bytes"] > 0 for record in records)
    assert all(record["wrong"] == 0 and record["seconds"] > 0 for record in records)
    assert redraw(path).read_bytes() == picture.read_bytes()


@pytest.mark.parametrize(
    "path",
    sorted(RESULTS.glob("auto-parallel*.json")) + sorted(RESULTS.glob("overlap-perf*.json")),
    ids=lambda path: path.stem,
)
def test_recorded_results_are_drawn_again(path: Path, tmp_path: Path) -> None:
    kept = tmp_path / path.name
    kept.write_bytes(path.read_bytes())
    assert redraw(kept).stat().st_size > 10_000
