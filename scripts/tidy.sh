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
. scripts/headers_lib.sh
find_vendors || exit 1

# One file with everything: parts of headers come with their whole. What needs a vendor's header comes
# where that is found.
all_flags="-std=c11 $POSIX -I. -Iexamples"
include_all "$tmp/all.c" matrixfsdp.h mfsdp/posix/*.h mfsdp/host/*.h mfsdp/mpi/*.h mfsdp/cuda/*.h
echo 'int main(void) { return 0; }' >>"$tmp/all.c"

failed=0
for file in "$tmp/all.c" examples/*.c; do
  case $file in examples/train_gpt.c | examples/*report.c) continue ;; esac
  case $file in *_mpi.c) [ -n "$MPI_INC" ] || continue ;; esac
  # shellcheck disable=SC2086
  clang-tidy --quiet --config-file=.clang-tidy "$file" -- $all_flags >"$tmp/log" 2>&1 || { failed=1; grep -v 'warnings generated' "$tmp/log"; }
done
# cppcheck reads no system headers: what they would define is given.
cppcheck --quiet --std=c11 --enable=warning,portability --inline-suppr --error-exitcode=1 -I. -D_POSIX_C_SOURCE=200809L \
  -D__GNUC__=12 -D_POSIX_VERSION=200809L -DMPI_VERSION=3 -DNCCL_VERSION_CODE=22000 -DCLOCK_MONOTONIC=1 --suppress=missingIncludeSystem "$tmp/all.c" || failed=1
[ $failed = 0 ] && echo 'tidy: nothing found'
exit $failed
