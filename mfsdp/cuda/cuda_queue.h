/* SPDX-License-Identifier: MIT */
/*
 * cuda_queue.h - memory, queues, events and tasks of the CUDA backend: pools and pinned memory,
 * streams, CUDA events, host functions.
 *
 * Failure travels as in the host backend, without the host in the way: the failed work leaves its
 * number in a word of device memory, which all kernels behind it read, and what was wrong in a note
 * in pinned memory, which the host reads when an event has passed. A queue that waits for an event
 * runs one small kernel that takes a failure over. Copies, fills and cuBLAS run behind a failure as
 * before, on memory whose contents are then undefined.
 *
 * Internal to backend_cuda.h. Link flags: -lcudart.
 */
#ifndef MFSDP_CUDA_CUDA_QUEUE_H
#define MFSDP_CUDA_CUDA_QUEUE_H

#include "cuda_state.h"

/* ---- checks ---- */

/* Streams belong to a device, and CUDA works on the calling thread's current one. */
MFSDP_API mfsdp_status mfsdp__cuda_check_device(const mfsdp_cuda_backend *cuda,
                                                mfsdp_context *context, const char *entry) {
  int current = -1;
  MFSDP_TRY(mfsdp__cuda_check(context, cudaGetDevice(&current), "cudaGetDevice"));
  if (current == cuda->device) return MFSDP_OK;
  return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                    "%s: the calling thread's device is %d, this backend's is %d (cudaSetDevice)",
                    entry, current, (int)cuda->device);
}

MFSDP_API mfsdp_status mfsdp__cuda_check_queue(mfsdp_cuda_backend *cuda, const char *entry,
                                               const mfsdp_queue *queue) {
  MFSDP_TRY(mfsdp__check_queue(cuda->context, entry, queue));
  return mfsdp__cuda_check_device(cuda, cuda->context, entry);
}

/* With desc.check_pointers: that a pointer is what the call takes it for. NULL passes. */
MFSDP_API mfsdp_status mfsdp__cuda_check_pointer(mfsdp_cuda_backend *cuda, const char *entry,
                                                 const char *what, const void *pointer,
                                                 mfsdp_space space) {
  struct cudaPointerAttributes attributes;
  int device;
  if (!cuda->check_pointers || pointer == NULL) return MFSDP_OK;
  MFSDP_TRY(mfsdp__cuda_check(cuda->context, cudaPointerGetAttributes(&attributes, pointer),
                              "cudaPointerGetAttributes"));
  device = attributes.type == cudaMemoryTypeDevice || attributes.type == cudaMemoryTypeManaged;
  if (device && space == MFSDP_SPACE_DEVICE && attributes.device != cuda->device)
    return MFSDP__CUDA_FAIL(cuda, MFSDP_E_ARGUMENT, "%s: %s lies on device %d, the queue on %d",
                            entry, what, attributes.device, (int)cuda->device);
  if (device != (space == MFSDP_SPACE_DEVICE))
    return MFSDP__CUDA_FAIL(cuda, MFSDP_E_ARGUMENT, "%s: %s is %s memory, needs %s memory", entry,
                            what, device ? "device" : "host", device ? "host" : "device");
  return MFSDP_OK;
}

/* ---- memory ---- */

/* COMPLETE: the stream has nothing but allocations, and whoever uses the memory is submitted later.
 */
MFSDP_API mfsdp_status mfsdp__cuda_device_alloc(mfsdp_cuda_backend *cuda, mfsdp_context *context,
                                                size_t nbytes, void **out) {
  cudaError_t error = cudaMallocFromPoolAsync(out, nbytes, cuda->pool, cuda->memory_stream);
  if (error == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();
    return MFSDP_FAIL(context, MFSDP_E_MEMORY, "mem_alloc: the device has no %zu bytes left",
                      nbytes);
  }
  MFSDP_TRY(mfsdp__cuda_check(context, error, "cudaMallocFromPoolAsync"));
  error = cudaStreamSynchronize(cuda->memory_stream);
  if (error == cudaSuccess) return MFSDP_OK;
  (void)cudaFreeAsync(*out, cuda->memory_stream);
  *out = NULL;
  return mfsdp__cuda_fail(context, error, "cudaStreamSynchronize");
}

