/* SPDX-License-Identifier: MIT */
/*
 * transport_nccl.h - the transport over the caller's NCCL communicator: ranks with a GPU each.
 *
 *   ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
 *   config.blocking = 0;                           // or no deadline can be kept, see below
 *   ncclCommInitRankConfig(&comm, world, id, rank, &config);
 *   mfsdp_nccl_transport_desc desc = mfsdp_nccl_transport_desc_default();
 *   int32_t aborted = 0;
 *   desc.nonblocking = 1; desc.may_abort = 1; desc.aborted = &aborted;
 *   desc.rank = rank; desc.world = world;
 *   MFSDP_TRY(mfsdp_nccl_transport_wrap(context, cuda, comm, &desc, &transport));  // collective
 *   MFSDP_TRY(mfsdp_transport_submit(context, &transport, queue, &batch));         // ENQUEUED
 *   ...
 *   MFSDP_TRY(transport.ops->destroy(transport.self, context));          // before its backend
 *   if (!aborted) ncclCommDestroy(comm);
 *
 * STATUS: compiled and linked against NCCL, run on the host double of the test suite, not yet run
 * on hardware.
 *
 * A batch is grouped ncclSend and ncclRecv on the queue's own stream, in rounds of chunk_nbytes of
 * every transfer. NATIVE is one ncclBroadcast or ncclReduce for each part, grouped; sums are in
 * NCCL's order and in the layout's dtype. What is submitted behind a batch, on any queue that waits
 * for it, comes behind it. All communicators of a backend share one order on the device, whatever
 * their streams: the order of the calls, which must be the same on all ranks. Another backend on
 * the same device, and NCCL calls of your own, are not in it: put an event between. The first
 * message between two ranks makes a connection, for which NCCL waits in the call until both have
 * come; wrap connects all pairs. After wrap and reserve nothing of ours is allocated.
 *
 * Failure: an asynchronous error of NCCL, a group that runs for longer than deadline_us or a call
 * that does not end by then, a check word that differs, and `poison` end the transport: later calls
 * return E_POISONED with the first error. Found by `poll`, by submit, and by the watching thread
 * (watchdog_us). Where may_abort is set and the communicator does not block it is then aborted, by
 * that thread: its kernels end, what stands behind them in queues does nothing and fails at
 * event_wait with the first error. Where it is not, kernels that wait for a dead peer stay in their
 * stream for ever, and destroying its queue would wait for them: leave the process. A blocking
 * communicator also blocks in calls, beyond any deadline, when a peer does not come to a
 * connection. NCCL tells nobody which peer it waits for: a message names those of the batch, and
 * with desc.control those that do not answer. Peers of an aborted rank notice by their own
 * deadlines.
 * With check words (context option debug_check, on all ranks or none) every batch first exchanges
 * them, transfer by transfer, and its submit waits for that: for debugging. Batches of two ranks
 * must line up then.
 *
 * A stream that is captured into a graph is refused (E_UNSUPPORTED). Two ranks on one GPU: NCCL
 * refuses; transport_device.h serves them. NCCL may refuse more than 2048 transfers in a batch (its
 * manual named that limit up to 2.11).
 * Does not: make communicators (bootstrap.h), own the one it wraps, be a control plane, count
 * traffic. For one thread at a time.
 * Link: as backend_cuda.h, and -lnccl -lpthread. NCCL 2.19.3 or later. POSIX 2008: see
 * posix/clock.h.
 */
#ifndef MFSDP_CUDA_TRANSPORT_NCCL_H
#define MFSDP_CUDA_TRANSPORT_NCCL_H

#include "cuda_xfers.h"
#include "nccl_queue.h"

/* ---- what can be known to be wrong before anything is called ---- */

MFSDP_API mfsdp_status mfsdp__nccl_check_queue(const mfsdp__nccl_transport *t,
                                               mfsdp_context *context,
                                               const mfsdp__cuda_queue *queue, const char *label) {
  enum cudaStreamCaptureStatus capture;
  if (queue == NULL || queue->cuda != t->cuda)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "%s: the queue is %s", label,
                      queue == NULL ? "NULL" : "another backend's, not the transport's");
  MFSDP_TRY(mfsdp__cuda_check_device(t->cuda, context, label));
  MFSDP_TRY(mfsdp__cuda_check(context, cudaStreamIsCapturing(queue->stream, &capture),
                              "cudaStreamIsCapturing"));
  if (capture == cudaStreamCaptureStatusNone) return MFSDP_OK;
  return MFSDP_FAIL(context, MFSDP_E_UNSUPPORTED,
                    "%s: queue %s is captured into a graph, where nobody would see to deadlines",
                    label, queue->label);
}

/* ---- batches ---- */

/* What went wrong with the turn is the transport's first error unless it has one, and what comes
 * back. */
MFSDP_API mfsdp_status mfsdp__nccl_end(mfsdp__nccl_transport *t, mfsdp_context *context,
                                       mfsdp_status status) {
  mfsdp_error why;
  mfsdp__nccl_leave(t);
  if (status == MFSDP_OK) return status;
  if (status != MFSDP_E_POISONED) {
    why = *mfsdp_context_error(context);
    mfsdp__nccl_poison(t, &why);
  }
  if (mfsdp__nccl_first_error(t, &why) == MFSDP_OK) return status;
  return mfsdp_context_take_error(context, &why);
}

