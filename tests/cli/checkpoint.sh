#!/bin/sh
# SPDX-License-Identifier: MIT
# train_gpt's checkpoints: the same bytes from every world, and runs that go on with the same bits in
# another one, in a new process, after kill -9. Prints one line per check: "ok NAME", "not ok NAME".
set -u
cd "$(dirname "$0")/../.." || exit 1
program=${TRAIN_GPT:-build/examples/train_gpt}
suite=checkpoint
. tests/cli/lib.sh
full= # a file system of our own, if there is one
trap '[ -z "$full" ] || umount "$full"; rm -rf "$work"' EXIT

write_text "$work/text"
small="--data $work/text --layers 2 --dim 32 --heads 2 --context 32 --batch 2 --steps 6"
# Muon with fp32; tied weights with bf16 (masters of their own); AdamW alone with f16 and loss scaling.
family() {
  case $1 in
  muon) echo '--clip 0.5' ;;
  bf16) echo '--dtype bf16 --tied' ;;
  adamw) echo '--optimizer adamw --dtype f16' ;;
  # The crash is after step 3, the first renewal in step 2 or 3, the next one later.
  shampoo) echo '--optimizer shampoo --precondition-every 2' ;;
  soap) echo '--optimizer soap --precondition-every 2 --dtype bf16' ;;
  esac
}
train() { # RANKS FOLDER OPTIONS...: eight sample blocks a step
  ranks=$1 folder=$2
  shift 2
  # shellcheck disable=SC2086
  $program $small --ranks "$ranks" --micro-batches $((8 / ranks)) --checkpoint "$folder" "$@" \
    >"$work/out" 2>"$work/err" || bad "ranks $ranks $*" "$(tail -n 1 "$work/err")"
}
figures() { echo "$(field "$work/out" params_hash) $(field "$work/out" train_loss) $(field "$work/out" val_loss)"; }
# What a crash after step 3 leaves.
crash() { rm -rf "$work/crashed" && cp -R "$1" "$work/crashed" && rm -rf "$work/crashed/step-6" "$work/crashed/latest"; }

families='muon bf16 adamw'
if $program --help | grep -q 'muon, adamw, shampoo, soap'; then families="$families shampoo soap"
else echo 'skip checkpoint: shampoo, soap (no LAPACKE in this build)'; fi
for name in $families; do
  options=$(family $name)
  # shellcheck disable=SC2086
  train 4 "$work/$name" --save-every 3 $options
  whole=$(figures)
  check "$name: latest" "$(cat "$work/$name/latest")" step-6
  for ranks in 1 2 4 8; do
    crash "$work/$name"
    planner=balanced
    [ $ranks = 2 ] && planner=round-robin
    # shellcheck disable=SC2086
    train $ranks "$work/crashed" --resume --planner $planner $options
    check "$name: 4 -> $ranks ranks ($planner): hash and losses" "$(figures)" "$whole"
    diff -r "$work/$name/step-6" "$work/crashed/step-6" >"$work/diff" 2>&1
    check "$name: 4 -> $ranks ranks: the same bytes" "$(head -n 1 "$work/diff")" ''
  done
done
# ---- another tool reads it ----
if command -v python3 >/dev/null 2>&1; then
  check 'plain Python reads a parameter' \
    "$(python3 examples/read_tensor.py "$work/muon/step-6" wte.weight | cut -d ' ' -f 1-3)" 'F32 [256, 32]'
  check 'plain Python reads a state' \
    "$(python3 examples/read_tensor.py "$work/muon/step-6" blocks.0.attn.qkv.weight.momentum \
      --set optimizer.momentum | cut -d ' ' -f 1-3)" 'F32 [96, 32]'
  check 'plain Python reads f16' \
    "$(python3 examples/read_tensor.py "$work/adamw/step-6" wte.weight | cut -d ' ' -f 1-3)" 'F16 [256, 32]'
  check 'plain Python says what is not there' \
    "$(python3 examples/read_tensor.py "$work/muon/step-6" wte 2>&1)" 'model has no wte'
else
  echo 'skip checkpoint: plain Python (no python3)'
fi

# ---- a schedule goes on where it was, and another one is said ----
train 4 "$work/wsd" --save-every 4 --schedule wsd --warmup 2 --decay-steps 3 --final-lr 0
whole=$(figures)
rm -rf "$work/wsd/step-6" && echo step-4 >"$work/wsd/latest"
cp -R "$work/wsd" "$work/wsd2"
train 2 "$work/wsd" --resume --schedule wsd --warmup 2 --decay-steps 3 --final-lr 0
check 'wsd, resumed: hash and losses' "$(figures)" "$whole"
check 'wsd, resumed: no note' "$(grep -c '^note' "$work/err")" 0
train 2 "$work/wsd2" --resume --schedule constant --warmup 2
check 'another schedule is said' "$(grep '^note' "$work/err")" \
  "note: schedule.kind was wsd in step-4, is constant now
