/* SPDX-License-Identifier: MIT */
/* collective.c - the collectives alone, over thread ranks: rank 1 owns everything of a buffer of 8
 * floats; gather gives it to all, reduce sums all contributions on the owner.
 * Build: cc -std=c11 -D_POSIX_C_SOURCE=200809L -O3 -march=native -fno-math-errno \
 *           -ffp-contract=off -I. \
 *           examples/collective.c -lpthread -lm */
#include "mfsdp/collective.h"
#include "mfsdp/host/threads_run.h"

#define RANKS 3
#define COUNT 8

/* The part that a user writes: a layout, two collectives, two calls. */
static mfsdp_status talk(mfsdp_context *context, const mfsdp_transport *transport,
                         mfsdp_queue *queue) {
  mfsdp_extent extent = {1, 0, 0, COUNT,
                         COUNT}; /* owner, place in the buffer, in the shard, counts */
  mfsdp_layout layout = {sizeof(layout), &extent, 1, RANKS, MFSDP_F32, COUNT, NULL};
  mfsdp_coll_desc desc = mfsdp_coll_desc_default();
  float shard[COUNT] = {0, 1, 2, 3, 4, 5, 6, 7}, full[COUNT], sum[COUNT];
  const mfsdp_backend *backend = transport->backend;
  mfsdp_buffer workspace;
  mfsdp_coll *gather = NULL, *reduce = NULL;
  desc.layout = &layout;
  desc.transport = transport;
  desc.kind = MFSDP_COLL_GATHER;
  desc.traffic = MFSDP_TRAFFIC_MATERIALIZE;
  MFSDP_TRY(mfsdp_coll_create(context, &desc, &gather));
  desc.kind = MFSDP_COLL_REDUCE;
  desc.traffic = MFSDP_TRAFFIC_REDUCE;
  MFSDP_TRY(mfsdp_coll_create(context, &desc, &reduce));
  MFSDP_TRY(mfsdp_buffer_alloc(context, backend, mfsdp_coll_workspace_nbytes(reduce),
                               MFSDP_SPACE_DEVICE, MFSDP_MEMORY_WORKSPACE, &workspace));
  MFSDP_TRY(mfsdp_gather(context, gather, queue, shard, full)); /* queues run inline here */
  MFSDP_TRY(mfsdp_reduce(context, reduce, queue, full, sum, 1, workspace.data));
  if (transport->rank == 1) printf("rank 1: sum over %d ranks of element 7 is %g\n", RANKS, sum[7]);
  mfsdp_buffer_free(context, backend, &workspace);
  mfsdp_coll_destroy(context, reduce);
  mfsdp_coll_destroy(context, gather);
  return MFSDP_OK;
}

static mfsdp_status body(mfsdp_threads_rank *rank, void *user) {
  const mfsdp_backend *backend = rank->backend;
  mfsdp_queue *queue = NULL;
  mfsdp_status status;
  (void)user;
  MFSDP_TRY(backend->ops->queue_create(backend->self, &rank->context, "communication", &queue));
  status = talk(&rank->context, &rank->transport, queue);
  backend->ops->queue_destroy(backend->self, &rank->context, queue);
  return status;
}

int main(void) {
  const mfsdp_context_desc context_desc = mfsdp_context_desc_default();
  mfsdp_threads_run_desc desc = mfsdp_threads_run_desc_default();
  mfsdp_context context;
  desc.threads.world = RANKS;
  desc.threads.deadline_us = 5000000;
  if (mfsdp_context_init(&context, &context_desc) == MFSDP_OK &&
      mfsdp_threads_run(&context, &desc, body, NULL) == MFSDP_OK)
    return 0;
  fprintf(stderr, "collective: %s\n", mfsdp_context_error(&context)->message);
  return 1;
}
