/* SPDX-License-Identifier: MIT */
/*
 * collective.h - owner-segment gather and reduce over a transport.
 *
 * A unit's full buffer is cut into extents, each owned by one rank. `gather` gives every rank the
 * full buffer; `reduce` gives every owner the sum of its extents over all ranks. Segments are
 * uneven and may be empty. Creating a collective emits its list of operations; running it replays
 * the list without allocation.
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
 * same order. Algorithm DIRECT: point-to-point between owners and the others. Its reduction adds
 * the contributions in rank order into the owner's fp32 accumulator, so the result is bit for bit
 * that of one process adding the same terms in that order.
 *
 * Does not: compress, average (the verdict scales), or choose an order between collectives.
 * Link flags: none.
 */
#ifndef MFSDP_COLLECTIVE_H
#define MFSDP_COLLECTIVE_H

#include "shard.h"
#include "transport.h"

typedef enum mfsdp_coll_kind { MFSDP_COLL_GATHER = 1, MFSDP_COLL_REDUCE } mfsdp_coll_kind;

typedef enum mfsdp_algorithm {
  MFSDP_DIRECT = 1, /* the default; the only one with the bit promise */
  MFSDP_RING,
  MFSDP_HIERARCHICAL,
  MFSDP_NATIVE,
  MFSDP_ALGORITHM_AUTO
} mfsdp_algorithm;

/* Who owns what of a full buffer. Offsets and counts in elements of `dtype`. */
typedef struct mfsdp_layout {
  size_t struct_nbytes;
  const mfsdp_extent *extents; /* extent_count, of all ranks, in any order, apart from each other */
  int32_t extent_count, world;
  mfsdp_dtype dtype;  /* gather: compute dtype; reduce: wire dtype */
  int64_t full_count; /* length of the full buffer */
} mfsdp_layout;

typedef struct mfsdp_coll_desc {
  size_t struct_nbytes;
  mfsdp_coll_kind kind;
  mfsdp_algorithm algorithm;
  const mfsdp_layout *layout;       /* read by create only */
  const mfsdp_transport *transport; /* must outlive the collective */
  size_t
      chunk_nbytes; /* reduce: at most this many bytes of a peer's contribution are in flight, which
                        * bounds the workspace; equal on all ranks, at least 1024 */
  mfsdp_traffic traffic;
  const char *label; /* for traces and messages; must outlive the collective */
} mfsdp_coll_desc;

/* DIRECT, chunks of 256 KiB: with a few ranks the staged terms stay in a core's cache. */
MFSDP_API mfsdp_coll_desc mfsdp_coll_desc_default(void) {
  mfsdp_coll_desc desc;
  memset(&desc, 0, sizeof(desc));
  desc.struct_nbytes = sizeof(desc);
  desc.algorithm = MFSDP_DIRECT;
  desc.chunk_nbytes = (size_t)256 << 10;
  desc.label = "collective";
  return desc;
}

/* ---- the list: what create emits, run replays, and tests and simulate.h walk ---- */

/* Which of the run's buffers an address is relative to. */
typedef enum mfsdp_coll_base {
  MFSDP_COLL_SHARD, /* gather: this rank's segment */
  MFSDP_COLL_FULL,  /* the full buffer */
  MFSDP_COLL_WORKSPACE,
  MFSDP_COLL_BASE_COUNT
} mfsdp_coll_base;

/* One transfer; becomes an mfsdp_xfer when the bases are known. */
typedef struct mfsdp_coll_xfer {
  size_t offset_nbytes, nbytes, payload_nbytes;
  int32_t base, peer, is_send;
} mfsdp_coll_xfer;

/* One term of a sum. */
typedef struct mfsdp_coll_term {
  size_t offset_nbytes;
  int32_t base;
} mfsdp_coll_term;

typedef enum mfsdp_coll_op_kind {
  MFSDP_COLL_SUBMIT = 1, /* transfers [first, first + count) as one batch */
  MFSDP_COLL_COPY,       /* local: `elements` from SHARD at src_offset to FULL at dst_offset */
  MFSDP_COLL_SUM         /* acc[dst_offset ...] from terms [first, first + count), in this order */
} mfsdp_coll_op_kind;

