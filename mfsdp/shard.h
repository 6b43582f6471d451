/* SPDX-License-Identifier: MIT */
/*
 * shard.h - a rank's view of a plan: what it holds of a piece, and what collectives move.
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
 * Fills *out for (piece, rank). piece: index into mfsdp_plan_pieces(plan, -1). E_ARGUMENT for NULL,
 * a piece or a rank out of range.
 */
MFSDP_API MFSDP_CHECKED mfsdp_status mfsdp_shard_get(mfsdp_context *context, const mfsdp_plan *plan,
                                                     int32_t piece, int32_t rank,
                                                     mfsdp_shard *out) {
  const mfsdp_param *param;
  int32_t piece_count, d;
  const mfsdp_piece *pieces;
  if (plan == NULL || out == NULL)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "shard: %s is NULL",
                      plan == NULL ? "plan" : "out");
  pieces = mfsdp_plan_pieces(plan, -1, &piece_count);
  if (piece < 0 || piece >= piece_count)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "shard: piece is %d, needs 0 to %d", (int)piece,
                      (int)piece_count - 1);
  if (rank < 0 || rank >= mfsdp_plan_world(plan))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "shard: rank is %d, needs 0 to %d", (int)rank,
                      (int)mfsdp_plan_world(plan) - 1);
  memset(out, 0, sizeof(*out));
  out->piece = pieces[piece];
  out->piece_index = piece;
  out->rank = rank;
  param = mfsdp_plan_param(plan, out->piece.param);
  out->ndim = param->ndim;
  for (d = 0; d < param->ndim; ++d)
    out->global_shape[d] = param->shape[d];
  out->global_count = mfsdp_plan_param_numel(plan, out->piece.param);
  out->local_count = rank == out->piece.owner ? out->piece.count : 0;
  out->local_offset = rank == out->piece.owner ? out->piece.shard_offset : -1;
  return MFSDP_OK;
}

/* Appends a piece at (unit_offset, shard_offset) to the extents, or merges it into the last one. */
MFSDP_API void mfsdp__extent_add(mfsdp_extent *last, mfsdp_extent *out, int32_t capacity,
                                 int32_t *count, const mfsdp_extent *next) {
  const int merges =
      *count > 0 && last->owner == next->owner &&
      next->unit_offset - last->unit_offset == next->shard_offset - last->shard_offset;
  if (merges) {
    last->count = next->unit_offset + next->count - last->unit_offset;
    last->payload_count += next->payload_count;
  } else {
    *last = *next;
    ++*count;
  }
  if (out != NULL && *count <= capacity) out[*count - 1] = *last;
}

/*
 * Query, then fill: the extents of a unit by rising unit_offset, all owners together. Writes the
 * first min(capacity, all) to `out` (NULL if capacity is 0) and the number of all to *count. A unit
 * in range without pieces has none. E_ARGUMENT for NULL, a negative capacity, a unit or kind out of
 * range. O(pieces of the unit), allocates nothing.
 */
MFSDP_API MFSDP_CHECKED mfsdp_status mfsdp_plan_extents(mfsdp_context *context,
                                                        const mfsdp_plan *plan, int32_t unit,
                                                        mfsdp_layout_kind kind, mfsdp_extent *out,
                                                        int32_t capacity, int32_t *count) {
  mfsdp_extent last;
  const mfsdp_piece *pieces;
  int32_t piece_count, i;
  if (plan == NULL || count == NULL || capacity < 0 || (out == NULL && capacity > 0))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "extents: plan, count and room for capacity %d are needed", (int)capacity);
  if (unit < 0 || unit >= mfsdp_plan_unit_count(plan))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "extents: unit is %d, needs 0 to %d", (int)unit,
                      (int)mfsdp_plan_unit_count(plan) - 1);
  if (kind != MFSDP_LAYOUT_GATHER && kind != MFSDP_LAYOUT_REDUCE)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "extents: kind is %d, needs an mfsdp_layout_kind",
                      (int)kind);
  *count = 0;
  memset(&last, 0, sizeof(last));
  pieces = mfsdp_plan_pieces(plan, unit, &piece_count);
  for (i = 0; i < piece_count; ++i) {
    const int gather = kind == MFSDP_LAYOUT_GATHER;
    mfsdp_extent next;
    if (!gather && pieces[i].grad_unit_offset < 0) continue; /* FROZEN */
    next.owner = pieces[i].owner;
    next.unit_offset = gather ? pieces[i].unit_offset : pieces[i].grad_unit_offset;
    next.shard_offset = gather ? pieces[i].shard_offset : pieces[i].grad_shard_offset;
    next.count = next.payload_count = pieces[i].count;
    mfsdp__extent_add(&last, out, capacity, count, &next);
  }
  return MFSDP_OK;
}

#endif /* MFSDP_SHARD_H */
