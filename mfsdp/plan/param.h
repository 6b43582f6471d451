/* SPDX-License-Identifier: MIT */
/*
 * plan/param.h - the rules of one description: what is valid, and how a view cuts a tensor.
 *
 *   int64_t numel;
 *   MFSDP_TRY(mfsdp_param_validate(&context, &param, index, &numel));
 *
 * Rules between descriptions (names, aliases, dtypes of a unit) are in plan/check.h.
 * Does not: allocate.
 * Link flags: none.
 */
#ifndef MFSDP_PLAN_PARAM_H
#define MFSDP_PLAN_PARAM_H

#include "desc.h"

/* All messages about a parameter begin alike: its index and its name. */
#define MFSDP__PARAM_FAIL(context, status, index, param, format, ...)                 \
  MFSDP_FAIL((context), (status), "plan: params[%d] '%.100s': " format, (int)(index), \
             (param)->name, __VA_ARGS__)

/* ---- views ---- */

/* Whether part_rows is read: ROWS always, BATCH where its matrices are cut again. */
MFSDP_API int mfsdp__view_has_parts(const mfsdp_param *param) {
  return param->view == MFSDP_VIEW_ROWS ||
         (param->view == MFSDP_VIEW_BATCH && param->part_rows != NULL);
}

/* Matrices of a valid MATRIX description, empty ones counted; INT64_MAX for more. */
MFSDP_API int64_t mfsdp__view_count(const mfsdp_param *param) {
  int64_t count = param->shape[0];
  switch (param->view) {
  case MFSDP_VIEW_WHOLE:
  case MFSDP_VIEW_CONV: return 1;
  case MFSDP_VIEW_BATCH:
    if (!mfsdp__view_has_parts(param)) return count;
    return mfsdp_i64_mul(count, param->part_count, &count) ? count : INT64_MAX;
  case MFSDP_VIEW_ROWS: return param->part_count;
  case MFSDP_VIEW_HEADS: return param->head_count;
  }
  return 0;
}

/* Walks over the matrices of a valid MATRIX description in order. */
typedef struct mfsdp__view_cursor {
  int32_t next, matrix; /* the matrix to come, the matrix shown */
  int64_t first, rows, cols;
} mfsdp__view_cursor;

MFSDP_API mfsdp__view_cursor mfsdp__view_begin(void) {
  mfsdp__view_cursor cursor;
  memset(&cursor, 0, sizeof(cursor));
  return cursor;
}

MFSDP_API int64_t mfsdp__view_rows(const mfsdp_param *param, int32_t matrix) {
  switch (param->view) {
  case MFSDP_VIEW_WHOLE:
  case MFSDP_VIEW_CONV: return param->shape[0];
  case MFSDP_VIEW_BATCH:
    return mfsdp__view_has_parts(param) ? param->part_rows[matrix % param->part_count]
                                        : param->shape[1];
  case MFSDP_VIEW_ROWS: return param->part_rows[matrix];
  case MFSDP_VIEW_HEADS: return param->shape[0] / param->head_count;
  }
  return 0;
}

MFSDP_API int64_t mfsdp__view_cols(const mfsdp_param *param) {
  int64_t cols = 1;
  int32_t i;
  if (param->view == MFSDP_VIEW_BATCH) return param->shape[2];
  for (i = 1; i < param->ndim; ++i)
    cols *= param->shape[i];
  return cols;
}

/* Shows the next non-empty matrix: 1, or 0 at the end. numel is the tensor's; a tensor without
 * elements has none, however its other dimensions multiply. */
MFSDP_API int mfsdp__view_next(const mfsdp_param *param, int64_t numel,
                               mfsdp__view_cursor *cursor) {
  const int32_t count = numel == 0 ? 0 : (int32_t)mfsdp__view_count(param);
  if (cursor->next > 0) cursor->first += cursor->rows * cursor->cols;
  while (cursor->next < count) {
    cursor->matrix = cursor->next++;
    cursor->rows = mfsdp__view_rows(param, cursor->matrix);
    cursor->cols = mfsdp__view_cols(param);
    if (cursor->rows > 0) return 1; /* numel > 0, so cols > 0 */
  }
  return 0;
}

