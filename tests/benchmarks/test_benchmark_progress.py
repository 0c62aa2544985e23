"""A benchmark under way: it says where it is, prints rows as they are measured, and leaves nothing when it is ended."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from parts.shared.progress import Listener, Progress

from torch_xmesh.testing.cluster import network

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_one_line_and_a_file_not_too_many() -> None:
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        rows: list[object] = []
        listener = Listener(rows.extend, Progress(stream))
        for line in ("[rank 0] progress: c1, auto", "[rank 1] progress: no", "[rank 0] progress: c1, striped", "noise"):
            print(line, file=listener.stream)
        print('[rank 0] rows: [{"case": "c1"}]', file=listener.stream)
        listener.end()
        assert rows == [{"case": "c1"}]
    assert terminal.getvalue() == "\r\x1b[Kc1, auto\r\x1b[Kc1, striped\r\x1b[K"
    assert file.getvalue() == "c1, auto\n"


def namespaces_of(pid: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(f"xmesh-{pid}-")]


@pytest.mark.in_turn(2)
@pytest.mark.skipif(network.unavailable_reason() is not None, reason="runs on Linux as root, with iproute2")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_benchmark_that_is_ended_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    """What SIGTERM leaves: nothing. What SIGKILL leaves is gone when the next benchmark has begun."""
    case = {"shape": [64, 64], "src_mesh": [0], "src": ["Replicate()"], "dst_mesh": [1], "dst": ["Replicate()"]}
    cases = [{**case, "name": name} for name in ("first", "second")]
    path = tmp_path / "cases.json"
    path.write_text(json.dumps(cases))
    options = f"--hosts 2 --devices 1 --rate 100mbit --strategies auto --runs 1000000 --case-file {path}".split()
    command = [sys.executable, str(BENCHMARKS / "reshard_perf.py"), *options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(BENCHMARKS.parent), *sys.path])}
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment
    ) as ran:
        assert ran.stderr is not None
        while "first, auto, " not in ran.stderr.readline():
            assert ran.poll() is None
        assert len(namespaces_of(ran.pid)) == 3
        ran.send_signal(number)
        code = ran.wait(timeout=30)
    assert code == (128 + signal.SIGTERM if number == signal.SIGTERM else -signal.SIGKILL)
    if number == signal.SIGKILL:
        assert len(namespaces_of(ran.pid)) == 3
        options[options.index("--runs") + 1] = "1"
        done = subprocess.run(
            [*command[:2], *options], capture_output=True, text=True, check=True, env=environment, timeout=120
        )
        rows = [line.split()[:2] for line in done.stdout.splitlines() if line.startswith("  ")]
        assert [row for row in rows if row[0] != "(MiB)"] == [["first", "auto"], ["second", "auto"]]
    assert namespaces_of(ran.pid) == []
