"""The benchmarks measure what they say: bounds and tiles against independent oracles, wrong elements found."""

import json
import math
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from parts.resharding import case_file  # noqa: E402
from parts.resharding import cases as bench_cases  # noqa: E402
from parts.resharding.methods import RankData, pattern  # noqa: E402
from parts.resharding.overlaps import Box, bound_seconds, overlaps, tile  # noqa: E402
from parts.resharding.random_layouts import random_layout  # noqa: E402
from parts.resharding.records import Record, cells, live_table  # noqa: E402
from parts.shared import disturbance  # noqa: E402
from parts.shared.harness import wrong_note  # noqa: E402

from torch_xmesh import _C  # noqa: E402
from torch_xmesh.testing.cluster import unavailable_reason  # noqa: E402

MIB = 1 << 20


def host_of(rank: int) -> int:
    return rank // 4


def within(box: Box) -> tuple[slice, ...]:
    return tuple(slice(begin, end) for begin, end in box)


def suite(name: str, num_bytes: int = MIB) -> dict[str, bench_cases.Case]:
    found = bench_cases.suite_cases(name, num_bytes=num_bytes, hosts=5, devices=4, seeds=range(40))
    return {case.name: case for case in found}


def test_the_suites_have_the_published_sizes() -> None:
    assert list(suite("table2")) == [f"c{i}" for i in range(1, 10)]
    assert list(suite("fig5")) == ["1to1x1", "1to1x2", "1to1x3", "1to1x4", "1to2x2", "1to3x2", "1to4x2"]
    for case in suite("refit", 64 * MIB).values():
        assert len(case.tensors) >= 200
        assert case.num_bytes == pytest.approx(64 * MIB, rel=0.25)
    for case in suite("table2", 64 * MIB).values():
        assert case.num_bytes == pytest.approx(64 * MIB, rel=0.05)


def test_the_page_says_what_the_published_cases_are() -> None:
    page = (Path(__file__).parents[2] / "docs" / "performance.md").read_text()
    for name, case in suite("table2", 64 * MIB).items():
        (layout,) = case.tensors
        ways = []
        for mesh, placements in ((case.src_mesh, layout.src), (case.dst_mesh, layout.dst)):
            short = [text[0] + "".join(filter(str.isdigit, text)) for text in placements]
            ways.append(f"{'x'.join(map(str, mesh.shape))}, {' '.join(short)}")
        mib = bound_seconds(case, host_of, [float(MIB)] * 5)
        row = f"| {name} | {layout.shape} | {' | '.join(ways)} | {len(overlaps(case))} | {mib:g} MiB |"
        assert row in page


def test_unit_tasks_match_the_published_numbers() -> None:
    tasks = {name: len(overlaps(case)) for name, case in suite("table2").items()}
    # c8 is fully replicated, as the paper prints it.
    assert tasks == {"c1": 2, "c2": 2, "c3": 4, "c4": 64, "c5": 4, "c6": 4, "c7": 4, "c8": 1, "c9": 4}


def test_bounds_of_the_published_cases() -> None:
    rates = [1e6] * 5
    for name, case in suite("table2").items():
        halves = 1.0 if name in ("c7", "c8") else 0.5
        assert bound_seconds(case, host_of, rates) == pytest.approx(case.num_bytes * halves / 1e6), name
    for case in suite("fig5").values():
        assert bound_seconds(case, host_of, rates) == pytest.approx(case.num_bytes / 1e6)
    slow_receiver = [1e6, 1e6, 0.25e6, 1e6, 1e6]
    case = suite("table2")["c1"]
    assert bound_seconds(case, host_of, slow_receiver) == pytest.approx(case.num_bytes * 0.5 / 0.25e6)


def test_nothing_to_send_has_bound_zero() -> None:
    mesh = np.arange(4)
    layout = bench_cases.TensorLayout((8, 8), "float32", ("Replicate()",), ("Shard(0)",))
    assert bound_seconds(bench_cases.Case("own", mesh, mesh, (layout,)), host_of, [1e6]) == 0


@pytest.mark.parametrize("seed", range(40))
def test_tiles_follow_torchs_rule(seed: int) -> None:
    layout = random_layout(seed, num_items=5000)
    for mesh, texts in ((layout.src_mesh, layout.src), (layout.dst_mesh, layout.dst)):
        placements = [Shard(int(text[6:-1])) if text.startswith("Shard") else Replicate() for text in texts]
        for coordinate in product(*(range(extent) for extent in mesh.shape)):
            shape, offset = _compute_local_shape_and_global_offset(
                layout.shape, mesh.shape, list(coordinate), placements
            )
            box = tile(layout.shape, mesh, texts, int(mesh[coordinate]))
            assert box is not None
            assert tuple(end - begin for begin, end in box) == tuple(shape)
            if math.prod(shape):
                assert tuple(begin for begin, _ in box) == tuple(offset)


