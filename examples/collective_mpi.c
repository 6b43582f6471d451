/* SPDX-License-Identifier: MIT */
/* collective_mpi.c - the collectives over a communicator of your own: the ranks of an mpirun are
 * split in two groups, and each group gathers and sums a buffer whose owners have uneven parts.
 * Build: mpicc -std=c11 -D_POSIX_C_SOURCE=200809L -O3 -march=native -fno-math-errno \
 *           -ffp-contract=off -I. examples/collective_mpi.c -lpthread -lm -o collective_mpi
 * Run:   mpirun -n 5 ./collective_mpi */
#include "mfsdp/collective.h"
#include "mfsdp/host/backend_host.h"
#include "mfsdp/mpi/transport_mpi.h"

#include <stdlib.h>

#define PART 1000 /* rank r owns r parts: the first of a group owns nothing */

/* What the library needs around your communicator. */
typedef struct links {
  mfsdp_context context;
  mfsdp_host_backend *host;
  mfsdp_queue *queue;
  mfsdp_mpi_world *world;
  mfsdp_transport transport;
} links;

static mfsdp_status open_links(links *l, MPI_Comm comm) {
  mfsdp_host_backend_desc host = mfsdp_host_backend_desc_default();
  mfsdp_mpi_world_desc world = mfsdp_mpi_world_desc_default();
  const mfsdp_backend *backend;
  world.deadline_us = 20000000; /* a peer that does not come is named then */
  MFSDP_TRY(mfsdp_host_backend_create(&l->context, &host, &l->host));
  backend = mfsdp_host_backend_get(l->host);
  MFSDP_TRY(backend->ops->queue_create(backend->self, &l->context, "communication", &l->queue));
  MFSDP_TRY(mfsdp_mpi_world_wrap(&l->context, comm, &world, &l->world));
  return mfsdp_mpi_transport_create(&l->context, l->world, backend, &l->transport);
}

static mfsdp_status close_links(links *l) {
  const mfsdp_backend *backend = mfsdp_host_backend_get(l->host);
  MFSDP_TRY(l->transport.ops->destroy(l->transport.self, &l->context));
  MFSDP_TRY(mfsdp_mpi_world_destroy(&l->context, l->world)); /* your communicator stays */
  backend->ops->queue_destroy(backend->self, &l->context, l->queue);
  return mfsdp_host_backend_destroy(&l->context, l->host);
}

/* Shards to full buffers, then the sum of all full buffers to its owners. The host backend's queues
 * run in place unless asked otherwise, so both are complete when the call returns. */
static mfsdp_status talk(links *l, const mfsdp_layout *layout, const float *shard, float *full,
                         float *sum) {
  mfsdp_coll_desc desc = mfsdp_coll_desc_default();
  mfsdp_coll *gather = NULL, *reduce = NULL;
  mfsdp_status status;
  void *workspace;
  int64_t i;
  desc.layout = layout;
  desc.transport = &l->transport;
  desc.kind = MFSDP_COLL_GATHER;
  desc.traffic = MFSDP_TRAFFIC_MATERIALIZE;
  status = mfsdp_coll_create(&l->context, &desc, &gather);
  desc.kind = MFSDP_COLL_REDUCE;
  desc.traffic = MFSDP_TRAFFIC_REDUCE;
  if (status == MFSDP_OK) status = mfsdp_coll_create(&l->context, &desc, &reduce);
  if (status == MFSDP_OK) status = mfsdp_gather(&l->context, gather, l->queue, shard, full);
  workspace = reduce == NULL ? NULL : malloc(mfsdp_coll_workspace_nbytes(reduce) + 1);
  if (status == MFSDP_OK && workspace == NULL)
    status = MFSDP_FAIL(&l->context, MFSDP_E_MEMORY, "no memory for the workspace");
  for (i = 0; i < layout->full_count && status == MFSDP_OK; ++i)
    full[i] *= (float)(l->transport.rank + 1); /* what each rank adds is its own */
  if (status == MFSDP_OK)
    status = mfsdp_reduce(&l->context, reduce, l->queue, full, sum, 1, workspace);
  free(workspace);
  mfsdp_coll_destroy(&l->context, reduce);
  mfsdp_coll_destroy(&l->context, gather);
  return status;
}

