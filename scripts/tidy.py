"""Runs clang-tidy on the sources that have changed since it last found nothing in them, with what they include of ours.

    python scripts/tidy.py BUILD_FOLDER [--checks=X] SOURCES...

BUILD_FOLDER has compile_commands.json. What was found clean is remembered in build/tidy; without that folder, as on a
fresh clone, all sources are looked at. Sources that are compiled as one unit (setup.py) are looked at as one, which
takes less than half the time, where all of them have changed; with --each never. What only a source by itself shows is
found with --each, or when it has changed alone: an include that it lacks, an alias that it does not use.
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


def _units(built: list[dict[str, str]]) -> dict[Path, tuple[Path, ...]]:
    """By unit the sources that it includes."""
    units = (Path(one["directory"]) / one["file"] for one in built)
    return {
        unit: tuple((ROOT / "csrc" / name).resolve() for name in _INCLUDE.findall(unit.read_text()))
        for unit in units
        if unit.parent.name == "units"
    }


def _with_sources(built: list[dict[str, str]], units: dict[Path, tuple[Path, ...]]) -> list[dict[str, str]]:
    """The compile commands, with one for each source of a unit."""
    out = {one["file"]: one for one in built}
    for one in built:
        for source in map(str, units.get(Path(one["directory"]) / one["file"], ())):
            out[source] = {**one, "file": source, "command": one["command"].replace(one["file"], source)}
    return list(out.values())


def main(folder: str, arguments: list[str]) -> int:
    options = [one for one in arguments if one.startswith("--") and one != "--each"]
    checks = next((option.removeprefix("--checks=") for option in options if option.startswith("--checks=")), "")
    sources = [Path(one).resolve() for one in arguments if not one.startswith("--")]
    version = subprocess.run(["clang-tidy", "--version"], capture_output=True, text=True, check=True).stdout
    path = Path(folder) / "compile_commands.json"
    built = json.loads(path.read_text())
    units = _units(built)
    commands = _with_sources(built, units)
    path.write_text(json.dumps(commands))
    command_of = {(Path(one["directory"]) / one["file"]).resolve(): one["command"] for one in commands}
    stamps = {source: _stamp(source, f"{version} {options} {command_of.get(source)}") for source in sources}
    STAMPS.mkdir(parents=True, exist_ok=True)

    def is_clean(looked_at: Path, of: tuple[Path, ...], checks: str) -> bool:
        """Of a source, or of a unit of some."""
        command = ["clang-tidy", "--quiet", "-p", folder, "--warnings-as-errors=*", f"--checks={checks}"]
        command.append(str(looked_at))
        run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
        if run.returncode != 0:
            print(run.stdout or f"clang-tidy ended with {run.returncode} on {looked_at}\n", end="", flush=True)
            return False
        for source in of:
            stamps[source].touch()
        return True

    changed = {source for source, stamp in stamps.items() if not stamp.exists()}
    print(f"clang-tidy: {len(changed)} of {len(sources)} sources have changed", flush=True)
    as_one = {unit: of for unit, of in units.items() if changed.issuperset(of) and "--each" not in arguments}
    alone = changed.difference(*as_one.values())
    of_units = f"{checks},-bugprone-suspicious-include"  # a unit is made of those
    todo = [(unit, of, of_units) for unit, of in as_one.items()]
    todo += [(source, (source,), checks) for source in stamps if source in alone]
    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", "2"))) as pool:
        return 0 if all(list(pool.map(lambda item: is_clean(*item), todo))) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
