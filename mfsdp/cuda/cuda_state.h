/* SPDX-License-Identifier: MIT */
/*
 * cuda_state.h - what the parts of the CUDA backend share: its objects, and how errors of CUDA, cuBLAS
 * and cuSOLVER become statuses.
 *
 * Internal to backend_cuda.h. Link flags: -lcudart -lcublas -lcusolver.
 */
#ifndef MFSDP_CUDA_CUDA_STATE_H
#define MFSDP_CUDA_CUDA_STATE_H

#include "../backend_check.h"
#include "../posix/clock.h"
#include "kernels.h"

#include <cublas_v2.h>
#include <cuda_runtime_api.h>
#include <cusolverDn.h>

typedef struct mfsdp_cuda_backend mfsdp_cuda_backend;
typedef struct mfsdp__cuda_queue mfsdp__cuda_queue;

/* A task of queue_call on its way. */
typedef struct mfsdp__cuda_task {
  mfsdp__cuda_queue *queue;
  mfsdp_task task;
  void *argument;
  int64_t number;
} mfsdp__cuda_task;

struct mfsdp__cuda_queue {
  mfsdp_cuda_backend *cuda;
  const char *label;
  cudaStream_t stream;
  int32_t owns_stream;
  int64_t submitted; /* number of the last work; the first is 1 */
  mfsdp_cuda_lane lane;
  void *memory; /* DEVICE: the failure word, the scratch, cuBLAS's workspace */
  size_t memory_nbytes;
  void *workspace;
  cusolverDnHandle_t solver;           /* of this queue alone; NULL: it decomposed nothing yet */
  int32_t borrows_solver;              /* it is the caller's */
  mfsdp__cuda_task *tasks;             /* a ring of task_capacity */
  int64_t tasks_submitted, tasks_done; /* done: written by the driver's thread, atomically */
};

typedef struct mfsdp__cuda_event {
  cudaEvent_t handle;
  const mfsdp_cuda_note *note; /* of the queue that recorded it; NULL: never recorded */
  const char *label;           /* of that queue */
  int64_t number;              /* of the last work before it */
} mfsdp__cuda_event;

/* Notes of queues stay until the backend goes: events and other queues refer to them. */
#define MFSDP__CUDA_SLAB_NOTES 16
typedef struct mfsdp__cuda_slab {
  struct mfsdp__cuda_slab *next;
  mfsdp_cuda_note *notes; /* PINNED */
  int32_t used;
} mfsdp__cuda_slab;

struct mfsdp_cuda_backend {
  mfsdp_backend table;
  mfsdp_context *context; /* of the rank's own thread; touched by calls, never by the driver's */
  const mfsdp_cuda_kernels *kernels;
  int32_t device, owns_blas, owns_pool, check_pointers, allow_tf32, task_capacity, block_limit;
  int64_t symmetric_from, submit_timeout_us;
  size_t workspace_nbytes;
  cublasHandle_t blas;
  const void *blas_queue;    /* whose stream and workspace `blas` has */
  cusolverDnHandle_t solver; /* is asked for sizes; NULL: nobody wanted one yet */
  int32_t owns_solver;       /* 0: it is the caller's, and one queue at a time has it */
  int32_t solver_taken;      /* a queue has it */
  cudaMemPool_t pool;
  cudaStream_t memory_stream; /* allocations come and go on it */
  mfsdp__cuda_slab *slabs;
  int32_t queue_count, event_count;
  cudaEvent_t nccl_order;   /* behind the last group of any communicator of this device */
  cudaStream_t nccl_stream; /* where that was; NULL: there was none */
  int32_t nccl_count;       /* transports that use it */
};

/* ---- errors ---- */

MFSDP_API mfsdp_status mfsdp__cuda_status(cudaError_t error) {
  switch (error) {
  case cudaSuccess: return MFSDP_OK;
  case cudaErrorMemoryAllocation: return MFSDP_E_MEMORY;
  case cudaErrorNoDevice:
  case cudaErrorInsufficientDriver:
  case cudaErrorStubLibrary:
  case cudaErrorSystemDriverMismatch:
  case cudaErrorNoKernelImageForDevice:
  case cudaErrorUnsupportedPtxVersion: return MFSDP_E_UNSUPPORTED;
  default: return MFSDP_E_BACKEND;
  }
}

/* What the user can do about it; "" if nobody can say. */
MFSDP_API const char *mfsdp__cuda_advice(cudaError_t error) {
  switch (error) {
  case cudaErrorNoDevice: return "; no GPU is visible: nvidia-smi, CUDA_VISIBLE_DEVICES";
  case cudaErrorInsufficientDriver:
  case cudaErrorStubLibrary:
  case cudaErrorSystemDriverMismatch:
    return "; there is no NVIDIA driver, or one older than this CUDA";
  case cudaErrorNoKernelImageForDevice:
  case cudaErrorUnsupportedPtxVersion:
    return "; compile mfsdp/cuda/kernels.cu for this device: nvcc -arch=...";
  case cudaErrorIllegalAddress:
  case cudaErrorLaunchFailure:
  case cudaErrorMisalignedAddress:
    return "; earlier work went wrong and the process cannot use the device any more: run it under "
           "compute-sanitizer";
  default: return "";
  }
}

