"""The benchmark of automatic plans that run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import auto_parallel
import pytest
import torch
from parts.auto_parallel.models import subject
from parts.auto_parallel.records import Record, summary
from parts.shared.pacing import Paced
from redraw import redraw

FOUND = Record("a case", "found", "4 | 4 1f1b", 1.0, 0.9, 1.1, runs=2, wrong=0, peak_bytes=0, predicted_seconds=1.0)


def test_what_records_come_to() -> None:
    presets = [
        dataclasses.replace(FOUND, method="DP", seconds=2.0, predicted_seconds=1.8),
        dataclasses.replace(FOUND, method="ZeRO-2", seconds=1.9, predicted_seconds=2.0),
    ]
    rival = dataclasses.replace(FOUND, method="FSDP2 on gloo", seconds=4.0, predicted_seconds=None)
    (line,) = summary([FOUND, *presets, rival])
    assert line == (
        "a case: 0.53 of the best of presets (ZeRO-2), 0.25 of the best of rivals (FSDP2 on gloo), predictions off by "
        "10% at most, 1 of 3 pairs in the wrong order"
    )


def test_products_take_as_long_as_on_a_device_of_that_speed() -> None:
    """Matrix products and convolutions take as long as on a device of that speed, forward and backward. Outside,
    torch's own kernels run."""
    paced = Paced()
    slept: list[float] = []
    paced.sleep = slept.append
    paced.flops = 1e7
    a = torch.randn(16, 32, requires_grad=True)
    image = torch.randn(2, 3, 8, 8, requires_grad=True)
    convolution = torch.nn.Conv2d(3, 4, 3, padding=1)
    with paced:
        (a @ torch.randn(32, 64, requires_grad=True)).sum().backward()  # type: ignore[no-untyped-call]
        convolution(image).sum().backward()
    forward = 2 * 16 * 32 * 64 + 2 * 2 * 4 * 8 * 8 * 3 * 9
    assert paced.operations == 3 * forward
    assert slept
    a @ torch.randn(32, 64)
    assert paced.operations == 3 * forward
    with pytest.raises(RuntimeError) as outside:
        a @ torch.randn(3, 64)
    assert not [entry for entry in outside.traceback if "parts/shared/pacing" in str(entry.path)]


def test_subjects_are_the_same_each_time() -> None:
    for name in ("gpt", "wide-dense"):
        one, other = subject(name), subject(name)
        assert torch.equal(one.batch, other.batch)
        for p, q in zip(one.make().parameters(), other.make().parameters(), strict=True):
            assert torch.equal(p, q)


def test_plans_and_rivals_train_and_are_drawn(tmp_path: Path) -> None:
    path, picture = tmp_path / "out.json", tmp_path / "out.png"
    command = ["--cases", "2", "--methods", "found,found serial,FSDP2 on xmesh", "--runs", "1", "--no-shaping"]
    assert auto_parallel.main([*command, "--json", str(path), "--plot", str(picture)]) == 0
    records = json.loads(path.read_text())["records"]
    assert [record["method"] for record in records] == ["found", "found serial", "FSDP2 on xmesh"]
    assert all(record["wrong"] == 0 and record["seconds"] > 0 for record in records)
    drawn = picture.read_bytes()
    assert redraw(path).read_bytes() == drawn
