/* SPDX-License-Identifier: MIT */
/*
 * collective.h - owner-segment gather and reduce over a transport.
 *
 * A unit's full buffer is cut into extents, each owned by one rank. `gather` gives every rank the
 * full buffer; `reduce` gives every owner the sum of its extents over all ranks. With
 * mfsdp_layout.roots a gather brings each extent to one rank alone, and `scatter` brings it back.
 * Segments are uneven and may be empty. Creating a collective emits its list of operations; running
 * it replays the list without allocation.
 *
 *   mfsdp_coll_desc desc = mfsdp_coll_desc_default();
 *   desc.kind = MFSDP_COLL_GATHER;  desc.traffic = MFSDP_TRAFFIC_MATERIALIZE;
 *   desc.layout = &layout;          desc.transport = &transport;
 *   MFSDP_TRY(mfsdp_coll_create(context, &desc, &gather));
 *   ...
 *   MFSDP_TRY(mfsdp_gather(context, gather, queue, shard, full));                  // ENQUEUED
 *   MFSDP_TRY(mfsdp_reduce(context, reduce, queue, full_grad, accumulator, first, workspace));
 *
 * Every rank of the transport makes the same collectives from the same layout and runs them in the
 * same order. Algorithms:
 *   DIRECT        point-to-point between owners and the others. Its reduction adds the contributions
 *                 in rank order into the owner's fp32 accumulator, so the result is bit for bit that
 *                 of one process adding the same terms in that order. The default.
 *   RING          chunks go round a ring (collective/ring.h): bytes of the unit / rate, also when one
 *                 rank owns everything.
 *   HIERARCHICAL  one copy for each node, then inside it (collective/hierarchical.h).
 *   NATIVE        the transport's own (collective/native.h), where it has one and takes the layout.
 *   AUTO          DIRECT, RING or HIERARCHICAL, whichever the costs of desc.wire favour
 *                 (collective/choose.h).
 *
 * Does not: compress, average (the verdict scales), or choose an order between collectives.
 * Link flags: none.
 */
#ifndef MFSDP_COLLECTIVE_H
#define MFSDP_COLLECTIVE_H

#include "collective/check.h"
#include "collective/choose.h"
#include "collective/direct.h"
#include "collective/hierarchical.h"
#include "collective/native.h"
#include "collective/ring.h"

/* ---- life cycle ---- */

/* Frees the lists. No run may be in flight. NULL is allowed. */
MFSDP_API void mfsdp_coll_destroy(mfsdp_context *context, mfsdp_coll *coll) {
  if (coll == NULL) return;
  mfsdp_table_free(context, (void *)coll->term_pointers, (size_t)coll->max_term_count,
                   sizeof(*coll->term_pointers));
  mfsdp_table_free(context, coll->resolved, (size_t)coll->max_batch_count, sizeof(*coll->resolved));
  mfsdp_table_free(context, coll->parts, (size_t)coll->native_args.part_count,
                   sizeof(*coll->parts));
  mfsdp_table_free(context, coll->terms, (size_t)coll->term_count, sizeof(*coll->terms));
  mfsdp_table_free(context, coll->xfers, (size_t)coll->xfer_count, sizeof(*coll->xfers));
  mfsdp_table_free(context, coll->ops, (size_t)coll->op_count, sizeof(*coll->ops));
  mfsdp_table_free(context, coll, 1, sizeof(*coll));
}

MFSDP_API void mfsdp__coll_emit(mfsdp__coll_emitter *m, mfsdp_algorithm algorithm,
                                int64_t longest) {
  mfsdp_coll *coll = m->coll;
  const int gather = coll->kind == MFSDP_COLL_GATHER;
  coll->op_count = coll->xfer_count = coll->term_count = 0;
  m->batch_first = 0;
  if (m->layout->roots != NULL || coll->kind == MFSDP_COLL_SCATTER)
    mfsdp__coll_emit_rooted(m);
  else if (algorithm == MFSDP_RING)
    gather ? mfsdp__coll_emit_gather_ring(m) : mfsdp__coll_emit_reduce_ring(m);
  else if (algorithm == MFSDP_HIERARCHICAL)
    gather ? mfsdp__coll_emit_gather_hierarchical(m) : mfsdp__coll_emit_reduce_hierarchical(m);
  else if (algorithm == MFSDP_NATIVE)
    mfsdp__coll_emit_native(m);
  else
    gather ? mfsdp__coll_emit_gather_direct(m)
           : mfsdp__coll_emit_reduce_direct(m, m->chunk, longest);
}

/* ---- tables of the emitters that move chunk by chunk ---- */