MFSDP_API mfsdp_status mfsdp__nccl_run(mfsdp__nccl_transport *t, mfsdp_context *context,
                                       mfsdp__cuda_queue *queue, const mfsdp_batch *batch,
                                       const char *label) {
  MFSDP_TRY(mfsdp__nccl_order_begin(t, context, queue->stream));
  if (batch->check != 0) MFSDP_TRY(mfsdp__nccl_compare(t, context, queue, batch, label));
  MFSDP_TRY(mfsdp__nccl_rounds(t, context, queue, batch, label));
  return mfsdp__nccl_order_end(t, context, queue->stream);
}

MFSDP_API mfsdp_status mfsdp__nccl_submit(void *self, mfsdp_context *context, mfsdp_queue *opaque,
                                          const mfsdp_batch *batch) {
  mfsdp__nccl_transport *t = (mfsdp__nccl_transport *)self;
  mfsdp__cuda_queue *queue = (mfsdp__cuda_queue *)(void *)opaque;
  const char *label = batch->label != NULL ? batch->label : "batch";
  mfsdp_error first;
  if (mfsdp__nccl_first_error(t, &first) != MFSDP_OK)
    return mfsdp__nccl_refuse(context, &first, label);
  MFSDP_TRY(mfsdp__nccl_check_queue(t, context, queue, label));
  MFSDP_TRY(mfsdp__cuda_check_xfers(t->cuda, context, batch, t->xfer_capacity, label));
  MFSDP_TRY(mfsdp__nccl_enter(t, context, label));
  if (batch->xfer_count == 0) return mfsdp__nccl_end(t, context, MFSDP_OK);
  return mfsdp__nccl_end(t, context, mfsdp__nccl_run(t, context, queue, batch, label));
}

/* ---- native collectives ---- */

/* Operations of one group. */
#define MFSDP__NCCL_NATIVE_GROUP 1024

typedef struct mfsdp__nccl_native {
  const mfsdp_native_args *args;
  ncclDataType_t type;
  int32_t first;
} mfsdp__nccl_native;

/* 0: NCCL has no such type. */
MFSDP_API int mfsdp__nccl_type(mfsdp_dtype dtype, ncclDataType_t *out) {
  switch (dtype) {
  case MFSDP_F32: *out = ncclFloat32; return 1;
  case MFSDP_F64: *out = ncclFloat64; return 1;
  case MFSDP_BF16: *out = ncclBfloat16; return 1;
  case MFSDP_F16: *out = ncclFloat16; return 1;
  default: return 0;
  }
}

MFSDP_API ncclResult_t mfsdp__nccl_fill_native(mfsdp__nccl_transport *t, cudaStream_t stream,
                                               void *work, uint8_t *peers) {
  const mfsdp__nccl_native *native = (const mfsdp__nccl_native *)work;
  const mfsdp_native_args *args = native->args;
  const size_t nbytes = mfsdp_dtype_nbytes(args->dtype);
  int32_t i, end = native->first + MFSDP__NCCL_NATIVE_GROUP;
  if (end > args->part_count) end = args->part_count;
  memset(peers, MFSDP__NCCL_IT_SENDS | MFSDP__NCCL_IT_RECEIVES, (size_t)t->world);
  peers[t->rank] = 0;
  for (i = native->first; i < end; ++i) {
    const mfsdp_native_part *part = &args->parts[i];
    const size_t at = (size_t)part->unit_offset * nbytes;
    ncclResult_t result;
    if (args->kind == MFSDP_NATIVE_GATHER) {
      unsigned char *full = (unsigned char *)args->dst + at;
      result = ncclBroadcast(full, full, (size_t)part->count, native->type, part->owner, t->comm,
                             stream);
    } else {
      unsigned char *sum = NULL;
      if (part->owner == t->rank)
        sum = (unsigned char *)args->dst + (size_t)part->shard_offset * nbytes;
      result = ncclReduce((const unsigned char *)args->src + at, sum, (size_t)part->count,
                          native->type, ncclSum, part->owner, t->comm, stream);
    }
    if (result != ncclSuccess && result != ncclInProgress) return result;
  }
  return ncclSuccess;
}

