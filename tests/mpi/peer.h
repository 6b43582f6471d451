/* SPDX-License-Identifier: MIT */
/*
 * peer.h: what the programs of this folder share: a rank with its MPI world, transport and control
 * plane, expectations that are counted, and the verdict of a rank that saw a failure.
 */
#ifndef MFSDP_TESTS_MPI_PEER_H
#define MFSDP_TESTS_MPI_PEER_H

#include "mfsdp/host/backend_host.h"
#include "mfsdp/mpi/transport_mpi.h"

#include <stdlib.h>

typedef struct peer {
  mfsdp_context context;
  mfsdp_host_backend *host;
  const mfsdp_backend *backend;
  mfsdp_queue *queue;
  mfsdp_event *event;
  mfsdp_mpi_world *world;
  mfsdp_transport transport;
  mfsdp_control control;
  int32_t rank, size;
  int failures;
} peer;

static const char *scenario_name = "?";

static inline void expect(peer *p, int condition, const char *what) {
  if (condition) return;
  ++p->failures;
  fprintf(stderr, "%s: rank %d: %s (%s: %s)\n", scenario_name, (int)p->rank, what,
          mfsdp_status_name(p->context.error.status), p->context.error.message);
}

static inline mfsdp_status open_peer(peer *p, MPI_Comm comm, const mfsdp_mpi_world_desc *desc,
                                     int worker) {
  const mfsdp_context_desc context_desc = mfsdp_context_desc_default();
  mfsdp_host_backend_desc host_desc = mfsdp_host_backend_desc_default();
  memset(p, 0, sizeof(*p));
  MFSDP_TRY(mfsdp_context_init(&p->context, &context_desc));
  if (worker) host_desc.queue_kind = MFSDP_HOST_QUEUE_WORKER;
  MFSDP_TRY(mfsdp_host_backend_create(&p->context, &host_desc, &p->host));
  p->backend = mfsdp_host_backend_get(p->host);
  MFSDP_TRY(mfsdp_mpi_world_wrap(&p->context, comm, desc, &p->world));
  p->rank = p->world->rank;
  p->size = p->world->world;
  p->context.desc.rank = p->rank;
  MFSDP_TRY(mfsdp_mpi_transport_create(&p->context, p->world, p->backend, &p->transport));
  MFSDP_TRY(mfsdp_mpi_control_create(&p->context, p->world, &p->control));
  MFSDP_TRY(
      p->backend->ops->queue_create(p->backend->self, &p->context, "communication", &p->queue));
  return p->backend->ops->event_create(p->backend->self, &p->context, &p->event);
}

static inline mfsdp_status close_peer(peer *p) {
  mfsdp_context *c = &p->context;
  p->backend->ops->event_destroy(p->backend->self, c, p->event);
  p->backend->ops->queue_destroy(p->backend->self, c, p->queue);
  MFSDP_TRY(p->control.ops->destroy(p->control.self, c));
  MFSDP_TRY(p->transport.ops->destroy(p->transport.self, c));
  MFSDP_TRY(mfsdp_mpi_world_destroy(c, p->world));
  MFSDP_TRY(mfsdp_host_backend_destroy(c, p->host));
  return mfsdp_context_destroy(c);
}

static inline mfsdp_status allgather(peer *p, const void *in, size_t nbytes, void *out) {
  return p->control.ops->allgather(p->control.self, &p->context, in, nbytes, out,
                                   p->control.deadline_us);
}

/* PATH.RANK: "status culprit rank milliseconds message". */
static inline void write_verdict(const peer *p, const char *path, mfsdp_status status,
                                 int64_t start_us) {
  char name[1024];
  FILE *file;
  (void)snprintf(name, sizeof(name), "%s.%d", path, (int)p->rank);
  file = fopen(name, "w");
  if (file == NULL) return;
  (void)fprintf(file, "%s %d %d %lld %s\n", mfsdp_status_name(status),
                (int)p->context.error.culprit, (int)p->context.error.rank,
                (long long)((mfsdp_clock_us() - start_us) / 1000), p->context.error.message);
  (void)fclose(file);
}

/* Rank 0 prints whether all ranks are content. Collective. */
static inline void say_result(int32_t failures, int32_t rank, int32_t size) {
  int32_t all = 0;
  (void)MPI_Allreduce(&failures, &all, 1, MPI_INT32_T, MPI_SUM, MPI_COMM_WORLD);
  if (rank == 0)
    printf("%s %s on %d ranks\n", all == 0 ? "ok" : "not ok", scenario_name, (int)size);
}

#endif /* MFSDP_TESTS_MPI_PEER_H */
