/* SPDX-License-Identifier: MIT */
/*
 * backend_cuda.h - the backend that computes on one NVIDIA GPU: streams, cuBLAS, cuSOLVER, own kernels.
 *
 *   mfsdp_cuda_backend_desc desc = mfsdp_cuda_backend_desc_default();
 *   mfsdp_cuda_backend *cuda;
 *   desc.device = local_rank;                            // made current by you: cudaSetDevice
 *   if (mfsdp_cuda_backend_create(&context, &desc, &cuda) != MFSDP_OK) ...
 *   const mfsdp_backend *backend = mfsdp_cuda_backend_get(cuda);
 *   MFSDP_TRY(mfsdp_cuda_queue_wrap(&context, cuda, my_stream, "compute", &queue));   // or queue_create
 *   ... use it, destroy queues and events ...
 *   if (mfsdp_cuda_backend_destroy(&context, cuda) != MFSDP_OK) ...
 *
 * STATUS: compiled for real devices, run on the host double of the test suite, not yet run on
 * hardware.
 *
 * One backend per rank, called from the rank's own thread, whose current device must be the
 * backend's. DEVICE memory comes from a stream-ordered pool, PINNED memory is page-locked, HOST
 * memory is the context's allocator's. Each queue is a stream, of its own or yours, and has
 * desc.workspace_nbytes for cuBLAS, so that queues do not share one and results repeat bit for bit.
 *
 * Nothing synchronizes but mem_alloc of DEVICE memory (with a stream that only allocates),
 * queue_destroy (with its own stream), what the runtime does by itself in mem_alloc and mem_free of
 * PINNED memory and in copies from and to HOST memory, and cuSOLVER: the first eigh_ or
 * qr_workspace_nbytes of a backend and the first eigh or qr of a queue make a handle (not with
 * desc.solver, for one queue), and what the library does inside of eigh and qr is its own.
 *
 * Tasks of queue_call run on a thread of the driver (cudaLaunchHostFunc): they must not call CUDA,
 * must not touch DEVICE memory, and must not wait for another queue's work, since the driver may run
 * all tasks of a process one after another. So transport_threads.h and transport_mpi.h refuse this
 * backend; ranks that are threads and share the device have transport_device.h.
 *
 * Errors reach the user as in backend_host.h: what a call can check it refuses; what a kernel or a
 * task finds wrong stays with the queue, kernels behind it do nothing, and event_wait tells. An error
 * of CUDA, cuBLAS or cuSOLVER becomes a status with its name, and is cleared from the runtime.
 *
 * CUDA graphs: a captured step may hold every entry but queue_call, eigh and qr (E_UNSUPPORTED),
 * mem_alloc, event_wait and copies from or to HOST memory. Arguments are frozen into the graph.
 *
 * Does not: choose devices; multiply in F64 (E_UNSUPPORTED); decompose more than 30,000 rows; promise
 * the host backend's bits, for products and sums of squares run in another order, eigenvectors are
 * another library's, and pow() of the device may differ in the last bit of a double.
 * Needs CUDA 12.8 or later. Link: kernels.cu compiled by nvcc, -lcusolver -lcublas -lcublasLt -lcudart,
 * and -lpthread -lm. POSIX 2008: see posix/clock.h.
 */
#ifndef MFSDP_CUDA_BACKEND_CUDA_H
#define MFSDP_CUDA_BACKEND_CUDA_H

#include "cuda_decompose.h"
#include "cuda_dense.h"
#include "cuda_entries.h"
#include "cuda_queue.h"

typedef struct mfsdp_cuda_backend_desc {
  size_t struct_nbytes;
  int32_t device;
  int32_t allow_tf32;     /* 1: products of floats may round their operands to TF32 */
  int32_t check_pointers; /* 1: a host pointer where a device pointer is needed is E_ARGUMENT, at
                           * the cost of a call of the runtime for each */
  int32_t task_capacity;  /* tasks of queue_call that one queue holds, at least 1 */
  cublasHandle_t blas; /* NULL: one of our own. Yours is ours while the backend lives: its stream,
                           * workspace, pointer mode and math mode are set */
  cusolverDnHandle_t
      solver;              /* NULL: our own, made when they are needed. Yours answers for sizes, and
                           * works for the first queue that decomposes, until that is destroyed;
                           * other queues get their own, since handles have memory that two streams
                           * must not share. While the backend lives its stream and determinism
                           * mode are set */
  cudaMemPool_t pool;      /* of the device; NULL: one of our own that keeps what it got */
  size_t workspace_nbytes; /* of cuBLAS, for each queue; a multiple of 256, at least 256 */
  int64_t symmetric_from;  /* symmetric products of so many rows are computed by half. It decides
                              * bits: the same on every rank */
  int64_t submit_timeout_us; /* how long queue_call waits for room: E_TIMEOUT */
} mfsdp_cuda_backend_desc;

