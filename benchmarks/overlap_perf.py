"""Trains models with experts, and dense ones, with one half of a microbatch computing while the other communicates, and
without; on the emulated cluster, with devices so fast that communication is a given part R of computation.

    python benchmarks/overlap_perf.py --json out.json --plot out.png

README.md says what cases and figures mean.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parts.overlap.records import Record, live_table, plot, rows
from parts.shared.harness import MeasurementError, exit_code, launch, machine_notes, save, wrong_note
from parts.shared.progress import Listener

from torch_xmesh.testing.cluster import EmulatedCluster

_RATE, _BURST = "50mbit", "16kb"
_MOST_SECONDS = 3600.0
_WORKER = Path(__file__).parent / "parts" / "overlap" / "worker.py"
MODELS = ("BERT SGMoE", "BERT Switch", "ViT SGMoE", "ViT Switch", "BERT Megatron", "BERT two stages")
ORDERS = ("unsplit", "accumulation", "duplex", "overlap")
RIVALS = ("DDP", "FSDP2")
PLANS = ("auto", "auto serial", "DP", "ZeRO-3", "Megatron")
METHODS = (*ORDERS, *RIVALS, *PLANS)
RATIOS = (0.1, 0.49, 1.0, 1.47)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated")
    parser.add_argument(
        "--methods",
        default=",".join((*ORDERS, *RIVALS)),
        help=f"comma-separated, of {', '.join(METHODS)}; the first is unsplit",
    )
    parser.add_argument("--ratios", default=",".join(map(str, RATIOS)), help="communication / computation, unsplit")
    parser.add_argument("--hosts", type=int, default=2, help="network namespaces (default 2)")
    parser.add_argument("--devices", type=int, default=1, help="processes of each (default 1)")
    parser.add_argument("--samples", type=int, default=64, help="of a step (default 64)")
    parser.add_argument("--microbatches", type=int, default=1, help="of a step; 1: split in halves (default 1)")
    parser.add_argument("--runs", type=int, default=3, help="timed steps of each method (default 3)")
    parser.add_argument("--rate", default=_RATE, help=f"of the hosts' network interfaces (default {_RATE})")
    parser.add_argument("--no-shaping", action="store_true", help="plain localhost")
    parser.add_argument("--json", type=Path, help="write the records here")
    parser.add_argument("--plot", type=Path, help="write a bar chart here (PNG)")
    options = parser.parse_args(arguments)
    for name, known in (("models", MODELS), ("methods", METHODS)):
        given = getattr(options, name).split(",")
        if unknown := sorted(set(given) - set(known)):
            parser.error(f"there are no {name} {unknown}; there are {list(known)}")
        setattr(options, name, given)
    if options.methods[0] != "unsplit":
        parser.error("the first method is unsplit: the others are compared with it")
    options.ratios = [float(ratio) for ratio in options.ratios.split(",")]
    return options


def cases_of(options: argparse.Namespace) -> list[dict[str, Any]]:
    given = {"samples": options.samples, "microbatches": options.microbatches, "methods": options.methods}
    return [
        {"name": f"{model} R {ratio:g}", "model": model, "ratio": ratio, **given}
        for model in options.models
        for ratio in options.ratios
    ]


def measure(options: argparse.Namespace) -> tuple[list[Record], dict[str, Any]]:
    """Rows are printed as they are measured. Raises MeasurementError when a rank fails or does not end in time."""
    cases = cases_of(options)
    live = live_table(options.methods, [case["name"] for case in cases])
    listener = Listener(lambda found: live.rows(rows([Record(**row) for row in found])))
    listener.say("building the cluster, measuring its links")
    rate = None if options.no_shaping else options.rate
    with EmulatedCluster(
        hosts=options.hosts, devices=options.devices, rate=rate, burst=_BURST, output=listener.stream
    ) as cluster:
        notes = machine_notes()
        live.begin([f"torch_xmesh overlap_perf, {cluster.description}", *notes])
        job = {
            "hosts": options.hosts,
            "devices": options.devices,
            "runs": options.runs,
            "timeout_seconds": 300,
            "ends_at": time.time() + _MOST_SECONDS,
            "cases": cases,
        }
        done = launch(cluster, listener, _WORKER, job, _MOST_SECONDS)
        about = {"suite": "overlap_perf", "machine": notes, "cluster": cluster.description}
    return [Record(**record) for record in done.records], about


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when all was measured and every gradient was right, 1 when one was not, 2 for a wrong argument or a failed
    rank."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        records, about = measure(options)
    except (ValueError, MeasurementError) as error:
        print(f"overlap_perf: {error}", file=sys.stderr)
        return 2
    print(f"# {wrong_note(records)}")
    if options.json is not None:
        save(options.json, [record.to_json() for record in records], about)
    if options.plot is not None:
        plot(options.plot, records, about["cluster"])
    return exit_code(records)


if __name__ == "__main__":
    sys.exit(main())
