"""``xmesh parallelize --run``, as a person calls it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import torch_xmesh as xm

ROOT = Path(__file__).parents[2]
ON_META = """
import torch

def make():
    with torch.device("meta"):
        return torch.nn.Linear(8, 8), (torch.zeros(4, 8),)
"""


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    full = [sys.executable, "-m", "torch_xmesh", "parallelize", *arguments]
    return subprocess.run(full, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_a_model_is_planned_and_trained() -> None:
    done = command("examples/models/gpt.py:make", "--mesh", "1x2", "--microbatches", "2", "--run")
    assert done.returncode == 0, done.stderr
    assert "GPT on 2 devices (found)" in done.stdout
    first, _, _ = done.stdout.partition("without overlap:")
    steps = re.findall(r"step (\d): \S+ \S+, predicted \S+ \S+, loss (\S+)", first)
    assert [number for number, _ in steps] == ["0", "1", "2"]
    losses = [float(loss) for _, loss in steps]
    assert losses[2] < losses[0]


def test_a_plan_that_overlaps_is_compared_with_one_that_does_not(tmp_path: Path) -> None:
    links = tmp_path / "links.json"
    xm.Topology(devices_per_host=1, nic_bytes_per_s=10**7, local_bytes_per_s=10**9).save(links)
    options = ["--flops", "1e9", "--bytes-per-s", "1e12", "--topology", str(links), "--run"]
    done = command("examples/models/sparse.py:bert_sgmoe", "--mesh", "2x1", "--microbatches", "1", *options)
    assert done.returncode == 0, done.stderr
    losses = [re.findall(r"step \d: .* loss (\S+)", text) for text in done.stdout.split("without overlap:")]
    assert [len(found) for found in losses] == [3, 3]
    assert list(map(float, losses[1])) == pytest.approx(list(map(float, losses[0])), rel=1e-3)


def test_what_would_not_be_printed_is_refused() -> None:
    done = command("examples/models/gpt.py:make", "--mesh", "1x2", "--run", "--compare")
    assert done.returncode == 2
    assert "--run prints the plan that it measures: leave --compare out" in done.stderr


def test_a_model_without_values_cannot_be_trained(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(ON_META)
    done = command(f"{path}:make", "--mesh", "1x2", "--run")
    assert done.returncode != 0
    assert "--run trains: the function must return a model with values, not on meta" in done.stderr