note: schedule.decay_steps was 3 in step-4, is 1 now
note: schedule.final_factor was 0 in step-4, is 0.1 now"
cp -R "$work/wsd" "$work/wsd3"
train 2 "$work/wsd3" --resume --schedule wsd --warmup 2 --decay-steps 3 --final-lr 0 --lr 0.01 --preset torch
check 'another step size and preset are said' \
  "$(grep -c '^note: group.*\.lr was 0.02 in step-6, is 0.01 now\|^note: group.*weight_decay was 0 in step-6, is 0.1 now' "$work/err")" 2

# ---- keep-last ----
train 2 "$work/keep" --save-every 1 --keep-last 2
check 'keep-last 2' "$(cd "$work/keep" && echo ./*)" './latest ./lock ./step-5 ./step-6'

# ---- while training goes on ----
train 4 "$work/sync" --save-every 1 --clip 0.5
whole=$(figures)
train 4 "$work/async" --save-every 1 --clip 0.5 --async-save
check 'async: hash and losses' "$(figures)" "$whole"
diff -r "$work/sync" "$work/async" >"$work/diff" 2>&1
check 'async: the same bytes after every step' "$(head -n 1 "$work/diff")" ''
rm -rf "$work/sync" "$work/async"
# Rank 0's thread cannot put `latest` into its place; the program hears of it at a later call.
mkdir -p "$work/taken/latest"
# shellcheck disable=SC2086
$program $small --ranks 2 --checkpoint "$work/taken" --save-every 2 --async-save >"$work/out" 2>"$work/err"
status=$?
case $status/$(tail -n 1 "$work/err") in
1/*'rank 0: save of step 2 in the background: '*) ok 'async: a failure in the background' ;;
*) bad 'async: a failure in the background' "status $status, $(tail -n 1 "$work/err")" ;;
esac

# ---- errors ----
refuse() { # NAME TEXT OPTIONS...
  name=$1 text=$2
  shift 2
  # shellcheck disable=SC2086
  $program $small "$@" >"$work/out" 2>"$work/err"
  if [ $? -ne 0 ] && tail -n 1 "$work/err" | grep -q -e "$text"; then ok "$name"; else bad "$name" "$(tail -n 1 "$work/err")"; fi
}
refuse 'resume without a folder' 'need --checkpoint' --resume
refuse 'async-save without a folder' 'need --checkpoint' --async-save
refuse 'resume from nothing' 'no such file' --checkpoint "$work/none" --resume
mkdir "$work/above" && : >"$work/above/file"
refuse 'a folder that cannot be made, before any step' 'no such file' --checkpoint "$work/above/none/run"
check 'a folder that cannot be made: no step was taken' "$(grep -c '^step' "$work/err")" 0
refuse 'a file instead of a folder' 'no folder' --checkpoint "$work/above/file"
check 'a file instead of a folder: no step was taken' "$(grep -c '^step' "$work/err")" 0
refuse 'another seed' 'give the same' --checkpoint "$work/keep" --resume --seed 2
refuse 'another width' 'has another shape' --checkpoint "$work/keep" --resume --dim 64
refuse 'another optimizer' 'missing' --checkpoint "$work/keep" --resume --optimizer adamw
cp -R "$work/keep" "$work/index"
LC_ALL=C sed 's/\(next_block":"\)[0-9]/\1x/' "$work/keep/step-6/state.safetensors" >"$work/index/step-6/state.safetensors"
refuse 'a sample index that is none' 'not saved by train_gpt' --checkpoint "$work/index" --resume
cp -R "$work/index" "$work/anew"
train 2 "$work/anew" --keep-last 2
check 'a run begun anew beside old checkpoints is said' "$(grep -c '^note: .*another run' "$work/err")" 1
cp -R "$work/keep" "$work/damaged"
: >"$work/damaged/step-6/model.safetensors"
refuse 'a damaged file' 'truncated' --checkpoint "$work/damaged" --resume
if command -v flock >/dev/null 2>&1; then
  flock "$work/keep/lock" sleep 60 &
  holder=$!
  tries=0
  while [ $tries -lt 100 ] && flock -n "$work/keep/lock" true; do sleep 0.1; tries=$((tries + 1)); done
  refuse 'two writers' 'someone else has it' --checkpoint "$work/keep"
  check 'two writers: nothing was touched' "$(cd "$work/keep" && echo ./*)" './latest ./lock ./step-5 ./step-6'
  kill $holder
else
  echo 'skip checkpoint: two writers (no flock)'
fi

# ---- a disk with room for one checkpoint and a half ----
mkdir "$work/full"
if mount -t tmpfs -o "size=$(($(du -sk "$work/muon/step-6" | cut -f 1) * 3 / 2))k" none "$work/full" 2>/dev/null; then
  full=$work/full
  # shellcheck disable=SC2086
  refuse 'a full disk' 'no space left' --ranks 4 --micro-batches 2 --checkpoint "$full/run" --save-every 3 --clip 0.5
  check 'a full disk: the old checkpoint stays' "$(cd "$full/run" && echo ./* && cat latest)" './latest ./lock ./step-3
step-3'
  cp -R "$full/run" "$work/saved"
  train 2 "$work/saved" --resume --clip 0.5
  diff -r "$work/muon/step-6" "$work/saved/step-6" >"$work/diff" 2>&1
  check 'a full disk: what it holds goes on with the same bytes' "$(head -n 1 "$work/diff")" ''
else
  echo 'skip checkpoint: a full disk (no mount of a small file system here)'
fi

# ---- kill -9 while it saves after every step: what is there loads, and ends where the whole run ends ----
train 4 "$work/reference" --save-every 1 --clip 0.5
whole=$(figures)
i=0
while [ $i -lt 8 ]; do
  # shellcheck disable=SC2086
  $program $small --ranks 4 --micro-batches 2 --checkpoint "$work/killed" --save-every 1 --clip 0.5 \
    --async-save=$((i % 2)) $([ -e "$work/killed/latest" ] && echo --resume) >/dev/null 2>&1 &
  pid=$!
  tries=0
  # Dies somewhere in the save that follows the next name to appear.
  before=$(ls "$work/killed" 2>/dev/null | cksum)
  while [ $tries -lt 2000 ] && [ "$(ls "$work/killed" 2>/dev/null | cksum)" = "$before" ] &&
    kill -0 $pid 2>/dev/null; do tries=$((tries + 1)); done
  kill -KILL $pid 2>/dev/null
  wait $pid 2>/dev/null
  i=$((i + 1))
done
train 2 "$work/killed" --clip 0.5 $([ -e "$work/killed/latest" ] && echo --resume)
check 'after eight kills: hash' "$(field "$work/out" params_hash)" "${whole%% *}"
diff -r "$work/reference/step-6" "$work/killed/step-6" >"$work/diff" 2>&1
check 'after eight kills: the same bytes' "$(head -n 1 "$work/diff")" ''
check 'after eight kills: no attempt is left' "$(cd "$work/killed" && echo ./*.attempt ./*.old)" './*.attempt ./*.old'

# ---- threads -> MPI -> threads ----
if "$program" --help | grep -q 'threads, mpi' && command -v mpirun >/dev/null 2>&1; then
  # Open MPI refuses root and more processes than cores unless told; MPICH knows neither.
  launcher=mpirun
  if mpirun --version 2>&1 | grep -qi 'open mpi\|open-mpi'; then
    launcher='mpirun --oversubscribe --mca btl self,vader'
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  fi
  crash "$work/muon"
  # shellcheck disable=SC2086
  $launcher -n 2 "$program" $small --transport mpi --micro-batches 4 --checkpoint "$work/crashed" --resume \
    --clip 0.5 >"$work/out" 2>"$work/err"
  diff -r "$work/muon/step-6" "$work/crashed/step-6" >"$work/diff" 2>&1
  check 'threads -> mpi: the same bytes' "$(head -n 1 "$work/diff")" ''
  # shellcheck disable=SC2086
  $launcher -n 2 "$program" $small --transport mpi --micro-batches 4 --checkpoint "$work/mpi" --save-every 3 \
    --clip 0.5 >"$work/out" 2>"$work/err"
  diff -r "$work/muon" "$work/mpi" >"$work/diff" 2>&1
  check 'mpi: the same bytes as threads' "$(head -n 1 "$work/diff")" ''
  crash "$work/mpi"
  train 4 "$work/crashed" --resume --clip 0.5
  diff -r "$work/muon/step-6" "$work/crashed/step-6" >"$work/diff" 2>&1
  check 'mpi -> threads: the same bytes' "$(head -n 1 "$work/diff")" ''
else
  echo 'skip checkpoint: threads -> mpi -> threads (no MPI in this build)'
fi
