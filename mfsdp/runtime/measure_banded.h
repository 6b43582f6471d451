/* SPDX-License-Identifier: MIT */
/*
 * runtime/measure_banded.h - what the exchange of BANDED matrices takes, in closed form: which
 * pieces take part, how many matrices share a round, and how much memory that is. Part of
 * runtime.h.
 *
 * Rule of batches: matrices of one shape and hyperparameter group are worked on together, as many
 * as fit where the largest exchanged matrix of the group of ranks fits alone, in staging and in
 * workspace. So the largest matrix decides the memory, and batches cost none. It depends on the
 * plan and the optimizer alone, which all ranks of a group share.
 * Link flags: none.
 */
#ifndef MFSDP_RUNTIME_MEASURE_BANDED_H
#define MFSDP_RUNTIME_MEASURE_BANDED_H

#include "check.h"

/* The stage number of bands: behind those of units, which the step in backward uses. */
#define MFSDP__BANDED_STAGE (MFSDP_PLAN_MAX_UNIT + 1)

/* What one rank needs for the exchanges of a group, or, the largest of each but for directions, of
 * all its groups. */
typedef struct mfsdp__banded_sizes {
  int64_t direction_count; /* floats: of its bands */
  int64_t slot_count;      /* floats of a slot: the largest matrix, padded */
  int64_t whole_count;     /* floats of the batch in work, where it does not lie in a slot */
  size_t workspace_nbytes; /* of Newton-Schulz */
  int32_t slots;           /* none where it works on nothing, one for a single matrix */
  int32_t matrix_count;    /* exchanged matrices of all groups */
  int32_t copy_count;      /* upper bound of local copies */
} mfsdp__banded_sizes;

/* Whether a piece is a band of a matrix that only the whole of can be updated. */
MFSDP_API int mfsdp__piece_is_exchanged(const mfsdp_runtime_desc *desc, const mfsdp_plan *plan,
                                        const mfsdp_piece *piece) {
  const int32_t group = mfsdp_plan_param(plan, piece->param)->hyper_group;
  return piece->placement == MFSDP_PLACEMENT_BANDED && piece->grad_shard_offset >= 0 &&
         mfsdp__algorithm_of(desc->optimizer->groups[group].algorithm)->stages != NULL;
}

/* Whether `piece` opens its matrix: pieces of a matrix stand together, by rising rank. */
MFSDP_API int mfsdp__piece_opens_matrix(const mfsdp_piece *piece) {
  return piece->first == piece->matrix_first;
}

/* Whether a rank works on the whole matrix. */
MFSDP_API int mfsdp__banded_works(const mfsdp_runtime_desc *desc, const mfsdp_piece *piece,
                                  int32_t rank) {
  return desc->banded_update == MFSDP_BANDED_EVERYWHERE || piece->home == rank;
}

/* Floats of the whole matrix, padded as a batch places it, and bytes of its workspace alone. */
MFSDP_API mfsdp_status mfsdp__banded_matrix_size(mfsdp_context *context,
                                                 const mfsdp_runtime_desc *desc,
                                                 const mfsdp_plan *plan, const mfsdp_piece *piece,
                                                 int64_t *count, size_t *nbytes) {
  const int32_t group = mfsdp_plan_param(plan, piece->param)->hyper_group;
  (void)mfsdp_i64_align(piece->matrix_rows * piece->cols, count); /* the plan bounds it */
  return mfsdp_optimizer_orthogonalize_nbytes(context, &desc->optimizer->groups[group],
                                              piece->matrix_rows, piece->cols, 1, nbytes);
}

/* The largest of a group's exchanged matrices, and the largest workspace: what batches may use. */
MFSDP_API mfsdp_status mfsdp__banded_room(mfsdp_context *context, const mfsdp_runtime_desc *desc,
                                          const mfsdp_plan *plan, int64_t *largest,
                                          size_t *workspace_nbytes) {
  int32_t piece_count = 0, i;
  const mfsdp_piece *pieces = mfsdp_plan_pieces(plan, -1, &piece_count);
  *largest = 0;
  *workspace_nbytes = 0;
  for (i = 0; i < piece_count; ++i) {
    int64_t count = 0;
    size_t nbytes = 0;
    if (!mfsdp__piece_is_exchanged(desc, plan, &pieces[i]) ||
        !mfsdp__piece_opens_matrix(&pieces[i]))
      continue;
    MFSDP_TRY(mfsdp__banded_matrix_size(context, desc, plan, &pieces[i], &count, &nbytes));
    if (count > *largest) *largest = count;
    if (nbytes > *workspace_nbytes) *workspace_nbytes = nbytes;
  }
  return MFSDP_OK;
}

/* The most matrices like this one in a round of one rank; `nbytes` of workspace is what n of them
 * need at most n times. */
MFSDP_API int64_t mfsdp__banded_limit(int64_t largest, size_t workspace_nbytes, int64_t count,
                                      size_t nbytes) {
  int64_t limit = count > 0 ? largest / count : 1;
  if (nbytes > 0 && workspace_nbytes / nbytes < (size_t)limit)
    limit = (int64_t)(workspace_nbytes / nbytes);
  return limit;
}

/* One group's needs, added to those of the others. */
MFSDP_API mfsdp_status mfsdp__measure_banded(mfsdp_context *context, const mfsdp_runtime_desc *desc,
                                             const mfsdp_plan *plan, int32_t rank,
                                             mfsdp__banded_sizes *out) {
  int32_t piece_count = 0, works = 0, i;
  const mfsdp_piece *pieces = mfsdp_plan_pieces(plan, -1, &piece_count);
  int64_t largest, count = 0, whole = 0;
  size_t workspace_nbytes, nbytes = 0;
  MFSDP_TRY(mfsdp__banded_room(context, desc, plan, &largest, &workspace_nbytes));
  for (i = 0; i < piece_count && largest > 0; ++i) {
    const mfsdp_piece *piece = &pieces[i];
    const int works_on = mfsdp__banded_works(desc, piece, rank);
    if (!mfsdp__piece_is_exchanged(desc, plan, piece)) continue;
    if (piece->owner == rank) out->direction_count += piece->count;
    out->copy_count += works_on + (piece->owner == rank);
    if (!mfsdp__piece_opens_matrix(piece)) continue;
    ++out->matrix_count;
    if (!works_on) continue;
    ++works;
    MFSDP_TRY(mfsdp__banded_matrix_size(context, desc, plan, piece, &count, &nbytes));
    if (mfsdp__banded_limit(largest, workspace_nbytes, count, nbytes) > 1) whole = largest;
  }
  if (works == 0) return MFSDP_OK;
  if (largest > out->slot_count) out->slot_count = largest;
  if (whole > out->whole_count) out->whole_count = whole;
  if (workspace_nbytes > out->workspace_nbytes) out->workspace_nbytes = workspace_nbytes;
  if (out->slots < 2) out->slots = works > 1 ? 2 : 1;
  return MFSDP_OK;
}

/* Bytes of staging: directions, slots and the batch in work. The plan bounds all of its elements to
 * 2^46, so these sums cannot overflow. */
MFSDP_API size_t mfsdp__banded_staging_nbytes(const mfsdp__banded_sizes *sizes) {
  return (size_t)(sizes->direction_count + sizes->slots * sizes->slot_count + sizes->whole_count) *
         sizeof(float);
}

#endif /* MFSDP_RUNTIME_MEASURE_BANDED_H */