/* Device 0, fp32 sums of fp32 products, 256 tasks, own handles and pool, 32 MiB, 1024 rows, ten minutes.
 */
MFSDP_API mfsdp_cuda_backend_desc mfsdp_cuda_backend_desc_default(void) {
  mfsdp_cuda_backend_desc desc;
  memset(&desc, 0, sizeof(desc));
  desc.struct_nbytes = sizeof(desc);
  desc.task_capacity = 256;
  desc.workspace_nbytes = (size_t)32 << 20;
  desc.symmetric_from = 1024;
  desc.submit_timeout_us = INT64_C(600000000);
  return desc;
}

MFSDP_API const mfsdp_backend_ops *mfsdp__cuda_ops_table(void) {
  /* In the order of mfsdp_backend_ops. */
  static const mfsdp_backend_ops ops = {sizeof(mfsdp_backend_ops), "cuda",
                                        mfsdp__cuda_mem_alloc,     mfsdp__cuda_mem_free,
                                        mfsdp__cuda_queue_create,  mfsdp__cuda_queue_destroy,
                                        mfsdp__cuda_event_create,  mfsdp__cuda_event_destroy,
                                        mfsdp__cuda_event_record,  mfsdp__cuda_queue_wait,
                                        mfsdp__cuda_event_query,   mfsdp__cuda_event_wait,
                                        mfsdp__cuda_queue_call,    mfsdp__cuda_copy,
                                        mfsdp__cuda_fill_bytes,    mfsdp__cuda_cast,
                                        mfsdp__cuda_sum_terms,     mfsdp__cuda_sumsq,
                                        mfsdp__cuda_verdict,       mfsdp__cuda_gemm,
                                        mfsdp__cuda_normalize,     mfsdp__cuda_fused,
                                        mfsdp__cuda_eigh_nbytes,   mfsdp__cuda_qr_nbytes,
                                        mfsdp__cuda_eigh,          mfsdp__cuda_qr,
                                        mfsdp__cuda_precondition};
  return &ops;
}

/* ---- life ---- */

MFSDP_API mfsdp_status mfsdp__cuda_desc_check(mfsdp_context *context,
                                              const mfsdp_cuda_backend_desc *desc) {
  if (desc == NULL) return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "cuda backend: desc is NULL");
  if (desc->struct_nbytes != sizeof(*desc))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "cuda backend: desc.struct_nbytes is %zu, needs %zu (use "
                      "mfsdp_cuda_backend_desc_default)",
                      desc->struct_nbytes, sizeof(*desc));
  if (desc->task_capacity < 1 || desc->submit_timeout_us < 1)
    return MFSDP_FAIL(
        context, MFSDP_E_ARGUMENT,
        "cuda backend: desc.task_capacity is %d, desc.submit_timeout_us is %lld; both "
        "need at least 1",
        (int)desc->task_capacity, (long long)desc->submit_timeout_us);
  if (desc->workspace_nbytes < MFSDP_ALIGN_NBYTES ||
      desc->workspace_nbytes % MFSDP_ALIGN_NBYTES != 0)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "cuda backend: desc.workspace_nbytes is %zu, needs a multiple of %d",
                      desc->workspace_nbytes, MFSDP_ALIGN_NBYTES);
  if (desc->symmetric_from < 1)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "cuda backend: desc.symmetric_from is %lld, needs at least 1",
                      (long long)desc->symmetric_from);
  return MFSDP_OK;
}