@pytest.mark.parametrize("seed", range(12))
def test_overlaps_cover_every_destination_tile_once(seed: int) -> None:
    layout = random_layout(seed, max_hosts=3, max_devices=4, num_items=600)
    tensor = bench_cases.TensorLayout(layout.shape, "float32", layout.src, layout.dst)
    case = bench_cases.Case("c", layout.src_mesh, layout.dst_mesh, (tensor,))
    source = np.zeros((int(layout.src_mesh.max()) + 1, *layout.shape), dtype=np.int8)
    wanted = np.zeros((int(layout.dst_mesh.max()) + 1, *layout.shape), dtype=np.int8)
    for mesh, texts, marks in ((layout.src_mesh, layout.src, source), (layout.dst_mesh, layout.dst, wanted)):
        for rank in mesh.reshape(-1).tolist():
            box = tile(layout.shape, mesh, texts, rank)
            assert box is not None
            marks[rank][within(box)] = 1
    for part in overlaps(case):
        assert all((source[rank][within(part.box)] == 1).all() for rank in part.holders)
        for rank in part.needers:
            wanted[rank][within(part.box)] -= 1
    assert (wanted == 0).all()


def test_random_layouts_are_a_function_of_the_seed_and_of_all_kinds() -> None:
    layouts = [random_layout(seed) for seed in range(200)]
    again = random_layout(7)
    assert (again.shape, again.src, again.dst) == (layouts[7].shape, layouts[7].src, layouts[7].dst)
    for layout in layouts:
        common = np.intersect1d(layout.src_mesh // 8, layout.dst_mesh // 8)
        assert (len(common) == 0) == (layout.relation == "disjoint")
        if layout.relation == "identical":
            assert sorted(layout.src_mesh.flat) == sorted(layout.dst_mesh.flat)
    assert {layout.src_mesh.ndim for layout in layouts} == {1, 2, 3}
    assert {len(layout.shape) for layout in layouts} == {1, 2, 3, 4}
    assert all(case.world_size <= 20 for case in suite("random").values())


def test_the_pattern_depends_on_the_global_index_alone() -> None:
    layout = bench_cases.TensorLayout((6, 5, 4), "float32", (), ())
    whole = pattern(layout, 3, ((0, 6), (0, 5), (0, 4)))
    assert torch.equal(pattern(layout, 3, ((2, 5), (1, 4), (3, 4))), whole[2:5, 1:4, 3:4])
    assert not torch.equal(pattern(layout, 4, ((0, 6), (0, 5), (0, 4))), whole)
    assert len(set(whole.flatten().tolist())) > 100


def test_wrong_elements_are_counted() -> None:
    data = RankData.make(suite("table2")["c1"], rank=8)
    out = data.expected[0].clone()
    assert data.count_wrong([out]) == 0
    out[3, 4, 1] += 1
    out[5, 6, 2] += 1
    assert data.count_wrong([out]) == 2
    data.poison()
    assert data.count_wrong(data.outs) == data.expected[0].numel()
    assert data.count_wrong([torch.empty(0)]) == data.expected[0].numel()


def test_the_table_has_units_and_the_sum_of_wrong_elements(capsys: pytest.CaptureFixture[str]) -> None:
    record = Record("c1", "auto", 64 * MIB, 1.5, 1.4, 1.6, 1.4, 1.07, 1.45, 12, 3, 5, 0.5, "striped")
    live = live_table(["c1"], ["auto"])
    live.begin(["a note"])
    live.rows([cells(record)])
    live.note(wrong_note([record]))
    text = capsys.readouterr().out
    assert text.splitlines()[0] == "# a note"
    assert "#wrong" in text
    assert "auto (striped)" in text
    assert text.splitlines()[-1] == "# #wrong over all rows: 3"


def test_stolen_time_is_a_share_of_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter(["cpu  100 0 50 800 0 0 0 50 7 0\ncpu0", "cpu  150 0 50 850 0 0 0 150 9 0\ncpu0"])
    monkeypatch.setattr(Path, "read_text", lambda _: next(readings))
    assert disturbance.StolenTime().share() == 0.5


def test_the_case_file_says_what_is_wrong(tmp_path: Path) -> None:
    entry = {"name": "mine", "shape": "16,8", "src_mesh": "2x4", "src": "Shard(0),Replicate()"}
    path = tmp_path / "cases.json"
    path.write_text(json.dumps([entry]))
    with pytest.raises(ValueError, match="mine: missing dst_mesh, dst"):
        case_file.read_cases(path)
    path.write_text(json.dumps([entry | {"dst_mesh": "3x4@8", "dst": "Shard(1)"}]))
    with pytest.raises(ValueError, match="mine: expected 2 dst placements"):
        case_file.read_cases(path)
    path.write_text(json.dumps([entry | {"dst_mesh": "3x4@8", "dst": "Shard(1),Replicate()"}]))
    (case,) = case_file.read_cases(path)
    assert case.dst_mesh.tolist() == (np.arange(12).reshape(3, 4) + 8).tolist()
    assert case.tensors[0].src == ("Shard(0)", "Replicate()")


def run_suite(tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    out = tmp_path / "out.json"
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "reshard_perf.py"), *arguments, "--json", str(out)],
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# #wrong over all rows: 0" in done.stdout
    return list(json.loads(out.read_text())["records"])


