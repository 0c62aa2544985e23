"""Takes each guard of a reshard's or a pipeline's order on a device out of the sources, builds that, and counts its
test's wrong turns.

    python tests/device/mutants.py            # all of MUTANTS, behind a build of the whole
    python tests/device/mutants.py producer   # those of one test

Ends with 1 where a test of `test_device_guards.py` finds fewer than 100 of 100 turns wrong.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Mutant:
    """One guard, and what stands there instead of it."""

    test: str
    path: str
    guard: str
    instead: str = ""


MUTANTS = [
    Mutant("producer", "csrc/c10d/stream/call_on_device.cpp", "ready_.block(currentStream(device_));"),
    Mutant("producer", "csrc/c10d/stream/call_on_device.cpp", "ready_.record(currentStream(device_));"),
    Mutant("consumer", "csrc/c10d/stream/call_on_device.cpp", "end_.block(currentStream(device_));"),
    Mutant("consumer", "csrc/c10d/stream/call_on_device.cpp", "end_.record(currentStream(device_));"),
    Mutant("consumer", "csrc/c10d/reshard_work.cpp", "call_->waitEnqueued();"),
    Mutant("gradient", "csrc/c10d/stream/call_on_device.cpp", "end_.block(currentStream(device_));"),
    Mutant("unpacking", "csrc/c10d/stream/backend_transport.cpp", "work->wait();"),
    Mutant("source_memory", "csrc/c10d/movement.cpp", "alive->push_back(tensor.storage());"),
    Mutant("target_memory", "csrc/c10d/movement.cpp", "alive->push_back(tensor.storage());"),
    Mutant("source_memory", "csrc/c10d/stream/device_line.cpp", "return mark.event.query();", "return true;"),
    Mutant("target_memory", "csrc/c10d/stream/device_line.cpp", "return mark.event.query();", "return true;"),
    Mutant("mirrored_source", "csrc/c10d/stream/call_on_device.cpp", "ready_.block(currentStream(device_));"),
    Mutant("mirrored_target", "csrc/c10d/stream/call_on_device.cpp", "ready_.block(currentStream(device_));"),
    Mutant("mirrored_consumer", "csrc/c10d/stream/call_on_device.cpp", "end_.block(currentStream(device_));"),
    Mutant("mirrored_consumer", "csrc/c10d/stream/host_mirrors.cpp", "call_->markEnd(nullptr);"),
    Mutant("pipeline_producer", "csrc/c10d/stream/call_on_device.cpp", "ready_.block(currentStream(device_));"),
    Mutant("pipeline_producer", "csrc/c10d/stream/call_on_device.cpp", "ready_.record(currentStream(device_));"),
    Mutant("pipeline_consumer", "csrc/pipeline/traffic.cpp", "call.on_device->orderCurrentStream();"),
]


def count_wrong(mutant: Mutant, tree: Path) -> str:
    """Wrong turns of 100, as the test prints them."""
    source = tree / mutant.path
    whole = source.read_text()
    if whole.count(mutant.guard) != 1:
        sys.exit(f"{mutant.path}: expected {mutant.guard!r} once, found it {whole.count(mutant.guard)} times")
    source.write_text(whole.replace(mutant.guard, mutant.instead))
    try:
        cached = {"CCACHE_BASEDIR": str(tree), "CCACHE_NOHASHDIR": "1"}  # the first build is of all of it
        environment = {**os.environ, **cached, "PYTHONPATH": str(tree), "XMESH_CUDA": "0"}
        build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        subprocess.run(
            build, cwd=tree, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        case = f"tests/device/test_device_guards.py::test_guard[{mutant.test}]"
        command = [sys.executable, "-m", "pytest", "-q", "-s", case]
        ran = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    finally:
        source.write_text(whole)
    found = re.search(rf"{mutant.test}: (\d+) of 100 wrong", ran.stdout)
    return found[1] if found else f"none: it did not end well\n{ran.stdout[-2000:]}"


def main() -> int:
    wanted = [mutant for mutant in MUTANTS if len(sys.argv) == 1 or mutant.test in sys.argv[1:]]
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv*", "cpp-*", "__pycache__"))
        for mutant in wanted:
            wrong = count_wrong(mutant, tree)
            missed += wrong != "100"
            print(f"{mutant.test:14} without {mutant.guard:45} {wrong:>3} of 100 wrong", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
