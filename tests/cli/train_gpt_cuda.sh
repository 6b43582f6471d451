#!/bin/sh
# SPDX-License-Identifier: MIT
# train_gpt on GPUs from the command line: the launch files parse and name options that there are; with
# nvcc the program is built, and without a GPU it says so, or with one, one hash for every split.
set -u
cd "$(dirname "$0")/../.." || exit 1
suite=train_gpt_cuda
. tests/cli/lib.sh

# ---- the launch files ----
for file in examples/launch/*; do
  name=${file##*/}
  if head -n 1 "$file" | grep -q '^#!/bin/sh$' && sh -n "$file" 2>"$work/err"; then ok "$name: sh parses it"
  else bad "$name: sh parses it" "$(head -n 1 "$work/err")"; fi
  if bash -n "$file" 2>"$work/err"; then ok "$name: bash parses it"
  else bad "$name: bash parses it" "$(head -n 1 "$work/err")"; fi
  if ! command -v shellcheck >/dev/null 2>&1; then echo "skip $suite: $name under shellcheck: command not found"
  elif shellcheck "$file" >"$work/out"; then ok "$name under shellcheck"
  else bad "$name under shellcheck" "$(grep -m 1 SC "$work/out")"; fi
  # What stands behind the program, comments too, are options of its table.
  unknown=$(sed -n -e 's/.*train_gpt_cuda//p' -e 's/^# .*examples\/launch//p' "$file" | grep -oE -e '--[a-z-]+' | sort -u |
    while read -r option; do grep -q "\"${option#--}\"" examples/gpt/options.h || echo "$option"; done)
  check "$name: options that there are" "$unknown" ''
done
check 'one file for each launcher' "$(find examples/launch -type f | wc -l | tr -d ' ')" 3

# ---- the program ----
nvcc=${NVCC:-nvcc}
command -v "$nvcc" >/dev/null 2>&1 || nvcc=/usr/local/cuda/bin/nvcc
if ! command -v "$nvcc" >/dev/null 2>&1; then
  echo "skip $suite: the program: there is no nvcc"
  exit 0
fi
if ! make CUDA_ARCH=-arch=sm_90 build/examples/train_gpt_cuda >"$work/out" 2>&1; then
  bad 'make build/examples/train_gpt_cuda' "$(grep -m 1 -E 'rror|undefined' "$work/out" || tail -n 1 "$work/out")"
  exit 0
fi
ok 'make build/examples/train_gpt_cuda'
write_text "$work/text"
train() { # OPTIONS...
  build/examples/train_gpt_cuda --data "$work/text" --layers 2 --dim 32 --heads 2 --context 32 --batch 2 --steps 4 "$@" >"$work/out" 2>"$work/err"
  status=$?
}
build/examples/train_gpt_cuda --help >"$work/out"
check '--help offers cuda' "$(grep -c 'cpu, cuda;' "$work/out")" 1
train --device cuda --transport mpi
check '--device cuda with --transport mpi' "$status $(grep -c 'carries host memory' "$work/err")" '2 1'
if build/examples/train_gpt_cuda --help | grep -q 'mpi, nccl;\|threads, nccl;'; then nccl=1; else nccl=0; fi
train --transport nccl
case $nccl in
1) check '--transport nccl without a GPU' "$status $(grep -c 'use --device cuda' "$work/err")" '2 1' ;;
*) check '--transport nccl where there is no NCCL' "$status $(grep -c 'not in this build' "$work/err")" '2 1' ;;
esac
if [ $nccl = 1 ]; then
  train --device cuda --transport nccl --ranks 3
  check '--ranks that nobody started' "$status $(grep -c 'leave --ranks out' "$work/err")" '2 1'
  export RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + $$ % 20000))
  train --device cuda --transport nccl --deadline 1
  check 'a peer that never comes' "$status $(grep -c 'for 1 of 2 ranks' "$work/err")" '1 1'
  train --device cuda
  check 'processes that would each train alone' "$status $(grep -c 'use --transport nccl' "$work/err")" '2 1'
  unset RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT
fi
train --ranks 2
host=$(field "$work/out" params_hash)
build/examples/train_gpt --data "$work/text" --layers 2 --dim 32 --heads 2 --context 32 --batch 2 --steps 4 --ranks 2 >"$work/out" 2>"$work/err"
check '--device cpu is what train_gpt does' "${host:-none}" "$(field "$work/out" params_hash)"
if ! nvidia-smi -L 2>/dev/null | grep -q GPU; then
  train --device cuda
  check 'without a GPU it says so' "$status $(grep -c 'nvidia-smi shows' "$work/err")" '1 1'
  echo "skip $suite: training: there is no GPU"
  exit 0
fi
first=
for split in '1 4' '2 2' '4 1'; do
  train --device cuda --ranks "${split% *}" --micro-batches "${split#* }"
  result="$status $(field "$work/out" params_hash) $(field "$work/out" train_loss)"
  [ -n "$first" ] || first=$result
  check "on a GPU, ${split% *} ranks" "$result" "$first"
done
if [ $nccl = 1 ]; then
  train --device cuda --transport nccl --micro-batches 4
  check 'on a GPU, one rank over NCCL' "$status $(field "$work/out" params_hash) $(field "$work/out" train_loss)" "$first"
fi