MFSDP_API mfsdp_status mfsdp__cuda_mem_alloc(void *self, mfsdp_context *context, size_t nbytes,
                                             size_t alignment, mfsdp_space space, void **out) {
  mfsdp_cuda_backend *cuda = (mfsdp_cuda_backend *)self;
  const mfsdp_allocator *allocator = &context->desc.allocator;
  MFSDP_TRY(mfsdp__check_alloc(context, nbytes, alignment, space, out));
  if (space == MFSDP_SPACE_HOST) {
    *out = allocator->alloc(nbytes, alignment, space, allocator->user);
    if (*out != NULL) return MFSDP_OK;
    return MFSDP_FAIL(context, MFSDP_E_MEMORY, "mem_alloc: the allocator refused %zu bytes",
                      nbytes);
  }
  if (alignment > MFSDP_ALIGN_NBYTES)
    return MFSDP_FAIL(context, MFSDP_E_UNSUPPORTED,
                      "mem_alloc: alignment %zu; CUDA's memory is aligned to %d", alignment,
                      MFSDP_ALIGN_NBYTES);
  MFSDP_TRY(mfsdp__cuda_check_device(cuda, context, "mem_alloc"));
  if (space == MFSDP_SPACE_DEVICE) return mfsdp__cuda_device_alloc(cuda, context, nbytes, out);
  return mfsdp__cuda_check(context,
                           cudaHostAlloc(out, nbytes, cudaHostAllocPortable | cudaHostAllocMapped),
                           "cudaHostAlloc");
}

MFSDP_API void mfsdp__cuda_mem_free(void *self, mfsdp_context *context, void *ptr, size_t nbytes,
                                    mfsdp_space space) {
  mfsdp_cuda_backend *cuda = (mfsdp_cuda_backend *)self;
  cudaError_t error = cudaSuccess;
  if (ptr == NULL) return;
  if (space == MFSDP_SPACE_HOST)
    context->desc.allocator.free(ptr, nbytes, space, context->desc.allocator.user);
  else if (space == MFSDP_SPACE_PINNED)
    error = cudaFreeHost(ptr);
  else
    error = cudaFreeAsync(ptr, cuda->memory_stream);
  if (error != cudaSuccess) (void)mfsdp__cuda_fail(context, error, "mem_free");
}

/* ---- notes ---- */

MFSDP_API mfsdp_status mfsdp__cuda_note_take(mfsdp_cuda_backend *cuda, mfsdp_context *context,
                                             mfsdp_cuda_note **out) {
  mfsdp__cuda_slab *slab = cuda->slabs;
  const size_t nbytes = MFSDP__CUDA_SLAB_NOTES * sizeof(**out);
  void *memory, *notes;
  if (slab == NULL || slab->used == MFSDP__CUDA_SLAB_NOTES) {
    mfsdp_status status;
    MFSDP_TRY(mfsdp_table_alloc(context, 1, sizeof(*slab), "notes of queues", &memory));
    slab = (mfsdp__cuda_slab *)memory;
    status = mfsdp__cuda_mem_alloc(cuda, context, nbytes, MFSDP_ALIGN_NBYTES, MFSDP_SPACE_PINNED,
                                   &notes);
    if (status != MFSDP_OK) {
      mfsdp_table_free(context, memory, 1, sizeof(*slab));
      return status;
    }
    memset(notes, 0, nbytes);
    slab->notes = (mfsdp_cuda_note *)notes;
    slab->next = cuda->slabs;
    cuda->slabs = slab;
  }
  *out = &slab->notes[slab->used++];
  return MFSDP_OK;
}

MFSDP_API void mfsdp__cuda_notes_free(mfsdp_cuda_backend *cuda, mfsdp_context *context) {
  while (cuda->slabs != NULL) {
    mfsdp__cuda_slab *slab = cuda->slabs;
    cuda->slabs = slab->next;
    mfsdp__cuda_mem_free(cuda, context, slab->notes, MFSDP__CUDA_SLAB_NOTES * sizeof(*slab->notes),
                         MFSDP_SPACE_PINNED);
    mfsdp_table_free(context, slab, 1, sizeof(*slab));
  }
}

MFSDP_API const char *mfsdp__cuda_item_text(int64_t fault) {
  switch (fault) {
#define MFSDP__CUDA_ITEM_TEXT(suffix, text) \
  case MFSDP_CUDA_ITEM_##suffix: return text;
    MFSDP_CUDA_ITEM_FAULTS(MFSDP__CUDA_ITEM_TEXT)
#undef MFSDP__CUDA_ITEM_TEXT
  default: return "a fault";
  }
}

