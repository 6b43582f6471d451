/* SPDX-License-Identifier: MIT */
/*
 * host_half.h - products of bf16 and fp16 matrices on the host: blocks are widened to float,
 * multiplied and summed over all of k in float, and each result is rounded once.
 *
 *   mfsdp__host_half_gemm(math, &args);       // args->dtype BF16 or F16, checked by backend_host.h
 *
 * It is there so that 16-bit storage can be used and judged without a GPU, not for speed: CPUs
 * without 16-bit products are slower in it than in fp32.
 *
 * Internal to host_dense.h. Link flags: none.
 */
#ifndef MFSDP_HOST_HOST_HALF_H
#define MFSDP_HOST_HOST_HALF_H

#include "../backend.h"
#include "../dtype.h"
#include "host_math.h"

/* The three blocks (32 kB, 32 kB, 16 kB) lie on the stack. */
#define MFSDP__HALF_SIDE 64
#define MFSDP__HALF_K 128

MFSDP_API float mfsdp__half_load(const uint16_t *data, int64_t index, mfsdp_dtype dtype) {
  return dtype == MFSDP_BF16 ? mfsdp_f32_from_bf16(data[index]) : mfsdp_f32_from_f16(data[index]);
}

/* block[rows][cols] = data at (row, col) of a matrix with that stride, as floats. */
MFSDP_API void mfsdp__half_widen(float *MFSDP_RESTRICT block, const uint16_t *MFSDP_RESTRICT data,
                                 int64_t stride, int64_t rows, int64_t cols, mfsdp_dtype dtype) {
  int64_t i, j;
  for (i = 0; i < rows; ++i)
    for (j = 0; j < cols; ++j)
      block[i * cols + j] = mfsdp__half_load(data, i * stride + j, dtype);
}

/* sum[m][n] += op(a) op(b) over all of k, for the block of d at (row, col). */
MFSDP_API void mfsdp__half_sum(const mfsdp_host_math *math, const mfsdp_gemm_args *args,
                               const uint16_t *a, const uint16_t *b, int64_t row, int64_t col,
                               int64_t m, int64_t n, float *sum) {
  float wide_a[MFSDP__HALF_SIDE * MFSDP__HALF_K], wide_b[MFSDP__HALF_K * MFSDP__HALF_SIDE];
  const int64_t k = args->trans_a ? args->a.rows : args->a.cols;
  const int64_t lda = args->a.row_stride, ldb = args->b.row_stride;
  int64_t first;
  for (first = 0; first < k; first += MFSDP__HALF_K) {
    const int64_t depth = k - first < MFSDP__HALF_K ? k - first : MFSDP__HALF_K;
    if (args->trans_a)
      mfsdp__half_widen(wide_a, a + first * lda + row, lda, depth, m, args->dtype);
    else
      mfsdp__half_widen(wide_a, a + row * lda + first, lda, m, depth, args->dtype);
    if (args->trans_b)
      mfsdp__half_widen(wide_b, b + col * ldb + first, ldb, n, depth, args->dtype);
    else
      mfsdp__half_widen(wide_b, b + first * ldb + col, ldb, depth, n, args->dtype);
    math->sgemm(args->trans_a, args->trans_b, m, n, depth, 1.0f, wide_a, args->trans_a ? m : depth,
                wide_b, args->trans_b ? depth : n, first == 0 ? 0.0f : 1.0f, sum, n);
  }
  if (k == 0) memset(sum, 0, (size_t)(m * n) * sizeof(float));
}

/* d = alpha sum + beta c + diagonal for one block; below the diagonal of a symmetric result too. */
MFSDP_API void mfsdp__half_store(const mfsdp_gemm_args *args, const float *sum, const uint16_t *c,
                                 uint16_t *d, int64_t row, int64_t col, int64_t m, int64_t n) {
  int64_t i, j;
  for (i = 0; i < m; ++i)
    for (j = 0; j < n; ++j) {
      const int64_t r = row + i, s = col + j;
      float value = args->alpha * sum[i * n + j];
      uint16_t rounded;
      if (args->symmetric && s < r) continue;
      if (args->beta != 0.0f)
        value += args->beta * mfsdp__half_load(c, r * args->c.row_stride + s, args->dtype);
      if (r == s) value += args->diagonal;
      rounded = args->dtype == MFSDP_BF16 ? mfsdp_bf16_from_f32(value) : mfsdp_f16_from_f32(value);
      d[r * args->d.row_stride + s] = rounded;
      if (args->symmetric) d[s * args->d.row_stride + r] = rounded;
    }
}

MFSDP_API void mfsdp__half_one(const mfsdp_host_math *math, const mfsdp_gemm_args *args,
                               const uint16_t *a, const uint16_t *b, const uint16_t *c,
                               uint16_t *d) {
  float sum[MFSDP__HALF_SIDE * MFSDP__HALF_SIDE];
  int64_t row, col;
  for (row = 0; row < args->d.rows; row += MFSDP__HALF_SIDE)
    for (col = args->symmetric ? row : 0; col < args->d.cols; col += MFSDP__HALF_SIDE) {
      const int64_t m =
          args->d.rows - row < MFSDP__HALF_SIDE ? args->d.rows - row : MFSDP__HALF_SIDE;
      const int64_t n =
          args->d.cols - col < MFSDP__HALF_SIDE ? args->d.cols - col : MFSDP__HALF_SIDE;
      mfsdp__half_sum(math, args, a, b, row, col, m, n, sum);
      mfsdp__half_store(args, sum, c, d, row, col, m, n);
    }
}

/* One after the other, each as it would be alone. Matrices without elements may be NULL. */
MFSDP_API void mfsdp__host_half_gemm(const mfsdp_host_math *math, const mfsdp_gemm_args *args) {
  const uint16_t *a = (const uint16_t *)args->a.data, *b = (const uint16_t *)args->b.data;
  const uint16_t *c = args->beta != 0.0f ? (const uint16_t *)args->c.data : NULL;
  uint16_t *d = (uint16_t *)args->d.data;
  int64_t i;
  for (i = 0; i < args->batch_count; ++i)
    mfsdp__half_one(math, args, i == 0 ? a : a + i * args->a.batch_stride,
                    i == 0 ? b : b + i * args->b.batch_stride,
                    c == NULL || i == 0 ? c : c + i * args->c.batch_stride,
                    d + i * args->d.batch_stride);
}

#endif /* MFSDP_HOST_HOST_HALF_H */