/* Extents owner after owner, in table order; and how many chunks each owner's segment has. */
MFSDP_API void mfsdp__coll_index_extents(mfsdp__coll_emitter *m) {
  const mfsdp_layout *layout = m->layout;
  int32_t i, q;
  for (i = 0; i < layout->extent_count; ++i) {
    const mfsdp_extent *e = &layout->extents[i];
    const int64_t rounds =
        m->chunk == 0 ? 0 : (e->shard_offset + e->count + m->chunk - 1) / m->chunk;
    if (e->count == 0) continue;
    ++m->owner_at[e->owner + 1];
    if (rounds > m->round_count[e->owner]) m->round_count[e->owner] = rounds;
  }
  for (q = 0; q < layout->world; ++q)
    m->owner_at[q + 1] += m->owner_at[q];
  for (i = 0; i < layout->extent_count; ++i)
    if (layout->extents[i].count > 0) m->by_owner[m->owner_at[layout->extents[i].owner]++] = i;
  for (q = layout->world; q > 0; --q) /* each has moved on to where the next begins */
    m->owner_at[q] = m->owner_at[q - 1];
  m->owner_at[0] = 0;
}

/* Ranks node after node, nodes numbered by their first rank. */
MFSDP_API void mfsdp__coll_index_nodes(mfsdp__coll_emitter *m) {
  const int32_t *given = m->coll->transport->node_of_rank, world = m->layout->world;
  int32_t r, s, filled = 0;
  for (r = 0; r < world; ++r) {
    for (s = 0; given != NULL && s < r && given[s] != given[r]; ++s) {
    }
    m->node_of[r] = given == NULL ? 0 : s < r ? m->node_of[s] : m->node_count;
    if (m->node_of[r] == m->node_count) ++m->node_count;
  }
  for (s = 0; s < m->node_count; ++s) {
    m->node_at[s] = filled;
    for (r = 0; r < world; ++r)
      if (m->node_of[r] == s) m->by_node[filled++] = r;
  }
  m->node_at[m->node_count] = filled;
}

/* Which extents this rank has to do with. */
MFSDP_API void mfsdp__coll_index_involved(mfsdp__coll_emitter *m, void *tables) {
  const mfsdp_layout *layout = m->layout;
  int32_t i;
  m->involved = (int32_t *)tables;
  for (i = 0; i < layout->extent_count; ++i)
    if (layout->extents[i].count > 0 &&
        (layout->extents[i].owner == m->rank || layout->roots[i] == m->rank))
      m->involved[m->involved_count++] = i;
}

/* Bytes of the tables, int64_t first. */
MFSDP_API size_t mfsdp__coll_tables_nbytes(const mfsdp_layout *layout, mfsdp_algorithm algorithm) {
  const size_t world = (size_t)layout->world, extents = (size_t)layout->extent_count;
  if (layout->roots != NULL) return extents * sizeof(int32_t);
  if (algorithm == MFSDP_DIRECT) return 0;
  return world * sizeof(int64_t) + (extents + 4 * world + 2) * sizeof(int32_t);
}

MFSDP_API void mfsdp__coll_index(mfsdp__coll_emitter *m, void *tables) {
  const int32_t world = m->layout->world;
  m->round_count = (int64_t *)tables;
  m->by_owner = (int32_t *)(void *)(m->round_count + world);
  m->owner_at = m->by_owner + m->layout->extent_count;
  m->node_of = m->owner_at + world + 1;
  m->by_node = m->node_of + world;
  m->node_at = m->by_node + world;
  mfsdp__coll_index_extents(m);
  mfsdp__coll_index_nodes(m);
}

MFSDP_API mfsdp_status mfsdp__coll_alloc(mfsdp_context *context, mfsdp_coll *coll) {
  const int32_t op_count = coll->op_count, xfer_count = coll->xfer_count;
  const int32_t term_count = coll->term_count;
  void *ops, *xfers, *terms, *parts, *resolved, *pointers;
  coll->max_term_count = term_count > 0 ? coll->transport->world : 0;
  MFSDP_TRY(mfsdp_table_alloc(context, (size_t)op_count, sizeof(*coll->ops), coll->label, &ops));
  coll->ops = (mfsdp_coll_op *)ops;
  MFSDP_TRY(
      mfsdp_table_alloc(context, (size_t)xfer_count, sizeof(*coll->xfers), coll->label, &xfers));
  coll->xfers = (mfsdp_coll_xfer *)xfers;
  MFSDP_TRY(
      mfsdp_table_alloc(context, (size_t)term_count, sizeof(*coll->terms), coll->label, &terms));
  coll->terms = (mfsdp_coll_term *)terms;
  MFSDP_TRY(mfsdp_table_alloc(context, (size_t)coll->native_args.part_count, sizeof(*coll->parts),
                              coll->label, &parts));
  coll->parts = (mfsdp_native_part *)parts;
  MFSDP_TRY(mfsdp_table_alloc(context, (size_t)coll->max_batch_count, sizeof(*coll->resolved),
                              coll->label, &resolved));
  coll->resolved = (mfsdp_xfer *)resolved;
  MFSDP_TRY(mfsdp_table_alloc(context, (size_t)coll->max_term_count, sizeof(*coll->term_pointers),
                              coll->label, &pointers));
  coll->term_pointers = (const void **)pointers;
  if (MFSDP_HAS(coll->transport->ops, reserve))
    MFSDP_TRY(coll->transport->ops->reserve(coll->transport->self, context, coll->max_batch_count));
  return MFSDP_OK;
}

