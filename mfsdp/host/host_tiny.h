/* SPDX-License-Identifier: MIT */
/*
 * host_tiny.h - products so small that calling a BLAS costs more than computing them.
 *
 *   if (mfsdp__host_tiny_fits(&args, m, n, k)) mfsdp__host_tiny(&args, a, b, c, d);
 *
 * An element is added up along k in order, with a rounding after each product and each sum, so its
 * bits are those of the plain loops of host_math.h, whichever BLAS does the larger products and
 * however wide the machine's vectors are. Tiles stay in registers: four rows of two vectors, eight
 * rows of one, and four rows of eight elements for what is left; those overlap at the edges. Vectors
 * are written by the compilers' own extension, since gcc 12 makes half as fast code of loops over
 * arrays.
 *
 * Internal to backend_host.h. Link flags: none.
 */
#ifndef MFSDP_HOST_HOST_TINY_H
#define MFSDP_HOST_HOST_TINY_H

#include "../backend.h"
#include "host_math.h"

#if defined(__AVX512F__)
#define MFSDP__HOST_TINY_LANES 16
#else
#define MFSDP__HOST_TINY_LANES 8
#endif
/* Eight floats anywhere in an array of floats, and as many as fit a vector. */
typedef float mfsdp__host_f8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef float mfsdp__host_fv
    __attribute__((vector_size(4 * MFSDP__HOST_TINY_LANES), aligned(4), may_alias));

#define MFSDP__HOST_TINY_TILE 4
#define MFSDP__HOST_TINY_WIDTH 8
/* Multiply-adds of the largest product. With OpenBLAS 0.3.21 on AVX2, up to 48 x 48 x 48: a product of
 * 16 takes a third of the time of sgemm, of 32 two thirds, of 48 nine tenths, of 64 as much. With
 * AVX-512 sgemm has kernels of its own for small products, which win from 32 x 32 x 32 on. */
#if defined(__AVX512F__)
#define MFSDP__HOST_TINY_MOST 16384
#else
#define MFSDP__HOST_TINY_MOST 110592
#endif
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

/* d = alpha sum + beta c, the elements of a vector. */
#define MFSDP__HOST_TINY_STORE(type, x, sum, row, column)                                          \
  do {                                                                                             \
    type value_ = (sum) * (x)->alpha;                                                              \
    if ((x)->beta != 0.0f)                                                                         \
      value_ += *(const type *)(const void *)((x)->c + (row) * (x)->c_row + (column)) * (x)->beta; \
    *(type *)(void *)((x)->d + (row) * (x)->d_row + (column)) = value_;                            \
  } while (0)

/* Four rows, two vectors. */
MFSDP_API void mfsdp__host_tiny_wide(const mfsdp__host_tiny_view *x, int64_t row, int64_t column) {
  const float *a = x->a + row * x->a_row, *b = x->b + column;
  const int64_t one = x->a_row, two = 2 * one, three = 3 * one;
  mfsdp__host_fv s0, s1, s2, s3, t0, t1, t2, t3;
  int64_t p;
  memset(&s0, 0, sizeof(s0));
  s1 = s2 = s3 = t0 = t1 = t2 = t3 = s0;
  for (p = 0; p < x->k; ++p, a += x->a_step, b += x->b_row) {
    const mfsdp__host_fv left = *(const mfsdp__host_fv *)(const void *)b;
    const mfsdp__host_fv right =
        *(const mfsdp__host_fv *)(const void *)(b + MFSDP__HOST_TINY_LANES);
    s0 += a[0] * left;
    t0 += a[0] * right;
    s1 += a[one] * left;
    t1 += a[one] * right;
    s2 += a[two] * left;
    t2 += a[two] * right;
    s3 += a[three] * left;
    t3 += a[three] * right;
  }
  MFSDP__HOST_TINY_STORE(mfsdp__host_fv, x, s0, row, column);
  MFSDP__HOST_TINY_STORE(mfsdp__host_fv, x, t0, row, column + MFSDP__HOST_TINY_LANES);
  MFSDP__HOST_TINY_STORE(mfsdp__host_fv, x, s1, row + 1, column);
  MFSDP__HOST_TINY_STORE(mfsdp__host_fv, x, t1, row + 1, column + MFSDP__HOST_TINY_LANES);
  MFSDP__HOST_TINY_STORE(mfsdp__host_fv, x, s2, row + 2, column);
  MFSDP__HOST_TINY_STORE(mfsdp__host_fv, x, t2, row + 2, column + MFSDP__HOST_TINY_LANES);
  MFSDP__HOST_TINY_STORE(mfsdp__host_fv, x, s3, row + 3, column);
  MFSDP__HOST_TINY_STORE(mfsdp__host_fv, x, t3, row + 3, column + MFSDP__HOST_TINY_LANES);
}

