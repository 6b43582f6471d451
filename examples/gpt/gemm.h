/* SPDX-License-Identifier: MIT */
/*
 * gemm.h - the one dense product that the model needs, as a function pointer: the model runs with
 * CBLAS or with plain C loops and does not know which.
 *
 *   C = alpha * op(A) op(B) + beta * C,  row-major, op(A) is m x k, op(B) is k x n, C is m x n.
 *
 * trans_a, trans_b: 0 takes the operand as stored, 1 its transpose. lda, ldb, ldc: elements from
 * one stored row to the next. beta == 0 writes C without reading it. C must not overlap A or B. The
 * signature is that of `sgemm` in the library's host math table.
 */
#ifndef GPT_GEMM_H
#define GPT_GEMM_H

#include <stdint.h>

typedef void (*gpt_sgemm_fn)(int trans_a, int trans_b, int64_t m, int64_t n, int64_t k, float alpha,
                             const float *a, int64_t lda, const float *b, int64_t ldb, float beta,
                             float *c, int64_t ldc);

#endif /* GPT_GEMM_H */
