/* SPDX-License-Identifier: MIT */
/*
 * threads_run.h - runs a function as several ranks, which are threads of this process, and gives each
 * what it needs: a context, the host backend, a transport and a control plane.
 *
 *   static mfsdp_status body(mfsdp_threads_rank *rank, void *user) {
 *     ... plan for rank->world; group.transport = &rank->transport; group.control = &rank->control;
 *     desc.backend = rank->backend; MFSDP_TRY(mfsdp_runtime_create(&rank->context, &desc, &rt)); ...
 *   }
 *   mfsdp_threads_run_desc desc = mfsdp_threads_run_desc_default();
 *   desc.threads.world = 4;
 *   MFSDP_TRY(mfsdp_threads_run(&context, &desc, body, user));
 *
 * For programs that have no threads or processes of their own yet. Does not: choose a BLAS
 * (desc.host.math), free what the body made, or catch signals.
 * Link flags: -lpthread -lm, and those of the math. POSIX 2008: see posix/clock.h.
 */
#ifndef MFSDP_HOST_THREADS_RUN_H
#define MFSDP_HOST_THREADS_RUN_H

#include "backend_host.h"
#include "transport_threads.h"

typedef struct mfsdp_threads_run_desc {
  size_t struct_nbytes;
  mfsdp_threads_world_desc threads; /* how many ranks, and how they meet */
  mfsdp_host_backend_desc host;     /* of each rank's backend */
} mfsdp_threads_run_desc;

/* One rank, and the defaults of both. */
MFSDP_API mfsdp_threads_run_desc mfsdp_threads_run_desc_default(void) {
  mfsdp_threads_run_desc desc;
  memset(&desc, 0, sizeof(desc));
  desc.struct_nbytes = sizeof(desc);
  desc.threads = mfsdp_threads_world_desc_default();
  desc.host = mfsdp_host_backend_desc_default();
  return desc;
}

/* What a rank has while its body runs. */
typedef struct mfsdp_threads_rank {
  int32_t rank, world;
  mfsdp_context context; /* the caller's allocator and callbacks: all ranks call them, at once */
  mfsdp_host_backend *host;
  const mfsdp_backend *backend;
  mfsdp_transport transport;
  mfsdp_control control;
} mfsdp_threads_rank;

typedef mfsdp_status (*mfsdp_threads_body)(mfsdp_threads_rank *rank, void *user);

typedef struct mfsdp__threads_run {
  mfsdp_threads_rank rank;
  mfsdp_threads_world *world;
  const mfsdp_threads_run_desc *desc;
  const mfsdp_context_desc *context_desc;
  mfsdp_threads_body body;
  void *user;
  mfsdp_thread thread;
  int kept; /* it failed, and its queues are still there */
  mfsdp_status status;
  mfsdp_error error;
} mfsdp__threads_run;

MFSDP_API mfsdp_status mfsdp__threads_run_create(mfsdp__threads_run *run) {
  mfsdp_threads_rank *rank = &run->rank;
  MFSDP_TRY(mfsdp_host_backend_create(&rank->context, &run->desc->host, &rank->host));
  rank->backend = mfsdp_host_backend_get(rank->host);
  MFSDP_TRY(mfsdp_threads_transport_create(&rank->context, run->world, rank->rank, rank->backend,
                                           &rank->transport));
  return mfsdp_threads_control_create(&rank->context, run->world, rank->rank, &rank->control);
}

/* What was made, in reverse; the first error. */
MFSDP_API mfsdp_status mfsdp__threads_run_destroy(mfsdp_threads_rank *rank) {
  mfsdp_status first = MFSDP_OK, status = MFSDP_OK;
  if (rank->control.ops != NULL)
    first = rank->control.ops->destroy(rank->control.self, &rank->context);
  if (rank->transport.ops != NULL)
    status = rank->transport.ops->destroy(rank->transport.self, &rank->context);
  if (first == MFSDP_OK) first = status;
  status = rank->host != NULL ? mfsdp_host_backend_destroy(&rank->context, rank->host) : MFSDP_OK;
  if (first == MFSDP_OK) first = status;
  return first;
}

/* What a body ended with, for the others and for the caller: also when it left no message, or one of
 * an error that it got over. */
MFSDP_API void mfsdp__threads_run_explain(mfsdp__threads_run *run, mfsdp_status status) {
  const mfsdp_error last = *mfsdp_context_error(&run->rank.context);
  run->error = last;
  run->error.rank = run->rank.rank; /* whom the result asks for the message */
  if (status == MFSDP_OK || last.status == status) return;
  if (last.status == MFSDP_OK)
    (void)MFSDP_ERROR_SET(&run->error, status, run->rank.rank, "ended with %s and no message",
                          mfsdp_status_name(status));
  else
    (void)MFSDP_ERROR_SET(&run->error, status, run->rank.rank,
                          "ended with %s; its last error was %s: %.160s", mfsdp_status_name(status),
                          mfsdp_status_name(last.status), last.message);
}

MFSDP_API mfsdp_status mfsdp__threads_run_inside(mfsdp__threads_run *run) {
  mfsdp_threads_rank *rank = &run->rank;
  mfsdp_status status = mfsdp__threads_run_create(run), last;
  if (status == MFSDP_OK) status = run->body(rank, run->user);
  mfsdp__threads_run_explain(run, status);
  if (status != MFSDP_OK) mfsdp_threads_world_poison(run->world, &run->error);
  /* Queues that it left may still be at work: what they use stays. */
  run->kept = status != MFSDP_OK && rank->host != NULL && rank->host->queue_count > 0;
  if (run->kept) return status;
  last = mfsdp__threads_run_destroy(rank);
  if (status != MFSDP_OK || last == MFSDP_OK) return status;
  run->error = *mfsdp_context_error(&rank->context);
  return last;
}

