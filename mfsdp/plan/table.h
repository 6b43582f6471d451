/* SPDX-License-Identifier: MIT */
/*
 * plan/table.h - what a plan holds, and the functions that read it.
 *
 *   int32_t count, i;
 *   const mfsdp_piece *pieces = mfsdp_plan_pieces(plan, unit, &count);
 *   for (i = 0; i < count; ++i)
 *     if (pieces[i].owner == rank) ...
 *
 * Pointers that are returned live as long as the plan. An index out of range is answered, as each
 * function says, with NULL, 0 or -1.
 * Does not: allocate, or change a plan.
 * Link flags: none.
 */
#ifndef MFSDP_PLAN_TABLE_H
#define MFSDP_PLAN_TABLE_H

#include "param.h"

typedef struct mfsdp__plan_param {
  int64_t numel;
  int64_t offset[2];   /* in the buffer of the owning unit, by kind - 1; -1 if absent */
  int32_t owner_param; /* itself unless an alias */
  int32_t piece_first, piece_count, matrix_count;
} mfsdp__plan_param;

typedef struct mfsdp__plan_unit {
  int64_t length[2], payload[2];    /* by kind - 1 */
  int32_t param_first, param_count; /* in unit_params */
  int32_t piece_first, piece_count;
  int32_t segment_first, segment_count;
  int32_t lead[2]; /* parameter that stands for the unit's dtypes, -1: none */
} mfsdp__plan_unit;

/* What one rank owns of one unit; only non-empty ones, by rank within a unit. */
typedef struct mfsdp__plan_segment {
  int64_t length[2], payload[2]; /* by kind - 1 */
  int32_t rank;
} mfsdp__plan_segment;

struct mfsdp_plan {
  mfsdp_planner planner;
  mfsdp_residency residency;
  mfsdp_plan_caps caps;
  int32_t world, param_count, unit_count, piece_count, segment_count, block_count;
  int32_t allow_banded, materialize_count, reduce_count;
  int64_t banded_wire_cost, banded_message_nbytes;
  int64_t predicted_owned, predicted; /* with allow_banded: see plan/hybrid.h */
  uint64_t hash;
  mfsdp_param *params; /* copies: names point into `names`, part_rows into `part_rows` */
  mfsdp__plan_param *infos;
  mfsdp__plan_unit *units;
  int32_t *unit_params;
  mfsdp_piece *pieces;
  int64_t *costs; /* by piece */
  mfsdp__plan_segment *segments;
  int64_t *base_load;    /* world entries or NULL */
  int32_t *node_of_rank; /* world entries or NULL */
  int64_t *part_rows;
  char *names;
  int32_t *name_slots; /* open addressing: parameter index + 1, or 0 */
  size_t part_row_count, name_nbytes, name_slot_count, base_load_count, node_count;
};

/* ---- names ---- */

/* The slot of `name` in a table over params: the one that holds it, or the empty one it would take.
 * slot_count is a power of two above the number of names. */
MFSDP_API size_t mfsdp__name_slot(const int32_t *slots, size_t slot_count,
                                  const mfsdp_param *params, const char *name) {
  const uint64_t hash = mfsdp_hash_bytes(MFSDP_HASH_SEED, name, strlen(name));
  size_t slot = (size_t)(hash ^ (hash >> 32)) & (slot_count - 1);
  while (slots[slot] != 0 && strcmp(params[slots[slot] - 1].name, name) != 0)
    slot = (slot + 1) & (slot_count - 1);
  return slot;
}

/* ---- the whole ---- */

/* Ranks that the plan is for. */
MFSDP_API int32_t mfsdp_plan_world(const mfsdp_plan *plan) {
  return plan->world;
}

/* Parameters, aliases included. */
MFSDP_API int32_t mfsdp_plan_param_count(const mfsdp_plan *plan) {
  return plan->param_count;
}

/* Who placed the matrices. */
MFSDP_API mfsdp_planner mfsdp_plan_planner(const mfsdp_plan *plan) {
  return plan->planner;
}

/* Whether full parameters stay. */
MFSDP_API mfsdp_residency mfsdp_plan_residency(const mfsdp_plan *plan) {
  return plan->residency;
}

