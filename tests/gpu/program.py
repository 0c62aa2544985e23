"""What a machine with a GPU can show, as a program of steps: ``bash tests/run.sh --gpu`` runs it.

    python tests/gpu/program.py RESULTS_FOLDER [--fresh] [--minutes 8] [--only STEP,STEP]

Each step is a process of its own in a process group of its own, with a time limit; whatever becomes of it, the next
one runs. What a step finds is printed and written at once, to ``results.json`` (by step; ``machine`` has the versions)
and ``log.txt`` (all output). A second run of the same sources into the same folder goes on with the steps that have
not ended; ``--fresh`` begins again.

It needs a Python with torch, setuptools, ninja, numpy, pytest, hypothesis and psutil, and g++; for kernels nvcc.
Nothing is fetched. To build elsewhere for it, take the same torch and the other machine's Python:
``XMESH_PYTHON=/path/python3.12 bash examples/run.sh``, copy ``torch_xmesh/_C.*.so`` and ``_cuda_kernels.so``, and run
with ``--built``.

Where there is no GPU it is a dry run: each step sets up what it can (imports, models, layouts, plans), and the end of
the output lists the steps that wait for a device.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, TextIO

from report import PREFIX
from steps import STEPS, Step

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ENDED = ("passed", "failed")


class Results:
    """results.json and log.txt of a folder."""

    def __init__(self, folder: Path, is_fresh: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "results.json"
        self._tree = tree()
        found = json.loads(self._file.read_text()) if self._file.exists() else {}
        is_fresh = is_fresh or found.get("tree") != self._tree
        self.steps: dict[str, dict[str, Any]] = {} if is_fresh else found["steps"]
        self.log: TextIO = (folder / "log.txt").open("w" if is_fresh else "a", buffering=1)

    def save(self) -> None:
        partly = self._file.with_suffix(".partly")
        partly.write_text(json.dumps({"tree": self._tree, "steps": self.steps}, indent=1) + "\n")
        partly.rename(self._file)

    def say(self, line: str) -> None:
        print(line, flush=True)
        self.log.write(line + "\n")


def tree() -> str:
    """What the results are of: a hash of the sources."""
    digest = hashlib.sha256()
    for folder in ("csrc", "torch_xmesh", "tests/gpu", "tests/distributed"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in {".py", ".h", ".cpp", ".cu"} and path.name != "_build_info.py":
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def run_step(step: Step, device: str, limit_s: float, results: Results) -> str:
    """Runs it and returns what became of it: passed, failed, cut off."""
    record: dict[str, Any] = {"status": "cut off", "device": device, "found": []}
    results.steps[step.name] = record
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, str(HERE / "steps.py"), step.name, device],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        cwd=ROOT,
        start_new_session=True,
    )

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(PREFIX):
                entry = json.loads(line.removeprefix(PREFIX))
                record["found"].append(entry)
                results.save()
                results.say(f"   {entry['text']}")
            else:
                results.log.write(line)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        code = process.wait(limit_s)
        record["status"] = "passed" if code == 0 else "failed"
    except subprocess.TimeoutExpired:
        pass
    finally:
        end_group(process.pid)
    reader.join(5)
    record["seconds"] = round(time.monotonic() - began, 1)
    results.save()
    return str(record["status"])


def end_group(leader: int) -> None:
    """Ranks too: they are in their step's group."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return


def device_here() -> str:
    """What the steps run on: "cuda", or "none"."""
    asked = (
        "import torch; print('cuda' if torch.cuda.is_available() and torch.distributed.is_nccl_available() else 'none')"
    )
    return subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where results.json and log.txt go")
    parser.add_argument("--fresh", action="store_true", help="begin again")
    parser.add_argument("--step-seconds", type=float, help="for each step (default: its own limit)")
    parser.add_argument("--minutes", type=float, default=8.0, help="for all steps together (default: %(default)s)")
    parser.add_argument("--built", action="store_true", help="build nothing: the extension that is there, as it is")
    parser.add_argument("--only", help="these steps, with commas between them")
    parser.add_argument("--device", help="cuda, emu (the emulated accelerator) or none (default: what is here)")
    options = parser.parse_args()
    only = None if options.only is None else options.only.split(",")
    unknown = set(only or ()) - {step.name for step in STEPS}
    if unknown:
        parser.error(f"no step is called {', '.join(sorted(unknown))}; there are {', '.join(s.name for s in STEPS)}")
    os.environ.update(NCCL_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1")
    device = options.device or device_here()
    results = Results(options.folder, options.fresh)
    deadline = time.monotonic() + 60 * options.minutes
    outcome: dict[str, str] = {}
    for step in STEPS:
        if (only is not None and step.name not in only) or (step.name == "build" and options.built):
            continue
        before = results.steps.get(step.name, {})
        if before.get("device") == device and before.get("status") in ENDED:
            outcome[step.name] = before["status"]
            results.say(f"== {step.name}: {before['status']} by an earlier run")
            continue
        left = deadline - time.monotonic()
        if left < 5:
            outcome[step.name] = "no time left"
            results.say(f"== {step.name}: no time left")
            continue
        results.say(f"== {step.name}: {step.what}")
        outcome[step.name] = run_step(step, device, min(options.step_seconds or step.limit_s, left), results)
        results.say(f"-- {step.name}: {outcome[step.name]} in {results.steps[step.name]['seconds']} s")
    if device == "none":
        waiting = [step.name for step in STEPS if step.needs_device and step.name in outcome]
        results.say(f"no GPU here: {', '.join(waiting)} were set up, and wait for a device")
    bad = {name: status for name, status in outcome.items() if status != "passed"}
    results.say("all passed" if not bad else "; ".join(f"{name}: {status}" for name, status in bad.items()))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