/* Ranks with other parts, or in another operation. */
MFSDP_API mfsdp_status mfsdp__nccl_compare_native(mfsdp__nccl_transport *t, mfsdp_context *context,
                                                  mfsdp__cuda_queue *queue,
                                                  const mfsdp_native_args *args) {
  mfsdp__nccl_head own;
  int32_t i;
  mfsdp__nccl_head_fill(&own, args->check, (uint64_t)args->form, t->rank, args->label);
  MFSDP_TRY(mfsdp__nccl_swap_with_all(t, context, queue, &own, args->label));
  for (i = 0; i < t->world - 1; ++i) {
    const mfsdp__nccl_head *other = &t->heads[t->head_capacity + i];
    if (other->check == own.check && other->nbytes == own.nbytes) continue;
    return MFSDP_FAIL(context, MFSDP_E_MISMATCH,
                      "rank %d is in native \"%.44s\" (form %llx, check %016llx), rank %d in "
                      "\"%.44s\" (form %llx, check %016llx): not the same operation",
                      (int)t->all[i].peer, other->label, (unsigned long long)other->nbytes,
                      (unsigned long long)other->check, (int)t->rank, own.label,
                      (unsigned long long)own.nbytes, (unsigned long long)own.check);
  }
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__nccl_run_native(mfsdp__nccl_transport *t, mfsdp_context *context,
                                              mfsdp__cuda_queue *queue,
                                              mfsdp__nccl_native *native) {
  const mfsdp_native_args *args = native->args;
  MFSDP_TRY(mfsdp__nccl_order_begin(t, context, queue->stream));
  if (args->check != 0 && t->world > 1)
    MFSDP_TRY(mfsdp__nccl_compare_native(t, context, queue, args));
  for (native->first = 0; native->first < args->part_count;
       native->first += MFSDP__NCCL_NATIVE_GROUP)
    MFSDP_TRY(mfsdp__nccl_group(t, context, queue, args->label, mfsdp__nccl_fill_native, native));
  return mfsdp__nccl_order_end(t, context, queue->stream);
}

MFSDP_API mfsdp_status mfsdp__nccl_native_submit(void *self, mfsdp_context *context,
                                                 mfsdp_queue *opaque,
                                                 const mfsdp_native_args *args) {
  mfsdp__nccl_transport *t = (mfsdp__nccl_transport *)self;
  mfsdp__cuda_queue *queue = (mfsdp__cuda_queue *)(void *)opaque;
  mfsdp__nccl_native native;
  mfsdp_error first;
  if (mfsdp__nccl_first_error(t, &first) != MFSDP_OK)
    return mfsdp__nccl_refuse(context, &first, args->label);
  MFSDP_TRY(mfsdp__nccl_check_queue(t, context, queue, args->label));
  MFSDP_TRY(mfsdp__cuda_check_pointer(t->cuda, args->label, "src", args->src, MFSDP_SPACE_DEVICE));
  MFSDP_TRY(mfsdp__cuda_check_pointer(t->cuda, args->label, "dst", args->dst, MFSDP_SPACE_DEVICE));
  native.args = args;
  native.first = 0;
  if (!mfsdp__nccl_type(args->dtype, &native.type))
    return MFSDP_FAIL(context, MFSDP_E_UNSUPPORTED, "%s: NCCL has no type for dtype %d",
                      args->label, (int)args->dtype);
  MFSDP_TRY(mfsdp__nccl_enter(t, context, args->label));
  return mfsdp__nccl_end(t, context, mfsdp__nccl_run_native(t, context, queue, &native));
}

/* The form is a hash of what all ranks must have alike; runs with check words compare it. */
MFSDP_API mfsdp_status mfsdp__nccl_native_prepare(void *self, mfsdp_context *context,
                                                  const mfsdp_native_args *args, int32_t *form) {
  uint64_t hash = mfsdp_hash_u64(MFSDP_HASH_SEED, (uint64_t)args->kind);
  ncclDataType_t type;
  int32_t i;
  (void)self;
  if (!mfsdp__nccl_type(args->dtype, &type))
    return MFSDP_FAIL(context, MFSDP_E_UNSUPPORTED, "%s: NCCL has no type for dtype %d",
                      args->label, (int)args->dtype);
  hash = mfsdp_hash_u64(hash, (uint64_t)args->dtype);
  for (i = 0; i < args->part_count; ++i) {
    hash = mfsdp_hash_u64(hash, (uint64_t)args->parts[i].owner);
    hash = mfsdp_hash_u64(hash, (uint64_t)args->parts[i].unit_offset);
    hash = mfsdp_hash_u64(hash, (uint64_t)args->parts[i].count);
  }
  *form = (int32_t)(hash & 0x7fffffffu);
  return MFSDP_OK;
}

/* ---- errors, registration ---- */

/* The first error itself. Looks for new ones unless another thread is at NCCL just now. Asks nobody,
 * since that takes time: only the watching thread's time-outs say who does not answer. */
MFSDP_API mfsdp_status mfsdp__nccl_poll(void *self, mfsdp_context *context) {
  mfsdp__nccl_transport *t = (mfsdp__nccl_transport *)self;
  mfsdp_error why;
  if (mfsdp__nccl_try_turn(t)) {
    const mfsdp_status status = mfsdp__nccl_look(t, 0, &why);
    mfsdp__nccl_leave(t);
    if (status != MFSDP_OK) mfsdp__nccl_poison(t, &why);
  }
  if (mfsdp__nccl_first_error(t, &why) == MFSDP_OK) return MFSDP_OK;
  return mfsdp_context_take_error(context, &why);
}

/* E_ARGUMENT, E_POISONED, E_STATE (a batch is in progress), or what NCCL says. */
MFSDP_API mfsdp_status mfsdp__nccl_register(void *self, mfsdp_context *context, void *ptr,
                                            size_t nbytes, void **handle) {
  mfsdp__nccl_transport *t = (mfsdp__nccl_transport *)self;
  mfsdp_status status;
  if (handle == NULL || ptr == NULL || nbytes == 0)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "buffer_register: %s",
                      handle == NULL ? "handle is NULL" : "no memory was given");
  *handle = NULL;
  if (!t->desc.register_buffers) return MFSDP_OK;
  MFSDP_TRY(mfsdp__cuda_check_pointer(t->cuda, "buffer_register", "ptr", ptr, MFSDP_SPACE_DEVICE));
  MFSDP_TRY(mfsdp__nccl_enter(t, context, "buffer_register"));
  status =
      mfsdp__nccl_check(t, context, ncclCommRegister(t->comm, ptr, nbytes, handle),
                        "buffer_register", "ncclCommRegister (register_buffers 0 does without)");
  mfsdp__nccl_leave(t);
  if (status == MFSDP_OK && *handle != NULL) ++t->registration_count;
  return status;
}

/* Before the memory is freed. After an abort there is nothing left to do. E_STATE: another call has
 * not ended by the deadline, as an abort does not while its stream hangs; the buffer must stay. */
