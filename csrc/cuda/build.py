"""Builds the library of CUDA kernels with nvcc: setup.py does, and ``python csrc/cuda/build.py OUT.so``.

XMESH_CUDA_ARCHITECTURES=90 builds for that compute capability alone, several with commas between them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

CSRC = Path(__file__).resolve().parents[1]
LIBRARY = "_cuda_kernels.so"
WANTED = ("80", "90", "100")
"""Compute capabilities; later devices compile the last one's PTX."""
_INCLUDE = re.compile(r'^#include "(.+)"', re.MULTILINE)


def find_nvcc() -> Path | None:
    """nvcc of CUDA_HOME, else of PATH, else of the default folder, else of a wheel beside torch's own."""
    folders = [Path(os.environ[name]) / "bin" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    on_path = shutil.which("nvcc")
    folders += [Path(on_path).parent] if on_path else []
    folders.append(Path("/usr/local/cuda/bin"))
    wheels = importlib.util.find_spec("nvidia")
    for folder in wheels.submodule_search_locations or () if wheels else ():
        folders += sorted(path.parent for path in Path(folder).glob("*/bin/nvcc"))
    return next((folder / "nvcc" for folder in folders if (folder / "nvcc").exists()), None)


def build(nvcc: Path, out: Path) -> None:
    """Compiles and links, unless `out` is what would come of it. Raises RuntimeError with nvcc's words."""
    record = out.with_suffix(".built")
    command = [str(nvcc), *_flags(nvcc), str(CSRC / "cuda" / "kernels.cu"), "-o", str(out)]
    digest = _digest(command)
    if out.exists() and record.exists() and record.read_text() == digest:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise RuntimeError(f"nvcc did not build the CUDA kernels; XMESH_CUDA=0 builds without them\n{run.stderr}")
    record.write_text(digest)


def _flags(nvcc: Path) -> list[str]:
    known = subprocess.run([str(nvcc), "--list-gpu-code"], capture_output=True, text=True, check=True).stdout.split()
    asked = os.environ.get("XMESH_CUDA_ARCHITECTURES")
    wanted = asked.split(",") if asked else WANTED
    chosen = [one for one in wanted if f"sm_{one}" in known]
    if not chosen:
        raise RuntimeError(f"{nvcc} knows none of sm_{', sm_'.join(wanted)}; XMESH_CUDA=0 builds without it")
    names = ", ".join(f"sm_{one}" for one in chosen)
    return [
        "-std=c++20",
        "-O3",
        "-fmad=false",  # the host's bits
        "-shared",
        "-Xcompiler=-fPIC,-fvisibility=hidden",
        "-Xlinker=--exclude-libs,ALL,-s",
        "-cudart=static",
        "--threads=2",
        f"-I{CSRC}",
        f'-DXMESH_CUDA_ARCHITECTURES="{names}"',
        *(f"-gencode=arch=compute_{one},code=sm_{one}" for one in chosen),
        f"-gencode=arch=compute_{chosen[-1]},code=compute_{chosen[-1]}",
    ]


def _digest(command: list[str]) -> str:
    """Of all that the library depends on."""
    digest = hashlib.sha256("\0".join(command).encode())
    todo = [CSRC / "cuda" / "kernels.cu", Path(__file__)]
    seen: set[Path] = set()
    while todo:
        path = todo.pop()
        if path not in seen and path.exists():
            seen.add(path)
            digest.update(path.read_bytes())
            todo += [CSRC / name for name in _INCLUDE.findall(path.read_text())]
    return digest.hexdigest()


def main(arguments: list[str]) -> int:
    nvcc = find_nvcc()
    if len(arguments) != 1 or nvcc is None:
        print(f"usage: python {sys.argv[0]} OUT.so" if nvcc else "there is no nvcc here")
        return 2
    build(nvcc, Path(arguments[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
