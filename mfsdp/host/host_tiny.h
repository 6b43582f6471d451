/* SPDX-License-Identifier: MIT */
/*
 * host_tiny.h - products so small that calling a BLAS costs more than computing them.
 *
 *   if (mfsdp__host_tiny_fits(&args, m, n, k)) mfsdp__host_tiny(&args, a, b, c, d);
 *
 * An element is added up along k in order, with a rounding after each product and each sum, so its
 * bits are those of the plain loops of host_math.h, whichever BLAS does the larger products. Tiles
 * of 4 x 16 and 4 x 8 elements stay in registers; at the edges they overlap. Vectors are written by
 * the compilers' own extension, since gcc 12 makes half as fast code of loops over arrays.
 *
 * Internal to backend_host.h. Link flags: none.
 */
#ifndef MFSDP_HOST_HOST_TINY_H
#define MFSDP_HOST_HOST_TINY_H

#include "../backend.h"
#include "host_math.h"

/* Eight floats anywhere in an array of floats. */
typedef float mfsdp__host_f8 __attribute__((vector_size(32), aligned(4), may_alias));

#define MFSDP__HOST_TINY_TILE 4
#define MFSDP__HOST_TINY_WIDTH 8
/* Multiply-adds of the largest product, 48 x 48 x 48. With OpenBLAS 0.3.21 on AVX2 a product of 16
 * takes a third of the time of sgemm, of 32 two thirds, of 48 nine tenths, of 64 as much. */
#define MFSDP__HOST_TINY_MOST 110592
/* Elements of an operand that is transposed first: 16 kB on the stack. */
#define MFSDP__HOST_TRANSPOSE_COUNT 4096

/* Whether an fp32 product of m x n x k is one of them: at least a tile, no longer sums than the loops
 * add up in one go, and where tiles overlap, no c that they would update twice. */
MFSDP_API int mfsdp__host_tiny_fits(const mfsdp_gemm_args *args, int64_t m, int64_t n, int64_t k) {
  const int overlaps = m % MFSDP__HOST_TINY_TILE != 0 || n % MFSDP__HOST_TINY_WIDTH != 0;
  return m >= MFSDP__HOST_TINY_TILE && n >= MFSDP__HOST_TINY_WIDTH && k > 0 && k <= MFSDP__MATH_K &&
         m <= MFSDP__HOST_TINY_MOST && n <= MFSDP__HOST_TINY_MOST / m &&
         k <= MFSDP__HOST_TINY_MOST / (m * n) &&
         (!args->trans_b || k <= MFSDP__HOST_TRANSPOSE_COUNT / n) &&
         (!overlaps || args->beta == 0.0f || args->c.data != args->d.data);
}

/* to[cols][rows] = from[rows][cols]. */
MFSDP_API void mfsdp__host_transpose(float *MFSDP_RESTRICT to, const float *MFSDP_RESTRICT from,
                                     int64_t stride, int64_t rows, int64_t cols) {
  const int64_t block = 8;
  int64_t row, i, j;
  for (row = 0; row + block <= rows; row += block)
    for (j = 0; j < cols; ++j)
      for (i = 0; i < 8; ++i)
        to[j * rows + row + i] = from[(row + i) * stride + j];
  for (; row < rows; ++row)
    for (j = 0; j < cols; ++j)
      to[j * rows + row] = from[row * stride + j];
}

/* The product as the tiles see it: a by steps, b as k rows of n. */
typedef struct mfsdp__host_tiny_view {
  const float *a, *b, *c;
  float *d;
  int64_t k, a_row, a_step, b_row, c_row, d_row;
  float alpha, beta;
} mfsdp__host_tiny_view;

/* d = alpha sum + beta c, eight elements. */
MFSDP_API void mfsdp__host_tiny_store(const mfsdp__host_tiny_view *x, const mfsdp__host_f8 *sum,
                                      int64_t row, int64_t column) {
  mfsdp__host_f8 value = *sum * x->alpha;
  if (x->beta != 0.0f)
    value += *(const mfsdp__host_f8 *)(const void *)(x->c + row * x->c_row + column) * x->beta;
  *(mfsdp__host_f8 *)(void *)(x->d + row * x->d_row + column) = value;
}

