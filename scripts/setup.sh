# Sourced by examples/run.sh and tests/run.sh: a Python with torch, and torch_xmesh built in place beside it.
#   XMESH_PYTHON=/path/python   use that environment as it is (torch >= 2.11 there); nothing is installed into it
#   TORCH_VERSION=2.11.0        otherwise: .venv for 2.11.0, .venv-X for another X
#   setup_python EXTRAS...      sets PYTHON; EXTRAS of pyproject.toml's optional dependencies
#   setup_cpp                   makes sure of cmake, ninja and GoogleTest
DEFAULT_TORCH=2.11.0
# One per core, with 2 GiB of memory each.
jobs_here() {
  local cores gib
  cores=$(env -u OMP_NUM_THREADS nproc 2>/dev/null || echo 2)
  gib=$(awk '/^MemAvailable/ { print int($2 / 1048576) }' /proc/meminfo 2>/dev/null)
  [ -z "$gib" ] || [ $((gib / 2)) -ge "$cores" ] || cores=$((gib / 2))
  echo $((cores > 0 ? cores : 1))
}
TORCH_VERSION=${TORCH_VERSION:-$DEFAULT_TORCH}
export MAX_JOBS=${MAX_JOBS:-$(jobs_here)} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PIP_DISABLE_PIP_VERSION_CHECK=1

