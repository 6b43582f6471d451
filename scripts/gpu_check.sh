#!/bin/sh
# SPDX-License-Identifier: MIT
# Runs the tests of the CUDA backend on a real GPU, a part of them under compute-sanitizer, the benchmark
# bench/cuda/device.c, and beside it PyTorch (bench/peers/torch_gpu.py), if there is one. Needs nvcc, g++,
# python3 and GoogleTest's sources; no CBLAS. Ends within 8 minutes of starting to run. Writes
# OUT/gpu_check.json and OUT/gpu_check.md.
#
#   GTEST_DIR=/path/to/googletest scripts/gpu_check.sh [OUT]        default OUT: build/gpu
#   BUILD_ONLY=1 ... scripts/gpu_check.sh [OUT]     builds: for a machine without a GPU (ARCH=sm_90)
#   RUN_ONLY=1 scripts/gpu_check.sh [OUT]           runs what was built there
#
# Variables: NVCC ARCH GTEST_DIR PYTHON NCCL_CFLAGS NCCL_LIBS SECONDS_LEFT=470 (of running, all in all)
# NOT YET RUN ON HARDWARE: written where there was no GPU; its build and its report were tried there, its
# tests were not.
set -u
cd "$(dirname "$0")/.." || exit 1
out=${1:-build/gpu}
mkdir -p "$out" || exit 1
nvcc=${NVCC:-nvcc}
if ! command -v "$nvcc" >/dev/null 2>&1; then nvcc=/usr/local/cuda/bin/nvcc; fi
stop() { echo "gpu_check: $1" >&2; exit 2; }
command -v "$nvcc" >/dev/null 2>&1 || stop 'there is no nvcc (NVCC=...)'
cuda=$(dirname "$(dirname "$(command -v "$nvcc")")")
programs='host/host_ops host/host_dense host/host_queue host/host_verdict newton_schulz muon adamw optimizer precondition'
# These have nothing but the GPU in view.
whole='cuda/ops cuda/runtime_cuda cuda/transport_device'
# And these where there is an NCCL; of the ranks of a test each has a GPU, or it is skipped.
with_nccl='cuda/transport_nccl'

# ---- build: the real kernels and libraries in place of the double ----
libs="-L$cuda/lib64 -Wl,-rpath,$cuda/lib64 -lcusolver -lcublas -lcublasLt -lcudart -lpthread -lm"
flags="-O1 -ffp-contract=off -fno-math-errno -I. -isystem $cuda/include ${NCCL_CFLAGS:-} -D_POSIX_C_SOURCE=200809L
  -DMFSDP_TEST_SANITIZER=1 -DMFSDP_TEST_TSAN=0 -DMFSDP_TEST_HARDWARE=1 -DMFSDP_EXAMPLE_CBLAS=0 -DMFSDP_EXAMPLE_LAPACKE=0 -DMFSDP_EXAMPLE_MPI=0"

# shellcheck disable=SC2086 # lists of words
build_one() { # PROGRAM
  g++ -std=c++14 $flags -isystem "$gtest/include" "tests/${1}_test.cpp" "$out/rig.o" "$out/kernels.o" "$out/malloc_count.o" \
    "$out/gtest-all.o" "$out/gtest_main.o" $nccl_libs $libs -o "$out/$(basename "$1")_test" >"$out/$(basename "$1").build" 2>&1
}