/* What all ranks must agree on; goes into the debug check word. */
MFSDP_API uint64_t mfsdp__coll_identity(const mfsdp_coll_desc *desc) {
  const mfsdp_layout *layout = desc->layout;
  uint64_t hash = MFSDP_HASH_SEED;
  int32_t i;
  hash = mfsdp_hash_u64(hash, (uint64_t)desc->kind);
  hash = mfsdp_hash_u64(hash, (uint64_t)desc->algorithm);
  hash = mfsdp_hash_u64(hash, (uint64_t)layout->dtype);
  hash = mfsdp_hash_u64(hash, (uint64_t)layout->full_count);
  if (desc->kind == MFSDP_COLL_REDUCE || desc->algorithm != MFSDP_DIRECT)
    hash = mfsdp_hash_u64(hash, (uint64_t)desc->chunk_nbytes);
  hash = mfsdp_hash_bytes(hash, desc->label, strlen(desc->label));
  for (i = 0; i < layout->extent_count; ++i) {
    hash = mfsdp_hash_u64(hash, (uint64_t)layout->extents[i].owner);
    hash = mfsdp_hash_u64(hash, (uint64_t)layout->extents[i].unit_offset);
    hash = mfsdp_hash_u64(hash, (uint64_t)layout->extents[i].shard_offset);
    hash = mfsdp_hash_u64(hash, (uint64_t)layout->extents[i].count);
    if (layout->roots != NULL) hash = mfsdp_hash_u64(hash, (uint64_t)layout->roots[i]);
  }
  return hash;
}

/* Elements of a chunk: no more than the longest segment has, so that a generous chunk_nbytes
 * neither inflates the workspace nor overflows. The same on every rank. */
MFSDP_API int64_t mfsdp__coll_chunk(size_t chunk_nbytes, mfsdp_dtype dtype, int64_t longest) {
  const uint64_t asked = chunk_nbytes / mfsdp_dtype_nbytes(dtype);
  int64_t whole = MFSDP_ALIGN_ELEMENTS;
  if (longest > 0)
    (void)mfsdp_i64_align(longest, &whole); /* cannot fail: checked with the extents */
  if (asked >= (uint64_t)whole) return whole;
  return (int64_t)asked - (int64_t)(asked % MFSDP_ALIGN_ELEMENTS);
}

/* Chunks of workspace that a reduction takes on the transport's rank. */
MFSDP_API int64_t mfsdp__coll_workspace_chunks(const mfsdp_transport *transport,
                                               mfsdp_algorithm algorithm, int64_t segment_count) {
  if (transport->world == 1) return 0;
  if (algorithm == MFSDP_RING) return 2 * (int64_t)transport->world;
  if (algorithm == MFSDP_HIERARCHICAL)
    return mfsdp__node_workspace_chunks(transport->node_of_rank, transport->world, transport->rank);
  return segment_count == 0 ? 0 : transport->world - 1;
}

/* Workspace of a reduce on a rank that owns segment_count elements while the longest segment has
 * `longest`, in chunks of chunk_nbytes (of 0: what mfsdp_coll_chunk_nbytes gives): what
 * mfsdp_coll_create arrives at, known before it. SIZE_MAX if it overflows. */
MFSDP_API size_t mfsdp_coll_reduce_workspace_nbytes(const mfsdp_transport *transport,
                                                    mfsdp_algorithm algorithm,
                                                    int64_t segment_count, int64_t longest,
                                                    mfsdp_dtype dtype, size_t chunk_nbytes) {
  const int64_t chunks = mfsdp__coll_workspace_chunks(transport, algorithm, segment_count);
  int64_t elements = segment_count;
  size_t nbytes;
  if (longest == 0 || chunks == 0) return 0;
  if (!(algorithm == MFSDP_NATIVE /* the whole segment */
            ? mfsdp_i64_align(segment_count, &elements)
            : mfsdp_i64_mul(chunks, mfsdp__coll_chunk(chunk_nbytes, dtype, longest), &elements)) ||
      !mfsdp_elements_nbytes(elements, dtype, &nbytes))
    return SIZE_MAX;
  return nbytes;
}

