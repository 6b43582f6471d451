/* SPDX-License-Identifier: MIT */
/*
 * host_precondition.h - the host backend's passes of Shampoo and SOAP over one matrix.
 *
 *   mfsdp__host_precondition_entry(host, queue, &args);   // formulas at mfsdp_precondition_args
 *
 * Internal to backend_host.h. Link flags: -lm.
 */
#ifndef MFSDP_HOST_HOST_PRECONDITION_H
#define MFSDP_HOST_HOST_PRECONDITION_H

#include "host_ops.h"
#include "host_queue.h"

/* ---- what all passes ask ---- */

/* 1 unless the step is skipped or the matrix had no gradient. */
MFSDP_API int mfsdp__host_pre_applies(const mfsdp_precondition_args *args) {
  if (args->scalars->skip) return 0;
  return args->present == NULL || args->present[args->item.present_index] != 0;
}

MFSDP_API int64_t mfsdp__host_pre_length(const mfsdp_precondition_args *args, int side) {
  return side == 0 ? args->rows : args->cols;
}

/* 1 if all are finite: the exponent bits of none are all ones. */
MFSDP_API int mfsdp__host_all_finite(const float *x, int64_t count) {
  uint32_t most = 0;
  int64_t i;
  for (i = 0; i < count; ++i) {
    const uint32_t exponent = mfsdp_bits_from_f32(x[i]) & UINT32_C(0x7f800000);
    most = exponent > most ? exponent : most;
  }
  return most != UINT32_C(0x7f800000);
}

/* The Gram matrices, and the sides if they are to be stored. */
MFSDP_API int mfsdp__host_pre_sides_finite(const mfsdp_precondition_args *args, int stores_sides) {
  int side;
  for (side = 0; side < 2; ++side) {
    const int64_t n = mfsdp__host_pre_length(args, side);
    if (args->next_gram[side] == NULL) continue;
    if (!mfsdp__host_all_finite(args->next_gram[side], n * n)) return 0;
    if (stores_sides && !mfsdp__host_all_finite(args->next_side[side], n * n)) return 0;
  }
  return 1;
}

MFSDP_API void mfsdp__host_pre_store_sides(const mfsdp_precondition_args *args, int stores_sides) {
  int side;
  for (side = 0; side < 2; ++side) {
    const int64_t n = mfsdp__host_pre_length(args, side);
    const size_t nbytes = (size_t)(n * n) * sizeof(float);
    if (args->next_gram[side] == NULL) continue;
    memcpy(args->item.state[MFSDP_STATE_GRAM_LEFT + side], args->next_gram[side], nbytes);
    if (stores_sides)
      memcpy(args->item.state[MFSDP_STATE_SIDE_LEFT + side], args->next_side[side], nbytes);
  }
}

/* ---- moments ---- */

MFSDP_API void mfsdp__host_pre_grad(const mfsdp_precondition_args *args) {
  const mfsdp_step_scalars *s = args->scalars;
  const float scale = (float)(s->grad_scale * (args->clipped ? s->clip_scale : 1.0));
  const float *MFSDP_RESTRICT from = args->item.grad;
  float *MFSDP_RESTRICT to = args->grad;
  int64_t i;
  for (i = 0; i < args->item.count; ++i)
    to[i] = from[i] * scale;
}

/* The candidates of both moments of g; `second` NULL: of the first alone. */
MFSDP_API void mfsdp__host_pre_moments(const mfsdp_precondition_args *args,
                                       const float *MFSDP_RESTRICT g,
                                       const float *MFSDP_RESTRICT first,
                                       const float *MFSDP_RESTRICT second) {
  const float beta1 = (float)args->beta1, rest1 = (float)(1.0 - args->beta1);
  const float beta2 = (float)args->beta2, rest2 = (float)(1.0 - args->beta2);
  float *MFSDP_RESTRICT next_first = args->next_exp_avg;
  float *MFSDP_RESTRICT next_second = args->next_exp_avg_sq;
  int64_t i;
  for (i = 0; i < args->item.count; ++i)
    next_first[i] = beta1 * first[i] + rest1 * g[i];
  if (second == NULL) return;
  for (i = 0; i < args->item.count; ++i)
    next_second[i] = beta2 * second[i] + (rest2 * g[i]) * g[i];
}

