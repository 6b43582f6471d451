/* SPDX-License-Identifier: MIT */
/*
 * iterate.h - the forms of the Newton-Schulz iteration, as lists of backend calls.
 *
 * Every call is over the whole batch. A tall matrix is iterated from the other side: A = X^T X and
 * products from the right, which is the same as transposing it first, without the copies.
 *
 * Part of newton_schulz.h, which describes and checks the arguments. Link flags: none.
 */
#ifndef MFSDP_NEWTON_SCHULZ_ITERATE_H
#define MFSDP_NEWTON_SCHULZ_ITERATE_H

#include "workspace.h"

/* One call's matrices. x is the iterate, next the place of the following one. */
typedef struct mfsdp__ns_run {
  const mfsdp_backend *backend;
  mfsdp_queue *queue;
  int64_t batch_count;
  mfsdp_dtype dtype;
  int tall, symmetric;
  mfsdp_mat x, next, square[MFSDP__NS_SQUARES];
} mfsdp__ns_run;

MFSDP_API mfsdp_mat mfsdp__ns_mat(void *data, int64_t rows, int64_t cols, int64_t batch_stride) {
  mfsdp_mat mat;
  mat.data = data;
  mat.rows = rows;
  mat.cols = cols;
  mat.row_stride = cols;
  mat.batch_stride = batch_stride;
  return mat;
}

MFSDP_API void mfsdp__ns_swap(mfsdp_mat *a, mfsdp_mat *b) {
  const mfsdp_mat swap = *a;
  *a = *b;
  *b = swap;
}

MFSDP_API mfsdp_gemm_args mfsdp__ns_args(const mfsdp__ns_run *run, double alpha, mfsdp_mat a,
                                         mfsdp_mat b, double beta, mfsdp_mat c, mfsdp_mat d) {
  mfsdp_gemm_args args = mfsdp_gemm_args_default();
  args.a = a;
  args.b = b;
  args.c = c;
  args.d = d;
  args.batch_count = run->batch_count;
  args.alpha = (float)alpha;
  args.beta = (float)beta;
  args.dtype = run->dtype;
  return args;
}

MFSDP_API mfsdp_status mfsdp__ns_gemm(const mfsdp__ns_run *run, const mfsdp_gemm_args *args) {
  return run->backend->ops->gemm(run->backend->self, run->queue, args);
}

/* d = alpha a b + beta c for symmetric s x s matrices that commute but for rounding. */
MFSDP_API mfsdp_status mfsdp__ns_square(const mfsdp__ns_run *run, double alpha, mfsdp_mat a,
                                        mfsdp_mat b, double beta, mfsdp_mat c, mfsdp_mat d) {
  mfsdp_gemm_args args = mfsdp__ns_args(run, alpha, a, b, beta, c, d);
  args.symmetric = run->symmetric;
  return mfsdp__ns_gemm(run, &args);
}

/* d = X X^T, from the short side. */
MFSDP_API mfsdp_status mfsdp__ns_gram_matrix(const mfsdp__ns_run *run, mfsdp_mat d) {
  mfsdp_gemm_args args = mfsdp__ns_args(run, 1.0, run->x, run->x, 0.0, d, d);
  args.trans_a = run->tall;
  args.trans_b = !run->tall;
  args.symmetric = run->symmetric;
  return mfsdp__ns_gemm(run, &args);
}

/* x = alpha p x + beta x, from the short side. */
MFSDP_API mfsdp_status mfsdp__ns_apply(mfsdp__ns_run *run, double alpha, mfsdp_mat p, double beta) {
  const mfsdp_gemm_args args = mfsdp__ns_args(run, alpha, run->tall ? run->x : p,
                                              run->tall ? p : run->x, beta, run->x, run->next);
  MFSDP_TRY(mfsdp__ns_gemm(run, &args));
  mfsdp__ns_swap(&run->x, &run->next);
  return MFSDP_OK;
}

/* PLAIN and SYMMETRIC: A = X X^T; P = b A + c A A; X = a X + P X. With c = 0, P is b A. */
MFSDP_API mfsdp_status mfsdp__ns_by_steps(mfsdp__ns_run *run,
                                          const mfsdp_newton_schulz_desc *desc) {
  const mfsdp_mat gram = run->square[0], poly = run->square[1];
  int32_t step;
  for (step = 0; step < desc->step_count; ++step) {
    const double *row = mfsdp__ns_row(desc, step);
    MFSDP_TRY(mfsdp__ns_gram_matrix(run, gram));
    if (row[2] != 0.0) MFSDP_TRY(mfsdp__ns_square(run, row[2], gram, gram, row[1], gram, poly));
    if (row[2] != 0.0)
      MFSDP_TRY(mfsdp__ns_apply(run, 1.0, poly, row[0]));
    else
      MFSDP_TRY(mfsdp__ns_apply(run, row[1], gram, row[0]));
  }
  return MFSDP_OK;
}

