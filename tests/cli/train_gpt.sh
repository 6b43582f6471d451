#!/bin/sh
# SPDX-License-Identifier: MIT
# train_gpt from the command line: one hash for every split of the samples, clear errors, a clean stop.
# Prints one line per check: "ok NAME" or "not ok NAME".
set -u
cd "$(dirname "$0")/../.." || exit 1
program=build/examples/train_gpt
suite=train_gpt
. tests/cli/lib.sh

write_text "$work/text"
small="--data $work/text --layers 2 --dim 32 --heads 2 --context 32 --batch 2 --steps 4"

# ---- every split of eight sample blocks gives the same bits ----
split_test() { # NAME OPTIONS...
  name=$1
  shift
  first=
  for split in '1 8' '2 4' '4 2' '8 1'; do
    set -- "$@"
    ranks=${split% *} micro=${split#* }
    # shellcheck disable=SC2086
    if ! $program $small --ranks "$ranks" --micro-batches "$micro" "$@" >"$work/out" 2>"$work/err"; then
      bad "$name, ranks $ranks" "$(tail -n 1 "$work/err")"
      continue
    fi
    hash=$(field "$work/out" params_hash) train=$(field "$work/out" train_loss) val=$(field "$work/out" val_loss)
    [ -n "$first" ] || first="$hash $train $val"
    check "$name, ranks $ranks: hash and losses" "$hash $train $val" "$first"
    check "$name, ranks $ranks: optimizer bytes" "$(sed -n 's/.*"optimizer_matrix":\([0-9]*\).*/\1/p' "$work/out")" 0
  done
}
split_test 'muon clipped' --optimizer muon --clip 0.5
split_test 'muon tied, no clip' --optimizer muon --clip 0 --tied
split_test 'adamw clipped' --optimizer adamw --clip 0.5
split_test 'round robin' --planner round-robin --clip 0.5
split_test 'role greedy' --planner role-greedy --clip 0.5
split_test 'dion, other coefficients' --preset dion --coefficients deepseek_v4 --clip 0.5
split_test 'bf16' --dtype bf16 --clip 0.5
if $program --help | grep -q 'muon, adamw, shampoo, soap'; then
  split_test 'shampoo' --optimizer shampoo --precondition-every 2 --clip 0.5
  split_test 'soap, f16' --optimizer soap --precondition-every 2 --dtype f16
else
  echo 'skip train_gpt: shampoo, soap (no LAPACKE in this build)'
fi
split_test 'f16 tied, prefetch' --dtype f16 --tied --prefetch 2

# ---- the step size that --help names is the one that is used where none is given ----
default_lr() { # LR OPTIONS...
  lr=$1
  shift
  # shellcheck disable=SC2086
  $program $small --ranks 1 "$@" >"$work/out" 2>"$work/err"
  hash=$(field "$work/out" params_hash)
  # shellcheck disable=SC2086
  $program $small --ranks 1 "$@" --lr "$lr" >"$work/out" 2>"$work/err"
  check "the step size of $* is $lr" "${hash:-none}" "$(field "$work/out" params_hash)"
}
default_lr 0.02 --preset jordan
for preset in torch moonlight dion; do default_lr 0.001 --preset $preset; done
if $program --help | grep -q 'muon, adamw, shampoo, soap'; then
  for optimizer in shampoo soap; do default_lr 0.003 --optimizer $optimizer; done
fi

# ---- other collectives: the same bytes, and results that do not depend on prefetch ----
# shellcheck disable=SC2086
$program $small --ranks 4 >"$work/direct" 2>/dev/null
for collective in ring hierarchical native auto; do
  # shellcheck disable=SC2086
  $program $small --ranks 4 --collective $collective >"$work/out" 2>"$work/err"
  for class in materialize reduce optimizer_matrix; do
    check "$collective: $class bytes as direct" "$(field "$work/out" $class)" "$(field "$work/direct" $class)"
  done
  hash=$(field "$work/out" params_hash)
  # shellcheck disable=SC2086
  $program $small --ranks 4 --collective $collective --prefetch 2 >"$work/out" 2>"$work/err"
  check "$collective: the same hash with prefetch" "$(field "$work/out" params_hash)" "${hash:-none}"
done
# shellcheck disable=SC2086
$program $small --ranks 2 --collective ring --dtype bf16 >"$work/out" 2>"$work/err"
check 'sums on a narrow wire are refused' "$(grep -c 'needs\{0,1\} wire f32\|need wire f32' "$work/err")" 1

# Prefetch and keeping parameters move time and memory, not results: the hashes are those without.
same_test() { # NAME OPTIONS...: the same hash with each of these, for every split
  name=$1
  shift
  # shellcheck disable=SC2086
  $program $small --micro-batches 8 --ranks 1 "$@" >"$work/out" 2>/dev/null
  first=$(field "$work/out" params_hash)
  [ -n "$first" ] || bad "$name" 'no hash'
  for extra in '--prefetch 1' '--prefetch 2' '--prefetch 16' '--reshard-after-forward 0' \
               '--prefetch 1 --reshard-after-forward 0'; do
    for split in '1 8' '2 4' '4 2' '8 1'; do
      # shellcheck disable=SC2086
      $program $small --ranks "${split% *}" --micro-batches "${split#* }" $extra "$@" >"$work/out" 2>"$work/err"
      check "$name $extra, ranks ${split% *}: same hash" "$(field "$work/out" params_hash)" "$first"
    done
  done
}
same_test 'plain'
same_test 'tied bf16' --tied --dtype bf16

# The planner moves owners, not results.
for planner in round-robin role-greedy scope-greedy cost-aware balanced; do
  # shellcheck disable=SC2086
  $program $small --ranks 3 --planner $planner >"$work/out" 2>/dev/null
  hash=$(field "$work/out" params_hash)
  [ "$planner" = round-robin ] && first=$hash
  check "planner $planner: same hash" "$hash" "$first"
done
# Nor does the strategy: where parameters live, and who updates matrices. Whole matrices on owners need
# no byte for the step, the others do; one rank needs none with any.
strategy_test() { # NAME OPTIONS...
  name=$1
  shift
  first=
  for strategy in matrix gather alltoall zero1 replicated hybrid; do
    # shellcheck disable=SC2086
    if ! $program $small --clip 0 --strategy $strategy "$@" >"$work/out" 2>"$work/err"; then
      bad "$name, strategy $strategy" "$(tail -n 1 "$work/err")"
      continue
    fi
    hash=$(field "$work/out" params_hash) bytes=$(field "$work/out" optimizer_matrix)
    [ -n "$first" ] || first=$hash
    check "$name, strategy $strategy: same hash" "$hash" "$first"
    check "$name, strategy $strategy: in the result" "$(field "$work/out" strategy)" $strategy
    case $strategy in
    matrix | replicated) check "$name, strategy $strategy: optimizer bytes" "$bytes" 0 ;;
    gather | alltoall | zero1)
      if [ "$bytes" -gt 0 ]; then ok "$name, strategy $strategy: optimizer bytes"
      else bad "$name, strategy $strategy: optimizer bytes" 'none'; fi ;;
    esac
  done
}
strategy_test 'plain' --ranks 4
strategy_test 'tied bf16, prefetch' --ranks 3 --tied --dtype bf16 --prefetch 2
strategy_test 'in backward' --ranks 4 --step-in-backward --prefetch 1
# shellcheck disable=SC2086
$program $small --ranks 4 --strategy gather >"$work/out" 2>"$work/err"
check 'the audit shows bands' "$(grep -c 'banded' "$work/err")" 8
# Newton-Schulz runs once per matrix and step: 2 layers x 6 matrices x 4 steps.
# shellcheck disable=SC2086
$program $small --ranks 4 --micro-batches 2 >"$work/out" 2>"$work/err"
check 'ns_calls' "$(field "$work/out" ns_calls)" 48
check 'audit names the optimizer of each tensor' "$(grep -c -e ' muon$' -e ' adamw$' "$work/err")" 29
check 'one line on standard output' "$(wc -l <"$work/out" | tr -d ' ')" 1