MFSDP_API void mfsdp__host_soap_direction(const mfsdp_precondition_args *args) {
  const float *MFSDP_RESTRICT first = args->next_exp_avg;
  const float *MFSDP_RESTRICT second = args->next_exp_avg_sq;
  float *MFSDP_RESTRICT out = args->projected;
  const float eps = (float)args->eps;
  int64_t i;
  for (i = 0; i < args->item.count; ++i)
    out[i] = first[i] / (sqrtf(second[i]) + eps);
}

/* ---- the update ---- */

/* master = master * before - step * direction, then times after; param from it. */
MFSDP_API void mfsdp__host_pre_update(const mfsdp_precondition_args *args, float before, float step,
                                      float after) {
  const mfsdp_fused_item *item = &args->item;
  const float *MFSDP_RESTRICT direction = args->direction;
  float *MFSDP_RESTRICT master = item->master;
  int64_t i;
  for (i = 0; i < item->count; ++i)
    master[i] = (master[i] * before - step * direction[i]) * after;
  if (item->param != NULL)
    mfsdp__host_cast_from_f32(item->param, (mfsdp_dtype)item->param_dtype, master, item->count);
}

MFSDP_API void mfsdp__host_pre_store_moments(const mfsdp_precondition_args *args) {
  const size_t nbytes = (size_t)args->item.count * sizeof(float);
  memcpy(args->item.state[MFSDP_STATE_EXP_AVG], args->next_exp_avg, nbytes);
  if (args->item.state[MFSDP_STATE_EXP_AVG_SQ] != NULL)
    memcpy(args->item.state[MFSDP_STATE_EXP_AVG_SQ], args->next_exp_avg_sq, nbytes);
}

MFSDP_API int mfsdp__host_pre_moments_finite(const mfsdp_precondition_args *args) {
  const int64_t count = args->item.count;
  return mfsdp__host_all_finite(args->direction, count) &&
         mfsdp__host_all_finite(args->next_exp_avg, count) &&
         (args->item.state[MFSDP_STATE_EXP_AVG_SQ] == NULL ||
          mfsdp__host_all_finite(args->next_exp_avg_sq, count));
}

/* ---- shampoo ---- */

MFSDP_API void mfsdp__host_shampoo_prepare(const mfsdp_precondition_args *args) {
  if (!mfsdp__host_pre_applies(args)) return;
  mfsdp__host_pre_grad(args);
  mfsdp__host_pre_moments(
      args, args->grad, args->item.state[MFSDP_STATE_EXP_AVG],
      args->graft == MFSDP_GRAFT_ADAMW ? args->item.state[MFSDP_STATE_EXP_AVG_SQ] : NULL);
}

/* A root that was computed has a positive diagonal. */
MFSDP_API void mfsdp__host_shampoo_roots(const mfsdp_precondition_args *args) {
  const float *root = args->item.state[MFSDP_STATE_SIDE_LEFT + args->side];
  const int64_t n = mfsdp__host_pre_length(args, args->side);
  float *to = args->next_side[args->side];
  int64_t i;
  memcpy(to, root, (size_t)(n * n) * sizeof(float));
  if (root[0] != 0.0f) return;
  for (i = 0; i < n; ++i)
    to[i * n + i] = 1.0f;
}

MFSDP_API void mfsdp__host_shampoo_scale(const mfsdp_precondition_args *args) {
  const int64_t n = mfsdp__host_pre_length(args, args->side);
  const double t = (double)args->scalars->applied_steps;
  const double c = args->gram_beta < 1.0 ? 1.0 / (1.0 - pow(args->gram_beta, t)) : 1.0;
  const double least = c * (double)args->values[0];
  const double shift = args->eps - (least < 0.0 ? least : 0.0);
  int64_t i, j;
  for (i = 0; i < n; ++i) {
    const float factor = (float)pow(c * (double)args->values[i] + shift, -0.125);
    float *row = args->square + i * n;
    for (j = 0; j < n; ++j)
      row[j] = row[j] * factor;
  }
}

/* The norm of what is grafted. */
MFSDP_API double mfsdp__host_graft_norm(const mfsdp_precondition_args *args, double t) {
  const double first = 1.0 / (1.0 - pow(args->beta1, t)),
               second = 1.0 / (1.0 - pow(args->beta2, t));
  double sum = 0.0;
  int64_t i;
  if (args->graft == MFSDP_GRAFT_SGD)
    return first * sqrt(mfsdp__host_sumsq(args->next_exp_avg, args->item.count));
  for (i = 0; i < args->item.count; ++i) {
    const double x = first * (double)args->next_exp_avg[i] /
                     (sqrt(second * (double)args->next_exp_avg_sq[i]) + args->graft_eps);
    sum += x * x;
  }
  return sqrt(sum);
}