MFSDP_API mfsdp_status mfsdp__nccl_deregister(void *self, mfsdp_context *context, void *handle) {
  mfsdp__nccl_transport *t = (mfsdp__nccl_transport *)self;
  const int64_t deadline_us = mfsdp_clock_deadline_us(t->desc.deadline_us);
  mfsdp_status status = MFSDP_OK;
  int32_t taken;
  if (handle == NULL) return MFSDP_OK;
  mfsdp_mutex_lock(&t->mutex); /* poisoned or not */
  while (t->turn != MFSDP__NCCL_NOBODY)
    if (!mfsdp_cond_wait_until(&t->cond, &t->mutex, deadline_us)) break;
  taken = t->turn == MFSDP__NCCL_NOBODY;
  if (taken) t->turn = MFSDP__NCCL_A_CALL;
  mfsdp_mutex_unlock(&t->mutex);
  if (!taken)
    return MFSDP_FAIL(context, MFSDP_E_STATE,
                      "buffer_deregister: rank %d: another call of NCCL has not returned in %lld "
                      "ms: the buffer must stay",
                      (int)t->rank, (long long)(t->desc.deadline_us / 1000));
  if (t->comm != NULL)
    status = mfsdp__nccl_check(t, context, ncclCommDeregister(t->comm, handle), "buffer_deregister",
                               "ncclCommDeregister");
  mfsdp__nccl_leave(t);
  --t->registration_count;
  return status;
}

/* ---- memory ---- */

MFSDP_API void mfsdp__nccl_heads_free(mfsdp__nccl_transport *t, mfsdp_context *context) {
  const size_t nbytes = 2 * (size_t)t->head_capacity * sizeof(*t->heads);
  if (t->heads != NULL)
    mfsdp__cuda_mem_free(t->cuda, context, t->heads, nbytes, MFSDP_SPACE_PINNED);
  if (t->wire != NULL) mfsdp__cuda_mem_free(t->cuda, context, t->wire, nbytes, MFSDP_SPACE_DEVICE);
  t->heads = t->wire = NULL;
}

MFSDP_API mfsdp_status mfsdp__nccl_heads_make(mfsdp__nccl_transport *t, mfsdp_context *context,
                                              int32_t capacity) {
  mfsdp__nccl_transport made = *t;
  const size_t nbytes = 2 * (size_t)capacity * sizeof(*t->heads);
  mfsdp_status status;
  void *memory;
  made.heads = made.wire = NULL;
  made.head_capacity = capacity;
  MFSDP_TRY(mfsdp__cuda_mem_alloc(t->cuda, context, nbytes, MFSDP_ALIGN_NBYTES, MFSDP_SPACE_PINNED,
                                  &memory));
  made.heads = (mfsdp__nccl_head *)memory;
  status = mfsdp__cuda_mem_alloc(t->cuda, context, nbytes, MFSDP_ALIGN_NBYTES, MFSDP_SPACE_DEVICE,
                                 &memory);
  if (status != MFSDP_OK) {
    mfsdp__nccl_heads_free(&made, context);
    return status;
  }
  mfsdp__nccl_heads_free(t, context);
  t->heads = made.heads;
  t->wire = (mfsdp__nccl_head *)memory;
  t->head_capacity = capacity;
  return MFSDP_OK;
}

/* Never shrinks. E_STATE while another thread is in submit, E_ARGUMENT, E_MEMORY, E_BACKEND (then
 * the capacity is the old one). */
MFSDP_API mfsdp_status mfsdp__nccl_reserve(void *self, mfsdp_context *context,
                                           int32_t max_xfer_count) {
  mfsdp__nccl_transport *t = (mfsdp__nccl_transport *)self;
  mfsdp_status status = MFSDP_OK;
  if (max_xfer_count < 0)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "nccl transport: reserve of %d transfers, needs at least 0",
                      (int)max_xfer_count);
  if (max_xfer_count <= t->xfer_capacity) return MFSDP_OK;
  MFSDP_TRY(mfsdp__nccl_enter(t, context, "nccl transport: reserve"));
  if (max_xfer_count > t->head_capacity)
    status = mfsdp__nccl_heads_make(t, context, max_xfer_count);
  if (status == MFSDP_OK) t->xfer_capacity = max_xfer_count;
  mfsdp__nccl_leave(t);
  return status;
}

MFSDP_API void mfsdp__nccl_tracks_free(mfsdp__nccl_transport *t, mfsdp_context *context) {
  int32_t i;
  for (i = 0; i < MFSDP__NCCL_TRACKED && t->tracks != NULL; ++i) {
    if (t->tracks[i].begin != NULL) (void)cudaEventDestroy(t->tracks[i].begin);
    if (t->tracks[i].end != NULL) (void)cudaEventDestroy(t->tracks[i].end);
  }
  if (t->heads_came != NULL) (void)cudaEventDestroy(t->heads_came);
  mfsdp_table_free(context, t->peers, MFSDP__NCCL_TRACKED * (size_t)t->world, sizeof(*t->peers));
  mfsdp_table_free(context, t->tracks, MFSDP__NCCL_TRACKED, sizeof(*t->tracks));
}