/* Longest segment over all owners, and this rank's own, in elements. */
MFSDP_API void mfsdp__coll_measure(const mfsdp_layout *layout, int32_t rank, int64_t *longest,
                                   int64_t *own) {
  int32_t i;
  *longest = *own = 0;
  for (i = 0; i < layout->extent_count; ++i) {
    const int64_t end = layout->extents[i].shard_offset + layout->extents[i].count;
    if (end > *longest) *longest = end;
    if (layout->extents[i].owner == rank && end > *own) *own = end;
  }
}

/* E_OVERFLOW if a list could pass its 32-bit counts: a rank has at most two transfers, or one term,
 * for each peer and each round or extent. */
MFSDP_API mfsdp_status mfsdp__coll_check_length(mfsdp_context *context, const mfsdp_coll_desc *desc,
                                                int64_t chunk, int64_t longest) {
  const mfsdp_layout *layout = desc->layout;
  const int in_rounds = desc->algorithm != MFSDP_NATIVE &&
                        (desc->kind == MFSDP_COLL_REDUCE || desc->algorithm != MFSDP_DIRECT);
  const int64_t rounds = in_rounds && chunk > 0 ? longest / chunk + 1 : 0;
  const int64_t ways = desc->algorithm == MFSDP_DIRECT ? 1 : 2;
  if (layout->roots != NULL) return MFSDP_OK; /* one transfer, or one copy, of an extent */
  if (rounds + layout->extent_count <= INT32_MAX / ways / layout->world) return MFSDP_OK;
  return MFSDP_FAIL(context, MFSDP_E_OVERFLOW,
                    "%s: %lld rounds of chunks and %d extents on %d ranks make more than 2^31 - 1 "
                    "transfers; raise chunk_nbytes (%zu)",
                    desc->label, (long long)rounds, (int)layout->extent_count, (int)layout->world,
                    desc->chunk_nbytes);
}

/* Whether the transport can express the layout, and how. */
MFSDP_API mfsdp_status mfsdp__coll_prepare_native(mfsdp_context *context, mfsdp_coll *coll) {
  const mfsdp_transport *transport = coll->transport;
  if (!MFSDP_HAS(transport->ops, native_prepare)) return MFSDP_OK;
  return transport->ops->native_prepare(transport->self, context, &coll->native_args,
                                        &coll->native_args.form);
}

/* Counts, allocates and fills the lists. A world of one has no ring and no nodes. */
MFSDP_API mfsdp_status mfsdp__coll_fill(mfsdp_context *context, mfsdp_coll *coll,
                                        const mfsdp_coll_desc *desc, int64_t chunk,
                                        int64_t longest) {
  const mfsdp_algorithm algorithm = desc->layout->world == 1 ? MFSDP_DIRECT : desc->algorithm;
  const size_t nbytes = mfsdp__coll_tables_nbytes(desc->layout, algorithm);
  mfsdp__coll_emitter emitter;
  void *tables;
  mfsdp_status status = mfsdp_table_alloc(context, nbytes, 1, desc->label, &tables);
  if (status != MFSDP_OK) return status;
  memset(&emitter, 0, sizeof(emitter));
  emitter.layout = desc->layout;
  emitter.coll = coll;
  emitter.rank = desc->transport->rank;
  emitter.element_nbytes = mfsdp_dtype_nbytes(coll->dtype);
  emitter.chunk = chunk;
  if (desc->layout->roots != NULL)
    mfsdp__coll_index_involved(&emitter, tables);
  else if (algorithm != MFSDP_DIRECT)
    mfsdp__coll_index(&emitter, tables);
  mfsdp__coll_emit(&emitter, algorithm, longest);
  status = mfsdp__coll_alloc(context, coll);
  if (status == MFSDP_OK) mfsdp__coll_emit(&emitter, algorithm, longest);
  mfsdp_table_free(context, tables, nbytes, 1);
  if (status == MFSDP_OK && algorithm == MFSDP_NATIVE)
    status = mfsdp__coll_prepare_native(context, coll);
  return status;
}