/* Of a routine of cuSOLVER, by the info that it left. */
MFSDP_API mfsdp_status mfsdp__cuda_solver_error(const mfsdp_cuda_note *note, mfsdp_error *error) {
  static const char *const routines[] = {"cusolverDnSsyevd", "cusolverDnSgeqrf",
                                         "cusolverDnSorgqr"};
  const char *name = routines[note->index >= 0 && note->index < 3 ? note->index : 0];
  const long long info = (long long)note->detail[0], n = (long long)note->detail[1];
  return note->index == 0
             ? MFSDP_ERROR_SET(error, MFSDP_E_BACKEND, -1,
                               "eigh: %s returned %lld for a matrix of %lld x %lld: no convergence",
                               name, info, n, n)
             : MFSDP_ERROR_SET(error, MFSDP_E_BACKEND, -1, "qr: %s returned %lld for %lld x %lld",
                               name, info, n, n);
}

/* The error that a note stands for, if it stands for work up to `number`; else MFSDP_OK. */
MFSDP_API mfsdp_status mfsdp__cuda_note_error(const mfsdp_cuda_note *note, int64_t number,
                                              mfsdp_error *error) {
  const int64_t failed_at = __atomic_load_n(&note->failed_at, __ATOMIC_ACQUIRE);
  *error = mfsdp_error_none();
  if (failed_at == 0 || failed_at > number) return MFSDP_OK;
  if (note->origin != NULL) note = note->origin;
  if (note->fault == MFSDP_CUDA_FAULT_BLOCK)
    return MFSDP_ERROR_SET(error, MFSDP_E_ARGUMENT, -1,
                           "sumsq: block %d has first %lld, count %lld, slot %d", (int)note->index,
                           (long long)note->detail[0], (long long)note->detail[1],
                           (int)note->detail[2]);
  if (note->fault == MFSDP_CUDA_FAULT_ITEM)
    return MFSDP_ERROR_SET(error, MFSDP_E_ARGUMENT, -1, "fused: item %d has %s", (int)note->index,
                           mfsdp__cuda_item_text(note->detail[0]));
  if (note->fault == MFSDP_CUDA_FAULT_SOLVER) return mfsdp__cuda_solver_error(note, error);
  if (note->fault == MFSDP_CUDA_FAULT_PRECONDITION_STEPS)
    return MFSDP_ERROR_SET(
        error, MFSDP_E_ARGUMENT, -1,
        "precondition: applied_steps is %lld; Shampoo's corrections count from 1",
        (long long)note->detail[0]);
  if (note->fault == MFSDP_CUDA_FAULT_STEPS)
    return MFSDP_ERROR_SET(error, MFSDP_E_ARGUMENT, -1,
                           "fused: applied_steps is %lld; AdamW's bias correction counts from 1",
                           (long long)note->detail[0]);
  *error = note->error;
  return error->status;
}

/* ---- queues ---- */

#define MFSDP__CUDA_SCRATCH_NBYTES (MFSDP_CUDA_SCRATCH_COUNT * sizeof(double))

/* What a queue has on the device: the failure word, the scratch, cuBLAS's workspace. */
MFSDP_API mfsdp_status mfsdp__cuda_queue_memory(mfsdp_cuda_backend *cuda, mfsdp_context *context,
                                                mfsdp__cuda_queue *queue) {
  const size_t nbytes = MFSDP_ALIGN_NBYTES + MFSDP__CUDA_SCRATCH_NBYTES + cuda->workspace_nbytes;
  unsigned char *memory;
  MFSDP_TRY(mfsdp__cuda_device_alloc(cuda, context, nbytes, &queue->memory));
  queue->memory_nbytes = nbytes;
  mfsdp_memory_book(context, MFSDP_MEMORY_WORKSPACE, nbytes);
  memory = (unsigned char *)queue->memory;
  queue->lane.failed = (int64_t *)queue->memory;
  queue->lane.scratch = (double *)(void *)(memory + MFSDP_ALIGN_NBYTES);
  queue->workspace = memory + MFSDP_ALIGN_NBYTES + MFSDP__CUDA_SCRATCH_NBYTES;
  return mfsdp__cuda_check(context,
                           cudaMemsetAsync(queue->memory, 0, MFSDP_ALIGN_NBYTES, queue->stream),
                           "cudaMemsetAsync");
}

