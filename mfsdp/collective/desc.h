/* SPDX-License-Identifier: MIT */
/*
 * desc.h - what a collective is made from, and the list that it becomes. Part of collective.h.
 */
#ifndef MFSDP_COLLECTIVE_DESC_H
#define MFSDP_COLLECTIVE_DESC_H

#include "../cost.h"
#include "../shard.h"
#include "../transport.h"

typedef enum mfsdp_coll_kind {
  MFSDP_COLL_GATHER = 1,
  MFSDP_COLL_REDUCE,
  MFSDP_COLL_SCATTER /* the way back of a gather with roots */
} mfsdp_coll_kind;

typedef enum mfsdp_algorithm {
  MFSDP_DIRECT = 1, /* the default; the only one with the bit promise */
  MFSDP_RING,
  MFSDP_HIERARCHICAL,
  MFSDP_NATIVE,
  MFSDP_ALGORITHM_AUTO
} mfsdp_algorithm;

/* The algorithm in lower case, as "ring"; "invalid" for none; never NULL. */
MFSDP_API const char *mfsdp_algorithm_name(mfsdp_algorithm algorithm) {
  switch (algorithm) {
  case MFSDP_DIRECT: return "direct";
  case MFSDP_RING: return "ring";
  case MFSDP_HIERARCHICAL: return "hierarchical";
  case MFSDP_NATIVE: return "native";
  case MFSDP_ALGORITHM_AUTO: return "auto";
  }
  return "invalid";
}

/* Who owns what of a full buffer. Offsets and counts in elements of `dtype`. */
typedef struct mfsdp_layout {
  size_t struct_nbytes;
  const mfsdp_extent *extents; /* extent_count, of all ranks, in any order, apart from each other */
  int32_t extent_count, world;
  mfsdp_dtype dtype;  /* gather: compute dtype; reduce: wire dtype */
  int64_t full_count; /* length of the full buffer */
  /* NULL, or extent_count ranks, with DIRECT alone: a gather brings extent i to the full buffer of
   * rank roots[i] and to no other, a scatter back from there to its owner. Full buffers of different
   * roots are different memory, so their extents may have the same places. */
  const int32_t *roots;
} mfsdp_layout;

typedef struct mfsdp_coll_desc {
  size_t struct_nbytes;
  mfsdp_coll_kind kind;
  mfsdp_algorithm algorithm;
  const mfsdp_layout *layout;       /* read by create only */
  const mfsdp_transport *transport; /* must outlive the collective */
  /* DIRECT reduce: at most this many bytes of a peer's contribution are in flight, which bounds the
   * workspace. RING and HIERARCHICAL: what moves from rank to rank at a time. 0: chosen by the library
   * (mfsdp_coll_chunk_nbytes; the rule is that of cost/chunk.h), else at least 1024. Equal on all
   * ranks. Sums do not depend on it, in whatever order an algorithm makes them. */
  size_t chunk_nbytes;
  int32_t
      narrow_sums; /* 1: NATIVE may add in a 16-bit dtype, which rounds sums; 0: E_UNSUPPORTED */
  mfsdp_wire_cost wire; /* read by AUTO, which needs it, and by a chunk_nbytes of 0; equal on all
                           ranks */
  mfsdp_traffic traffic;
  const char *label; /* for traces and messages; must outlive the collective */
} mfsdp_coll_desc;

/* DIRECT, chunks as the library chooses them. */
MFSDP_API mfsdp_coll_desc mfsdp_coll_desc_default(void) {
  mfsdp_coll_desc desc;
  memset(&desc, 0, sizeof(desc));
  desc.struct_nbytes = sizeof(desc);
  desc.algorithm = MFSDP_DIRECT;
  desc.label = "collective";
  return desc;
}

/* ---- the list: what create emits, run replays, and tests and simulate.h walk ---- */

/* Which of the run's buffers an address is relative to. */
typedef enum mfsdp_coll_base {
  MFSDP_COLL_SHARD, /* gather and scatter: this rank's segment */
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
  MFSDP_COLL_SUBMIT = 1,  /* transfers [first, first + count) as one batch */
  MFSDP_COLL_COPY,        /* local: `elements` from SHARD at src_offset to FULL at dst_offset */
  MFSDP_COLL_COPY_BACK,   /* local: from FULL at src_offset to SHARD at dst_offset */
  MFSDP_COLL_SUM,         /* acc[dst_offset ...] from terms [first, first + count), in this order */
  MFSDP_COLL_SUM_PARTIAL, /* fp32 WORKSPACE[dst_offset ...] = the terms' sum */
  MFSDP_COLL_ADD_PARTIAL, /* fp32 WORKSPACE[dst_offset ...] += the terms' sum */
  MFSDP_COLL_NATIVE       /* the transport's own collective: the list's native_args */
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
  mfsdp_native_part *parts;         /* NATIVE: native_args.part_count */
  mfsdp_native_args native_args;    /* but for buffers and check word */
  mfsdp_traffic_count native_count; /* what this rank sends in one */
  int32_t native_base;              /* of native_args.dst */
  mfsdp_xfer *resolved;             /* scratch of the run: one batch with addresses */
  const void **term_pointers;       /* scratch of the run: one sum with addresses */
  int32_t op_count, xfer_count, term_count, max_batch_count, max_term_count;
  size_t workspace_nbytes;
  int64_t segment_count; /* of this rank, elements */
  int64_t full_count;    /* of the unit; with roots, as far as this rank's own goes */
  int64_t in_place;      /* where in the full buffer the segment may lie, elements; -1: nowhere */
  uint64_t sequence;     /* runs so far: part of the check word */
  uint64_t identity;     /* hash of what every rank must agree on */
  mfsdp_trace_mark begin, end; /* in queue order: what the trace shows is when it ran */
} mfsdp_coll;

#endif /* MFSDP_COLLECTIVE_DESC_H */
