/* SPDX-License-Identifier: MIT */
/*
 * native.h - NATIVE: the transport's own collective, between what it leaves to us. Part of
 * collective.h.
 *
 * gather: a rank's own extents are copied to their places, then the transport brings the others'.
 * reduce: the transport leaves this rank's sums in the workspace, which holds its whole segment;
 *         they are then added to the accumulator, in fp32. Ranks are added in the transport's order
 *         and in the layout's dtype: not DIRECT's sums bit for bit, unless they are exact.
 * What is counted as sent is what DIRECT sends: each element once to each other rank, each
 * contribution once to its owner. What really crosses the wire is the transport's own affair.
 */
#ifndef MFSDP_COLLECTIVE_NATIVE_H
#define MFSDP_COLLECTIVE_NATIVE_H

#include "emit.h"

MFSDP_API void mfsdp__native_count(mfsdp__coll_emitter *m, const mfsdp_extent *e) {
  mfsdp_traffic_count *sent = &m->coll->native_count;
  const int gather = m->coll->kind == MFSDP_COLL_GATHER;
  const uint64_t times = gather ? (uint64_t)(m->layout->world - 1) : 1;
  if (gather != (e->owner == m->rank)) return; /* owners send gathers, all others reductions */
  sent->payload_nbytes += times * (uint64_t)e->payload_count * m->element_nbytes;
  sent->wire_nbytes += times * (uint64_t)e->count * m->element_nbytes;
  sent->transfer_count += times;
}

/* Extents owner after owner; the table is NULL while counting. */
MFSDP_API void mfsdp__native_emit_parts(mfsdp__coll_emitter *m) {
  mfsdp_coll *coll = m->coll;
  const int32_t count = m->owner_at[m->layout->world];
  int32_t i;
  for (i = 0; i < count && coll->parts != NULL; ++i) {
    const mfsdp_extent *e = &m->layout->extents[m->by_owner[i]];
    coll->parts[i].unit_offset = e->unit_offset;
    coll->parts[i].shard_offset = e->shard_offset;
    coll->parts[i].count = e->count;
    coll->parts[i].owner = e->owner;
    mfsdp__native_count(m, e);
  }
  coll->native_args.parts = coll->parts;
  coll->native_args.part_count = count;
}

/* This rank's sums, from the workspace to its accumulator. */
MFSDP_API void mfsdp__native_emit_sums(mfsdp__coll_emitter *m) {
  const mfsdp_layout *layout = m->layout;
  int32_t i;
  for (i = m->owner_at[m->rank]; i < m->owner_at[m->rank + 1]; ++i) {
    const mfsdp_extent *e = &layout->extents[m->by_owner[i]];
    const int32_t first = m->coll->term_count;
    mfsdp_coll_op *op;
    mfsdp__coll_emit_term(m, MFSDP_COLL_WORKSPACE, e->shard_offset);
    op = mfsdp__coll_emit_op(m, MFSDP_COLL_SUM, first, 1);
    if (op == NULL) continue;
    op->dst_offset = e->shard_offset;
    op->elements = e->count;
  }
}

MFSDP_API void mfsdp__coll_emit_native(mfsdp__coll_emitter *m) {
  mfsdp_coll *coll = m->coll;
  const int gather = coll->kind == MFSDP_COLL_GATHER;
  coll->native_args.struct_nbytes = sizeof(coll->native_args);
  coll->native_args.kind = gather ? MFSDP_NATIVE_GATHER : MFSDP_NATIVE_REDUCE;
  coll->native_args.dtype = coll->dtype;
  coll->native_args.traffic = coll->traffic;
  coll->native_args.label = coll->label;
  coll->native_base = gather ? MFSDP_COLL_FULL : MFSDP_COLL_WORKSPACE;
  mfsdp__native_emit_parts(m);
  if (coll->native_args.part_count == 0) return;
  if (gather) mfsdp__coll_emit_own_copies(m);
  (void)mfsdp__coll_emit_op(m, MFSDP_COLL_NATIVE, 0, 0);
  if (!gather) mfsdp__native_emit_sums(m);
}

#endif /* MFSDP_COLLECTIVE_NATIVE_H */
