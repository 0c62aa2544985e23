"""A dozen tests of PyTorch's own DistributedTest suite on xmesh and on gloo; tests/peer_suite.py --all runs all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = Path(__file__).resolve().parent.parent / "peer_suite.py"


@pytest.mark.timeout(300)
def test_short_peer_suite(tmp_path: Path) -> None:
    pytest.importorskip("expecttest")
    command = [sys.executable, str(SUITE), "--short", "--json", str(tmp_path / "record.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["xmesh"]["passed"] == record["gloo"]["passed"] > 0
