"""Trains one model under the plan that is found for it, under plans as people write them, and with torch's own
parallelisms, on the emulated cluster: 2 hosts of 4 devices, whose products take as long as on devices of a given speed.

    python benchmarks/auto_parallel.py --json out.json --plot out.png

README.md says what cases and figures mean.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parts.auto_parallel.records import Record, live_table, plot, rows, summary
from parts.shared.harness import MeasurementError, exit_code, launch, machine_notes, save, wrong_note
from parts.shared.progress import Listener

from torch_xmesh.testing.cluster import EmulatedCluster

_HOSTS, _DEVICES, _RATE = 2, 4, "200mbit"
_MOST_SECONDS = 3600.0
_WORKER = Path(__file__).parent / "parts" / "auto_parallel" / "worker.py"
_PRESETS = (
    "DP",
    "ZeRO-2",
    "ZeRO-3",
    "Megatron 4",
    "Megatron 8",
    "PP 2 x DP 4",
    "PP 4 x DP 2",
    "PP 2 x TP 4",
    "PP 2 x TP 2",
)
_RIVALS = ("FSDP2 on gloo", "FSDP2 on xmesh", "DTensor TP on gloo", "DTensor TP on xmesh")
METHODS = ("found", *_PRESETS, *_RIVALS)
_SERIAL = tuple(f"{name} serial" for name in ("found", *_PRESETS))
"""Plans without overlap: measured where they are asked for."""
CASES: dict[str, dict[str, Any]] = {
    "gpt 0.05 GFLOP/s": {"model": "gpt", "flops": [5e7, 5e7]},
    "gpt 0.2 GFLOP/s": {"model": "gpt", "flops": [2e8, 2e8]},
    "gpt 0.8 GFLOP/s": {"model": "gpt", "flops": [8e8, 8e8]},
    "gpt, one host slow": {"model": "gpt", "flops": [6e8, 2e8]},
    "wide, then dense": {"model": "wide-dense", "flops": [5e8, 5e8]},
}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cases", default=",".join(map(str, range(len(CASES)))), help="by number, of: " + "; ".join(CASES)
    )
    parser.add_argument("--methods", default=",".join(METHODS), help="comma-separated")
    parser.add_argument("--runs", type=int, default=3, help="timed steps of each method (default 3)")
    parser.add_argument("--no-shaping", action="store_true", help="plain localhost")
    parser.add_argument("--json", type=Path, help="write the records here")
    parser.add_argument("--plot", type=Path, help="write a bar chart here (PNG)")
    options = parser.parse_args(arguments)
    options.methods = options.methods.split(",")
    if unknown := sorted(set(options.methods) - {*METHODS, *_SERIAL}):
        parser.error(f"there are no {unknown}; there are {list(METHODS)}, and {list(_SERIAL)}")
    names = list(CASES)
    options.cases = [names[int(number)] for number in options.cases.split(",")]
    return options


def measure(options: argparse.Namespace) -> tuple[list[Record], dict[str, Any]]:
    """Rows are printed as they are measured. Raises MeasurementError when a rank fails or does not end in time."""
    live = live_table(options.methods, options.cases)
    listener = Listener(lambda found: live.rows(rows([Record(**row) for row in found])))
    listener.say("building the cluster, measuring its links")
    rate = None if options.no_shaping else _RATE
    with EmulatedCluster(hosts=_HOSTS, devices=_DEVICES, rate=rate, output=listener.stream) as cluster:
        goodput = cluster.goodput()
        notes = machine_notes()
        live.begin([f"torch_xmesh auto_parallel, {cluster.description}", *notes, f"goodput {goodput}"])
        job = {
            "hosts": _HOSTS,
            "devices": _DEVICES,
            "runs": options.runs,
            "timeout_seconds": 300,
            "ends_at": time.time() + _MOST_SECONDS,
            "cases": [{"name": name, "methods": options.methods, **CASES[name]} for name in options.cases],
        }
        done = launch(cluster, listener, _WORKER, job, _MOST_SECONDS)
        about = {"suite": "auto_parallel", "machine": notes, "cluster": cluster.description}
    return [Record(**record) for record in done.records], about


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when all was measured and every gradient was right, 1 when one was not, 2 for a wrong argument or a failed
    rank."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        records, about = measure(options)
    except (ValueError, MeasurementError) as error:
        print(f"auto_parallel: {error}", file=sys.stderr)
        return 2
    for line in summary(records):
        print(f"# {line}")
    print(f"# {wrong_note(records)}")
    if options.json is not None:
        save(options.json, [record.to_json() for record in records], about)
    if options.plot is not None:
        plot(options.plot, records, about["cluster"])
    return exit_code(records)


if __name__ == "__main__":
    sys.exit(main())
