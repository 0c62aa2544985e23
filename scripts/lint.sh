#!/bin/bash
# The lint command: clang-format, clang-tidy (on what has changed; a fresh clone: on all), ruff, mypy --strict, stubtest, codespell.
# --fix formats in place; --each looks at every source by itself, not at those of a unit as one; --analyze adds clang's static analyzer, which takes four times as long; --no-mypy leaves mypy out: torch's annotations
# change from version to version, and ours are written for the default one.
# Tools are those of PYTHON's environment (pyproject.toml's extra "lint"), compile commands those of build/cpp-plain.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
PYTHON=${PYTHON:-$PWD/.venv/bin/python}
PATH="$(dirname "$PYTHON"):$PATH"
fix=0 mypy=1 tidy_args=()
for arg in "$@"; do
  case $arg in
  --fix) fix=1 ;;
  --no-mypy) mypy=0 ;;
  --each) tidy_args+=(--each) ;;
  --analyze) tidy_args+=(--checks=clang-analyzer-*) ;;
  *) echo "usage: $0 [--fix] [--each] [--analyze] [--no-mypy]" && exit 2 ;;
  esac
done
failed=()
check() { # NAME COMMAND...
  local name=$1 began=$SECONDS
  shift
  if "$@"; then echo "lint: $name ok ($((SECONDS - began)) s)"; else failed+=("$name") && echo "lint: $name FAILED"; fi
}
cpp_files() { find csrc tests/cpp \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' \) | LC_ALL=C sort; }
tidy() { # BUILD_FOLDER ROOMS...
  local folder=$1 files
  shift
  mapfile -t files < <(find "$@" -name '*.cpp' | LC_ALL=C sort)
  "$PYTHON" scripts/tidy.py "$folder" ${tidy_args[@]+"${tidy_args[@]}"} "${files[@]}"
}
# Rooms that include torch: the compile commands are those of the extension's own build.
tidy_torch_rooms() {
  local found
  found=build/torch-$("$PYTHON" -c 'import sysconfig, torch; print(torch.__version__.split("+")[0], sysconfig.get_config_var("SOABI"), sep="-")')
  [ -f "$found/build.ninja" ] || { echo "no build.ninja under $found: build the extension first" && return 1; }
  ninja -C "$found" -t compdb >"$found/compile_commands.json" && tidy "$found" csrc/c10d csrc/pipeline csrc/bindings
}
if [ $fix = 1 ]; then
  cpp_files | xargs clang-format -i
  ruff check --fix -q . || true
  ruff format -q .
fi
check clang-format bash -c "$(declare -f cpp_files); cpp_files | xargs clang-format --dry-run --Werror"
check "ruff check" ruff check -q .
check "ruff format" ruff format -q --check .
check codespell codespell csrc torch_xmesh xmesh_cli tests examples benchmarks scripts docs README.md CHANGELOG.md setup.py pyproject.toml
[ $mypy = 0 ] || check mypy mypy --python-executable "$PYTHON"
check stubtest "$PYTHON" -m mypy.stubtest torch_xmesh._C --ignore-missing-stub --allowlist scripts/stubtest_allowlist.txt
check "clang-tidy (core, transport, runtime, cuda)" tidy build/cpp-plain csrc/core csrc/transport csrc/runtime csrc/cuda
check "clang-tidy (c10d, pipeline, bindings)" tidy_torch_rooms
[ ${#failed[@]} -eq 0 ] || { printf 'lint failed: %s\n' "${failed[*]}" && exit 1; }
