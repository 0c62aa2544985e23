"""What the pages say is so: their Python runs as typed on 4 ranks, and prints on the first one what stands in blocks of
text; their commands print what stands below them; their links lead somewhere."""

from __future__ import annotations

import ast
import contextlib
import io
import itertools
import os
import re
import runpy
import shlex
import sys
import types
from pathlib import Path

import pytest

import torch_xmesh as xm
from torch_xmesh.testing import spawn
from xmesh_cli.main import main

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    path.relative_to(ROOT).as_posix(): path for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
}
README_LINES = 180


def blocks(page: str, language: str) -> list[str]:
    text = PAGES[page].read_text()
    found = re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert len(found) == text.count(f"```{language}"), f"{page} has a block of {language} that is not understood here"
    return found


def script_of(page: str) -> str:
    """The page's Python in one script, each line with the number that it has on the page."""
    text = PAGES[page].read_text()
    lines = [""] * len(text.splitlines())
    for block in re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        first = text[: block.start(1)].count("\n")
        for index, line in enumerate(block[1].splitlines()):
            lines[first + index] = line
    return "\n".join(lines)


def having(language: str) -> list[str]:
    return [page for page in PAGES if blocks(page, language)]


def run_as_typed(rank: int, world_size: int, page: str, script: str, folder: str) -> str:
    """What it printed."""
    os.chdir(folder)
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(script, page, "exec"), vars(module))
    return printed.getvalue()


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("page", having("python"))
def test_python_runs_as_typed(page: str, tmp_path: Path) -> None:
    script = script_of(page)
    if "transformers" in script:
        pytest.importorskip("transformers")
    assert "init_process_group" in script
    assert "destroy_process_group" in script
    printed = spawn(run_as_typed, 4, page, script, str(tmp_path), backend=None)
    lines = "".join(f"{line.rstrip()}\n" for line in printed[0].splitlines())
    for block in blocks(page, "text"):
        assert block in lines, f"{page} does not print\n{block}"
    assert ("checkpoint_id" in script) == (tmp_path / "checkpoint" / ".metadata").exists()


