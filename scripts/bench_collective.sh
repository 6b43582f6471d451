#!/bin/sh
# SPDX-License-Identifier: MIT
# All of the collective benchmark: on threads, on MPI processes in shared memory, and, as root, on eight
# shaped hosts (scripts/test_hosts.sh). What cannot run here says SKIP.
#
#   scripts/bench_collective.sh [--quick] [--json FILE]
set -u
cd "$(dirname "$0")/.." || exit 1
program=build/bench/collective
quick='' json='' rates='1000 100'
while [ $# -gt 0 ]; do
  case $1 in
  --quick) quick=--quick rates=1000 ;;
  --json) json=${2?--json needs a file}; shift ;;
  *) sed -n '3,6p' "$0" >&2; exit 2 ;;
  esac
  shift
done
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
parts=0 failed=0

# PREFIX... -- ARGUMENT...: one run of the program, its rows kept if it ends well
part() {
  prefix=''
  while [ "$1" != -- ]; do prefix="$prefix $1"; shift; done
  shift
  echo
  echo "== ${prefix:+${prefix# } }$program $* $quick"
  parts=$((parts + 1))
  # shellcheck disable=SC2086 # lists of words
  $prefix $program "$@" $quick --json "$work/$parts" </dev/null 2>"$work/err"
  status=$?
  [ $status = 0 ] && return 0
  rm -f "$work/$parts"
  cat "$work/err" >&2
  return $status
}

part -- || failed=1
if ! command -v mpirun >/dev/null 2>&1 || ! grep -q '^MPI  *on' build/release/config.log; then
  echo 'SKIP MPI: this build has none'
else
  launcher='mpirun -n 8'
  open_mpi=0
  if mpirun --version 2>&1 | grep -qi 'open.mpi'; then
    open_mpi=1
    launcher='mpirun -n 8 --oversubscribe --mca btl self,vader'
    [ "$(id -u)" != 0 ] || export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  fi
  # shellcheck disable=SC2086
  part $launcher -- --transport mpi || failed=1
  # Allgatherv can only be forced for a whole run.
  for algorithm in bruck ring neighbor; do
    if [ $open_mpi = 0 ] || [ -n "$quick" ]; then continue; fi
    # shellcheck disable=SC2086
    part $launcher --mca coll_tuned_use_dynamic_rules 1 --mca coll_tuned_allgatherv_algorithm $algorithm \
      -- --transport mpi --op gather || failed=1
  done
  for rate in $rates; do
    for op in gather reduce; do
      for gamma in 1 8; do
        # A void row is tried again: the machine was busy.
        for try in 1 2 3; do
          part scripts/test_hosts.sh -r "$rate" -- --transport mpi --rate "$rate" --op $op --gamma "$gamma" \
            --seconds 0
          status=$?
          [ $status = 3 ] || break
        done
        case $status in
        0) ;;
        3) echo "VOID: no rows at $rate Mbit/s for $op, gamma $gamma, in $try tries" ;;
        77) echo 'SKIP hosts: see above'; break 3 ;;
        *) failed=1 ;;
        esac
      done
    done
  done
fi

if [ -n "$json" ]; then # one list of all parts
  {
    echo '['
    i=1 comma=''
    while [ $i -le $parts ]; do
      if [ -s "$work/$i" ]; then
        printf '%s' "$comma"
        sed '1d;$d' "$work/$i"
        comma=,
      fi
      i=$((i + 1))
    done
    echo ']'
  } >"$json" || failed=1
fi
exit $failed
