#!/bin/sh
# SPDX-License-Identifier: MIT
# The small examples: each primitive without the runtime.
set -u
cd "$(dirname "$0")/../.." || exit 1
expect() { # PROGRAM TEXT [ARGUMENT]
  if output=$(build/examples/"$1" ${3:+"$3"} 2>&1) && printf '%s\n' "$output" | grep -q -e "$2"; then
    echo "ok example $1"
  else
    echo "not ok example $1 (needs '$2', printed: $(printf '%s' "$output" | head -n 1))"
  fi
}
expect plan_only '^down  \[64,256\]  unit 1  matrix whole -> 1 matrix  group 0  owner 1'
expect newton_schulz 'near the identity'
expect collective 'sum over 3 ranks of element 7 is 21'
expect optimizer '^loss after 200 steps: [0-5]\.[0-9]$' # from some 200
folder=$(mktemp -d) || exit 1
trap 'rm -rf "$folder"' EXIT
expect reshard '^rank 2 of 3 read 2024448 bytes$' "$folder/run" # of 6054912: what it owns, once
if [ "$(wc -l <examples/reshard.c)" -lt 150 ]; then echo 'ok example reshard: under 150 lines'; else
  echo 'not ok example reshard: under 150 lines'
fi
if command -v python3 >/dev/null 2>&1; then
  read=$(python3 examples/read_tensor.py "$folder/run/step-0" down.weight)
  if [ "$read" = 'F32 [128, 96] 1e+06 1e+06 1e+06 1e+06' ]; then echo 'ok example read_tensor'; else
    echo "not ok example read_tensor (printed: $read)"
  fi
else
  echo 'skip example read_tensor (no python3)'
fi
