/* SPDX-License-Identifier: MIT */
/*
 * workspace.h - how many bytes an iteration needs and where its matrices lie in them.
 *
 *   size_t nbytes;
 *   MFSDP_TRY(mfsdp_newton_schulz_batch_workspace_nbytes(context, &ns, 64, 256, 12, &nbytes));
 *
 * Part of newton_schulz.h. Link flags: none.
 */
#ifndef MFSDP_NEWTON_SCHULZ_WORKSPACE_H
#define MFSDP_NEWTON_SCHULZ_WORKSPACE_H

#include "desc.h"

/* s x s matrices that a form holds at once: A and P, or R, Z, RZ and Q. */
#define MFSDP__NS_SQUARES 4

/* Where the parts of the workspace lie, in bytes from its start. Each holds the whole batch, one
 * matrix packed after the other. */
typedef struct mfsdp__ns_layout {
  size_t scratch, x[2], square[MFSDP__NS_SQUARES], nbytes;
  int32_t x_count, square_count; /* fp32 iterates use `out` as a second x */
} mfsdp__ns_layout;

MFSDP_API int mfsdp__ns_part(size_t *total, size_t nbytes, size_t *start) {
  size_t end;
  *start = *total;
  if (!mfsdp_size_add(nbytes, MFSDP_ALIGN_NBYTES - 1, &end)) return 0;
  return mfsdp_size_add(*total, end - end % MFSDP_ALIGN_NBYTES, total);
}

MFSDP_API int mfsdp__ns_parts(const mfsdp_newton_schulz_desc *desc, int64_t rows, int64_t cols,
                              int64_t batch_count, mfsdp__ns_layout *out) {
  const int64_t s = rows < cols ? rows : cols;
  int64_t count, square;
  size_t scratch, nbytes, square_nbytes;
  int32_t i;
  if (!mfsdp_i64_mul(rows, cols, &count) || !mfsdp_i64_mul(s, s, &square) ||
      !mfsdp_i64_mul(count, batch_count, &count) || !mfsdp_i64_mul(square, batch_count, &square) ||
      !mfsdp_elements_nbytes(count, desc->dtype, &nbytes) ||
      !mfsdp_elements_nbytes(square, desc->dtype, &square_nbytes) ||
      !mfsdp_size_mul((size_t)batch_count, MFSDP_NORMALIZE_SCRATCH_COUNT * sizeof(double),
                      &scratch) ||
      !mfsdp__ns_part(&out->nbytes, scratch, &out->scratch))
    return 0;
  for (i = 0; i < out->x_count; ++i)
    if (!mfsdp__ns_part(&out->nbytes, nbytes, &out->x[i])) return 0;
  for (i = 0; i < out->square_count; ++i)
    if (!mfsdp__ns_part(&out->nbytes, square_nbytes, &out->square[i])) return 0;
  return 1;
}

/* The description has been checked. E_ARGUMENT, E_OVERFLOW. */
MFSDP_API mfsdp_status mfsdp__ns_layout_of(mfsdp_context *context,
                                           const mfsdp_newton_schulz_desc *desc, int64_t rows,
                                           int64_t cols, int64_t batch_count,
                                           mfsdp__ns_layout *out) {
  memset(out, 0, sizeof(*out));
  if (rows < 0 || cols < 0)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "newton_schulz: rows x cols is %lld x %lld, needs 0 or more of each",
                      (long long)rows, (long long)cols);
  if (batch_count < 0)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "newton_schulz: batch_count is %lld, needs 0 or more",
                      (long long)batch_count);
  out->x_count = desc->dtype == MFSDP_F32 ? 1 : 2;
  out->square_count =
      mfsdp_newton_schulz_form_of(desc, rows, cols) == MFSDP_NS_GRAM ? MFSDP__NS_SQUARES : 2;
  if (!mfsdp__ns_parts(desc, rows, cols, batch_count, out)) {
    memset(out, 0, sizeof(*out));
    return MFSDP_FAIL(context, MFSDP_E_OVERFLOW,
                      "newton_schulz: %lld of %lld x %lld overflows size_t", (long long)batch_count,
                      (long long)rows, (long long)cols);
  }
  return MFSDP_OK;
}

/* Bytes of DEVICE workspace for batch_count rows x cols matrices at once, aligned to
 * MFSDP_ALIGN_NBYTES. E_ARGUMENT, E_OVERFLOW; *out is 0 then. */
MFSDP_API mfsdp_status mfsdp_newton_schulz_batch_workspace_nbytes(
    mfsdp_context *context, const mfsdp_newton_schulz_desc *desc, int64_t rows, int64_t cols,
    int64_t batch_count, size_t *out) {
  mfsdp__ns_layout layout;
  if (out == NULL) return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "newton_schulz: out is NULL");
  *out = 0;
  MFSDP_TRY(mfsdp_newton_schulz_check(context, desc));
  MFSDP_TRY(mfsdp__ns_layout_of(context, desc, rows, cols, batch_count, &layout));
  *out = layout.nbytes;
  return MFSDP_OK;
}

/* The same for one matrix. */
MFSDP_API mfsdp_status mfsdp_newton_schulz_workspace_nbytes(mfsdp_context *context,
                                                            const mfsdp_newton_schulz_desc *desc,
                                                            int64_t rows, int64_t cols,
                                                            size_t *out) {
  return mfsdp_newton_schulz_batch_workspace_nbytes(context, desc, rows, cols, 1, out);
}

#endif /* MFSDP_NEWTON_SCHULZ_WORKSPACE_H */
