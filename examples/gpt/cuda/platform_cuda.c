/* SPDX-License-Identifier: MIT */
#include "platform_cuda.h"

#include "../rank.h"
#include "ops_cuda.h"

#include "mfsdp/cuda/transport_device.h"

/* ---- one rank's GPU ---- */

typedef struct cuda_rank {
  mfsdp_cuda_backend *backend;
  gpt_cuda *ops;
} cuda_rank;

static const char *cuda_math_name(const gpt_job *job) {
  (void)job;
  return "cuda";
}

static mfsdp_status cuda_create(gpt_rank *rank) {
  const int64_t timeout_us = (rank->job->options.deadline + 10) * INT64_C(1000000);
  mfsdp_cuda_backend_desc desc = mfsdp_cuda_backend_desc_default();
  cudaError_t error;
  cuda_rank *own;
  void *memory;
  MFSDP_TRY(mfsdp_table_alloc(&rank->context, 1, sizeof(*own), "a rank's GPU", &memory));
  rank->cuda = own = (cuda_rank *)memory;
  error = cudaSetDevice((int)rank->gpu);
  if (error != cudaSuccess) {
    (void)cudaGetLastError();
    return MFSDP_FAIL(&rank->context, MFSDP_E_UNSUPPORTED,
                      "--device cuda: cudaSetDevice(%d): %s; nvidia-smi shows driver and devices",
                      (int)rank->gpu, cudaGetErrorString(error));
  }
  desc.device = rank->gpu;
  MFSDP_TRY(mfsdp_cuda_backend_create(&rank->context, &desc, &own->backend));
  rank->backend = mfsdp_cuda_backend_get(own->backend);
  MFSDP_TRY(rank->backend->ops->queue_create(rank->backend->self, &rank->context, "compute",
                                             &rank->queue));
  MFSDP_TRY(gpt_cuda_create(&rank->context, rank->backend, rank->queue, timeout_us, &own->ops));
  rank->device = gpt_cuda_device(own->ops);
  return MFSDP_OK;
}

static mfsdp_status cuda_destroy(gpt_rank *rank) {
  cuda_rank *own = (cuda_rank *)rank->cuda;
  mfsdp_status status;
  if (own == NULL) return MFSDP_OK;
  gpt_cuda_destroy(own->ops);
  if (rank->backend != NULL)
    rank->backend->ops->queue_destroy(rank->backend->self, &rank->context, rank->queue);
  status = mfsdp_cuda_backend_destroy(&rank->context, own->backend);
  mfsdp_table_free(&rank->context, own, 1, sizeof(*own));
  return status;
}

mfsdp_cuda_backend *gpt_rank_cuda_backend(const gpt_rank *rank) {
  return ((const cuda_rank *)rank->cuda)->backend;
}

const gpt_platform *gpt_platform_cuda(void) {
  static const gpt_platform platform = {cuda_math_name, cuda_create, cuda_destroy};
  return &platform;
}

/* ---- ranks that are threads and share a GPU: tensors by device copies, control by the host
 * ---- */

static int device_open(gpt_job *job, mfsdp_context *context, gpt_error *error) {
  mfsdp_device_world_desc desc = mfsdp_device_world_desc_default();
  mfsdp_device_world *world = NULL;
  const int status = gpt_links_threads_open(job, context, "nccl", error);
  if (status != GPT_OK) return status;
  desc.world = (int32_t)job->options.ranks;
  desc.deadline_us = job->options.deadline * 1000000;
  if (mfsdp_device_world_create(context, &desc, &world) == MFSDP_OK) {
    job->cuda = world;
    return GPT_OK;
  }
  (void)gpt_fail(error, "%s", mfsdp_context_error(context)->message);
  return 1;
}

static void device_close(gpt_job *job, mfsdp_context *context, int status) {
  (void)mfsdp_device_world_destroy(context, (mfsdp_device_world *)job->cuda);
  gpt_links_threads()->close(job, context, status);
}

static void device_poison(const gpt_job *job, const mfsdp_error *why) {
  mfsdp_device_world_poison((mfsdp_device_world *)job->cuda, why);
  gpt_links_threads()->poison(job, why);
}

static mfsdp_status device_create(gpt_rank *rank) {
  return mfsdp_device_transport_create(&rank->context, (mfsdp_device_world *)rank->job->cuda,
                                       rank->index, gpt_rank_cuda_backend(rank), &rank->transport);
}

const gpt_links *gpt_links_device(void) {
  static const gpt_links links = {device_open, device_close, device_poison, gpt_links_threads_meet,
                                  device_create};
  return &links;
}