# shellcheck disable=SC2086
build() {
  gtest=${GTEST_DIR:-}
  if [ -n "$gtest" ] && [ -d "$gtest/googletest" ]; then gtest=$gtest/googletest; fi
  [ -f "$gtest/src/gtest-all.cc" ] || stop 'GTEST_DIR is not the folder of GoogleTest (src/gtest-all.cc)'
  # The rig of the tests knows transport_nccl.h where there is an NCCL.
  nccl_libs="${NCCL_LIBS:--L$cuda/lib -Wl,-rpath,$cuda/lib -lnccl}"
  printf '#include <nccl.h>\nint v[NCCL_VERSION_CODE < 21903 ? -1 : 1];\nint main() { return ncclGetVersion(v) != 0; }\n' >"$out/nccl.cpp"
  if g++ $flags "$out/nccl.cpp" $nccl_libs $libs -o "$out/nccl" 2>/dev/null; then
    flags="$flags -DMFSDP_TEST_NCCL=1"
  else
    echo 'skip NCCL: no nccl.h of 2.19.3 or later, or no library to link (NCCL_CFLAGS, NCCL_LIBS)'
    flags="$flags -DMFSDP_TEST_NCCL=0" nccl_libs=''
  fi
  rm -f "$out"/*_test "$out/device_bench" "$out/train_gpt_cuda"
  # The trainer, by the Makefile as a user would.
  if make CUDA_ARCH="-arch=${ARCH:-native}" examples-cuda >"$out/examples-cuda.build" 2>&1; then
    cp build/examples/train_gpt_cuda "$out/train_gpt_cuda"
  else
    cat "$out/examples-cuda.build" >&2
    stop 'train_gpt_cuda does not build'
  fi
  "$nvcc" -std=c++17 -O3 -arch="${ARCH:-native}" -Xcompiler -fvisibility=hidden -c mfsdp/cuda/kernels.cu -o "$out/kernels.o" ||
    stop 'kernels.cu does not compile'
  {
    g++ -std=c++14 -O1 -I"$gtest" -isystem "$gtest/include" -c "$gtest/src/gtest-all.cc" -o "$out/gtest-all.o" &&
      g++ -std=c++14 -O1 -I"$gtest" -isystem "$gtest/include" -c "$gtest/src/gtest_main.cc" -o "$out/gtest_main.o" &&
      g++ -std=c++14 $flags -c tests/cudasim/rig.cpp -o "$out/rig.o" &&
      g++ -std=c++14 $flags -c tests/support/malloc_count.cpp -o "$out/malloc_count.o"
  } || stop 'the tests do not compile'
  {
    gcc -std=c11 $flags -c bench/cuda/device.c -o "$out/device.o" &&
      gcc -std=c11 $flags -c bench/support/bench.c -o "$out/bench.o" &&
      g++ "$out/device.o" "$out/bench.o" "$out/kernels.o" $libs -o "$out/device_bench"
  } || stop 'the benchmark does not build'
  started_jobs=0 all="$programs $whole"
  [ -z "$nccl_libs" ] || all="$all $with_nccl"
  for program in $all; do
    build_one "$program" &
    started_jobs=$((started_jobs + 1))
    if [ $((started_jobs % $(nproc))) = 0 ]; then wait; fi
  done
  wait
  for program in $all; do
    name=$(basename "$program")
    [ -x "$out/${name}_test" ] || { cat "$out/$name.build" >&2; stop "$program does not build"; }
  done
}

if [ "${RUN_ONLY:-0}" != 1 ]; then build; fi
if [ "${BUILD_ONLY:-0}" = 1 ]; then echo "built in $out; nothing was run"; exit 0; fi

# ---- run ----
command -v nvidia-smi >/dev/null 2>&1 || stop 'there is no nvidia-smi: no driver'
device=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1)
driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1)
[ -n "$device" ] || stop 'nvidia-smi sees no GPU'
python=${PYTHON:-python3}
end=$(($(date +%s) + ${SECONDS_LEFT:-470}))
passed=0 failed=0 skipped=0 rows='' table=''
say() { # RESULT NAME WHY
  echo "$1 $2${3:+: $3}"
  rows="$rows${rows:+, }{\"test\": \"$2\", \"result\": \"$1\"}"
  table="$table| $2 | $1${3:+: $3} |
"
}
skip() { # NAME WHY
  skipped=$((skipped + 1))
  say skipped "$1" "$2"
}
run() { # SECONDS NAME COMMAND...; at most as long as there is left
  seconds=$1 what=$2
  shift 2
  left=$((end - $(date +%s)))
  if [ $left -lt "$seconds" ]; then seconds=$left; fi
  if [ "$seconds" -lt 1 ]; then
    status=124
  else
    timeout -k 5 "$seconds" "$@" >"$out/$what.log" 2>&1
    status=$?
  fi
  # What a program of GoogleTest's left out is no success.
  ran=$(sed -n 's/^\[  PASSED  \] \([0-9]*\) test.*/\1/p' "$out/$what.log" 2>/dev/null | tail -n 1)
  left_out=$(sed -n 's/^\[  SKIPPED \] \([0-9]*\) test.*/\1/p' "$out/$what.log" 2>/dev/null | tail -n 1)
  case $status in
  0)
    if [ "$ran" = 0 ]; then
      skip "$what" "none of its tests ran${left_out:+, $left_out were skipped}"
    else
      passed=$((passed + 1))
      say ok "$what" "${ran:+$ran tests${left_out:+, $left_out skipped}}"
    fi
    ;;
  124 | 137) failed=$((failed + 1)); say failed "$what" 'out of time' ;;
  *) failed=$((failed + 1)); say failed "$what" "status $status" ;;
  esac
}
for program in $programs; do
  name=$(basename "$program")
  run 120 "$name" "$out/${name}_test" '--gtest_filter=*/cuda'
