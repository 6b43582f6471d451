#!/bin/sh
# SPDX-License-Identifier: MIT
# Our safetensors files and those of the Python package, each read by the other, and whole checkpoints of
# train_gpt. PYTHON (python3) needs the package `safetensors`, nothing else (numpy, if it is there, reads
# too). Prints one line per check.
set -u
cd "$(dirname "$0")/../.." || exit 1
python=${PYTHON:-python3}
if ! why=$("$python" -c 'import safetensors' 2>&1); then
  echo "skip safetensors python: $(echo "$why" | tail -n 1)"
  echo "skip checkpoint python: $(echo "$why" | tail -n 1)"
  exit 0
fi
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
if ! ${CC:-gcc} -std=c11 -O1 -I. tests/cli/safetensors_copy.c -o "$work/copy"; then
  echo 'not ok safetensors python: safetensors_copy.c does not compile'
  exit 0
fi
"$python" tests/cli/safetensors_python.py "$work/copy" "$work" || echo "not ok safetensors python: status $?"
# ---- whole checkpoints ----
i=0
while [ $i -lt 400 ]; do echo "$i the quick brown fox jumps over the lazy dog"; i=$((i + 1)); done >"$work/text"
"$python" tests/cli/checkpoint_python.py "${TRAIN_GPT:-build/examples/train_gpt}" "$work/text" "$work" ||
  echo "not ok checkpoint python: status $?"
