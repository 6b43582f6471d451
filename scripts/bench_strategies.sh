#!/bin/sh
# SPDX-License-Identifier: MIT
# All of the strategies benchmark: on threads, on MPI processes in shared memory, and, as root, on hosts
# with links of 1 Gbit/s, 100 Mbit/s and the rate that gives this machine an A100 cluster's FLOP/s per
# byte/s (scripts/test_hosts.sh). Takes hours. Rows are appended to a file, and rows that are there are
# not measured again: stop it at any time, start it again to go on.
#
#   scripts/bench_strategies.sh [--quick] [--append FILE] [--runs N] [--worlds 'N N'] [--only WORD] [--json FILE]
#                               [--plots FOLDER] [--models 'M M'] [--strategies 'S S'] [--rings 'S S'] [--seconds S] [--alone]
#
# Beside them, as torch-fsdp2, PyTorch's FSDP2 with Muon (bench/peers/torch_fsdp2.py) where PYTHON (python3) has
# torch and numpy. On hosts strategies are also measured by RING (zero1-ring, ...; --rings ''
# leaves that out), which does not wait for the rank that owns most of a unit.
# --models, --strategies, --seconds and --alone (nothing with worker queues): less than everything.
#
# --only: threads, mpi, 1000, 100, matched or tradeoffs. What cannot run here says SKIP; a row whose links
# were not what was asked says VOID and is not kept; the status is then 1.
set -u
cd "$(dirname "$0")/.." || exit 1
program=build/bench/strategies
quick='' rows=build/bench/strategies.jsonl plots=bench/results runs=2 worlds='2 4 8' only='' json=''
threads_models=gpt-256,gpt-512,gpt-1024,gpt2-124m,gpt2-1.5b mpi_models=gpt-256,gpt-512,gpt-1024,gpt2-124m
hosts_1000='gpt-256 gpt-512 gpt2-124m' hosts_100='gpt-256 gpt-512' hosts_matched='gpt-256 gpt-512 gpt-1024' trades=gpt-256
strategies='matrix gather alltoall zero1 replicated hybrid' rings='matrix gather alltoall zero1 replicated' models='' less=''
while [ $# -gt 0 ]; do
  case $1 in
  --quick)
    quick=--quick runs=1 worlds=2 threads_models=gpt-64 mpi_models=gpt-64 strategies='matrix gather zero1'
    rings=matrix hosts_1000='' hosts_100='' hosts_matched=gpt-64 trades=gpt-64 plots=build/bench/plots
    ;;
  --append) rows=${2?--append needs a file}; shift ;;
  --runs) runs=${2?--runs needs a number}; shift ;;
  --worlds) worlds=${2?--worlds needs numbers}; shift ;;
  --only) only=${2?--only needs a word}; shift ;;
  --models) models=${2?--models needs names}; shift ;;
  --strategies) strategies=${2?--strategies needs names}; shift ;;
  --rings) rings=${2?--rings needs names}; shift ;;
  --seconds) less="$less --seconds ${2?--seconds needs a number}"; shift ;;
  --alone) less="$less --alone" ;;
  --plots) plots=${2?--plots needs a folder}; shift ;;
  --json) json=${2?--json needs a file}; shift ;;
  *) sed -n '3,18p' "$0" >&2; exit 2 ;;
  esac
  shift
done
if [ -n "$models" ]; then
  threads_models=$(echo "$models" | tr ' ' ,) mpi_models=$threads_models
  hosts_1000=$models hosts_100=$models hosts_matched=$models
fi
comma_strategies=$(echo "$strategies" | tr ' ' ,)
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work" "$rows.part"' EXIT
trap 'exit 130' INT TERM
mkdir -p "$(dirname "$rows")"
failed=0 void=0

wanted() { [ -z "$only" ] || [ "$only" = "$1" ]; }
missing() { $program --append "$rows" --missing "$@" >/dev/null; } # ARGUMENT...: of the program
show() { echo; echo "== $*"; }

has_mpi=1 launcher='mpirun -n'
if ! command -v mpirun >/dev/null 2>&1 || ! grep -q '^MPI  *on' build/release/config.log; then
  echo 'SKIP MPI: this build has none'
  has_mpi=0
