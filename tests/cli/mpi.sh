#!/bin/sh
# SPDX-License-Identifier: MIT
# The MPI transport under mpirun: its own checks, train_gpt with the hash that threads give, and every
# failure ends in an error on every survivor that names the culprit. Skipped, and counted, without MPI.
# Prints one line per check: "ok NAME", "not ok NAME" or "skip NAME reason".
set -u
cd "$(dirname "$0")/../.." || exit 1
check_program=build/release/tests/mpi/mpi_check
program=build/examples/train_gpt
suite=mpi
. tests/cli/lib.sh

if [ ! -x $check_program ] || ! find_launcher; then
  echo "skip mpi $(no_mpi)"
  exit 0
fi

# ---- the transport's own checks ----
for ranks in 1 2 3 4 7 8; do
  for scenario in whole whole-worker; do
    run $ranks $check_program $scenario
    check "$scenario on $ranks ranks" "$(cat "$work/out")" "ok $scenario on $ranks ranks"
    [ "$(cat "$work/out")" = "ok $scenario on $ranks ranks" ] || head -n 20 "$work/err"
  done
done

# ---- train_gpt: the same bits as threads, for every split of eight sample blocks ----
write_text "$work/text"
small="--data $work/text --layers 2 --dim 32 --heads 2 --context 32 --batch 2 --steps 4 --clip 0.5"
same_as_threads() { # NAME OPTIONS...
  name=$1
  shift
  # shellcheck disable=SC2086
  $program $small --ranks 1 --micro-batches 8 "$@" >"$work/out" 2>/dev/null
  want=$(field "$work/out" params_hash)
  [ -n "$want" ] || bad "$name" 'no hash from threads'
  for split in '1 8' '2 4' '4 2' '8 1'; do
    # shellcheck disable=SC2086
    run "${split% *}" $program --transport mpi $small --micro-batches "${split#* }" "$@"
    check "$name, ${split% *} processes: the hash of threads" "$(field "$work/out" params_hash)" "$want"
    check "$name, ${split% *} processes: optimizer bytes" \
      "$(sed -n 's/.*"optimizer_matrix":\([0-9]*\).*/\1/p' "$work/out")" 0
  done
}
same_as_threads 'train_gpt'
same_as_threads 'train_gpt, prefetch' --prefetch 2
same_as_threads 'train_gpt, bf16' --dtype bf16
for collective in ring hierarchical auto; do # sums in another order, the same one on both transports
  # shellcheck disable=SC2086
  $program $small --ranks 4 --collective $collective >"$work/out" 2>/dev/null
  want=$(field "$work/out" params_hash)
  # shellcheck disable=SC2086
  run 4 $program --transport mpi $small --collective $collective
  # Hierarchical: MPI knows one node here, as threads do.
  check "train_gpt, $collective, 4 processes: the hash of threads" "$(field "$work/out" params_hash)" "${want:-none}"
done
# MPI adds in an order of its own: other bits than threads, which add in rank order, the same traffic.
# shellcheck disable=SC2086
run 4 $program --transport mpi $small --collective native
for class in materialize reduce; do
  check "train_gpt, native, 4 processes: $class bytes of threads" "$(field "$work/out" $class)" \
    "$($program $small --ranks 4 --collective native 2>/dev/null | sed -n 's/.*"'$class'":\([0-9]*\).*/\1/p')"
done
# shellcheck disable=SC2086
run 4 $program --transport mpi $small --collective native --dtype bf16
check 'train_gpt, native, bf16: refused, with what allows it' "$(grep -c 'narrow_sums to allow it' "$work/err")" 4
# shellcheck disable=SC2086
run 4 $program --transport mpi $small --collective native --dtype bf16 --narrow-sums
check 'train_gpt, native, bf16 with rounded sums' "$(field "$work/out" steps)" 4
run 2 $program --transport mpi --ranks 4 --data "$work/text"
check 'another --ranks than processes' "$(grep -c 'leave --ranks out' "$work/err")" 2
run 2 $program --data "$work/text"
check 'mpirun without --transport mpi' "$(grep -c 'each would train alone; use --transport mpi' "$work/err")" 2
SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=2 $program --transport mpi --data "$work/text" 2>"$work/err" >/dev/null
check 'a launcher that this MPI does not know' "$(grep -c 'SLURM say rank 1 of 2, MPI says rank 0 of 1' "$work/err")" 1
run 2 $program --transport mpi --data "$work/none"
check 'a missing file: every process says so' "$(grep -c 'cannot open' "$work/err")" 2

# ---- failures: what each survivor says, and how soon ----
if [ $open_mpi = 0 ]; then
  echo 'skip mpi failures: the flags that let survivors live are known for Open MPI only'
  exit 0
