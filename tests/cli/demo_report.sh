#!/bin/sh
# SPDX-License-Identifier: MIT
# demo_report from the command line: the table, the picture, and one line on standard error with exit
# status 2 for each thing that can be wrong with its input.
set -u
cd "$(dirname "$0")/../.." || exit 1
report=build/examples/demo_report
folder=$(mktemp -d) || exit 1
trap 'rm -rf "$folder"' EXIT

check() { # NAME COMMAND...
  name=$1
  shift
  if "$@"; then echo "ok $name"; else echo "not ok $name"; fi
}

# result FILE VAL_LOSS OPTIMIZER_MS
result() {
  echo 'some other output' >"$1"
  echo "{\"steps\":4,\"ranks\":2,\"train_loss\":1.5,\"val_loss\":$2,\"params_hash\":\"ab\",\"tokens_per_s\":10," \
    "\"opt_step_ms\":$3,\"bytes\":{\"materialize\":3000000,\"reduce\":7,\"optimizer_matrix\":0,\"scalar\":1}," \
    "\"resident_bytes\":[1048576,3145728],\"slot_bytes\":1,\"skipped_steps\":0,\"ns_calls\":9,\"strategy\":\"matrix\"}" >>"$1"
}

result "$folder/muon.json" 1.25 0.5
result "$folder/adamw.json" 2.25 0.25
printf 'step,loss,elapsed_s,val_loss\n1,5,1,\n2,2,2,2\n3,1.5,3,\n4,1,4,1.25\n' >"$folder/muon.csv"
printf 'step,loss,elapsed_s,val_loss\n1,5,1,\n2,4,2,3\n3,3,3,\n4,2,4,2.25\n' >"$folder/adamw.csv"
runs="$folder/muon.json $folder/muon.csv $folder/adamw.json $folder/adamw.csv"

# shellcheck disable=SC2086 # runs is a list of names
"$report" --svg "$folder/loss.svg" $runs >"$folder/table" 2>"$folder/error"
check "exit status 0" [ $? = 0 ]
check "nothing on standard error" [ ! -s "$folder/error" ]
check "steps to AdamW's training loss" grep -Eq "training loss +2 +4\$" "$folder/table"
check "steps to AdamW's validation loss" grep -Eq "steps to AdamW's validation loss +2 +4\$" "$folder/table"
check "matrix bytes of the optimizer" grep -Eq "matrix bytes moved for the optimizer +0 B +0 B\$" "$folder/table"
check "bytes to gather parameters" grep -Eq "to gather parameters +3.0 MB +3.0 MB\$" "$folder/table"
check "memory per rank" grep -Eq "per rank, MiB +1.0 - 3.0 +1.0 - 3.0\$" "$folder/table"
check "the picture has both runs" grep -q "Muon, validation" "$folder/loss.svg"
check "the picture has both runs, AdamW" grep -q "AdamW, training" "$folder/loss.svg"

# fails NAME WORDS ARGUMENT...: exit status 2, nothing drawn, one line that contains WORDS
fails() {
  name=$1 words=$2
  shift 2
  "$report" "$@" >"$folder/out" 2>"$folder/error"
  status=$?
  check "$name: exit status 2" [ $status = 2 ]
  check "$name: one line" [ "$(wc -l <"$folder/error")" = 1 ]
  check "$name: says what" grep -qF -- "$words" "$folder/error"
}

fails "no arguments" "give two runs: demo_report"
fails "three files" "give two runs: demo_report" a b c
fails "a missing file" "cannot open $folder/none" "$folder/none" "$folder/muon.csv" "$folder/adamw.json" "$folder/adamw.csv"
fails "files in the wrong order" "is not a JSON object" "$folder/muon.csv" "$folder/muon.json" "$folder/adamw.json" "$folder/adamw.csv"
sed 's/"ns_calls":9/"x":9/' "$folder/muon.json" >"$folder/short.json"
fails "a missing key" '"ns_calls" is missing' "$folder/short.json" "$folder/muon.csv" "$folder/adamw.json" "$folder/adamw.csv"
printf 'step,loss,elapsed_s,val_loss\n1,x,1,\n' >"$folder/bad.csv"
fails "a damaged curve" "$folder/bad.csv, line 2" "$folder/muon.json" "$folder/muon.csv" "$folder/adamw.json" "$folder/bad.csv"
# shellcheck disable=SC2086
fails "a folder that is not there" "cannot write $folder/no/x.svg" --svg "$folder/no/x.svg" $runs

if [ -w /dev/full ]; then
  # shellcheck disable=SC2086
  "$report" $runs >/dev/full 2>"$folder/error"
  check "standard output full: exit status 1" [ $? = 1 ]
  check "standard output full: one line" [ "$(grep -c 'cannot write' "$folder/error")" = 1 ]
  # shellcheck disable=SC2086
  fails "a full disk for the picture" "/dev/full is incomplete" --svg /dev/full $runs
fi

"$report" --help >"$folder/out" 2>&1
check "--help: exit status 0" [ $? = 0 ]
check "--help: usage" grep -q "usage: demo_report" "$folder/out"
