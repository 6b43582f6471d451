/* SPDX-License-Identifier: MIT */
/*
 * check.h - what a collective's description must hold. Part of collective.h.
 */
#ifndef MFSDP_COLLECTIVE_CHECK_H
#define MFSDP_COLLECTIVE_CHECK_H

#include "desc.h"

/* ---- validation ---- */

MFSDP_API int mfsdp__coll_ranges_meet(int64_t a, int64_t a_count, int64_t b, int64_t b_count) {
  return a_count > 0 && b_count > 0 && (a < b ? b - a < a_count : a - b < b_count);
}

/* The rank whose full buffer extent `index` has a place in; without roots each rank's own. */
MFSDP_API int32_t mfsdp__coll_root(const mfsdp_layout *layout, int32_t index, int32_t rank) {
  return layout->roots != NULL ? layout->roots[index] : rank;
}

/* E_ARGUMENT if extent `index` meets an earlier one, in this rank's full buffer or in its segment
 * (each rank checks its own). Tables by rising offsets, as plans give them, are never searched. */
MFSDP_API mfsdp_status mfsdp__coll_check_apart(mfsdp_context *context, const mfsdp_coll_desc *desc,
                                               int32_t index, int64_t *unit_high,
                                               int64_t *own_high) {
  const mfsdp_extent *extents = desc->layout->extents, *e = &extents[index];
  const int32_t rank = desc->transport->rank;
  const int own = e->owner == rank, full = mfsdp__coll_root(desc->layout, index, rank) == rank;
  int32_t i;
  if (e->count == 0) return MFSDP_OK;
  if ((full && e->unit_offset < *unit_high) || (own && e->shard_offset < *own_high))
    for (i = 0; i < index; ++i) {
      if (full && mfsdp__coll_root(desc->layout, i, rank) == rank &&
          mfsdp__coll_ranges_meet(e->unit_offset, e->count, extents[i].unit_offset,
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
  if (full && e->unit_offset + e->count > *unit_high) *unit_high = e->unit_offset + e->count;
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
    if (layout->roots != NULL && (layout->roots[i] < 0 || layout->roots[i] >= layout->world))
      return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "%s: the root of extent %d is %d, needs 0 to %d",
                        desc->label, (int)i, (int)layout->roots[i], (int)layout->world - 1);
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

/* Roots: what only some ranks get, and what may have them. */
MFSDP_API mfsdp_status mfsdp__coll_check_roots(mfsdp_context *context,
                                               const mfsdp_coll_desc *desc) {
  const int rooted = desc->layout->roots != NULL;
  if (!rooted && desc->kind == MFSDP_COLL_SCATTER && desc->layout->extent_count > 0)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "%s: a scatter needs layout.roots, the ranks that extents come from",
                      desc->label);
  if (rooted && desc->kind == MFSDP_COLL_REDUCE)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "%s: layout.roots are for gathers and scatters; a reduce brings every extent "
                      "to its owner",
                      desc->label);
  if (rooted && desc->algorithm != MFSDP_DIRECT && desc->algorithm != MFSDP_ALGORITHM_AUTO)
    return MFSDP_FAIL(context, MFSDP_E_UNSUPPORTED,
                      "%s: %s has no roots (layout.roots); use direct, or auto, which is direct "
                      "then",
                      desc->label, mfsdp_algorithm_name(desc->algorithm));
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
  if (desc->kind == MFSDP_COLL_REDUCE &&
      (desc->algorithm == MFSDP_RING || desc->algorithm == MFSDP_HIERARCHICAL) &&
      layout->dtype != MFSDP_F32)
    return MFSDP_FAIL(context, MFSDP_E_UNSUPPORTED,
                      "%s: %s sends sums on, which need fp32 on the wire; the layout's dtype is %s "
                      "(direct takes it)",
                      desc->label, mfsdp_algorithm_name(desc->algorithm),
                      mfsdp_dtype_name(layout->dtype));
  if (desc->kind == MFSDP_COLL_REDUCE && desc->algorithm == MFSDP_NATIVE &&
      layout->dtype != MFSDP_F32 && !desc->narrow_sums)
    return MFSDP_FAIL(
        context, MFSDP_E_UNSUPPORTED,
        "%s: native adds in the layout's dtype, which is %s: sums would be rounded (set "
        "narrow_sums to allow it; direct adds in fp32)",
        desc->label, mfsdp_dtype_name(layout->dtype));
  return mfsdp__coll_check_roots(context, desc);
}

MFSDP_API mfsdp_status mfsdp__coll_check(mfsdp_context *context, const mfsdp_coll_desc *desc) {
  if (desc == NULL || desc->struct_nbytes != sizeof(*desc) || desc->label == NULL)
    return MFSDP_FAIL(
        context, MFSDP_E_ARGUMENT,
        "collective: desc is NULL, has no label, or its struct_nbytes is not %zu (use "
        "mfsdp_coll_desc_default)",
        sizeof(*desc));
  if (desc->kind < MFSDP_COLL_GATHER || desc->kind > MFSDP_COLL_SCATTER)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "%s: kind is %d, needs MFSDP_COLL_GATHER, MFSDP_COLL_REDUCE or "
                      "MFSDP_COLL_SCATTER",
                      desc->label, (int)desc->kind);
  if (desc->algorithm < MFSDP_DIRECT || desc->algorithm > MFSDP_ALGORITHM_AUTO)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "%s: algorithm is %d, needs an mfsdp_algorithm, 1 to %d", desc->label,
                      (int)desc->algorithm, (int)MFSDP_ALGORITHM_AUTO);
  if (desc->algorithm == MFSDP_ALGORITHM_AUTO && !mfsdp_wire_cost_valid(&desc->wire))
    return MFSDP_FAIL(
        context, MFSDP_E_ARGUMENT,
        "%s: algorithm auto needs desc.wire: latencies of 0 to 10^12 ns (%lld, %lld), "
        "1 to 10^12 ns for a MiB (%lld, %lld)",
        desc->label, (long long)desc->wire.latency_ns, (long long)desc->wire.between_latency_ns,
        (long long)desc->wire.ns_per_mib, (long long)desc->wire.between_ns_per_mib);
  if (desc->traffic < MFSDP_TRAFFIC_MATERIALIZE || desc->traffic > MFSDP_TRAFFIC_EXPORT)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "%s: traffic is %d, needs an mfsdp_traffic, 1 to %d", desc->label,
                      (int)desc->traffic, (int)MFSDP_TRAFFIC_EXPORT);
  if (desc->chunk_nbytes > 0 && desc->chunk_nbytes < (size_t)MFSDP_ALIGN_ELEMENTS * 8)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "%s: chunk_nbytes is %zu, needs at least %d, or 0 (the library's choice)",
                      desc->label, desc->chunk_nbytes, MFSDP_ALIGN_ELEMENTS * 8);
  MFSDP_TRY(mfsdp_transport_check(context, desc->transport));
  if (desc->algorithm == MFSDP_NATIVE && !MFSDP_HAS(desc->transport->ops, native))
    return MFSDP_FAIL(
        context, MFSDP_E_UNSUPPORTED,
        "%s: transport %s has no native collectives; use direct, ring, hierarchical or "
        "auto",
        desc->label, desc->transport->ops->name ? desc->transport->ops->name : "(unnamed)");
  MFSDP_TRY(mfsdp__coll_check_layout(context, desc));
  return mfsdp__coll_check_extents(context, desc);
}

#endif /* MFSDP_COLLECTIVE_CHECK_H */
