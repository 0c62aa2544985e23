"""Measures xm.plan_parallel: python benchmarks/parallelism_perf.py --suite speed [--json out.json]

Suite `speed`: how long planning takes on one core, in parts and as a whole, beside what it may take and what Alpa took.
README.md beside this file defines the figures.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from harness import machine_notes, save
from parallelism_cluster import assumptions
from parallelism_speed import SPEED_CASES, SPEED_HEAD, SpeedRecord, measure_speed, missed, one_core, speed_row
from progress import Progress
from table import LiveTable


def _count(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=["speed"], required=True)
    parser.add_argument("--cases", type=lambda text: text.split(","), help="comma-separated; default: all")
    parser.add_argument("--runs", type=_count, default=5, help="of each part (default 5), of whole searches at most 3")
    parser.add_argument("--json", type=Path, help="write the records here")
    options = parser.parse_args(arguments)
    known = [case.name for case in SPEED_CASES]
    for name in options.cases or ():
        if name not in known:
            parser.error(f"{name!r} is not one of {', '.join(known)}")
    return options


def run_speed(options: argparse.Namespace) -> None:
    """The table of times and bars."""
    cases = [case for case in SPEED_CASES if options.cases is None or case.name in options.cases]
    live = LiveTable(SPEED_HEAD, [[case.name for case in cases], ["recording", "solution"]])
    progress = Progress()
    records: list[SpeedRecord] = []
    with one_core() as where:
        notes = [*machine_notes(), where]
        live.begin(["torch_xmesh parallelism_perf, speed; time: of the CPU", *notes, *assumptions()])
        for case in cases:
            progress.say(f"speed: {case.name}")
            found = measure_speed(case, options.runs)
            progress.clear()
            live.rows(map(speed_row, found))
            records += found
    live.note(f"bars not met: {'; '.join(missed(records)) or 'none'}")
    if options.json is not None:
        about = {"suite": "speed", "machine": notes, "assumed": assumptions()}
        save(options.json, [record.to_json() for record in records], about)


def main(arguments: Sequence[str] | None = None) -> int:
    """0; 2 for a wrong argument."""
    run_speed(parse(sys.argv[1:] if arguments is None else arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