MFSDP_API double mfsdp__host_shampoo_size(const mfsdp_precondition_args *args) {
  const double t = (double)args->scalars->applied_steps;
  double norm;
  if (args->graft == MFSDP_GRAFT_NONE) return 1.0 / (1.0 - pow(args->beta1, t));
  norm = sqrt(mfsdp__host_sumsq(args->direction, args->item.count));
  return norm > 0.0 ? mfsdp__host_graft_norm(args, t) / norm : 0.0;
}

MFSDP_API void mfsdp__host_shampoo_commit(const mfsdp_precondition_args *args) {
  const mfsdp_step_scalars *s = args->scalars;
  float step;
  if (!mfsdp__host_pre_applies(args) || !mfsdp__host_pre_moments_finite(args) ||
      !mfsdp__host_pre_sides_finite(args, args->refresh))
    return;
  step = (float)(s->lr * mfsdp__host_shampoo_size(args));
  if (!mfsdp_f32_is_finite(step)) return;
  mfsdp__host_pre_update(args, (float)(1.0 - s->lr * s->weight_decay), step, 1.0f);
  mfsdp__host_pre_store_moments(args);
  mfsdp__host_pre_store_sides(args, args->refresh);
}

/* ---- soap ---- */

MFSDP_API void mfsdp__host_soap_prepare(const mfsdp_precondition_args *args) {
  if (mfsdp__host_pre_applies(args)) mfsdp__host_pre_grad(args);
}

MFSDP_API void mfsdp__host_soap_moments(const mfsdp_precondition_args *args) {
  mfsdp__host_pre_moments(args, args->projected, args->item.state[MFSDP_STATE_EXP_AVG],
                          args->item.state[MFSDP_STATE_EXP_AVG_SQ]);
  mfsdp__host_soap_direction(args);
}

/* Descending, equal ones in their order; by insertion, since bases that change little are almost sorted
 * already. NaN stays where it is. */
MFSDP_API void mfsdp__host_sort(const double *estimate, int32_t *order, int64_t n) {
  int64_t i, k;
  for (i = 0; i < n; ++i) {
    for (k = i; k > 0 && estimate[order[k - 1]] < estimate[i]; --k)
      order[k] = order[k - 1];
    order[k] = (int32_t)i;
  }
}

/* to[i] = from[order[i]] along one side of a rows x cols matrix. */
MFSDP_API void mfsdp__host_permute(float *MFSDP_RESTRICT to, const float *MFSDP_RESTRICT from,
                                   const int32_t *order, int64_t rows, int64_t cols, int by_rows) {
  int64_t i, j;
  for (i = 0; i < rows; ++i) {
    if (by_rows)
      memcpy(to + i * cols, from + order[i] * cols, (size_t)cols * sizeof(float));
    else
      for (j = 0; j < cols; ++j)
        to[i * cols + j] = from[i * cols + order[j]];
  }
}

MFSDP_API void mfsdp__host_soap_sort(const mfsdp_precondition_args *args) {
  const float *basis = args->item.state[MFSDP_STATE_SIDE_LEFT + args->side];
  const int64_t n = mfsdp__host_pre_length(args, args->side);
  double *estimate = (double *)(void *)args->values;
  int32_t *order = (int32_t *)(void *)(estimate + n);
  int64_t i, j;
  for (i = 0; i < n; ++i) {
    double sum = 0.0;
    for (j = 0; j < n; ++j)
      sum += (double)args->square[i * n + j] * (double)basis[i * n + j];
    estimate[i] = sum;
  }
  mfsdp__host_sort(estimate, order, n);
  mfsdp__host_permute(args->next_side[args->side], args->square, order, n, n, 1);
  mfsdp__host_permute(args->other, args->next_exp_avg_sq, order, args->rows, args->cols,
                      args->side == 0);
}

MFSDP_API void mfsdp__host_soap_start(const mfsdp_precondition_args *args) {
  const int64_t n = mfsdp__host_pre_length(args, args->side);
  int64_t i;
  if (args->item.state[MFSDP_STATE_UPDATES][0] != 0.0f) return;
  for (i = 0; i < n; ++i)
    memcpy(args->next_side[args->side] + i * n, args->square + (n - 1 - i) * n,
           (size_t)n * sizeof(float));
}

