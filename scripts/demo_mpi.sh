#!/bin/sh
# SPDX-License-Identifier: MIT
# Trains the same GPT with ranks as threads and as processes of an mpirun, and compares what they made.
#
#   DATA=file RANKS=4 STEPS=60 MPIRUN='mpirun ...' scripts/demo_mpi.sh
#
# DATA: a text to train on; default: the King James Bible. MPIRUN: your launcher with its options.
set -u
cd "$(dirname "$0")/.." || exit 1
RANKS=${RANKS:-4} STEPS=${STEPS:-60}
out=build/demo-mpi
program=build/examples/train_gpt
mkdir -p $out || exit 1

if ! grep -q '^MPI  *on' build/release/config.log; then
  echo "demo-mpi: this build has no MPI: $(sed -n 's/^MPI  *off *//p' build/release/config.log)." \
    "On Debian: apt-get install openmpi-bin libopenmpi-dev, then make demo-mpi again" >&2
  exit 1
fi
launcher=${MPIRUN:-mpirun}
if [ -z "${MPIRUN-}" ] && mpirun --version 2>&1 | grep -qi 'open.mpi'; then
  launcher='mpirun --oversubscribe'
  # It refuses root unless told twice; this demo runs nothing but the program above.
  [ "$(id -u)" != 0 ] || export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
text=${DATA-}
if [ -z "$text" ]; then
  text=build/demo/kjv.txt
  mkdir -p build/demo
  [ -s $text ] || scripts/get_text.sh $text || exit 1
fi

train() { # NAME COMMAND...
  name=$1
  shift
  echo "demo-mpi: $name: $*"
  "$@" >"$out/$name.json" || exit 1
}
options="--data $text --steps $STEPS --layers 4 --dim 128 --heads 4 --context 128 --batch 4"
# shellcheck disable=SC2086 # lists of words
train threads $program --ranks "$RANKS" $options
# shellcheck disable=SC2086
train mpi $launcher -n "$RANKS" $program --transport mpi $options

field() { sed -n 's/.*"'"$2"'":"\{0,1\}\([^",}]*\).*/\1/p' "$out/$1.json"; }
printf '\n%-28s %18s %18s\n' '' threads mpi
for row in 'ranks' 'train_loss' 'val_loss' 'tokens_per_s' 'optimizer_matrix' 'params_hash'; do
  printf '%-28s %18s %18s\n' $row "$(field threads $row)" "$(field mpi $row)"
done
[ "$(field threads params_hash)" = "$(field mpi params_hash)" ] && echo 'demo-mpi: the same parameters, bit for bit' && exit 0
echo 'demo-mpi: the parameters differ' >&2
exit 1
