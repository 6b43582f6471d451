#!/bin/sh
# SPDX-License-Identifier: MIT
# `make demo` after the build: trains the same GPT on the same text twice, with Muon and with AdamW,
# then prints a table and draws both loss curves. Everything it writes lies in build/demo/.
# DATA=file takes another text. Ctrl-C ends the training after its current step, and the demo.
set -u
cd "$(dirname "$0")/.." || exit 1

# Equal for both runs. Any of these can be set in the environment.
RANKS=${RANKS:-4}
STEPS=${STEPS:-480}
LAYERS=${LAYERS:-4} DIM=${DIM:-192} HEADS=${HEADS:-6} CONTEXT=${CONTEXT:-128} BATCH=${BATCH:-4}
MICRO_BATCHES=${MICRO_BATCHES:-1}
CLIP=${CLIP:-1.0}
SEED=${SEED:-1}
# The learning rates: the best of three for each optimizer (docs/performance.md).
MUON_LR=${MUON_LR:-0.04} MUON_ADAMW_LR=${MUON_ADAMW_LR:-0.003}
ADAMW_LR=${ADAMW_LR:-0.003}

out=build/demo
program=build/examples/train_gpt
report=build/examples/demo_report

fail() { echo "demo: $*" >&2; exit 1; }
interrupted=0
trap 'interrupted=1' INT TERM

for file in "$program" "$report"; do
  [ -x "$file" ] || fail "$file is not built: run \`make demo\`, or \`make examples\` first"
done
mkdir -p "$out" || exit 1
rm -f "$out"/muon.* "$out"/adamw.* "$out"/loss.svg "$out"/table.txt

if [ -n "${DATA-}" ]; then
  text=$DATA
  [ -r "$text" ] || fail "DATA=$text cannot be read"
else
  text=$out/kjv.txt
  [ -s "$text" ] || scripts/get_text.sh "$text" || exit 1
fi

# train NAME OPTION...: NAME.json is the result line, NAME.out and NAME.log all that was printed.
train() {
  name=$1
  shift
  echo "demo: $name, $RANKS ranks, $STEPS steps on $text"
  # tee -i: the trainer still reports after a Ctrl-C.
  { "$program" --data "$text" --ranks "$RANKS" --micro-batches "$MICRO_BATCHES" --steps "$STEPS" \
    --layers "$LAYERS" --dim "$DIM" --heads "$HEADS" --context "$CONTEXT" --batch "$BATCH" \
    --clip "$CLIP" --seed "$SEED" --loss-csv "$out/$name.csv" "$@" 2>&1 >"$out/$name.out"
    echo $? >"$out/$name.status"; } | tee -i "$out/$name.log" >&2
  [ $interrupted = 0 ] || { echo "demo: interrupted; what there is lies in $out/" >&2; exit 130; }
  status=$(cat "$out/$name.status")
  [ "$status" = 0 ] || fail "$program ended with status $status (see $out/$name.log)"
  grep '^{' "$out/$name.out" | tail -n 1 >"$out/$name.json"
  [ -s "$out/$name.json" ] || fail "$program printed no result line (see $out/$name.out)"
}

train muon --optimizer muon --lr "$MUON_LR" --adamw-lr "$MUON_ADAMW_LR"
train adamw --optimizer adamw --adamw-lr "$ADAMW_LR"

"$report" --svg "$out/loss.svg" "$out/muon.json" "$out/muon.csv" "$out/adamw.json" "$out/adamw.csv" \
  >"$out/table.txt" || fail "$report failed"
cat "$out/table.txt"
echo "demo: both curves are in $out/loss.svg"