/* q = z alpha + a I: the first step's Q, an empty product with a diagonal. */
MFSDP_API mfsdp_status mfsdp__ns_first_q(const mfsdp__ns_run *run, double alpha, mfsdp_mat z,
                                         double a, mfsdp_mat q) {
  mfsdp_mat left = z, right = z;
  mfsdp_gemm_args args;
  left.cols = 0;
  right.rows = 0;
  args = mfsdp__ns_args(run, 1.0, left, right, alpha, z, q);
  args.diagonal = (float)a;
  return mfsdp__ns_gemm(run, &args);
}

/* t = alpha z q + a q, from the right for tall matrices. In floats Z and Q hardly commute any more,
 * and mirroring a triangle would add the difference to what is amplified most: a full product. */
MFSDP_API mfsdp_status mfsdp__ns_next_q(const mfsdp__ns_run *run, double alpha, mfsdp_mat z,
                                        double a, mfsdp_mat q, mfsdp_mat t) {
  const mfsdp_gemm_args args =
      mfsdp__ns_args(run, alpha, run->tall ? q : z, run->tall ? z : q, a, q, t);
  return mfsdp__ns_gemm(run, &args);
}

/*
 * GRAM: R = X X^T, Q = I; per step Z = b R + c R R; Q = Z Q + a Q; R = (Z + a) R (Z + a), by way of
 * T = Z R + a R; in the end X = Q X. Z + a I is never formed: on its way to R the identity would
 * drown what is small in Z. At a restart X = Q X, and R and Q start again. With c = 0, Z is b R.
 * Source: Zhang, Amsel, Chen, Dao, "Gram Newton-Schulz", 2025; restarts as there.
 */
MFSDP_API mfsdp_status mfsdp__ns_by_gram(mfsdp__ns_run *run, const mfsdp_newton_schulz_desc *desc) {
  const uint64_t restarts = mfsdp_newton_schulz_restarts_of(desc, run->x.rows, run->x.cols);
  mfsdp_mat r = run->square[0], z = run->square[1], t = run->square[2], q = run->square[3];
  int32_t step;
  int first = 1; /* Q is I, R is to be computed */
  for (step = 0; step < desc->step_count; ++step) {
    const double *row = mfsdp__ns_row(desc, step);
    const int last = step + 1 == desc->step_count || ((restarts >> step) & 1) != 0;
    const int cubic = !(row[2] != 0.0);
    const double alpha = cubic ? row[1] : 1.0; /* alpha p is Z */
    const mfsdp_mat p = cubic ? r : z;
    if (first) MFSDP_TRY(mfsdp__ns_gram_matrix(run, r));
    if (!cubic) MFSDP_TRY(mfsdp__ns_square(run, row[2], r, r, row[1], r, z));
    if (first) {
      MFSDP_TRY(mfsdp__ns_first_q(run, alpha, p, row[0], q));
    } else {
      MFSDP_TRY(mfsdp__ns_next_q(run, alpha, p, row[0], q, t));
      mfsdp__ns_swap(&q, &t);
    }
    first = last;
    if (last) {
      MFSDP_TRY(mfsdp__ns_apply(run, 1.0, q, 0.0));
      continue;
    }
    MFSDP_TRY(mfsdp__ns_square(run, alpha, p, r, row[0], r, t));
    if (cubic) { /* R is still read: its successor goes elsewhere */
      MFSDP_TRY(mfsdp__ns_square(run, alpha, p, t, row[0], t, z));
      mfsdp__ns_swap(&r, &z);
    } else {
      MFSDP_TRY(mfsdp__ns_square(run, alpha, p, t, row[0], t, r));
    }
  }
  return MFSDP_OK;
}

/* How often a form writes a new X. */
MFSDP_API int32_t mfsdp__ns_x_writes(const mfsdp_newton_schulz_desc *desc,
                                     mfsdp_newton_schulz_form form, int64_t rows, int64_t cols) {
  uint64_t restarts = mfsdp_newton_schulz_restarts_of(desc, rows, cols);
  int32_t count = desc->step_count > 0 ? 1 : 0;
  if (form != MFSDP_NS_GRAM) return desc->step_count;
  for (; restarts != 0; restarts &= restarts - 1)
    ++count;
  return count;
}

#endif /* MFSDP_NEWTON_SCHULZ_ITERATE_H */
