"""Builds torch_xmesh: ``torch_xmesh._C`` from every C++ room under csrc/, against the torch that is installed here.

XMESH_DEBUG=1 builds it for a debugger: not optimized, with symbols and assertions.
XMESH_UNITS=0 compiles each file on its own: longer in all, and a changed file of a room with torch sooner.
XMESH_CUDA=0 builds it without CUDA kernels of its own, which are built where nvcc is and torch has CUDA.
XMESH_CUDA_ARCHITECTURES=90 builds those for that compute capability alone.
"""

import importlib.util
import os
import re
import shutil
import sys
import sysconfig
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

ROOT = Path(__file__).resolve().parent
TORCH_VERSION = torch.__version__.split("+")[0]
TORCH_MINOR = ".".join(TORCH_VERSION.split(".")[:2])
IS_DEBUG = os.environ.get("XMESH_DEBUG", "0") not in ("", "0")
os.chdir(ROOT)


def sources() -> list[str]:
    """C++ files of all rooms, relative to the root, in a fixed order."""
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.cpp"))


TORCH_ROOMS = ("bindings", "c10d", "pipeline")
"""Their sources spend most of their time in torch's headers: several are compiled as one."""
SOURCES_PER_UNIT = 6


def units(folder: Path) -> list[str]:
    """What is compiled: files of rooms without torch as they are, those of a folder of the others in a few units, which
    include them and are written into `folder`. XMESH_UNITS=0 compiles each on its own."""
    if os.environ.get("XMESH_UNITS", "1") == "0":
        return sources()
    alone, together = [], defaultdict(list)
    for source in sources():
        path = Path(source)
        if path.parts[1] in TORCH_ROOMS:
            together[path.parent.relative_to("csrc")].append(path.relative_to("csrc"))
        else:
            alone.append(source)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for room, paths in sorted(together.items()):
        number = -(-len(paths) // SOURCES_PER_UNIT)
        for i in range(number):
            unit = folder / f"{'_'.join(room.parts)}_{i}.cpp"
            text = "".join(f'#include "{path}"\n' for path in paths[i::number])
            if not unit.exists() or unit.read_text() != text:
                unit.write_text(text)
            written.append(str(unit))
    return written + alone


def jobs() -> int:
    """Compilers at a time: one per core, with 2 GiB of memory each."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    gib = 2.0 * cores
    meminfo = Path("/proc/meminfo")
    if meminfo.exists() and (found := re.search(r"^MemAvailable: +(\d+) kB", meminfo.read_text(), re.MULTILINE)):
        gib = int(found[1]) / 2**20
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and limit.read_text().strip().isdigit():
        gib = min(gib, int(limit.read_text()) / 2**30)
    return max(1, min(cores, int(gib / 2)))


def cuda_build() -> Any:
    """The module that builds the CUDA kernels."""
    spec = importlib.util.spec_from_file_location("cuda_build", ROOT / "csrc" / "cuda" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CUDA = cuda_build()
NVCC = CUDA.find_nvcc() if torch.version.cuda and os.environ.get("XMESH_CUDA", "1") != "0" else None


class BuildWithTorchRecord(BuildExtension):
    """Builds with ninja into a folder per torch and Python version, and records the torch that the extension needs."""

    def finalize_options(self) -> None:
        chosen = vars(self).get("build_temp")
        super().finalize_options()
        self.force = (
            True  # ninja knows what is out of date, headers included; setuptools would look at the sources only
        )
        if chosen is None:
            python = sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag
            self.build_temp = str(Path("build") / f"torch-{TORCH_VERSION}-{python}{'-debug' if IS_DEBUG else ''}")

    def build_extensions(self) -> None:
        os.environ.setdefault("MAX_JOBS", str(jobs()))
        for extension in self.extensions:
            extension.sources = units(Path(self.build_temp) / "units")
        super().build_extensions()

    def run(self) -> None:
        super().run()
        if NVCC is not None:
            CUDA.build(NVCC, Path(self.build_temp) / CUDA.LIBRARY)
        self._complete(Path(self.build_lib) / "torch_xmesh")
        if self.inplace:
            self._complete(ROOT / "torch_xmesh")
            (ROOT / "build" / "in_place.stamp").unlink(missing_ok=True)  # the scripts' own, of what they have built

    def _complete(self, package: Path) -> None:
        package.mkdir(parents=True, exist_ok=True)
        library = package / CUDA.LIBRARY
        library.unlink(missing_ok=True)  # a process may have it loaded
        if NVCC is not None:
            shutil.copy(Path(self.build_temp) / CUDA.LIBRARY, library)
        text = f'"""Written by setup.py."""\n\nBUILT_WITH_TORCH = "{TORCH_VERSION}"\n'
        record = package / "_build_info.py"
        if not record.exists() or record.read_text() != text:
            record.write_text(text)

    def get_outputs(self) -> list[str]:
        outputs: list[str] = super().get_outputs()
        return [*outputs, *(str(Path(self.build_lib) / "torch_xmesh" / name) for name in self._made())]

    def get_output_mapping(self) -> dict[str, str]:
        mapping: dict[str, str] = super().get_output_mapping()
        made = (Path("torch_xmesh") / name for name in self._made())
        return {**mapping, **{str(Path(self.build_lib) / file): str(file) for file in made}}

    def _made(self) -> list[str]:
        return ["_build_info.py", *([CUDA.LIBRARY] if NVCC is not None else [])]


def extension() -> Any:
    optimize = ["-O0", "-g", "-UNDEBUG", "-D_GLIBCXX_ASSERTIONS"] if IS_DEBUG else ["-O3", "-g0"]
    return CppExtension(
        "torch_xmesh._C",
        sources(),
        include_dirs=[str(ROOT / "csrc")],
        # No contraction of multiply and add: plans are equal on every CPU.
        extra_compile_args=["-std=c++20", *optimize, "-Wall", "-ffp-contract=off", "-fvisibility=hidden"],
        extra_link_args=["-Wl,--as-needed", *([] if IS_DEBUG else ["-Wl,-s"])],
    )


setup(
    ext_modules=[extension()],
    cmdclass={"build_ext": BuildWithTorchRecord},
    install_requires=[f"torch=={TORCH_MINOR}.*", "numpy"],
)
