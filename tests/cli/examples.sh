#!/bin/sh
# SPDX-License-Identifier: MIT
# The small examples: each primitive without the runtime.
set -u
cd "$(dirname "$0")/../.." || exit 1
expect() { # PROGRAM TEXT
  if output=$(build/examples/"$1" 2>&1) && printf '%s\n' "$output" | grep -q -e "$2"; then
    echo "ok example $1"
  else
    echo "not ok example $1 (needs '$2', printed: $(printf '%s' "$output" | head -n 1))"
  fi
}
expect plan_only '^down  \[64,256\]  unit 1  matrix whole -> 1 matrix  group 0  owner 1'
expect newton_schulz 'near the identity'
expect collective 'sum over 3 ranks of element 7 is 21'
expect optimizer '^loss after 200 steps: [0-5]\.[0-9]$' # from some 200
