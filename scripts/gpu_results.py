"""Writes the table of what ran on which GPU, from tests/gpu/results, to the end of docs/devices.md.

python scripts/gpu_results.py           writes it
python scripts/gpu_results.py --check   an error where the page says something else
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from written_pages import write_or_check

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "devices.md"
RESULTS = ROOT / "tests" / "gpu" / "results"
BEGIN = "<!-- from tests/gpu/results by scripts/gpu_results.py -->\n"


def table(name: str, steps: dict[str, dict[str, Any]]) -> str:
    machine = next(one for one in steps["machine"]["found"] if "gpu" in one)
    lines = [f"{machine['text']}, torch {machine['torch']} (`tests/gpu/results/{name}`):", ""]
    lines += ["| step | came out | it says |", "|---|---|---|"]
    for step, record in steps.items():
        if step in ("build", "machine"):
            continue
        said = "; ".join(text_of(one) for one in record["found"] if is_telling(step, one))
        note = f" ({record['note']})" if "note" in record else ""
        lines.append(f"| {step} | {record['status']}{note} | {said.replace('|', '/')} |")
    return "\n".join(lines) + "\n"


def text_of(entry: dict[str, Any]) -> str:
    """Of what was measured beside a rival, how they compare."""
    if "of_rival" not in entry:
        return str(entry["text"])
    size = f"{entry['num_bytes'] / 2**20:g} MiB"
    return f"{entry['case']} of {size}: {entry['seconds'] * 1e3:.2f} ms, {entry['of_rival']:.2f} of the rival's speed"


def is_telling(step: str, entry: dict[str, Any]) -> bool:
    """Counts, what is wrong, and figures; not each case that passed."""
    if step == "speed":
        return entry.get("method") == "xmesh"
    return ": ok" not in entry["text"] or "; " in entry["text"]


def page() -> str:
    text = PAGE.read_text().split(BEGIN)[0]
    folders = sorted(path.parent for path in RESULTS.glob("*/results.json"))
    tables = [table(folder.name, json.loads((folder / "results.json").read_text())["steps"]) for folder in folders]
    return text + BEGIN + "\n" + "\n".join(tables)


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, page, __doc__))
