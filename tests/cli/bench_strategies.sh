#!/bin/sh
# SPDX-License-Identifier: MIT
# The strategies benchmark: rows are appended once, a stopped run goes on, and all strategies end with the
# same bits. Skipped, and counted, where it has not been built (make build/bench/strategies).
# Prints one line per check: "ok NAME" or "not ok NAME".
set -u
cd "$(dirname "$0")/../.." || exit 1
program=build/bench/strategies
suite=bench_strategies
. tests/cli/lib.sh
if [ ! -x $program ]; then
  echo 'skip bench_strategies: it is not built (make build/bench/strategies)'
  exit 0
fi
rows=$work/rows.jsonl
call() { $program --quick --world 3 --seconds 0 --append "$rows" "$@" >"$work/out" 2>"$work/err"; }
missing() { call --missing "$@"; echo $?; } # 0: something is missing, 3: nothing is
optimizer_rows() { grep -c "\"metric\":\"optimizer step\".*\"strategy\":\"$1\"" "$rows"; }

check 'an empty file lacks rows' "$(missing --strategy matrix)" 0
call --strategy matrix
check 'rows of matrix: status' $? 0
check 'rows of matrix: one optimizer step' "$(optimizer_rows matrix)" 1
check 'nothing is missing then' "$(missing --strategy matrix)" 3
check 'another world is' "$(call --world 2 --strategy matrix --missing; echo $?)" 0
check 'another run is' "$(missing --strategy matrix --run 2)" 0
check 'another strategy is' "$(missing --strategy matrix,zero1)" 0

# A run that was stopped in the middle of a line: that row is measured again, the rest is kept.
printf '{"bench":"strategies","case":"gpt-64, threads, 3 ranks, zero1, run 1","metric":"optim' >>"$rows"
check 'a line without its end does not count' "$(missing --strategy zero1)" 0
call
check 'the rest: status' $? 0
for strategy in matrix gather alltoall zero1 replicated hybrid; do
  check "$strategy: measured once" "$(optimizer_rows $strategy)" 1
  check "$strategy: the bits of matrix" \
    "$(sed -n "/\"optimizer step\".*\"strategy\":\"$strategy\"/s/.*\"wrong\":\([0-9a-z]*\).*/\1/p" "$rows")" 0
  check "$strategy: holds what was predicted" \
    "$(sed -n "/\"metric\":\"held\".*\"strategy\":\"$strategy\"/s/.*\"error\":\([-0-9.e]*\).*/\1/p" "$rows")" 0
done

# What stays is gathered before steps are: with one repeat too, no step has a materialize.
for strategy in zero1 replicated; do
  check "$strategy: its steps gather nothing" \
    "$(sed -n "/\"materialize bytes\".*\"strategy\":\"$strategy\"/s/.*\"value\":\([0-9]*\).*/\1/p" "$rows")" 0
done

# Rows without their last line, or with less than what is asked, are no answer.
grep -v '"finished"' "$rows" >"$work/cut.jsonl"
check 'rows without their end are missing' "$(missing --strategy matrix --append "$work/cut.jsonl")" 0
call --append "$work/less.jsonl" --strategy matrix --alone --no-whole
check 'less: status' $? 0
check 'less: no whole step' "$(grep -c 'whole step\|overlapped\|exposed' "$work/less.jsonl")" 0
check 'less is enough where less is asked' "$(missing --strategy matrix --alone --no-whole --append "$work/less.jsonl")" 3
check 'whole steps are missing then' "$(missing --strategy matrix --alone --append "$work/less.jsonl")" 0
check 'worker queues are missing then' "$(missing --strategy matrix --no-whole --append "$work/less.jsonl")" 0

# Other collectives are rows of their own; their sums have the bits of `matrix` by the same ones.
ring() { call --strategy matrix,zero1,alltoall --collective ring "$@"; }
check 'RING: rows of its own' "$(ring --missing; echo $?)" 0
ring
check 'RING: status' $? 0
for strategy in matrix zero1; do
  check "$strategy by RING: measured once" "$(optimizer_rows $strategy-ring)" 1
  check "$strategy by RING: the bits of matrix by RING" \
    "$(sed -n "/\"optimizer step\".*\"strategy\":\"$strategy-ring\"/s/.*\"wrong\":\([0-9a-z]*\).*/\1/p" "$rows")" 0
done
check 'alltoall by RING: sums in another order are not compared' \
  "$(sed -n '/"optimizer step".*"strategy":"alltoall-ring"/s/.*"wrong":\([0-9a-z]*\).*/\1/p' "$rows")" null
check 'matrix by RING: its peer is matrix' \
  "$(grep -c '"metric":"reduce".*"peer":"matrix".*"strategy":"matrix-ring"' "$rows")" 1

lines=$(wc -l <"$rows")
call
check 'again: nothing is added' "$(wc -l <"$rows")" "$lines"
if command -v python3 >/dev/null 2>&1; then
  grep '^{.*}$' "$rows" | python3 -c 'import json, sys; [json.loads(line) for line in sys.stdin]' 2>"$work/err"
  check 'each whole line is JSON' $? 0
fi

refuses() { # NAME ARGUMENT...
  name=$1
  shift
  call "$@"
  check "refuses $name" $? 2
}
refuses 'an unknown strategy' --strategy zero3
refuses 'an unknown model' --model gpt-3
refuses 'an unknown algorithm' --collective tree
refuses 'no ranks' --world 0
refuses 'a comma in the links' --links a,b
refuses 'a half world' --world 2.5

# ---- plots ----
call --world 2 --strategy matrix,zero1 # a second world, for curves
GNUPLOT=$work/none scripts/plot.sh "$rows" "$work/plots" >"$work/out" 2>&1
check 'without gnuplot: SKIP' "$?$(grep -c '^SKIP plots' "$work/out")" 01
scripts/plot.sh "$work/none" >"$work/out" 2>&1
check 'rows that are not there: status' $? 2
if command -v "${GNUPLOT:-gnuplot}" >/dev/null 2>&1; then
  scripts/plot.sh "$rows" "$work/plots" >"$work/out" 2>"$work/err"
  check 'plots: status' $? 0
  for plot in optimizer-bars whole-bars optimizer-scaling whole-scaling; do
    links=${plot#*-}
    [ "$links" = bars ] && links='' || links=-threads
    check "$plot: drawn" "$(grep -c '</svg>' "$work/plots/strategies-$plot-gpt-64$links.svg")" 1
  done
else
  echo 'skip bench_strategies: plots (no gnuplot)'
fi