elif mpirun --version 2>&1 | grep -qi 'open.mpi'; then
  launcher='mpirun --oversubscribe --mca btl self,vader -n'
  [ "$(id -u)" != 0 ] || export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi

# ---- PyTorch ----

python=${PYTHON:-python3} reference=build/release/bench/peers/reference has_torch=1
if ! why=$("$python" -c 'import numpy, torch; from torch.distributed.fsdp import fully_shard' 2>&1); then
  echo "SKIP torch-fsdp2: $(echo "$why" | tail -n 1)"
  has_torch=0
elif ! make -s $reference; then
  has_torch=0 failed=1
fi

# RUN WORLD LINKS MODEL MBIT|'': rows of the peer, once, after those of matrix beside which they stand. The final
# parameters are compared with those of our runtime.
torch_peer() {
  [ $has_torch = 1 ] || return 0
  case $4 in
  gpt-64) tensors=gpt:d=64,layers=2 ;;
  gpt-256) tensors=gpt:d=256,layers=4 ;;
  gpt-512) tensors=gpt:d=512,layers=4 ;;
  gpt-1024) tensors=gpt:d=1024,layers=2 ;;
  *) return 0 ;; # the peer has tensors of a GPT, or a table
  esac
  ! grep -q "\"case\":\"$4, $3, $2 ranks, torch-fsdp2, run $1\"" "$rows" || return 0
  steps=5 warmup=1
  case $3 in matched) steps=1 ;; 100*) steps=2 ;; esac
  show "torch FSDP2: $2 ranks, $3, $4, run $1"
  $reference --model "$tensors" --world "$2" --steps $((steps + warmup)) --out "$work/params" || { failed=1; return 0; }
  set -- "$@" "bench/peers/torch_fsdp2.py --model $tensors --world $2 --steps $steps --warmup $warmup --run $1 --deadline 3000"
  cp "$rows" "$rows.part"
  rm -f "$work/meet"
  # shellcheck disable=SC2086
  if [ -z "$5" ]; then
    "$python" -B $6 --links "$3" --against "$work/params" --append "$rows.part" </dev/null
  else
    scripts/test_hosts.sh -n "$2" -r "$5" -t 3600 -- env GLOO_SOCKET_IFNAME=eth0 "$python" -B $6 --links "$3" \
      --against "$work/params" --append "$rows.part" --rendezvous "file://$work/meet" </dev/null
  fi
  case $? in
  0) mv "$rows.part" "$rows" ;;
  3) echo "VOID: torch FSDP2, $4, $3"; void=$((void + 1)) ;;
  77) ;;
  *) failed=1 ;;
  esac
}

# ---- hosts ----

make -s $program || exit 1
[ $has_mpi = 0 ] || make -s build/release/tests/mpi/mpi_check || exit 1 # measures links

# Two connections a pair of hosts: on one, what goes one way holds up what comes the other way, and two
# hosts would exchange at half of what their links have.
MPIRUN_ARGS="${MPIRUN_ARGS-} --mca btl_tcp_links 2"
export MPIRUN_ARGS

# RUN WORLD LINKS MBIT MODEL STRATEGY COLLECTIVE...: on hosts. The rows stand only if the links were as asked, so they
# are written to a copy.
on_hosts() {
  set -- "$@" "--world $2 --model $5 --strategy $6 --collective $7 --run $1"
  # At the matched rate whole steps of larger models take minutes, and say what the smallest one says.
  case $3$5 in matchedgpt-512 | matchedgpt-1024) set -- "$1" "$2" "$3" "$4" "$5" "$6" "$7" "$8 --no-whole" ;; esac
  # shellcheck disable=SC2086 # lists of words
  missing $8 $less --transport mpi --links "$3" || return 0
  for try in 1 2 3; do
    show "$2 hosts, $3 ($4 Mbit/s), $5, $6, $7, run $1"
    cp "$rows" "$rows.part"
    # shellcheck disable=SC2086
    scripts/test_hosts.sh -n "$2" -r "$4" -t 14400 -- $program $8 --transport mpi --links "$3" --append "$rows.part" $less $quick \
      </dev/null
    status=$?
    case $status in
    0) mv "$rows.part" "$rows"; return 0 ;;
    3) echo "VOID: $5, $6 at $4 Mbit/s, try $try" ;;
    77) return 77 ;;
    *) failed=1; return 0 ;;
    esac
  done
  void=$((void + 1))
}

