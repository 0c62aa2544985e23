"""The program for machines with a GPU, where there is none: a dry run without a network; what a second run does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not (ROOT / "csrc").exists(), reason="runs from a clone of the repository"),
]
ISOLATED = ["unshare", "--net", "--map-root-user"]


def dry_run(folder: Path, steps: str) -> str:
    """In a network namespace without routes, where this user may make one."""
    command = ["bash", "tests/run.sh", "--gpu", "--built", "--", "--device", "none", "--only", steps]
    may_isolate = shutil.which("unshare") and subprocess.run([*ISOLATED, "true"], check=False).returncode == 0
    environment = {**os.environ, "XMESH_PYTHON": sys.executable, "OUT": str(folder)}
    ran = subprocess.run(
        [*(ISOLATED if may_isolate else []), *command],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_a_dry_run_sets_up_and_says_what_waits(tmp_path: Path) -> None:
    said = dry_run(tmp_path, "machine,layouts,faults,backward")
    assert "no GPU here: layouts, faults, backward were set up, and wait for a device" in said
    results = json.loads((tmp_path / "gpu-results" / "results.json").read_text())
    assert {name: step["status"] for name, step in results["steps"].items()} == dict.fromkeys(
        ("machine", "layouts", "faults", "backward"), "passed"
    )
    assert any("torch" in entry["text"] for entry in results["steps"]["machine"]["found"])


def test_a_step_that_takes_too_long_is_cut_off_and_run_again(tmp_path: Path) -> None:
    program = [sys.executable, str(ROOT / "tests" / "gpu" / "program.py"), str(tmp_path), "--device", "none"]
    program += ["--only", "quickstart,speed"]

    def said(*more: str) -> str:
        return subprocess.run([*program, *more], cwd=ROOT, capture_output=True, text=True, check=False).stdout

    cut = said("--step-seconds", "0.001")
    assert "-- quickstart: cut off" in cut
    assert "-- speed: cut off" in cut, "the next one runs all the same"
    assert "-- speed: passed" in said()
    assert "== speed: passed by an earlier run" in said()
    assert "-- speed: passed" in said("--fresh")


def test_the_page_says_what_the_results_say() -> None:
    script = ROOT / "scripts" / "gpu_results.py"
    ran = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, "run scripts/gpu_results.py"
