/* SPDX-License-Identifier: MIT */
/*
 * cost.h - how much work an update is and how many bytes a collective moves: checked integers.
 *
 *   int64_t flops;
 *   size_t nbytes;
 *   if (!mfsdp_cost_newton_schulz_flops(4096, 11008, 5, &flops)) ...          // does not fit
 *   if (!mfsdp_cost_gather_nbytes(payload_count, world, MFSDP_BF16, &nbytes)) ...
 *   plan_desc.cost = mfsdp_cost_newton_schulz;      // balance Newton-Schulz work, not elements
 *
 *   cost/chunk.h   mfsdp_wire_cost, and what collectives hand on at a time unless told
 *
 * All functions that return int: 1 on success; 0 for a negative argument, an invalid dtype or a
 * result that does not fit, and then *out is not written.
 * Does not: predict seconds.
 * Link flags: none.
 */
#ifndef MFSDP_COST_H
#define MFSDP_COST_H

#include "cost/chunk.h"
#include "types.h"

/*
 * Multiply-adds of one Newton-Schulz step on a rows x cols matrix in full GEMMs: s^2 (2 l + s),
 * with s the short and l the long side: A = X X^T (s*s*l), A A (s*s*s), P X (s*s*l). Element-wise
 * work, of order s*l, is left out. This is the planner's unit: an integer without the step count,
 * so that sums over a large model fit 64 bits.
 */
MFSDP_API int mfsdp_cost_newton_schulz_units(int64_t rows, int64_t cols, int64_t *out) {
  const int64_t s = rows < cols ? rows : cols;
  const int64_t l = rows < cols ? cols : rows;
  int64_t square, sum;
  if (s < 0) return 0;
  if (!mfsdp_i64_mul(s, s, &square) || !mfsdp_i64_mul(l, 2, &sum) || !mfsdp_i64_add(sum, s, &sum))
    return 0;
  if (!mfsdp_i64_mul(square, sum, &sum)) return 0;
  *out = sum;
  return 1;
}

/* FLOPs of `steps` Newton-Schulz steps: 2 per multiply-add, 2 * steps * s^2 (2 l + s). */
MFSDP_API int mfsdp_cost_newton_schulz_flops(int64_t rows, int64_t cols, int32_t steps,
                                             int64_t *out) {
  int64_t flops;
  if (steps < 0 || !mfsdp_cost_newton_schulz_units(rows, cols, &flops)) return 0;
  if (!mfsdp_i64_mul(flops, 2, &flops) || !mfsdp_i64_mul(flops, steps, &flops)) return 0;
  *out = flops;
  return 1;
}

/* mfsdp_plan_desc.cost by Newton-Schulz work. -1 where it does not fit, which the planner reports
 * as an error. `user` and `param` are not used. */
MFSDP_API int64_t mfsdp_cost_newton_schulz(void *user, int32_t param, int64_t rows, int64_t cols) {
  int64_t units;
  (void)user;
  (void)param;
  return mfsdp_cost_newton_schulz_units(rows, cols, &units) ? units : -1;
}

/* Of Shampoo and SOAP: what a planner's cost function is told, as mfsdp_plan_desc.user. */
typedef struct mfsdp_precondition_cost {
  int64_t update_every, size_limit; /* as in their descriptions; at least 1, and 0 */
} mfsdp_precondition_cost;

/* Over the sides of a rows x cols matrix that are at most `limit` long: the multiply-adds of a product
 * of the matrix with a square of the side, and the cubes of their lengths. */
MFSDP_API int mfsdp__cost_sides(int64_t rows, int64_t cols, int64_t limit, int64_t *products,
                                int64_t *cubes) {
  const int64_t sides[2] = {rows, cols};
  int32_t i;
  *products = *cubes = 0;
  if (rows < 0 || cols < 0) return 0;
  for (i = 0; i < 2; ++i) {
    int64_t square, product, cube;
    if (sides[i] > limit) continue;
    if (!mfsdp_i64_mul(sides[i], sides[i], &square) ||
        !mfsdp_i64_mul(square, sides[1 - i], &product) || !mfsdp_i64_mul(square, sides[i], &cube) ||
        !mfsdp_i64_add(*products, product, products) || !mfsdp_i64_add(*cubes, cube, cubes))
      return 0;
  }
  return 1;
}