/* Eight rows, one vector. */
MFSDP_API void mfsdp__host_tiny_tall(const mfsdp__host_tiny_view *x, int64_t row, int64_t column) {
  const float *a = x->a + row * x->a_row, *a4 = a + 4 * x->a_row, *b = x->b + column;
  const int64_t one = x->a_row, two = 2 * one, three = 3 * one;
  mfsdp__host_fv s0, s1, s2, s3, s4, s5, s6, s7;
  int64_t p;
  memset(&s0, 0, sizeof(s0));
  s1 = s2 = s3 = s4 = s5 = s6 = s7 = s0;
  for (p = 0; p < x->k; ++p, a += x->a_step, a4 += x->a_step, b += x->b_row) {
    const mfsdp__host_fv element = *(const mfsdp__host_fv *)(const void *)b;
    s0 += a[0] * element;
    s1 += a[one] * element;
    s2 += a[two] * element;
    s3 += a[three] * element;
    s4 += a4[0] * element;
    s5 += a4[one] * element;
    s6 += a4[two] * element;
    s7 += a4[three] * element;
  }
  MFSDP__HOST_TINY_STORE(mfsdp__host_fv, x, s0, row, column);
  MFSDP__HOST_TINY_STORE(mfsdp__host_fv, x, s1, row + 1, column);
  MFSDP__HOST_TINY_STORE(mfsdp__host_fv, x, s2, row + 2, column);
  MFSDP__HOST_TINY_STORE(mfsdp__host_fv, x, s3, row + 3, column);
  MFSDP__HOST_TINY_STORE(mfsdp__host_fv, x, s4, row + 4, column);
  MFSDP__HOST_TINY_STORE(mfsdp__host_fv, x, s5, row + 5, column);
  MFSDP__HOST_TINY_STORE(mfsdp__host_fv, x, s6, row + 6, column);
  MFSDP__HOST_TINY_STORE(mfsdp__host_fv, x, s7, row + 7, column);
}

/* Four rows, eight columns. */
MFSDP_API void mfsdp__host_tiny_small(const mfsdp__host_tiny_view *x, int64_t row, int64_t column) {
  const float *a = x->a + row * x->a_row, *b = x->b + column;
  const int64_t one = x->a_row, two = 2 * one, three = 3 * one;
  mfsdp__host_f8 s0, s1, s2, s3;
  int64_t p;
  memset(&s0, 0, sizeof(s0));
  s1 = s2 = s3 = s0;
  for (p = 0; p < x->k; ++p, a += x->a_step, b += x->b_row) {
    const mfsdp__host_f8 element = *(const mfsdp__host_f8 *)(const void *)b;
    s0 += a[0] * element;
    s1 += a[one] * element;
    s2 += a[two] * element;
    s3 += a[three] * element;
  }
  MFSDP__HOST_TINY_STORE(mfsdp__host_f8, x, s0, row, column);
  MFSDP__HOST_TINY_STORE(mfsdp__host_f8, x, s1, row + 1, column);
  MFSDP__HOST_TINY_STORE(mfsdp__host_f8, x, s2, row + 2, column);
  MFSDP__HOST_TINY_STORE(mfsdp__host_f8, x, s3, row + 3, column);
}

/* Eight columns, rows from `row` on; the last tile may repeat rows of the one before. */
MFSDP_API void mfsdp__host_tiny_small_rows(const mfsdp__host_tiny_view *x, int64_t row, int64_t m,
                                           int64_t column) {
  for (; row + MFSDP__HOST_TINY_TILE <= m; row += MFSDP__HOST_TINY_TILE)
    mfsdp__host_tiny_small(x, row, column);
  if (row < m) mfsdp__host_tiny_small(x, m - MFSDP__HOST_TINY_TILE, column);
}

/* All rows of two vectors. */
MFSDP_API void mfsdp__host_tiny_wide_rows(const mfsdp__host_tiny_view *x, int64_t m,
                                          int64_t column) {
  int64_t row;
  for (row = 0; row + MFSDP__HOST_TINY_TILE <= m; row += MFSDP__HOST_TINY_TILE)
    mfsdp__host_tiny_wide(x, row, column);
  if (row < m) mfsdp__host_tiny_wide(x, m - MFSDP__HOST_TINY_TILE, column);
}

/* All rows of one vector. */
MFSDP_API void mfsdp__host_tiny_tall_rows(const mfsdp__host_tiny_view *x, int64_t m,
                                          int64_t column) {
  int64_t row, at;
  for (row = 0; row + 8 <= m; row += 8)
    mfsdp__host_tiny_tall(x, row, column);
  for (at = 0; at < MFSDP__HOST_TINY_LANES && row < m; at += 8)
    mfsdp__host_tiny_small_rows(x, row, m, column + at);
}

/* One product that fits: d = alpha op(a) op(b) + beta c. */
MFSDP_API void mfsdp__host_tiny(const mfsdp_gemm_args *args, const float *a, const float *b,
                                const float *c, float *d) {
  const int64_t m = args->d.rows, n = args->d.cols;
  float other[MFSDP__HOST_TRANSPOSE_COUNT] __attribute__((aligned(64)));
  mfsdp__host_tiny_view x;
  int64_t column;
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
  for (column = 0; column + (int64_t)2 * MFSDP__HOST_TINY_LANES <= n;
       column += (int64_t)2 * MFSDP__HOST_TINY_LANES)
    mfsdp__host_tiny_wide_rows(&x, m, column);
  for (; column + MFSDP__HOST_TINY_LANES <= n; column += MFSDP__HOST_TINY_LANES)
    mfsdp__host_tiny_tall_rows(&x, m, column);
  for (; column + 8 <= n; column += 8)
    mfsdp__host_tiny_small_rows(&x, 0, m, column);
  if (column < n) mfsdp__host_tiny_small_rows(&x, 0, m, n - 8); /* repeats columns, too */
}

#endif /* MFSDP_HOST_HOST_TINY_H */
