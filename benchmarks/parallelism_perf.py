"""Measures xm.plan_parallel: python benchmarks/parallelism_perf.py --suite speed [--json out.json]

Suite `speed`: how long planning takes on one core, in parts and as a whole, beside what it may take and what Alpa took.
Suite `alpa`: plans for the models of Alpa's evaluation on its cluster, and what they are predicted to reach. Nothing is
executed: there is no #wrong column. README.md beside this file defines the figures.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from parts.parallelism.alpa import (
    ALPA_CASES,
    ALPA_HEAD,
    AlpaRecord,
    account_lines,
    alpa_row,
    measure_alpa,
    plan_line,
    plot_alpa,
)
from parts.parallelism.cluster import assumptions
from parts.parallelism.speed import SPEED_CASES, SPEED_HEAD, SpeedRecord, measure_speed, missed, one_core, speed_row
from parts.shared.harness import machine_notes, save
from parts.shared.progress import Progress
from parts.shared.table import LiveTable

_RUNS = 5
_SECONDS = 300
_OTHER_SUITES_OPTIONS = {"speed": ("plot", "seconds", "microbatches"), "alpa": ("runs",)}


def _count(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def _counts(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=list(_OTHER_SUITES_OPTIONS), required=True)
    parser.add_argument("--cases", type=lambda text: text.split(","), help="comma-separated; default: all")
    parser.add_argument("--runs", type=_count, help=f"speed: of each part ({_RUNS}), of whole searches at most 3")
    parser.add_argument("--seconds", type=_count, help=f"alpa: after which a search is given up ({_SECONDS})")
    parser.add_argument("--microbatches", type=_counts, help="alpa: samples of a microbatch; default: each case's own")
    parser.add_argument("--json", type=Path, help="write the records here")
    parser.add_argument("--plot", type=Path, help="alpa: draw throughputs here (PNG)")
    options = parser.parse_args(arguments)
    for name in _OTHER_SUITES_OPTIONS[options.suite]:
        if getattr(options, name) is not None:
            parser.error(f"suite {options.suite} does not read --{name}")
    known = [case.name for case in (SPEED_CASES if options.suite == "speed" else ALPA_CASES)]
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
            found = measure_speed(case, options.runs or _RUNS)
            progress.clear()
            live.rows(map(speed_row, found))
            records += found
    live.note(f"bars not met: {'; '.join(missed(records)) or 'none'}")
    if options.json is not None:
        about = {"suite": "speed", "machine": notes, "assumed": assumptions()}
        save(options.json, [record.to_json() for record in records], about)


def run_alpa(options: argparse.Namespace) -> None:
    """The table of plans, and those of which the paper says something."""
    cases = [case for case in ALPA_CASES if options.cases is None or case.name in options.cases]
    live = LiveTable(ALPA_HEAD, [[case.family for case in cases], [case.model for case in cases]])
    progress = Progress()
    records: list[AlpaRecord] = []
    notes = machine_notes()
    live.begin(["torch_xmesh parallelism_perf, alpa: predictions", *notes, *assumptions()])
    for found in measure_alpa(cases, options.seconds or _SECONDS, progress.say, options.microbatches):
        progress.clear()
        records += found
        (best,) = (one for one in found if one.is_best)
        live.rows([alpa_row(best)])
        live.note(plan_line(best))
    for line in account_lines(cases, records):
        live.note(line)
    if options.json is not None:
        about = {"suite": "alpa", "machine": notes, "assumed": assumptions()}
        save(options.json, [record.to_json() for record in records], about)
    if options.plot is not None:
        plot_alpa(options.plot, records)


def main(arguments: Sequence[str] | None = None) -> int:
    """0; 2 for a wrong argument."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    (run_speed if options.suite == "speed" else run_alpa)(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
