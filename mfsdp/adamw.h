/* SPDX-License-Identifier: MIT */
/*
 * adamw.h - AdamW with decoupled decay on fp32 masters, one fused pass, on a backend.
 *
 *   mfsdp_adamw_desc adamw = mfsdp_adamw_desc_default();
 *   mfsdp_fused_item item = mfsdp_adamw_item(master, grad, exp_avg, exp_avg_sq, count);
 *   mfsdp_step_scalars scalars = mfsdp_step_scalars_default(lr, weight_decay);  // DEVICE memory
 *   scalars.applied_steps = t;                                                  // 1, 2, ...
 *   MFSDP_TRY(mfsdp_adamw_commit(context, backend, queue, &adamw, &item, 1, count, count, 0,
 *                                &scalars, NULL));                              // ENQUEUED
 *
 * Update, as torch.optim.AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization",
 * 2019); the exact order of float operations stands at mfsdp_fused_args in backend.h.
 * AdamW has no direction to prepare: its whole step is the commit.
 * Does not: know ranks, allocate or wait.
 * Link flags: -lm.
 */
#ifndef MFSDP_ADAMW_H
#define MFSDP_ADAMW_H

#include "backend.h"
#include "dtype.h"

typedef struct mfsdp_adamw_desc {
  size_t struct_nbytes;
  double beta1, beta2, eps;
} mfsdp_adamw_desc;

/* torch's defaults: betas 0.9 and 0.999, eps 1e-8. */
MFSDP_API mfsdp_adamw_desc mfsdp_adamw_desc_default(void) {
  mfsdp_adamw_desc desc;
  desc.struct_nbytes = sizeof(desc);
  desc.beta1 = 0.9;
  desc.beta2 = 0.999;
  desc.eps = 1e-8;
  return desc;
}

/* E_ARGUMENT with the field, its value and what it needs. */
MFSDP_API mfsdp_status mfsdp_adamw_check(mfsdp_context *context, const mfsdp_adamw_desc *desc) {
  if (desc == NULL || desc->struct_nbytes != sizeof(*desc))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "adamw: desc is NULL or its struct_nbytes is not %zu (use "
                      "mfsdp_adamw_desc_default)",
                      sizeof(*desc));
  if (!(desc->beta1 >= 0.0 && desc->beta1 < 1.0) || !(desc->beta2 >= 0.0 && desc->beta2 < 1.0))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "adamw: betas are %g and %g, need to be in [0, 1)",
                      desc->beta1, desc->beta2);
  if (!mfsdp_f32_is_positive(desc->eps))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "adamw: eps is %g, needs to be positive, and 1.2e-38 to 3.4e38", desc->eps);
  return MFSDP_OK;
}

/* One piece of `count` elements, all DEVICE, fp32: master and states are updated, grad is read. */
MFSDP_API mfsdp_fused_item mfsdp_adamw_item(float *master, const float *grad, float *exp_avg,
                                            float *exp_avg_sq, int64_t count) {
  mfsdp_fused_item item;
  memset(&item, 0, sizeof(item));
  item.master = master;
  item.grad = grad;
  item.state[0] = exp_avg;
  item.state[1] = exp_avg_sq;
  item.count = count;
  item.scale = 1.0;
  item.param_dtype = MFSDP_F32;
  return item;
}

/*
 * Updates item_count pieces in one pass. `items`, `scalars` and `present` (NULL: all present) lie
 * in DEVICE space; clipped 1: clip_scale multiplies the gradient; 0: it does not; else E_ARGUMENT.
 * ENQUEUED. max_count and total_count are the largest and the summed item.count.
 */
MFSDP_API mfsdp_status mfsdp_adamw_commit(mfsdp_context *context, const mfsdp_backend *backend,
                                          mfsdp_queue *queue, const mfsdp_adamw_desc *desc,
                                          const mfsdp_fused_item *items, int32_t item_count,
                                          int64_t max_count, int64_t total_count, int32_t clipped,
                                          const mfsdp_step_scalars *scalars,
                                          const uint32_t *present) {
  mfsdp_fused_args args;
  MFSDP_TRY(mfsdp_adamw_check(context, desc));
  MFSDP_TRY(mfsdp__flag_check(context, "adamw", "clipped", clipped));
  if (item_count == 0) return MFSDP_OK;
  memset(&args, 0, sizeof(args));
  args.struct_nbytes = sizeof(args);
  args.op = MFSDP_FUSED_ADAMW;
  args.items = items;
  args.item_count = item_count;
  args.max_count = max_count;
  args.total_count = total_count;
  args.scalars = scalars;
  args.present = present;
  args.clipped = clipped;
  args.beta1 = desc->beta1;
  args.beta2 = desc->beta2;
  args.eps = desc->eps;
  return backend->ops->fused(backend->self, queue, &args);
}

#endif /* MFSDP_ADAMW_H */