all_hosts() { # RUN LINKS MBIT|matched MODELS
  for world in $worlds; do
    mbit=$3
    # A world's rate is one for all of its rows: it is kept beside them.
    if [ "$mbit" = matched ]; then
      mbit=$(sed -n "s/^$world //p" "$rows.matched" 2>/dev/null)
      if [ -z "$mbit" ]; then
        show "$program --matched $world"
        $program --matched "$world" >"$work/matched"
        cat "$work/matched"
        mbit=$(sed 's/.* //' "$work/matched")
        case $mbit in '' | *[!0-9]*) failed=1; return 0 ;; esac
        echo "$world $mbit" >>"$rows.matched"
      fi
    fi
    for model in $4; do
      for strategy in $strategies; do
        on_hosts "$1" "$world" "$2" "$mbit" "$model" "$strategy" direct || return 0
      done
      for strategy in $rings; do
        on_hosts "$1" "$world" "$2" "$mbit" "$model" "$strategy" ring || return 0
      done
      torch_peer "$1" "$world" "$2" "$model" "$mbit"
    done
  done
}

: >>"$rows"
run=1
while [ $run -le "$runs" ]; do
  for world in $worlds; do
    # shellcheck disable=SC2086 # lists of words, here and below
    if wanted threads && missing $less --world "$world" --model "$threads_models" --strategy "$comma_strategies" --run $run; then
      show "threads, $world ranks, run $run"
      $program --world "$world" --model "$threads_models" --strategy "$comma_strategies" --run $run --append "$rows" $less $quick </dev/null || failed=1
    fi
    # shellcheck disable=SC2086
    if wanted mpi && [ $has_mpi = 1 ] &&
       missing $less --transport mpi --world "$world" --model "$mpi_models" --strategy "$comma_strategies" --run $run; then
      show "mpi, $world ranks, run $run"
      # shellcheck disable=SC2086
      $launcher "$world" $program --transport mpi --model "$mpi_models" --strategy "$comma_strategies" --run $run --append "$rows" $less $quick </dev/null || failed=1
    fi
    ! wanted mpi || for model in $(echo "$mpi_models" | tr , ' '); do torch_peer $run "$world" mpi "$model" ''; done
  done
  if [ $has_mpi = 1 ]; then
    wanted 1000 && all_hosts $run '1000 Mbit/s' 1000 "$hosts_1000"
    wanted 100 && all_hosts $run '100 Mbit/s' 100 "$hosts_100"
    wanted matched && all_hosts $run matched matched "$hosts_matched"
  fi
  run=$((run + 1))
done
if wanted tradeoffs; then
  # On hosts all algorithms can be tried; on threads the links are artificial.
  if [ $has_mpi = 1 ] && [ -z "$quick" ]; then
    for try in 1 2 3; do
      show 'trade-offs, 4 hosts, 1000 Mbit/s'
      cp "$rows" "$rows.part"
      scripts/test_hosts.sh -n 4 -r 1000 -t 14400 -- $program --transport mpi --tradeoffs --model $trades --links '1000 Mbit/s' \
        --append "$rows.part" </dev/null
      status=$?
      case $status in
      0) mv "$rows.part" "$rows"; break ;;
      3) echo "VOID: trade-offs, try $try"; [ $try != 3 ] || void=$((void + 1)) ;;
      77) break ;;
      *) failed=1; break ;;
      esac
    done
  fi
  show 'trade-offs, threads, links of 100 MB/s'
  $program --tradeoffs --model $trades --link-mbytes 100 --links '100 MB/s' --append "$rows" $quick </dev/null || failed=1
fi

if [ -n "$json" ]; then # the rows as one list
  { echo '['; grep '^{' "$rows" | sed '$!s/$/,/'; echo ']'; } >"$json" || failed=1
fi
echo "rows: $rows"
[ $void = 0 ] || { echo "$void rows are void and not kept: start this again" >&2; failed=1; }
scripts/plot.sh "$rows" "$plots" || failed=1
exit $failed