done
for program in $with_nccl; do
  if [ -x "$out/$(basename "$program")_test" ]; then whole="$whole $program"; else skip "$(basename "$program")" 'no NCCL'; fi
done
for program in $whole; do
  name=$(basename "$program")
  run 120 "$name" "$out/${name}_test"
done
if command -v compute-sanitizer >/dev/null 2>&1; then
  run 120 memcheck compute-sanitizer --error-exitcode 9 "$out/host_ops_test" '--gtest_filter=*/cuda'
  run 120 racecheck compute-sanitizer --tool racecheck --error-exitcode 9 "$out/host_verdict_test" '--gtest_filter=*/cuda'
else
  skip compute-sanitizer 'command not found'
fi

# ---- the trainer: 8 sample blocks a step, dealt out to 1, 2, 4 and 8 thread ranks that share a GPU ----
cat README.md docs/*.md mfsdp/*.h mfsdp/*/*.h >"$out/text"
shape='--layers 12 --dim 768 --heads 12 --context 512 --batch 4 --steps 30 --optimizer muon'
value() { sed -n 's/.*"'"$2"'":"\{0,1\}\([^",}]*\).*/\1/p' "$out/$1.log" | tail -n 1 | tr -d '['; }
training='' hashes=''
trained() { # LOG LABEL BLOCKS: a line of the table; the bits of eight sample blocks are compared
  [ "$status" = 0 ] || return 0
  training="$training| $2 | $(value "$1" tokens_per_s) | $(value "$1" opt_step_ms) | $(value "$1" resident_bytes) | $(value "$1" slot_bytes) |
"
  [ "$3" != 8 ] || hashes="$hashes$(value "$1" params_hash)
"
}
for n in 1 2 4 8; do
  # shellcheck disable=SC2086 # a list of words
  run 60 "train_gpt_$n" "$out/train_gpt_cuda" --data "$out/text" --device cuda $shape --ranks $n --micro-batches $((8 / n)) --prefetch 1
  trained "train_gpt_$n" "$n ranks on one GPU" 8
done
# The alternatives at four ranks: the stock gather, plain data parallel, and ours with the step in backward.
for way in '--strategy gather' '--strategy replicated' '--step-in-backward'; do
  name="train_gpt_4_$(printf '%s' "$way" | sed 's/.* //; s/^--//; s/-/_/g')"
  # shellcheck disable=SC2086 # lists of words
  run 45 "$name" "$out/train_gpt_cuda" --data "$out/text" --device cuda $shape --ranks 4 --micro-batches 2 --prefetch 1 $way
  trained "$name" "4 ranks on one GPU, \`$way\`" 8
