#!/bin/sh
# SPDX-License-Identifier: MIT
# The small examples: each primitive without the runtime.
set -u
cd "$(dirname "$0")/../.." || exit 1
suite=example
. tests/cli/lib.sh
folder=$work
expect() { # PROGRAM TEXT [ARGUMENT]
  if output=$(build/examples/"$1" ${3:+"$3"} 2>&1) && printf '%s\n' "$output" | grep -q -e "$2"; then
    echo "ok example $1"
  else
    echo "not ok example $1 (needs '$2', printed: $(printf '%s' "$output" | head -n 1))"
  fi
}
expect plan_only '^down  \[64,256\]  unit 1  matrix whole -> 1 matrix  group 0  owner 1'
expect newton_schulz 'near the identity'
expect newton_schulz_queue '^squared norms of the rows: 0\.[89][0-9] to 1\.[01][0-9] '
expect collective 'sum over 3 ranks of element 7 is 21'
expect optimizer '^loss after 200 steps: [0-5]\.[0-9]$' # from some 200
expect loop '^loss of step 300: 0\.000[0-9]$' # from 21.7
expect loop_by_hand '^loss of step 300 on rank 0: 0\.000[0-9]$'
# Two groups, of two and of three processes.
if [ ! -x build/examples/collective_mpi ] || ! find_launcher; then
  echo "skip example collective_mpi ($(no_mpi))"
else
  run 5 build/examples/collective_mpi
  printed=$(LC_ALL=C sort "$work/out")
  if [ "$printed" = 'group 0: 3 ranks, 3000 elements, 0 wrong
group 1: 2 ranks, 1000 elements, 0 wrong' ]; then
    echo 'ok example collective_mpi'
  else
    echo "not ok example collective_mpi (printed: $(cat "$work/out" "$work/err" | head -n 3 | tr '\n' ' '))"
  fi
fi
expect reshard '^rank 2 of 3 read 2024448 bytes$' "$folder/run" # of 6054912: what it owns, once
if ${CXX:-g++} -std=c++11 -fno-math-errno -ffp-contract=off -Wall -Wextra -Werror -I. examples/raii.cpp -o "$folder/raii" -lpthread -lm &&
  "$folder/raii" | grep -q '^world 5: the fullest rank has 1.25 of the mean cost$'; then
  echo 'ok example raii'
else
  echo 'not ok example raii'
fi
# On the double of CUDA, whose library the unit tests are linked with.
cuda=$(sed -n 's/^release_CUDA_CFLAGS := //p' build/release/config.mk 2>/dev/null)
if [ ! -e build/release/libsupport.a ]; then
  echo 'skip example cuda/newton_schulz (no build/release/libsupport.a: make test-unit)'
elif ${CC:-gcc} -std=c11 -D_POSIX_C_SOURCE=200809L -fno-math-errno -ffp-contract=off -Wall -Wextra -Werror -I. -Itests/cudasim/include \
  $cuda -c examples/cuda/newton_schulz.c -o "$folder/cuda.o" && ${CXX:-g++} "$folder/cuda.o" build/release/libsupport.a -o "$folder/cuda" -lpthread -lm &&
  "$folder/cuda" | grep -q '^squared norms of the rows: 0\.6[0-9] to 0\.8[0-9] '; then
  echo 'ok example cuda/newton_schulz'
else
  echo 'not ok example cuda/newton_schulz'
fi
for example in cuda/newton_schulz plan_only newton_schulz newton_schulz_queue optimizer collective collective_mpi loop loop_by_hand reshard raii; do
  lines=$(cat examples/$example.c* | wc -l)
  if [ "$lines" -lt 150 ]; then echo "ok example $example: under 150 lines"; else
    echo "not ok example $example: $lines lines, needs less than 150"
  fi
done
if command -v python3 >/dev/null 2>&1; then
  read=$(python3 examples/read_tensor.py "$folder/run/step-0" down.weight)
  if [ "$read" = 'F32 [128, 96] 1e+06 1e+06 1e+06 1e+06' ]; then echo 'ok example read_tensor'; else
    echo "not ok example read_tensor (printed: $read)"
  fi
else
  echo 'skip example read_tensor (no python3)'
fi