/* Four rows, sixteen columns. */
MFSDP_API void mfsdp__host_tiny_tile16(const mfsdp__host_tiny_view *x, int64_t row,
                                       int64_t column) {
  const float *a = x->a + row * x->a_row, *b = x->b + column;
  const int64_t one = x->a_row, two = 2 * one, three = 3 * one;
  const mfsdp__host_f8 zero = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
  mfsdp__host_f8 s0 = zero, s1 = zero, s2 = zero, s3 = zero;
  mfsdp__host_f8 t0 = zero, t1 = zero, t2 = zero, t3 = zero;
  int64_t p;
  for (p = 0; p < x->k; ++p, a += x->a_step, b += x->b_row) {
    const mfsdp__host_f8 left = *(const mfsdp__host_f8 *)(const void *)b;
    const mfsdp__host_f8 right = *(const mfsdp__host_f8 *)(const void *)(b + 8);
    s0 += a[0] * left;
    t0 += a[0] * right;
    s1 += a[one] * left;
    t1 += a[one] * right;
    s2 += a[two] * left;
    t2 += a[two] * right;
    s3 += a[three] * left;
    t3 += a[three] * right;
  }
  mfsdp__host_tiny_store(x, &s0, row, column);
  mfsdp__host_tiny_store(x, &t0, row, column + 8);
  mfsdp__host_tiny_store(x, &s1, row + 1, column);
  mfsdp__host_tiny_store(x, &t1, row + 1, column + 8);
  mfsdp__host_tiny_store(x, &s2, row + 2, column);
  mfsdp__host_tiny_store(x, &t2, row + 2, column + 8);
  mfsdp__host_tiny_store(x, &s3, row + 3, column);
  mfsdp__host_tiny_store(x, &t3, row + 3, column + 8);
}

/* Four rows, eight columns. */
MFSDP_API void mfsdp__host_tiny_tile8(const mfsdp__host_tiny_view *x, int64_t row, int64_t column) {
  const float *a = x->a + row * x->a_row, *b = x->b + column;
  const int64_t one = x->a_row, two = 2 * one, three = 3 * one;
  const mfsdp__host_f8 zero = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
  mfsdp__host_f8 s0 = zero, s1 = zero, s2 = zero, s3 = zero;
  int64_t p;
  for (p = 0; p < x->k; ++p, a += x->a_step, b += x->b_row) {
    const mfsdp__host_f8 left = *(const mfsdp__host_f8 *)(const void *)b;
    s0 += a[0] * left;
    s1 += a[one] * left;
    s2 += a[two] * left;
    s3 += a[three] * left;
  }
  mfsdp__host_tiny_store(x, &s0, row, column);
  mfsdp__host_tiny_store(x, &s1, row + 1, column);
  mfsdp__host_tiny_store(x, &s2, row + 2, column);
  mfsdp__host_tiny_store(x, &s3, row + 3, column);
}

/* Four rows, all columns; the last tile may repeat columns of the one before. */
MFSDP_API void mfsdp__host_tiny_rows(const mfsdp__host_tiny_view *x, int64_t row, int64_t n) {
  int64_t column;
  for (column = 0; column + 16 <= n; column += 16)
    mfsdp__host_tiny_tile16(x, row, column);
  if (n - column > 8 && column > 0) {
    mfsdp__host_tiny_tile16(x, row, n - 16);
    return;
  }
  if (n - column > 8) mfsdp__host_tiny_tile8(x, row, column);
  if (n - column > 0) mfsdp__host_tiny_tile8(x, row, n - 8);
}

/* One product that fits: d = alpha op(a) op(b) + beta c. */
MFSDP_API void mfsdp__host_tiny(const mfsdp_gemm_args *args, const float *a, const float *b,
                                const float *c, float *d) {
  const int64_t m = args->d.rows, n = args->d.cols;
  float other[MFSDP__HOST_TRANSPOSE_COUNT];
  mfsdp__host_tiny_view x;
  int64_t row;
  x.a = a;
  x.b = b;
  x.c = c;
  x.d = d;
  x.k = args->trans_a ? args->a.rows : args->a.cols;
  x.a_row = args->trans_a ? 1 : args->a.row_stride;
  x.a_step = args->trans_a ? args->a.row_stride : 1;
  x.b_row = args->b.row_stride;
  x.c_row = args->c.row_stride;
  x.d_row = args->d.row_stride;
  x.alpha = args->alpha;
  x.beta = args->beta;
  if (args->trans_b) {
    mfsdp__host_transpose(other, b, args->b.row_stride, n, x.k);
    x.b = other;
    x.b_row = n;
  }
  for (row = 0; row + MFSDP__HOST_TINY_TILE <= m; row += MFSDP__HOST_TINY_TILE)
    mfsdp__host_tiny_rows(&x, row, n);
  if (row < m) mfsdp__host_tiny_rows(&x, m - MFSDP__HOST_TINY_TILE, n); /* repeats rows, too */
}

#endif /* MFSDP_HOST_HOST_TINY_H */
