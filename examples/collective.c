/* SPDX-License-Identifier: MIT */
/* collective.c - the collectives alone, over thread ranks: rank 1 owns everything of a buffer of 8
 * floats; gather gives it to all, reduce sums all contributions on the owner.
 * Build: cc -std=c11 -D_POSIX_C_SOURCE=200809L -O3 -march=native -fno-math-errno \
 *           -ffp-contract=off -I. \
 *           examples/collective.c -lpthread -lm */
#include "mfsdp/collective.h"
#include "mfsdp/host/backend_host.h"
#include "mfsdp/host/transport_threads.h"

#define RANKS 3
#define COUNT 8

typedef struct rank {
  mfsdp_threads_world *world;
  int32_t index;
  mfsdp_status status;
  mfsdp_thread thread;
} rank;

/* The part that a user writes: a layout, two collectives, two calls. */
static mfsdp_status talk(mfsdp_context *context, const mfsdp_transport *transport,
                         mfsdp_queue *queue) {
  mfsdp_extent extent = {1, 0, 0, COUNT,
                         COUNT}; /* owner, place in the buffer, in the shard, counts */
  mfsdp_layout layout = {sizeof(layout), &extent, 1, RANKS, MFSDP_F32, COUNT};
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

static mfsdp_status run(mfsdp_context *context, rank *self) {
  const mfsdp_host_backend_desc desc = mfsdp_host_backend_desc_default();
  mfsdp_host_backend *host = NULL;
  const mfsdp_backend *backend;
  mfsdp_transport transport;
  mfsdp_queue *queue = NULL;
  MFSDP_TRY(mfsdp_host_backend_create(context, &desc, &host));
  backend = mfsdp_host_backend_get(host);
  MFSDP_TRY(mfsdp_threads_transport_create(context, self->world, self->index, backend, &transport));
  MFSDP_TRY(backend->ops->queue_create(backend->self, context, "communication", &queue));
  MFSDP_TRY(talk(context, &transport, queue));
  backend->ops->queue_destroy(backend->self, context, queue);
  MFSDP_TRY(transport.ops->destroy(transport.self, context));
  return mfsdp_host_backend_destroy(context, host);
}

static void rank_main(void *argument) {
  rank *self = (rank *)argument;
  mfsdp_context_desc desc = mfsdp_context_desc_default();
  mfsdp_context context;
  desc.rank = self->index;
  self->status = mfsdp_context_init(&context, &desc);
  if (self->status == MFSDP_OK) self->status = run(&context, self);
  if (self->status != MFSDP_OK)
    fprintf(stderr, "collective: rank %d: %s\n", (int)self->index,
            mfsdp_context_error(&context)->message);
}

int main(void) {
  const mfsdp_context_desc context_desc = mfsdp_context_desc_default();
  mfsdp_threads_world_desc desc = mfsdp_threads_world_desc_default();
  mfsdp_threads_world *world = NULL;
  mfsdp_context context;
  rank ranks[RANKS];
  int failed = 0, i;
  desc.world = RANKS;
  desc.deadline_us = 5000000;
  if (mfsdp_context_init(&context, &context_desc) != MFSDP_OK ||
      mfsdp_threads_world_create(&context, &desc, &world) != MFSDP_OK)
    return 1;
  for (i = 0; i < RANKS; ++i) {
    ranks[i].world = world;
    ranks[i].index = i;
    if (mfsdp_thread_start(&ranks[i].thread, rank_main, &ranks[i]) != MFSDP_OK) return 1;
  }
  for (i = 0; i < RANKS; ++i) {
    mfsdp_thread_join(&ranks[i].thread);
    failed |= ranks[i].status != MFSDP_OK;
  }
  return failed || mfsdp_threads_world_destroy(&context, world) != MFSDP_OK;
}
