"""The command line: every option, in this process; mistakes end with status 2 and one clear line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import torch_xmesh as xm
from torch_xmesh import _C
from torch_xmesh.cli.plan import parse_mesh, parse_placements, parse_shape
from torch_xmesh.testing import spawn
from xmesh_cli.main import main, parser

CASE = {
    "--shape": "64,32,16",
    "--dtype": "float32",
    "--src-mesh": "2x4",
    "--src": "Replicate(),Shard(1)",
    "--dst-mesh": "3x4@8",
    "--dst": "Shard(0),Replicate()",
    "--devices-per-host": "4",
    "--strategy": "auto",
}
FIELDS = {name.removeprefix("--").replace("-", "_"): value for name, value in CASE.items()}


def arguments(*more: str, **changes: str | None) -> list[str]:
    """The plan command with CASE's options, some changed or (None) left out."""
    options = CASE | {"--" + name.replace("_", "-"): value for name, value in changes.items()}
    out = ["plan"]
    for name, value in options.items():
        out += [] if value is None else [name, value]
    return [*out, *more]


def expected_plan(strategy: str = "auto") -> xm.ReshardingPlan:
    spec = xm.Spec((64, 32, 16), torch.float32, parse_mesh("2x4"), [Replicate(), Shard(1)])
    topology = xm.Topology(devices_per_host=4)
    return xm.plan_resharding(spec, parse_mesh("3x4@8"), [Shard(0), Replicate()], strategy=strategy, topology=topology)


