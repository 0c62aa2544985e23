"""``benchmarks/device_perf.py`` as it is, with few ranks and bytes; its records are kept."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from report import found

ROOT = Path(__file__).resolve().parents[2]
RUNS = (("1", 256 << 20, "5"), ("2", 64 << 10, "5"), ("2", 32 << 20, "2"))
"""Ranks, bytes, operations in a block."""


def run(device: str) -> bool:
    is_well = True
    for ranks, num_bytes, repeats in RUNS:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "device.json")
            command = [
                sys.executable,
                str(ROOT / "benchmarks" / "device_perf.py"),
                "--device",
                device,
                "--ranks",
                ranks,
            ]
            command += ["--num-bytes", str(num_bytes), "--runs", "5", "--repeats", repeats, "--json", str(out)]
            done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            print(done.stdout, flush=True)
            is_well &= done.returncode == 0
            if not out.exists():
                found(f"{ranks} ranks, {num_bytes} bytes: {done.stdout.strip().splitlines()[-1:]}")
                continue
            for record in json.loads(out.read_text())["records"]:
                rate = record["num_bytes"] / record["seconds"] / 1e9
                found(
                    f"{ranks} ranks, {record['case']}, {record['method']}: {record['seconds'] * 1e3:.3f} ms, "
                    f"{rate:.1f} GB/s, {record['of_rival']:.3f} of the rival's speed, #wrong {record['wrong']}",
                    ranks=int(ranks),
                    **record,
                )
    return is_well