/* ---- bands ---- */

/* Walks over the bands of a matrix by rank; ranks without rows are left out. */
typedef struct mfsdp__band_cursor {
  int64_t rows, next;   /* of the matrix; the band block to come */
  int64_t first, count; /* rows shown */
  int32_t world, rank;
} mfsdp__band_cursor;

MFSDP_API mfsdp__band_cursor mfsdp__band_begin(int64_t rows, int32_t world) {
  mfsdp__band_cursor cursor;
  memset(&cursor, 0, sizeof(cursor));
  cursor.rows = rows;
  cursor.world = world;
  return cursor;
}

/* Shows the next band: 1, or 0 at the end. At most MFSDP_PLAN_BANDS steps, however large the world. */
MFSDP_API int mfsdp__band_next(mfsdp__band_cursor *cursor) {
  const int64_t block = mfsdp_plan_band_rows(cursor->rows), world = cursor->world;
  const int64_t blocks = block > 0 ? cursor->rows / block + (cursor->rows % block != 0) : 0;
  if (cursor->next >= blocks) return 0;
  /* The lowest rank with blocks * (rank + 1) / world > next. */
  cursor->rank = (int32_t)(((cursor->next + 1) * world + blocks - 1) / blocks - 1);
  cursor->next = blocks * (cursor->rank + 1) / world;
  mfsdp_plan_band(cursor->rows, cursor->world, cursor->rank, &cursor->first, &cursor->count);
  return 1;
}

/* Ranks that hold a band. */
MFSDP_API int64_t mfsdp__band_count(int64_t rows, int32_t world) {
  const int64_t block = mfsdp_plan_band_rows(rows);
  const int64_t blocks = block > 0 ? rows / block + (rows % block != 0) : 0;
  return blocks < world ? blocks : world;
}

/* ---- validation ---- */

