"""Measures training steps of pipelines, torch_xmesh's and torch.distributed.pipelining's, on the emulated cluster.

    python benchmarks/pipeline_perf.py --suite paced --json out.json --plot out.png

README.md says what suites and figures mean.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from parts.pipeline import hf, overhead
from parts.pipeline.charts import plot, plot_overhead
from parts.pipeline.records import hf_rows, hf_table, live_table, overhead_rows, overhead_table
from parts.pipeline.suites import METHODS, SUITES, Settings, measure
from parts.shared.harness import MeasurementError, exit_code, machine_notes, save, wrong_note


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=[*SUITES, "overhead", "hf"], required=True)
    parser.add_argument("--methods", help="comma-separated; default: all of the suite")
    parser.add_argument("--runs", type=int, default=5, help="timed steps of each method (default 5)")
    parser.add_argument("--stages", type=int, default=4, help="paced: number of stages (default 4)")
    parser.add_argument("--microbatches", type=_numbers, default=None, help="comma-separated; paced: 16,8; others: 16")
    parser.add_argument("--ratios", type=_numbers, default=[0.5, 1.0], help="transfer over forward (default 0.5,1)")
    parser.add_argument("--models", default="unet,gpt", help="real: which models")
    parser.add_argument("--forward-ms", type=float, default=25.0, help="paced, meshes: F of a stage; B is twice that")
    parser.add_argument("--no-shaping", action="store_true", help="plain localhost")
    parser.add_argument(
        "--budget-seconds", type=float, help="beyond it every method gets fewer runs (real: 1000, others: 450)"
    )
    parser.add_argument("--timelines", type=Path, help="draw the last step of our methods into this folder")
    parser.add_argument("--json", type=Path, help="write the records here")
    parser.add_argument("--plot", type=Path, help="write a bar chart here (PNG)")
    return parser.parse_args(arguments)


def settings_of(options: argparse.Namespace) -> Settings:
    suite = options.suite
    microbatches = options.microbatches or ([16, 8] if suite == "paced" else [16])
    budget = options.budget_seconds
    if budget is None:
        budget = 1000.0 if suite == "real" else 450.0
    if suite == "real":
        budget /= len(options.models.split(",")) * len(options.ratios)
    return Settings(
        suite=suite,
        methods=METHODS[suite] if options.methods is None else options.methods.split(","),
        runs=options.runs,
        stages=options.stages,
        microbatches=[int(number) for number in microbatches],
        ratios=options.ratios,
        models=options.models.split(","),
        forward_s=options.forward_ms / 1e3,
        is_shaped=not options.no_shaping,
        budget_seconds=budget,
        timelines=options.timelines,
    )


def run_overhead(options: argparse.Namespace) -> int:
    notes = machine_notes()
    methods = overhead.METHODS if options.methods is None else options.methods.split(",")
    live = overhead_table(methods)
    live.begin(["torch_xmesh pipeline_perf, suite overhead", *notes])
    records = overhead.run(methods=methods, on_records=lambda found: live.rows(overhead_rows(found)))
    if options.json is not None:
        save(options.json, [record.to_json() for record in records], {"suite": "overhead", "machine": notes})
    if options.plot is not None:
        plot_overhead(options.plot, records)
    return 0


def run_hf(options: argparse.Namespace) -> int:
    notes = machine_notes()
    methods = hf.METHODS if options.methods is None else options.methods.split(",")
    live = hf_table(methods)
    live.begin(["torch_xmesh pipeline_perf, suite hf", *notes])
    records = hf.run(methods=methods, rounds=4 * options.runs)
    live.rows(hf_rows(records))
    live.note(wrong_note(records))
    if options.json is not None:
        save(options.json, [record.to_json() for record in records], {"suite": "hf", "machine": notes})
    return exit_code(records)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when all was measured and every gradient was right, 1 when one was not, 2 for a wrong argument or a failed
    rank."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        if options.suite == "overhead":
            return run_overhead(options)
        if options.suite == "hf":
            return run_hf(options)
        if options.timelines is not None:
            options.timelines.mkdir(parents=True, exist_ok=True)
        settings = settings_of(options)
        live = live_table(settings.methods)
        live.note(f"torch_xmesh pipeline_perf, suite {options.suite}")
        measurement = measure(settings, live)
    except (ValueError, MeasurementError) as error:
        print(f"pipeline_perf: {error}", file=sys.stderr)
        return 2
    live.note(wrong_note(measurement.records))
    if options.json is not None:
        records = [record.to_json() for record in measurement.records]
        save(options.json, records, {"suite": options.suite, **measurement.about})
    if options.plot is not None:
        plot(options.plot, measurement.records, title=f"suite {options.suite}: {measurement.about['cluster']}")
    return exit_code(measurement.records)


if __name__ == "__main__":
    sys.exit(main())