@pytest.mark.in_turn(2)
def test_a_suite_end_to_end(tmp_path: Path) -> None:
    rate = "none" if unavailable_reason() else "400mbit"
    records = run_suite(
        tmp_path,
        *("--suite", "fig5", "--cases", "1to1x2,1to2x2", "--hosts", "3", "--devices", "2", "--rate", rate),
        *("--strategies", "auto,torch_p2p,torch_broadcast", "--num-bytes", "1MiB", "--runs", "2"),
        *("--plot", str(tmp_path / "out.png"), "--rate-of", "2=200mbit"),
    )
    assert [(r["case"], r["strategy"]) for r in records] == [
        (case, strategy) for case in ("1to1x2", "1to2x2") for strategy in ("auto", "torch_p2p", "torch_broadcast")
    ]
    for record in records:
        assert record["wrong"] == 0
        assert record["num_bytes"] == MIB
        assert record["runs"] == 2
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    bounds = {record["case"]: record["bound_seconds"] for record in records}
    assert bounds["1to2x2"] == pytest.approx(bounds["1to1x2"] * (1 if rate == "none" else 2))
    costs = json.loads((tmp_path / "out.json").read_text())["about"]["costs"]
    assert costs["local_bytes_per_s"] > 0
    assert ("message_us" in costs) == (rate != "none"), "on plain localhost there is one host"


@pytest.mark.in_turn(2)
def test_a_case_file_under_every_strategy(tmp_path: Path) -> None:
    """c7 and c9 on smaller meshes, with a dim that two ranks share unevenly, and a mesh onto itself; without a budget
    only `auto` is timed again."""
    published = suite("table2")
    entries: list[dict[str, Any]] = [
        {"name": name, "shape": [96, 35, 24], "src_mesh": src_mesh, "dst_mesh": dst_mesh}
        | {"src": list(published[name].tensors[0].src), "dst": list(published[name].tensors[0].dst)}
        for name, src_mesh, dst_mesh in (("c7", "1x2", "2x2@2"), ("c9", "2x2", "2x1@4"))
    ]
    itself = bench_cases.random_case(27, num_bytes=MIB // 4, hosts=3, devices=2)
    assert sorted(itself.src_mesh.flat) == sorted(itself.dst_mesh.flat) == list(range(6))
    layout = itself.tensors[0]
    entries.append(
        {"name": "itself", "shape": list(layout.shape), "src": list(layout.src), "dst": list(layout.dst)}
        | {"src_mesh": itself.src_mesh.tolist(), "dst_mesh": itself.dst_mesh.tolist()}
    )
    path = tmp_path / "cases.json"
    path.write_text(json.dumps([*entries, entries[0] | {"name": "left out"}]))
    records = run_suite(
        tmp_path,
        *("--case-file", str(path), "--cases", "c7,c9,itself", "--strategies", "all", "--runs", "2"),
        *("--budget-seconds", "0"),
        *("--hosts", "3", "--devices", "2", "--rate", "none" if unavailable_reason() else "400mbit"),
    )
    strategies = ("auto", *_C.strategy_names(), "torch_p2p", "torch_broadcast")
    assert [(r["case"], r["strategy"]) for r in records] == list(product(("c7", "c9", "itself"), strategies))
    for record in records:
        assert record["wrong"] == 0
        assert record["bound_seconds"] > 0
        assert record["runs"] == (2 if record["strategy"] == "auto" else 1)
    assert json.loads((tmp_path / "out.json").read_text())["about"]["case_file"] == "cases.json"
