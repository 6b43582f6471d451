/* SPDX-License-Identifier: MIT */
/*
 * backend_host.h - the backend that computes on the CPU, with plain C loops or a CBLAS.
 *
 *   mfsdp_host_backend_desc desc = mfsdp_host_backend_desc_default();
 *   mfsdp_host_backend *host;
 *   desc.math = mfsdp_host_math_cblas();                 // mfsdp/host/math_cblas.h; NULL: C loops
 *   if (mfsdp_host_backend_create(&context, &desc, &host) != MFSDP_OK) ...
 *   const mfsdp_backend *backend = mfsdp_host_backend_get(host);
 *   ... create queues and events through backend->ops, use them, destroy them ...
 *   if (mfsdp_host_backend_destroy(&context, host) != MFSDP_OK) ...
 *
 * One backend per rank, called from the rank's own thread, like its context. The three memory
 * spaces are all ordinary memory of the context's allocator.
 *
 * Errors reach the user in two ways. What a call can check it checks before anything is submitted:
 * the call returns E_ARGUMENT, E_UNSUPPORTED or E_OVERFLOW, nothing is done, and the message is in
 * the context that the backend was created with. What goes wrong while queued work runs (a task of
 * queue_call, a table in DEVICE memory that makes no sense) stays with the queue: calls go on
 * returning MFSDP_OK, the work behind it is skipped, and event_wait on an event recorded after it
 * returns the status and copies the message to the context. An event recorded before it is not
 * affected. A queue that waits (queue_wait) for an event with an error fails with that error.
 *
 * Does not: use more than one thread for a queue's work; bind threads; provide eigh and qr without a
 * LAPACK (desc.lapack, of math_lapacke.h); multiply in F64 (E_UNSUPPORTED). Link flags: -lpthread -lm,
 * and the CBLAS and LAPACKE if math_cblas.h and math_lapacke.h are used. POSIX 2008: see posix/clock.h. Compile with -O3 -march=native
 * -fno-math-errno -ffp-contract=off.
 */
#ifndef MFSDP_HOST_BACKEND_HOST_H
#define MFSDP_HOST_BACKEND_HOST_H

#include "../backend_check.h"
#include "host_decompose.h"
#include "host_dense.h"
#include "host_math.h"
#include "host_ops.h"
#include "host_precondition.h"
#include "host_queue.h"
#include "host_verdict.h"

typedef struct mfsdp_host_backend_desc {
  size_t struct_nbytes;
  const mfsdp_host_math *math; /* dense routines; NULL: mfsdp_host_math_loops(); must outlive it */
  const mfsdp_host_lapack *lapack; /* eigh and qr; NULL: without them; must outlive it */
  mfsdp_host_queue_kind queue_kind;
  int32_t queue_capacity; /* WORKER: pieces of work that one queue holds, at least 1 */
  int32_t math_threads;   /* passed once to set_threads of math and lapack, which act on the whole
                           * process: bits depend on it. 0: left as it is */
  int64_t submit_timeout_us; /* WORKER: how long a call waits for room in a full queue: E_TIMEOUT */
} mfsdp_host_backend_desc;

/* C loops, no LAPACK, INLINE queues, 1024 records, one thread for dense routines, ten minutes. */
MFSDP_API mfsdp_host_backend_desc mfsdp_host_backend_desc_default(void) {
  mfsdp_host_backend_desc desc;
  memset(&desc, 0, sizeof(desc));
  desc.struct_nbytes = sizeof(desc);
  desc.queue_kind = MFSDP_HOST_QUEUE_INLINE;
  desc.queue_capacity = 1024;
  desc.math_threads = 1;
  desc.submit_timeout_us = INT64_C(600000000);
  return desc;
}

MFSDP_API mfsdp_status mfsdp__host_put(mfsdp_queue *queue, mfsdp__host_work work, const void *args,
                                       size_t nbytes) {
  return mfsdp__host_submit((mfsdp__host_queue *)(void *)queue, work, args, nbytes);
}

/* ---- memory ---- */

MFSDP_API mfsdp_status mfsdp__host_mem_alloc(void *self, mfsdp_context *context, size_t nbytes,
                                             size_t alignment, mfsdp_space space, void **out) {
  const mfsdp_allocator *allocator = &context->desc.allocator;
  (void)self;
  MFSDP_TRY(mfsdp__check_alloc(context, nbytes, alignment, space, out));
  *out = allocator->alloc(nbytes, alignment, space, allocator->user);
  if (*out == NULL)
    return MFSDP_FAIL(context, MFSDP_E_MEMORY, "mem_alloc: the allocator refused %zu bytes",
                      nbytes);
  return MFSDP_OK;
}

