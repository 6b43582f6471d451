/* SPDX-License-Identifier: MIT */
/*
 * emit.h - how an algorithm writes its list: transfers, batches, cuts of extents. Part of
 * collective.h.
 *
 * An emitter runs twice: once to count (the tables are NULL), once to fill.
 */
#ifndef MFSDP_COLLECTIVE_EMIT_H
#define MFSDP_COLLECTIVE_EMIT_H

#include "desc.h"

typedef struct mfsdp__coll_emitter {
  const mfsdp_layout *layout;
  mfsdp_coll *coll; /* its tables are NULL while counting */
  int32_t rank, batch_first;
  size_t element_nbytes;
  int64_t chunk; /* elements */
  /* NULL for DIRECT. */
  int32_t *by_owner;    /* extent_count: extents, owner after owner */
  int32_t *owner_at;    /* world + 1: where an owner's begin in by_owner */
  int64_t *round_count; /* world: chunks of an owner's segment */
  int32_t *node_of;     /* world: nodes numbered 0 to node_count - 1 */
  int32_t *by_node;     /* world: ranks, node after node */
  int32_t *node_at;     /* world + 1: where a node's begin in by_node */
  int32_t node_count;
  /* With roots alone: the extents that this rank owns or is the root of, in table order. */
  int32_t *involved;
  int32_t involved_count;
} mfsdp__coll_emitter;

MFSDP_API void mfsdp__coll_emit_xfer(mfsdp__coll_emitter *m, int32_t base, int64_t offset,
                                     int64_t count, int64_t payload_count, int32_t peer,
                                     int32_t is_send) {
  mfsdp_coll *coll = m->coll;
  if (coll->xfers != NULL) {
    mfsdp_coll_xfer *x = &coll->xfers[coll->xfer_count];
    x->base = base;
    x->offset_nbytes = (size_t)offset * m->element_nbytes;
    x->nbytes = (size_t)count * m->element_nbytes;
    x->payload_nbytes = (size_t)payload_count * m->element_nbytes;
    x->peer = peer;
    x->is_send = is_send;
  }
  ++coll->xfer_count;
}

MFSDP_API mfsdp_coll_op *mfsdp__coll_emit_op(mfsdp__coll_emitter *m, mfsdp_coll_op_kind kind,
                                             int32_t first, int32_t count) {
  static const mfsdp_coll_op none = {MFSDP_COLL_SUBMIT, 0, 0, 0, 0, 0};
  mfsdp_coll *coll = m->coll;
  mfsdp_coll_op *op = NULL;
  if (coll->ops != NULL) {
    op = &coll->ops[coll->op_count];
    *op = none;
    op->kind = kind;
    op->first = first;
    op->count = count;
  }
  ++coll->op_count;
  return op;
}

/* Closes the batch opened at batch_first; an empty one is left out. */
MFSDP_API void mfsdp__coll_emit_batch(mfsdp__coll_emitter *m) {
  mfsdp_coll *coll = m->coll;
  const int32_t count = coll->xfer_count - m->batch_first;
  if (count > 0) (void)mfsdp__coll_emit_op(m, MFSDP_COLL_SUBMIT, m->batch_first, count);
  if (count > coll->max_batch_count) coll->max_batch_count = count;
  m->batch_first = coll->xfer_count;
}

/* The part of extent `e` that falls in [first, first + chunk) of its owner's segment: 0 if none. */
typedef struct mfsdp__coll_cut {
  int64_t unit_offset, shard_offset, count, payload_count;
} mfsdp__coll_cut;

MFSDP_API int mfsdp__coll_cut_extent(const mfsdp_extent *e, int64_t first, int64_t chunk,
                                     mfsdp__coll_cut *cut) {
  const int64_t low = e->shard_offset > first ? e->shard_offset : first;
  const int64_t extent_end = e->shard_offset + e->count;
  const int64_t high = extent_end < first + chunk ? extent_end : first + chunk;
  const int64_t skipped = low - e->shard_offset;
  if (high <= low) return 0;
  cut->unit_offset = e->unit_offset + skipped;
  cut->shard_offset = low;
  cut->count = high - low;
  /* Padding is booked at the extent's end: sums over the chunks are exact, single chunks need not
   * be. */
  cut->payload_count = e->payload_count - skipped;
  if (cut->payload_count < 0) cut->payload_count = 0;
  if (cut->payload_count > cut->count) cut->payload_count = cut->count;
  return 1;
}

/* ---- chunks of one owner, for algorithms that move them one by one ---- */

/* The next part of chunk `round` of an owner's segment, from *at on (0 at first); 0 after the last. */
MFSDP_API int mfsdp__coll_next_cut(const mfsdp__coll_emitter *m, int32_t owner, int64_t round,
                                   int32_t *at, mfsdp__coll_cut *cut) {
  const int32_t count = m->owner_at[owner + 1] - m->owner_at[owner];
  while (*at < count) {
    const int32_t extent = m->by_owner[m->owner_at[owner] + (*at)++];
    if (mfsdp__coll_cut_extent(&m->layout->extents[extent], round * m->chunk, m->chunk, cut))
      return 1;
  }
  return 0;
}

/* Whether the owner has such a chunk. */
MFSDP_API int mfsdp__coll_has_chunk(const mfsdp__coll_emitter *m, int32_t owner, int64_t round) {
  return round >= 0 && round < m->round_count[owner];
}

/* Transfers of one chunk between this rank and `peer`: at its place in SHARD or FULL, or, with
 * `slot` (elements) not negative, in the workspace from there on. */
MFSDP_API void mfsdp__coll_emit_chunk(mfsdp__coll_emitter *m, int32_t base, int64_t slot,
                                      int32_t owner, int64_t round, int32_t peer, int32_t is_send) {
  mfsdp__coll_cut cut;
  int32_t at = 0;
  if (!mfsdp__coll_has_chunk(m, owner, round)) return;
  while (mfsdp__coll_next_cut(m, owner, round, &at, &cut)) {
    const int64_t offset = base == MFSDP_COLL_SHARD  ? cut.shard_offset
                           : base == MFSDP_COLL_FULL ? cut.unit_offset
                                                     : slot + cut.shard_offset - round * m->chunk;
    mfsdp__coll_emit_xfer(m, base, offset, cut.count, cut.payload_count, peer, is_send);
  }
}

MFSDP_API void mfsdp__coll_emit_term(mfsdp__coll_emitter *m, int32_t base, int64_t offset) {
  mfsdp_coll *coll = m->coll;
  if (coll->terms != NULL) {
    coll->terms[coll->term_count].base = base;
    coll->terms[coll->term_count].offset_nbytes = (size_t)offset * m->element_nbytes;
  }
  ++coll->term_count;
}

/* Copies of this rank's own segment to its place in the full buffer. */
MFSDP_API void mfsdp__coll_emit_own_copies(mfsdp__coll_emitter *m) {
  const mfsdp_layout *layout = m->layout;
  int32_t i;
  for (i = 0; i < layout->extent_count; ++i) {
    const mfsdp_extent *e = &layout->extents[i];
    if (e->owner == m->rank && e->count > 0) {
      mfsdp_coll_op *op = mfsdp__coll_emit_op(m, MFSDP_COLL_COPY, 0, 0);
      if (op == NULL) continue;
      op->src_offset = e->shard_offset;
      op->dst_offset = e->unit_offset;
      op->elements = e->count;
    }
  }
}

#endif /* MFSDP_COLLECTIVE_EMIT_H */