typedef struct mfsdp_coll_op {
  mfsdp_coll_op_kind kind;
  int32_t first, count;
  int64_t src_offset, dst_offset, elements;
} mfsdp_coll_op;

typedef struct mfsdp_coll {
  mfsdp_coll_kind kind;
  mfsdp_dtype dtype;
  mfsdp_traffic traffic;
  const mfsdp_transport *transport;
  const char *label;
  mfsdp_coll_op *ops;
  mfsdp_coll_xfer *xfers;
  mfsdp_coll_term *terms;
  mfsdp_xfer *resolved;       /* scratch of the run: one batch with addresses */
  const void **term_pointers; /* scratch of the run: one sum with addresses */
  int32_t op_count, xfer_count, term_count, max_batch_count, max_term_count;
  size_t workspace_nbytes;
  int64_t segment_count, full_count; /* of this rank, of the unit; elements */
  uint64_t sequence;                 /* runs so far: part of the check word */
  uint64_t identity;                 /* hash of what every rank must agree on */
  mfsdp_trace_mark begin, end;       /* in queue order: what the trace shows is when it ran */
} mfsdp_coll;

/* ---- validation ---- */

MFSDP_API int mfsdp__coll_ranges_meet(int64_t a, int64_t a_count, int64_t b, int64_t b_count) {
  return a_count > 0 && b_count > 0 && (a < b ? b - a < a_count : a - b < b_count);
}

/* E_ARGUMENT if extent `index` meets an earlier one, in the full buffer or in this rank's segment
 * (each rank checks its own). Tables by rising offsets, as plans give them, are never searched. */
