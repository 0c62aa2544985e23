"""The pipeline benchmark measures what it says: models cut by hand equal the captured ones, wrong gradients are found,
every suite runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pipeline_docs
import pytest
import torch
from parts.pipeline import hf, models
from parts.pipeline.charts import plot_overhead
from parts.pipeline.methods import ranks_of_groups
from parts.pipeline.records import OverheadRecord, Record, hf_rows, overhead_rows, rival_of, rows
from parts.pipeline.suites import Buffers
from parts.pipeline.worker import count_wrong, serial_gradients

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"

SIZES: dict[str, dict[str, Any]] = {
    "paced": {
        "num_stages": 2,
        "blocks_per_stage": 2,
        "microbatches": 3,
        "samples": 2,
        "width": 8,
        "forward_s": 100.0,
    },
    "unet": {"microbatches": 3, "samples": 1, "size": 16, "width": 4, "levels": 2},
    "gpt": {"microbatches": 3, "samples": 2, "width": 16, "depth": 4},
}


def by_hand(workload: models.Workload) -> dict[str, torch.Tensor | None]:
    """Gradients of the stages called one after another, microbatch by microbatch."""
    workload.wait(False)
    count = workload.num_microbatches
    for image, target in zip(workload.args[0].chunk(count), workload.target.chunk(count), strict=True):
        values: tuple[torch.Tensor, ...] = (image,)
        for stage in workload.stages:
            values = models.as_tuple(stage(*values))
        torch.autograd.backward(workload.loss_fn(values[0], target) / count)
    return {name: parameter.grad for name, parameter in workload.model.named_parameters()}


@pytest.mark.parametrize("kind", sorted(SIZES))
def test_stages_by_hand_are_the_model(kind: str) -> None:
    workload = models.make(kind, SIZES[kind])
    named = dict(workload.model.named_modules())
    assert set(workload.split) <= set(named)
    shared = {id(p) for stage in workload.stages for p in stage.parameters()}
    assert shared == {id(p) for p in workload.model.parameters()}
    expected = serial_gradients(models.make(kind, SIZES[kind]))
    assert count_wrong(by_hand(workload), expected) == 0
    assert all(size > 0 for size in workload.boundary_bytes())


@pytest.mark.parametrize("kind", ["unet", "gpt"])
def test_a_signal_has_one_element_and_computes_as_much(kind: str) -> None:
    whole, signal = (
        models.make(kind, SIZES[kind]),
        models.make(kind, SIZES[kind] | {"is_signal": True}),
    )
    assert signal.boundary_bytes() == [4]
    assert whole.boundary_bytes()[0] > 4
    assert sum(p.numel() for p in signal.model.parameters()) == sum(p.numel() for p in whole.model.parameters())
    gradients = serial_gradients(signal)
    assert all(gradient.abs().sum() > 0 for name, gradient in gradients.items() if name.endswith("weight"))
    assert set(gradients) == {name for name, _ in signal.model.named_parameters()}


def test_the_skips_of_the_u_transformer_all_cross() -> None:
    entering = models.make("unet", SIZES["unet"]).boundaries()[1]
    assert [tuple(value.shape) for value in entering] == [(1, 16, 4, 4), (1, 4, 16, 16), (1, 8, 8, 8)]


def test_every_byte_of_a_paced_message_shows_in_a_gradient() -> None:
    workload = models.make("paced", SIZES["paced"])
    expected = serial_gradients(workload)
    with torch.no_grad():
        workload.args[0][0, -1] += 0.01
    workload.model.zero_grad()
    changed = serial_gradients(workload)
    assert any(count_wrong({name: changed[name]}, {name: expected[name]}) for name in expected)


@pytest.mark.parametrize("message_bytes", [2.8e5, 5.9e5, 1.2e6, 5e6])
def test_nics_and_sockets_take_little_of_a_message_at_once(message_bytes: float) -> None:
    buffers = Buffers.beside(message_bytes)
    assert int(buffers.burst.removesuffix("kb")) * 1024 < message_bytes / 8
    assert message_bytes / 10 < buffers.tcp_wmem[2] < message_bytes / 4


def test_wrong_gradients_are_counted() -> None:
    expected = {"a": torch.ones(4), "b": torch.zeros(2, 2)}
    assert count_wrong({"a": torch.ones(4)}, expected) == 0
    assert count_wrong({"a": torch.ones(4) + 1e-3, "b": torch.tensor([[0.0, 1.0], [0.0, 0.0]])}, expected) == 5
    assert count_wrong({"a": None}, expected) == 4
    assert count_wrong({"a": torch.full((4,), torch.nan)}, expected) == 4


def test_groups_of_meshes_by_hand() -> None:
    assert ranks_of_groups("torch_1f1b", [[0], [1], [2]]) == [(0, 1, 2)]
    assert ranks_of_groups("by_hand", [[[0], [1]], [[2, 3]]]) == [(0, 2), (1, 3), (0, 1), (2, 3)]
    assert ranks_of_groups("by_hand", [[0, 1], [2]]) == [(0, 2), (0, 1)]
    assert ranks_of_groups("1f1b", [[0], [1]]) == []


def test_the_table_compares_with_torch() -> None:
    torchs = Record("paced", "paced", 4, 8, 0.5, "torch_1f1b", 1.2, 1.1, 1.3, 0.9, 0.8, 1.2, 4, 0, 5)
    ours = Record("paced", "paced", 4, 8, 0.5, "eager_1f1b", 0.8, 0.8, 0.9, 0.72, 0.7, 0.82, 7, 0, 5, 0.021)
    assert rival_of(ours, [torchs, ours]) is torchs
    row = next(row for row in rows([torchs, ours]) if "eager_1f1b" in row)
    assert " ".join(row).split() == [
        *("paced", "n4", "m8", "r0.5", "eager_1f1b", "800", "800", "900", "720", "0.900", "1.50"),
        *("700", "820", "1.025", "7", "2.1", "5", "0"),
    ]


def test_the_page_gets_its_table(tmp_path: Path) -> None:
    torchs = Record("paced", "paced", 4, 8, 0.5, "torch_1f1b", 1.2, 1.1, 1.3, 0.9, 0.8, 1.2, 4, 0, 5)
    ours = Record("paced", "paced", 4, 8, 0.5, "eager_1f1b", 0.8, 0.8, 0.9, 0.72, 0.7, 0.82, 7, 0, 5)
    out, page = tmp_path / "out.json", tmp_path / "performance.md"
    out.write_text(json.dumps({"about": {}, "records": [torchs.to_json(), ours.to_json()]}))
    top = (ROOT / "docs" / "performance.md").read_text()
    page.write_text(top)
    for _ in range(2):
        assert pipeline_docs.main([str(out), "--page", str(page)]) == 0
    written = page.read_text()
    assert "| paced n4 m8 r0.5 | 1.200 s, 0.75 of empty | 0.800 s (1.50x), 0.90 of empty |" in written
    assert written.count("|---|---|---|\n| paced n4") == 1
    assert written.partition(pipeline_docs.BEGIN)[0] == top.partition(pipeline_docs.BEGIN)[0]
    assert written.partition(pipeline_docs.END)[2] == top.partition(pipeline_docs.END)[2]
    with pytest.raises(ValueError, match="end of pipeline table"):
        pipeline_docs.replaced("nothing", "| a |")


def test_overhead_has_a_table_and_a_chart_of_its_own(tmp_path: Path) -> None:
    records = [OverheadRecord("overhead", method, 2, 16, 15.25, 60.5, 60.0, 20.0) for method in ("1f1b", "torch_1f1b")]
    assert overhead_rows(records)[1] == ["n2 m16", "torch_1f1b", "15.2", "60.5", "60.0", "20.0"]
    plot_overhead(tmp_path / "out.png", records)
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def run_suite(tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    done = subprocess.run(
        [
            *(sys.executable, str(BENCHMARKS / "pipeline_perf.py"), *arguments),
            *("--no-shaping", "--runs", "2", "--ratios", "1", "--json", str(out), "--plot", str(picture)),
        ],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=170,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    records: list[dict[str, Any]] = json.loads(out.read_text())["records"]
    assert all(record["wrong"] == 0 and record["runs"] == 2 for record in records)
    return records


def test_suite_paced_end_to_end(tmp_path: Path) -> None:
    records = run_suite(tmp_path, *("--suite", "paced", "--stages", "2", "--microbatches", "4", "--forward-ms", "2"))
    assert [record["method"] for record in records] == [
        *("torch_1f1b", "torch_zb1p", "1f1b", "eager_1f1b", "interleaved_1f1b"),
        *("zb_h1", "eager_split", "auto", "auto_held"),
    ]
    for record in records:
        # Sleeps never end early: 4 microbatches of 2 + 4 ms, and one forward and backward more to fill the pipeline.
        shortest = 0.030 if record["method"] in ("torch_1f1b", "1f1b", "eager_1f1b") else 0.024
        assert record["seconds"] >= shortest
        assert record["ideal_seconds"] >= shortest
        assert record["predicted_seconds"] >= record["ideal_seconds"]
        assert record["signal_seconds"] >= shortest
    assert [record["peak_in_flight"] for record in records if "1f1b" in record["method"]] == [2, 2, 3, 4]
    assert records[-1]["peak_in_flight"] <= 2


@pytest.mark.in_turn(2)
def test_suite_meshes_end_to_end(tmp_path: Path) -> None:
    records = run_suite(tmp_path, *("--suite", "meshes", "--microbatches", "2", "--forward-ms", "1"))
    assert {record["case"] for record in records} == {"2x1->1x2", "2->1", "1->2"}


@pytest.mark.in_turn(2)
def test_suite_real_end_to_end(tmp_path: Path) -> None:
    tiny = ("--models", "unet", "--microbatches", "2", "--methods", "torch_1f1b,broadcast")
    records = run_suite(tmp_path, "--suite", "real", *tiny)
    assert [(record["case"], record["method"]) for record in records] == [("unet", "torch_1f1b"), ("unet", "broadcast")]
    for record in records:
        assert record["predicted_seconds"] > record["ideal_seconds"] > 0
        assert record["peak_in_flight"] == 2


def test_a_model_of_transformers_by_every_method() -> None:
    pytest.importorskip("transformers")
    records = hf.run(layers=2, width=32, length=8, microbatches=2, rounds=2)
    assert [record.method for record in records] == list(hf.METHODS)
    for record in records:
        assert record.wrong == 0
        assert record.runs == 2
        assert 0 < record.seconds_min <= record.seconds <= record.seconds_max
    assert len(hf_rows(records)) == 3
