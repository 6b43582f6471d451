/* SPDX-License-Identifier: MIT */
/*
 * direct.h - DIRECT: every owner and every other rank, or its roots, point to point. Part of
 * collective.h.
 */
#ifndef MFSDP_COLLECTIVE_DIRECT_H
#define MFSDP_COLLECTIVE_DIRECT_H

#include "emit.h"

/*
 * DIRECT gather: one batch. Owners send each extent to every other rank, starting with the next one
 * so that not all talk to rank 0 first; everyone receives straight into its full buffer. Both sides
 * walk the extents in table order, so the messages of a pair match without tags.
 */
MFSDP_API void mfsdp__coll_emit_gather_direct(mfsdp__coll_emitter *m) {
  const mfsdp_layout *layout = m->layout;
  int32_t step, i;
  for (step = 1; step < layout->world; ++step) {
    const int32_t to = (m->rank + step) % layout->world;
    const int32_t from = (m->rank + layout->world - step) % layout->world;
    for (i = 0; i < layout->extent_count; ++i) {
      const mfsdp_extent *e = &layout->extents[i];
      if (e->count == 0) continue;
      if (e->owner == m->rank)
        mfsdp__coll_emit_xfer(m, MFSDP_COLL_SHARD, e->shard_offset, e->count, e->payload_count, to,
                              1);
      else if (e->owner == from)
        mfsdp__coll_emit_xfer(m, MFSDP_COLL_FULL, e->unit_offset, e->count, e->payload_count, from,
                              0);
    }
  }
  mfsdp__coll_emit_batch(m);
  mfsdp__coll_emit_own_copies(m);
}

/* ---- roots: each extent between its owner and one rank ---- */

/* An extent that grows while the next one follows it directly on both sides. */
typedef struct mfsdp__coll_stretch {
  int64_t unit_offset, shard_offset, count, payload_count;
} mfsdp__coll_stretch;

/* Takes an extent in; 0: it does not follow the stretch, which ends there. */
MFSDP_API int mfsdp__coll_stretch_add(mfsdp__coll_stretch *s, const mfsdp_extent *e) {
  if (s->count > 0 && (e->unit_offset != s->unit_offset + s->count ||
                       e->shard_offset != s->shard_offset + s->count))
    return 0;
  if (s->count == 0) {
    s->unit_offset = e->unit_offset;
    s->shard_offset = e->shard_offset;
  }
  s->count += e->count;
  s->payload_count += e->payload_count;
  return 1;
}

/* One message of a stretch, or, where this rank is owner and root, its copy. */
MFSDP_API void mfsdp__coll_emit_stretch(mfsdp__coll_emitter *m, const mfsdp__coll_stretch *s,
                                        int owns, int32_t peer) {
  const int gather = m->coll->kind == MFSDP_COLL_GATHER;
  mfsdp_coll_op *op;
  if (s->count == 0) return;
  if (peer != m->rank) {
    mfsdp__coll_emit_xfer(m, owns ? MFSDP_COLL_SHARD : MFSDP_COLL_FULL,
                          owns ? s->shard_offset : s->unit_offset, s->count, s->payload_count, peer,
                          owns == gather);
    return;
  }
  op = mfsdp__coll_emit_op(m, gather ? MFSDP_COLL_COPY : MFSDP_COLL_COPY_BACK, 0, 0);
  if (op == NULL) return;
  op->src_offset = gather ? s->shard_offset : s->unit_offset;
  op->dst_offset = gather ? s->unit_offset : s->shard_offset;
  op->elements = s->count;
}

/*
 * What this rank owns and `peer` is the root of (owns = 1), or the reverse. Neighbours that are
 * contiguous on both sides travel as one message: owner and root walk the same extents in the same
 * order, and so agree where one ends.
 */
MFSDP_API void mfsdp__coll_emit_pair(mfsdp__coll_emitter *m, int owns, int32_t peer) {
  const mfsdp_layout *layout = m->layout;
  mfsdp__coll_stretch stretch;
  int32_t k;
  memset(&stretch, 0, sizeof(stretch));
  for (k = 0; k < m->involved_count; ++k) {
    const int32_t i = m->involved[k];
    const mfsdp_extent *e = &layout->extents[i];
    if (e->owner != (owns ? m->rank : peer) || layout->roots[i] != (owns ? peer : m->rank))
      continue;
    if (mfsdp__coll_stretch_add(&stretch, e)) continue;
    mfsdp__coll_emit_stretch(m, &stretch, owns, peer);
    memset(&stretch, 0, sizeof(stretch));
    (void)mfsdp__coll_stretch_add(&stretch, e);
  }
  mfsdp__coll_emit_stretch(m, &stretch, owns, peer);
}