/* That there is such a device, that it has what we use, and that kernels.cu was compiled for it. */
MFSDP_API mfsdp_status mfsdp__cuda_device_check(mfsdp_context *context, mfsdp_cuda_backend *cuda) {
  int count = 0, pools = 0, processors = 0;
  MFSDP_TRY(mfsdp__cuda_check(context, cudaGetDeviceCount(&count), "cudaGetDeviceCount"));
  if (cuda->device < 0 || cuda->device >= count)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "cuda backend: desc.device is %d of %d devices",
                      (int)cuda->device, count);
  MFSDP_TRY(mfsdp__cuda_check_device(cuda, context, "cuda backend"));
  MFSDP_TRY(mfsdp__cuda_check(
      context, cudaDeviceGetAttribute(&pools, cudaDevAttrMemoryPoolsSupported, cuda->device),
      "cudaDeviceGetAttribute"));
  if (!pools)
    return MFSDP_FAIL(context, MFSDP_E_UNSUPPORTED,
                      "cuda backend: device %d has no stream-ordered memory", (int)cuda->device);
  MFSDP_TRY(mfsdp__cuda_check(
      context, cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, cuda->device),
      "cudaDeviceGetAttribute"));
  cuda->block_limit = processors * 8; /* 2048 threads each */
  return mfsdp__cuda_check(context, (cudaError_t)cuda->kernels->probe(), "kernels.cu");
}

/* A pool that keeps its memory: training asks for the same sizes again. */
MFSDP_API mfsdp_status mfsdp__cuda_pool_make(mfsdp_context *context, mfsdp_cuda_backend *cuda) {
  struct cudaMemPoolProps properties;
  uint64_t threshold = UINT64_MAX;
  memset(&properties, 0, sizeof(properties));
  properties.allocType = cudaMemAllocationTypePinned;
  properties.location.type = cudaMemLocationTypeDevice;
  properties.location.id = cuda->device;
  MFSDP_TRY(
      mfsdp__cuda_check(context, cudaMemPoolCreate(&cuda->pool, &properties), "cudaMemPoolCreate"));
  cuda->owns_pool = 1;
  return mfsdp__cuda_check(
      context, cudaMemPoolSetAttribute(cuda->pool, cudaMemPoolAttrReleaseThreshold, &threshold),
      "cudaMemPoolSetAttribute");
}

MFSDP_API mfsdp_status mfsdp__cuda_backend_fill(mfsdp_context *context,
                                                const mfsdp_cuda_backend_desc *desc,
                                                mfsdp_cuda_backend *cuda) {
  MFSDP_TRY(mfsdp__cuda_device_check(context, cuda));
  cuda->pool = desc->pool;
  if (desc->pool == NULL) MFSDP_TRY(mfsdp__cuda_pool_make(context, cuda));
  MFSDP_TRY(mfsdp__cuda_check(
      context, cudaStreamCreateWithFlags(&cuda->memory_stream, cudaStreamNonBlocking),
      "cudaStreamCreateWithFlags"));
  cuda->blas = desc->blas;
  if (desc->blas != NULL) return MFSDP_OK;
  MFSDP_TRY(mfsdp__cublas_check(context, cublasCreate(&cuda->blas), "cublasCreate"));
  cuda->owns_blas = 1;
  return MFSDP_OK;
}

MFSDP_API void mfsdp__cuda_backend_free(mfsdp_context *context, mfsdp_cuda_backend *cuda) {
  if (cuda->owns_blas) (void)cublasDestroy(cuda->blas);
  if (cuda->owns_solver && cuda->solver != NULL) (void)cusolverDnDestroy(cuda->solver);
  mfsdp__cuda_notes_free(cuda, context);
  if (cuda->memory_stream != NULL) {
    const cudaError_t error = cudaStreamSynchronize(cuda->memory_stream); /* frees are on it */
    if (error != cudaSuccess) (void)mfsdp__cuda_fail(context, error, "cudaStreamSynchronize");
    (void)cudaStreamDestroy(cuda->memory_stream);
  }
  if (cuda->owns_pool) (void)cudaMemPoolDestroy(cuda->pool);
  mfsdp_table_free(context, cuda, 1, sizeof(*cuda));
}

