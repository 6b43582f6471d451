/* SPDX-License-Identifier: MIT */
/*
 * platform_cuda.h - ranks that compute on GPUs: the tables of platform.h for --device cuda.
 * Includes nothing of CUDA.
 */
#ifndef GPT_CUDA_PLATFORM_CUDA_H
#define GPT_CUDA_PLATFORM_CUDA_H

#include "../platform.h"

struct mfsdp_cuda_backend;

#ifdef __cplusplus
extern "C" {
#endif

const gpt_platform *gpt_platform_cuda(void);
/* Ranks that are threads and share the first visible GPU (mfsdp/cuda/transport_device.h). */
const gpt_links *gpt_links_device(void);
/* Ranks that are processes with a GPU each, started by torchrun, SLURM or mpirun: tensors over
 * NCCL, control over TCP to rank 0 at MASTER_ADDR and MASTER_PORT (links_nccl.c). */
const gpt_links *gpt_links_nccl(void);
/* Of a rank on the cuda platform. */
struct mfsdp_cuda_backend *gpt_rank_cuda_backend(const struct gpt_rank *rank);

#ifdef __cplusplus
}
#endif

#endif /* GPT_CUDA_PLATFORM_CUDA_H */