# ---- files ----
# shellcheck disable=SC2086
$program $small --ranks 2 --loss-csv "$work/loss.csv" --loss-svg "$work/loss.svg" >/dev/null 2>&1
check 'loss csv: header and a row per step' "$(wc -l <"$work/loss.csv" | tr -d ' ')" 5
check 'loss svg is drawn' "$(grep -c '<svg' "$work/loss.svg")" 1

# The strict reading of a trace is tests/examples/gpt_trace_test.cpp; here: every kind, and complete.
trace_test() { # NAME FILE
  check "$1: begins and ends as JSON" "$(head -c 1 "$2")$(tail -n 1 "$2" | tail -c 2)" '{}'
  for label in 'process_name' 'thread_name' 'gather unit 3' 'wait unit 3' 'reduce unit 3' 'forward unit 3' \
               'backward unit 3' 'optimizer'; do
    grep -q -e "\"name\":\"$label\"" "$2" || bad "$1: has $label"
  done
  if command -v python3 >/dev/null 2>&1; then
    python3 -m json.tool "$2" >/dev/null 2>&1
    check "$1: a JSON parser takes it" $? 0
  fi
}
# shellcheck disable=SC2086
$program $small --ranks 2 --prefetch 1 --trace "$work/trace.json" >/dev/null 2>&1
trace_test 'trace' "$work/trace.json"
check 'trace: each of 4 steps has its optimizer on each rank' "$(grep -c '"optimizer"' "$work/trace.json")" 8

