"""Runs clang-tidy on the sources that have changed since it last found nothing in them, with what they include of ours.

    python scripts/tidy.py BUILD_FOLDER [--checks=X] SOURCES...

BUILD_FOLDER has compile_commands.json. What was found clean is remembered in build/tidy; without that folder, as on a
fresh clone, all sources are looked at.
"""

import functools
import hashlib
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STAMPS = ROOT / "build" / "tidy"
_INCLUDE = re.compile(r'^#include "(.+)"', re.MULTILINE)


@functools.cache
def _includes(path: Path) -> frozenset[Path]:
    """The files of ours that a file includes, through others too."""
    found: set[Path] = set()
    todo = [path]
    while todo:
        for name in _INCLUDE.findall(todo.pop().read_text()):
            included = ROOT / "csrc" / name
            if included.exists() and included not in found:
                found.add(included)
                todo.append(included)
    return frozenset(found)


def _stamp(source: Path, words: str) -> Path:
    """Named by all that the outcome depends on."""
    digest = hashlib.sha256(words.encode())
    for path in (ROOT / ".clang-tidy", source, *sorted(_includes(source))):
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return STAMPS / digest.hexdigest()[:32]


def _each_source(built: list[dict[str, str]]) -> list[dict[str, str]]:
    """The compile commands, with one for each source that a unit includes (setup.py) in place of the unit's."""
    out = []
    for one in built:
        unit = Path(one["directory"]) / one["file"]
        if unit.parent.name != "units":
            out.append(one)
            continue
        for name in _INCLUDE.findall(unit.read_text()):
            source = str(ROOT / "csrc" / name)
            out.append({**one, "file": source, "command": one["command"].replace(one["file"], source)})
    return out


def main(folder: str, arguments: list[str]) -> int:
    options = [one for one in arguments if one.startswith("--")]
    sources = [Path(one).resolve() for one in arguments if not one.startswith("--")]
    version = subprocess.run(["clang-tidy", "--version"], capture_output=True, text=True, check=True).stdout
    path = Path(folder) / "compile_commands.json"
    built = _each_source(json.loads(path.read_text()))
    path.write_text(json.dumps(built))
    commands = {(Path(one["directory"]) / one["file"]).resolve(): one["command"] for one in built}
    stamps = {source: _stamp(source, f"{version} {options} {commands.get(source)}") for source in sources}
    STAMPS.mkdir(parents=True, exist_ok=True)

    def is_clean(source: Path) -> bool:
        command = ["clang-tidy", "--quiet", "-p", folder, "--warnings-as-errors=*", *options, str(source)]
        run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
        if run.returncode != 0:
            print(run.stdout, end="", flush=True)
            return False
        stamps[source].touch()
        return True

    todo = [source for source, stamp in stamps.items() if not stamp.exists()]
    print(f"clang-tidy: {len(todo)} of {len(sources)} sources have changed", flush=True)
    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", "2"))) as pool:
        return 0 if all(list(pool.map(is_clean, todo))) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