static float value(int64_t i) {
  return (float)(i % 64);
}

static mfsdp_status run(links *l, MPI_Comm comm, int group) {
  const int32_t rank = l->transport.rank, ranks = l->transport.world;
  const int64_t own = (int64_t)PART * rank, first = own * (rank - 1) / 2;
  mfsdp_layout layout = {sizeof(layout), NULL, 0, ranks, MFSDP_F32, 0, NULL};
  mfsdp_extent *extents = (mfsdp_extent *)calloc((size_t)ranks, sizeof(*extents));
  const size_t most = (size_t)ranks * PART * (size_t)(ranks + 1) / 2;
  float *shard = (float *)calloc(most, sizeof(float)), *full = (float *)calloc(most, sizeof(float));
  float *sum = (float *)calloc(most, sizeof(float));
  mfsdp_status status = MFSDP_E_MEMORY; /* unless there is enough */
  int64_t i, wrong = 0, all = 0;
  int32_t r;
  for (r = 0; extents != NULL && r < ranks; ++r) {
    extents[r].owner = r;
    extents[r].unit_offset = layout.full_count; /* shard_offset 0: each owns one extent */
    extents[r].count = extents[r].payload_count = (int64_t)PART * r;
    layout.full_count += extents[r].count;
  }
  layout.extents = extents;
  layout.extent_count = ranks;
  for (i = 0; shard != NULL && i < own; ++i)
    shard[i] = value(first + i);
  if (extents != NULL && shard != NULL && full != NULL && sum != NULL)
    status = talk(l, &layout, shard, full, sum);
  if (status == MFSDP_OK) {
    for (i = 0; i < layout.full_count; ++i)
      wrong += full[i] != value(i) * (float)(rank + 1);
    for (i = 0; i < own; ++i)
      wrong += sum[i] != value(first + i) * (float)ranks * (float)(ranks + 1) / 2.0f;
    (void)MPI_Reduce(&wrong, &all, 1, MPI_INT64_T, MPI_SUM, 0,
                     comm); /* your own calls, beside ours */
    if (rank == 0)
      printf("group %d: %d ranks, %lld elements, %lld wrong\n", group, (int)ranks,
             (long long)layout.full_count, (long long)all);
  }
  free(sum);
  free(full);
  free(shard);
  free(extents);
  return status;
}

int main(int argc, char **argv) {
  const mfsdp_context_desc context_desc = mfsdp_context_desc_default();
  mfsdp_status status = MFSDP_E_MEMORY;
  MPI_Comm comm;
  int number, group;
  links l;
  if (MPI_Init(&argc, &argv) != MPI_SUCCESS) return 1;
  (void)MPI_Comm_rank(MPI_COMM_WORLD, &number);
  group = number % 2;
  (void)MPI_Comm_split(MPI_COMM_WORLD, group, number, &comm);
  memset(&l, 0, sizeof(l));
  if (mfsdp_context_init(&l.context, &context_desc) == MFSDP_OK) status = open_links(&l, comm);
  if (status == MFSDP_OK) status = run(&l, comm, group);
  if (status == MFSDP_OK) status = close_links(&l);
  if (status != MFSDP_OK) { /* peers would wait for what this process does not do any more */
    fprintf(stderr, "collective_mpi: process %d: %s\n", number,
            mfsdp_context_error(&l.context)->message);
    (void)MPI_Abort(MPI_COMM_WORLD, 1);
  }
  (void)MPI_Comm_free(&comm);
  (void)MPI_Finalize();
  return 0;
}
