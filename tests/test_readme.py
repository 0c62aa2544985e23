"""The README's Python runs as typed on 4 ranks, and its picture of a plan is what the command prints."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

from torch_xmesh.cli import main
from torch_xmesh.testing import spawn

TEXT = (Path(__file__).resolve().parents[1] / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)


def run_as_typed(rank: int, world_size: int, script: str, folder: str) -> None:
    os.chdir(folder)
    exec(compile(script, "README.md", "exec"), {"__name__": "__main__"})


def test_python_runs_as_typed(tmp_path: Path) -> None:
    script = "\n".join(blocks("python"))
    assert "init_process_group" in script
    assert "destroy_process_group" in script
    spawn(run_as_typed, 4, script, str(tmp_path), backend=None)
    assert (tmp_path / "checkpoint" / ".metadata").exists()


def test_picture_of_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = blocks("console")
    command, _, printed = block.partition("\n")
    assert command.startswith("$ python -m torch_xmesh ")
    assert main(shlex.split(command)[4:]) == 0
    actual = [line.rstrip() for line in capsys.readouterr().out.rstrip().splitlines()]
    assert actual == printed.rstrip().splitlines()
