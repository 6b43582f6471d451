#!/bin/sh
# SPDX-License-Identifier: MIT
# clang-tidy (.clang-tidy) and cppcheck over all headers that compile here, and the small examples.
#
#   scripts/tidy.sh          prints what they find; status 1 if that is something
set -u
cd "$(dirname "$0")/.." || exit 1
for tool in clang-tidy cppcheck; do
  command -v $tool >/dev/null 2>&1 || { echo "tidy: there is no $tool (apt-get install $tool)" >&2; exit 2; }
done
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
flags='-std=c11 -D_POSIX_C_SOURCE=200809L -I. -Iexamples'

# One file with everything: parts of headers come with their whole. What needs a vendor's header comes
# where that is found.
mpi=$(mpicc --showme:compile 2>/dev/null || true)
vendor() { # VENDOR HEADER
  # shellcheck disable=SC2086
  if echo "#include <$1>" | cc $flags $mpi -E - >/dev/null 2>&1; then echo "#include \"$2\""; fi
}
{
  echo '#include "matrixfsdp.h"'
  for header in mfsdp/posix/*.h mfsdp/host/*.h; do
    case $header in */math_*.h) ;; *) echo "#include \"$header\"" ;; esac
  done
  vendor cblas.h mfsdp/host/math_cblas.h
  vendor lapacke.h mfsdp/host/math_lapacke.h
  vendor mpi.h mfsdp/mpi/transport_mpi.h
  echo 'int main(void) { return 0; }'
} >"$tmp/all.c"

failed=0
for file in "$tmp/all.c" examples/*.c; do
  case $file in examples/train_gpt.c | examples/*report.c) continue ;; esac
  case $file in *_mpi.c) [ -n "$mpi" ] || continue ;; esac
  # shellcheck disable=SC2086
  clang-tidy --quiet --config-file=.clang-tidy "$file" -- $flags $mpi >"$tmp/log" 2>&1 || { failed=1; grep -v 'warnings generated' "$tmp/log"; }
done
# cppcheck reads no system headers: what they would define is given.
cppcheck --quiet --std=c11 --enable=warning,portability --inline-suppr --error-exitcode=1 -I. -D_POSIX_C_SOURCE=200809L \
  -D__GNUC__=12 -D_POSIX_VERSION=200809L -DMPI_VERSION=3 -DCLOCK_MONOTONIC=1 --suppress=missingIncludeSystem "$tmp/all.c" || failed=1
[ $failed = 0 ] && echo 'tidy: nothing found'
exit $failed
