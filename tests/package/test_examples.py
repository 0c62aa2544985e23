"""The examples train as they are: their own comparison with one process is the judge."""

from __future__ import annotations

import difflib
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def torchrun(processes: int, script: str, *arguments: str, folder: Path, python_path: Path = ROOT) -> str:
    """What the script, run in `folder`, wrote; fails with it unless all of its processes ended well."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    search = f"{python_path}:{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [*command, str(ROOT / "examples" / script), *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": search, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=170,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def lines_of_steps(written: str) -> list[str]:
    """Its progress, where it writes into a file."""
    assert "\r" not in written
    return re.findall(r"^step \d+/\d+, loss", written, re.MULTILINE)


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("processes", [2, 3])
def test_the_u_transformer_trains_as_in_one_process(tmp_path: Path, processes: int) -> None:
    pytest.importorskip("matplotlib")
    small = ("--steps", "6", "--batch", "8", "--microbatches", "4", "--size", "16", "--width", "4", "--levels", "2")
    written = torchrun(processes, "train_unet_transformer.py", *small, "--timeline", "timeline.png", folder=tmp_path)
    assert "the first 2 steps equal one process" in written
    assert "step 6/6" in written
    assert is_png(tmp_path / "losses.png")
    assert is_png(tmp_path / "timeline.png")


SMALL_GPT = ("--steps", "6", "--batch", "8", "--microbatches", "4", "--width", "16", "--depth", "2")


def test_the_gpt_trains_as_in_one_process(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pictures = ("--losses", "curve.png", "--timeline", "timeline.png")
    written = torchrun(3, "train_gpt.py", *SMALL_GPT, *pictures, folder=tmp_path)
    assert "the first 2 steps equal one process" in written
    assert lines_of_steps(written) == ["step 6/6, loss"]
    assert "curve.png shows the loss of each step" in written
    assert is_png(tmp_path / "curve.png")
    assert is_png(tmp_path / "timeline.png")


def test_without_matplotlib_the_pictures_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ImportError(\"No module named 'matplotlib'\")\n")
    pictures = ("--timeline", "timeline.png")
    written = torchrun(2, "train_gpt.py", *SMALL_GPT, *pictures, folder=tmp_path, python_path=tmp_path)
    assert "the first 2 steps equal one process" in written
    assert "losses.png is left out: No module named 'matplotlib'" in written
    assert "timeline.png is left out: rank 0 could not write timeline.png: No module named 'matplotlib'" in written
    assert not list(tmp_path.glob("*.png"))


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("options", [(), ("--checkpointing",)])
def test_a_llama_of_transformers_trains_as_in_one_process(tmp_path: Path, options: tuple[str, ...]) -> None:
    pytest.importorskip("transformers")
    small = ("--steps", "6", "--batch", "8", "--microbatches", "4", "--width", "16", "--depth", "2")
    written = torchrun(3, "train_hf.py", *small, *options, folder=tmp_path)
    assert "the first 2 steps equal one process" in written
    assert "step 6/6" in written


def test_heterogeneous_meshes_train_as_in_one_process(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    written = torchrun(7, "heterogeneous_meshes.py", "--steps", "3", folder=tmp_path)
    assert "all 3 steps equal one process" in written
    assert "step 3/3" in written
    assert is_png(tmp_path / "losses.png")


FROM_DDP = ("ddp", "stages", "plan", "auto")
FEW_STEPS = ("--epochs", "2", "--samples", "290", "--batch", "64")


def losses_of(script: str, folder: Path, *arguments: str) -> dict[str, float]:
    """By epoch and step. Each script writes its checkpoints into a folder of its own name."""
    own = ("--losses", "losses.txt", "--checkpoints", script)
    written = torchrun(4, f"from_ddp/{script}.py", *FEW_STEPS, *own, *arguments, folder=folder)
    assert written.count("epoch 1, step 4/4") == 1, f"not shown by exactly one rank: {written}"
    assert "\r" not in written
    lines = [line.rsplit(" ", 1) for line in (folder / "losses.txt").read_text().splitlines()]
    return {step: float(loss) for step, loss in lines}


@pytest.fixture(scope="module")
def ddp_losses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """A process of torch 2.11 that has used DDP on gloo aborts now and then when it ends, without this package, too."""
    for _ in range(5):
        try:
            losses = losses_of("ddp", tmp_path_factory.mktemp("ddp"))
        except AssertionError as error:
            if "terminate called without an active exception" not in str(error):
                raise
        else:
            assert len(losses) == 8
            return losses
    raise AssertionError("DDP's processes aborted five times")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, float]]]:
    """By script, the folder that it ran in and its losses; those that have run."""
    return {}


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("script", FROM_DDP[1:])
def test_without_ddp_the_losses_stay(
    tmp_path_factory: pytest.TempPathFactory, runs: dict[str, Any], ddp_losses: dict[str, float], script: str
) -> None:
    folder = tmp_path_factory.mktemp(script)
    runs[script] = folder, losses_of(script, folder)
    assert runs[script][1] == pytest.approx(ddp_losses, abs=1e-5)


@pytest.mark.in_turn(3)
@pytest.mark.parametrize(("script", "other"), [("stages", "auto"), ("plan", "stages"), ("auto", "plan")])
def test_one_script_goes_on_from_what_another_has_saved(
    tmp_path: Path, runs: dict[str, Any], ddp_losses: dict[str, float], script: str, other: str
) -> None:
    if script not in runs:
        runs[script] = tmp_path, losses_of(script, tmp_path)
    resumed = losses_of(other, runs[script][0], "--resume", f"{script}/0")
    assert resumed == pytest.approx({step: ddp_losses[step] for step in ddp_losses if step[0] == "1"}, abs=1e-5)


def test_the_page_shows_how_the_scripts_differ() -> None:
    shown = re.findall(r"^```diff\n(.*?)^```$", (ROOT / "docs" / "from-ddp.md").read_text(), re.DOTALL | re.MULTILINE)
    texts = {
        f"{name}.py": (ROOT / "examples" / "from_ddp" / f"{name}.py").read_text().splitlines(True) for name in FROM_DDP
    }
    expected = [
        "".join(difflib.unified_diff(texts[before], texts[after], before, after, n=1))
        for before, after in itertools.pairwise(texts)
    ]
    assert "".join(shown) == "".join(expected)


def test_one_process_is_told_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="at least 2 processes"):
        torchrun(1, "train_unet_transformer.py", folder=tmp_path)