/* Where in the full buffer a rank's segment stands as a whole, or -1. */
MFSDP_API int64_t mfsdp__coll_in_place(const mfsdp_layout *layout, int32_t rank) {
  int64_t place = -1;
  int32_t i;
  for (i = 0; i < layout->extent_count; ++i) {
    const mfsdp_extent *e = &layout->extents[i];
    const int64_t shift = e->unit_offset - e->shard_offset;
    if (e->owner != rank || e->count == 0) continue;
    if (shift < 0 || (place >= 0 && shift != place) || mfsdp__coll_root(layout, i, rank) != rank)
      return -1;
    place = shift;
  }
  return place;
}

/* Elements that this rank's full buffer has: with roots up to the last extent that it is the root
 * of, so that others need none. */
MFSDP_API int64_t mfsdp__coll_full_count(const mfsdp_layout *layout, int32_t rank) {
  int64_t high = 0;
  int32_t i;
  if (layout->roots == NULL) return layout->full_count;
  for (i = 0; i < layout->extent_count; ++i) {
    const mfsdp_extent *e = &layout->extents[i];
    if (layout->roots[i] == rank && e->count > 0 && e->unit_offset + e->count > high)
      high = e->unit_offset + e->count;
  }
  return high;
}

/* Makes AUTO an algorithm, and a chunk_nbytes of 0 a size. DIRECT where there are roots. */
MFSDP_API void mfsdp__coll_resolve(mfsdp_coll_desc *desc, int64_t longest) {
  const mfsdp_layout *layout = desc->layout;
  int64_t whole = 0;
  (void)mfsdp_i64_align(longest, &whole); /* as plans count segments; checked with the extents */
  desc->algorithm =
      layout->roots != NULL
          ? MFSDP_DIRECT
          : mfsdp_coll_choose(desc->transport, desc->algorithm, &desc->wire, desc->kind,
                              layout->dtype, layout->full_count, whole, desc->chunk_nbytes);
  desc->chunk_nbytes =
      mfsdp_coll_chunk_nbytes(desc->transport, desc->algorithm, &desc->wire, layout->dtype,
                              layout->full_count, whole, desc->chunk_nbytes);
}

/*
 * Emits the list of a collective. COMPLETE. Every rank calls it with the same layout. E_ARGUMENT,
 * E_UNSUPPORTED and E_OVERFLOW before anything is allocated (but for E_UNSUPPORTED of a transport
 * that cannot express a layout by NATIVE); *out is NULL on failure.
 */
MFSDP_API mfsdp_status mfsdp_coll_create(mfsdp_context *context, const mfsdp_coll_desc *desc,
                                         mfsdp_coll **out) {
  mfsdp_coll_desc chosen; /* without AUTO, and with a chunk */
  int64_t chunk, longest, own;
  mfsdp_coll *coll;
  mfsdp_status status;
  size_t workspace_nbytes = 0;
  void *memory;
  if (out == NULL) return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "collective: out is NULL");
  *out = NULL;
  MFSDP_TRY(mfsdp__coll_check(context, desc));
  mfsdp__coll_measure(desc->layout, desc->transport->rank, &longest, &own);
  chosen = *desc;
  mfsdp__coll_resolve(&chosen, longest);
  desc = &chosen;
  chunk = mfsdp__coll_chunk(desc->chunk_nbytes, desc->layout->dtype, longest);
  if (desc->kind == MFSDP_COLL_REDUCE)
    workspace_nbytes = mfsdp_coll_reduce_workspace_nbytes(
        desc->transport, desc->algorithm, own, longest, desc->layout->dtype, desc->chunk_nbytes);
  if (workspace_nbytes == SIZE_MAX)
    return MFSDP_FAIL(context, MFSDP_E_OVERFLOW,
                      "%s: chunks of %lld elements from %d ranks overflow", desc->label,
                      (long long)chunk, (int)desc->layout->world);
  MFSDP_TRY(mfsdp__coll_check_length(context, desc, chunk, longest));
  MFSDP_TRY(mfsdp_table_alloc(context, 1, sizeof(*coll), desc->label, &memory));
  coll = (mfsdp_coll *)memory;
  coll->kind = desc->kind;
  coll->dtype = desc->layout->dtype;
  coll->traffic = desc->traffic;
  coll->transport = desc->transport;
  coll->label = desc->label;
  coll->full_count = mfsdp__coll_full_count(desc->layout, desc->transport->rank);
  coll->identity = mfsdp__coll_identity(desc);
  coll->segment_count = own;
  coll->in_place = mfsdp__coll_in_place(desc->layout, desc->transport->rank);
  coll->workspace_nbytes = workspace_nbytes;

  coll->begin = mfsdp_trace_mark_make(context, 1, "communication", desc->label);
  coll->end = mfsdp_trace_mark_make(context, 0, "communication", desc->label);
  status = mfsdp__coll_fill(context, coll, desc, chunk, longest);
  if (status != MFSDP_OK) {
    mfsdp_coll_destroy(context, coll);
    return status;
  }
  *out = coll;
  return MFSDP_OK;
}