MFSDP_API void mfsdp__nccl_free(mfsdp__nccl_transport *t, mfsdp_context *context) {
  const size_t world = (size_t)t->world;
  mfsdp_cuda_backend *cuda = t->cuda;
  mfsdp__nccl_heads_free(t, context);
  mfsdp__nccl_tracks_free(t, context);
  mfsdp_table_free(context, t->node_of_rank, world, sizeof(*t->node_of_rank));
  mfsdp_table_free(context, t->all, world, sizeof(*t->all));
  mfsdp_table_free(context, t->alive, world, sizeof(*t->alive));
  if (t->cond_ready) mfsdp_cond_destroy(&t->cond);
  if (t->mutex_ready) mfsdp_mutex_destroy(&t->mutex);
  mfsdp_table_free(context, t, 1, sizeof(*t));
  if (--cuda->nccl_count > 0) return;
  if (cuda->nccl_order != NULL) (void)cudaEventDestroy(cuda->nccl_order);
  cuda->nccl_order = NULL;
  cuda->nccl_stream = NULL;
}

MFSDP_API mfsdp_status mfsdp__nccl_event(mfsdp_context *context, cudaEvent_t *out) {
  return mfsdp__cuda_check(context, cudaEventCreateWithFlags(out, cudaEventDisableTiming),
                           "cudaEventCreateWithFlags");
}

MFSDP_API mfsdp_status mfsdp__nccl_tracks_make(mfsdp__nccl_transport *t, mfsdp_context *context) {
  int32_t i;
  void *table;
  MFSDP_TRY(mfsdp_table_alloc(context, MFSDP__NCCL_TRACKED, sizeof(*t->tracks),
                              "nccl transport: groups", &table));
  t->tracks = (mfsdp__nccl_track *)table;
  MFSDP_TRY(mfsdp_table_alloc(context, MFSDP__NCCL_TRACKED * (size_t)t->world, sizeof(*t->peers),
                              "nccl transport: peers of groups", &table));
  t->peers = (uint8_t *)table;
  for (i = 0; i < MFSDP__NCCL_TRACKED; ++i) {
    t->tracks[i].peers = t->peers + (size_t)i * (size_t)t->world;
    MFSDP_TRY(mfsdp__nccl_event(context, &t->tracks[i].begin));
    MFSDP_TRY(mfsdp__nccl_event(context, &t->tracks[i].end));
  }
  return mfsdp__nccl_event(context, &t->heads_came);
}

MFSDP_API mfsdp_status mfsdp__nccl_make(mfsdp__nccl_transport *t, mfsdp_context *context) {
  const size_t world = (size_t)t->world;
  mfsdp_status status;
  void *table;
  status = mfsdp_mutex_init(&t->mutex);
  t->mutex_ready = status == MFSDP_OK;
  if (status == MFSDP_OK) status = mfsdp_cond_init(&t->cond);
  t->cond_ready = t->mutex_ready && status == MFSDP_OK;
  if (status != MFSDP_OK)
    return MFSDP_FAIL(context, status, "nccl transport: the system refused a mutex or a condition");
  MFSDP_TRY(mfsdp_table_alloc(context, world, sizeof(*t->alive), "nccl transport: ranks", &table));
  t->alive = (uint8_t *)table;
  MFSDP_TRY(mfsdp_table_alloc(context, world, sizeof(*t->all), "nccl transport: peers", &table));
  t->all = (mfsdp_xfer *)table;
  MFSDP_TRY(mfsdp__nccl_tracks_make(t, context));
  MFSDP_TRY(mfsdp__cuda_note_take(t->cuda, context, &t->note));
  if (t->cuda->nccl_order == NULL) MFSDP_TRY(mfsdp__nccl_event(context, &t->cuda->nccl_order));
  t->xfer_capacity = t->desc.batch_xfer_count;
  MFSDP_TRY(mfsdp__nccl_heads_make(t, context,
                                   t->xfer_capacity > t->world ? t->xfer_capacity : t->world));
  if (t->desc.watchdog_us == 0 && !t->abortable) return MFSDP_OK;
  status = mfsdp_thread_start(&t->thread, mfsdp__nccl_thread_main, t);
  t->thread_ready = status == MFSDP_OK;
  if (status == MFSDP_OK) return MFSDP_OK;
  return MFSDP_FAIL(context, status, "nccl transport: the system refused a thread");
}

/* ---- the end ---- */

/* Whether all groups have ended by the deadline. */
MFSDP_API int mfsdp__nccl_idle(mfsdp__nccl_transport *t) {
  const int64_t deadline_us = mfsdp_clock_deadline_us(t->desc.deadline_us);
  while (mfsdp__nccl_oldest(t) != NULL) {
    if (mfsdp_clock_us() >= deadline_us) return 0;
    mfsdp_clock_sleep_until(mfsdp_clock_us() + MFSDP__NCCL_LAST_SLEEP_US);
  }
  return 1;
}

/* A communicator of ours, which is idle. Those of a non-blocking one are told first that it ends.
 * */
MFSDP_API void mfsdp__nccl_comm_destroy(mfsdp__nccl_transport *t, mfsdp_context *context) {
  if (!t->owns_comm || t->comm == NULL) return;
  if (t->poisoned && t->desc.nonblocking) {
    (void)ncclCommAbort(t->comm);
  } else {
    if (t->desc.nonblocking) {
      memset(t->peers, 0, (size_t)t->world);
      (void)mfsdp__nccl_settle(t, context, ncclCommFinalize(t->comm), "nccl transport: destroy",
                               "ncclCommFinalize", t->peers);
    }
    (void)ncclCommDestroy(t->comm);
  }
  t->comm = NULL;
}

