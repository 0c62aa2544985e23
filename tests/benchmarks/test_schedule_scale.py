"""The benchmark of large pipelines on paper, on a small one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import schedule_scale


def test_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    arguments = ["--stages", "2,4", "--microbatches", "4,8", "--json", str(out), "--plot", str(picture)]
    assert schedule_scale.main(arguments) == 0
    records = json.loads(out.read_text())["records"]
    assert {(one["stages"], one["microbatches"]) for one in records} == {(2, 4), (2, 8), (4, 4), (4, 8)}
    for point in {(one["stages"], one["microbatches"]) for one in records}:
        mine = [one for one in records if (one["stages"], one["microbatches"]) == point]
        (chosen,) = (one for one in mine if one["is_chosen"])
        assert chosen["step_seconds"] <= 1.01 * min(one["step_seconds"] for one in mine)
        assert all(0 < one["bubble"] < 1 and one["peak_bytes"] > 0 for one in mine)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "longest choice" in capsys.readouterr().out
