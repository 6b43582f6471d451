#!/bin/sh
# SPDX-License-Identifier: MIT
# The MPI transport on eight hosts, which are network namespaces of this machine (scripts/test_hosts.sh),
# and that script's own promises. Skipped, and counted, where such hosts cannot be made.
# Prints one line per check: "ok NAME", "not ok NAME" or "skip NAME reason".
set -u
cd "$(dirname "$0")/../.." || exit 1
check_program=build/release/tests/mpi/mpi_check
suite=hosts
. tests/cli/lib.sh

bad() { echo "not ok hosts: $1 ($2)"; head -n 20 "$work/err"; }

if [ ! -x $check_program ]; then
  echo 'skip hosts: this build has no MPI'
  exit 0
fi

on_hosts() { # ARGUMENT...: of test_hosts.sh; bounded in time; output in $work/out, status in $status
  timeout -k 5 25 scripts/test_hosts.sh "$@" >"$work/out" 2>"$work/err" </dev/null
  status=$?
}

on_hosts -n 8 -t 20 -- $check_program whole
if [ $status = 77 ]; then
  echo "skip hosts: $(sed 's/^skip //' "$work/out")"
  exit 0
fi
last=$(tail -n 1 "$work/out")
if [ "$last" = 'ok whole on 8 ranks' ]; then ok 'whole on 8 ranks'; else bad 'whole on 8 ranks' "$status $last"; fi

# Shaped to 1 Gbit/s. A machine that is too busy for that makes the run void, which is no fault.
on_hosts -n 8 -r 1000 -t 20 -- $check_program whole-worker
last=$(tail -n 1 "$work/out")
case $status$last in
"0ok whole-worker on 8 ranks") ok 'whole-worker on 8 ranks at 1 Gbit/s' ;;
'3void a link is slower'*) echo "skip hosts: whole-worker at 1 Gbit/s: $last" ;;
*) bad 'whole-worker on 8 ranks at 1 Gbit/s' "$status $last" ;;
esac

# Links that were not shaped as asked do not pass for shaped ones.
MFSDP_TEST_UNSHAPED=1 on_hosts -n 2 -r 10 -t 20 -- $check_program whole
last=$(tail -n 1 "$work/out")
case $status$last in
'3void a link is faster'*) ok 'links that are not shaped make a run void' ;;
*) bad 'links that are not shaped make a run void' "$status $last" ;;
esac

# The command's own status comes through.
on_hosts -n 2 -t 20 -- sh -c 'exit 7'
if [ $status = 7 ]; then ok "the command's status"; else bad "the command's status" $status; fi

# Interrupted in the middle: no host and no process of it is left.
scripts/test_hosts.sh -n 2 -- sh -c 'echo up; exec sleep 60' >"$work/out" 2>"$work/err" </dev/null &
script=$!
tries=0
while [ "$(grep -c up "$work/out")" -lt 2 ] && [ $tries -lt 150 ]; do
  sleep 0.1
  tries=$((tries + 1))
done
made=$(ip netns list | grep -c "^mf${script}h")
kill -TERM $script
wait $script
status=$?
left=$(ip netns list | grep -c "^mf${script}h")
if [ "$made $status $left" = '3 143 0' ]; then
  ok 'interrupted: nothing is left'
else
  bad 'interrupted: nothing is left' "made $made, status $status, left $left"
fi
