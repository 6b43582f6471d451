/* SPDX-License-Identifier: MIT */
/*
 * host_dense.h - the host backend's batched matrix product: routes a product to sgemm or, where the
 * result is known to be symmetric, to a rank-k update or panels of one triangle, and mirrors it.
 * 16-bit matrices go to host_half.h.
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
#include "host_half.h"
#include "host_math.h"
#include "host_tiny.h"

#define MFSDP__HOST_MIRROR_TILE 32
#define MFSDP__HOST_MIRROR_BLOCK 8
/* A symmetric product is cut into row panels of its upper triangle: 4 of them do 62.5% of the work,
 * 8 do 56.25%; below the first size the calls and the mirror cost more than they save. A rank-k
 * update does half of it, but OpenBLAS's has an overhead that panels have not. Measured with
 * OpenBLAS 0.3.21 and both its AVX2 and its AVX-512 kernels; docs/performance.md. */
#define MFSDP__HOST_PANELS_FROM 64
#define MFSDP__HOST_MORE_PANELS_FROM 192
#define MFSDP__HOST_RANK_K_FROM 96
/* Where k >= 1.5 n, a rank-k update adds slices of this depth: sums of slices have less rounding
 * noise than one long sum, which matters where a Gram matrix is iterated on. */
#define MFSDP__HOST_RANK_K_DEPTH 128

/* Matrices without elements may be NULL, to which C allows no offset. */
MFSDP_API const float *mfsdp__host_matrix(const mfsdp_mat *mat, int64_t index) {
  return index == 0 ? (const float *)mat->data
                    : (const float *)mat->data + index * mat->batch_stride;
}

/* Copies the part of c that will be read into d: everything, or rows from the diagonal on. */
MFSDP_API void mfsdp__host_copy_matrix(float *dst, int64_t dst_stride, const float *src,
                                       int64_t src_stride, int64_t rows, int64_t cols, int upper) {
  int64_t i;
  if (!upper && dst_stride == cols && src_stride == cols) {
    memcpy(dst, src, (size_t)(rows * cols) * sizeof(float));
    return;
  }
  for (i = 0; i < rows; ++i) {
    const int64_t first = upper ? i : 0;
    if (cols > first)
      memcpy(dst + i * dst_stride + first, src + i * src_stride + first,
             (size_t)(cols - first) * sizeof(float));
  }
}

/* d[j][i] = d[i][j] for a block of columns below the diagonal, rows [row, row + 8). Block by block,
 * because a column of a power-of-two stride meets few cache lines, which must be used while there. */
MFSDP_API void mfsdp__host_mirror_block(float *to, const float *from, int64_t stride) {
  float block[MFSDP__HOST_MIRROR_BLOCK][MFSDP__HOST_MIRROR_BLOCK];
  int i, j;
  for (i = 0; i < MFSDP__HOST_MIRROR_BLOCK; ++i)
    for (j = 0; j < MFSDP__HOST_MIRROR_BLOCK; ++j)
      block[j][i] = from[i * stride + j];
  for (i = 0; i < MFSDP__HOST_MIRROR_BLOCK; ++i)
    for (j = 0; j < MFSDP__HOST_MIRROR_BLOCK; ++j)
      to[i * stride + j] = block[i][j];
}

/* Rows [row, row_end) of one tile column: whole blocks first, then what the diagonal cuts. */
MFSDP_API void mfsdp__host_mirror_rows(float *d, int64_t stride, int64_t row, int64_t row_end,
                                       int64_t column, int64_t column_end) {
  const int64_t block = MFSDP__HOST_MIRROR_BLOCK;
  int64_t i, j = column;
  for (; row_end - row == block && j + block <= column_end && j + block <= row; j += block)
    mfsdp__host_mirror_block(d + row * stride + j, d + j * stride + row, stride);
  for (i = row; i < row_end; ++i) {
    const int64_t end = column_end < i ? column_end : i;
    int64_t k;
    for (k = j; k < end; ++k)
      d[i * stride + k] = d[k * stride + i];
  }
}

