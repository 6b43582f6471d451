/* SPDX-License-Identifier: MIT */
/*
 * ring.h - RING: chunks of all segments go round a ring of ranks, in lockstep. Part of collective.h.
 *
 * Every link carries every chunk once, so the time is about (bytes of the unit) / rate, whether the
 * segments are even or one rank owns everything. With d(q, r) the way from rank q to r along the
 * ring, chunk k of owner q crosses the link r -> r + 1
 *   gather: in batch k + d(q, r);        reduce: in batch k + d(q + 1, r).
 * A batch of a rank is its sends to the next rank and its receives from the one before. What it
 * sends it has received one batch before, so that batches in order are all that is needed, and no
 * order of the batches of different ranks can block. The reduction starts at the rank behind the
 * owner and carries fp32 partial sums; each rank adds its own contribution on the way. Its sums are
 * therefore not those of DIRECT bit for bit, unless they are exact.
 * Workspace of a reduction: 2 x world chunks: a slot for each owner's chunk on the way, twice, since
 * one batch's sums are sent while the next one's are received.
 */
#ifndef MFSDP_COLLECTIVE_RING_H
#define MFSDP_COLLECTIVE_RING_H

#include "emit.h"

/* Batches that a ring takes when its longest segment has this many chunks. */
MFSDP_API int64_t mfsdp__ring_batch_count(int32_t world, int64_t longest_rounds) {
  return longest_rounds == 0 ? 0 : longest_rounds + world - 2;
}

MFSDP_API int64_t mfsdp__ring_longest(const mfsdp__coll_emitter *m) {
  int64_t longest = 0;
  int32_t q;
  for (q = 0; q < m->layout->world; ++q)
    if (m->round_count[q] > longest) longest = m->round_count[q];
  return longest;
}

/* The rank `steps` before r, for steps up to the world. */
MFSDP_API int32_t mfsdp__ring_before(const mfsdp__coll_emitter *m, int32_t r, int32_t steps) {
  return (r + m->layout->world - steps) % m->layout->world;
}

MFSDP_API void mfsdp__coll_emit_gather_ring(mfsdp__coll_emitter *m) {
  const int32_t world = m->layout->world;
  const int32_t next = (m->rank + 1) % world, before = mfsdp__ring_before(m, m->rank, 1);
  const int64_t batches = mfsdp__ring_batch_count(world, mfsdp__ring_longest(m));
  int64_t t;
  int32_t d;
  for (t = 0; t < batches; ++t) {
    for (d = 0; d <= world - 2; ++d) {
      const int32_t sent = mfsdp__ring_before(m, m->rank, d);
      mfsdp__coll_emit_chunk(m, d == 0 ? MFSDP_COLL_SHARD : MFSDP_COLL_FULL, -1, sent, t - d, next,
                             1);
      mfsdp__coll_emit_chunk(m, MFSDP_COLL_FULL, -1, mfsdp__ring_before(m, before, d), t - d,
                             before, 0);
    }
    mfsdp__coll_emit_batch(m);
  }
  mfsdp__coll_emit_own_copies(m);
}

/* Where the chunk of `owner` that moves in batch t lies in the workspace, in elements. */
MFSDP_API int64_t mfsdp__ring_slot(const mfsdp__coll_emitter *m, int32_t owner, int64_t t) {
  return ((t & 1) * m->layout->world + owner) * m->chunk;
}

/* This rank's contribution to a chunk that has arrived: on the way, or at its owner. */
MFSDP_API void mfsdp__ring_emit_sums(mfsdp__coll_emitter *m, int32_t owner, int64_t round,
                                     int64_t slot) {
  mfsdp__coll_cut cut;
  int32_t at = 0;
  if (!mfsdp__coll_has_chunk(m, owner, round)) return;
  while (mfsdp__coll_next_cut(m, owner, round, &at, &cut)) {
    const int32_t first = m->coll->term_count, arrived = owner == m->rank;
    const int64_t place = slot + cut.shard_offset - round * m->chunk;
    mfsdp_coll_op *op;
    if (arrived) mfsdp__coll_emit_term(m, MFSDP_COLL_WORKSPACE, place);
    mfsdp__coll_emit_term(m, MFSDP_COLL_FULL, cut.unit_offset);
    op = mfsdp__coll_emit_op(m, arrived ? MFSDP_COLL_SUM : MFSDP_COLL_ADD_PARTIAL, first,
                             1 + arrived);
    if (op == NULL) continue;
    op->dst_offset = arrived ? cut.shard_offset : place;
    op->elements = cut.count;
  }
}

MFSDP_API void mfsdp__coll_emit_reduce_ring(mfsdp__coll_emitter *m) {
  const int32_t world = m->layout->world;
  const int32_t next = (m->rank + 1) % world, before = mfsdp__ring_before(m, m->rank, 1);
  const int64_t batches = mfsdp__ring_batch_count(world, mfsdp__ring_longest(m));
  int64_t t;
  int32_t j;
  for (t = 0; t < batches; ++t) {
    for (j = 0; j <= world - 2; ++j) {
      const int32_t sent = mfsdp__ring_before(m, m->rank, j + 1);
      const int32_t received = mfsdp__ring_before(m, before, j + 1);
      mfsdp__coll_emit_chunk(m, j == 0 ? MFSDP_COLL_FULL : MFSDP_COLL_WORKSPACE,
                             mfsdp__ring_slot(m, sent, t - 1), sent, t - j, next, 1);
      mfsdp__coll_emit_chunk(m, MFSDP_COLL_WORKSPACE, mfsdp__ring_slot(m, received, t), received,
                             t - j, before, 0);
    }
    mfsdp__coll_emit_batch(m);
    for (j = 0; j <= world - 2; ++j) {
      const int32_t received = mfsdp__ring_before(m, before, j + 1);
      mfsdp__ring_emit_sums(m, received, t - j, mfsdp__ring_slot(m, received, t));
    }
  }
}

#endif /* MFSDP_COLLECTIVE_RING_H */
