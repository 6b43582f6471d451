#!/bin/sh
# SPDX-License-Identifier: MIT
# bench/peers/torch_fsdp2.py: what it does where torch is missing or breaks, and that FSDP2 ends with
# our parameters where PYTHON (python3) has torch and numpy. Prints one line per check.
set -u
cd "$(dirname "$0")/../.." || exit 1
suite='torch fsdp2'
. tests/cli/lib.sh
python=${PYTHON:-python3}
if ! why=$("$python" --version 2>&1); then
  echo "skip $suite: $(echo "$why" | tail -n 1)"
  exit 0
fi
# The C loops do: the tensors are tiny.
sources=bench/peers/reference.c
for file in gpt/params gpt/config gpt/error plan/table plan/describe plan/params plan/file \
  plan/error; do
  sources="$sources examples/$file.c"
done
math='-O1 -fno-math-errno -ffp-contract=off -DMFSDP_EXAMPLE_CBLAS=0'
# shellcheck disable=SC2086
if ! ${CC:-gcc} -std=c11 -D_POSIX_C_SOURCE=200809L $math -I. -Iexamples $sources -lpthread -lm \
  -o "$work/reference"; then
  bad 'reference.c compiles'
  exit 0
fi
"$python" -B tests/cli/torch_fsdp2.py "$work/reference" "$work" || bad 'torch_fsdp2.py' "status $?"
