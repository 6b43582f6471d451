/* SPDX-License-Identifier: MIT */
/*
 * host_verdict.h - the host backend's fold of all ranks' scalar messages into the step's scalars.
 *
 *   mfsdp__host_verdict(&args);   // args checked by backend_host.h; formulas at mfsdp_verdict_args
 *
 * Every loop runs in tensor order or sample order, which do not depend on the number of ranks; so
 * do the bits of the norm, the clip factor and the mean.
 *
 * Internal to backend_host.h. Link flags: -lm.
 */
#ifndef MFSDP_HOST_HOST_VERDICT_H
#define MFSDP_HOST_HOST_VERDICT_H

#include "../backend.h"
#include "../dtype.h"

#include <math.h>

/* Sums in sample order: entry j is micro-batch j / world of rank j % world. */
typedef struct mfsdp__host_values {
  double value_sum, weight_sum; /* weighted: value_sum is of weight * value */
} mfsdp__host_values;

MFSDP_API mfsdp__host_values mfsdp__host_sum_values(const mfsdp_verdict_args *args) {
  mfsdp__host_values sums = {0.0, 0.0};
  int32_t j;
  for (j = 0; j < args->value_count; ++j) {
    const uint64_t *entry = args->messages + args->rank_word[j % args->world] + 1 + j / args->world;
    const double value = mfsdp_f64_from_bits(entry[0]);
    const double weight = args->weighted ? mfsdp_f64_from_bits(entry[args->value_capacity]) : 1.0;
    if (weight > 0.0)
      sums.value_sum += args->weighted ? weight * value : value; /* 0 x NaN is NaN */
    sums.weight_sum += weight;
  }
  return sums;
}

MFSDP_API double mfsdp__host_value_mean(const mfsdp_verdict_args *args, mfsdp__host_values sums) {
  if (args->value_count == 0) return mfsdp_f64_from_bits(UINT64_C(0x7ff8000000000000));
  return sums.value_sum / (args->weighted ? sums.weight_sum : (double)args->value_count);
}

/* What the summed gradient is multiplied by. */
MFSDP_API double mfsdp__host_grad_scale(const mfsdp_verdict_args *args, mfsdp__host_values sums) {
  const double scale = args->grad_scale / args->loss_scale;
  return args->weighted ? scale / sums.weight_sum : scale;
}

/* present[p] = some rank had a gradient, or the policy says that a missing one is zero. */
MFSDP_API void mfsdp__host_presence(const mfsdp_verdict_args *args) {
  const int64_t first = 1 + (int64_t)args->value_capacity * (args->weighted ? 2 : 1);
  int32_t p, rank;
  for (p = 0; p < args->param_count; ++p) {
    uint64_t any = args->missing_is_zero ? 1u : 0u;
    for (rank = 0; rank < args->world; ++rank) {
      const uint64_t *message = args->messages + args->rank_word[rank];
      any |= (message[first + p / 64] >> (p % 64)) & 1u;
    }
    args->present[p] = (uint32_t)any;
  }
}

/* The first rank that was told of another step than rank 0; -1: none. */
MFSDP_API int64_t mfsdp__host_differing_rank(const mfsdp_verdict_args *args) {
  const uint64_t first = args->messages[args->rank_word[0]] | MFSDP_MESSAGE_STOP;
  int32_t rank;
  for (rank = 1; rank < args->world; ++rank)
    if ((args->messages[args->rank_word[rank]] | MFSDP_MESSAGE_STOP) != first) return rank;
  return -1;
}

/* 2^127: half of the largest float, so that no rounding goes beyond it. */
#define MFSDP__HOST_LARGEST_GRAD 1.70141183460469231732e+38

/* Whether the scaled gradient is finite in the floats that the update takes it in; the sums
 * themselves may be finite where it is not. */
MFSDP_API int mfsdp__host_grad_fits(double norm, double scale) {
  return norm <= MFSDP__HOST_LARGEST_GRAD && fabs(scale) <= MFSDP__HOST_LARGEST_GRAD;
}

MFSDP_API void mfsdp__host_verdict(const mfsdp_verdict_args *args) {
  mfsdp_verdict_record record;
  const mfsdp__host_values values = mfsdp__host_sum_values(args);
  const double scale = mfsdp__host_grad_scale(args, values);
  double sum = 0.0, ratio;
  int64_t b;
  int32_t rank, group;
  memset(&record, 0, sizeof(record));
  for (b = 0; b < args->block_count; ++b)
    sum += mfsdp_f64_from_bits(args->messages[args->block_word[b]]);
  for (rank = 0; rank < args->world; ++rank)
    if (args->messages[args->rank_word[rank]] & MFSDP_MESSAGE_STOP) record.stop = 1;
  record.differs = mfsdp__host_differing_rank(args);
  record.grad_norm = sqrt(sum) * fabs(scale);
  record.skip = mfsdp_f64_is_finite(sum) && record.differs < 0 ? 0u : 1u;
  if (!mfsdp__host_grad_fits(record.grad_norm, scale)) record.skip = 1u;
  if (args->weighted && !(values.weight_sum > 0.0 && mfsdp_f64_is_finite(scale))) record.skip = 1u;
  ratio = args->clip_norm > 0.0 ? args->clip_norm / (record.grad_norm + 1e-6) : 1.0;
  record.clip_scale = ratio < 1.0 ? ratio : 1.0; /* 1 too where the norm is not a number */
  record.value_mean = mfsdp__host_value_mean(args, values);
  record.weight_sum = args->weighted ? values.weight_sum : 0.0;
  mfsdp__host_presence(args);
  for (group = 0; group < args->group_count; ++group) {
    mfsdp_step_scalars *scalars = &args->scalars[group];
    scalars->lr = args->rates[group].lr * args->lr_factor;
    scalars->weight_decay = args->rates[group].weight_decay;
    scalars->grad_scale = scale;
    scalars->clip_scale = record.clip_scale;
    if (!record.skip) ++scalars->applied_steps;
    scalars->skip = record.skip;
    scalars->stop = record.stop;
  }
  record.applied_steps = args->scalars[0].applied_steps;
  *args->record = record;
}

#endif /* MFSDP_HOST_HOST_VERDICT_H */
