"""The examples train as they are: their own comparison with one process is the judge."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def torchrun(processes: int, script: str, *arguments: str) -> str:
    """What the script wrote; fails with it unless all of its processes ended well."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    done = subprocess.run(
        [*command, str(ROOT / "examples" / script), *arguments],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=170,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("processes", [2, 3])
def test_the_u_transformer_trains_as_in_one_process(tmp_path: Path, processes: int) -> None:
    pytest.importorskip("matplotlib")
    small = ("--steps", "6", "--batch", "8", "--microbatches", "4", "--size", "16", "--width", "4", "--levels", "2")
    pictures = ("--losses", str(tmp_path / "losses.png"), "--timeline", str(tmp_path / "timeline.png"))
    written = torchrun(processes, "train_unet_transformer.py", *small, *pictures)
    assert "the first 2 steps equal one process" in written
    assert "step 6/6" in written
    assert is_png(tmp_path / "losses.png")
    assert is_png(tmp_path / "timeline.png")


def test_one_process_is_told_what_is_missing() -> None:
    with pytest.raises(AssertionError, match="at least 2 processes"):
        torchrun(1, "train_unet_transformer.py")
