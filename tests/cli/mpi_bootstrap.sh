#!/bin/sh
# SPDX-License-Identifier: MIT
# cuda/bootstrap.h between the processes of an mpirun: NCCL's unique id, places, versions, plans and
# options over MPI, and a rank that does not come. NCCL is a stand-in that connects processes and moves
# nothing (tests/mpi/bootstrap_check.c). Skipped, and counted, without MPI.
# Prints one line per check: "ok NAME", "not ok NAME" or "skip NAME reason".
set -u
cd "$(dirname "$0")/../.." || exit 1
check_program=build/release/tests/mpi/bootstrap_check
suite=bootstrap
. tests/cli/lib.sh

if [ ! -x $check_program ] || ! find_launcher; then
  echo "skip bootstrap $(no_mpi)"
  exit 0
fi

mkdir "$work/meet"
for ranks in 1 2 4 7; do
  run $ranks $check_program whole "$work/meet"
  check "whole on $ranks ranks" "$(cat "$work/out")" "ok whole on $ranks ranks"
  [ "$(cat "$work/out")" = "ok whole on $ranks ranks" ] || head -n 20 "$work/err"
done
check 'communicators that are left' "$(ls "$work/meet")" ''

if [ $open_mpi = 0 ]; then
  echo 'skip bootstrap failures: the flags that let survivors live are known for Open MPI only'
  exit 0
fi
launcher="$launcher --enable-recovery"
fails_as() { # HOW STATUSES PATTERN
  fails "$@" '0 2 3' $check_program "$1" "$work/meet"
}
silent='control allgather: rank [0-9] waited .*rank 1 has not come and does not answer'
fails_as fail-absent MFSDP_E_TIMEOUT "$silent"
fails_as fail-kill MFSDP_E_TIMEOUT "$silent"
fails_as fail-leave MFSDP_E_PEER 'control allgather: rank [0-9] waits for rank 1, which has left'
# NCCL says only that it is not connected; the control plane says who is missing.
fails_as fail-kill-in-nccl MFSDP_E_TIMEOUT "$silent"
