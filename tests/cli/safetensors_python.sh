#!/bin/sh
# SPDX-License-Identifier: MIT
# Our safetensors files and those of the Python package, each read by the other. PYTHON (python3) needs
# the package `safetensors`, nothing else. Prints one line per check.
set -u
cd "$(dirname "$0")/../.." || exit 1
python=${PYTHON:-python3}
if ! why=$("$python" -c 'import safetensors' 2>&1); then
  echo "skip safetensors python: $(echo "$why" | tail -n 1)"
  exit 0
fi
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
if ! ${CC:-gcc} -std=c11 -O1 -I. tests/cli/safetensors_copy.c -o "$work/copy"; then
  echo 'not ok safetensors python: safetensors_copy.c does not compile'
  exit 0
fi
"$python" tests/cli/safetensors_python.py "$work/copy" "$work" || echo "not ok safetensors python: status $?"