/* Writes the lower triangle of d[n,n] from its upper one, tile by tile. */
MFSDP_API void mfsdp__host_mirror(float *d, int64_t stride, int64_t n) {
  int64_t tile, column, row;
  for (tile = 0; tile < n; tile += MFSDP__HOST_MIRROR_TILE)
    for (column = 0; column <= tile; column += MFSDP__HOST_MIRROR_TILE)
      for (row = tile; row < n && row < tile + MFSDP__HOST_MIRROR_TILE;
           row += MFSDP__HOST_MIRROR_BLOCK)
        mfsdp__host_mirror_rows(
            d, stride, row, row + MFSDP__HOST_MIRROR_BLOCK < n ? row + MFSDP__HOST_MIRROR_BLOCK : n,
            column, column + MFSDP__HOST_MIRROR_TILE < n ? column + MFSDP__HOST_MIRROR_TILE : n);
}

/* The upper triangle of d = alpha op(a) op(b) + beta d, by panels of rows, and a little more. */
MFSDP_API void mfsdp__host_gemm_panels(const mfsdp_host_math *math, const mfsdp_gemm_args *args,
                                       const float *a, const float *b, float *d) {
  const int64_t n = args->d.rows, k = args->trans_a ? args->a.rows : args->a.cols;
  const int panels = n >= MFSDP__HOST_MORE_PANELS_FROM ? 8 : 4;
  int panel;
  for (panel = 0; panel < panels; ++panel) {
    const int64_t first = n * panel / panels;
    const int64_t end = n * (panel + 1) / panels;
    const float *panel_a = a + (args->trans_a ? first : first * args->a.row_stride);
    const float *panel_b = b + (args->trans_b ? first * args->b.row_stride : first);
    math->sgemm(args->trans_a, args->trans_b, end - first, n - first, k, args->alpha, panel_a,
                args->a.row_stride, panel_b, args->b.row_stride, args->beta,
                d + first * args->d.row_stride + first, args->d.row_stride);
  }
}

/* The upper triangle of d = alpha op(a) op(a)^T + beta d. */
MFSDP_API void mfsdp__host_rank_k(const mfsdp_host_math *math, const mfsdp_gemm_args *args,
                                  const float *a, float *d) {
  const int64_t n = args->d.rows, k = args->trans_a ? args->a.rows : args->a.cols;
  const int64_t depth = k - n >= n / 2 ? MFSDP__HOST_RANK_K_DEPTH : k;
  int64_t first;
  for (first = 0; first < k; first += depth)
    math->ssyrk(1, args->trans_a, n, k - first < depth ? k - first : depth, args->alpha,
                a + (args->trans_a ? first * args->a.row_stride : first), args->a.row_stride,
                first == 0 ? args->beta : 1.0f, d, args->d.row_stride);
}

/* d = alpha op(a) op(a)^T + beta d for a small a: OpenBLAS multiplies small matrices that are not
 * transposed up to twice as fast, which pays for transposing one. */
MFSDP_API void mfsdp__host_small_rank_k(const mfsdp_host_math *math, const mfsdp_gemm_args *args,
                                        const float *a, float *d) {
  float other[MFSDP__HOST_TRANSPOSE_COUNT];
  const int64_t n = args->d.rows, k = args->trans_a ? args->a.rows : args->a.cols;
  mfsdp__host_transpose(other, a, args->a.row_stride, args->a.rows, args->a.cols);
  if (args->trans_a)
    math->sgemm(0, 0, n, n, k, args->alpha, other, k, a, args->a.row_stride, args->beta, d,
                args->d.row_stride);
  else
    math->sgemm(0, 0, n, n, k, args->alpha, a, args->a.row_stride, other, n, args->beta, d,
                args->d.row_stride);
}

/* Ways to compute a product. */
typedef enum mfsdp__host_route {
  MFSDP__HOST_FULL = 1, /* all of it */
  MFSDP__HOST_TINY,     /* all of it, without a BLAS */
  MFSDP__HOST_SMALL,    /* all of a a^T, by a transposed copy */
  MFSDP__HOST_PANELS,   /* panels of the upper triangle, then the mirror */
  MFSDP__HOST_RANK_K    /* the upper triangle of a a^T or a^T a, then the mirror */
} mfsdp__host_route;