@pytest.mark.parametrize("page", having("console"))
def test_commands_print_what_stands_there(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    for block in blocks(page, "console"):
        command, _, printed = block.partition("\n")
        assert command.startswith("$ xmesh ")
        assert main(shlex.split(command)[2:]) == 0
        actual = [line.rstrip() for line in capsys.readouterr().out.rstrip().splitlines()]
        assert actual == printed.rstrip().splitlines()


def links(page: str) -> list[tuple[str, str]]:
    """(target, anchor) of each link of a page."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", (ROOT / page).read_text(), flags=re.DOTALL)
    found = re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", text)
    assert len(found) == text.count("]("), f"{page} has a link that is not understood here"
    return found


@pytest.mark.parametrize(
    "page",
    [
        page
        for page in (*PAGES, "csrc/README.md", "torch_xmesh/README.md", "tests/README.md", "benchmarks/README.md")
        if links(page)
    ],
)
def test_links_lead_somewhere(page: str) -> None:
    for target, anchor in links(page):
        if target.startswith("http"):
            continue
        found = ((ROOT / page).parent / target).resolve() if target else ROOT / page
        assert found.exists(), f"{page} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", found.read_text(), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_rooms_and_their_tests_exist() -> None:
    rooms, _, _ = (ROOT / "tests" / "README.md").read_text().partition("\n## Time\n")
    rows = [row.strip("| ").split(" | ", 1) for row in rooms.splitlines() if row.startswith("| ")][1:]
    rooms_of, guards_of = ([re.findall(r"`([\w./*]+)`", row[column]) for row in rows] for column in (0, 1))
    assert any(rooms_of)
    assert all(guards_of), "a row names no test"
    for folder, named in ((ROOT, rooms_of), (ROOT / "tests", guards_of)):
        for pattern in itertools.chain(*named):
            assert list(folder.glob(pattern.rstrip("/"))), pattern


def map_of_the_package() -> str:
    return (ROOT / "torch_xmesh" / "README.md").read_text()


def has_name(path: Path, name: str) -> bool:
    """Whether a file has a name, in Python at the top or in a class (``Class.method``), in C++ anywhere."""
    if path.suffix != ".py":
        return re.search(rf"\b{name}\b", path.read_text()) is not None
    body = ast.parse(path.read_text()).body
    for part in name.split("."):
        inside = [inner for node in body for inner in names_of(node).get(part, [])]
        if not any(part in names_of(node) for node in body):
            return False
        body = inside
    return True


def names_of(node: ast.stmt) -> dict[str, list[ast.stmt]]:
    """By name that a statement gives to something, what stands inside of that."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return {node.name: node.body}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id: [] for target in targets if isinstance(target, ast.Name)}


def test_paths_and_names_in_the_map_of_the_package_exist() -> None:
    found = re.findall(r"`([\w/]+(?:\.(?:pyi?|h)|/))(?::([\w.]+))?`", map_of_the_package())
    assert len(found) > 100
    for path, name in found:
        whole = next((root / path for root in (ROOT / "torch_xmesh", ROOT) if (root / path).exists()), None)
        assert whole is not None, f"there is no {path}"
        assert not name or has_name(whole, name), f"{path} has no {name}"


def test_rooms_import_what_the_map_of_the_package_lists() -> None:
    package = ROOT / "torch_xmesh"
    rows = re.findall(r"^\| (`.*?) \| .*? \| (.*?) \|$", map_of_the_package(), re.MULTILINE)
    rooms = {room: row for row, (named, _) in enumerate(rows) for room in re.findall(r"`([\w/.]+)`", named)}
    for folder in filter(Path.is_dir, package.rglob("*")):
        name = f"{folder.relative_to(package).as_posix()}/"
        assert not list(folder.glob("*.py")) or name in rooms, f"the map has no row for {name}"
    for path in sorted(package.rglob("*.py")):
        here = path.relative_to(package)
        room = f"{here.parent.as_posix()}/" if len(here.parts) > 1 else here.name
        if room not in rooms:  # the package itself, and what belongs to no room
            assert len(here.parts) == 1, f"the map has no row for {room}"
            continue
        allowed = set(re.findall(r"`([\w/.]+)`", rows[rooms[room]][1]))
        for other in imported_rooms(package, path):
            is_own = other == room or rooms.get(other) == rooms[room]
            assert is_own or other in allowed, f"{here} imports {other}, which the map's row of {room} does not list"


def imported_rooms(package: Path, path: Path) -> set[str]:
    """The rooms of the package that a module imports when it is imported; the extension apart."""
    out = set()
    for node in ast.parse(path.read_text()).body:
        names = []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for first, *parts in (name.split(".") for name in names):
            if first != "torch_xmesh" or parts[:1] == ["_C"]:
                continue
            while (
                parts and not (package / "/".join(parts)).is_dir() and not (package / f"{'/'.join(parts)}.py").exists()
            ):
                parts.pop()
            folders = parts if (package / "/".join(parts)).is_dir() else parts[:-1]
            out.add(f"{'/'.join(folders)}/" if folders else f"{parts[0]}.py" if parts else "__init__.py")
    return out


def test_the_api_page_is_what_the_docstrings_say() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "api_docs.py"))
    text = PAGES["docs/api.md"].read_text()
    assert text == script["page"](), "run python scripts/api_docs.py"
    headings = set(re.findall(r"^####? `(.*)`$", text, re.MULTILINE))
    expected = {f"xm.{name}" for name in xm.__all__ if name not in ("testing", "presets", "__version__")}
    expected |= {f"xm.testing.{name}" for name in xm.testing.__all__}
    expected |= {f"PipelineEngine.{name}" for name in vars(xm.PipelineEngine) if not name.startswith("_")}
    assert expected <= headings
    assert all(f"\n- `{name}` (" in text for name in vars(xm.Options) if not name.startswith("_"))


def test_tests_that_look_at_a_clock_are_named() -> None:
    _, _, times = (ROOT / "tests" / "README.md").read_text().partition("\n## Time\n")
    named = set(re.findall(r"`([\w/]+\.py)`", times))
    assert all((ROOT / "tests" / name).exists() for name in named), named
    paths = {path.relative_to(ROOT / "tests").as_posix(): path for path in (ROOT / "tests").rglob("*.py")}
    calls = re.compile(r"\b(time\.(sleep|time|monotonic|perf_counter)|Timer)\(")
    timed = {name for name, path in paths.items() if calls.search(path.read_text())}
    assert "wait_until.py" in timed <= named, timed - named


def test_the_readme_is_short() -> None:
    assert len(PAGES["README.md"].read_text().splitlines()) <= README_LINES
