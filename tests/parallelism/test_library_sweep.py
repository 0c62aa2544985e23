"""Models of libraries under all plans of library_sweep.py: they train as one process does, or are refused, as
library_sweep.json says. Run the soak test with ``XMESH_WRITE_SWEEP=1`` to write that file."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import library_sweep
import pytest
import torch
from library_sweep import KINDS, Job, outcome_of, train
from models.libraries import SWEPT
from torch import nn
from turns import part_of_commit

import torch_xmesh as xm
from torch_xmesh.testing import RankError, spawn

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="runs on any machine with the packages of the extra `models` (tests/run.sh brings them with torch 2.11)",
)
RESULTS = Path(__file__).with_name("library_sweep.json")
ROOT = Path(__file__).resolve().parents[2]
_TRAINED_TOGETHER = 6
PARTS = 44
"""One model or two are tried with each commit, all of them with --soak."""


def sweep(names: Sequence[str]) -> dict[str, dict[str, str]]:
    """By model and kind of plan "trains", or why it is refused."""
    outcomes: dict[str, dict[str, str]] = {}
    jobs: list[Job] = []
    for name in names:
        outcomes[name] = {}
        for kind in KINDS:
            found = outcome_of(name, kind)
            if isinstance(found, Job):
                jobs.append(found)
            outcomes[name][kind] = "trains" if isinstance(found, Job) else found
    spawn(train, 4, jobs, timeout=1500)
    return outcomes


def check(names: Sequence[str]) -> None:
    known = json.loads(RESULTS.read_text())
    for name, found in sweep(names).items():
        assert found == known[name], f"{name}: run the soak test with XMESH_WRITE_SWEEP=1, and scripts/model_table.py"


@pytest.mark.timeout(1600)
def test_some_of_the_models(capsys: pytest.CaptureFixture[str]) -> None:
    part = part_of_commit(PARTS)
    names = SWEPT[part::PARTS]
    with capsys.disabled():
        print(f"\nmodels of libraries, part {part} of {PARTS}: {', '.join(names)}")
    check(names)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(0, len(SWEPT), _TRAINED_TOGETHER))
def test_all_models(first: int) -> None:
    names = SWEPT[first : first + _TRAINED_TOGETHER]
    if not os.environ.get("XMESH_WRITE_SWEEP"):
        check(names)
        return
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    known |= sweep(names)
    written = {name: known[name] for name in SWEPT if name in known}
    RESULTS.write_text(json.dumps(written, indent=1) + "\n")


def test_the_page_says_what_was_found() -> None:
    script = ROOT / "scripts" / "model_table.py"
    ran = subprocess.run([sys.executable, str(script), "--check"], check=False)
    assert ran.returncode == 0, "run scripts/model_table.py"
    assert [*json.loads(RESULTS.read_text())] == [*SWEPT]


def fails(rank: int, world_size: int, jobs: Sequence[Job]) -> None:
    compare = library_sweep.compare

    def of_other_gradients(engine: xm.PipelineEngine, reference: nn.Module, dtype: torch.dtype) -> None:
        for parameter in engine.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(1.001)
        compare(engine, reference, dtype)

    library_sweep.compare = of_other_gradients
    train(rank, world_size, jobs)


def test_gradients_that_are_off_are_seen() -> None:
    job = outcome_of("Llama", "Megatron")
    assert isinstance(job, Job)
    with pytest.raises(RankError, match=r"Llama, Megatron: .*\.grad is off by"):
        spawn(fails, 4, [job], timeout=300)
