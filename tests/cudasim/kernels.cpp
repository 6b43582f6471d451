/* SPDX-License-Identifier: MIT */
/* The library's kernels for the host double: the very file that nvcc compiles. */
#include "tests/cudasim/include/cuda_runtime.h"

#include "mfsdp/cuda/kernels.cu"