MFSDP_API mfsdp_status mfsdp__param_check_shape(mfsdp_context *context, const mfsdp_param *param,
                                                int32_t index, int64_t *numel) {
  int64_t product = 1;
  int32_t i;
  int overflow = 0, empty = 0;
  if (param->ndim < 1 || param->ndim > MFSDP_MAX_NDIM)
    return MFSDP__PARAM_FAIL(context, MFSDP_E_ARGUMENT, index, param, "ndim is %d, needs 1 to %d",
                             (int)param->ndim, MFSDP_MAX_NDIM);
  for (i = 0; i < param->ndim; ++i) {
    if (param->shape[i] < 0)
      return MFSDP__PARAM_FAIL(context, MFSDP_E_ARGUMENT, index, param,
                               "shape[%d] is %lld, needs at least 0", (int)i,
                               (long long)param->shape[i]);
    if (param->shape[i] == 0) empty = 1;
    if (!overflow && !mfsdp_i64_mul(product, param->shape[i], &product)) overflow = 1;
  }
  if (empty) product = 0;
  if (!empty && (overflow || product > MFSDP_PLAN_MAX_ELEMENTS))
    return MFSDP__PARAM_FAIL(context, MFSDP_E_OVERFLOW, index, param,
                             "the shape has more than %lld elements",
                             (long long)MFSDP_PLAN_MAX_ELEMENTS);
  *numel = product;
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__param_check_enums(mfsdp_context *context, const mfsdp_param *param,
                                                int32_t index) {
  const mfsdp_dtype dtypes[4] = {param->compute, param->master, param->grad, param->wire};
  static const char *const names[4] = {"compute", "master", "grad", "wire"};
  int32_t i;
  if (strcmp(mfsdp_role_name(param->role), "invalid") == 0)
    return MFSDP__PARAM_FAIL(context, MFSDP_E_ARGUMENT, index, param,
                             "role is %d, needs MFSDP_ROLE_MATRIX, _ELEMENTWISE or _FROZEN",
                             (int)param->role);
  if (strcmp(mfsdp_view_name(param->view), "invalid") == 0)
    return MFSDP__PARAM_FAIL(context, MFSDP_E_ARGUMENT, index, param,
                             "view is %d, needs an mfsdp_view", (int)param->view);
  for (i = 0; i < 4; ++i)
    if (mfsdp_dtype_nbytes(dtypes[i]) == 0)
      return MFSDP__PARAM_FAIL(context, MFSDP_E_ARGUMENT, index, param,
                               "dtype %s is %d, needs an mfsdp_dtype", names[i], (int)dtypes[i]);
  if ((param->is_slice | param->local_matrix_ok) & ~1)
    return MFSDP__PARAM_FAIL(context, MFSDP_E_ARGUMENT, index, param,
                             "is_slice is %d and local_matrix_ok is %d, each needs 0 or 1",
                             (int)param->is_slice, (int)param->local_matrix_ok);
  if (strcmp(mfsdp_placement_name(param->placement), "invalid") == 0)
    return MFSDP__PARAM_FAIL(context, MFSDP_E_ARGUMENT, index, param,
                             "placement is %d, needs an mfsdp_placement", (int)param->placement);
  if (param->placement == MFSDP_PLACEMENT_BANDED && param->role != MFSDP_ROLE_MATRIX)
    return MFSDP__PARAM_FAIL(context, MFSDP_E_ARGUMENT, index, param,
                             "placement banded is for matrices, role %s needs owned (which spreads "
                             "it) or replicated",
                             mfsdp_role_name(param->role));
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__param_check_parts(mfsdp_context *context, const mfsdp_param *param,
                                                int32_t index) {
  const int batch = param->view == MFSDP_VIEW_BATCH;
  const int64_t rows = param->shape[batch ? 1 : 0];
  const char *whose = batch ? "each matrix of the batch" : "the tensor";
  int64_t sum = 0;
  int32_t i;
  if (param->part_rows == NULL || param->part_count < 1)
    return MFSDP__PARAM_FAIL(context, MFSDP_E_ARGUMENT, index, param,
                             "view %s needs part_rows and a part_count of at least 1, has %d",
                             mfsdp_view_name(param->view), (int)param->part_count);
  for (i = 0; i < param->part_count; ++i) {
    if (param->part_rows[i] < 0)
      return MFSDP__PARAM_FAIL(context, MFSDP_E_ARGUMENT, index, param,
                               "part_rows[%d] is %lld, needs at least 0", (int)i,
                               (long long)param->part_rows[i]);
    if (!mfsdp_i64_add(sum, param->part_rows[i], &sum))
      return MFSDP__PARAM_FAIL(context, MFSDP_E_ARGUMENT, index, param,
                               "part_rows sum to more than 63 bits, needs the %lld rows of %s",
                               (long long)rows, whose);
  }
  if (sum != rows)
    return MFSDP__PARAM_FAIL(context, MFSDP_E_ARGUMENT, index, param,
                             "part_rows sum to %lld, needs the %lld rows of %s", (long long)sum,
                             (long long)rows, whose);
  return MFSDP_OK;
}

/* How many dimensions a view takes: [*low, *high]. An ndim outside is an error, never a guess. */
MFSDP_API void mfsdp__view_ndim(mfsdp_view view, int32_t *low, int32_t *high) {
  *low = view == MFSDP_VIEW_CONV || view == MFSDP_VIEW_BATCH ? 3 : 2;
  *high = view == MFSDP_VIEW_CONV ? 5 : *low;
}

MFSDP_API mfsdp_status mfsdp__param_check_view(mfsdp_context *context, const mfsdp_param *param,
                                               int32_t index) {
  int32_t low, high;
  mfsdp__view_ndim(param->view, &low, &high);
  if (param->ndim == 1)
    return MFSDP__PARAM_FAIL(context, MFSDP_E_ARGUMENT, index, param,
                             "role matrix with %d dimension: a vector is MFSDP_ROLE_ELEMENTWISE",
                             (int)param->ndim);
  if (param->ndim < low || param->ndim > high)
    return MFSDP__PARAM_FAIL(context, MFSDP_E_ARGUMENT, index, param,
                             "view %s has %d dimensions, needs %d to %d (2: whole, rows, heads; 3: "
                             "batch; 3 to 5: conv)",
                             mfsdp_view_name(param->view), (int)param->ndim, (int)low, (int)high);
  if (mfsdp__view_has_parts(param)) MFSDP_TRY(mfsdp__param_check_parts(context, param, index));
  if (param->view == MFSDP_VIEW_HEADS && param->head_count < 1)
    return MFSDP__PARAM_FAIL(context, MFSDP_E_ARGUMENT, index, param,
                             "view heads has head_count %d, needs at least 1",
                             (int)param->head_count);
  if (param->view == MFSDP_VIEW_HEADS && param->shape[0] % param->head_count != 0)
    return MFSDP__PARAM_FAIL(
        context, MFSDP_E_ARGUMENT, index, param,
        "head_count %d does not divide the %lld rows; list the sizes with view "
        "rows",
        (int)param->head_count, (long long)param->shape[0]);
  if (param->is_slice && !param->local_matrix_ok)
    return MFSDP__PARAM_FAIL(context, MFSDP_E_ARGUMENT, index, param,
                             "is_slice is %d: a fragment would be updated as a matrix of its own; "
                             "set local_matrix_ok if that is meant",
                             (int)param->is_slice);
  if (mfsdp__view_count(param) > MFSDP_PLAN_MAX_PIECES)
    return MFSDP__PARAM_FAIL(context, MFSDP_E_OVERFLOW, index, param,
                             "view %s makes %lld matrices, at most %lld fit",
                             mfsdp_view_name(param->view), (long long)mfsdp__view_count(param),
                             (long long)MFSDP_PLAN_MAX_PIECES);
  return MFSDP_OK;
}

/*
 * Checks one description by itself; *numel receives its elements. `index` is for the message only.
 * E_ARGUMENT, E_UNSUPPORTED or E_OVERFLOW with a message that names the parameter, the value and
 * what is needed.
 */
MFSDP_API MFSDP_CHECKED mfsdp_status mfsdp_param_validate(mfsdp_context *context,
                                                          const mfsdp_param *param, int32_t index,
                                                          int64_t *numel) {
  if (param == NULL || numel == NULL)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "plan: params[%d]: param and numel are needed",
                      (int)index);
  if (param->struct_nbytes != sizeof(*param))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "plan: params[%d].struct_nbytes is %zu, needs %zu (use mfsdp_param_default)",
                      (int)index, param->struct_nbytes, sizeof(*param));
  if (param->name == NULL || param->name[0] == '\0')
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "plan: params[%d].name is %s, needs a name",
                      (int)index, param->name == NULL ? "NULL" : "empty");
  if (param->unit < 0 || param->unit > MFSDP_PLAN_MAX_UNIT)
    return MFSDP__PARAM_FAIL(context, MFSDP_E_ARGUMENT, index, param, "unit is %d, needs 0 to %d",
                             (int)param->unit, MFSDP_PLAN_MAX_UNIT);
  if (param->hyper_group < 0)
    return MFSDP__PARAM_FAIL(context, MFSDP_E_ARGUMENT, index, param,
                             "hyper_group is %d, needs at least 0", (int)param->hyper_group);
  MFSDP_TRY(mfsdp__param_check_shape(context, param, index, numel));
  MFSDP_TRY(mfsdp__param_check_enums(context, param, index));
  if (param->role == MFSDP_ROLE_MATRIX) MFSDP_TRY(mfsdp__param_check_view(context, param, index));
  return MFSDP_OK;
}

#endif /* MFSDP_PLAN_PARAM_H */
