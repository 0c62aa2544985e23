"""Writes the pipeline tables of docs/performance.md from records of pipeline_perf.py.

    python benchmarks/pipeline_docs.py benchmarks/results/pipeline-perf-paced.json ...

Replaces what stands between the two comments there; rows are points, columns methods.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from parts.pipeline.records import Record, rival_of

BEGIN = "<!-- pipeline table: written by benchmarks/pipeline_docs.py -->"
END = "<!-- end of pipeline table -->"
_PAGE = Path(__file__).resolve().parents[1] / "docs" / "performance.md"


def markdown(records: Sequence[Record]) -> str:
    """One row per point: seconds of each method, and how many times faster than the rival it is.

    The rival is torch's 1F1B, or the gathers by hand.
    """
    methods = list(dict.fromkeys(record.method for record in records))
    found = {(record.point, record.method): record for record in records}
    lines = [
        "| stages, microbatches, transfer / forward | " + " | ".join(methods) + " |",
        "|---|" + "---|" * len(methods),
    ]
    for point in dict.fromkeys(record.point for record in records):
        cells = [_cell(found.get((point, method)), records) for method in methods]
        lines.append(f"| {point} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(record: Record | None, records: Sequence[Record]) -> str:
    if record is None:
        return ""
    rival = rival_of(record, records)
    times = "" if rival is None or rival is record else f" ({rival.seconds / record.seconds:.2f}x)"
    share = "" if record.signal_seconds is None else f", {record.signal_seconds / record.seconds:.2f} of empty"
    return f"{record.seconds:.3f} s{times}{share}"


def replaced(text: str, table: str) -> str:
    """The page's text with this table. Raises ValueError without the two comments."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"expected {BEGIN!r} and {END!r} in the page")
    return f"{before}{begin}\n\n{table}\n\n{end}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="what pipeline_perf.py --json wrote")
    parser.add_argument("--page", type=Path, default=_PAGE)
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    tables = [
        markdown([Record(**entry) for entry in json.loads(path.read_text())["records"]]) for path in options.files
    ]
    options.page.write_text(replaced(options.page.read_text(), "\n\n".join(tables)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
