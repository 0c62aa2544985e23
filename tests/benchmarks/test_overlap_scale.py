"""HiDup's models in their own size, on paper."""

from __future__ import annotations

import json
from pathlib import Path

import overlap_scale
import pytest


@pytest.mark.timeout(900)
def test_steps_over_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Overlap never takes longer than the step without, and hides most of what is moved where that is half as long as
    the computation."""
    path, picture = tmp_path / "out.json", tmp_path / "out.png"
    given = ["--models", "BERT SGMoE", "--devices", "2,4", "--json", str(path), "--plot", str(picture)]
    assert overlap_scale.main(given) == 0
    assert picture.stat().st_size > 10_000
    records = {(one["network"], one["devices"], one["method"]): one for one in json.loads(path.read_text())["records"]}
    for (network, devices, method), one in records.items():
        unsplit = records[network, devices, "unsplit"]
        assert one["step_seconds"] <= (1.02 if method == "duplex" else 1.0) * unsplit["step_seconds"]
    fast = records["100 Gbit/s", 4, "overlap"]
    assert fast["hidden_seconds"] > 0.5 * fast["moved_seconds"]
    assert "on one host overlap takes at most" in capsys.readouterr().out


def test_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, expected in (
        (["--models", "GPT"], "there are no models ['GPT']"),
        (["--devices", "3"], "--devices are even numbers, got 3"),
    ):
        with pytest.raises(SystemExit):
            overlap_scale.main(arguments)
        assert expected in capsys.readouterr().err
