"""What is installed: the torch it is pinned to, the entry point, typing, and the errors beside the wrong torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

import torch_xmesh

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(torch_xmesh.__file__).parent
# An editable install would lend the copy what it lacks.
_IMPORT = (
    "import sys; sys.meta_path = [f for f in sys.meta_path if 'Editable' not in getattr(f, '__name__', '')]; "
    "import torch_xmesh"
)
MINOR = ".".join(torch.__version__.split(".")[:2])


def _import_copy(folder: Path, record: str | None) -> str:
    """Imports a copy of the package that says it was built with another torch; returns the error's last line."""
    copy = folder / "torch_xmesh"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("_build_info.py", "__pycache__"))
    if record is not None:
        (copy / "_build_info.py").write_text(f'BUILT_WITH_TORCH = "{record}"\n')
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT],
        env={**os.environ, "PYTHONPATH": str(folder)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    return done.stderr.strip().splitlines()[-1]


def test_another_torch_is_one_clear_sentence(tmp_path: Path) -> None:
    said = _import_copy(tmp_path, "9.9.0")
    assert said.startswith("ImportError: torch_xmesh was built against torch 9.9.0")
    assert torch.__version__ in said


def test_not_built_is_one_clear_sentence(tmp_path: Path) -> None:
    assert _import_copy(tmp_path, None).startswith("ImportError: torch_xmesh is not built here; run `pip install")


@pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="runs on any machine, from a clone of the repository")
def test_metadata(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    info = next(tmp_path.glob("*.egg-info"))
    assert f"torch=={MINOR}.*" in (info / "requires.txt").read_text()
    assert "xmesh = xmesh_cli.main:main" in (info / "entry_points.txt").read_text()
    assert (
        "[torch.distributed.backends]\nxmesh = torch_xmesh.backend:register" in (info / "entry_points.txt").read_text()
    )


def _source_package(folder: Path) -> Path:
    """Made as a maintainer makes it, with what setuptools writes on the way kept out of the tree."""
    command = [
        sys.executable,
        "setup.py",
        "-q",
        "egg_info",
        "--egg-base",
        str(folder),
        "sdist",
        "--dist-dir",
        str(folder),
    ]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=150)
    return next(folder.glob("*.tar.gz"))


IS_CLONE = pytest.mark.skipif(
    not (ROOT / ".git").exists(), reason="runs on any machine, from a clone of the repository"
)


@IS_CLONE
def test_the_source_package_is_whole(tmp_path: Path) -> None:
    """Everything that a build reads, and what a person reads first."""
    pytest.importorskip("setuptools")
    with tarfile.open(_source_package(tmp_path)) as package:
        found = {name.partition("/")[2] for name in package.getnames()}
    listed = subprocess.run(
        ["git", "ls-files", "csrc", "torch_xmesh", "xmesh_cli", "examples", "docs"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    expected = {*listed.stdout.split(), "setup.py", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"}
    assert not {name for name in expected - found if (ROOT / name).exists()}
    assert not {name for name in found if name.endswith((".so", ".pyc"))}


@IS_CLONE
@pytest.mark.soak
@pytest.mark.timeout(2000)
def test_the_source_package_builds(tmp_path: Path) -> None:
    """Without network, into an environment that has torch; the quickstart runs on what was installed."""
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-build-isolation", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(site), str(_source_package(tmp_path))], check=True, timeout=1500)
    script = tmp_path / "quickstart.py"
    shutil.copy(ROOT / "examples" / "quickstart.py", script)
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "8", str(script)]
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(run, cwd=tmp_path, env=clean | {"PYTHONPATH": str(site)}, check=True, timeout=300)


def test_typed() -> None:
    assert (PACKAGE / "py.typed").exists()
    assert (PACKAGE / "_C.pyi").exists()


def test_the_import_brings_little_along() -> None:
    """Beside torch and DTensor, nothing that takes long and that most users do not need."""
    code = (
        "import sys, torch, torch.distributed.tensor\n"
        "before = set(sys.modules)\n"
        "import torch_xmesh\n"
        "print(sorted(name for name in set(sys.modules) - before if not name.startswith('torch_xmesh')))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=150)
    for heavy in ("torch.distributed.pipelining", "torch.distributed.fsdp", "triton", "sympy", "torch._dynamo"):
        assert f"'{heavy}'" not in done.stdout