/*
 * Makes a backend for the rank of `context`, which must outlive it. COMPLETE. The description is
 * copied. E_ARGUMENT, E_MEMORY; E_UNSUPPORTED without a driver, a device, or kernels for it;
 * E_BACKEND. *out is NULL then, and nothing is left behind.
 */
MFSDP_API mfsdp_status mfsdp_cuda_backend_create(mfsdp_context *context,
                                                 const mfsdp_cuda_backend_desc *desc,
                                                 mfsdp_cuda_backend **out) {
  mfsdp_cuda_backend *cuda;
  mfsdp_status status;
  void *memory;
  if (out == NULL) return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "cuda backend: out is NULL");
  *out = NULL;
  MFSDP_TRY(mfsdp__cuda_desc_check(context, desc));
  MFSDP_TRY(mfsdp_table_alloc(context, 1, sizeof(*cuda), "cuda backend", &memory));
  cuda = (mfsdp_cuda_backend *)memory;
  cuda->table.struct_nbytes = sizeof(cuda->table);
  cuda->table.ops = mfsdp__cuda_ops_table();
  cuda->table.self = cuda;
  cuda->context = context;
  cuda->kernels = mfsdp_cuda_kernels_v1();
  cuda->device = desc->device;
  cuda->check_pointers = desc->check_pointers;
  cuda->allow_tf32 = desc->allow_tf32;
  cuda->task_capacity = desc->task_capacity;
  cuda->symmetric_from = desc->symmetric_from;
  cuda->submit_timeout_us = desc->submit_timeout_us;
  cuda->workspace_nbytes = desc->workspace_nbytes;
  cuda->solver = desc->solver;
  cuda->owns_solver = desc->solver == NULL;
  status = mfsdp__cuda_backend_fill(context, desc, cuda);
  if (status != MFSDP_OK) {
    mfsdp__cuda_backend_free(context, cuda);
    return status;
  }
  *out = cuda;
  return MFSDP_OK;
}

/* E_STATE, and nothing is done, while queues or events of it exist. NULL is allowed. */
MFSDP_API mfsdp_status mfsdp_cuda_backend_destroy(mfsdp_context *context,
                                                  mfsdp_cuda_backend *cuda) {
  if (cuda == NULL) return MFSDP_OK;
  if (cuda->queue_count != 0 || cuda->event_count != 0)
    return MFSDP_FAIL(context, MFSDP_E_STATE,
                      "cuda backend: %d queues%s still exist; destroy them first",
                      (int)cuda->queue_count, cuda->event_count != 0 ? " and some events" : "");
  mfsdp__cuda_backend_free(context, cuda);
  return MFSDP_OK;
}

/* The table to hand to the library; valid until the backend is destroyed. */
MFSDP_API const mfsdp_backend *mfsdp_cuda_backend_get(const mfsdp_cuda_backend *cuda) {
  return &cuda->table;
}

/*
 * A queue on the caller's stream, which must outlive it and which queue_destroy synchronizes with but
 * does not destroy. Work that the caller puts into the stream itself is in order with the queue's. Not
 * the default stream, which synchronizes with others: E_ARGUMENT, as for a stream of another device.
 */
MFSDP_API mfsdp_status mfsdp_cuda_queue_wrap(mfsdp_context *context, mfsdp_cuda_backend *cuda,
                                             cudaStream_t stream, const char *label,
                                             mfsdp_queue **out) {
  int device = -1;
  if (out == NULL) return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "queue_wrap: out is NULL");
  *out = NULL;
  if (stream == NULL || stream == cudaStreamLegacy || stream == cudaStreamPerThread)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "queue_wrap: stream is a default stream");
  MFSDP_TRY(
      mfsdp__cuda_check(context, cudaStreamGetDevice(stream, &device), "cudaStreamGetDevice"));
  if (device != cuda->device)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "queue_wrap: the stream is of device %d, this backend of %d", device,
                      (int)cuda->device);
  return mfsdp__cuda_queue_make(cuda, context, stream, label, out);
}

/* The stream of a queue, for the caller's own kernels. */
MFSDP_API cudaStream_t mfsdp_cuda_queue_stream(const mfsdp_queue *queue) {
  return ((const mfsdp__cuda_queue *)(const void *)queue)->stream;
}

#endif /* MFSDP_CUDA_BACKEND_CUDA_H */