/* 1 + the largest unit number; 0 without parameters. Numbers that no parameter uses are legal (unit
 * numbers are unique over all plans of a job): such units have no pieces and length 0. */
MFSDP_API int32_t mfsdp_plan_unit_count(const mfsdp_plan *plan) {
  return plan->unit_count;
}

/* Pieces of all units. */
MFSDP_API int32_t mfsdp_plan_piece_count(const mfsdp_plan *plan) {
  return plan->piece_count;
}

/* 64-bit hash of the canonical serialization: different for different plans (but for collisions).
 */
MFSDP_API uint64_t mfsdp_plan_hash(const mfsdp_plan *plan) {
  return plan->hash;
}

/* ---- parameters ---- */

MFSDP_API int mfsdp__plan_has_param(const mfsdp_plan *plan, int32_t param) {
  return param >= 0 && param < plan->param_count;
}

MFSDP_API int mfsdp__plan_has_unit(const mfsdp_plan *plan, int32_t unit) {
  return unit >= 0 && unit < plan->unit_count;
}

MFSDP_API int mfsdp__layout_kind_ok(mfsdp_layout_kind kind) {
  return kind == MFSDP_LAYOUT_GATHER || kind == MFSDP_LAYOUT_REDUCE;
}

/* The plan's own copy of a description. Fields that role, view and ndim leave unused are 0 or NULL
 * (of an alias, also the parts of its view: ask its owner); alias_of is the owner's name. NULL out
 * of range. */
MFSDP_API const mfsdp_param *mfsdp_plan_param(const mfsdp_plan *plan, int32_t param) {
  return mfsdp__plan_has_param(plan, param) ? &plan->params[param] : NULL;
}

/* Index of the parameter `name`, -1 if there is none (or name is NULL). O(1). */
MFSDP_API int32_t mfsdp_plan_param_find(const mfsdp_plan *plan, const char *name) {
  if (name == NULL || plan->param_count == 0) return -1;
  return plan->name_slots[mfsdp__name_slot(plan->name_slots, plan->name_slot_count, plan->params,
                                           name)] -
         1;
}

/* The parameter that holds the storage: the owner of an alias, else `param`. -1 out of range. */
MFSDP_API int32_t mfsdp_plan_param_owner(const mfsdp_plan *plan, int32_t param) {
  return mfsdp__plan_has_param(plan, param) ? plan->infos[param].owner_param : -1;
}

/* Elements of the tensor; of the owner's for an alias. -1 out of range. */
MFSDP_API int64_t mfsdp_plan_param_numel(const mfsdp_plan *plan, int32_t param) {
  return mfsdp__plan_has_param(plan, param) ? plan->infos[param].numel : -1;
}

/* Matrices of the view, empty ones counted; 0 for other roles, for aliases and out of range. */
MFSDP_API int32_t mfsdp_plan_param_matrices(const mfsdp_plan *plan, int32_t param) {
  return mfsdp__plan_has_param(plan, param) ? plan->infos[param].matrix_count : 0;
}

/*
 * Where the tensor starts in the `kind` buffer of its unit; for an alias, in that of its owner's
 * unit. Empty tensors have an offset too (which may equal the length). -1 for FROZEN in REDUCE and
 * out of range.
 */
MFSDP_API int64_t mfsdp_plan_param_offset(const mfsdp_plan *plan, int32_t param,
                                          mfsdp_layout_kind kind) {
  if (!mfsdp__plan_has_param(plan, param) || !mfsdp__layout_kind_ok(kind)) return -1;
  return plan->infos[plan->infos[param].owner_param].offset[kind - 1];
}

/* ---- pieces ---- */

/*
 * Pieces of a unit, or of all units (unit < 0), ordered by unit, then tensor, then first; *count is
 * set. Where a piece index is asked or given elsewhere, it counts from the first piece of all. NULL
 * and 0 if there are none.
 */
MFSDP_API const mfsdp_piece *mfsdp_plan_pieces(const mfsdp_plan *plan, int32_t unit,
                                               int32_t *count) {
  int32_t first = 0;
  *count = plan->piece_count;
  if (unit >= 0) {
    const int known = mfsdp__plan_has_unit(plan, unit);
    *count = known ? plan->units[unit].piece_count : 0;
    first = known ? plan->units[unit].piece_first : 0;
  }
  return *count > 0 ? plan->pieces + first : NULL;
}

