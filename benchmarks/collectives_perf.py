"""Measures collectives on one mesh, as reshards and by gloo: python benchmarks/collectives_perf.py --devices 4

An all-reduce is a reshard from Partial to Replicate, a reduce-scatter from Partial to Shard(0), an all-gather from
Shard(0) to Replicate, an all-to-all from Shard(0) to Shard(1). README.md beside this file defines every figure.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from parts.collectives import worker
from parts.collectives.records import Record, cells, live_table
from parts.collectives.worker import METHODS, PLACEMENTS
from parts.shared.harness import Measurement, MeasurementError, exit_code, launch, machine_notes, save, wrong_note
from parts.shared.progress import Listener
from reshard_perf import num_bytes

from torch_xmesh.testing.cluster import EmulatedCluster

_SIZES = "4KiB,64KiB,256KiB,1MiB,4MiB,16MiB"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--devices", type=int, default=4, help="per host")
    parser.add_argument("--rate", default="200mbit", help="NIC rate each way, or 'none' for plain localhost")
    parser.add_argument("--collectives", default=",".join(PLACEMENTS), help="comma-separated")
    parser.add_argument("--sizes", default=_SIZES, help="bytes of the whole value, comma-separated")
    parser.add_argument("--runs", type=int, default=9, help="timed runs of each method (default 9)")
    parser.add_argument("--budget-seconds", type=float, default=480.0, help="the ranks are ended after so long")
    parser.add_argument("--json", type=Path, help="write the records here")
    options = parser.parse_args(arguments)
    options.collectives = options.collectives.split(",")
    if unknown := sorted(set(options.collectives) - set(PLACEMENTS)):
        parser.error(f"--collectives: {unknown} are not among {list(PLACEMENTS)}")
    try:
        options.sizes = [num_bytes(text) for text in options.sizes.split(",")]
    except argparse.ArgumentTypeError as error:
        parser.error(f"--sizes: {error}")
    return options


def measure(options: argparse.Namespace) -> Measurement[Record]:
    """Raises MeasurementError when a rank fails."""
    live = live_table(options.collectives, METHODS)
    rate = None if options.rate == "none" or options.hosts == 1 else options.rate
    listener = Listener(lambda rows: live.rows([cells(Record(**row)) for row in rows]))
    job = {
        "collectives": options.collectives,
        "sizes": options.sizes,
        "runs": options.runs,
        "seconds": options.budget_seconds,
    }
    with EmulatedCluster(hosts=options.hosts, devices=options.devices, rate=rate, output=listener.stream) as cluster:
        live.begin([*machine_notes(), cluster.description, "ratio = time over gloo's"])
        done = launch(cluster, listener, Path(worker.__file__), job, options.budget_seconds)
        about = {"machine": machine_notes(), "cluster": cluster.description, "runs": options.runs}
    records = [Record(**record) for record in done.records]
    live.note(wrong_note(records))
    return Measurement(records, about)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when all was measured and no element was wrong, 1 when one was, 2 for a wrong argument or a failed rank."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        measurement = measure(options)
    except (ValueError, MeasurementError) as error:
        print(f"collectives_perf: {error}", file=sys.stderr)
        return 2
    if options.json is not None:
        save(options.json, [record.to_json() for record in measurement.records], measurement.about)
    return exit_code(measurement.records)


if __name__ == "__main__":
    sys.exit(main())