fi
launcher="$launcher --enable-recovery"
fails_as() { # HOW STATUSES PATTERN SURVIVORS
  fails "$@" $check_program "$1"
}
silent='rank 1 .*does not answer'
for how in kill stop silent; do
  fails_as fail-$how MFSDP_E_TIMEOUT "ring: rank [0-9] waited .*$silent" '0 2 3'
  fails_as fail-$how-control MFSDP_E_TIMEOUT "control allgather: .*$silent" '0 2 3'
done
fails_as fail-kill-large MFSDP_E_TIMEOUT "$silent" '0 2 3'
fails_as fail-kill-worker MFSDP_E_TIMEOUT "$silent" '0 2 3'
fails_as fail-silent-behind-worker MFSDP_E_TIMEOUT "ring: rank [0-9] waited .*$silent" '0 2 3'
fails_as fail-kill-native MFSDP_E_TIMEOUT "ring: rank [0-9] waited .* in a native collective; $silent" '0 2 3'
fails_as fail-leave-native MFSDP_E_PEER 'for rank 1 to take part, but rank 1 has left' '0 2 3'
fails_as fail-check-native MFSDP_E_MISMATCH 'not the same operation' '0 1 2 3'
fails_as fail-leave MFSDP_E_PEER 'rank 1 has left' '0 2 3'
fails_as fail-leave-control MFSDP_E_PEER 'rank 1, which has left' '0 2 3'
fails_as fail-poison MFSDP_E_IO "the test's own reason" '0 1 2 3'
fails_as fail-length MFSDP_E_MISMATCH 'rank [01] sends a .*message' '0 1 2 3'
fails_as fail-check MFSDP_E_MISMATCH 'not the same operation' '0 1 2 3'

# Fault f2: what a killed job has left behind does not stop the same job from starting again.
run 4 $check_program whole
check 'the same job again, after one was killed' "$(cat "$work/out")" 'ok whole on 4 ranks'

# ---- a rank of a real training that fails in each phase ----
# The three ways of a phase run side by side: they mostly wait. The stopped one has queues with threads
# of their own. Each line gets the time it came at.
stamp() { while IFS= read -r line; do echo "$(date +%s%3N) $line"; done; }
reached() { grep -q "^[0-9]* fault: rank 1: $1 at $2\$" "$work/phase.$1"; } # HOW PHASE
phase_fails() { # HOW PHASE: what became of it in $work/phase.HOW
  [ "$1" = stop ] && workers='--prefetch 1' || workers=''
  # A deadline of one second is short for twelve processes that start on two busy cores: a job that ended
  # before its fault shows nothing about the fault, says why it ended, and is started again.
  for attempt in 1 2 3; do
    # shellcheck disable=SC2086
    MFSDP_TEST_FAULT="1 $1 $2" timeout -k 5 60 $launcher -n 4 $program --transport mpi $small $workers $strategy --deadline 1 \
      2>&1 >/dev/null </dev/null | stamp >"$work/phase.$1"
    if reached "$1" "$2"; then break; fi
    echo "# train_gpt, $1 at $2, attempt $attempt: it ended before the fault:"
    sed 's/^/#   /' "$work/phase.$1" | head -n 20
  done
}
phase_verdicts() { # HOW PHASE PATTERN: every survivor says who and what, in time
  at=$(sed -n "s/^\([0-9]*\) fault: rank 1: $1 at $2\$/\1/p" "$work/phase.$1")
  for rank in 0 2 3; do
    line=$(grep "train_gpt: rank $rank: MFSDP_E_" "$work/phase.$1" | head -n 1)
    if [ -z "$at" ]; then bad "train_gpt, $1 at $2: rank $rank" 'there was no fault'
    elif ! printf '%s' "$line" | grep -q "$3"; then bad "train_gpt, $1 at $2: rank $rank" "'$line'"
    elif [ $((${line%% *} - at)) -gt 5000 ]; then bad "train_gpt, $1 at $2: rank $rank" "after $((${line%% *} - at)) ms"
    else ok "train_gpt, $1 at $2: rank $rank"; fi
  done
}
phase_in_three_ways() { # PHASE OPERATION
  for how in kill stop leave; do phase_fails $how "$1" & done
  wait
  phase_verdicts kill "$1" "$2: .*rank 1 .*does not answer"
  phase_verdicts stop "$1" "$2: .*rank 1 .*does not answer"
  phase_verdicts leave "$1" "$2: .*rank 1,\{0,1\} .*has left"
}
strategy=''
for phase in 'gather unit 1' 'reduce unit 1' 'gather verdict'; do phase_in_three_ways "$phase" "$phase"; done
phase_in_three_ways 'validation losses' 'control allgather'
strategy='--strategy alltoall'
phase_in_three_ways 'matrices to bands' 'matrices to bands'
strategy='--strategy zero1'
phase_in_three_ways 'refresh unit 1' 'refresh unit 1'