done
# A process for each GPU, over NCCL; the same blocks, and so the same bits, where they can be dealt out alike.
gpus=$(nvidia-smi --query-gpu=name --format=csv,noheader | wc -l)
case $gpus in 2 | 4 | 8) micro=$((8 / gpus)) ;; *) micro=1 ;; esac
over_nccl() { # NAME STRATEGY
  # shellcheck disable=SC2016 # for the shell that is started
  run 90 "$1" sh -c 'r=0 pids=""
    while [ $r -lt "$1" ]; do
      RANK=$r LOCAL_RANK=$r WORLD_SIZE=$1 LOCAL_WORLD_SIZE=$1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29511 MFSDP_JOB=gpu_check.$$ "$2" --data "$3" --device cuda \
        --transport nccl $4 --prefetch 1 &
      pids="$pids $!" r=$((r + 1))
    done
    status=0
    for pid in $pids; do wait "$pid" || status=1; done
    exit $status' train_gpt_nccl "$gpus" "$out/train_gpt_cuda" "$out/text" "$shape --micro-batches $micro --strategy $2"
  trained "$1" "$gpus GPUs, NCCL, $2" $((gpus * micro))
}
if [ "$gpus" -gt 1 ] && [ -n "$(find "$out" -name transport_nccl_test)" ]; then
  for strategy in matrix gather replicated; do over_nccl "train_gpt_nccl_$strategy" $strategy; done
else
  skip train_gpt_nccl 'one GPU, or no NCCL'
fi
if [ "$(printf '%s' "$hashes" | sort -u | grep -c .)" -gt 1 ]; then
  failed=$((failed + 1))
  say failed train_gpt_hashes 'differ between numbers of ranks, strategies, or threads and NCCL'
fi

# ---- figures: ours, PyTorch's, and both side by side ----
rm -f "$out/device.json" "$out/peers.json" "$out/joined.json" "$out/join.log"
run 200 benchmark "$out/device_bench" --json "$out/device.json"
ours=$status
if ! command -v "$python" >/dev/null 2>&1; then
  skip torch "there is no $python"
else
  run 200 peers "$python" -B bench/peers/torch_gpu.py --json "$out/peers.json"
  # What it left out, it said.
  sed -n 's/^skip //p' "$out/peers.log" 2>/dev/null >"$out/peers.skipped"
  while IFS= read -r line; do skip "${line%%:*}" "${line#*: }"; done <"$out/peers.skipped"
fi
figures=null
if [ "$ours" = 0 ] && [ -s "$out/device.json" ]; then
  figures=$(cat "$out/device.json")
  if "$python" -B bench/peers/join.py "$out/device.json" "$out/peers.json" "$out/joined.json" >"$out/join.log" 2>&1; then
    figures=$(cat "$out/joined.json")
  fi
fi
version=$("$nvcc" --version | sed -n 4p)
compiler=$(g++ --version | head -n 1)
date=$(date -u +%Y-%m-%d)
printf '{"device": "%s", "driver": "%s", "nvcc": "%s", "cxx": "%s", "date": "%s", "benchmarks": %s, "tests": [%s]}\n' \
  "$device" "$driver" "$version" "$compiler" "$date" "$figures" "$rows" >"$out/gpu_check.json"
{
  printf '# CUDA backend on hardware\n\n%s, driver %s, %s, %s, %s. Command: scripts/gpu_check.sh.\n\n' \
    "$device" "$driver" "$version" "$compiler" "$date"
  printf '| test | result |\n|---|---|\n%s' "$table"
  [ -z "$training" ] || printf '\n| train_gpt %s | tokens/s | optimizer ms a step | resident bytes a rank | slot bytes a rank |\n|---|---|---|---|---|\n%s' \
    "$shape" "$training"
  for log in join benchmark peers; do
    # shellcheck disable=SC2016 # a fence
    if [ -s "$out/$log.log" ]; then printf '\n%s:\n\n```\n' "$log" && cat "$out/$log.log" && printf '```\n'; fi
  done
} >"$out/gpu_check.md"
echo "$passed passed, $failed failed, $skipped skipped; report: $out/gpu_check.md"
[ $failed = 0 ]
