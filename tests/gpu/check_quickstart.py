"""``examples/quickstart.py`` as its user runs it, with 8 processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from report import found

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "8"]


def run(device: str) -> bool:
    command = [*COMMAND, str(ROOT / "examples" / "quickstart.py"), "--device", device]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout, flush=True)
    for line in done.stdout.splitlines():
        if "#wrong" in line:
            found(line)
    return done.returncode == 0