MFSDP_API void mfsdp__host_soap_commit(const mfsdp_precondition_args *args) {
  const mfsdp_step_scalars *s = args->scalars;
  float *updates = args->item.state[MFSDP_STATE_UPDATES];
  const double t = (double)*updates;
  const int first = t == 0.0, stores_sides = first ? args->start : args->refresh;
  if (!mfsdp__host_pre_applies(args) || !mfsdp__host_pre_sides_finite(args, stores_sides)) return;
  /* Without sides no Gram matrix has shown it. */
  if (first && !mfsdp__host_all_finite(args->grad, args->item.count)) return;
  if (!first) {
    const double correction = sqrt(1.0 - pow(args->beta2, t)) / (1.0 - pow(args->beta1, t));
    const float step = (float)(s->lr * correction);
    if (!mfsdp__host_pre_moments_finite(args) || !mfsdp_f32_is_finite(step)) return;
    mfsdp__host_pre_update(args, 1.0f, step, (float)(1.0 - s->lr * s->weight_decay));
    mfsdp__host_pre_store_moments(args);
  }
  mfsdp__host_pre_store_sides(args, stores_sides);
  /* A float counts to 2^24 and then stays there, where no correction is left. */
  if (!first || stores_sides) *updates = *updates + 1.0f;
}

/* ---- entry ---- */

MFSDP_API mfsdp_status mfsdp__host_run_precondition(mfsdp_host_backend *host, const void *arguments,
                                                    mfsdp_error *error) {
  const mfsdp_precondition_args *args = (const mfsdp_precondition_args *)arguments;
  const int shampoo = args->op <= MFSDP_SHAMPOO_COMMIT;
  (void)host;
  if (shampoo && !args->scalars->skip && args->scalars->applied_steps < 1)
    return MFSDP_ERROR_SET(
        error, MFSDP_E_ARGUMENT, -1,
        "precondition: applied_steps is %lld; Shampoo's corrections count from 1",
        (long long)args->scalars->applied_steps);
  switch (args->op) {
  case MFSDP_SHAMPOO_PREPARE: mfsdp__host_shampoo_prepare(args); break;
  case MFSDP_SHAMPOO_ROOTS: mfsdp__host_shampoo_roots(args); break;
  case MFSDP_SHAMPOO_SCALE: mfsdp__host_shampoo_scale(args); break;
  case MFSDP_SHAMPOO_COMMIT: mfsdp__host_shampoo_commit(args); break;
  case MFSDP_SOAP_PREPARE: mfsdp__host_soap_prepare(args); break;
  case MFSDP_SOAP_MOMENTS: mfsdp__host_soap_moments(args); break;
  case MFSDP_SOAP_SORT: mfsdp__host_soap_sort(args); break;
  case MFSDP_SOAP_START: mfsdp__host_soap_start(args); break;
  case MFSDP_SOAP_COMMIT: mfsdp__host_soap_commit(args); break;
  }
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__host_precondition_entry(void *self, mfsdp_queue *queue,
                                                      const mfsdp_precondition_args *args) {
  mfsdp_host_backend *host = (mfsdp_host_backend *)self;
  if (queue == NULL || args == NULL || args->struct_nbytes != sizeof(*args))
    return MFSDP_FAIL(host->context, MFSDP_E_ARGUMENT,
                      "precondition: queue or args is NULL, or struct_nbytes is not %zu",
                      sizeof(*args));
  if (args->op < MFSDP_SHAMPOO_PREPARE || args->op > MFSDP_SOAP_COMMIT)
    return MFSDP_FAIL(host->context, MFSDP_E_UNSUPPORTED,
                      "precondition: op is %d; the host backend has those of Shampoo and SOAP",
                      (int)args->op);
  if (args->side < 0 || args->side > 1 || args->rows < 1 || args->cols < 1 ||
      args->item.count != args->rows * args->cols || args->scalars == NULL)
    return MFSDP_FAIL(host->context, MFSDP_E_ARGUMENT,
                      "precondition: side %d of %lld x %lld with %lld elements, or scalars is NULL",
                      (int)args->side, (long long)args->rows, (long long)args->cols,
                      (long long)args->item.count);
  return mfsdp__host_submit((mfsdp__host_queue *)(void *)queue, mfsdp__host_run_precondition, args,
                            sizeof(*args));
}

MFSDP_STATIC_ASSERT(sizeof(mfsdp_precondition_args) <= MFSDP__HOST_RECORD_NBYTES,
                    "an argument block does not fit into a record of the host queue");

#endif /* MFSDP_HOST_HOST_PRECONDITION_H */