/* Bytes of DEVICE workspace of a run: 0 for gathers and scatters. Runs on one queue may share a
 * workspace. */
MFSDP_API size_t mfsdp_coll_workspace_nbytes(const mfsdp_coll *coll) {
  return coll->workspace_nbytes;
}

/* ---- the executor: one place that resolves addresses, counts traffic, checks and traces ---- */

typedef struct mfsdp__coll_run {
  mfsdp_context *context;
  mfsdp_coll *coll;
  mfsdp_queue *queue;
  const unsigned char *source[MFSDP_COLL_BASE_COUNT]; /* for sends and terms */
  unsigned char *target[MFSDP_COLL_BASE_COUNT];       /* for receives and copies */
  float *accumulator;
  int32_t first;
} mfsdp__coll_run;

MFSDP_API mfsdp_status mfsdp__coll_submit(mfsdp__coll_run *run, const mfsdp_coll_op *op,
                                          uint64_t check) {
  mfsdp_coll *coll = run->coll;
  mfsdp_traffic_count *sent = &run->context->counters.sent[coll->traffic];
  mfsdp_batch batch = mfsdp_batch_default();
  uint64_t payload_nbytes = 0, wire_nbytes = 0, sends = 0;
  int32_t i;
  for (i = 0; i < op->count; ++i) {
    const mfsdp_coll_xfer *x = &coll->xfers[op->first + i];
    mfsdp_xfer *resolved = &coll->resolved[i];
    resolved->src = x->is_send ? run->source[x->base] + x->offset_nbytes : NULL;
    resolved->dst = x->is_send ? NULL : run->target[x->base] + x->offset_nbytes;
    resolved->nbytes = x->nbytes;
    resolved->peer = x->peer;
    resolved->is_send = x->is_send;
    if (x->is_send) {
      payload_nbytes += x->payload_nbytes;
      wire_nbytes += x->nbytes;
      ++sends;
    }
  }
  batch.xfers = coll->resolved;
  batch.xfer_count = op->count;
  batch.traffic = coll->traffic;
  batch.check = check;
  batch.label = coll->label;
  MFSDP_TRY(mfsdp_transport_submit(run->context, coll->transport, run->queue, &batch));
  sent->payload_nbytes += payload_nbytes;
  sent->wire_nbytes += wire_nbytes;
  sent->transfer_count += sends;
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__coll_native(const mfsdp__coll_run *run, uint64_t check) {
  const mfsdp_coll *coll = run->coll;
  mfsdp_traffic_count *sent = &run->context->counters.sent[coll->traffic];
  mfsdp_native_args args = coll->native_args;
  args.src = run->source[MFSDP_COLL_FULL];
  args.dst = run->target[coll->native_base];
  args.check = check;
  MFSDP_TRY(mfsdp_transport_native(run->context, coll->transport, run->queue, &args));
  sent->payload_nbytes += coll->native_count.payload_nbytes;
  sent->wire_nbytes += coll->native_count.wire_nbytes;
  sent->transfer_count += coll->native_count.transfer_count;
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__coll_copy(const mfsdp__coll_run *run, const mfsdp_coll_op *op,
                                        mfsdp_coll_base from, mfsdp_coll_base to) {
  const mfsdp_backend *backend = run->coll->transport->backend;
  const size_t element_nbytes = mfsdp_dtype_nbytes(run->coll->dtype);
  const unsigned char *src = run->source[from] + (size_t)op->src_offset * element_nbytes;
  unsigned char *dst = run->target[to] + (size_t)op->dst_offset * element_nbytes;
  if (src == dst) return MFSDP_OK; /* in place */
  return backend->ops->copy(backend->self, run->queue, dst, MFSDP_SPACE_DEVICE, src,
                            MFSDP_SPACE_DEVICE, (size_t)op->elements * element_nbytes);
}

/* A sum into the accumulator, or into the workspace: set there, or added to what is there. */
MFSDP_API mfsdp_status mfsdp__coll_sum(const mfsdp__coll_run *run, const mfsdp_coll_op *op) {
  mfsdp_coll *coll = run->coll;
  const mfsdp_backend *backend = coll->transport->backend;
  float *base = op->kind == MFSDP_COLL_SUM ? run->accumulator
                                           : (float *)(void *)run->target[MFSDP_COLL_WORKSPACE];
  const int32_t first =
      op->kind == MFSDP_COLL_SUM ? run->first : op->kind == MFSDP_COLL_SUM_PARTIAL;
  int32_t i;
  for (i = 0; i < op->count; ++i) {
    const mfsdp_coll_term *term = &coll->terms[op->first + i];
    coll->term_pointers[i] = run->source[term->base] + term->offset_nbytes;
  }
  return backend->ops->sum_terms(backend->self, run->queue, base + op->dst_offset, first,
                                 coll->term_pointers, coll->dtype, op->count, op->elements);
}

MFSDP_API mfsdp_status mfsdp__coll_execute(mfsdp__coll_run *run) {
  mfsdp_coll *coll = run->coll;
  const int checked = run->context->desc.debug_check != 0;
  const uint64_t check = checked ? mfsdp_hash_u64(coll->identity, coll->sequence) | 1u : 0;
  mfsdp_status status = MFSDP_OK;
  int32_t i;
  status = mfsdp_trace_mark_enqueue(coll->transport->backend, run->queue, &coll->begin);
  for (i = 0; i < coll->op_count && status == MFSDP_OK; ++i) {
    const mfsdp_coll_op *op = &coll->ops[i];
    switch (op->kind) {
    case MFSDP_COLL_SUBMIT: status = mfsdp__coll_submit(run, op, check); break;
    case MFSDP_COLL_NATIVE: status = mfsdp__coll_native(run, check); break;
    case MFSDP_COLL_COPY:
      status = mfsdp__coll_copy(run, op, MFSDP_COLL_SHARD, MFSDP_COLL_FULL);
      break;
    case MFSDP_COLL_COPY_BACK:
      status = mfsdp__coll_copy(run, op, MFSDP_COLL_FULL, MFSDP_COLL_SHARD);
      break;
    case MFSDP_COLL_SUM:
    case MFSDP_COLL_SUM_PARTIAL:
    case MFSDP_COLL_ADD_PARTIAL: status = mfsdp__coll_sum(run, op); break;
    }
  }
  if (status == MFSDP_OK)
    status = mfsdp_trace_mark_enqueue(coll->transport->backend, run->queue, &coll->end);
  ++coll->sequence;
  return status;
}

/* Whether two pieces of memory have a byte in common. */
MFSDP_API int mfsdp__coll_overlap(const void *a, size_t a_nbytes, const void *b, size_t b_nbytes) {
  const uintptr_t from = (uintptr_t)a, other = (uintptr_t)b;
  if (a_nbytes == 0 || b_nbytes == 0) return 0;
  return from < other ? other - from < a_nbytes : from - other < b_nbytes;
}

/* E_ARGUMENT: a buffer lies in the full one, and not in place. */
MFSDP_API mfsdp_status mfsdp__coll_apart(mfsdp_context *context, const mfsdp_coll *coll,
                                         const void *full, const void *buffer, size_t nbytes,
                                         const char *what, int in_place) {
  const size_t element = mfsdp_dtype_nbytes(coll->dtype);
  const unsigned char *start = (const unsigned char *)full;
  if (!mfsdp__coll_overlap(full, (size_t)coll->full_count * element, buffer, nbytes))
    return MFSDP_OK;
  if (in_place && coll->in_place >= 0 && start + (size_t)coll->in_place * element == buffer)
    return MFSDP_OK;
  return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "%s: %s overlaps the full buffer%s", coll->label,
                    what, in_place ? ", and not at its place" : "");
}

/* A run between a segment and the full buffer: what kind it is, and what it is given. */
MFSDP_API mfsdp_status mfsdp__coll_check_run(mfsdp_context *context, const mfsdp_coll *coll,
                                             mfsdp_coll_kind kind, const void *shard,
                                             const void *full) {
  static const char *const names[] = {"none", "gather", "reduce", "scatter"};
  if (coll == NULL) return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "%s: coll is NULL", names[kind]);
  if (coll->kind != kind)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "%s: is a %s, not a %s", coll->label,
                      names[coll->kind], names[kind]);
  if ((coll->segment_count > 0 && shard == NULL) || (coll->full_count > 0 && full == NULL))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "%s: %s is NULL but has elements", coll->label,
                      coll->full_count > 0 && full == NULL ? "full" : "shard");
  return mfsdp__coll_apart(context, coll, full, shard,
                           (size_t)coll->segment_count * mfsdp_dtype_nbytes(coll->dtype), "shard",
                           1);
}