/* E_STATE, and nothing is freed: a batch is being submitted, a buffer is registered, a group has
 * not ended by the deadline, or an abort has not. */
MFSDP_API mfsdp_status mfsdp__nccl_destroy(void *self, mfsdp_context *context) {
  mfsdp__nccl_transport *t = (mfsdp__nccl_transport *)self;
  mfsdp_error first;
  int32_t turn;
  if (t == NULL) return MFSDP_OK;
  mfsdp_mutex_lock(&t->mutex);
  turn = t->turn;
  mfsdp_mutex_unlock(&t->mutex);
  if (turn == MFSDP__NCCL_A_BATCH)
    return MFSDP_FAIL(context, MFSDP_E_STATE, "nccl transport: rank %d is in a batch",
                      (int)t->rank);
  if (t->registration_count > 0)
    return MFSDP_FAIL(context, MFSDP_E_STATE,
                      "nccl transport: %d buffers are still registered; deregister them first",
                      (int)t->registration_count);
  if (!mfsdp__nccl_thread_end(t))
    return MFSDP_FAIL(context, MFSDP_E_STATE,
                      "nccl transport: rank %d: ncclCommAbort has not returned in %lld ms; leave "
                      "the process",
                      (int)t->rank, (long long)(t->desc.deadline_us / 1000));
  if (!mfsdp__nccl_idle(t))
    return MFSDP_FAIL(context, MFSDP_E_STATE,
                      "nccl transport: rank %d: work of its communicator is in flight%s",
                      (int)t->rank, mfsdp__nccl_fate(t));
  first = context->error; /* what follows from it is not news */
  mfsdp__nccl_comm_destroy(t, context);
  context->error = first;
  --t->cuda->event_count;
  mfsdp__nccl_free(t, context);
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__nccl_split(void *self, mfsdp_context *context, int32_t color,
                                         int32_t key, mfsdp_transport *out);

MFSDP_API const mfsdp_transport_ops *mfsdp__nccl_transport_ops(void) {
  static const mfsdp_transport_ops ops = {sizeof(mfsdp_transport_ops),
                                          "nccl",
                                          mfsdp__nccl_submit,
                                          mfsdp__nccl_reserve,
                                          mfsdp__nccl_poll,
                                          mfsdp__nccl_poison,
                                          mfsdp__nccl_destroy,
                                          mfsdp__nccl_register,
                                          mfsdp__nccl_deregister,
                                          mfsdp__nccl_native_submit,
                                          mfsdp__nccl_native_prepare,
                                          mfsdp__nccl_split};
  return &ops;
}

/* ---- the beginning ---- */

MFSDP_API mfsdp_status mfsdp__nccl_desc_check(mfsdp_context *context,
                                              const mfsdp_nccl_transport_desc *desc) {
  if (desc == NULL) return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "nccl transport: desc is NULL");
  if (desc->struct_nbytes != sizeof(*desc))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "nccl transport: desc.struct_nbytes is %zu, needs %zu (use "
                      "mfsdp_nccl_transport_desc_default)",
                      desc->struct_nbytes, sizeof(*desc));
  if (desc->deadline_us <= 0 || desc->watchdog_us < 0)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "nccl transport: desc.deadline_us is %lld, needs to be positive; "
                      "desc.watchdog_us is %lld, needs at least 0",
                      (long long)desc->deadline_us, (long long)desc->watchdog_us);
  if (desc->chunk_nbytes < 256)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "nccl transport: desc.chunk_nbytes is %zu, needs at least 256",
                      desc->chunk_nbytes);
  if (desc->batch_xfer_count < 1)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "nccl transport: desc.batch_xfer_count is %d, needs at least 1",
                      (int)desc->batch_xfer_count);
  if (desc->may_abort && !desc->nonblocking)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "nccl transport: desc.may_abort needs desc.nonblocking: a communicator that "
                      "blocks may be inside a call that an abort would meet (make it with "
                      "ncclConfig_t.blocking 0)");
  if (desc->control != NULL) MFSDP_TRY(mfsdp_control_check(context, desc->control));
  return MFSDP_OK;
}

/* Waits until a communicator that does not block is there. */
MFSDP_API mfsdp_status mfsdp__nccl_await_comm(mfsdp_context *context, ncclComm_t comm,
                                              const mfsdp_nccl_transport_desc *desc) {
  const int64_t deadline_us = mfsdp_clock_deadline_us(desc->deadline_us);
  ncclResult_t state = ncclSuccess, result;
  for (;;) {
    result = ncclCommGetAsyncError(comm, &state);
    if (result == ncclSuccess) result = state;
    if (result == ncclSuccess) return MFSDP_OK;
    if (result != ncclInProgress)
      return MFSDP_FAIL(context, mfsdp__nccl_status(result),
                        "nccl transport: the communicator failed: %s: %.200s",
                        ncclGetErrorString(result), ncclGetLastError(comm));
    if (mfsdp_clock_us() >= deadline_us)
      return MFSDP_FAIL(context, MFSDP_E_TIMEOUT,
                        "nccl transport: the communicator did not come up in %lld ms: not all of "
                        "its ranks have called ncclCommInitRankConfig (start them, or raise "
                        "desc.deadline_us)",
                        (long long)(desc->deadline_us / 1000));
    mfsdp_clock_sleep_until(mfsdp_clock_us() + MFSDP__NCCL_LAST_SLEEP_US);
  }
}

