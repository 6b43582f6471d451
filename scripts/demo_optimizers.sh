#!/bin/sh
# SPDX-License-Identifier: MIT
# `make demo-optimizers` after the build: trains the demo's GPT on the demo's text with each optimizer of
# the table below at three learning rates, prints all runs, and draws the best run of each against steps
# and against time. Everything it writes lies in build/demo-optimizers/ (OUT=folder takes another).
#
#   scripts/demo_optimizers.sh            all of it
#   scripts/demo_optimizers.sh --quick    a tiny model on this repository's own words, in seconds
#
# STEPS=150 takes more steps, DATA=file another text. Ctrl-C ends it; the same call goes on with the runs
# that are not finished. FRESH=1 starts over.
set -u
cd "$(dirname "$0")/.." || exit 1

# NAME | OPTIONS | OPTION OF THE RATE | RATES. Every run has these besides those of `settings`; what is not
# a hidden matrix uses AdamW, at its best of three from the table in docs/performance.md.
optimizers() {
  cat <<'END'
AdamW|--optimizer adamw|--adamw-lr|0.001 0.003 0.01
Muon (jordan)|--optimizer muon --adamw-lr 0.003|--lr|0.02 0.04 0.08
Muon (polar express)|--optimizer muon --coefficients polar-express --adamw-lr 0.003|--lr|0.02 0.04 0.08
Shampoo|--optimizer shampoo --adamw-lr 0.003|--lr|0.001 0.003 0.01
SOAP|--optimizer soap --adamw-lr 0.003|--lr|0.0005 0.001 0.003
END
}

quick=0
case ${1-} in
'') ;;
--quick) quick=1 ;;
*) sed -n '4,12p' "$0" >&2; exit 2 ;;
esac

out=${OUT:-build/demo-optimizers}
program=build/examples/train_gpt
report=build/examples/optimizers_report
if [ $quick = 1 ]; then
  RANKS=${RANKS:-2} STEPS=${STEPS:-4} LAYERS=${LAYERS:-1} DIM=${DIM:-16} HEADS=${HEADS:-2}
  CONTEXT=${CONTEXT:-16} BATCH=${BATCH:-2}
else
  RANKS=${RANKS:-4} STEPS=${STEPS:-60} LAYERS=${LAYERS:-4} DIM=${DIM:-192} HEADS=${HEADS:-6}
  CONTEXT=${CONTEXT:-128} BATCH=${BATCH:-4}
fi
CLIP=${CLIP:-1.0} SEED=${SEED:-1}

fail() { echo "demo-optimizers: $*" >&2; exit 1; }
interrupted=0
trap 'interrupted=1' INT TERM

for file in "$program" "$report"; do
  [ -x "$file" ] || fail "$file is not built: run \`make demo-optimizers\`, or \`make examples\` first"
done
mkdir -p "$out" || exit 1

text=${DATA:-$out/kjv.txt}
if [ -n "${DATA-}" ]; then
  [ -r "$text" ] || fail "DATA=$text cannot be read"
elif [ $quick = 1 ]; then
  text=README.md
elif [ ! -s "$text" ]; then
  scripts/get_text.sh "$text" || exit 1
fi

settings="--data $text --ranks $RANKS --steps $STEPS --layers $LAYERS --dim $DIM --heads $HEADS \
--context $CONTEXT --batch $BATCH --clip $CLIP --seed $SEED"

# Runs of the same program, text, settings and table are kept.
same="$settings $(cksum <"$program") $(cksum <"$text") $(optimizers | cksum)"
if [ "${FRESH-}" = 1 ] || [ "$(cat "$out/settings" 2>/dev/null)" != "$same" ]; then
  rm -rf "$out/runs"
  rm -f "$out/table.txt" "$out/by-step.svg" "$out/by-time.svg"
fi
mkdir -p "$out/runs" && echo "$same" >"$out/settings" || exit 1

built=$("$program" --help | sed -n 's/^  --optimizer [^(]*(\(.*\);.*/\1,/p')
in_build() { # --optimizer NAME ...: one that this build has
  case " $built" in *" $2,"*) return 0 ;; esac
  return 1
}

# What there is to do: a line NAME|OPTIONS|OPTION|RATE for each run.
list=$out/runs/list
: >"$list"
optimizers | while IFS='|' read -r name options option rates; do
  # shellcheck disable=SC2086 # a list of words
  if ! in_build $options; then
    echo "skip demo-optimizers: $name (not in this build of train_gpt)" >&2
    continue
  fi
  for rate in $rates; do echo "$name|$options|$option|$rate" >>"$list"; done
done
total=$(wc -l <"$list")
echo "demo-optimizers: $total runs of $STEPS steps, $RANKS ranks, on $text" >&2

# The name of a run's files.
stem() { printf '%s/runs/%s' "$out" "$(echo "$1-$2" | tr -c 'A-Za-z0-9.\n-' '_')"; }

number=0 kept=0 started=$(date +%s)
exec 3<"$list"
while IFS='|' read -r name options option rate <&3; do
  number=$((number + 1))
  file=$(stem "$name" "$rate")
  if [ -s "$file.json" ]; then
    kept=$((kept + 1))
    continue
  fi
  printf 'demo-optimizers: %2d of %d  %-20s lr %-6s ' "$number" "$total" "$name" "$rate" >&2
  # shellcheck disable=SC2086 # lists of words
  "$program" $settings $options "$option" "$rate" --loss-csv "$file.csv" >"$file.out" 2>"$file.log" 3<&-
  status=$?
  [ $interrupted = 0 ] || { echo 'interrupted; the same call goes on here' >&2; exit 130; }
  [ $status = 0 ] || { echo >&2; fail "$program ended with status $status: $(tail -n 1 "$file.log")"; }
  now=$(date +%s)
  left=$(((now - started) * (total - number) / (number - kept)))
  printf 'validation loss %.6s, about %d:%02d left\n' \
    "$(sed -n 's/.*"val_loss":\([0-9.a-z]*\).*/\1/p' "$file.out")" $((left / 60)) $((left % 60)) >&2
  grep '^{' "$file.out" | tail -n 1 >"$file.part" && mv "$file.part" "$file.json" || exit 1
done
exec 3<&-
[ $kept = 0 ] || echo "demo-optimizers: $kept runs were finished before (FRESH=1 starts over)" >&2

set --
exec 3<"$list"
while IFS='|' read -r name options option rate <&3; do
  file=$(stem "$name" "$rate")
  set -- "$@" "$name" "$rate" "$file.json" "$file.csv"
done
exec 3<&-
"$report" --by-step "$out/by-step.svg" --by-time "$out/by-time.svg" "$@" >"$out/table.txt" ||
  fail "$report failed"
cat "$out/table.txt"
echo "demo-optimizers: curves are in $out/by-step.svg and $out/by-time.svg"
