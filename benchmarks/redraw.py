"""Draws the pictures of recorded results again, beside them.

python benchmarks/redraw.py benchmarks/results/reshard-perf-table2-400mbit.json
"""

import json
import sys
from pathlib import Path
from typing import Any

from parts.auto_parallel import records as auto_parallel_records
from parts.overlap import records as overlap_records
from parts.parallelism import alpa as parallelism_alpa
from parts.pipeline import charts as pipeline_charts
from parts.pipeline import records as pipeline_records
from parts.pipeline.suites import SUITES as PIPELINE_SUITES
from parts.resharding import charts as reshard_charts
from parts.resharding import records as reshard_records


def redraw(path: Path) -> Path:
    """The picture that it has written."""
    content = json.loads(path.read_text())
    about: dict[str, Any] = content["about"]
    records: list[dict[str, Any]] = content["records"]
    picture = path.with_suffix(".png")
    if about.get("suite") == "overhead":
        pipeline_charts.plot_overhead(picture, [pipeline_records.OverheadRecord(**record) for record in records])
    elif about.get("suite") == "alpa":
        parallelism_alpa.plot_alpa(picture, [parallelism_alpa.AlpaRecord(**record) for record in records])
    elif about.get("suite") == "auto_parallel":
        found = [auto_parallel_records.Record(**record) for record in records]
        auto_parallel_records.plot(picture, found, about["cluster"])
    elif about.get("suite") == "overlap_perf":
        overlap_records.plot(picture, [overlap_records.Record(**record) for record in records], about["cluster"])
    elif about.get("suite") in PIPELINE_SUITES:
        title = f"suite {about['suite']}: {about['cluster']}"
        pipeline_charts.plot(picture, [pipeline_records.Record(**record) for record in records], title=title)
    else:
        reshard_charts.plot(picture, [reshard_records.Record(**record) for record in records], about=about)
    return picture


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(redraw(Path(name)))