MFSDP_API void mfsdp__host_mem_free(void *self, mfsdp_context *context, void *ptr, size_t nbytes,
                                    mfsdp_space space) {
  (void)self;
  if (ptr != NULL) context->desc.allocator.free(ptr, nbytes, space, context->desc.allocator.user);
}

/* ---- tasks, copies, fills ---- */

typedef struct mfsdp__host_call_args {
  mfsdp_task task;
  void *argument;
} mfsdp__host_call_args;

MFSDP_API mfsdp_status mfsdp__host_run_call(mfsdp_host_backend *host, const void *arguments,
                                            mfsdp_error *error) {
  const mfsdp__host_call_args *args = (const mfsdp__host_call_args *)arguments;
  (void)host;
  return args->task(args->argument, error);
}

MFSDP_API mfsdp_status mfsdp__host_queue_call(void *self, mfsdp_queue *queue, mfsdp_task task,
                                              void *argument) {
  mfsdp_host_backend *host = (mfsdp_host_backend *)self;
  mfsdp__host_call_args args;
  MFSDP_TRY(mfsdp__check_queue(host->context, "queue_call", queue));
  if (task == NULL) return MFSDP_FAIL(host->context, MFSDP_E_ARGUMENT, "queue_call: task is NULL");
  args.task = task;
  args.argument = argument;
  return mfsdp__host_put(queue, mfsdp__host_run_call, &args, sizeof(args));
}

typedef struct mfsdp__host_copy_args {
  void *dst;
  const void *src; /* NULL: fill with `byte` */
  size_t nbytes;
  int byte;
} mfsdp__host_copy_args;

