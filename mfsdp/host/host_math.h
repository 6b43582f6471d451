/* SPDX-License-Identifier: MIT */
/*
 * host_math.h - the two dense routines that the host backend needs, as a table, and plain C loops
 * for it: no BLAS, nothing to link, transparent to sanitizers.
 *
 *   const mfsdp_host_math *math = mfsdp_host_math_loops();
 *   math->sgemm(0, 1, m, n, k, 1.0f, a, lda, b, ldb, 0.0f, c, ldc);   // c = a b^T
 *
 * math_cblas.h has the same table on any CBLAS. A table of one's own takes a few lines.
 *
 * The loops add the products of one element in blocks of MFSDP__MATH_K along k, in order: the bits
 * of an element depend on its row of op(a), its column of op(b) and nothing else, so they do not
 * depend on alignment, on the other dimensions, or on which routine was called.
 *
 * Does not: use threads or fused multiply-add.
 * Link flags: none. Needs -O3 and a vector width (-march) to be fast.
 */
#ifndef MFSDP_HOST_HOST_MATH_H
#define MFSDP_HOST_HOST_MATH_H

#include "../types.h"

/* Row-major throughout; a leading dimension is the distance of rows in elements. */
typedef struct mfsdp_host_math {
  size_t struct_nbytes;
  const char *name;
  /* R. c[m,n] = alpha op(a)[m,k] op(b)[k,n] + beta c. beta 0: c is not read. alpha 0 or k 0: a and
   * b are not read. Dimensions of 0 are legal. c overlaps neither a nor b. */
  void (*sgemm)(int trans_a, int trans_b, int64_t m, int64_t n, int64_t k, float alpha,
                const float *a, int64_t lda, const float *b, int64_t ldb, float beta, float *c,
                int64_t ldc);
  /* R. The lower (upper 0) or upper (upper 1) triangle, diagonal included, of
   * c[n,n] = alpha a a^T + beta c with a[n,k] (trans 0), or alpha a^T a + beta c with a[k,n] (trans
   * 1). The other triangle is neither read nor written. */
  void (*ssyrk)(int upper, int trans, int64_t n, int64_t k, float alpha, const float *a,
                int64_t lda, float beta, float *c, int64_t ldc);
  /* O. Threads that the routines above may use from now on, in the whole process. */
  void (*set_threads)(int count);
} mfsdp_host_math;

/* ---- the loops ---- */

/* Blocks: k at a time, rows of a packed panel, and the tile that one innermost loop computes. The
 * two packed panels (32 kB and 8 kB) lie on the stack. */
#define MFSDP__MATH_K 128
#define MFSDP__MATH_ROWS 64
#define MFSDP__MATH_TILE_M 4
#define MFSDP__MATH_TILE_N 16

/* op(x) as seen by index: element (r, c) lies at data[r * row_step + c * col_step]. */
typedef struct mfsdp__math_view {
  const float *data;
  int64_t row_step, col_step;
} mfsdp__math_view;

MFSDP_API mfsdp__math_view mfsdp__math_view_of(const float *data, int64_t stride, int transposed) {
  mfsdp__math_view view;
  view.data = data;
  view.row_step = transposed ? 1 : stride;
  view.col_step = transposed ? stride : 1;
  return view;
}

/* Which elements of c are wanted. */
typedef enum mfsdp__math_part {
  MFSDP__MATH_ALL,
  MFSDP__MATH_LOWER,
  MFSDP__MATH_UPPER
} mfsdp__math_part;

typedef struct mfsdp__math_product {
  mfsdp__math_view a, b;
  int64_t m, n, k;
  float alpha, beta;
  float *c;
  int64_t ldc;
  mfsdp__math_part part;
} mfsdp__math_product;

/* packed[k][width] = lines first.. of x, `step` apart, depth elements along k; missing lines are 0.
 */
MFSDP_API void mfsdp__math_pack(float *MFSDP_RESTRICT packed, const float *MFSDP_RESTRICT x,
                                int64_t line_step, int64_t depth_step, int64_t line_count,
                                int64_t depth, int width) {
  const int lines = line_count < width ? (int)line_count : width;
  int64_t p;
  int i;
  for (p = 0; p < depth; ++p) {
    const float *from = x + p * depth_step;
    float *to = packed + p * width;
    if (line_step == 1)
      for (i = 0; i < lines; ++i)
        to[i] = from[i];
    else
      for (i = 0; i < lines; ++i)
        to[i] = from[i * line_step];
    for (i = lines; i < width; ++i)
      to[i] = 0.0f;
  }
}

