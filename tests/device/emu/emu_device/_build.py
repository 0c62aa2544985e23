"""Builds the emulated device once per torch version, Python and content of its sources."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import torch

SOURCES = Path(__file__).resolve().parent.parent / "csrc"
FLAGS = ["-std=c++20", "-O1", "-g0", "-Wall", "-fvisibility=hidden"]
NAME = "emu_device_native"
CCACHE = Path("/usr/lib/ccache")  # compilers by their usual names, where it is installed


def _repository() -> Path:
    return Path(__file__).resolve().parents[4]


def folder() -> Path:
    """Where what is built lies: one folder for each torch version and Python."""
    version = torch.__version__.split("+")[0]
    python = sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag
    return _repository() / "build" / f"emu-{version}-{python}"


def content_hash() -> str:
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for path in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _compile(into: Path) -> None:
    from torch.utils import cpp_extension  # it looks for CUDA when it is imported, and warns where there is none

    os.environ.setdefault("MAX_JOBS", "1")
    path = os.environ["PATH"]
    if CCACHE.is_dir():
        os.environ["PATH"] = f"{CCACHE}{os.pathsep}{path}"
    try:
        # What load() calls, without its import: the process that builds need not have the device.
        cpp_extension._write_ninja_file_and_build_library(
            NAME,
            sorted(str(source) for source in SOURCES.glob("*.cpp")),
            FLAGS,
            [],
            [],
            cpp_extension._prepare_ldflags(["-Wl,-s"], False, False, False, False),
            [],
            str(into),
            False,
            False,
            False,
        )
    finally:
        os.environ["PATH"] = path


def build() -> Path:
    """The built library's path. The first process that comes builds it; others wait for that."""
    into = folder()
    into.mkdir(parents=True, exist_ok=True)
    built = into / f"{NAME}-{content_hash()}.so"
    if built.exists():
        return built
    with (into / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            _compile(into)
            for old in into.glob(f"{NAME}-*.so"):
                old.unlink()
            (into / f"{NAME}.so").rename(built)
    return built


def load() -> ModuleType:
    """Builds, then imports the library."""
    spec = importlib.util.spec_from_file_location(NAME, build())
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {NAME} from {folder()}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