MFSDP_API void mfsdp__cuda_queue_free(mfsdp_cuda_backend *cuda, mfsdp_context *context,
                                      mfsdp__cuda_queue *queue) {
  if (queue->memory != NULL) {
    mfsdp_memory_unbook(context, MFSDP_MEMORY_WORKSPACE, queue->memory_nbytes);
    mfsdp__cuda_mem_free(cuda, context, queue->memory, queue->memory_nbytes, MFSDP_SPACE_DEVICE);
  }
  if (queue->owns_stream && queue->stream != NULL) (void)cudaStreamDestroy(queue->stream);
  if (cuda->blas_queue == queue) cuda->blas_queue = NULL;
  if (queue->borrows_solver)
    cuda->solver_taken = 0;
  else if (queue->solver != NULL)
    (void)cusolverDnDestroy(queue->solver);
  mfsdp_table_free(context, queue->tasks, (size_t)cuda->task_capacity, sizeof(*queue->tasks));
  mfsdp_table_free(context, queue, 1, sizeof(*queue));
}

/* stream NULL: one of our own. */
MFSDP_API mfsdp_status mfsdp__cuda_queue_fill(mfsdp_cuda_backend *cuda, mfsdp_context *context,
                                              cudaStream_t stream, mfsdp__cuda_queue *queue) {
  void *memory;
  MFSDP_TRY(mfsdp_table_alloc(context, (size_t)cuda->task_capacity, sizeof(*queue->tasks),
                              "tasks of a queue", &memory));
  queue->tasks = (mfsdp__cuda_task *)memory;
  MFSDP_TRY(mfsdp__cuda_note_take(cuda, context, &queue->lane.note));
  queue->stream = stream;
  if (stream == NULL) {
    MFSDP_TRY(mfsdp__cuda_check(context,
                                cudaStreamCreateWithFlags(&queue->stream, cudaStreamNonBlocking),
                                "cudaStreamCreateWithFlags"));
    queue->owns_stream = 1;
  }
  queue->lane.stream = queue->stream;
  queue->lane.block_limit = cuda->block_limit;
  return mfsdp__cuda_queue_memory(cuda, context, queue);
}

MFSDP_API mfsdp_status mfsdp__cuda_queue_make(mfsdp_cuda_backend *cuda, mfsdp_context *context,
                                              cudaStream_t stream, const char *label,
                                              mfsdp_queue **out) {
  mfsdp__cuda_queue *queue;
  mfsdp_status status;
  void *memory;
  if (out == NULL) return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "queue_create: out is NULL");
  *out = NULL;
  MFSDP_TRY(mfsdp__cuda_check_device(cuda, context, "queue_create"));
  MFSDP_TRY(mfsdp_table_alloc(context, 1, sizeof(*queue), "queue", &memory));
  queue = (mfsdp__cuda_queue *)memory;
  queue->cuda = cuda;
  queue->label = label != NULL ? label : "queue";
  status = mfsdp__cuda_queue_fill(cuda, context, stream, queue);
  if (status != MFSDP_OK) {
    if (queue->memory != NULL) (void)cudaStreamSynchronize(queue->stream);
    mfsdp__cuda_queue_free(cuda, context, queue);
    return status;
  }
  ++cuda->queue_count;
  *out = (mfsdp_queue *)(void *)queue;
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__cuda_queue_create(void *self, mfsdp_context *context,
                                                const char *label, mfsdp_queue **out) {
  return mfsdp__cuda_queue_make((mfsdp_cuda_backend *)self, context, NULL, label, out);
}

/* Work that is still there is done first: its memory goes. */
MFSDP_API void mfsdp__cuda_queue_destroy(void *self, mfsdp_context *context, mfsdp_queue *opaque) {
  mfsdp_cuda_backend *cuda = (mfsdp_cuda_backend *)self;
  mfsdp__cuda_queue *queue = (mfsdp__cuda_queue *)(void *)opaque;
  cudaError_t error;
  if (queue == NULL) return;
  error = cudaStreamSynchronize(queue->stream);
  if (error != cudaSuccess) (void)mfsdp__cuda_fail(context, error, "queue_destroy");
  mfsdp__cuda_queue_free(cuda, context, queue);
  --cuda->queue_count;
}

/* ---- events ---- */