/*
 * full = every owner's segment. `shard`: this rank's segment, DEVICE, layout dtype, may be NULL
 * when it is empty; `full`: the unit's buffer, DEVICE; elements outside all extents are left alone.
 * With layout.roots `full` has the extents that this rank is the root of and nothing else, and may be
 * NULL where there are none. `shard` may lie inside `full` at its place (in place; with roots only if
 * nothing of it goes elsewhere); any other overlap is E_ARGUMENT. ENQUEUED: both must live until an
 * event recorded later on `queue` has passed.
 */
MFSDP_API mfsdp_status mfsdp_gather(mfsdp_context *context, mfsdp_coll *coll, mfsdp_queue *queue,
                                    const void *shard, void *full) {
  mfsdp__coll_run run;
  MFSDP_TRY(mfsdp__coll_check_run(context, coll, MFSDP_COLL_GATHER, shard, full));
  memset(&run, 0, sizeof(run));
  run.context = context;
  run.coll = coll;
  run.queue = queue;
  run.source[MFSDP_COLL_SHARD] = (const unsigned char *)shard;
  run.source[MFSDP_COLL_FULL] = (const unsigned char *)full; /* what is passed on */
  run.target[MFSDP_COLL_FULL] = (unsigned char *)full;
  return mfsdp__coll_execute(&run);
}

