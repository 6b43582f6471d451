#!/bin/sh
# SPDX-License-Identifier: MIT
# train_gpt with a GPU for each rank, started by torchrun: on every host, with HEAD naming one of them.
#
#   make examples-cuda
#   HEAD=node0 NODES=2 GPUS=8 examples/launch/torchrun.sh --data text.txt --steps 300
#
# torchrun sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; nothing else of torch is used.
# Rank 0 listens on the port after MASTER_PORT, where torchrun's own store is.
# NOT YET RUN ON HARDWARE.
set -eu
cd "$(dirname "$0")/../.."
exec torchrun --nnodes "${NODES:-1}" --nproc-per-node "${GPUS:-8}" \
  --rdzv-backend c10d --rdzv-endpoint "${HEAD:-localhost}:${PORT:-29400}" --rdzv-id "${JOB:-train_gpt}" \
  --no-python build/examples/train_gpt_cuda --device cuda --transport nccl "$@"