/* Gather and scatter with roots: one batch, then the local copies. */
MFSDP_API void mfsdp__coll_emit_rooted(mfsdp__coll_emitter *m) {
  const int32_t world = m->layout->world;
  int32_t step;
  for (step = 1; step < world; ++step) {
    mfsdp__coll_emit_pair(m, 1, (m->rank + step) % world);
    mfsdp__coll_emit_pair(m, 0, (m->rank + world - step) % world);
  }
  mfsdp__coll_emit_batch(m);
  mfsdp__coll_emit_pair(m, 1, m->rank);
}

/* ---- reduce ---- */

/* The sums of one round on the owner: its cuts, each from all ranks in rank order. */
MFSDP_API void mfsdp__coll_emit_sums(mfsdp__coll_emitter *m, int64_t first, int64_t chunk) {
  mfsdp_coll *coll = m->coll;
  const mfsdp_layout *layout = m->layout;
  int32_t i, r;
  for (i = 0; i < layout->extent_count; ++i) {
    mfsdp__coll_cut cut;
    mfsdp_coll_op *op;
    const int32_t first_term = coll->term_count;
    if (layout->extents[i].owner != m->rank ||
        !mfsdp__coll_cut_extent(&layout->extents[i], first, chunk, &cut))
      continue;
    for (r = 0; r < layout->world; ++r, ++coll->term_count) {
      const int32_t place = r < m->rank ? r : r - 1; /* of the peer's chunk in the workspace */
      const int64_t offset =
          r == m->rank ? cut.unit_offset : (int64_t)place * chunk + cut.shard_offset - first;
      if (coll->terms == NULL) continue;
      coll->terms[coll->term_count].base = r == m->rank ? MFSDP_COLL_FULL : MFSDP_COLL_WORKSPACE;
      coll->terms[coll->term_count].offset_nbytes = (size_t)offset * m->element_nbytes;
    }
    op = mfsdp__coll_emit_op(m, MFSDP_COLL_SUM, first_term, layout->world);
    if (op == NULL) continue;
    op->dst_offset = cut.shard_offset;
    op->elements = cut.count;
  }
}

/*
 * DIRECT reduce, in rounds of one chunk of every owner's segment: everyone sends its contribution
 * to each owner, owners stage their peers' chunks and add them in rank order. The workspace is
 * world - 1 chunks whatever the unit's size.
 */
MFSDP_API void mfsdp__coll_emit_reduce_direct(mfsdp__coll_emitter *m, int64_t chunk,
                                              int64_t longest) {
  const mfsdp_layout *layout = m->layout;
  int64_t first;
  int32_t step, i;
  for (first = 0; first < longest; first += chunk) {
    for (step = 1; step < layout->world; ++step) {
      const int32_t to = (m->rank + step) % layout->world;
      const int32_t from = (m->rank + layout->world - step) % layout->world;
      const int32_t place = from < m->rank ? from : from - 1;
      for (i = 0; i < layout->extent_count; ++i) {
        const mfsdp_extent *e = &layout->extents[i];
        mfsdp__coll_cut cut;
        if ((e->owner != m->rank && e->owner != to) ||
            !mfsdp__coll_cut_extent(e, first, chunk, &cut))
          continue;
        if (e->owner == to)
          mfsdp__coll_emit_xfer(m, MFSDP_COLL_FULL, cut.unit_offset, cut.count, cut.payload_count,
                                to, 1);
        else
          mfsdp__coll_emit_xfer(m, MFSDP_COLL_WORKSPACE,
                                (int64_t)place * chunk + cut.shard_offset - first, cut.count,
                                cut.payload_count, from, 0);
      }
    }
    mfsdp__coll_emit_batch(m);
    mfsdp__coll_emit_sums(m, first, chunk);
  }
}

#endif /* MFSDP_COLLECTIVE_DIRECT_H */