/* Pieces of one tensor by rising `first`; neighbours in the list above. NULL and 0 for none. */
MFSDP_API const mfsdp_piece *mfsdp_plan_param_pieces(const mfsdp_plan *plan, int32_t param,
                                                     int32_t *count) {
  *count = mfsdp__plan_has_param(plan, param) ? plan->infos[param].piece_count : 0;
  return *count > 0 ? plan->pieces + plan->infos[param].piece_first : NULL;
}

/* The cost the planner gave to a piece: of its matrix as described, which its home carries; 0 for the
 * bands of a matrix behind its first (so that costs of pieces sum to those of matrices), for element
 * runs and out of range. */
MFSDP_API int64_t mfsdp_plan_piece_cost(const mfsdp_plan *plan, int32_t piece) {
  return piece >= 0 && piece < plan->piece_count ? plan->costs[piece] : 0;
}

/* ---- units ---- */

/* Indices of a unit's parameters in declared order, aliases included. NULL and 0 for none. */
MFSDP_API const int32_t *mfsdp_plan_unit_params(const mfsdp_plan *plan, int32_t unit,
                                                int32_t *count) {
  *count = mfsdp__plan_has_unit(plan, unit) ? plan->units[unit].param_count : 0;
  return *count > 0 ? plan->unit_params + plan->units[unit].param_first : NULL;
}

/* Length of a unit's full buffer, a multiple of MFSDP_ALIGN_ELEMENTS; 0 out of range. */
MFSDP_API int64_t mfsdp_plan_unit_count_elements(const mfsdp_plan *plan, int32_t unit,
                                                 mfsdp_layout_kind kind) {
  if (!mfsdp__plan_has_unit(plan, unit) || !mfsdp__layout_kind_ok(kind)) return 0;
  return plan->units[unit].length[kind - 1];
}

/* Elements of the tensors in it, without padding. */
MFSDP_API int64_t mfsdp_plan_unit_payload(const mfsdp_plan *plan, int32_t unit,
                                          mfsdp_layout_kind kind) {
  if (!mfsdp__plan_has_unit(plan, unit) || !mfsdp__layout_kind_ok(kind)) return 0;
  return plan->units[unit].payload[kind - 1];
}

/* The unit's parameter that stands for its dtypes; NULL if no tensor has this layout. */
MFSDP_API const mfsdp_param *mfsdp__plan_unit_lead(const mfsdp_plan *plan, int32_t unit,
                                                   mfsdp_layout_kind kind) {
  if (!mfsdp__plan_has_unit(plan, unit) || !mfsdp__layout_kind_ok(kind)) return NULL;
  return mfsdp_plan_param(plan, plan->units[unit].lead[kind - 1]);
}

/* Dtype of a unit's full buffer: compute for GATHER, grad for REDUCE (its wire dtype has a function
 * of its own). F32 for a unit without tensors of that layout and out of range. */
MFSDP_API mfsdp_dtype mfsdp_plan_unit_dtype(const mfsdp_plan *plan, int32_t unit,
                                            mfsdp_layout_kind kind) {
  const mfsdp_param *lead = mfsdp__plan_unit_lead(plan, unit, kind);
  if (lead == NULL) return MFSDP_F32;
  return kind == MFSDP_LAYOUT_GATHER ? lead->compute : lead->grad;
}

/* Dtype of a unit's gradients on the wire; F32 for a unit without gradients. */
MFSDP_API mfsdp_dtype mfsdp_plan_unit_wire(const mfsdp_plan *plan, int32_t unit) {
  const mfsdp_param *lead = mfsdp__plan_unit_lead(plan, unit, MFSDP_LAYOUT_REDUCE);
  return lead == NULL ? MFSDP_F32 : lead->wire;
}

/* Dtype of a unit's masters; F32 for a unit whose tensors are all FROZEN. */
MFSDP_API mfsdp_dtype mfsdp_plan_unit_master(const mfsdp_plan *plan, int32_t unit) {
  const mfsdp_param *lead = mfsdp__plan_unit_lead(plan, unit, MFSDP_LAYOUT_REDUCE);
  return lead == NULL ? MFSDP_F32 : lead->master;
}