MFSDP_API mfsdp_status mfsdp__cuda_event_create(void *self, mfsdp_context *context,
                                                mfsdp_event **out) {
  mfsdp_cuda_backend *cuda = (mfsdp_cuda_backend *)self;
  mfsdp__cuda_event *event;
  cudaError_t error;
  void *memory;
  if (out == NULL) return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "event_create: out is NULL");
  *out = NULL;
  MFSDP_TRY(mfsdp__cuda_check_device(cuda, context, "event_create"));
  MFSDP_TRY(mfsdp_table_alloc(context, 1, sizeof(*event), "event", &memory));
  event = (mfsdp__cuda_event *)memory;
  error = cudaEventCreateWithFlags(&event->handle, cudaEventDisableTiming);
  if (error != cudaSuccess) {
    mfsdp_table_free(context, event, 1, sizeof(*event));
    return mfsdp__cuda_fail(context, error, "cudaEventCreateWithFlags");
  }
  ++cuda->event_count;
  *out = (mfsdp_event *)(void *)event;
  return MFSDP_OK;
}

MFSDP_API void mfsdp__cuda_event_destroy(void *self, mfsdp_context *context, mfsdp_event *opaque) {
  mfsdp_cuda_backend *cuda = (mfsdp_cuda_backend *)self;
  mfsdp__cuda_event *event = (mfsdp__cuda_event *)(void *)opaque;
  cudaError_t error;
  if (event == NULL) return;
  error = cudaEventDestroy(event->handle);
  if (error != cudaSuccess) (void)mfsdp__cuda_fail(context, error, "event_destroy");
  mfsdp_table_free(context, event, 1, sizeof(*event));
  --cuda->event_count;
}

MFSDP_API mfsdp_status mfsdp__cuda_event_record(void *self, mfsdp_queue *opaque_queue,
                                                mfsdp_event *opaque) {
  mfsdp_cuda_backend *cuda = (mfsdp_cuda_backend *)self;
  mfsdp__cuda_queue *queue = (mfsdp__cuda_queue *)(void *)opaque_queue;
  mfsdp__cuda_event *event = (mfsdp__cuda_event *)(void *)opaque;
  MFSDP_TRY(mfsdp__cuda_check_queue(cuda, "event_record", opaque_queue));
  if (event == NULL) return MFSDP__CUDA_FAIL(cuda, MFSDP_E_ARGUMENT, "event_record: event is NULL");
  MFSDP_TRY(mfsdp__cuda_check(cuda->context, cudaEventRecord(event->handle, queue->stream),
                              "cudaEventRecord"));
  event->note = queue->lane.note;
  event->label = queue->label;
  event->number = queue->submitted;
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__cuda_queue_wait(void *self, mfsdp_queue *opaque_queue,
                                              mfsdp_event *opaque) {
  mfsdp_cuda_backend *cuda = (mfsdp_cuda_backend *)self;
  mfsdp__cuda_queue *queue = (mfsdp__cuda_queue *)(void *)opaque_queue;
  mfsdp__cuda_event *event = (mfsdp__cuda_event *)(void *)opaque;
  MFSDP_TRY(mfsdp__cuda_check_queue(cuda, "queue_wait", opaque_queue));
  if (event == NULL) return MFSDP__CUDA_FAIL(cuda, MFSDP_E_ARGUMENT, "queue_wait: event is NULL");
  if (event->note == NULL || event->note == queue->lane.note) return MFSDP_OK;
  MFSDP_TRY(mfsdp__cuda_check(cuda->context, cudaStreamWaitEvent(queue->stream, event->handle, 0),
                              "cudaStreamWaitEvent"));
  return mfsdp__cuda_launched(
      cuda, cuda->kernels->pull(mfsdp__cuda_lane(queue), event->note, event->number), "queue_wait");
}

MFSDP_API mfsdp_status mfsdp__cuda_event_query(void *self, mfsdp_event *opaque, int32_t *done) {
  mfsdp_cuda_backend *cuda = (mfsdp_cuda_backend *)self;
  mfsdp__cuda_event *event = (mfsdp__cuda_event *)(void *)opaque;
  cudaError_t error;
  if (event == NULL || done == NULL)
    return MFSDP__CUDA_FAIL(cuda, MFSDP_E_ARGUMENT, "event_query: %s is NULL",
                            event == NULL ? "event" : "done");
  *done = 1;
  if (event->note == NULL) return MFSDP_OK;
  error = mfsdp__cuda_event_state(event->handle);
  *done = error == cudaSuccess;
  if (error == cudaSuccess || error == cudaErrorNotReady) return MFSDP_OK;
  return mfsdp__cuda_fail(cuda->context, error, "cudaEventQuery");
}

/* Sleeps between looks, longer and longer: CUDA has no wait with a deadline. */
#define MFSDP__CUDA_FIRST_SLEEP_US 10
#define MFSDP__CUDA_LAST_SLEEP_US 200

MFSDP_API mfsdp_status mfsdp__cuda_event_wait(void *self, mfsdp_context *context,
                                              mfsdp_event *opaque, int64_t timeout_us) {
  mfsdp__cuda_event *event = (mfsdp__cuda_event *)(void *)opaque;
  const int64_t deadline_us = mfsdp_clock_deadline_us(timeout_us);
  int64_t sleep_us = MFSDP__CUDA_FIRST_SLEEP_US;
  mfsdp_error error;
  (void)self;
  if (event == NULL) return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "event_wait: event is NULL");
  if (event->note == NULL) return MFSDP_OK;
  for (;;) {
    const cudaError_t now = mfsdp__cuda_event_state(event->handle);
    if (now == cudaSuccess) break;
    if (now != cudaErrorNotReady) return mfsdp__cuda_fail(context, now, "cudaEventQuery");
    if (mfsdp_clock_us() >= deadline_us)
      return MFSDP_FAIL(context, MFSDP_E_TIMEOUT,
                        "event_wait: queue %s did not reach the event in %lld us: it stands behind "
                        "%lld pieces of work",
                        event->label, (long long)timeout_us, (long long)event->number);
    mfsdp_clock_sleep_until(mfsdp_clock_us() + sleep_us);
    if (sleep_us < MFSDP__CUDA_LAST_SLEEP_US) sleep_us *= 2;
  }
  if (mfsdp__cuda_note_error(event->note, event->number, &error) == MFSDP_OK) return MFSDP_OK;
  return mfsdp_context_take_error(context, &error);
}