# ---- errors: exit status 2 and one line that says what to do ----
refuse() { # NAME TEXT OPTIONS...
  name=$1 text=$2
  shift 2
  $program "$@" >"$work/out" 2>"$work/err"
  status=$?
  lines=$(wc -l <"$work/err" | tr -d ' ')
  if [ $status -eq 2 ] && [ "$lines" = 1 ] && grep -q -e "$text" "$work/err" && [ ! -s "$work/out" ]; then
    ok "refuses $name"
  else
    bad "refuses $name" "status $status, $lines lines: $(head -n 1 "$work/err")"
  fi
}
: >"$work/empty"
echo short >"$work/short"
refuse 'no data' '--data is missing'
refuse 'a missing file' 'name a file that can be read' --data "$work/missing"
refuse 'an empty file' 'is empty; give a text file' --data "$work/empty"
refuse 'a folder' 'name a file that can be read' --data "$work"
refuse 'a short file' 'shorter than one batch' --data "$work/short"
refuse 'an unknown option' 'see --help' --data "$work/text" --bogus
refuse 'an unknown optimizer' 'choose one of: muon, adamw' --data "$work/text" --optimizer sgd
refuse 'dim not divisible by heads' 'not a multiple of heads' --data "$work/text" --dim 33 --heads 2
refuse 'a trace that cannot be written' 'cannot write' --data "$work/text" --steps 1 --trace "$work/none/trace"
refuse 'a csv that cannot be written' 'cannot write' --data "$work/text" --steps 1 --loss-csv "$work/none/csv"
refuse 'a chart that cannot be written' 'cannot write' --data "$work/text" --steps 1 --loss-svg "$work/none/svg"
if [ -w /dev/full ]; then
  # A file that takes nothing is found before training; standard output, when there is a result.
  for output in loss-csv loss-svg trace; do
    refuse "a full disk for --$output" '/dev/full' --data "$work/text" "--$output" /dev/full
  done
  # shellcheck disable=SC2086
  $program $small >/dev/full 2>"$work/err"
  check 'standard output full: status' $? 1
  check 'standard output full: message' "$(grep -c '^train_gpt: cannot write the result line$' "$work/err")" 1
  $program --help >/dev/full 2>"$work/err"
  check '--help, standard output full: status' $? 1
fi
# An output that is the input, or another output, by another name.
ln -s text "$work/link"
ln "$work/text" "$work/hard"
before=$(cksum <"$work/text")
for other in "$work/../$(basename "$work")/text" "$work/./text" "$work/link" "$work/hard"; do
  refuse "to overwrite the data as ${other##*/}" 'is --data and an output file' --data "$work/text" --loss-csv "$other"
