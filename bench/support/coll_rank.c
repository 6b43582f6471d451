/* SPDX-License-Identifier: MIT */
#include "coll_rank.h"

#include <stdio.h>
#include <stdlib.h>

void coll_split_make(coll_split *split, int32_t world, int64_t total, double gamma) {
  const int64_t most = (int64_t)(gamma * (double)total / world);
  int64_t at = 0;
  int32_t r;
  memset(split, 0, sizeof(*split));
  split->total = split->smallest = total;
  for (r = 0; r < world; ++r) {
    const int64_t left = total - at;
    split->count[r] = world == 1 ? total : r == 0 ? most : left / (world - r);
    split->first[r] = at;
    if (split->count[r] < split->smallest) split->smallest = split->count[r];
    split->extents[r].owner = r;
    split->extents[r].unit_offset = at;
    split->extents[r].count = split->extents[r].payload_count = split->count[r];
    at += split->count[r];
  }
  split->layout.struct_nbytes = sizeof(split->layout);
  split->layout.extents = split->extents;
  split->layout.extent_count = world;
  split->layout.world = world;
  split->layout.dtype = MFSDP_F32;
  split->layout.full_count = total;
}

void coll_need(coll_rank *r, mfsdp_status status) {
  if (status == MFSDP_OK) return;
  fprintf(stderr, "bench collective: rank %d: %s: %s\n", (int)r->rank, mfsdp_status_name(status),
          mfsdp_context_error(&r->context)->message);
  exit(1);
}

void coll_rank_open(coll_rank *r, int32_t rank, int32_t world) {
  mfsdp_context_desc context_desc = mfsdp_context_desc_default();
  const mfsdp_host_backend_desc host_desc = mfsdp_host_backend_desc_default();
  memset(r, 0, sizeof(*r));
  r->rank = context_desc.rank = rank;
  r->world = world;
  coll_need(r, mfsdp_context_init(&r->context, &context_desc));
  coll_need(r, mfsdp_host_backend_create(&r->context, &host_desc, &r->host));
  r->backend = mfsdp_host_backend_get(r->host);
  coll_need(
      r, r->backend->ops->queue_create(r->backend->self, &r->context, "communication", &r->queue));
  coll_need(r, r->backend->ops->event_create(r->backend->self, &r->context, &r->event));
}

void coll_rank_buffers(coll_rank *r, int64_t total) {
  float **const buffers[4] = {&r->shard, &r->full, &r->grad, &r->sum};
  int i;
  for (i = 0; i < 4; ++i) {
    *buffers[i] = (float *)calloc((size_t)total + 1, sizeof(float));
    if (*buffers[i] == NULL) {
      fprintf(stderr, "bench collective: no memory\n");
      exit(1);
    }
  }
}

void coll_rank_close(coll_rank *r) {
  free(r->sum);
  free(r->grad);
  free(r->full);
  free(r->shard);
  r->backend->ops->event_destroy(r->backend->self, &r->context, r->event);
  r->backend->ops->queue_destroy(r->backend->self, &r->context, r->queue);
  if (r->transport.self != NULL)
    coll_need(r, r->transport.ops->destroy(r->transport.self, &r->context));
  coll_need(r, mfsdp_host_backend_destroy(&r->context, r->host));
  (void)mfsdp_context_destroy(&r->context);
}

/* Below 2^24 with 64 ranks' sum, and without a period that a shifted buffer would keep. */
static float element(int64_t i) {
  return (float)(i * 7 % 4093);
}

void coll_rank_fill(coll_rank *r, const coll_split *split) {
  int64_t i;
  for (i = 0; i < split->count[r->rank]; ++i)
    r->shard[i] = element(split->first[r->rank] + i);
  for (i = 0; i < split->total; ++i)
    r->grad[i] = (float)(r->rank + 1) * element(i);
}

void coll_rank_spoil(coll_rank *r, const coll_split *split, mfsdp_coll_kind kind) {
  if (kind == MFSDP_COLL_GATHER)
    memset(r->full, 0xff, (size_t)split->total * sizeof(float));
  else
    memset(r->sum, 0xff, (size_t)split->count[r->rank] * sizeof(float));
}

int64_t coll_rank_wrong(const coll_rank *r, const coll_split *split, mfsdp_coll_kind kind) {
  const float ranks = (float)(r->world * (r->world + 1) / 2);
  const int64_t first = split->first[r->rank];
  int64_t i, wrong = 0;
  if (kind == MFSDP_COLL_GATHER) {
    for (i = 0; i < split->total; ++i)
      wrong += r->full[i] != element(i);
  } else {
    for (i = 0; i < split->count[r->rank]; ++i)
      wrong += r->sum[i] != ranks * element(first + i);
  }
  return wrong;
}

int coll_ours_make(coll_rank *r, coll_ours *ours, const coll_split *split, mfsdp_coll_kind kind,
                   const coll_how *how) {
  mfsdp_coll_desc desc = mfsdp_coll_desc_default();
  mfsdp_status status;
  desc.kind = kind;
  desc.algorithm = how->algorithm;
  desc.wire = how->wire;
  desc.layout = &split->layout;
  desc.transport = &r->transport;
  desc.traffic = kind == MFSDP_COLL_GATHER ? MFSDP_TRAFFIC_MATERIALIZE : MFSDP_TRAFFIC_REDUCE;
  desc.label = kind == MFSDP_COLL_GATHER ? "gather" : "reduce";
  if (how->chunk_nbytes > 0) desc.chunk_nbytes = how->chunk_nbytes;
  status = mfsdp_coll_create(&r->context, &desc, &ours->coll);
  if (status == MFSDP_E_UNSUPPORTED) return 0;
  coll_need(r, status);
  ours->workspace = malloc(mfsdp_coll_workspace_nbytes(ours->coll) + 1);
  if (ours->workspace == NULL) coll_need(r, MFSDP_E_MEMORY);
  return 1;
}

void coll_ours_run(coll_rank *r, coll_ours *ours) {
  if (ours->coll->kind == MFSDP_COLL_GATHER)
    coll_need(r, mfsdp_gather(&r->context, ours->coll, r->queue, r->shard, r->full));
  else
    coll_need(r,
              mfsdp_reduce(&r->context, ours->coll, r->queue, r->grad, r->sum, 1, ours->workspace));
  coll_need(r, r->backend->ops->event_record(r->backend->self, r->queue, r->event));
  coll_need(r, r->backend->ops->event_wait(r->backend->self, &r->context, r->event, INT64_MAX));
}

void coll_ours_free(coll_rank *r, coll_ours *ours) {
  mfsdp_coll_destroy(&r->context, ours->coll);
  free(ours->workspace);
}
