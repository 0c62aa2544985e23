"""Plans are the same whatever the compiler makes of the core: -O0 against -O3 -march=native, text for text."""

from __future__ import annotations

import json
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "csrc" / "core"
FLAGS = ["-std=c++20", "-ffp-contract=off", f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'tests' / 'cpp'}", "-I.", "-w"]
BUILDS = {"O0": ["-O0"], "O3": ["-O3", "-march=native", "-DNDEBUG"]}
NUM_LAYOUTS = 200


def build(folder: Path, name: str) -> Path:
    """Compiles the core and print_plans.cpp as one translation unit, which is quicker than file by file."""
    program, unit = folder / f"print_plans_{name}", folder / f"{name}.cpp"
    sources = sorted(CORE.glob("*.cpp")) + sorted((CORE / "resharding").rglob("*.cpp"))
    sources.append(ROOT / "tests" / "cpp" / "print_plans.cpp")
    unit.write_text("".join(f'#include "{source}"\n' for source in sources))
    subprocess.run(["g++", *FLAGS, *BUILDS[name], str(unit), "-o", str(program)], check=True)
    return program


def plans(program: Path, seed: int) -> list[str]:
    command = [str(program), str(seed), str(NUM_LAYOUTS)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


@pytest.mark.in_turn(3)
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_plans_do_not_depend_on_the_build(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        programs = list(pool.map(lambda name: build(tmp_path, name), BUILDS))
        left, right = pool.map(lambda program: plans(program, 1), programs)
    assert len(left) == len(right) >= 6 * NUM_LAYOUTS
    for i, (one, other) in enumerate(zip(left, right, strict=True)):
        assert one == other, f"plan {i}: {first_difference(one, other)}"


def first_difference(one: str, other: str) -> str:
    """The first field in which two plans differ."""
    fields, others = json.loads(one), json.loads(other)
    name = next((name for name in fields if fields[name] != others.get(name)), "spelling")
    return f"{fields['strategy']} of {fields['tensors']}: {name}: {fields.get(name)} != {others.get(name)}"[:2000]
