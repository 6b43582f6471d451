#!/bin/sh
# SPDX-License-Identifier: MIT
# bench/peers/: the figures of other libraries on a GPU, and how they are put beside ours. Needs python3
# alone. Prints one line per check.
set -u
cd "$(dirname "$0")/../.." || exit 1
suite='gpu peers'
. tests/cli/lib.sh
python=${PYTHON:-python3}
if ! why=$("$python" --version 2>&1); then
  echo "skip $suite: $(echo "$why" | tail -n 1)"
  exit 0
fi
"$python" -B tests/cli/gpu_peers.py "$work" || bad "gpu_peers.py" "status $?"