def output_of(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_prints_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    out = output_of(capsys, *arguments())
    assert out == f"{expected_plan()}\n"
    for part in ("lower bound", "of the bound", "NIC out", "NIC in", "float32[64, 32, 16]"):
        assert part in out


@pytest.mark.parametrize("strategy", ["send_recv", "broadcast:naive+naive", "auto"])
def test_json_replays(capsys: pytest.CaptureFixture[str], strategy: str) -> None:
    out = output_of(capsys, *arguments("--json", strategy=strategy))
    assert xm.ReshardingPlan.from_json(out) == expected_plan(strategy)
    assert json.loads(out)["version"] == 1


def test_topology_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    xm.Topology(devices_per_host=4, nic_bytes_per_s=10**9).save(tmp_path / "topology.json")
    path = str(tmp_path / "topology.json")
    out = output_of(capsys, *arguments("--json", "--topology", path, devices_per_host=None))
    plan = xm.ReshardingPlan.from_json(out)
    assert plan.core.topology.links.nic_bytes_per_s == 10**9
    assert plan.lower_bound_bytes == expected_plan().lower_bound_bytes


def case_file(tmp_path: Path, cases: Any) -> str:
    path = tmp_path / "cases.json"
    path.write_text(cases if isinstance(cases, str) else json.dumps(cases))
    return str(path)


def test_case_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    one = {name: FIELDS[name] for name in ("shape", "dtype", "src_mesh", "src", "dst_mesh", "dst")}
    other = {
        "name": "lists",
        "shape": [8, 4],
        "src_mesh": [[0, 1], [2, 3]],
        "src": ["Shard(0)", "Shard(dim=1)"],
        "dst_mesh": [5, 4],
        "dst": ["Replicate()"],
    }
    command = ["plan", "--case-file", case_file(tmp_path, [one, other]), "--devices-per-host", "4"]
    plans = [
        xm.ReshardingPlan.from_json(json.dumps(plan)) for plan in json.loads(output_of(capsys, *command, "--json"))
    ]
    assert plans[0] == expected_plan()
    source, target = plans[1].specs[0]
    assert (source.mesh, source.placements) == (xm.Mesh([[0, 1], [2, 3]]), (Shard(0), Shard(1)))
    assert (target.mesh, target.placements, str(target.dtype)) == (xm.Mesh([5, 4]), (Replicate(),), "torch.float32")
    out = output_of(capsys, *command)
    assert out.startswith(f"# case 0\n{plans[0]}\n# lists\n")
    assert out.count("lower bound") == 2
    assert output_of(capsys, *command, "--compare").count("lower bound") == 2


def test_plot(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    output_of(capsys, *arguments("--plot", str(tmp_path / "plan.png")))
    assert (tmp_path / "plan.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_compare(capsys: pytest.CaptureFixture[str]) -> None:
    head, columns, *rows = output_of(capsys, *arguments("--compare")).splitlines()
    assert f"lower bound {expected_plan().lower_bound_bytes} bytes" in head
    assert columns.split()[0] == "strategy"
    assert [row.split()[0] for row in rows] == _C.strategy_names()
    for row in rows:
        name, seconds, ratio, messages = row.split()
        plan = expected_plan(name)
        assert float(seconds) == pytest.approx(plan.predicted_seconds, rel=1e-4)
        assert float(ratio) == pytest.approx(plan.predicted_seconds / plan.lower_bound_seconds, abs=1e-3)
        assert int(messages) == plan.num_messages


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"shape": "4,x"}, "shape '4,x': expected integers"),
        ({"shape": "4,-4,4"}, "-4"),
        ({"shape": f"{1 << 80},2,2"}, str(1 << 80)),
        ({"shape": None}, "--shape is missing"),
        ({"dtype": "float31"}, "unknown dtype 'float31'"),
        ({"dtype": "nn"}, "unknown dtype 'nn'"),
        ({"src_mesh": "2y4"}, "mesh '2y4': expected"),
        ({"src_mesh": "0x4"}, "0 ranks"),
        ({"src_mesh": "99999x99999"}, "expected 1 to"),
        ({"src_mesh": "[[0, 0]]"}, "distinct"),
        ({"src_mesh": '{"a": 1}'}, "array of integers"),
        ({"src": "Shard(1)"}, "one placement per mesh axis"),
        ({"src": "Shard(7),Replicate()"}, "out of range"),
        ({"src": "Scatter(1),Replicate()"}, "placement 'Scatter(1)': expected Replicate()"),
        ({"src": "Partial(norm),Replicate()"}, "norm"),
        ({"dst": "Partial(sum),Replicate()"}, "artial"),
        ({"dst_mesh": None}, "--dst-mesh is missing"),
        ({"devices_per_host": None}, "--devices-per-host N or --topology FILE"),
        ({"devices_per_host": "0"}, "positive"),
        ({"topology": "nowhere.json"}, "so does --devices-per-host: give one of them"),
        (
            {"topology": "nowhere.json", "devices_per_host": None},
            "--topology: [Errno 2] No such file or directory: 'nowhere.json'",
        ),
        ({"strategy": "fastest"}, "unknown strategy 'fastest'"),
        ({"case_file": "nowhere.json"}, "it goes without --shape"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], changes: dict[str, str | None], pattern: str) -> None:
    assert main(arguments(**changes)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert pattern in err


@pytest.mark.parametrize(
    ("content", "pattern"),
    [
        ("{", "not JSON"),
        ("{}", "expected a list of objects"),
        ("[]", "expected a list of objects"),
        ("[1]", "expected a list of objects"),
        ([{"name": "odd", "speed": 3}], "odd has the unknown field 'speed'"),
        ([{"name": "short", "shape": [1]}], "short: --src-mesh is missing"),
        ([FIELDS], "unknown field"),
    ],
)
def test_bad_case_files(capsys: pytest.CaptureFixture[str], tmp_path: Path, content: Any, pattern: str) -> None:
    assert main(["plan", "--case-file", case_file(tmp_path, content), "--devices-per-host", "4"]) == 2
    err = capsys.readouterr().err
    assert "cases.json" in err
    assert pattern in err


def test_options_that_do_not_go_together(capsys: pytest.CaptureFixture[str]) -> None:
    for more in (["--compare", "--json"], ["--compare", "--plot", "plan.png"]):
        assert main(arguments(*more)) == 2
        assert "--compare" in capsys.readouterr().err


@pytest.mark.parametrize("command", [[], ["plane"], ["plan", "--speed", "3"], ["plan", "--devices-per-host", "four"]])
def test_usage(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(command)
    assert caught.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_calibrate_needs_a_group(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main(["calibrate"]) == 2
    assert "torchrun" in capsys.readouterr().err


def calibrate_on_a_host_of_its_own(rank: int, world_size: int, path: str) -> int:
    os.environ["XMESH_HOST_ID"] = f"host{rank}"
    return main(["calibrate", "--out", path, "--num-bytes", str(1 << 20)])


def test_plans_read_what_calibrate_wrote(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    assert spawn(calibrate_on_a_host_of_its_own, 2, str(path), backend=None) == [0, 0]
    topology = xm.Topology.load(path)
    assert topology.links.is_measured
    command = (
        "plan --shape 1000000 --dtype uint8 --src-mesh 1 --src R --dst-mesh 1@1 --dst R --strategy send_recv --json"
    )
    assert main([*command.split(), "--topology", str(path)]) == 0
    plan = xm.ReshardingPlan.from_json(capsys.readouterr().out)
    assert plan.topology == topology
    assert plan.bytes_received(1) == 1_000_000
    assert plan.lower_bound_seconds >= 1_000_000 / topology.links.nic_bytes_per_s


PLACEMENTS: list[tuple[str, list[Placement]]] = [
    ("Replicate(),Shard(1)", [Replicate(), Shard(1)]),
    (" R , S0 , S12", [Replicate(), Shard(0), Shard(12)]),
    ("S(0), S(-1), R()", [Shard(0), Shard(-1), Replicate()]),
    ("Shard(dim=1),Shard(-1)", [Shard(1), Shard(-1)]),
    (
        "StridedShard(0, 2),_StridedShard(dim=1, sf=4)",
        [_StridedShard(0, split_factor=2), _StridedShard(1, split_factor=4)],
    ),
    ("Partial(sum),Partial(max),Partial()", [Partial("sum"), Partial("max"), Partial("sum")]),
    ("Partial('avg')", [Partial("avg")]),
    ("", []),
]


@pytest.mark.parametrize(("text", "placements"), PLACEMENTS)
def test_placements_as_people_write_them(text: str, placements: list[Placement]) -> None:
    assert parse_placements(text) == placements
    assert parse_placements(list(map(str, map(repr, placements)))) == placements  # as torch prints them


def test_meshes_and_shapes_as_people_write_them() -> None:
    assert (
        parse_mesh("2x2@4")
        == parse_mesh("[[4, 5], [6, 7]]")
        == parse_mesh([[4, 5], [6, 7]])
        == xm.Mesh([[4, 5], [6, 7]])
    )
    assert parse_mesh("3") == parse_mesh(3) == xm.Mesh([0, 1, 2])
    assert (parse_shape(" 4, 5 "), parse_shape(""), parse_shape([4]), parse_shape(7)) == ([4, 5], [], [4], [7])


def test_as_a_module() -> None:
    command = [sys.executable, "-m", "torch_xmesh", *arguments("--json", strategy="send_recv")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=150)
    assert (done.returncode, done.stderr) == (0, "")
    assert xm.ReshardingPlan.from_json(done.stdout) == expected_plan("send_recv")


def test_the_reader_may_have_enough() -> None:
    """`plan --json | head`: no traceback, and the status that a shell gives to who wrote into a closed pipe."""
    command = [sys.executable, "-m", "xmesh_cli", *arguments("--json")]
    reads, writes = os.pipe()
    os.close(reads)  # before the command writes its first byte: how much the pipe holds plays no part
    try:
        done = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, check=False, timeout=150)
    finally:
        os.close(writes)
    assert (done.returncode, done.stderr) == (141, b"")


def test_help_comes_without_torch() -> None:
    """Arguments are read, and refused, before anything large is imported."""
    script = "import sys; from xmesh_cli.main import parser; parser().format_help(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=True, text=True)
    assert done.stdout == "False\n"


UNITS = [
    ("memory_limit", "--memory-limit=1KiB", 1024),
    ("memory_limit", "--memory-limit=40GB", 40 * 10**9),
    ("flops", "--flops=312T", 312e12),
    ("flops", "--flops=312TFLOPS", 312e12),
    ("flops", "--flops=3.12e14", 312e12),
    ("bytes_per_s", "--bytes-per-s=2TB/s", 2e12),
    ("bytes_per_s", "--bytes-per-s=2e12", 2e12),
]


@pytest.mark.parametrize(("name", "argument", "value"), UNITS)
def test_units(name: str, argument: str, value: float) -> None:
    options = parser().parse_args(["parallelize", "model.py:make", "--mesh", "1x2", argument])
    assert getattr(options, name) == value


@pytest.mark.parametrize(
    "argument",
    ["--memory-limit=0", "--memory-limit=1XB", "--flops=fast", "--bytes-per-s=0", "--flops=1e999", "--microbatches=0"],
)
def test_wrong_units_name_the_argument(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["parallelize", "model.py:make", "--mesh", "1x2", argument])
    said = capsys.readouterr().err
    assert f"argument {argument.partition('=')[0]}: expected" in said


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"torch_xmesh {xm.__version__} (torch {torch.__version__})\n"


@pytest.mark.parametrize("size", ["0", "-4", "many"])
def test_calibrate_wants_bytes(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["calibrate", f"--num-bytes={size}"])
    assert ended.value.code == 2
    assert f"expected a positive number of bytes such as 64MiB, got '{size}'" in capsys.readouterr().err


def test_unknown_fields_of_a_topology(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "topology.json"
    for field, hint in (("nic_byte_per_s", "did you mean 'nic_bytes_per_s'?"), ("zebra", "known are host_of, devices")):
        path.write_text(json.dumps({"version": 1, "devices_per_host": 4, field: 1}))
        assert main(arguments("--topology", str(path), devices_per_host=None)) == 2
        err = capsys.readouterr().err
        assert f"unknown field {field!r}; " in err
        assert hint in err


def test_no_ratio_over_a_bound_of_nearly_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = arguments(shape="4,1,1", src_mesh="1", src="R", dst_mesh="1@8", dst="R")
    assert "nearly all of it latency" in output_of(capsys, *small, "--plot", str(tmp_path / "plan.png"))
    rows = output_of(capsys, *small, "--compare").splitlines()[2:]
    assert all(row.split()[2] == "-" for row in rows)
    spec = xm.Spec((4,), torch.float32, xm.Mesh([0]), [Replicate()])
    topology = xm.Topology(devices_per_host=4)
    assert xm.plan_resharding(spec, xm.Mesh([8]), [Replicate()], topology=topology).bound_ratio is None
    plan = expected_plan()
    assert plan.bound_ratio == plan.predicted_seconds / plan.lower_bound_seconds


def test_the_picture_has_the_lanes_in_use_and_the_hosts_in_its_legend(tmp_path: Path) -> None:
    path = tmp_path / "plan.svg"
    expected_plan().plot(path)
    drawn = [text.strip() for text in re.findall(r"<!-- (.*?) -->", path.read_text())]
    lanes = [text for text in drawn if re.fullmatch(r"host \d+ (sends|receives)", text)]
    assert {lane.split()[2] for lane in lanes} == {"sends", "receives"}
    assert [lane for lane in lanes if lane in ("host 0 receives", "host 1 receives")] == []
    senders = {text for text in drawn if text.startswith("sent by host ")}
    assert senders == {f"sent by host {lane.split()[1]}" for lane in lanes if lane.endswith("sends")}
    assert any(text.startswith("us, as") for text in drawn)