/* ---- tasks, copies, fills ---- */

/* On a thread of the driver. */
MFSDP_API void CUDART_CB mfsdp__cuda_run_task(void *argument) {
  const mfsdp__cuda_task *task = (const mfsdp__cuda_task *)argument;
  mfsdp__cuda_queue *queue = task->queue;
  mfsdp_cuda_note *note = queue->lane.note;
  mfsdp_error error = mfsdp_error_none();
  mfsdp_status status;
  if (note->failed_at == 0) {
    status = task->task(task->argument, &error);
    if (status != MFSDP_OK) {
      if (error.status == MFSDP_OK)
        (void)MFSDP_ERROR_SET(&error, status, -1, "queue %s: a task returned %s without a message",
                              queue->label, mfsdp_status_name(status));
      error.status = status;
      note->error = error;
      note->fault = MFSDP_CUDA_FAULT_TASK;
      note->origin = NULL;
      __atomic_store_n(&note->failed_at, task->number, __ATOMIC_RELEASE);
    }
  }
  (void)__atomic_add_fetch(&queue->tasks_done, 1, __ATOMIC_RELEASE);
}

/* Waits for room in the ring of tasks. */
MFSDP_API mfsdp_status mfsdp__cuda_task_room(mfsdp_cuda_backend *cuda, mfsdp__cuda_queue *queue) {
  const int64_t deadline_us = mfsdp_clock_deadline_us(cuda->submit_timeout_us);
  while (queue->tasks_submitted - __atomic_load_n(&queue->tasks_done, __ATOMIC_ACQUIRE) >=
         cuda->task_capacity) {
    if (mfsdp_clock_us() >= deadline_us)
      return MFSDP__CUDA_FAIL(cuda, MFSDP_E_TIMEOUT,
                              "queue %s: its %d tasks stayed for %lld us (task_capacity, "
                              "submit_timeout_us)",
                              queue->label, (int)cuda->task_capacity,
                              (long long)cuda->submit_timeout_us);
    mfsdp_clock_sleep_until(mfsdp_clock_us() + MFSDP__CUDA_LAST_SLEEP_US);
  }
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__cuda_queue_call(void *self, mfsdp_queue *opaque, mfsdp_task function,
                                              void *argument) {
  mfsdp_cuda_backend *cuda = (mfsdp_cuda_backend *)self;
  mfsdp__cuda_queue *queue = (mfsdp__cuda_queue *)(void *)opaque;
  enum cudaStreamCaptureStatus capture;
  mfsdp__cuda_task *task;
  MFSDP_TRY(mfsdp__cuda_check_queue(cuda, "queue_call", opaque));
  if (function == NULL) return MFSDP__CUDA_FAIL(cuda, MFSDP_E_ARGUMENT, "queue_call: task is NULL");
  MFSDP_TRY(mfsdp__cuda_check(cuda->context, cudaStreamIsCapturing(queue->stream, &capture),
                              "cudaStreamIsCapturing"));
  if (capture != cudaStreamCaptureStatusNone)
    return MFSDP__CUDA_FAIL(cuda, MFSDP_E_UNSUPPORTED,
                            "queue_call: queue %s is captured into a graph; a task runs once",
                            queue->label);
  MFSDP_TRY(mfsdp__cuda_task_room(cuda, queue));
  task = &queue->tasks[queue->tasks_submitted % cuda->task_capacity];
  task->queue = queue;
  task->task = function;
  task->argument = argument;
  task->number = mfsdp__cuda_lane(queue)->number;
  MFSDP_TRY(mfsdp__cuda_check(cuda->context,
                              cudaLaunchHostFunc(queue->stream, mfsdp__cuda_run_task, task),
                              "cudaLaunchHostFunc"));
  ++queue->tasks_submitted;
  return mfsdp__cuda_launched(
      cuda, cuda->kernels->pull(&queue->lane, queue->lane.note, queue->submitted), "queue_call");
}

MFSDP_API enum cudaMemcpyKind mfsdp__cuda_copy_kind(mfsdp_space dst, mfsdp_space src) {
  if (dst == MFSDP_SPACE_DEVICE)
    return src == MFSDP_SPACE_DEVICE ? cudaMemcpyDeviceToDevice : cudaMemcpyHostToDevice;
  return src == MFSDP_SPACE_DEVICE ? cudaMemcpyDeviceToHost : cudaMemcpyHostToHost;
}

MFSDP_API mfsdp_status mfsdp__cuda_copy(void *self, mfsdp_queue *opaque, void *dst,
                                        mfsdp_space dst_space, const void *src,
                                        mfsdp_space src_space, size_t nbytes) {
  mfsdp_cuda_backend *cuda = (mfsdp_cuda_backend *)self;
  mfsdp__cuda_queue *queue = (mfsdp__cuda_queue *)(void *)opaque;
  MFSDP_TRY(mfsdp__cuda_check_queue(cuda, "copy", opaque));
  MFSDP_TRY(mfsdp__check_copy(cuda->context, dst, dst_space, src, src_space, nbytes));
  if (nbytes == 0) return MFSDP_OK;
  MFSDP_TRY(mfsdp__cuda_check_pointer(cuda, "copy", "dst", dst, dst_space));
  MFSDP_TRY(mfsdp__cuda_check_pointer(cuda, "copy", "src", src, src_space));
  ++queue->submitted;
  return mfsdp__cuda_check(
      cuda->context,
      cudaMemcpyAsync(dst, src, nbytes, mfsdp__cuda_copy_kind(dst_space, src_space), queue->stream),
      "cudaMemcpyAsync");
}

MFSDP_API mfsdp_status mfsdp__cuda_fill_bytes(void *self, mfsdp_queue *opaque, void *dst,
                                              int32_t byte, size_t nbytes) {
  mfsdp_cuda_backend *cuda = (mfsdp_cuda_backend *)self;
  mfsdp__cuda_queue *queue = (mfsdp__cuda_queue *)(void *)opaque;
  MFSDP_TRY(mfsdp__cuda_check_queue(cuda, "fill_bytes", opaque));
  MFSDP_TRY(mfsdp__check_fill(cuda->context, dst, byte, nbytes));
  if (nbytes == 0) return MFSDP_OK;
  MFSDP_TRY(mfsdp__cuda_check_pointer(cuda, "fill_bytes", "dst", dst, MFSDP_SPACE_DEVICE));
  ++queue->submitted;
  return mfsdp__cuda_check(cuda->context, cudaMemsetAsync(dst, byte, nbytes, queue->stream),
                           "cudaMemsetAsync");
}

#endif /* MFSDP_CUDA_CUDA_QUEUE_H */