MFSDP_API mfsdp_status mfsdp__coll_check_apart(mfsdp_context *context, const mfsdp_coll_desc *desc,
                                               int32_t index, int64_t *unit_high,
                                               int64_t *own_high) {
  const mfsdp_extent *extents = desc->layout->extents, *e = &extents[index];
  const int own = e->owner == desc->transport->rank;
  int32_t i;
  if (e->count == 0) return MFSDP_OK;
  if (e->unit_offset < *unit_high || (own && e->shard_offset < *own_high))
    for (i = 0; i < index; ++i) {
      if (mfsdp__coll_ranges_meet(e->unit_offset, e->count, extents[i].unit_offset,
                                  extents[i].count))
        return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                          "%s: extents %d and %d overlap in the full buffer", desc->label, (int)i,
                          (int)index);
      if (own && extents[i].owner == e->owner &&
          mfsdp__coll_ranges_meet(e->shard_offset, e->count, extents[i].shard_offset,
                                  extents[i].count))
        return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                          "%s: extents %d and %d overlap in the segment of rank %d", desc->label,
                          (int)i, (int)index, (int)e->owner);
    }
  if (e->unit_offset + e->count > *unit_high) *unit_high = e->unit_offset + e->count;
  if (own && e->shard_offset + e->count > *own_high) *own_high = e->shard_offset + e->count;
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__coll_check_extents(mfsdp_context *context,
                                                 const mfsdp_coll_desc *desc) {
  const mfsdp_layout *layout = desc->layout;
  int64_t unit_high = 0, own_high = 0;
  int32_t i;
  for (i = 0; i < layout->extent_count; ++i) {
    const mfsdp_extent *e = &layout->extents[i];
    int64_t end, nbytes;
    if (e->owner < 0 || e->owner >= layout->world)
      return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "%s: extent %d is owned by %d, needs 0 to %d",
                        desc->label, (int)i, (int)e->owner, (int)layout->world - 1);
    if (e->count < 0 || e->payload_count < 0 || e->payload_count > e->count || e->unit_offset < 0 ||
        !mfsdp_i64_add(e->unit_offset, e->count, &end) || end > layout->full_count)
      return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                        "%s: extent %d [%lld, +%lld) with payload %lld does not lie in a buffer of "
                        "%lld elements",
                        desc->label, (int)i, (long long)e->unit_offset, (long long)e->count,
                        (long long)e->payload_count, (long long)layout->full_count);
    if (e->shard_offset < 0 || !mfsdp_i64_add(e->shard_offset, e->count, &end) ||
        !mfsdp_i64_add(end, MFSDP_ALIGN_ELEMENTS, &end) || !mfsdp_i64_mul(end, 8, &nbytes))
      return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                        "%s: extent %d cannot stand at %lld of a segment", desc->label, (int)i,
                        (long long)e->shard_offset);
    MFSDP_TRY(mfsdp__coll_check_apart(context, desc, i, &unit_high, &own_high));
  }
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__coll_check_layout(mfsdp_context *context,
                                                const mfsdp_coll_desc *desc) {
  const mfsdp_layout *layout = desc->layout;
  size_t nbytes;
  if (layout == NULL || layout->struct_nbytes != sizeof(*layout))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "%s: the layout is NULL or its struct_nbytes is not %zu", desc->label,
                      sizeof(*layout));
  if (layout->extent_count < 0 || (layout->extent_count > 0 && layout->extents == NULL))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "%s: the layout has %d extents at %s, needs 0 or a table", desc->label,
                      (int)layout->extent_count, layout->extents ? "a table" : "NULL");
  if (layout->full_count < 0)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "%s: the layout's full_count is %lld, needs 0 or more", desc->label,
                      (long long)layout->full_count);
  if (layout->world != desc->transport->world)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "%s: the layout is for world %d, the transport for %d", desc->label,
                      (int)layout->world, (int)desc->transport->world);
  if (mfsdp_dtype_nbytes(layout->dtype) == 0)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "%s: the layout's dtype is %d, which is none",
                      desc->label, (int)layout->dtype);
  if (!mfsdp_elements_nbytes(layout->full_count, layout->dtype, &nbytes))
    return MFSDP_FAIL(context, MFSDP_E_OVERFLOW, "%s: %lld elements of %s overflow", desc->label,
                      (long long)layout->full_count, mfsdp_dtype_name(layout->dtype));
  if (desc->kind == MFSDP_COLL_REDUCE && layout->dtype == MFSDP_F64)
    return MFSDP_FAIL(context, MFSDP_E_UNSUPPORTED, "%s: the sum is kept in fp32, the wire is f64",
                      desc->label);
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__coll_check(mfsdp_context *context, const mfsdp_coll_desc *desc) {
  if (desc == NULL || desc->struct_nbytes != sizeof(*desc) || desc->label == NULL)
    return MFSDP_FAIL(
        context, MFSDP_E_ARGUMENT,
        "collective: desc is NULL, has no label, or its struct_nbytes is not %zu (use "
        "mfsdp_coll_desc_default)",
        sizeof(*desc));
  if (desc->kind != MFSDP_COLL_GATHER && desc->kind != MFSDP_COLL_REDUCE)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "%s: kind is %d, needs MFSDP_COLL_GATHER or MFSDP_COLL_REDUCE", desc->label,
                      (int)desc->kind);
  if (desc->algorithm < MFSDP_DIRECT || desc->algorithm > MFSDP_ALGORITHM_AUTO)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "%s: algorithm is %d, needs an mfsdp_algorithm, 1 to %d", desc->label,
                      (int)desc->algorithm, (int)MFSDP_ALGORITHM_AUTO);
  if (desc->algorithm != MFSDP_DIRECT)
    return MFSDP_FAIL(context, MFSDP_E_UNSUPPORTED,
                      "%s: algorithm %d is not in this version, only DIRECT", desc->label,
                      (int)desc->algorithm);
  if (desc->traffic < MFSDP_TRAFFIC_MATERIALIZE || desc->traffic > MFSDP_TRAFFIC_EXPORT)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "%s: traffic is %d, needs an mfsdp_traffic, 1 to %d", desc->label,
                      (int)desc->traffic, (int)MFSDP_TRAFFIC_EXPORT);
  if (desc->chunk_nbytes < MFSDP_ALIGN_ELEMENTS * 8)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "%s: chunk_nbytes is %zu, needs at least %d",
                      desc->label, desc->chunk_nbytes, MFSDP_ALIGN_ELEMENTS * 8);
  MFSDP_TRY(mfsdp_transport_check(context, desc->transport));
  MFSDP_TRY(mfsdp__coll_check_layout(context, desc));
  return mfsdp__coll_check_extents(context, desc);
}

