# SPDX-License-Identifier: MIT
# What the scripts of this folder share. Sourced, in the project's root, after `suite=NAME`: sets $work,
# a folder that goes when the script ends.
# shellcheck shell=sh disable=SC2154,SC2034 # suite is the script's, open_mpi is for it

work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT

ok() { echo "ok $suite: $1"; }
bad() { echo "not ok $suite: $1${2:+ ($2)}"; }
# NAME GOT WANTED
check() { if [ "$2" = "$3" ]; then ok "$1"; else bad "$1" "got '$2', needs '$3'"; fi; }
# FILE KEY: the value of the last "KEY": in a line of JSON
field() { sed -n 's/.*"'"$2"'":"\{0,1\}\([^",}]*\).*/\1/p' "$1"; }

# Sets launcher, the words of an mpirun, and open_mpi (0 or 1). False: there is no mpirun.
find_launcher() {
  command -v mpirun >/dev/null 2>&1 || return 1
  # Open MPI refuses root and more processes than cores unless told; MPICH knows neither.
  launcher=mpirun open_mpi=0
  if mpirun --version 2>&1 | grep -qi 'open mpi\|open-mpi'; then
    launcher='mpirun --oversubscribe --mca btl self,vader' open_mpi=1
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  fi
  # The launcher's session folder is named after TMPDIR: short, and of this run.
  export TMPDIR=$work
}
no_mpi() { # why there is none
  why=$(sed -n 's/^MPI  *off *//p' build/release/config.log 2>/dev/null)
  echo "${why:-there is no mpirun}"
}
run() { # RANKS COMMAND...: by the launcher, bounded in time; output in $work/out and $work/err
  ranks=$1
  shift
  # shellcheck disable=SC2086
  timeout -k 5 120 $launcher -n "$ranks" "$@" >"$work/out" 2>"$work/err" </dev/null
}
# The promise is deadline + 2 s (tests/mpi: 2.5 s) where cores are free; four processes and the other
# tests share two, so that the bound has 2 s more. The default deadline is a minute.
# fails SCENARIO STATUSES PATTERN SURVIVORS PROGRAM ARGUMENT...: each survivor's verdict matches, in time
fails() {
  scenario=$1 statuses=$2 pattern=$3 survivors=$4
  shift 4
  rm -f "$work"/verdict.*
  run 4 "$@" "$work/verdict"
  for rank in $survivors; do
    if ! read -r status culprit noticed ms message <"$work/verdict.$rank"; then
      bad "$scenario: rank $rank" 'it wrote no verdict'
      continue
    fi
    case "$statuses MFSDP_E_POISONED" in
    *"$status"*) ;;
    *) bad "$scenario: rank $rank" "$status $message"; continue ;;
    esac
    if ! printf '%s' "$message" | grep -q "$pattern"; then bad "$scenario: rank $rank" "$culprit $noticed $message"
    elif [ "$ms" -gt 4500 ]; then bad "$scenario: rank $rank" "after $ms ms"
    else ok "$scenario: rank $rank"; fi
  done
}

# Bytes that can be learned: a fixed sentence, numbered.
write_text() { # FILE
  i=0
  while [ $i -lt 400 ]; do echo "$i the quick brown fox jumps over the lazy dog"; i=$((i + 1)); done >"$1"
}
