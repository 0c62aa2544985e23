"""Writes the table of planned models of libraries, from tests/parallelism/library_sweep.json, into docs/models.md.

python scripts/model_table.py           writes it
python scripts/model_table.py --check   an error where the page says something else
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from written_pages import write_or_check

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "models.md"
RESULTS = ROOT / "tests" / "parallelism" / "library_sweep.json"
BEGIN = "<!-- from tests/parallelism/library_sweep.json by scripts/model_table.py -->\n"
END = "<!-- end of the table -->\n"
sys.path.insert(0, str(ROOT / "tests"))

from models.libraries import MODELS  # noqa: E402


def table(outcomes: dict[str, dict[str, str]]) -> str:
    """A row for the models of a library that train under all plans, and one for each other outcome."""
    trains: dict[str, list[str]] = {}
    others: list[str] = []
    for name, found in outcomes.items():
        library = MODELS[name].library
        if {*found.values()} == {"trains"}:
            trains.setdefault(library, []).append(f"`{name}`" if library in ("timm", "torchvision") else name)
            continue
        by_words: dict[str, list[str]] = {}
        for kind, words in found.items():
            by_words.setdefault(words, []).append(kind)
        for words, kinds in by_words.items():
            text = words if words == "trains" else f"refused: {words}"
            others.append(f"| {library} | {name} | {', '.join(kinds)} | {text.replace('|', '/')} |")
    rows = [f"| {library} | {', '.join(names)} | all | trains |" for library, names in trains.items()]
    return "\n".join(["| library | models | plans | |", "|---|---|---|---|", *rows, *others]) + "\n"


def page() -> str:
    before, rest = PAGE.read_text().split(BEGIN)
    return before + BEGIN + "\n" + table(json.loads(RESULTS.read_text())) + "\n" + END + rest.split(END)[1]


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, page, __doc__))