MFSDP_API void mfsdp__threads_run_main(void *argument) {
  mfsdp__threads_run *run = (mfsdp__threads_run *)argument;
  mfsdp_context_desc desc = *run->context_desc;
  desc.rank = run->rank.rank;
  run->status = mfsdp_context_init(&run->rank.context, &desc);
  if (run->status != MFSDP_OK) return;
  run->status = mfsdp__threads_run_inside(run);
  if (run->status != MFSDP_OK) return; /* what a failed body left is its own */
  run->status = mfsdp_context_destroy(&run->rank.context);
  if (run->status != MFSDP_OK) run->error = *mfsdp_context_error(&run->rank.context);
}

/* Starts all ranks; of those that could not be started the others learn. */
MFSDP_API int32_t mfsdp__threads_run_start(mfsdp__threads_run *runs, int32_t world) {
  int32_t r;
  for (r = 0; r < world; ++r) {
    mfsdp_status status = mfsdp_thread_start(&runs[r].thread, mfsdp__threads_run_main, &runs[r]);
    if (status == MFSDP_OK) continue;
    runs[r].error.rank = r;
    runs[r].status = MFSDP_ERROR_SET(&runs[r].error, status, r, "its thread cannot be started");
    mfsdp_threads_world_poison(runs[r].world, &runs[r].error);
    break;
  }
  return r;
}

/* The first error of the world is the one to tell: what the others have they got from it. */
MFSDP_API mfsdp_status mfsdp__threads_run_result(mfsdp_context *context,
                                                 const mfsdp__threads_run *runs, int32_t world) {
  const mfsdp__threads_run *first = NULL;
  int32_t r;
  for (r = world - 1; r >= 0; --r)
    if (runs[r].status != MFSDP_OK) first = &runs[r];
  if (first == NULL) return MFSDP_OK;
  if (mfsdp__threads_poisoned(first->world)) {
    r = first->world->error.rank;
    if (r >= 0 && r < world && runs[r].status != MFSDP_OK) first = &runs[r];
  }
  r = first->error.culprit >= 0 ? first->error.culprit : first->rank.rank;
  return MFSDP_FAIL_PEER(context, first->status, r, "rank %d: %.230s", (int)first->rank.rank,
                         first->error.message);
}

/* Gives back the world of ranks that have ended; the first error. */
MFSDP_API mfsdp_status mfsdp__threads_run_end(mfsdp_context *context, mfsdp_threads_world *world,
                                              mfsdp__threads_run *runs, mfsdp_status status) {
  const int32_t count = world->desc.world;
  const mfsdp_error first = context->error;
  mfsdp_status last;
  int32_t r;
  for (r = 0; r < count; ++r)
    if (runs[r].kept) return status;
  mfsdp_table_free(context, runs, (size_t)count, sizeof(*runs));
  last = mfsdp_threads_world_destroy(context, world);
  if (status == MFSDP_OK) return last;
  context->error = first;
  return status;
}

/*
 * Calls body(rank, user) in a new thread for each rank, waits for all, and returns OK if all did. One that
 * fails ends the world, so the others leave their waits with E_POISONED; then the status is the failed
 * one's, with "rank 2: " before its message. COMPLETE. A body destroys what it made, also when it fails,
 * or leaks it; with queues it leaks the world too. E_ARGUMENT for the description; E_MEMORY; E_STATE: a body that ended with OK left something.
 */
MFSDP_API mfsdp_status mfsdp_threads_run(mfsdp_context *context, const mfsdp_threads_run_desc *desc,
                                         mfsdp_threads_body body, void *user) {
  mfsdp_threads_world *world = NULL;
  mfsdp__threads_run *runs;
  mfsdp_status status;
  int32_t r, started;
  void *memory;
  if (desc == NULL || desc->struct_nbytes != sizeof(*desc) || body == NULL)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "threads run: body or desc is NULL, or desc.struct_nbytes is not %zu (use "
                      "mfsdp_threads_run_desc_default)",
                      sizeof(*desc));
  MFSDP_TRY(mfsdp_threads_world_create(context, &desc->threads, &world));
  status = mfsdp_table_alloc(context, (size_t)desc->threads.world, sizeof(*runs), "ranks", &memory);
  if (status != MFSDP_OK) {
    (void)mfsdp_threads_world_destroy(context, world);
    return status;
  }
  runs = (mfsdp__threads_run *)memory;
  for (r = 0; r < desc->threads.world; ++r) {
    runs[r].rank.rank = r;
    runs[r].rank.world = desc->threads.world;
    runs[r].world = world;
    runs[r].desc = desc;
    runs[r].context_desc = &context->desc;
    runs[r].body = body;
    runs[r].user = user;
  }
  started = mfsdp__threads_run_start(runs, desc->threads.world);
  for (r = 0; r < started; ++r)
    mfsdp_thread_join(&runs[r].thread);
  status = mfsdp__threads_run_result(context, runs, desc->threads.world);
  return mfsdp__threads_run_end(context, world, runs, status);
}

#endif /* MFSDP_HOST_THREADS_RUN_H */