/* (step products + (renew products + renew_cubes cubes) / update_every) / divisor */
MFSDP_API int mfsdp__cost_precondition(const mfsdp_precondition_cost *cost, int64_t rows,
                                       int64_t cols, int64_t step, int64_t renew,
                                       int64_t renew_cubes, int64_t divisor, int64_t *out) {
  int64_t products, cubes, sum, rest;
  if (cost->update_every < 1 ||
      !mfsdp__cost_sides(rows, cols, cost->size_limit, &products, &cubes) ||
      !mfsdp_i64_mul(products, renew, &rest) || !mfsdp_i64_mul(cubes, renew_cubes, &cubes) ||
      !mfsdp_i64_add(rest, cubes, &rest) || !mfsdp_i64_mul(products, step, &sum) ||
      !mfsdp_i64_add(sum, rest / cost->update_every, &sum))
    return 0;
  *out = sum / divisor;
  return 1;
}

/*
 * Multiply-adds of an average step of Shampoo on a rows x cols matrix. With m and n its sides: in each
 * step two Gram matrices by half products and one product with each root, 3/2 (m^2 n + m n^2); every
 * update_every steps eigenvectors (3 n^3: tridiagonal form, divide and conquer, back) and a root by half
 * a product, 7/2 (m^3 + n^3). A library does the eigenvectors at a fraction of the speed of a product.
 */
MFSDP_API int mfsdp_cost_shampoo_units(const mfsdp_precondition_cost *cost, int64_t rows,
                                       int64_t cols, int64_t *out) {
  return mfsdp__cost_precondition(cost, rows, cols, 3, 0, 7, 2, out);
}

/*
 * The same of SOAP: in each step half products for the Gram matrices, and one product with each basis
 * on the way in and out, 5/2 (m^2 n + m n^2); every update_every steps a product of basis and Gram
 * matrix and Householder's QR (4/3 n^3), 7/3 (m^3 + n^3), and the first moment out of the old bases and
 * into the new ones, 2 (m^2 n + m n^2).
 */
MFSDP_API int mfsdp_cost_soap_units(const mfsdp_precondition_cost *cost, int64_t rows, int64_t cols,
                                    int64_t *out) {
  return mfsdp__cost_precondition(cost, rows, cols, 15, 12, 14, 6, out);
}

/* mfsdp_plan_desc.cost by Shampoo's work, its user a mfsdp_precondition_cost. -1 where it does not
 * fit. */
MFSDP_API int64_t mfsdp_cost_shampoo(void *user, int32_t param, int64_t rows, int64_t cols) {
  int64_t units;
  (void)param;
  return mfsdp_cost_shampoo_units((const mfsdp_precondition_cost *)user, rows, cols, &units) ? units
                                                                                             : -1;
}

/* The same by SOAP's. */
MFSDP_API int64_t mfsdp_cost_soap(void *user, int32_t param, int64_t rows, int64_t cols) {
  int64_t units;
  (void)param;
  return mfsdp_cost_soap_units((const mfsdp_precondition_cost *)user, rows, cols, &units) ? units
                                                                                          : -1;
}

/*
 * Bytes that a DIRECT gather of `payload_count` elements puts on the wire, all ranks together: each
 * owner sends its segment to world - 1 peers, so (world - 1) * payload_count elements, whoever owns
 * what. Pass the padded length for wire bytes.
 */
MFSDP_API int mfsdp_cost_gather_nbytes(int64_t payload_count, int32_t world, mfsdp_dtype dtype,
                                       size_t *out) {
  size_t nbytes;
  if (world < 1 || !mfsdp_elements_nbytes(payload_count, dtype, &nbytes)) return 0;
  if (!mfsdp_size_mul(nbytes, (size_t)(world - 1), &nbytes)) return 0;
  *out = nbytes;
  return 1;
}

/*
 * The same for a DIRECT reduce: each rank sends to each other owner its contribution to that
 * owner's segment, which sums to (world - 1) * payload_count elements of the wire dtype as well.
 */
MFSDP_API int mfsdp_cost_reduce_nbytes(int64_t payload_count, int32_t world, mfsdp_dtype wire,
                                       size_t *out) {
  return mfsdp_cost_gather_nbytes(payload_count, world, wire, out);
}

#endif /* MFSDP_COST_H */