MFSDP_API mfsdp_status mfsdp__nccl_identify(mfsdp__nccl_transport *t, mfsdp_context *context) {
  const mfsdp_nccl_transport_desc *desc = &t->desc;
  int count = -1, rank = -1, device = -1;
  ncclResult_t result = ncclCommCount(t->comm, &count);
  if (result == ncclSuccess) result = ncclCommUserRank(t->comm, &rank);
  if (result == ncclSuccess) result = ncclCommCuDevice(t->comm, &device);
  if (result != ncclSuccess)
    return MFSDP_FAIL(context, mfsdp__nccl_status(result),
                      "nccl transport: the communicator does not say its size, rank and device: %s",
                      ncclGetErrorString(result));
  if ((desc->world >= 0 && count != desc->world) || (desc->rank >= 0 && rank != desc->rank))
    return MFSDP_FAIL(context, MFSDP_E_MISMATCH,
                      "nccl transport: the communicator is rank %d of %d, desc says rank %d of %d: "
                      "another communicator, or ranks that were numbered otherwise",
                      rank, count, (int)desc->rank, (int)desc->world);
  if (device != t->cuda->device)
    return MFSDP_FAIL(context, MFSDP_E_MISMATCH,
                      "nccl transport: rank %d: the communicator is on device %d, the backend on "
                      "%d (cudaSetDevice before ncclCommInitRank)",
                      rank, device, (int)t->cuda->device);
  if (desc->control != NULL && (desc->control->world != count || desc->control->rank != rank))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "nccl transport: desc.control is of rank %d of %d, the communicator of rank "
                      "%d of %d",
                      (int)desc->control->rank, (int)desc->control->world, rank, count);
  t->rank = rank;
  t->world = count;
  return MFSDP_OK;
}

/* Connects every pair of ranks, and compares what must be equal. */
MFSDP_API mfsdp_status mfsdp__nccl_hello(mfsdp__nccl_transport *t, mfsdp_context *context,
                                         int32_t origin, mfsdp__cuda_queue *queue) {
  mfsdp__nccl_head own;
  int32_t i;
  mfsdp__nccl_head_fill(&own, 1, t->desc.chunk_nbytes, origin, "nccl transport");
  MFSDP_TRY(mfsdp__nccl_order_begin(t, context, queue->stream));
  MFSDP_TRY(mfsdp__nccl_swap_with_all(t, context, queue, &own, "nccl transport: wrap"));
  MFSDP_TRY(mfsdp__nccl_order_end(t, context, queue->stream));
  for (i = 0; i < t->world - 1; ++i) {
    const mfsdp__nccl_head *other = &t->heads[t->head_capacity + i];
    if (other->nbytes != own.nbytes)
      return MFSDP_FAIL_PEER(
          context, MFSDP_E_MISMATCH, t->all[i].peer,
          "nccl transport: desc.chunk_nbytes is %zu on rank %d and %llu on rank %d, needs to be "
          "equal",
          t->desc.chunk_nbytes, (int)t->rank, (unsigned long long)other->nbytes,
          (int)t->all[i].peer);
  }
  return MFSDP_OK;
}

/* On a queue that goes again. */
MFSDP_API mfsdp_status mfsdp__nccl_meet(mfsdp__nccl_transport *t, mfsdp_context *context,
                                        int32_t origin) {
  mfsdp_queue *queue;
  mfsdp_status status;
  if (t->world == 1) return MFSDP_OK;
  MFSDP_TRY(mfsdp__cuda_queue_create(t->cuda, context, "nccl set-up", &queue));
  MFSDP_TRY(mfsdp__nccl_enter(t, context, "nccl transport: wrap"));
  status = mfsdp__nccl_end(
      t, context, mfsdp__nccl_hello(t, context, origin, (mfsdp__cuda_queue *)(void *)queue));
  /* After a failure a kernel may wait for ever in the stream, which then stays. */
  if (status == MFSDP_OK || (mfsdp__nccl_thread_end(t) && mfsdp__nccl_idle(t))) {
    if (t->cuda->nccl_stream == mfsdp_cuda_queue_stream(queue)) t->cuda->nccl_stream = NULL;
    mfsdp__cuda_queue_destroy(t->cuda, context, queue);
  }
  return status;
}

/* `origin`: this rank's number in the parent. */
MFSDP_API mfsdp_status mfsdp__nccl_create(mfsdp_context *context, mfsdp_cuda_backend *cuda,
                                          ncclComm_t comm, const mfsdp_nccl_transport_desc *desc,
                                          int32_t owns_comm, int32_t origin,
                                          mfsdp__nccl_transport **out) {
  mfsdp__nccl_transport *t;
  mfsdp_status status;
  void *table;
  *out = NULL;
  status = mfsdp__cuda_check_device(cuda, context, "nccl transport");
  if (status == MFSDP_OK) status = mfsdp__nccl_await_comm(context, comm, desc);
  if (status == MFSDP_OK)
    status = mfsdp_table_alloc(context, 1, sizeof(*t), "nccl transport", &table);
  if (status != MFSDP_OK) {
    if (owns_comm) (void)(desc->nonblocking ? ncclCommAbort(comm) : ncclCommDestroy(comm));
    return status;
  }
  t = (mfsdp__nccl_transport *)table;
  t->desc = *desc;
  t->cuda = cuda;
  t->comm = comm;
  t->abortable = desc->may_abort && desc->nonblocking;
  t->error = mfsdp_error_none();
  ++cuda->nccl_count;
  status = mfsdp__nccl_identify(t, context);
  if (status == MFSDP_OK) status = mfsdp__nccl_make(t, context);
  if (status == MFSDP_OK) status = mfsdp__nccl_meet(t, context, origin);
  t->owns_comm = owns_comm;
  if (status != MFSDP_OK) {
    const mfsdp_error first = context->error;
    if (mfsdp__nccl_thread_end(t) && mfsdp__nccl_idle(t)) {
      mfsdp__nccl_comm_destroy(t, context);
      mfsdp__nccl_free(t, context);
    } /* else NCCL still has it */
    context->error = first;
    return status;
  }
  ++cuda->event_count; /* the backend goes last */
  *out = t;
  return MFSDP_OK;
}

