/* SPDX-License-Identifier: MIT */
/*
 * ops_cuda.h - the table of ops.h for a GPU: the kernels of layers_cuda.h, and products by the
 * gemm of the library's CUDA backend, all enqueued on one of its queues.
 *
 *   MFSDP_TRY(backend->ops->queue_create(backend->self, context, "compute", &queue));
 *   MFSDP_TRY(gpt_cuda_create(context, backend, queue, 60 * 1000000, &cuda));
 *   gpt_device device = gpt_cuda_device(cuda);
 *   ... models on it, destroyed again ...
 *   gpt_cuda_destroy(cuda);                        // then the queue, then the backend
 *
 * One for each rank, called from its thread. `finish` waits for the loss alone, so that what was
 * enqueued behind it (the backward) runs on meanwhile.
 */
#ifndef GPT_CUDA_OPS_CUDA_H
#define GPT_CUDA_OPS_CUDA_H

#include "../ops.h"

#include "mfsdp/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gpt_cuda gpt_cuda;

/* backend: of mfsdp/cuda/backend_cuda.h; all must outlive it. timeout_us: of every wait. */
mfsdp_status gpt_cuda_create(mfsdp_context *context, const mfsdp_backend *backend,
                             mfsdp_queue *queue, int64_t timeout_us, gpt_cuda **out);
/* NULL is allowed. */
void gpt_cuda_destroy(gpt_cuda *cuda);
gpt_device gpt_cuda_device(gpt_cuda *cuda);

#ifdef __cplusplus
}
#endif

#endif /* GPT_CUDA_OPS_CUDA_H */