/*
 * The way back of a gather with roots: shard = each extent from the full buffer of its root. `full`:
 * read only, NULL where this rank is the root of nothing; `shard`: this rank's segment, of which
 * elements outside all extents are left alone. Buffers and overlap as in mfsdp_gather. ENQUEUED.
 */
MFSDP_API mfsdp_status mfsdp_scatter(mfsdp_context *context, mfsdp_coll *coll, mfsdp_queue *queue,
                                     const void *full, void *shard) {
  mfsdp__coll_run run;
  MFSDP_TRY(mfsdp__coll_check_run(context, coll, MFSDP_COLL_SCATTER, shard, full));
  memset(&run, 0, sizeof(run));
  run.context = context;
  run.coll = coll;
  run.queue = queue;
  run.source[MFSDP_COLL_FULL] = (const unsigned char *)full;
  run.target[MFSDP_COLL_SHARD] = (unsigned char *)shard;
  return mfsdp__coll_execute(&run);
}

/*
 * accumulator (+)= sum over ranks of this rank's segment of `full`, by DIRECT in rank order. `full`: this
 * rank's contribution to the whole unit, DEVICE, layout dtype; read only. `accumulator`: fp32,
 * DEVICE, this rank's segment, NULL when empty; with `first` != 0 the chain starts from rank 0's
 * term, otherwise from what is there. `workspace`: DEVICE, mfsdp_coll_workspace_nbytes. None of the
 * three may overlap (E_ARGUMENT). ENQUEUED.
 */
MFSDP_API mfsdp_status mfsdp_reduce(mfsdp_context *context, mfsdp_coll *coll, mfsdp_queue *queue,
                                    const void *full, float *accumulator, int32_t first,
                                    void *workspace) {
  mfsdp__coll_run run;
  size_t sums_nbytes;
  if (coll == NULL) return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "reduce: coll is NULL");
  sums_nbytes = (size_t)coll->segment_count * sizeof(float);
  if (coll->kind != MFSDP_COLL_REDUCE)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "%s: is a %s, not a reduce", coll->label,
                      coll->kind == MFSDP_COLL_GATHER ? "gather" : "scatter");
  if ((coll->full_count > 0 && full == NULL) || (coll->segment_count > 0 && accumulator == NULL) ||
      (coll->workspace_nbytes > 0 && workspace == NULL))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "%s: %s is NULL but has elements", coll->label,
                      full == NULL          ? "full"
                      : accumulator == NULL ? "accumulator"
                                            : "workspace");
  MFSDP_TRY(mfsdp__coll_apart(context, coll, full, accumulator, sums_nbytes, "accumulator", 0));
  MFSDP_TRY(
      mfsdp__coll_apart(context, coll, full, workspace, coll->workspace_nbytes, "workspace", 0));
  if (mfsdp__coll_overlap(accumulator, sums_nbytes, workspace, coll->workspace_nbytes))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "%s: accumulator overlaps the workspace",
                      coll->label);
  memset(&run, 0, sizeof(run));
  run.context = context;
  run.coll = coll;
  run.queue = queue;
  run.source[MFSDP_COLL_FULL] = (const unsigned char *)full;
  run.source[MFSDP_COLL_WORKSPACE] = (const unsigned char *)workspace;
  run.target[MFSDP_COLL_WORKSPACE] = (unsigned char *)workspace;
  run.accumulator = accumulator;
  run.first = first;
  return mfsdp__coll_execute(&run);
}

#endif /* MFSDP_COLLECTIVE_H */
