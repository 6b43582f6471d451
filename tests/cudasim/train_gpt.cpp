/* SPDX-License-Identifier: MIT */
/* The example's CUDA part for the host double: the very files that build/examples/train_gpt_cuda has. */
#include "tests/cudasim/include/cuda_runtime.h"

#include "examples/gpt/cuda/layers.cu"
#include "examples/gpt/cuda/links_nccl.c"
#include "examples/gpt/cuda/ops_cuda.c"
#include "examples/gpt/cuda/platform_cuda.c"
