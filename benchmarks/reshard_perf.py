"""Measures cross-mesh resharding: python benchmarks/reshard_perf.py --suite table2 --json out.json --plot out.png

Suites table2, fig5, fig8, refit and random run on an emulated cluster (namespaces with shaped NICs; plain localhost
without root, and the table says so); loopback compares with raw gloo on two local ranks. README.md beside this file
defines every figure.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from parts.resharding import loopback
from parts.resharding.case_file import read_cases
from parts.resharding.cases import SUITES, Case, fits, suite_cases
from parts.resharding.charts import plot
from parts.resharding.cluster_suite import Settings, measure
from parts.resharding.hard import hard_cases
from parts.resharding.records import Record, live_table
from parts.resharding.rivals import RIVALS
from parts.shared.harness import Measurement, MeasurementError, exit_code, save

from torch_xmesh import _C

_ALL = ("auto", *_C.strategy_names(), *RIVALS)
_STRATEGIES = {
    "table2": _ALL,
    "fig5": ("auto", "striped", "broadcast", "alpa", "send_recv", "torch_broadcast"),
    "fig8": (
        "auto",
        "striped",
        "broadcast:naive+naive",
        "broadcast:size+naive",
        "broadcast:size+dfs",
        "broadcast:size+greedy",
    ),
    "refit": ("auto", "striped", "broadcast", "send_recv", "torch_p2p"),
    "random": ("auto", "striped", "broadcast", "torch_p2p"),
}
_SEEDED = ("seeds", "first_seed", "hard")
_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def num_bytes(text: str) -> int:
    """Bytes of "64MiB", "1GB" or a plain number."""
    digits = text.rstrip("BKMGi")
    unit = text[len(digits) :]
    try:
        value = int(float(digits) * _UNITS[unit])
    except (KeyError, ValueError):
        raise argparse.ArgumentTypeError(f"expected a size such as 64MiB, got {text!r}") from None
    if value < 4096:
        raise argparse.ArgumentTypeError(f"expected at least 4096 bytes, got {value}")
    return value


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=[*SUITES, "loopback"], default="table2")
    parser.add_argument(
        "--case-file", type=Path, help="measure the cases of this JSON file; --suite then chooses the strategies only"
    )
    parser.add_argument("--strategies", help="comma-separated, or 'all' (default: the suite's)")
    parser.add_argument("--cases", help="comma-separated names: only these of the cases")
    parser.add_argument("--hosts", type=int, default=5)
    parser.add_argument("--devices", type=int, default=4, help="per host")
    parser.add_argument("--rate", default="400mbit", help="NIC rate each way, or 'none' for plain localhost")
    parser.add_argument("--rate-of", action="append", default=[], metavar="HOST=RATE", help="another rate for one host")
    parser.add_argument(
        "--no-pacing", action="store_true", help="do not tell the product that the NIC rates are measured"
    )
    parser.add_argument(
        "--no-shared-memory", action="store_true", help="let the product use TCP between ranks of one host too"
    )
    parser.add_argument(
        "--topology", type=Path, help="take latencies and message costs from this topology file; else they are measured"
    )
    parser.add_argument("--num-bytes", type=num_bytes, default=64 << 20, help="bytes of a case (default 64MiB)")
    parser.add_argument("--runs", type=int, default=5, help="timed runs of each method (default 5)")
    parser.add_argument("--budget-seconds", type=float, default=480.0, help="too few: slow methods get fewer runs")
    parser.add_argument("--seeds", type=int, default=10, help="random: number of layouts")
    parser.add_argument("--first-seed", type=int, default=0, help="random: the first seed")
    parser.add_argument(
        "--hard", action="store_true", help="random: only layouts whose best broadcast plan exceeds 1.2 of the bound"
    )
    parser.add_argument("--json", type=Path, help="write the records here")
    parser.add_argument("--plot", type=Path, help="write a bar chart here (PNG)")
    options = parser.parse_args(arguments)
    is_file = options.case_file is not None and options.suite != "loopback"
    where = "--case-file" if is_file else f"--suite {options.suite}"
    for name in sorted(_without_effect(options)):
        if getattr(options, name) != parser.get_default(name):
            parser.error(f"--{name.replace('_', '-')} has no effect with {where}")
    return options


def _without_effect(options: argparse.Namespace) -> set[str]:
    """Names of the options that the chosen measurement does not read."""
    if options.suite == "loopback":
        return set(vars(options)) - {"suite", "num_bytes", "runs", "no_shared_memory", "json", "plot"}
    if options.case_file is not None:
        return {"num_bytes", *_SEEDED}
    return set() if options.suite == "random" else set(_SEEDED)


def choose_cases(options: argparse.Namespace, rate_of: Mapping[int, str]) -> list[Case]:
    """Raises ValueError for an unknown name and for a case that does not fit on the cluster."""
    size = {"num_bytes": options.num_bytes, "hosts": options.hosts, "devices": options.devices}
    if options.case_file is not None:
        cases = read_cases(options.case_file)
        unfit = [case.name for case in cases if not fits(case, hosts=options.hosts, devices=options.devices)]
        if unfit:
            raise ValueError(f"{unfit} do not fit on {options.hosts} hosts x {options.devices} devices")
    elif options.hard:
        cases = hard_cases(options.seeds, first_seed=options.first_seed, rate=options.rate, rate_of=rate_of, **size)
    else:
        seeds = range(options.first_seed, options.first_seed + options.seeds)
        cases = suite_cases(options.suite, seeds=seeds, **size)
    if options.cases is None:
        return cases
    names = options.cases.split(",")
    unknown = sorted(set(names) - {case.name for case in cases})
    if unknown:
        raise ValueError(f"--cases: {unknown} are not among {[case.name for case in cases]}")
    return [case for case in cases if case.name in names]


def choose_strategies(options: argparse.Namespace) -> list[str]:
    if options.strategies is None:
        return list(_STRATEGIES[options.suite])
    return list(_ALL) if options.strategies == "all" else options.strategies.split(",")


def settings_of(options: argparse.Namespace) -> Settings:
    """Raises ValueError for a malformed --rate-of or topology file."""
    rate_of = {}
    for text in options.rate_of:
        host, _, rate = text.partition("=")
        if not host.isdigit():
            raise ValueError(f"--rate-of: expected HOST=RATE such as 2=100mbit, got {text!r}")
        rate_of[int(host)] = rate
    return Settings(
        hosts=options.hosts,
        devices=options.devices,
        rate=None if options.rate == "none" else options.rate,
        rate_of=rate_of,
        is_paced=not options.no_pacing,
        shared_memory=not options.no_shared_memory,
        runs=options.runs,
        budget_seconds=options.budget_seconds,
        costs=_costs_of(options.topology),
    )


def _costs_of(path: Path | None) -> dict[str, float]:
    """What a topology file says besides NIC rates, which are measured anew; nothing without a file."""
    if path is None:
        return {}
    from torch_xmesh import Topology

    links = Topology.load(path).links
    return {
        name: getattr(links, name) for name in ("local_bytes_per_s", "latency_us", "message_us", "local_latency_us")
    }


def title_of(options: argparse.Namespace) -> str:
    return f"suite {options.suite}" if options.case_file is None else f"cases of {options.case_file.name}"


def report(options: argparse.Namespace, measurement: Measurement[Record]) -> None:
    """Writes JSON and chart where asked."""
    chosen = {"suite": options.suite} if options.case_file is None else {"case_file": options.case_file.name}
    about = {**chosen, **measurement.about}
    if options.json is not None:
        save(options.json, [record.to_json() for record in measurement.records], about)
    if options.plot is not None:
        plot(options.plot, measurement.records, about=about)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when all was measured and no element was wrong, 1 when one was, 2 for a wrong argument or a failed rank."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        if options.suite == "loopback":
            live = live_table(loopback.CASES, loopback.METHODS)
            live.note(f"torch_xmesh reshard_perf, {title_of(options)}")
            measurement = loopback.measure(
                num_bytes=options.num_bytes, runs=options.runs, live=live, shared_memory=not options.no_shared_memory
            )
        else:
            settings = settings_of(options)
            cases, strategies = choose_cases(options, settings.rate_of), choose_strategies(options)
            live = live_table([case.name for case in cases], strategies)
            live.note(f"torch_xmesh reshard_perf, {title_of(options)}")
            measurement = measure(cases, strategies, settings, live)
    except (ValueError, MeasurementError) as error:
        print(f"reshard_perf: {error}", file=sys.stderr)
        return 2
    report(options, measurement)
    return exit_code(measurement.records)


if __name__ == "__main__":
    sys.exit(main())