/* Records what `call` returned; the error does not stay behind for the caller's own checks. */
MFSDP_API mfsdp_status mfsdp__cuda_fail(mfsdp_context *context, cudaError_t error,
                                        const char *call) {
  (void)cudaGetLastError();
  return MFSDP_FAIL(context, mfsdp__cuda_status(error), "%s: %s (%s)%s", call,
                    cudaGetErrorName(error), cudaGetErrorString(error), mfsdp__cuda_advice(error));
}

MFSDP_API mfsdp_status mfsdp__cuda_check(mfsdp_context *context, cudaError_t error,
                                         const char *call) {
  return error == cudaSuccess ? MFSDP_OK : mfsdp__cuda_fail(context, error, call);
}

/* cudaEventQuery. That work is not done yet is no error, and is not to stay behind as one, where
 * CUDA remembers it. */
MFSDP_API cudaError_t mfsdp__cuda_event_state(cudaEvent_t event) {
  const cudaError_t state = cudaEventQuery(event);
  if (state == cudaErrorNotReady && cudaPeekAtLastError() == state) (void)cudaGetLastError();
  return state;
}

MFSDP_API mfsdp_status mfsdp__cublas_check(mfsdp_context *context, cublasStatus_t error,
                                           const char *call) {
  if (error == CUBLAS_STATUS_SUCCESS) return MFSDP_OK;
  (void)cudaGetLastError();
  return MFSDP_FAIL(context,
                    error == CUBLAS_STATUS_ALLOC_FAILED    ? MFSDP_E_MEMORY
                    : error == CUBLAS_STATUS_NOT_SUPPORTED ? MFSDP_E_UNSUPPORTED
                                                           : MFSDP_E_BACKEND,
                    "%s: %s", call, cublasGetStatusName(error));
}

MFSDP_API const char *mfsdp__cusolver_name(cusolverStatus_t status) {
  switch (status) {
  case CUSOLVER_STATUS_NOT_INITIALIZED: return "CUSOLVER_STATUS_NOT_INITIALIZED";
  case CUSOLVER_STATUS_ALLOC_FAILED: return "CUSOLVER_STATUS_ALLOC_FAILED";
  case CUSOLVER_STATUS_INVALID_VALUE: return "CUSOLVER_STATUS_INVALID_VALUE";
  case CUSOLVER_STATUS_ARCH_MISMATCH: return "CUSOLVER_STATUS_ARCH_MISMATCH";
  case CUSOLVER_STATUS_EXECUTION_FAILED: return "CUSOLVER_STATUS_EXECUTION_FAILED";
  case CUSOLVER_STATUS_INTERNAL_ERROR: return "CUSOLVER_STATUS_INTERNAL_ERROR";
  case CUSOLVER_STATUS_NOT_SUPPORTED: return "CUSOLVER_STATUS_NOT_SUPPORTED";
  default: return "a status of cuSOLVER";
  }
}

MFSDP_API mfsdp_status mfsdp__cusolver_check(mfsdp_context *context, cusolverStatus_t error,
                                             const char *call) {
  if (error == CUSOLVER_STATUS_SUCCESS) return MFSDP_OK;
  (void)cudaGetLastError();
  return MFSDP_FAIL(context,
                    error == CUSOLVER_STATUS_ALLOC_FAILED ? MFSDP_E_MEMORY
                    : error == CUSOLVER_STATUS_NOT_SUPPORTED ||
                            error == CUSOLVER_STATUS_ARCH_MISMATCH
                        ? MFSDP_E_UNSUPPORTED
                        : MFSDP_E_BACKEND,
                    "%s: %s (%d)", call, mfsdp__cusolver_name(error), (int)error);
}

/* A kernel's number is that of the work it belongs to. */
MFSDP_API const mfsdp_cuda_lane *mfsdp__cuda_lane(mfsdp__cuda_queue *queue) {
  queue->lane.number = ++queue->submitted;
  return &queue->lane;
}

MFSDP_API mfsdp_status mfsdp__cuda_launched(mfsdp_cuda_backend *cuda, int error,
                                            const char *entry) {
  return mfsdp__cuda_check(cuda->context, (cudaError_t)error, entry);
}

#define MFSDP__CUDA_FAIL(cuda, status, ...) MFSDP_FAIL((cuda)->context, (status), __VA_ARGS__)

#endif /* MFSDP_CUDA_CUDA_STATE_H */
