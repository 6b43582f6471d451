#!/bin/sh
# SPDX-License-Identifier: MIT
# train_gpt with a GPU for each rank, started by Open MPI's mpirun, on the host that has rank 0:
#
#   make examples-cuda
#   HOSTS=node0:8,node1:8 RANKS=16 examples/launch/mpirun.sh --data text.txt --steps 300
#
# MPI only starts the processes: tensors go over NCCL, and control messages over TCP to the port that is
# chosen here. HOSTS may be left out on a single host.
# NOT YET RUN ON HARDWARE.
set -eu
cd "$(dirname "$0")/../.."
MASTER_ADDR=${MASTER_ADDR:-$(hostname)}
MASTER_PORT=${MASTER_PORT:-29500}
export MASTER_ADDR MASTER_PORT
exec mpirun -n "${RANKS:-8}" ${HOSTS:+--host "$HOSTS"} -x MASTER_ADDR -x MASTER_PORT \
  build/examples/train_gpt_cuda --device cuda --transport nccl "$@"