/* tile[4][16] = sum over k, in order, of a[k][4] b[k][16]. */
MFSDP_API void mfsdp__math_tile(float *MFSDP_RESTRICT tile, const float *MFSDP_RESTRICT a,
                                const float *MFSDP_RESTRICT b, int64_t depth) {
  float row0[MFSDP__MATH_TILE_N], row1[MFSDP__MATH_TILE_N];
  float row2[MFSDP__MATH_TILE_N], row3[MFSDP__MATH_TILE_N];
  int64_t p;
  int j;
  for (j = 0; j < MFSDP__MATH_TILE_N; ++j)
    row0[j] = row1[j] = row2[j] = row3[j] = 0.0f;
  for (p = 0; p < depth; ++p) {
    const float *ap = a + p * MFSDP__MATH_TILE_M;
    const float *bp = b + p * MFSDP__MATH_TILE_N;
    for (j = 0; j < MFSDP__MATH_TILE_N; ++j) {
      row0[j] += ap[0] * bp[j];
      row1[j] += ap[1] * bp[j];
      row2[j] += ap[2] * bp[j];
      row3[j] += ap[3] * bp[j];
    }
  }
  for (j = 0; j < MFSDP__MATH_TILE_N; ++j) {
    tile[j] = row0[j];
    tile[MFSDP__MATH_TILE_N + j] = row1[j];
    tile[2 * MFSDP__MATH_TILE_N + j] = row2[j];
    tile[3 * MFSDP__MATH_TILE_N + j] = row3[j];
  }
}

/* Columns [*begin, *end) of row i that are wanted, out of [column, column + width). */
MFSDP_API void mfsdp__math_columns(const mfsdp__math_product *x, int64_t i, int64_t column,
                                   int64_t width, int64_t *begin, int64_t *end) {
  *begin = column;
  *end = column + width < x->n ? column + width : x->n;
  if (x->part == MFSDP__MATH_LOWER && *end > i + 1) *end = i + 1;
  if (x->part == MFSDP__MATH_UPPER && *begin < i) *begin = i;
}

/* c = alpha tile + beta c the first time, c = alpha tile + c after that. */
MFSDP_API void mfsdp__math_store(const mfsdp__math_product *x, const float *tile, int64_t row,
                                 int64_t column, float beta) {
  const int64_t row_end = row + MFSDP__MATH_TILE_M < x->m ? row + MFSDP__MATH_TILE_M : x->m;
  int64_t i, j, begin, end;
  for (i = row; i < row_end; ++i) {
    const float *from = tile + (i - row) * MFSDP__MATH_TILE_N;
    float *to = x->c + i * x->ldc;
    mfsdp__math_columns(x, i, column, MFSDP__MATH_TILE_N, &begin, &end);
    if (beta == 0.0f)
      for (j = begin; j < end; ++j)
        to[j] = x->alpha * from[j - column];
    else if (beta == 1.0f)
      for (j = begin; j < end; ++j)
        to[j] = x->alpha * from[j - column] + to[j];
    else
      for (j = begin; j < end; ++j)
        to[j] = x->alpha * from[j - column] + beta * to[j];
  }
}

/* No product to add: c = beta c. */
MFSDP_API void mfsdp__math_scale(const mfsdp__math_product *x) {
  int64_t i, j, begin, end;
  for (i = 0; i < x->m; ++i) {
    float *to = x->c + i * x->ldc;
    mfsdp__math_columns(x, i, 0, x->n, &begin, &end);
    for (j = begin; j < end; ++j)
      to[j] = x->beta == 0.0f ? 0.0f : x->beta * to[j];
  }
}

/* 1 if rows [row, row_end) have no wanted element in columns [column, column_end). */
MFSDP_API int mfsdp__math_outside(const mfsdp__math_product *x, int64_t row, int64_t row_end,
                                  int64_t column, int64_t column_end) {
  return (x->part == MFSDP__MATH_LOWER && column >= row_end) ||
         (x->part == MFSDP__MATH_UPPER && column_end <= row);
}

