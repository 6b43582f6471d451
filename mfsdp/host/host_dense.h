/* SPDX-License-Identifier: MIT */
/*
 * host_dense.h - the host backend's batched matrix product: routes a product to sgemm or, where the
 * result is known to be symmetric, to a rank-k update or panels of one triangle, and mirrors it.
 *
 *   mfsdp__host_gemm(mfsdp_host_math_loops(), &args);   // args checked by backend_host.h
 *
 * The route depends on the arguments alone (which operands are the same, which shape), never on a
 * measurement, so that results do not depend on where a matrix is computed.
 *
 * Internal to backend_host.h. Link flags: none.
 */
#ifndef MFSDP_HOST_HOST_DENSE_H
#define MFSDP_HOST_HOST_DENSE_H

#include "../backend.h"
#include "host_math.h"

#define MFSDP__HOST_MIRROR_TILE 32
/* A symmetric product of different operands is cut into this many row panels of its upper triangle:
 * 62.5% of the work; below this size the calls cost more than they save. */
#define MFSDP__HOST_PANELS 4
#define MFSDP__HOST_PANELS_FROM 256

/* Matrices without elements may be NULL, to which C allows no offset. */
MFSDP_API const float *mfsdp__host_matrix(const mfsdp_mat *mat, int64_t index) {
  return index == 0 ? (const float *)mat->data
                    : (const float *)mat->data + index * mat->batch_stride;
}

/* Copies the part of c that will be read into d: everything, or rows from the diagonal on. */
MFSDP_API void mfsdp__host_copy_matrix(float *dst, int64_t dst_stride, const float *src,
                                       int64_t src_stride, int64_t rows, int64_t cols, int upper) {
  int64_t i;
  for (i = 0; i < rows; ++i) {
    const int64_t first = upper ? i : 0;
    if (cols > first)
      memcpy(dst + i * dst_stride + first, src + i * src_stride + first,
             (size_t)(cols - first) * sizeof(float));
  }
}

/* Writes the lower triangle of d[n,n] from its upper one, tile by tile. */
MFSDP_API void mfsdp__host_mirror(float *d, int64_t stride, int64_t n) {
  int64_t row, column, i, j;
  for (row = 0; row < n; row += MFSDP__HOST_MIRROR_TILE)
    for (column = 0; column <= row; column += MFSDP__HOST_MIRROR_TILE) {
      const int64_t row_end = row + MFSDP__HOST_MIRROR_TILE < n ? row + MFSDP__HOST_MIRROR_TILE : n;
      for (i = row; i < row_end; ++i) {
        const int64_t column_end =
            column + MFSDP__HOST_MIRROR_TILE < i ? column + MFSDP__HOST_MIRROR_TILE : i;
        for (j = column; j < column_end; ++j)
          d[i * stride + j] = d[j * stride + i];
      }
    }
}

/* The upper triangle of d = alpha op(a) op(b) + beta d, by panels of rows, and a little more. */
MFSDP_API void mfsdp__host_gemm_panels(const mfsdp_host_math *math, const mfsdp_gemm_args *args,
                                       const float *a, const float *b, float *d) {
  const int64_t n = args->d.rows, k = args->trans_a ? args->a.rows : args->a.cols;
  int panel;
  for (panel = 0; panel < MFSDP__HOST_PANELS; ++panel) {
    const int64_t first = n * panel / MFSDP__HOST_PANELS;
    const int64_t end = n * (panel + 1) / MFSDP__HOST_PANELS;
    const float *panel_a = a + (args->trans_a ? first : first * args->a.row_stride);
    const float *panel_b = b + (args->trans_b ? first * args->b.row_stride : first);
    math->sgemm(args->trans_a, args->trans_b, end - first, n - first, k, args->alpha, panel_a,
                args->a.row_stride, panel_b, args->b.row_stride, args->beta,
                d + first * args->d.row_stride + first, args->d.row_stride);
  }
}

MFSDP_API void mfsdp__host_gemm_one(const mfsdp_host_math *math, const mfsdp_gemm_args *args,
                                    const float *a, const float *b, const float *c, float *d) {
  const int64_t m = args->d.rows, n = args->d.cols;
  const int64_t k = args->trans_a ? args->a.rows : args->a.cols;
  const int rank_k = args->symmetric && a == b && args->trans_a != args->trans_b &&
                     args->a.row_stride == args->b.row_stride;
  const int panels = args->symmetric && !rank_k && k > 0 && n >= MFSDP__HOST_PANELS_FROM;
  if (args->beta != 0.0f && c != d)
    mfsdp__host_copy_matrix(d, args->d.row_stride, c, args->c.row_stride, m, n, rank_k);
  if (rank_k)
    math->ssyrk(1, args->trans_a, n, k, args->alpha, a, args->a.row_stride, args->beta, d,
                args->d.row_stride);
  else if (panels)
    mfsdp__host_gemm_panels(math, args, a, b, d);
  else
    math->sgemm(args->trans_a, args->trans_b, m, n, k, args->alpha, a, args->a.row_stride, b,
                args->b.row_stride, args->beta, d, args->d.row_stride);
  if (rank_k || panels) mfsdp__host_mirror(d, args->d.row_stride, n);
}

MFSDP_API void mfsdp__host_gemm(const mfsdp_host_math *math, const mfsdp_gemm_args *args) {
  int64_t i;
  if (args->d.rows == 0 || args->d.cols == 0) return;
  for (i = 0; i < args->batch_count; ++i)
    mfsdp__host_gemm_one(math, args, mfsdp__host_matrix(&args->a, i),
                         mfsdp__host_matrix(&args->b, i),
                         args->beta != 0.0f ? mfsdp__host_matrix(&args->c, i) : NULL,
                         (float *)args->d.data + i * args->d.batch_stride);
}

#endif /* MFSDP_HOST_HOST_DENSE_H */