say() { printf '== %s\n' "$*"; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

# need PACKAGE CHECK...: if the check fails, installs the Debian package where apt and root are there, else names it and stops.
need() {
  local package=$1
  shift
  "$@" >/dev/null 2>&1 && return
  if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
    say "installing $package"
    { DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$package" ||
      { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$package"; }; } >&2 ||
      die "could not install the package $package; install it and run this again"
    hash -r
    "$@" >/dev/null 2>&1 || die "$package is installed, but this still fails: $*"
  else
    die "the Debian package $package (or its like) is missing: install it and run this again"
  fi
}

# Runs a command with its output in LOG ("-": as it is), and a line per minute that says what goes on and how far the build in LOG has come.
patiently() { # WHAT LOG COMMAND...
  local what=$1 log=$2 status=0
  shift 2
  {
    exec {never}<> <(:)
    for ((minutes = 1; ; minutes++)); do
      kill -0 $$ 2>/dev/null || exit 0
      read -rt 60 -u "$never" || say "still $what, after $minutes min$(grep -o '^\[[0-9]*/[0-9]*\]' "$log" 2>/dev/null | tail -n 1 | sed 's/\[/, file /; s#/# of #; s/\]//')"
    done
  } &
  local ticker=$!
  if [ "$log" = - ]; then "$@" || status=$?; else "$@" >"$log" 2>&1 || status=$?; fi
  kill "$ticker" 2>/dev/null || true
  wait "$ticker" 2>/dev/null || true
  return "$status"
}

# Compilers behind ccache, where it is there or can be had: what any clone has compiled is not compiled again.
use_ccache() {
  command -v ccache >/dev/null || ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ] ||
    DEBIAN_FRONTEND=noninteractive timeout 120 apt-get install -y -qq ccache >/dev/null 2>&1 || true
  local folder
  for folder in /usr/lib/ccache /usr/lib64/ccache; do
    if command -v ccache >/dev/null && [ -x "$folder/c++" ]; then
      [[ :$PATH: == *:$folder:* ]] || PATH=$folder:$PATH
      export PATH CCACHE_BASEDIR=$PWD CCACHE_NOHASHDIR=1
    fi
  done
}

has_cxx20() { echo '#include <compare>' | g++ -std=c++20 -fsyntax-only -x c++ -; }
has_gtest() { echo '#include <gtest/gtest.h>' | g++ -std=c++20 -fsyntax-only -x c++ -; }
has_python_headers() { "$1" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))'; }

setup_cpp() {
  need g++ has_cxx20
  use_ccache
  need cmake command -v cmake
  need ninja-build command -v ninja
  need libgtest-dev has_gtest
}

# The hash of what its arguments' files and the words on stdin say.
fingerprint() { { cat; find "$@" -type f | LC_ALL=C sort | xargs -d '\n' sha256sum; } | sha256sum | cut -c1-32; }

make_venv() {
  local venv=$1 extras=$2 base=${PYTHON_FOR_VENV:-python3}
  need python3 command -v "$base"
  "$base" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' || die "$base is $("$base" -V); torch needs Python 3.10 to 3.14 (set PYTHON_FOR_VENV)"
  if ! [ -x "$venv/bin/python" ] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    need python3-venv "$base" -c 'import ensurepip, venv'
    rm -rf "$venv"
    "$base" -m venv "$venv"
  fi
  need python3-dev has_python_headers "$venv/bin/python"
  local stamp
  stamp=$(echo "$TORCH_VERSION $extras" | fingerprint pyproject.toml setup.py)
  [ "$(cat "$venv/.stamp" 2>/dev/null)" = "$stamp" ] && return
  say "installing torch $TORCH_VERSION into $venv (several GB at the first time: minutes, as the network is)"
  patiently "installing torch" - "$venv/bin/python" -m pip install -q --retries 5 "torch==$TORCH_VERSION" "setuptools<81" wheel ninja numpy ||
    die "torch $TORCH_VERSION could not be installed into $venv"
  say "building torch_xmesh for torch $TORCH_VERSION (from nothing about 7 minutes of CPU, $MAX_JOBS at a time)"
  PATH="$PWD/$venv/bin:$PATH" patiently building - "$venv/bin/python" -m pip install -q --retries 5 --no-build-isolation -e ".[$extras]" ||
    die "torch_xmesh could not be built or installed into $venv"
  echo "$stamp" >"$venv/.stamp"
}

build_in_place() {
  local stamp
  stamp=$("$PYTHON" -c 'import os, sys; from importlib.metadata import version; print(sys.executable, version("torch"), os.environ.get("XMESH_DEBUG"), os.environ.get("XMESH_CUDA"), os.environ.get("XMESH_CUDA_ARCHITECTURES"))' |
    fingerprint csrc setup.py)
  if [ "$(cat build/in_place.stamp 2>/dev/null)" = "$stamp" ] && compgen -G 'torch_xmesh/_C*.so' >/dev/null; then
    return
  fi
  say "building torch_xmesh in place (from nothing about 7 minutes of CPU, $MAX_JOBS at a time)"
  mkdir -p build
  PATH="$(dirname "$PYTHON"):$PATH" patiently building build/extension.log "$PYTHON" setup.py -q build_ext --inplace || {
    tail -n 60 build/extension.log >&2
    die "the extension did not build; all of it is in build/extension.log"
  }
  echo "$stamp" >build/in_place.stamp
}

setup_python() {
  local extras
  extras=$(IFS=,; echo "$*")
  need g++ has_cxx20
  use_ccache
  if [ -n "${XMESH_PYTHON:-}" ]; then
    PYTHON=$XMESH_PYTHON
    "$PYTHON" -c '
import sys
from importlib.metadata import PackageNotFoundError, version
missing = []
for name in ("torch", "setuptools", "ninja", "numpy", *sys.argv[2:]):
    try:
        version(name)
    except PackageNotFoundError:
        missing.append(name)
if missing:
    sys.exit(f"error: {sys.executable} lacks {missing}; install them there, or run without XMESH_PYTHON")
found = version("torch").split("+")[0]
if tuple(map(int, found.split(".")[:2])) < (2, 11):
    sys.exit(f"error: {sys.executable} has torch {found}; expected 2.11 or newer")
if sys.argv[1] and found != sys.argv[1]:
    sys.exit(f"error: --torch {sys.argv[1]}, but {sys.executable} has torch {found}")
' "${TORCH_ASKED:-}" $(required_modules "$@") || exit 1
    export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
  else
    local venv=.venv
    [ "$TORCH_VERSION" = "$DEFAULT_TORCH" ] || venv=.venv-$TORCH_VERSION
    make_venv "$venv" "$extras"
    PYTHON=$PWD/$venv/bin/python
  fi
  build_in_place
  export PYTHON
}

# What XMESH_PYTHON's environment must have for these extras.
required_modules() {
  for extra in "$@"; do
    case $extra in
    test) echo pytest pytest-timeout pytest-xdist hypothesis expecttest psutil ;;
    lint) echo clang-format clang-tidy ruff mypy codespell ;;
    esac
  done
}
