"""Collectives as reshards against gloo's: every method gives the right values, mistakes are said."""

from __future__ import annotations

import json
from pathlib import Path

import collectives_perf
import pytest
from parts.collectives.worker import METHODS, PLACEMENTS


def test_all_rows_are_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    arguments = ["--devices", "3", "--sizes", "4KiB,70KB", "--runs", "1", "--json", str(path)]
    assert collectives_perf.main(arguments) == 0
    assert "#wrong over all rows: 0" in capsys.readouterr().out
    records = json.loads(path.read_text())["records"]
    found = [(record["collective"], record["method"]) for record in records]
    assert found == [(name, method) for name in PLACEMENTS for _ in range(2) for method in METHODS]
    assert all(record["seconds"] > 0 and record["wrong"] == 0 for record in records)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [("--collectives all_reduce,scatter", "['scatter'] are not among"), ("--sizes 4KiB,many", "expected a size")],
)
def test_mistakes(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        collectives_perf.main(arguments.split())
    assert message in capsys.readouterr().err
