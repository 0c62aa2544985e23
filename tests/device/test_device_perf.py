"""The benchmark of reshards on an accelerator, on the emulated one: all its rows are there, and right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(900)  # the first test builds the device
ROOT = Path(__file__).resolve().parents[2]


CASES = ("copy", "send", "columns", "broadcast")


@pytest.mark.parametrize(("ranks", "cases"), [(2, (*CASES, "boundary", "action")), (3, CASES)])
def test_all_rows_are_right(ranks: int, cases: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "device.json"
    emulated = f"--device emu --inner emunccl --load emu_device --ranks {ranks}".split()
    small = "--num-bytes 65536 --runs 1 --repeats 2".split()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests/device/emu")])}
    command = [sys.executable, str(ROOT / "benchmarks/device_perf.py"), *emulated, *small, "--json", str(path)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    records = json.loads(path.read_text())["records"]
    methods = ("rival", "xmesh", "rival again")
    assert [(record["case"], record["method"]) for record in records] == [
        (case, method) for case in cases for method in methods
    ]
    assert all(record["wrong"] == 0 and (record["seconds"] > 0 or record["case"] == "action") for record in records)
    assert ran.stdout.splitlines()[-1] == "# #wrong over all rows: 0"
