#!/bin/bash
# Every test: lint, GoogleTest (ctest), pytest.
#   --torch X         with torch X, in an environment of its own (default 2.11.0)
#   --only a,b        some of lint, cpp, python
#   --sanitize        C++ tests of transport, runtime and cuda also under ASan+UBSan and TSan
#   --fuzz SECONDS    what strangers send, SECONDS each (tests/fuzz.sh)
#   --soak            the long tests too
#   --gpu             what a GPU can show (tests/gpu/program.py); where there is none, a dry run that sets it up
#   --built           with --gpu: the extension that is there, as it is
#   -- ARGS           handed to pytest; with --gpu to the program
#   XMESH_PYTHON=/path/python uses that environment as it is.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
stages=lint,cpp,python is_built=
lint_args=() pytest_args=() builds=(plain) fuzz_seconds=0
while [ $# -gt 0 ]; do
  case $1 in
  --torch) TORCH_VERSION=$2 TORCH_ASKED=$2 && shift ;;
  --only) stages=$2 && shift ;;
  --sanitize) builds+=(address,undefined thread) ;;
  --fuzz) fuzz_seconds=$2 && shift ;;
  --soak) pytest_args+=(--soak) ;;
  --gpu) stages=gpu ;;
  --built) is_built=1 ;;
  --) shift && pytest_args+=("$@") && break ;;
  *) sed -n '2,13s/^# \?//p' "$0" && exit 2 ;;
  esac
  shift
done
source scripts/setup.sh
started=$SECONDS
wants() { [[ ,$stages, == *,$1,* ]]; }
extras=(plot)
! wants lint || extras+=(lint)
! wants lint && ! wants python || extras+=(test)  # annotations are checked against what tests import
! wants lint && ! wants python || [ "$TORCH_VERSION" != "$DEFAULT_TORCH" ] || extras+=(models)  # libraries are pinned for one torch
TORCH_PYTHON=  # with it the C++ tests of rooms that include torch are built too
if wants lint || wants python; then setup_python "${extras[@]}" && TORCH_PYTHON=$PYTHON; fi
if wants lint || wants cpp; then setup_cpp; fi
[ "$TORCH_VERSION" = "$DEFAULT_TORCH" ] || lint_args+=(--no-mypy)

configure() { # BUILD_FOLDER [SANITIZERS]
  local torch=$TORCH_PYTHON
  [ -z "${2:-}" ] || torch=  # torch's libraries know no sanitizer
  cmake -S csrc -B "$1" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DXMESH_SANITIZE="${2:-}" -DXMESH_TORCH="$torch" \
    -DCMAKE_EXPORT_COMPILE_COMMANDS=ON >/dev/null
}
run_lint() {
  configure build/cpp-plain && timeout -k 10 2400 bash scripts/lint.sh ${lint_args[@]+"${lint_args[@]}"}
}
run_cpp() {
  local build folder targets left_out
  for build in "${builds[@]}"; do
    folder=build/cpp-${build%%,*}
    say "C++ tests ($build)"
    configure "$folder" "${build/plain/}" || return 1
    targets=(test_transport test_runtime test_cuda) left_out=(-E '_NOT_BUILT|^Corpus')
    [ "$build" != plain ] || targets=(all) left_out=()
    timeout -k 10 1800 cmake --build "$folder" -j "$MAX_JOBS" -t "${targets[@]}" >"$folder.log" 2>&1 || { tail -n 60 "$folder.log" && return 1; }
    TSAN_OPTIONS=halt_on_error=1 timeout -k 10 1200 ctest --test-dir "$folder" --output-on-failure --no-tests=error --timeout 900 -j "$MAX_JOBS" "${left_out[@]}" || return 1
  done
  [ "$fuzz_seconds" = 0 ] || FUZZ_SEED=1 bash tests/fuzz.sh "$fuzz_seconds"
}
# A process per core, up to 8, each with whole files: most tests wait for processes of their own. `-- -n 0` runs all in one.
run_python() {
  timeout -k 10 3300 "$PYTHON" -m pytest -q -n "$((MAX_JOBS < 8 ? MAX_JOBS : 8))" --dist loadfile ${pytest_args[@]+"${pytest_args[@]}"}
}
# A Python with torch that is there, without network or installing; the program builds with it.
run_gpu() {
  local candidate python=${XMESH_PYTHON:-}
  for candidate in "$PWD/.venv/bin/python" python3; do
    [ -n "$python" ] || ! "$candidate" -c 'import torch' 2>/dev/null || python=$candidate
  done
  [ -n "$python" ] || die "--gpu needs a Python with torch: set XMESH_PYTHON, or run examples/run.sh once"
  PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" "$python" tests/gpu/program.py "${OUT:-build}/gpu-results" ${is_built:+--built} ${pytest_args[@]+"${pytest_args[@]}"}
}

failed=()
for stage in lint cpp python gpu; do
  wants "$stage" || continue
  say "$stage"
  began=$SECONDS
  "run_$stage" || failed+=("$stage")
  say "$stage took $((SECONDS - began)) s"
done
if [ ${#failed[@]} -gt 0 ]; then
  say "FAILED: ${failed[*]} (after $((SECONDS - started)) s)"
  exit 1
fi
say "all passed: $stages ($((SECONDS - started)) s)"