/* ---- segments ---- */

/* NULL if the rank owns nothing of the unit. */
MFSDP_API const mfsdp__plan_segment *mfsdp__plan_segment_find(const mfsdp_plan *plan, int32_t unit,
                                                              int32_t rank) {
  int32_t low, high;
  if (!mfsdp__plan_has_unit(plan, unit)) return NULL;
  low = plan->units[unit].segment_first;
  high = low + plan->units[unit].segment_count;
  while (low < high) {
    const int32_t middle = low + (high - low) / 2;
    if (plan->segments[middle].rank == rank) return &plan->segments[middle];
    if (plan->segments[middle].rank < rank)
      low = middle + 1;
    else
      high = middle;
  }
  return NULL;
}

/* Length of a rank's segment of a unit, a multiple of MFSDP_ALIGN_ELEMENTS; 0 if it owns nothing
 * there, and out of range. O(log owners of the unit). */
MFSDP_API int64_t mfsdp_plan_segment_count(const mfsdp_plan *plan, int32_t unit, int32_t rank,
                                           mfsdp_layout_kind kind) {
  const mfsdp__plan_segment *segment = mfsdp__plan_segment_find(plan, unit, rank);
  return segment == NULL || !mfsdp__layout_kind_ok(kind) ? 0 : segment->length[kind - 1];
}

/* The same without padding. */
MFSDP_API int64_t mfsdp_plan_segment_payload(const mfsdp_plan *plan, int32_t unit, int32_t rank,
                                             mfsdp_layout_kind kind) {
  const mfsdp__plan_segment *segment = mfsdp__plan_segment_find(plan, unit, rank);
  return segment == NULL || !mfsdp__layout_kind_ok(kind) ? 0 : segment->payload[kind - 1];
}

/* ---- canonical blocks ---- */

/* Elements of the canonical blocks of a piece. Pieces start at a block of their matrix or tensor. */
MFSDP_API int64_t mfsdp__plan_cut(const mfsdp_plan *plan, const mfsdp_piece *piece) {
  if (piece->matrix < 0) return mfsdp_plan_block_elements(plan->infos[piece->param].numel);
  if (piece->placement != MFSDP_PLACEMENT_BANDED && !plan->allow_banded) return piece->count;
  return mfsdp_plan_band_rows(piece->matrix_rows) * piece->cols;
}

/* Canonical blocks of the whole plan. */
MFSDP_API int32_t mfsdp_plan_block_count(const mfsdp_plan *plan) {
  return plan->block_count;
}

/*
 * Query, then fill. The blocks in tensor order (declared order, then first): but for `piece`, the
 * same list at every world. Writes the first min(capacity, all) to `out` (NULL if capacity is 0)
 * and the number of all to *count. E_ARGUMENT for a negative capacity or a NULL that is needed.
 */
MFSDP_API MFSDP_CHECKED mfsdp_status mfsdp_plan_blocks(mfsdp_context *context,
                                                       const mfsdp_plan *plan,
                                                       mfsdp_norm_block *out, int32_t capacity,
                                                       int32_t *count) {
  int32_t written = 0, i, j;
  if (plan == NULL || count == NULL || capacity < 0 || (out == NULL && capacity > 0))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "plan blocks: plan, count and room for capacity %d are needed",
                      (int)capacity);
  *count = plan->block_count;
  for (i = 0; i < plan->param_count; ++i) {
    const mfsdp__plan_param *info = &plan->infos[i];
    if (plan->params[i].role == MFSDP_ROLE_FROZEN) continue;
    for (j = info->piece_first; j < info->piece_first + info->piece_count; ++j) {
      const mfsdp_piece *piece = &plan->pieces[j];
      const int64_t cut = mfsdp__plan_cut(plan, piece);
      int64_t done = 0;
      for (; done < piece->count && written < capacity; ++written) {
        mfsdp_norm_block *block = &out[written];
        block->first = piece->first + done;
        block->count = piece->count - done < cut ? piece->count - done : cut;
        block->param = i;
        block->piece = j;
        done += block->count;
      }
    }
  }
  return MFSDP_OK;
}

#endif /* MFSDP_PLAN_TABLE_H */