MFSDP_API mfsdp_status mfsdp__host_run_copy(mfsdp_host_backend *host, const void *arguments,
                                            mfsdp_error *error) {
  const mfsdp__host_copy_args *args = (const mfsdp__host_copy_args *)arguments;
  (void)host;
  (void)error;
  if (args->src != NULL)
    memcpy(args->dst, args->src, args->nbytes);
  else
    memset(args->dst, args->byte, args->nbytes);
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__host_copy(void *self, mfsdp_queue *queue, void *dst,
                                        mfsdp_space dst_space, const void *src,
                                        mfsdp_space src_space, size_t nbytes) {
  mfsdp_host_backend *host = (mfsdp_host_backend *)self;
  mfsdp__host_copy_args args;
  MFSDP_TRY(mfsdp__check_queue(host->context, "copy", queue));
  MFSDP_TRY(mfsdp__check_copy(host->context, dst, dst_space, src, src_space, nbytes));
  if (nbytes == 0) return MFSDP_OK;
  args.dst = dst;
  args.src = src;
  args.nbytes = nbytes;
  args.byte = 0;
  return mfsdp__host_put(queue, mfsdp__host_run_copy, &args, sizeof(args));
}

MFSDP_API mfsdp_status mfsdp__host_fill_bytes(void *self, mfsdp_queue *queue, void *dst,
                                              int32_t byte, size_t nbytes) {
  mfsdp_host_backend *host = (mfsdp_host_backend *)self;
  mfsdp__host_copy_args args;
  MFSDP_TRY(mfsdp__check_queue(host->context, "fill_bytes", queue));
  MFSDP_TRY(mfsdp__check_fill(host->context, dst, byte, nbytes));
  if (nbytes == 0) return MFSDP_OK;
  args.dst = dst;
  args.src = NULL;
  args.nbytes = nbytes;
  args.byte = (int)byte;
  return mfsdp__host_put(queue, mfsdp__host_run_copy, &args, sizeof(args));
}

/* ---- casts and sums ---- */

typedef struct mfsdp__host_cast_args {
  void *dst;
  const void *src;
  mfsdp_dtype dst_dtype, src_dtype;
  int64_t count;
} mfsdp__host_cast_args;

MFSDP_API mfsdp_status mfsdp__host_run_cast(mfsdp_host_backend *host, const void *arguments,
                                            mfsdp_error *error) {
  const mfsdp__host_cast_args *args = (const mfsdp__host_cast_args *)arguments;
  (void)host;
  (void)error;
  mfsdp__host_cast(args->dst, args->dst_dtype, args->src, args->src_dtype, args->count);
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__host_cast_entry(void *self, mfsdp_queue *queue, void *dst,
                                              mfsdp_dtype dst_dtype, const void *src,
                                              mfsdp_dtype src_dtype, int64_t count) {
  mfsdp_host_backend *host = (mfsdp_host_backend *)self;
  mfsdp__host_cast_args args;
  MFSDP_TRY(mfsdp__check_queue(host->context, "cast", queue));
  MFSDP_TRY(mfsdp__check_cast(host->context, dst, dst_dtype, src, src_dtype, count));
  if (count == 0) return MFSDP_OK;
  args.dst = dst;
  args.src = src;
  args.dst_dtype = dst_dtype;
  args.src_dtype = src_dtype;
  args.count = count;
  return mfsdp__host_put(queue, mfsdp__host_run_cast, &args, sizeof(args));
}

/* Terms in one record. More are added by the records behind it: the same chain. */
#define MFSDP__HOST_TERMS 48

typedef struct mfsdp__host_sum_args {
  float *acc;
  int64_t count;
  int32_t first, term_count;
  mfsdp_dtype dtype;
  const void *terms[MFSDP__HOST_TERMS];
} mfsdp__host_sum_args;

MFSDP_API mfsdp_status mfsdp__host_run_sum(mfsdp_host_backend *host, const void *arguments,
                                           mfsdp_error *error) {
  const mfsdp__host_sum_args *args = (const mfsdp__host_sum_args *)arguments;
  (void)host;
  (void)error;
  mfsdp__host_sum_terms(args->acc, args->first, args->terms, args->dtype, args->term_count,
                        args->count);
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__host_sum_terms_entry(void *self, mfsdp_queue *queue, float *acc,
                                                   int32_t first, const void *const *terms,
                                                   mfsdp_dtype dtype, int32_t term_count,
                                                   int64_t count) {
  mfsdp_host_backend *host = (mfsdp_host_backend *)self;
  mfsdp__host_sum_args args;
  int32_t t;
  MFSDP_TRY(mfsdp__check_queue(host->context, "sum_terms", queue));
  MFSDP_TRY(mfsdp__check_terms(host->context, acc, terms, dtype, term_count, count));
  if (count == 0) return MFSDP_OK;
  args.acc = acc;
  args.count = count;
  args.dtype = dtype;
  for (t = 0; t < term_count; t += MFSDP__HOST_TERMS) {
    args.first = first && t == 0;
    args.term_count = term_count - t < MFSDP__HOST_TERMS ? term_count - t : MFSDP__HOST_TERMS;
    memcpy((void *)args.terms, (const void *)(terms + t), (size_t)args.term_count * sizeof(*terms));
    MFSDP_TRY(mfsdp__host_put(queue, mfsdp__host_run_sum, &args,
                              offsetof(mfsdp__host_sum_args, terms) +
                                  (size_t)args.term_count * sizeof(*terms)));
  }
  return MFSDP_OK;
}

typedef struct mfsdp__host_sumsq_args {
  double *slots;
  const float *acc;
  const mfsdp_block *blocks;
  int32_t block_count;
} mfsdp__host_sumsq_args;

MFSDP_API mfsdp_status mfsdp__host_run_sumsq(mfsdp_host_backend *host, const void *arguments,
                                             mfsdp_error *error) {
  const mfsdp__host_sumsq_args *args = (const mfsdp__host_sumsq_args *)arguments;
  int32_t i;
  (void)host;
  for (i = 0; i < args->block_count; ++i) {
    const mfsdp_block *block = &args->blocks[i];
    if (block->count < 0 || block->first < 0 || block->slot < 0 ||
        (block->count > 0 && args->acc == NULL))
      return MFSDP_ERROR_SET(error, MFSDP_E_ARGUMENT, -1,
                             "sumsq: block %d has first %lld, count %lld, slot %d", (int)i,
                             (long long)block->first, (long long)block->count, (int)block->slot);
    args->slots[block->slot] =
        block->count > 0 ? mfsdp__host_sumsq(args->acc + block->first, block->count) : 0.0;
  }
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__host_sumsq_entry(void *self, mfsdp_queue *queue, double *slots,
                                               const float *acc, const mfsdp_block *blocks,
                                               int32_t block_count) {
  mfsdp_host_backend *host = (mfsdp_host_backend *)self;
  mfsdp__host_sumsq_args args;
  MFSDP_TRY(mfsdp__check_queue(host->context, "sumsq", queue));
  MFSDP_TRY(mfsdp__check_sumsq(host->context, slots, blocks, block_count));
  if (block_count == 0) return MFSDP_OK;
  args.slots = slots;
  args.acc = acc;
  args.blocks = blocks;
  args.block_count = block_count;
  return mfsdp__host_put(queue, mfsdp__host_run_sumsq, &args, sizeof(args));
}

/* ---- verdict ---- */

MFSDP_API mfsdp_status mfsdp__host_run_verdict(mfsdp_host_backend *host, const void *arguments,
                                               mfsdp_error *error) {
  (void)host;
  (void)error;
  mfsdp__host_verdict((const mfsdp_verdict_args *)arguments);
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__host_verdict_entry(void *self, mfsdp_queue *queue,
                                                 const mfsdp_verdict_args *args) {
  mfsdp_host_backend *host = (mfsdp_host_backend *)self;
  MFSDP_TRY(mfsdp__check_queue(host->context, "verdict_fold", queue));
  MFSDP_TRY(mfsdp__check_verdict(host->context, args));
  return mfsdp__host_put(queue, mfsdp__host_run_verdict, args, sizeof(*args));
}

/* ---- dense ---- */

MFSDP_API mfsdp_status mfsdp__host_run_gemm(mfsdp_host_backend *host, const void *arguments,
                                            mfsdp_error *error) {
  (void)error;
  mfsdp__host_gemm(host->math, (const mfsdp_gemm_args *)arguments);
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__host_gemm_entry(void *self, mfsdp_queue *queue,
                                              const mfsdp_gemm_args *args) {
  mfsdp_host_backend *host = (mfsdp_host_backend *)self;
  MFSDP_TRY(mfsdp__check_queue(host->context, "gemm", queue));
  MFSDP_TRY(mfsdp__check_gemm(host->context, "host", args));
  return mfsdp__host_put(queue, mfsdp__host_run_gemm, args, sizeof(*args));
}

MFSDP_API mfsdp_status mfsdp__host_run_normalize(mfsdp_host_backend *host, const void *arguments,
                                                 mfsdp_error *error) {
  (void)host;
  (void)error;
  mfsdp__host_normalize((const mfsdp_normalize_args *)arguments);
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__host_normalize_entry(void *self, mfsdp_queue *queue,
                                                   const mfsdp_normalize_args *args) {
  mfsdp_host_backend *host = (mfsdp_host_backend *)self;
  MFSDP_TRY(mfsdp__check_queue(host->context, "normalize", queue));
  MFSDP_TRY(mfsdp__check_normalize(host->context, args));
  if (args->count == 0 || args->batch_count == 0) return MFSDP_OK;
  return mfsdp__host_put(queue, mfsdp__host_run_normalize, args, sizeof(*args));
}

/* ---- fused optimizer passes ---- */

/* NULL, or what is wrong with an item. */
MFSDP_API const char *mfsdp__host_item_fault(const mfsdp_fused_args *args,
                                             const mfsdp_fused_item *item) {
  if (item->count < 0) return "a negative count";
  if (args->present != NULL && item->present_index < 0) return "a negative present_index";
  if (item->count == 0) return NULL;
  if (args->op == MFSDP_FUSED_MUON_ROWS) {
    if (item->direction == NULL) return "no direction";
    if (item->state[1] == NULL) return "no state 1";
    return item->rows > 0 && item->count % item->rows == 0 ? NULL : "rows that do not divide count";
  }
  if (item->grad == NULL) return "no grad";
  if (item->state[0] == NULL) return "no state 0";
  if (args->op == MFSDP_FUSED_ADAMW && item->state[1] == NULL) return "no state 1";
  if (args->op != MFSDP_FUSED_ADAMW && item->direction == NULL) return "no direction";
  if (args->op == MFSDP_FUSED_MUON_PREPARE) return NULL;
  if (item->master == NULL) return "no master";
  if (item->param != NULL && mfsdp_dtype_nbytes((mfsdp_dtype)item->param_dtype) == 0)
    return "an invalid param_dtype";
  return NULL;
}

MFSDP_API mfsdp_status mfsdp__host_run_fused(mfsdp_host_backend *host, const void *arguments,
                                             mfsdp_error *error) {
  const mfsdp_fused_args *args = (const mfsdp_fused_args *)arguments;
  int32_t i;
  (void)host;
  for (i = 0; i < args->item_count; ++i) {
    const char *fault = mfsdp__host_item_fault(args, &args->items[i]);
    if (fault != NULL)
      return MFSDP_ERROR_SET(error, MFSDP_E_ARGUMENT, -1, "fused: item %d has %s", (int)i, fault);
  }
  if (!mfsdp_step_scalars_write(args->scalars)) return MFSDP_OK;
  if (args->op == MFSDP_FUSED_ADAMW && args->scalars->applied_steps < 1)
    return MFSDP_ERROR_SET(error, MFSDP_E_ARGUMENT, -1,
                           "fused: applied_steps is %lld; AdamW's bias correction counts from 1",
                           (long long)args->scalars->applied_steps);
  for (i = 0; i < args->item_count; ++i) {
    const mfsdp_fused_item *item = &args->items[i];
    if (item->count > 0 && (args->present == NULL || args->present[item->present_index] != 0))
      mfsdp__host_fused_item(args, item);
  }
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__host_fused_entry(void *self, mfsdp_queue *queue,
                                               const mfsdp_fused_args *args) {
  mfsdp_host_backend *host = (mfsdp_host_backend *)self;
  MFSDP_TRY(mfsdp__check_queue(host->context, "fused", queue));
  MFSDP_TRY(mfsdp__check_fused(host->context, "host", args));
  if (args->item_count == 0) return MFSDP_OK;
  return mfsdp__host_put(queue, mfsdp__host_run_fused, args, sizeof(*args));
}

MFSDP_STATIC_ASSERT(sizeof(mfsdp__host_sum_args) <= MFSDP__HOST_RECORD_NBYTES &&
                        sizeof(mfsdp_gemm_args) <= MFSDP__HOST_RECORD_NBYTES &&
                        sizeof(mfsdp_verdict_args) <= MFSDP__HOST_RECORD_NBYTES &&
                        sizeof(mfsdp_fused_args) <= MFSDP__HOST_RECORD_NBYTES &&
                        sizeof(mfsdp_normalize_args) <= MFSDP__HOST_RECORD_NBYTES &&
                        sizeof(mfsdp_error) <= MFSDP__HOST_RECORD_NBYTES,
                    "an argument block does not fit into a record of the host queue");

/* ---- the backend ---- */

MFSDP_API const mfsdp_backend_ops *mfsdp__host_ops_table(void) {
  /* In the order of mfsdp_backend_ops. */
  static const mfsdp_backend_ops ops = {sizeof(mfsdp_backend_ops),
                                        "host",
                                        mfsdp__host_mem_alloc,
                                        mfsdp__host_mem_free,
                                        mfsdp__host_queue_create,
                                        mfsdp__host_queue_destroy,
                                        mfsdp__host_event_create,
                                        mfsdp__host_event_destroy,
                                        mfsdp__host_event_record,
                                        mfsdp__host_queue_wait,
                                        mfsdp__host_event_query,
                                        mfsdp__host_event_wait,
                                        mfsdp__host_queue_call,
                                        mfsdp__host_copy,
                                        mfsdp__host_fill_bytes,
                                        mfsdp__host_cast_entry,
                                        mfsdp__host_sum_terms_entry,
                                        mfsdp__host_sumsq_entry,
                                        mfsdp__host_verdict_entry,
                                        mfsdp__host_gemm_entry,
                                        mfsdp__host_normalize_entry,
                                        mfsdp__host_fused_entry,
                                        NULL,
                                        NULL,
                                        NULL,
                                        NULL,
                                        mfsdp__host_precondition_entry};
  return &ops;
}

/* The same with eigh and qr. */
MFSDP_API mfsdp_backend_ops mfsdp__host_ops_of(const mfsdp_host_lapack *lapack) {
  mfsdp_backend_ops ops = *mfsdp__host_ops_table();
  if (lapack == NULL) return ops;
  ops.eigh_workspace_nbytes = mfsdp__host_eigh_nbytes;
  ops.qr_workspace_nbytes = mfsdp__host_qr_nbytes;
  ops.eigh = mfsdp__host_eigh_entry;
  ops.qr = mfsdp__host_qr_entry;
  return ops;
}

MFSDP_API mfsdp_status mfsdp__host_desc_check(mfsdp_context *context,
                                              const mfsdp_host_backend_desc *desc) {
  if (desc == NULL) return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "host backend: desc is NULL");
  if (desc->struct_nbytes != sizeof(*desc))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "host backend: desc.struct_nbytes is %zu, needs %zu (use "
                      "mfsdp_host_backend_desc_default)",
                      desc->struct_nbytes, sizeof(*desc));
  if (desc->math != NULL && (!MFSDP_HAS(desc->math, sgemm) || !MFSDP_HAS(desc->math, ssyrk)))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "host backend: desc.math needs sgemm and ssyrk");
  if (desc->lapack != NULL &&
      (!MFSDP_HAS(desc->lapack, syevd_nbytes) || !MFSDP_HAS(desc->lapack, orthonormalize_nbytes) ||
       !MFSDP_HAS(desc->lapack, syevd) || !MFSDP_HAS(desc->lapack, orthonormalize)))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "host backend: desc.lapack needs syevd and orthonormalize, and their sizes");
  if (desc->queue_kind != MFSDP_HOST_QUEUE_INLINE && desc->queue_kind != MFSDP_HOST_QUEUE_WORKER)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "host backend: desc.queue_kind is %d, needs MFSDP_HOST_QUEUE_INLINE or "
                      "MFSDP_HOST_QUEUE_WORKER",
                      (int)desc->queue_kind);
  if (desc->queue_capacity < 1 || desc->submit_timeout_us < 1)
    return MFSDP_FAIL(
        context, MFSDP_E_ARGUMENT,
        "host backend: desc.queue_capacity is %d, desc.submit_timeout_us is %lld; both "
        "need at least 1",
        (int)desc->queue_capacity, (long long)desc->submit_timeout_us);
  if (desc->math_threads < 0)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "host backend: desc.math_threads is %d, needs at least 0",
                      (int)desc->math_threads);
  return MFSDP_OK;
}

/*
 * Makes a backend for the rank of `context`, which must outlive it. COMPLETE. The description is
 * copied. E_ARGUMENT, E_MEMORY; *out is NULL then.
 */
MFSDP_API mfsdp_status mfsdp_host_backend_create(mfsdp_context *context,
                                                 const mfsdp_host_backend_desc *desc,
                                                 mfsdp_host_backend **out) {
  mfsdp_host_backend *host;
  void *memory;
  if (out == NULL) return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "host backend: out is NULL");
  *out = NULL;
  MFSDP_TRY(mfsdp__host_desc_check(context, desc));
  MFSDP_TRY(mfsdp_table_alloc(context, 1, sizeof(*host), "host backend", &memory));
  host = (mfsdp_host_backend *)memory;
  host->table.struct_nbytes = sizeof(host->table);
  host->ops = mfsdp__host_ops_of(desc->lapack);
  host->table.ops = &host->ops;
  host->table.self = host;
  host->table.traits = MFSDP_BACKEND_HOST_MEMORY | MFSDP_BACKEND_TASKS_MAY_WAIT;
  host->context = context;
  host->math = desc->math != NULL ? desc->math : mfsdp_host_math_loops();
  host->lapack = desc->lapack;
  host->queue_kind = desc->queue_kind;
  host->queue_capacity = desc->queue_capacity;
  host->submit_timeout_us = desc->submit_timeout_us;
  if (desc->math_threads > 0 && MFSDP_HAS(host->math, set_threads))
    host->math->set_threads((int)desc->math_threads);
  if (desc->math_threads > 0 && host->lapack != NULL && MFSDP_HAS(host->lapack, set_threads))
    host->lapack->set_threads((int)desc->math_threads);
  *out = host;
  return MFSDP_OK;
}

/* E_STATE, and nothing is done, while queues or events of it exist. NULL is allowed. */
MFSDP_API mfsdp_status mfsdp_host_backend_destroy(mfsdp_context *context,
                                                  mfsdp_host_backend *host) {
  if (host == NULL) return MFSDP_OK;
  if (host->queue_count != 0 || host->events != NULL)
    return MFSDP_FAIL(context, MFSDP_E_STATE,
                      "host backend: %d queues%s still exist; destroy them first",
                      (int)host->queue_count, host->events != NULL ? " and some events" : "");
  mfsdp_table_free(context, host, 1, sizeof(*host));
  return MFSDP_OK;
}

/* The table to hand to the library; valid until the backend is destroyed. */
MFSDP_API const mfsdp_backend *mfsdp_host_backend_get(const mfsdp_host_backend *host) {
  return &host->table;
}

#endif /* MFSDP_HOST_BACKEND_HOST_H */