MFSDP_API void mfsdp__nccl_publish(mfsdp__nccl_transport *t, mfsdp_transport *out) {
  out->struct_nbytes = sizeof(*out);
  out->ops = mfsdp__nccl_transport_ops();
  out->self = t;
  out->backend = mfsdp_cuda_backend_get(t->cuda);
  out->rank = t->rank;
  out->world = t->world;
  out->node_of_rank = t->node_of_rank != NULL ? t->node_of_rank : t->desc.node_of_rank;
  out->deadline_us = t->desc.deadline_us;
}

/*
 * A transport over the caller's communicator, which must outlive it, is used by nobody else
 * meanwhile, and is on the backend's device. Memory comes from `context`. Collective, COMPLETE: all
 * ranks exchange one small message, which connects them. End it with ops->destroy(self, context)
 * before its backend. E_ARGUMENT; E_MISMATCH: another rank, size or device than expected, or
 * chunk_nbytes that differ; E_TIMEOUT: a peer did not come; E_MEMORY, E_BACKEND, E_PEER. After a
 * failure with may_abort the communicator may be gone: *desc->aborted says so.
 */
MFSDP_API mfsdp_status mfsdp_nccl_transport_wrap(mfsdp_context *context, mfsdp_cuda_backend *cuda,
                                                 ncclComm_t comm,
                                                 const mfsdp_nccl_transport_desc *desc,
                                                 mfsdp_transport *out) {
  mfsdp__nccl_transport *t;
  if (out == NULL) return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "nccl transport: out is NULL");
  memset(out, 0, sizeof(*out));
  if (cuda == NULL || comm == NULL)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "nccl transport: %s is NULL",
                      cuda == NULL ? "cuda" : "comm");
  MFSDP_TRY(mfsdp__nccl_desc_check(context, desc));
  MFSDP_TRY(mfsdp__nccl_create(context, cuda, comm, desc, 0, -1, &t));
  mfsdp__nccl_publish(t, out);
  return MFSDP_OK;
}

/* ---- split ---- */

/* Where the parent says on which node each rank is, the part's ranks are on the same ones. */
MFSDP_API mfsdp_status mfsdp__nccl_split_nodes(mfsdp__nccl_transport *t, mfsdp_context *context,
                                               const int32_t *nodes, int32_t origin) {
  int32_t i;
  void *table;
  t->desc.node_of_rank = NULL;
  if (nodes == NULL) return MFSDP_OK;
  MFSDP_TRY(mfsdp_table_alloc(context, (size_t)t->world, sizeof(*t->node_of_rank),
                              "nccl transport: nodes", &table));
  t->node_of_rank = (int32_t *)table;
  t->node_of_rank[t->rank] = nodes[origin];
  for (i = 0; i < t->world - 1; ++i)
    t->node_of_rank[t->all[i].peer] = nodes[t->heads[t->head_capacity + i].origin];
  return MFSDP_OK;
}

/* The table's split, by ncclCommSplit. The communicator is the new transport's, which may abort it
 * as the parent's if it does not block. The parent is not to be used meanwhile. The control plane,
 * which has other ranks, is not asked. */
MFSDP_API mfsdp_status mfsdp__nccl_split(void *self, mfsdp_context *context, int32_t color,
                                         int32_t key, mfsdp_transport *out) {
  mfsdp__nccl_transport *parent = (mfsdp__nccl_transport *)self, *t;
  mfsdp_nccl_transport_desc desc = parent->desc;
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  ncclComm_t comm = NULL;
  mfsdp_status status;
  if (out == NULL || color < 0)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "split: %s is %s", out == NULL ? "out" : "color",
                      out == NULL ? "NULL" : "negative");
  memset(out, 0, sizeof(*out));
  config.blocking = desc.nonblocking ? 0 : 1;
  desc.rank = desc.world = -1;
  desc.control = NULL;
  desc.aborted = NULL;
  desc.may_abort = desc.nonblocking;
  MFSDP_TRY(mfsdp__nccl_enter(parent, context, "split"));
  memset(parent->peers, 0, (size_t)parent->world);
  status =
      mfsdp__nccl_settle(parent, context, ncclCommSplit(parent->comm, color, key, &comm, &config),
                         "split", "ncclCommSplit", parent->peers);
  status = mfsdp__nccl_end(parent, context, status);
  MFSDP_TRY(status);
  status = mfsdp__nccl_create(context, parent->cuda, comm, &desc, 1, parent->rank, &t);
  if (status != MFSDP_OK) return status;
  status = mfsdp__nccl_split_nodes(t, context, parent->desc.node_of_rank, parent->rank);
  if (status != MFSDP_OK) {
    (void)mfsdp__nccl_destroy(t, context);
    return status;
  }
  mfsdp__nccl_publish(t, out);
  return MFSDP_OK;
}

#endif /* MFSDP_CUDA_TRANSPORT_NCCL_H */