/* ---- emitters. Each runs twice: once to count (tables NULL), once to fill. ---- */

typedef struct mfsdp__coll_emitter {
  const mfsdp_layout *layout;
  mfsdp_coll *coll; /* its tables are NULL while counting */
  int32_t rank, batch_first;
  size_t element_nbytes;
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

/* ---- life cycle ---- */

/* Frees the lists. No run may be in flight. NULL is allowed. */
MFSDP_API void mfsdp_coll_destroy(mfsdp_context *context, mfsdp_coll *coll) {
  if (coll == NULL) return;
  mfsdp_table_free(context, (void *)coll->term_pointers, (size_t)coll->max_term_count,
                   sizeof(*coll->term_pointers));
  mfsdp_table_free(context, coll->resolved, (size_t)coll->max_batch_count, sizeof(*coll->resolved));
  mfsdp_table_free(context, coll->terms, (size_t)coll->term_count, sizeof(*coll->terms));
  mfsdp_table_free(context, coll->xfers, (size_t)coll->xfer_count, sizeof(*coll->xfers));
  mfsdp_table_free(context, coll->ops, (size_t)coll->op_count, sizeof(*coll->ops));
  mfsdp_table_free(context, coll, 1, sizeof(*coll));
}

MFSDP_API void mfsdp__coll_emit(mfsdp__coll_emitter *m, int64_t chunk, int64_t longest) {
  mfsdp_coll *coll = m->coll;
  coll->op_count = coll->xfer_count = coll->term_count = 0;
  m->batch_first = 0;
  if (coll->kind == MFSDP_COLL_GATHER)
    mfsdp__coll_emit_gather_direct(m);
  else
    mfsdp__coll_emit_reduce_direct(m, chunk, longest);
}

MFSDP_API mfsdp_status mfsdp__coll_alloc(mfsdp_context *context, mfsdp_coll *coll) {
  const int32_t op_count = coll->op_count, xfer_count = coll->xfer_count;
  const int32_t term_count = coll->term_count;
  void *ops, *xfers, *terms, *resolved, *pointers;
  coll->max_term_count = term_count > 0 ? coll->transport->world : 0;
  MFSDP_TRY(mfsdp_table_alloc(context, (size_t)op_count, sizeof(*coll->ops), coll->label, &ops));
  coll->ops = (mfsdp_coll_op *)ops;
  MFSDP_TRY(
      mfsdp_table_alloc(context, (size_t)xfer_count, sizeof(*coll->xfers), coll->label, &xfers));
  coll->xfers = (mfsdp_coll_xfer *)xfers;
  MFSDP_TRY(
      mfsdp_table_alloc(context, (size_t)term_count, sizeof(*coll->terms), coll->label, &terms));
  coll->terms = (mfsdp_coll_term *)terms;
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
  if (desc->kind == MFSDP_COLL_REDUCE) hash = mfsdp_hash_u64(hash, (uint64_t)desc->chunk_nbytes);
  hash = mfsdp_hash_bytes(hash, desc->label, strlen(desc->label));
  for (i = 0; i < layout->extent_count; ++i) {
    hash = mfsdp_hash_u64(hash, (uint64_t)layout->extents[i].owner);
    hash = mfsdp_hash_u64(hash, (uint64_t)layout->extents[i].unit_offset);
    hash = mfsdp_hash_u64(hash, (uint64_t)layout->extents[i].shard_offset);
    hash = mfsdp_hash_u64(hash, (uint64_t)layout->extents[i].count);
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

/* Workspace of a DIRECT reduce, one chunk of each peer, on a rank that owns segment_count elements
 * while the longest segment has `longest`. The same arithmetic as mfsdp_coll_create. */
MFSDP_API size_t mfsdp_coll_reduce_workspace_nbytes(int32_t world, int64_t segment_count,
                                                    int64_t longest, mfsdp_dtype dtype,
                                                    size_t chunk_nbytes) {
  if (segment_count == 0) return 0;
  return (size_t)(world - 1) * (size_t)mfsdp__coll_chunk(chunk_nbytes, dtype, longest) *
         mfsdp_dtype_nbytes(dtype);
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

/* E_OVERFLOW if a list could pass its 32-bit counts: a rank has at most one transfer or term for each
 * peer and each round or extent. */
MFSDP_API mfsdp_status mfsdp__coll_check_length(mfsdp_context *context, const mfsdp_coll_desc *desc,
                                                int64_t chunk, int64_t longest) {
  const mfsdp_layout *layout = desc->layout;
  const int64_t rounds = desc->kind == MFSDP_COLL_REDUCE && chunk > 0 ? longest / chunk + 1 : 0;
  if (rounds + layout->extent_count <= INT32_MAX / layout->world) return MFSDP_OK;
  return MFSDP_FAIL(context, MFSDP_E_OVERFLOW,
                    "%s: %lld rounds of chunks and %d extents on %d ranks make more than 2^31 - 1 "
                    "transfers; raise chunk_nbytes (%zu)",
                    desc->label, (long long)rounds, (int)layout->extent_count, (int)layout->world,
                    desc->chunk_nbytes);
}

/*
 * Emits the list of a collective. COMPLETE. Every rank calls it with the same layout. E_ARGUMENT,
 * E_UNSUPPORTED and E_OVERFLOW before anything is allocated; *out is NULL on failure.
 */
MFSDP_API mfsdp_status mfsdp_coll_create(mfsdp_context *context, const mfsdp_coll_desc *desc,
                                         mfsdp_coll **out) {
  mfsdp__coll_emitter emitter;
  int64_t chunk, longest, own;
  mfsdp_coll *coll;
  mfsdp_status status;
  size_t chunk_nbytes;
  void *memory;
  *out = NULL;
  MFSDP_TRY(mfsdp__coll_check(context, desc));
  mfsdp__coll_measure(desc->layout, desc->transport->rank, &longest, &own);
  chunk = mfsdp__coll_chunk(desc->chunk_nbytes, desc->layout->dtype, longest);
  if (!mfsdp_elements_nbytes(chunk, desc->layout->dtype, &chunk_nbytes) ||
      !mfsdp_size_mul(chunk_nbytes, (size_t)desc->layout->world, &chunk_nbytes))
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
  coll->full_count = desc->layout->full_count;
  coll->identity = mfsdp__coll_identity(desc);
  coll->segment_count = own;

  emitter.layout = desc->layout;
  emitter.coll = coll;
  emitter.rank = desc->transport->rank;
  emitter.element_nbytes = mfsdp_dtype_nbytes(coll->dtype);
  if (coll->kind == MFSDP_COLL_REDUCE)
    coll->workspace_nbytes = mfsdp_coll_reduce_workspace_nbytes(desc->layout->world, own, longest,
                                                                coll->dtype, desc->chunk_nbytes);
  coll->begin = mfsdp_trace_mark_make(context, 1, "communication", desc->label);
  coll->end = mfsdp_trace_mark_make(context, 0, "communication", desc->label);
  mfsdp__coll_emit(&emitter, chunk, longest);
  status = mfsdp__coll_alloc(context, coll);
  if (status != MFSDP_OK) {
    mfsdp_coll_destroy(context, coll);
    return status;
  }
  mfsdp__coll_emit(&emitter, chunk, longest);
  *out = coll;
  return MFSDP_OK;
}

/* Bytes of DEVICE workspace of a run: 0 for gathers. Runs on one queue may share a workspace. */
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

MFSDP_API mfsdp_status mfsdp__coll_copy(const mfsdp__coll_run *run, const mfsdp_coll_op *op) {
  const mfsdp_backend *backend = run->coll->transport->backend;
  const size_t element_nbytes = mfsdp_dtype_nbytes(run->coll->dtype);
  const unsigned char *src =
      run->source[MFSDP_COLL_SHARD] + (size_t)op->src_offset * element_nbytes;
  unsigned char *dst = run->target[MFSDP_COLL_FULL] + (size_t)op->dst_offset * element_nbytes;
  if (src == dst) return MFSDP_OK; /* in place */
  return backend->ops->copy(backend->self, run->queue, dst, MFSDP_SPACE_DEVICE, src,
                            MFSDP_SPACE_DEVICE, (size_t)op->elements * element_nbytes);
}

MFSDP_API mfsdp_status mfsdp__coll_sum(const mfsdp__coll_run *run, const mfsdp_coll_op *op) {
  mfsdp_coll *coll = run->coll;
  const mfsdp_backend *backend = coll->transport->backend;
  int32_t i;
  for (i = 0; i < op->count; ++i) {
    const mfsdp_coll_term *term = &coll->terms[op->first + i];
    coll->term_pointers[i] = run->source[term->base] + term->offset_nbytes;
  }
  return backend->ops->sum_terms(backend->self, run->queue, run->accumulator + op->dst_offset,
                                 run->first, coll->term_pointers, coll->dtype, op->count,
                                 op->elements);
}

MFSDP_API mfsdp_status mfsdp__coll_execute(mfsdp__coll_run *run) {
  mfsdp_coll *coll = run->coll;
  const int checked = run->context->desc.debug_check != 0;
  uint64_t check = 0;
  mfsdp_status status = MFSDP_OK;
  int32_t i;
  status = mfsdp_trace_mark_enqueue(coll->transport->backend, run->queue, &coll->begin);
  for (i = 0; i < coll->op_count && status == MFSDP_OK; ++i) {
    const mfsdp_coll_op *op = &coll->ops[i];
    switch (op->kind) {
    case MFSDP_COLL_SUBMIT:
      if (checked) check = mfsdp_hash_u64(coll->identity, coll->sequence) | 1u;
      status = mfsdp__coll_submit(run, op, check);
      break;
    case MFSDP_COLL_COPY: status = mfsdp__coll_copy(run, op); break;
    case MFSDP_COLL_SUM: status = mfsdp__coll_sum(run, op); break;
    }
  }
  if (status == MFSDP_OK)
    status = mfsdp_trace_mark_enqueue(coll->transport->backend, run->queue, &coll->end);
  ++coll->sequence;
  return status;
}

/*
 * full = every owner's segment. `shard`: this rank's segment, DEVICE, layout dtype, may be NULL
 * when it is empty; `full`: the unit's buffer, DEVICE; elements outside all extents are left alone.
 * `shard` may lie inside `full` at its place (in place); any other overlap is undefined. ENQUEUED:
 * both must live
 * until an event recorded later on `queue` has passed.
 */
MFSDP_API mfsdp_status mfsdp_gather(mfsdp_context *context, mfsdp_coll *coll, mfsdp_queue *queue,
                                    const void *shard, void *full) {
  mfsdp__coll_run run;
  if (coll->kind != MFSDP_COLL_GATHER)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "%s: is a reduce, not a gather", coll->label);
  if ((coll->segment_count > 0 && shard == NULL) || (coll->full_count > 0 && full == NULL))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "%s: %s is NULL but has elements", coll->label,
                      full == NULL ? "full" : "shard");
  memset(&run, 0, sizeof(run));
  run.context = context;
  run.coll = coll;
  run.queue = queue;
  run.source[MFSDP_COLL_SHARD] = (const unsigned char *)shard;
  run.target[MFSDP_COLL_FULL] = (unsigned char *)full;
  return mfsdp__coll_execute(&run);
}

/*
 * accumulator (+)= sum over ranks of this rank's segment of `full`, in rank order. `full`: this
 * rank's contribution to the whole unit, DEVICE, layout dtype; read only. `accumulator`: fp32,
 * DEVICE, this rank's segment, NULL when empty; with `first` != 0 the chain starts from rank 0's
 * term, otherwise from what is there. `workspace`: DEVICE, mfsdp_coll_workspace_nbytes. ENQUEUED.
 */
MFSDP_API mfsdp_status mfsdp_reduce(mfsdp_context *context, mfsdp_coll *coll, mfsdp_queue *queue,
                                    const void *full, float *accumulator, int32_t first,
                                    void *workspace) {
  mfsdp__coll_run run;
  if (coll->kind != MFSDP_COLL_REDUCE)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "%s: is a gather, not a reduce", coll->label);
  if ((coll->full_count > 0 && full == NULL) || (coll->segment_count > 0 && accumulator == NULL) ||
      (coll->workspace_nbytes > 0 && workspace == NULL))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "%s: %s is NULL but has elements", coll->label,
                      full == NULL          ? "full"
                      : accumulator == NULL ? "accumulator"
                                            : "workspace");
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
