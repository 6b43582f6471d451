/* SPDX-License-Identifier: MIT */
/*
 * coll_rank.h - one rank of the collective benchmark: its buffers, a layout, and exact answers.
 *
 * Element i of a unit is a small integer in fp32, so that every sum is exact in any order and every
 * result can be compared element by element, ours and the peers' alike.
 */
#ifndef MFSDP_BENCH_COLL_RANK_H
#define MFSDP_BENCH_COLL_RANK_H

#include "mfsdp/collective.h"
#include "mfsdp/host/backend_host.h"

#ifdef __cplusplus
extern "C" {
#endif

#define COLL_MOST_RANKS 64

/* Who owns how much of the unit: rank 0 has gamma / world of it, the others share the rest. */
typedef struct coll_split {
  int64_t count[COLL_MOST_RANKS], first[COLL_MOST_RANKS], total, smallest;
  mfsdp_extent extents[COLL_MOST_RANKS];
  mfsdp_layout layout;
} coll_split;

void coll_split_make(coll_split *split, int32_t world, int64_t total, double gamma);

typedef struct coll_rank {
  int32_t rank, world;
  mfsdp_context context;
  mfsdp_host_backend *host;
  const mfsdp_backend *backend;
  mfsdp_queue *queue;
  mfsdp_event *event;
  mfsdp_transport transport;
  float *shard, *full, *grad, *sum; /* segment, unit, unit, segment; total elements each */
} coll_rank;

/* Context, backend and queue; the transport is the caller's next step. Ends the program on errors. */
void coll_rank_open(coll_rank *r, int32_t rank, int32_t world);
void coll_rank_buffers(coll_rank *r, int64_t total);
void coll_rank_close(coll_rank *r);
void coll_need(coll_rank *r, mfsdp_status status);

/* What a gather sends and a reduction adds, for this layout. */
void coll_rank_fill(coll_rank *r, const coll_split *split);
/* Spoils what the operation writes, so that nothing right is left over from another run. */
void coll_rank_spoil(coll_rank *r, const coll_split *split, mfsdp_coll_kind kind);
/* Elements of this rank's result that are not what they must be. */
int64_t coll_rank_wrong(const coll_rank *r, const coll_split *split, mfsdp_coll_kind kind);

typedef struct coll_ours {
  mfsdp_coll *coll;
  void *workspace;
} coll_ours;
typedef struct coll_how {
  mfsdp_algorithm algorithm;
  size_t chunk_nbytes;  /* 0: the library's own */
  mfsdp_wire_cost wire; /* of AUTO */
} coll_how;
/* 0 if the transport or this version does not have the algorithm, on every rank. */
int coll_ours_make(coll_rank *r, coll_ours *ours, const coll_split *split, mfsdp_coll_kind kind,
                   const coll_how *how);
/* Runs it to its end. */
void coll_ours_run(coll_rank *r, coll_ours *ours);
void coll_ours_free(coll_rank *r, coll_ours *ours);

#ifdef __cplusplus
}
#endif

#endif /* MFSDP_BENCH_COLL_RANK_H */
