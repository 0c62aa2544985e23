"""What of CUDA can be shown without a device: the kernels compile, load, and refuse in words; c10d's NCCL links.

Needs nvcc and the headers of CUDA, from the machine or from wheels; where they are missing the tests say so and are
skipped.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import torch_xmesh as xm
from torch_xmesh import _C

ROOT = Path(__file__).resolve().parents[2]
TORCH = Path(torch.__file__).parent
NO_DRIVER = 35  # cudaErrorInsufficientDriver
NO_DEVICE = 100  # cudaErrorNoDevice


def _build_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cuda_build", ROOT / "csrc" / "cuda" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The one that the package was built with, else one made here."""
    if not (ROOT / "csrc").exists():
        pytest.skip("runs from a clone of the repository")
    build = _build_module()
    built: Path = Path(_C.__file__).parent / build.LIBRARY
    if built.exists():
        return built
    nvcc = build.find_nvcc()
    if nvcc is None:
        pytest.skip("runs on machines with nvcc: in CUDA_HOME, PATH, /usr/local/cuda or a wheel beside torch's")
    out: Path = ROOT / "build" / "cuda" / build.LIBRARY
    build.build(nvcc, out)
    return out


def _loaded(library: Path) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(library))
    for name in ("xmesh_cuda_error_text", "xmesh_cuda_architectures"):
        getattr(loaded, name).restype = ctypes.c_char_p
    return loaded


def test_kernels_are_compiled_for_every_architecture(library: Path) -> None:
    said = _loaded(library).xmesh_cuda_architectures().decode().split(", ")
    assert said
    assert set(said) <= {"sm_80", "sm_90", "sm_100"}
    binary = library.read_bytes()
    assert all(f"sm_{one.removeprefix('sm_')}".encode() in binary for one in said)


def test_the_library_needs_no_other_of_cuda(library: Path) -> None:
    needed = subprocess.run(["ldd", str(library)], capture_output=True, text=True, check=True).stdout
    assert "cuda" not in needed


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs on machines without a CUDA device")
def test_a_launch_without_a_driver_is_refused(library: Path) -> None:
    loaded = _loaded(library)
    launch = (ctypes.c_char * 4096)()
    for launched in (
        loaded.xmesh_cuda_copy(0, None, launch),
        loaded.xmesh_cuda_reduce(0, None, launch),
        loaded.xmesh_cuda_load(0),
        loaded.xmesh_cuda_look(),
    ):
        assert launched in (NO_DRIVER, NO_DEVICE)
        assert re.search("driver version|no CUDA-capable device", loaded.xmesh_cuda_error_text(launched).decode())


def test_about_says_what_packs_on_cuda() -> None:
    architectures, obstacle = _C.cuda_kernels()
    said = xm.about()
    assert said.version == xm.__version__
    assert re.search(rf"^torch version +{re.escape(torch.__version__)}$", str(said), re.MULTILINE)
    if architectures is None:
        assert said.cuda_kernels == f"torch operators: {obstacle}"
    else:
        assert said.cuda_kernels.startswith(f"own CUDA kernels for {architectures}")
        assert torch.cuda.is_available() or "cannot run here: " in said.cuda_kernels


