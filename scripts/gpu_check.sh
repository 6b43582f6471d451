#!/bin/sh
# SPDX-License-Identifier: MIT
# Runs the tests of the CUDA backend on a real GPU, a part of them under compute-sanitizer, and the
# benchmark bench/cuda/device.c. Needs nvcc, g++ and GoogleTest's sources; no CBLAS. Writes
# OUT/gpu_check.json and OUT/gpu_check.md.
#
#   GTEST_DIR=/path/to/googletest scripts/gpu_check.sh [OUT]        default OUT: build/gpu
#
# NOT YET RUN ON HARDWARE: written where there was no GPU; its build was tried there, its tests were not.
# Does not yet: compare with torch, or measure the step of a whole model.
set -u
cd "$(dirname "$0")/.." || exit 1
out=${1:-build/gpu}
mkdir -p "$out" || exit 1
nvcc=${NVCC:-nvcc}
if ! command -v "$nvcc" >/dev/null 2>&1; then nvcc=/usr/local/cuda/bin/nvcc; fi
stop() { echo "gpu_check: $1" >&2; exit 2; }
command -v "$nvcc" >/dev/null 2>&1 || stop 'there is no nvcc (NVCC=...)'
gtest=${GTEST_DIR:-}
if [ -n "$gtest" ] && [ -d "$gtest/googletest" ]; then gtest=$gtest/googletest; fi
[ -f "$gtest/src/gtest-all.cc" ] || stop 'GTEST_DIR is not the folder of GoogleTest (src/gtest-all.cc)'
cuda=$(dirname "$(dirname "$(command -v "$nvcc")")")

# ---- build: the real kernels and libraries in place of the double ----
flags="-O1 -ffp-contract=off -fno-math-errno -I. -isystem $cuda/include -isystem $gtest/include -D_POSIX_C_SOURCE=200809L
  -DMFSDP_TEST_SANITIZER=1 -DMFSDP_TEST_TSAN=0 -DMFSDP_TEST_HARDWARE=1 -DMFSDP_EXAMPLE_CBLAS=0 -DMFSDP_EXAMPLE_LAPACKE=0 -DMFSDP_EXAMPLE_MPI=0"
arch=${ARCH:-native}
"$nvcc" -std=c++17 -O3 -arch="$arch" -Xcompiler -fvisibility=hidden -c mfsdp/cuda/kernels.cu -o "$out/kernels.o" || stop 'kernels.cu does not compile'
programs='host/host_ops host/host_dense host/host_queue host/host_verdict newton_schulz muon adamw optimizer precondition'
# These have nothing but the GPU in view.
whole='cuda/ops cuda/runtime_cuda cuda/transport_device'
# shellcheck disable=SC2086 # lists of words
{
  g++ -std=c++14 -O1 -I"$gtest" -isystem "$gtest/include" -c "$gtest/src/gtest-all.cc" -o "$out/gtest-all.o" &&
    g++ -std=c++14 -O1 -I"$gtest" -isystem "$gtest/include" -c "$gtest/src/gtest_main.cc" -o "$out/gtest_main.o" &&
    g++ -std=c++14 $flags -c tests/cudasim/rig.cpp -o "$out/rig.o" &&
    g++ -std=c++14 $flags -c tests/support/malloc_count.cpp -o "$out/malloc_count.o"
} || stop 'the tests do not compile'
for program in $programs $whole; do
  name=$(basename "$program")
  # shellcheck disable=SC2086
  g++ -std=c++14 $flags "tests/${program}_test.cpp" "$out/rig.o" "$out/kernels.o" "$out/malloc_count.o" "$out/gtest-all.o" \
    "$out/gtest_main.o" -L"$cuda/lib64" -Wl,-rpath,"$cuda/lib64" -lcusolver -lcublas -lcublasLt -lcudart -lpthread -lm -o "$out/${name}_test" ||
    stop "$program does not build"
done
# shellcheck disable=SC2086
{
  gcc -std=c11 $flags -c bench/cuda/device.c -o "$out/device.o" &&
    gcc -std=c11 $flags -c bench/support/bench.c -o "$out/bench.o" &&
    g++ "$out/device.o" "$out/bench.o" "$out/kernels.o" -L"$cuda/lib64" -Wl,-rpath,"$cuda/lib64" -lcusolver -lcublas -lcublasLt \
      -lcudart -lpthread -lm -o "$out/device_bench"
} || stop 'the benchmark does not build'
if [ "${BUILD_ONLY:-0}" = 1 ]; then echo "built in $out; nothing was run"; exit 0; fi

# ---- run ----
command -v nvidia-smi >/dev/null 2>&1 || stop 'there is no nvidia-smi: no driver'
device=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -n 1)
[ -n "$device" ] || stop 'nvidia-smi sees no GPU'
passed=0 failed=0 rows='' table=''
run() { # NAME COMMAND...
  what=$1
  shift
  if timeout "${seconds:-120}" "$@" >"$out/$what.log" 2>&1; then result=ok passed=$((passed + 1)); else result=failed failed=$((failed + 1)); fi
  echo "$result $what"
  rows="$rows${rows:+, }{\"test\": \"$what\", \"result\": \"$result\"}"
  table="$table| $what | $result |
"
}
for program in $programs; do
  name=$(basename "$program")
  run "$name" "$out/${name}_test" '--gtest_filter=*/cuda'
done
for program in $whole; do
  name=$(basename "$program")
  run "$name" "$out/${name}_test"
done
if command -v compute-sanitizer >/dev/null 2>&1; then
  run memcheck compute-sanitizer --error-exitcode 9 "$out/host_ops_test" '--gtest_filter=*/cuda'
  run racecheck compute-sanitizer --tool racecheck --error-exitcode 9 "$out/host_verdict_test" '--gtest_filter=*/cuda'
else
  echo 'skip compute-sanitizer: command not found'
fi
rm -f "$out/device.json"
seconds=240
run benchmark "$out/device_bench" --json "$out/device.json"
figures=null
if [ "$result" = ok ] && [ -s "$out/device.json" ]; then figures=$(cat "$out/device.json"); fi
date=$(date -u +%Y-%m-%d)
printf '{"device": "%s", "nvcc": "%s", "date": "%s", "benchmarks": %s, "tests": [%s]}\n' "$device" \
  "$("$nvcc" --version | sed -n 4p)" "$date" "$figures" "$rows" >"$out/gpu_check.json"
{
  printf '# CUDA backend on hardware\n\n%s, %s, %s. Command: scripts/gpu_check.sh.\n\n' \
    "$device" "$("$nvcc" --version | sed -n 4p)" "$date"
  printf '| test | result |\n|---|---|\n%s\n```\n' "$table"
  cat "$out/benchmark.log"
  printf '```\n'
} >"$out/gpu_check.md"
echo "$passed passed, $failed failed; report: $out/gpu_check.md"
[ $failed = 0 ]