/* The rows [row, row + rows) of c, one slice of k, a packed already. */
MFSDP_API void mfsdp__math_panel(const mfsdp__math_product *x, const float *packed_a, int64_t row,
                                 int64_t rows, int64_t first_k, int64_t depth) {
  float packed_b[MFSDP__MATH_K * MFSDP__MATH_TILE_N];
  float tile[MFSDP__MATH_TILE_M * MFSDP__MATH_TILE_N];
  const float beta = first_k == 0 ? x->beta : 1.0f;
  int64_t column, r;
  for (column = 0; column < x->n; column += MFSDP__MATH_TILE_N) {
    const int64_t column_end = column + MFSDP__MATH_TILE_N;
    if (mfsdp__math_outside(x, row, row + rows, column, column_end)) continue;
    mfsdp__math_pack(packed_b, x->b.data + first_k * x->b.row_step + column * x->b.col_step,
                     x->b.col_step, x->b.row_step, x->n - column, depth, MFSDP__MATH_TILE_N);
    for (r = 0; r < rows; r += MFSDP__MATH_TILE_M) {
      if (mfsdp__math_outside(x, row + r, row + r + MFSDP__MATH_TILE_M, column, column_end))
        continue;
      mfsdp__math_tile(tile, packed_a + r * depth, packed_b, depth);
      mfsdp__math_store(x, tile, row + r, column, beta);
    }
  }
}

MFSDP_API void mfsdp__math_run(const mfsdp__math_product *x) {
  float packed_a[MFSDP__MATH_K * MFSDP__MATH_ROWS];
  int64_t first_k, row, r;
  if (x->m <= 0 || x->n <= 0) return;
  if (x->k <= 0 || x->alpha == 0.0f) {
    mfsdp__math_scale(x);
    return;
  }
  for (first_k = 0; first_k < x->k; first_k += MFSDP__MATH_K) {
    const int64_t depth = x->k - first_k < MFSDP__MATH_K ? x->k - first_k : MFSDP__MATH_K;
    for (row = 0; row < x->m; row += MFSDP__MATH_ROWS) {
      const int64_t rows = x->m - row < MFSDP__MATH_ROWS ? x->m - row : MFSDP__MATH_ROWS;
      for (r = 0; r < rows; r += MFSDP__MATH_TILE_M)
        mfsdp__math_pack(packed_a + r * depth,
                         x->a.data + (row + r) * x->a.row_step + first_k * x->a.col_step,
                         x->a.row_step, x->a.col_step, rows - r, depth, MFSDP__MATH_TILE_M);
      mfsdp__math_panel(x, packed_a, row, rows, first_k, depth);
    }
  }
}

MFSDP_API void mfsdp__math_loops_sgemm(int trans_a, int trans_b, int64_t m, int64_t n, int64_t k,
                                       float alpha, const float *a, int64_t lda, const float *b,
                                       int64_t ldb, float beta, float *c, int64_t ldc) {
  mfsdp__math_product x;
  x.a = mfsdp__math_view_of(a, lda, trans_a);
  x.b = mfsdp__math_view_of(b, ldb, trans_b);
  x.m = m;
  x.n = n;
  x.k = k;
  x.alpha = alpha;
  x.beta = beta;
  x.c = c;
  x.ldc = ldc;
  x.part = MFSDP__MATH_ALL;
  mfsdp__math_run(&x);
}

MFSDP_API void mfsdp__math_loops_ssyrk(int upper, int trans, int64_t n, int64_t k, float alpha,
                                       const float *a, int64_t lda, float beta, float *c,
                                       int64_t ldc) {
  mfsdp__math_product x;
  x.a = mfsdp__math_view_of(a, lda, trans);
  x.b = mfsdp__math_view_of(a, lda, !trans);
  x.m = n;
  x.n = n;
  x.k = k;
  x.alpha = alpha;
  x.beta = beta;
  x.c = c;
  x.ldc = ldc;
  x.part = upper ? MFSDP__MATH_UPPER : MFSDP__MATH_LOWER;
  mfsdp__math_run(&x);
}

/* The plain C loops; never NULL. */
MFSDP_API const mfsdp_host_math *mfsdp_host_math_loops(void) {
  static const mfsdp_host_math loops = {sizeof(mfsdp_host_math), "loops", mfsdp__math_loops_sgemm,
                                        mfsdp__math_loops_ssyrk, NULL};
  return &loops;
}

#endif /* MFSDP_HOST_HOST_MATH_H */