done
check 'the data is as it was' "$(cksum <"$work/text")" "$before"
refuse 'two names of one new output' 'choose two names' --data "$work/text" --loss-csv "$work/new" --trace "$work/./new"
refuse 'no ranks' 'whole number from 1' --data "$work/text" --ranks 0
refuse 'an unknown strategy' 'choose one of: matrix, gather, alltoall, zero1, replicated, hybrid' --data "$work/text" --strategy zero3
refuse 'bands for Shampoo' '\(cuts matrices into bands\|not in this build\)' --data "$work/text" --strategy gather --optimizer shampoo
refuse 'a GPU' '--device cuda: not in this build' --data "$work/text" --device cuda
refuse 'ranks over NCCL' '--transport nccl: not in this build' --data "$work/text" --transport nccl
$program --help >"$work/out" 2>"$work/err"
check '--help exits 0' "$?" 0
check '--help lists --micro-batches' "$(grep -c -e '--micro-batches' "$work/out")" 1

# ---- closed standard streams: no message ends up in a file that takes their number ----
# shellcheck disable=SC2086
$program $small --loss-csv "$work/closed.csv" >/dev/null 2>&-
check 'standard error closed: the csv has its rows alone' "$(grep -c -v '^[0-9]' "$work/closed.csv")" 1
# shellcheck disable=SC2086
$program $small --loss-csv "$work/closed.csv" >&- 2>"$work/err"
check 'standard output closed: status' $? 1
check 'standard output closed: message' "$(grep -c 'cannot write the result line' "$work/err")" 1

# ---- a rank that fails at once, maybe before main looks at it again: always an error ----
i=0
while [ $i -lt 8 ]; do cat "$work/text"; i=$((i + 1)); done >"$work/long"
failed=$(
  ulimit -v 4000000 2>/dev/null || exit 0
  i=0
  while [ $i -lt 40 ]; do
    OPENBLAS_NUM_THREADS=1 $program --data "$work/long" --ranks 1 --steps 1 --layers 1 --dim 16 --heads 1 \
      --context 65536 --batch 1 >/dev/null 2>&1 || echo failed
    i=$((i + 1))
  done | wc -l | tr -d ' '
)
[ -z "$failed" ] || check '16 GiB of activations in 4 GB: each of 40 runs fails' "$failed" 40

# ---- a limit of the file size: a message and a status, not death by a signal ----
{
  (
    ulimit -f 1 || exit 9 # and some parents ignore the signal: then it would prove nothing
    # shellcheck disable=SC2086
    exec env --default-signal=XFSZ $program $small --ranks 2 --loss-svg "$work/large.svg" 2>&1 >/dev/null
  )
  echo $? >"$work/status"
} | cat >"$work/err" # a pipe: the limit would hold for a file
check 'a file over the limit: status' "$(cat "$work/status")" 1
check 'a file over the limit: the last line names it' "$(tail -n 1 "$work/err" | grep -c 'large.svg')" 1

# ---- Ctrl-C: all ranks end after the same step, with a result ----
# shellcheck disable=SC2086
$program $small --ranks 4 --steps 1000000 --prefetch 1 --trace "$work/stopped.json" >"$work/out" 2>"$work/err" &
pid=$!
tries=0
while [ $tries -lt 300 ] && ! grep -q 'step' "$work/err"; do sleep 0.1; tries=$((tries + 1)); done
sleep 1
kill -INT $pid
tries=0
while [ $tries -lt 600 ] && kill -0 $pid 2>/dev/null; do sleep 0.1; tries=$((tries + 1)); done
kill -KILL $pid 2>/dev/null && bad 'stops on a signal' 'had to be killed'
wait $pid
check 'stops on a signal with status 0' "$?" 0
stopped=$(field "$work/out" steps)
if [ "${stopped:-0}" -gt 0 ] && [ "$stopped" -lt 1000000 ]; then
  ok 'a result after the signal'
else
  bad 'a result after the signal' "steps '$stopped'"
fi
trace_test 'trace after the signal' "$work/stopped.json"