MFSDP_API mfsdp__host_route mfsdp__host_route_of(const mfsdp_gemm_args *args) {
  const int64_t n = args->d.rows, k = args->trans_a ? args->a.rows : args->a.cols;
  const int same = args->a.data == args->b.data && args->a.row_stride == args->b.row_stride &&
                   args->a.batch_stride == args->b.batch_stride;
  if (mfsdp__host_tiny_fits(args, args->d.rows, args->d.cols, k)) return MFSDP__HOST_TINY;
  if (same && args->trans_a != args->trans_b && n < MFSDP__HOST_PANELS_FROM && k > 0 &&
      k <= MFSDP__HOST_TRANSPOSE_COUNT / n)
    return MFSDP__HOST_SMALL;
  if (!args->symmetric || k == 0 || n < MFSDP__HOST_PANELS_FROM) return MFSDP__HOST_FULL;
  if (same && args->trans_a != args->trans_b && n >= MFSDP__HOST_RANK_K_FROM)
    return MFSDP__HOST_RANK_K;
  /* a is symmetric itself, and its square a a^T as well; small panels are faster untransposed. */
  if (same && args->trans_a == args->trans_b && n >= MFSDP__HOST_MORE_PANELS_FROM)
    return MFSDP__HOST_RANK_K;
  return MFSDP__HOST_PANELS;
}

MFSDP_API void mfsdp__host_gemm_one(const mfsdp_host_math *math, const mfsdp_gemm_args *args,
                                    const float *a, const float *b, const float *c, float *d) {
  const int64_t m = args->d.rows, n = args->d.cols;
  const int64_t k = args->trans_a ? args->a.rows : args->a.cols;
  const mfsdp__host_route route = mfsdp__host_route_of(args);
  int64_t i;
  if (route == MFSDP__HOST_TINY)
    mfsdp__host_tiny(args, a, b, c, d);
  else if (args->beta != 0.0f && c != d)
    mfsdp__host_copy_matrix(d, args->d.row_stride, c, args->c.row_stride, m, n,
                            route == MFSDP__HOST_RANK_K);
  if (route == MFSDP__HOST_RANK_K)
    mfsdp__host_rank_k(math, args, a, d);
  else if (route == MFSDP__HOST_SMALL)
    mfsdp__host_small_rank_k(math, args, a, d);
  else if (route == MFSDP__HOST_PANELS)
    mfsdp__host_gemm_panels(math, args, a, b, d);
  else if (route == MFSDP__HOST_FULL && (k > 0 || args->beta != 1.0f))
    math->sgemm(args->trans_a, args->trans_b, m, n, k, args->alpha, a, args->a.row_stride, b,
                args->b.row_stride, args->beta, d, args->d.row_stride);
  if (route == MFSDP__HOST_PANELS || route == MFSDP__HOST_RANK_K)
    mfsdp__host_mirror(d, args->d.row_stride, n);
  if (args->diagonal != 0.0f)
    for (i = 0; i < n; ++i)
      d[i * args->d.row_stride + i] += args->diagonal;
}

MFSDP_API void mfsdp__host_gemm(const mfsdp_host_math *math, const mfsdp_gemm_args *args) {
  int64_t i;
  if (args->d.rows == 0 || args->d.cols == 0) return;
  if (args->dtype != MFSDP_F32) {
    mfsdp__host_half_gemm(math, args);
    return;
  }
  for (i = 0; i < args->batch_count; ++i)
    mfsdp__host_gemm_one(math, args, mfsdp__host_matrix(&args->a, i),
                         mfsdp__host_matrix(&args->b, i),
                         args->beta != 0.0f ? mfsdp__host_matrix(&args->c, i) : NULL,
                         (float *)args->d.data + i * args->d.batch_stride);
}

#endif /* MFSDP_HOST_HOST_DENSE_H */
