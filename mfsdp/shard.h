/* SPDX-License-Identifier: MIT */
/*
 * shard.h - a rank's view of a plan: what it holds of a piece, and the extents that collectives move.
 *
 *   mfsdp_extent extents[64];
 *   int32_t count;
 *   mfsdp_plan_extents(&context, plan, unit, MFSDP_LAYOUT_GATHER, extents, 64, &count);
 *   for (int32_t i = 0; i < count; ++i)           // what a gather does, on one address space
 *     memcpy(full + extents[i].unit_offset, segment[extents[i].owner] + extents[i].shard_offset,
 *            (size_t)extents[i].count * sizeof(float));
 *
 * Does not: hold or move data.
 * Link flags: none.
 */
#ifndef MFSDP_SHARD_H
#define MFSDP_SHARD_H

#include "plan.h"

/* What `rank` holds of a piece. Global shape and numel always come from the plan. */
typedef struct mfsdp_shard {
  mfsdp_piece piece;
  int32_t piece_index, rank;
  int32_t ndim;
  int64_t global_shape[MFSDP_MAX_NDIM]; /* of the whole tensor; entries from ndim on are 0 */
  int64_t global_count;                 /* elements of the whole tensor */
  int64_t local_count;                  /* piece.count on the owner, 0 elsewhere */
  int64_t local_offset;                 /* piece.shard_offset on the owner, -1 elsewhere */
} mfsdp_shard;

/*
 * A stretch that one owner holds and that is contiguous both in the unit's full buffer and in the
 * owner's segment. Neighbouring pieces of one owner are merged where the padding between them is
 * equally long on both sides; `count` includes that inner padding (zeros), payload_count does not.
 */
typedef struct mfsdp_extent {
  int32_t owner;
  int64_t unit_offset;  /* in the full buffer of the asked kind */
  int64_t shard_offset; /* in the owner's segment of that kind */
  int64_t count, payload_count;
} mfsdp_extent;

/*
 * Fills *out for (piece, rank). piece: index into mfsdp_plan_pieces(plan, -1). E_ARGUMENT for NULL, a
 * piece or a rank out of range.
 */
MFSDP_API MFSDP_CHECKED mfsdp_status mfsdp_shard_get(mfsdp_context *context, const mfsdp_plan *plan,
                                                     int32_t piece, int32_t rank, mfsdp_shard *out);

/*
 * Query, then fill: the extents of a unit by rising unit_offset, all owners together. Writes the
 * first min(capacity, all) to `out` (NULL if capacity is 0) and the number of all to *count. A unit
 * in range without pieces has none. E_ARGUMENT for NULL, a negative capacity, a unit or kind out of
 * range. O(pieces of the unit), allocates nothing.
 */
MFSDP_API MFSDP_CHECKED mfsdp_status mfsdp_plan_extents(mfsdp_context *context,
                                                        const mfsdp_plan *plan, int32_t unit,
                                                        mfsdp_layout_kind kind, mfsdp_extent *out,
                                                        int32_t capacity, int32_t *count);

#endif /* MFSDP_SHARD_H */