def test_a_package_without_the_library_uses_torchs_operators(tmp_path: Path) -> None:
    package = Path(xm.__file__).parent
    shutil.copytree(package, tmp_path / "torch_xmesh", ignore=shutil.ignore_patterns("_cuda_kernels.so", "__pycache__"))
    code = "import sys; sys.meta_path = [f for f in sys.meta_path if 'Editable' not in getattr(f, '__name__', '')]; "
    code += "import torch_xmesh as xm; print(xm.about().cuda_kernels)"

    def said() -> str:
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        run = subprocess.run(
            [sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return run.stdout.strip()

    assert said() == "torch operators: built without nvcc"
    broken = tmp_path / "torch_xmesh" / "_cuda_kernels.so"
    broken.write_text("text")
    assert said().startswith(f"torch operators: {broken}")


def _nccl_program() -> Path:
    """Compiled with the headers and libraries of torch's own wheels, or the toolkit's; kept by what went into it."""
    wheels = [Path(folder) for folder in getattr(importlib.util.find_spec("nvidia"), "submodule_search_locations", ())]
    toolkit = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))]
    roots = [*(folder for wheel in wheels for folder in sorted(wheel.iterdir())), *toolkit]
    includes = [root / "include" for root in roots if (root / "include").is_dir()]
    libraries = [folder for root in roots for folder in (root / "lib", root / "lib64") if folder.is_dir()]
    for header in ("nccl.h", "cuda_runtime_api.h", "cusparse.h"):
        if not any((folder / header).exists() for folder in includes):
            pytest.skip(f"runs on machines with {header}, in the CUDA toolkit or torch's wheels")
    cxx = shutil.which("g++")
    if cxx is None:
        pytest.skip("runs on machines with g++")
    stream = ROOT / "csrc" / "c10d" / "stream"
    sources = [
        ROOT / "tests" / "cpp" / "nccl_program.cpp",
        stream / "backend_transport.cpp",
        stream / "communicator_use.cpp",
        stream / "device_line.cpp",
        stream / "side_threads.cpp",
    ]
    command = [cxx, "-std=c++20", "-O0", "-DUSE_C10D_NCCL", f"-I{ROOT / 'csrc'}", f"-isystem{TORCH / 'include'}"]
    command += [f"-isystem{TORCH / 'include' / 'torch' / 'csrc' / 'api' / 'include'}"]
    command += [f"-isystem{folder}" for folder in includes]
    links = [f"-L{folder}" for folder in (TORCH / "lib", *libraries)]
    links += [f"-Wl,-rpath,{folder}" for folder in (TORCH / "lib", *libraries)]
    links += ["-Wl,--no-as-needed", "-Wl,--allow-shlib-undefined", "-ltorch_cuda", "-ltorch_cpu", "-lc10_cuda", "-lc10"]
    links += ["-l:libnccl.so.2", "-pthread"]
    folder = ROOT / "build" / "nccl"
    folder.mkdir(parents=True, exist_ok=True)
    objects = []
    headers = b"".join(path.read_bytes() for path in sorted(ROOT.glob("csrc/c10d/stream/*.h")))
    headers += b"".join(path.read_bytes() for path in sorted(ROOT.glob("csrc/transport/*.h")))
    for source in sources:
        digest = hashlib.sha256(f"{command} {torch.__version__}".encode() + headers + source.read_bytes()).hexdigest()
        objects.append(folder / f"{source.stem}-{digest[:16]}.o")
        if not objects[-1].exists():
            partly = objects[-1].with_suffix(f".{os.getpid()}")
            subprocess.run([*command, "-c", str(source), "-o", str(partly)], check=True)
            partly.rename(objects[-1])
    program = folder / "nccl_program"
    subprocess.run([cxx, *map(str, objects), *links, "-o", str(program)], check=True)
    return program


@pytest.mark.in_turn(3)
@pytest.mark.timeout(600)
@pytest.mark.skipif(torch.version.cuda is None, reason="runs with a torch that has CUDA")
@pytest.mark.skipif(not (ROOT / "csrc").exists(), reason="runs from a clone of the repository")
def test_nccl_links() -> None:
    """With the headers and libraries that torch's wheels bring; without a driver it is refused in words."""
    run = subprocess.run([str(_nccl_program())], capture_output=True, text=True, check=True, timeout=120)
    assert re.match(r"nccl \d{5}, compiled against \d{5}\n", run.stdout)
    for what in ("line", "backend"):
        expected = "made" if torch.cuda.is_available() else "refused: .*(driver|GPU|device)"
        assert re.search(f"^{what}: {expected}", run.stdout, re.MULTILINE), run.stdout
