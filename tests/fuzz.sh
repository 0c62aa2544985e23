#!/bin/bash
# Fuzzes what strangers send: each target of tests/cpp/fuzz for SECONDS (default 60), from its corpus, two at a time.
#   bash tests/fuzz.sh [SECONDS] [TARGET...]
#   FUZZ_SEED=1 tries the same inputs each time, as far as SECONDS go.
# An input that breaks a promise is left in build/cpp-fuzz; once mended, it joins tests/cpp/fuzz/corpus/TARGET.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
seconds=${1:-60}
[ $# -eq 0 ] || shift
source scripts/setup.sh
setup_cpp
need clang command -v clang++
need libclang-rt-dev bash -c 'echo "extern \"C\" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }" | clang++ -fsanitize=fuzzer,address -x c++ - -o /dev/null'
folder=build/cpp-fuzz
targets=("$@")
if [ ${#targets[@]} = 0 ]; then
  mapfile -t targets < <(find tests/cpp/fuzz -maxdepth 1 -name '*.cpp' ! -name replay.cpp -printf '%f\n' | sed 's/\.cpp$//' | LC_ALL=C sort)
fi
CXX=clang++ cmake -S csrc -B "$folder" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DXMESH_FUZZ=ON >/dev/null || exit 1
timeout -k 10 1800 cmake --build "$folder" -j "$MAX_JOBS" -t "${targets[@]/#/fuzz_}" >"$folder.log" 2>&1 || { tail -n 60 "$folder.log" && exit 1; }
fuzz() { # TARGET: new inputs go to a folder of their own, the corpus stays as it is
  local found=$folder/found/$1
  mkdir -p "$found"
  if timeout -k 10 $((seconds + 120)) "$folder/tests/fuzz_$1" -seed="${FUZZ_SEED:-0}" -max_total_time="$seconds" -timeout=20 -rss_limit_mb=4096 -max_len=16384 -print_final_stats=1 \
    -artifact_prefix="$folder/broken-$1-" "$found" "tests/cpp/fuzz/corpus/$1" >"$folder/$1.log" 2>&1; then
    echo "fuzz: $1 ok ($(grep -a -m1 -o 'number_of_executed_units: *[0-9]*' "$folder/$1.log" | grep -a -o '[0-9]*') inputs)"
  else
    tail -n 40 "$folder/$1.log"
    echo "fuzz: $1 FAILED"
    return 1
  fi
}
export -f fuzz
export folder seconds
printf '%s\n' "${targets[@]}" | xargs -n 1 -P "$MAX_JOBS" bash -c 'fuzz "$1"' fuzz
