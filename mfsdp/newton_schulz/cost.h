/* SPDX-License-Identifier: MIT */
/*
 * cost.h - how much arithmetic an iteration really does: the products of the form that runs, counted.
 *
 *   int64_t work;
 *   if (!mfsdp_newton_schulz_multiply_adds(&ns, 1024, 4096, &work)) ...   // does not fit, or a bad ns
 *   plan_desc.cost = mfsdp_newton_schulz_cost;      // balance what Muon's steps will take
 *   plan_desc.user = &ns;                           // read while the plan is made
 *
 * mfsdp_cost_newton_schulz (../cost.h) counts one step of three full products, whatever runs. In units
 * of s^3, with r = l / s and five steps with c, that is 10 r + 5 for all of them; the forms here come to
 *   PLAIN      10 r + 5
 *   SYMMETRIC  7.5 r + 2.5
 *   GRAM       1.5 r + 10.5, and 1.5 r - 2 more for each restart
 * but for terms of s^2: so a 1:4 matrix takes 1.65 times a square one where AUTO chooses, not 3.
 *
 * All in integers but for the restarts of GRAM, which compare products of coefficients in doubles with
 * thresholds: builds that round doubles alike plan alike, and plans are compared at set-up.
 *
 * Part of newton_schulz.h. Link flags: none.
 */
#ifndef MFSDP_NEWTON_SCHULZ_COST_H
#define MFSDP_NEWTON_SCHULZ_COST_H

#include "desc.h"

/* How many products of each kind iterate.h's lists of calls have: keep the two in step. */
typedef struct mfsdp__ns_products {
  int64_t gram;   /* X X^T: s x s of depth l, symmetric unless PLAIN */
  int64_t square; /* s x s of depth s, symmetric unless PLAIN */
  int64_t full;   /* s x s of depth s, all of it in every form */
  int64_t apply;  /* P X: s x l of depth s */
} mfsdp__ns_products;

MFSDP_API mfsdp__ns_products mfsdp__ns_products_by_steps(const mfsdp_newton_schulz_desc *desc) {
  mfsdp__ns_products count = {0, 0, 0, 0};
  int32_t step;
  for (step = 0; step < desc->step_count; ++step) {
    ++count.gram;
    count.square += mfsdp__ns_row(desc, step)[2] != 0.0;
    ++count.apply;
  }
  return count;
}

/* The first Q after a start or restart has no product. */
MFSDP_API mfsdp__ns_products mfsdp__ns_products_by_gram(const mfsdp_newton_schulz_desc *desc,
                                                        int64_t rows, int64_t cols) {
  const uint64_t restarts = mfsdp_newton_schulz_restarts_of(desc, rows, cols);
  mfsdp__ns_products count = {0, 0, 0, 0};
  int32_t step;
  int first = 1;
  for (step = 0; step < desc->step_count; ++step) {
    const int last = step + 1 == desc->step_count || ((restarts >> step) & 1) != 0;
    count.gram += first;
    count.square += mfsdp__ns_row(desc, step)[2] != 0.0;
    count.full += !first;
    count.apply += last;
    if (!last) count.square += 2;
    first = last;
  }
  return count;
}

/* *out += times * area * depth. */
MFSDP_API int mfsdp__ns_add_products(int64_t times, int64_t area, int64_t depth, int64_t *out) {
  int64_t product;
  return mfsdp_i64_mul(area, depth, &product) && mfsdp_i64_mul(product, times, &product) &&
         mfsdp_i64_add(*out, product, out);
}

/*
 * Multiply-adds of the products that mfsdp_newton_schulz asks its backend for, on one rows x cols
 * matrix: restarts, cubic steps and the step count as they will be, and the form of the shape. A
 * product of a symmetric result counts as its triangle with the diagonal, s (s + 1) / 2 entries; a
 * backend that works by panels does a little more (five eighths of the whole by four panels), and one
 * that computes small ones whole does twice that. Element-wise work, of order s*l, is left out.
 * 1 on success; 0 for a negative side, a description that mfsdp_newton_schulz_check refuses, or a result
 * that does not fit, and then *out is not written.
 */
MFSDP_API int mfsdp_newton_schulz_multiply_adds(const mfsdp_newton_schulz_desc *desc, int64_t rows,
                                                int64_t cols, int64_t *out) {
  const int64_t s = rows < cols ? rows : cols, l = rows < cols ? cols : rows;
  mfsdp_newton_schulz_form form;
  mfsdp__ns_products count;
  int64_t area, square, triangle, sum = 0;
  if (s < 0 || mfsdp_newton_schulz_check(NULL, desc) != MFSDP_OK) return 0;
  if (!mfsdp_i64_mul(s, l, &area) || !mfsdp_i64_mul(s, s, &square) ||
      !mfsdp_i64_add(square, s, &triangle))
    return 0;
  form = mfsdp_newton_schulz_form_of(desc, rows, cols);
  count = form == MFSDP_NS_GRAM ? mfsdp__ns_products_by_gram(desc, rows, cols)
                                : mfsdp__ns_products_by_steps(desc);
  triangle = form == MFSDP_NS_PLAIN ? square : triangle / 2;
  if (!mfsdp__ns_add_products(count.gram, triangle, l, &sum) ||
      !mfsdp__ns_add_products(count.square, triangle, s, &sum) ||
      !mfsdp__ns_add_products(count.full, square, s, &sum) ||
      !mfsdp__ns_add_products(count.apply, area, s, &sum))
    return 0;
  *out = sum;
  return 1;
}

/* mfsdp_plan_desc.cost by the work of the form that runs; its user is a const
 * mfsdp_newton_schulz_desc, one for all matrices. -1 where mfsdp_newton_schulz_multiply_adds fails, which
 * the planner reports as an error. A unit is 2 FLOPs. */
MFSDP_API int64_t mfsdp_newton_schulz_cost(void *user, int32_t param, int64_t rows, int64_t cols) {
  int64_t work;
  (void)param;
  return mfsdp_newton_schulz_multiply_adds((const mfsdp_newton_schulz_desc *)user, rows, cols,
                                           &work)
             ? work
             : -1;
}

#endif /* MFSDP_NEWTON_SCHULZ_COST_H */
