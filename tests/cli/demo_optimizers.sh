#!/bin/sh
# SPDX-License-Identifier: MIT
# `make demo-optimizers` in its quick form: every optimizer of the build at three rates, the table, both
# pictures, runs that are kept, and wrong calls.
set -u
cd "$(dirname "$0")/../.." || exit 1
demo=scripts/demo_optimizers.sh
report=build/examples/optimizers_report
OUT=$(mktemp -d) || exit 1
export OUT
trap 'rm -rf "$OUT"' EXIT
unset DATA STEPS RANKS FRESH

check() { # NAME COMMAND...
  name=$1
  shift
  if "$@"; then echo "ok $name"; else echo "not ok $name"; fi
}
count() { grep -c -e "$1" "$2"; }

$demo --quick >"$OUT/out" 2>"$OUT/err"
check "exit status 0" [ $? = 0 ]
optimizers=$(grep '^\* ' "$OUT/table.txt" | grep -vc 'the best of each')
check "AdamW and Muon at least" [ "$optimizers" -ge 3 ]
check "those of the table or said to be missing" [ $((optimizers + $(count '^skip' "$OUT/err"))) = 5 ]
check "three rates each" [ "$(count ' 4  *[0-9.]*  *[0-9.]*$' "$OUT/table.txt")" = $((3 * optimizers)) ]
check "a progress line for each run" [ "$(count 'validation loss .* left$' "$OUT/err")" = $((3 * optimizers)) ]
for picture in by-step by-time; do
  check "$picture.svg: a curve each" [ "$(count ', lr 0' "$OUT/$picture.svg")" = "$optimizers" ]
done
check "against steps" grep -q 'optimizer step<' "$OUT/by-step.svg"
check "against time" grep -q 'time (seconds)<' "$OUT/by-time.svg"

# ---- what is finished is kept; another setting or FRESH=1 starts over ----
sed 1d "$OUT/table.txt" >"$OUT/before"
rm "$OUT/runs/AdamW-0.003.json"
$demo --quick >"$OUT/out" 2>"$OUT/err"
check "one run is done again" [ "$(count 'validation loss .* left$' "$OUT/err")" = 1 ]
check "the others are kept" grep -q "$((3 * optimizers - 1)) runs were finished before" "$OUT/err"
check "the same losses" [ "$(cut -c 1-70 "$OUT/before" | cksum)" = "$(sed 1d "$OUT/table.txt" | cut -c 1-70 | cksum)" ]
STEPS=2 $demo --quick >"$OUT/out" 2>"$OUT/err"
check "other settings: all again" [ "$(count 'validation loss .* left$' "$OUT/err")" = $((3 * optimizers)) ]
$demo --slow >"$OUT/out" 2>&1
check "a wrong word: exit status 2" [ $? = 2 ]
DATA=$OUT/none $demo --quick >"$OUT/out" 2>"$OUT/err"
check "no such text: exit status 1" [ $? = 1 ]
check "no such text: says so" grep -q "DATA=$OUT/none cannot be read" "$OUT/err"

# ---- the report ----
run=$OUT/runs/AdamW-0.001
fails() { # NAME WORDS ARGUMENT...
  what=$1 words=$2
  shift 2
  "$report" "$@" >"$OUT/out" 2>"$OUT/err"
  check "$what: exit status 2" [ $? = 2 ]
  check "$what: says what" grep -qF -- "$words" "$OUT/err"
  check "$what: one line" [ "$(wc -l <"$OUT/err")" = 1 ]
}
fails "no runs" "give four words a run"
fails "three words" "give four words a run" a 1 "$run.json"
fails "a missing file" "cannot open $OUT/none" a 1 "$OUT/none" "$run.csv"
fails "more optimizers than colours" "at most 5 runs" --by-step "$OUT/x.svg" \
  a 1 "$run.json" "$run.csv" b 1 "$run.json" "$run.csv" c 1 "$run.json" "$run.csv" \
  d 1 "$run.json" "$run.csv" e 1 "$run.json" "$run.csv" f 1 "$run.json" "$run.csv"

# Of three runs the second is best; one that diverged never is.
sed 's/"val_loss":[^,]*/"val_loss":null/' "$run.json" >"$OUT/nan.json"
sed 's/"val_loss":[^,]*/"val_loss":1.5/' "$run.json" >"$OUT/good.json"
sed 's/"val_loss":[^,]*/"val_loss":2.5/' "$run.json" >"$OUT/worse.json"
"$report" a 1 "$OUT/nan.json" "$run.csv" a 2 "$OUT/good.json" "$run.csv" a 3 "$OUT/worse.json" "$run.csv" \
  >"$OUT/out" 2>&1
check "the best is marked" [ "$(grep '^\* a' "$OUT/out" | awk '{ print $3 }')" = 2 ]
"$report" --help >"$OUT/out"
check "--help: usage" grep -q 'usage: optimizers_report' "$OUT/out"
