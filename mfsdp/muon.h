/* SPDX-License-Identifier: MIT */
/*
 * muon.h - Muon on one whole matrix: momentum, Newton-Schulz, decoupled decay, step; on a backend.
 *
 *   mfsdp_muon_desc muon = mfsdp_muon_desc_preset(MFSDP_MUON_TORCH);
 *   size_t nbytes = 0;
 *   MFSDP_TRY(mfsdp_newton_schulz_workspace_nbytes(context, &muon.newton_schulz, rows, cols, &nbytes));
 *   mfsdp_fused_item item =                       // `direction`: rows * cols floats of scratch
 *     mfsdp_muon_item(&muon, rows, cols, master, grad, momentum, direction);   // DEVICE memory
 *   mfsdp_step_scalars scalars = mfsdp_step_scalars_default(0.02, 0.1);        // DEVICE memory
 *   MFSDP_TRY(mfsdp_muon_step(context, backend, queue, &muon, rows, cols, direction, &item, 0,
 *                             &scalars, NULL, workspace, nbytes));             // ENQUEUED
 *
 * A step is prepare (direction from momentum and gradient, then its orthogonalization in place; the
 * state is only read) and commit (one predicated pass that writes momentum, master and parameter).
 * Bytes moved by the element-wise part, in floats per element: prepare reads 2 and writes 1, commit
 * reads 4 and writes 2.
 * Order in every preset: momentum, Newton-Schulz, W = (1 - lr wd) W, W = W - lr s X.
 * Sources: KellerJordan/Muon; torch.optim.Muon.
 * Does not: know ranks, allocate or wait.
 * Link flags: -lm.
 */
#ifndef MFSDP_MUON_H
#define MFSDP_MUON_H

#include "newton_schulz.h"

#include <math.h>

/* The factor s of the step for an m x n matrix (rows = outputs). */
typedef enum mfsdp_muon_scale {
  MFSDP_MUON_SCALE_ORIGINAL = 1,   /* sqrt(max(1, m / n)) */
  MFSDP_MUON_SCALE_MATCH_RMS_ADAMW /* 0.2 sqrt(max(m, n)) */
} mfsdp_muon_scale;

typedef enum mfsdp_muon_preset {
  MFSDP_MUON_TORCH = 1, /* torch.optim.Muon: lr 1e-3, decay 0.1 */
  MFSDP_MUON_JORDAN     /* KellerJordan/Muon: lr 0.02, no decay */
} mfsdp_muon_preset;

typedef struct mfsdp_muon_desc {
  size_t struct_nbytes;
  double default_lr,
      default_weight_decay; /* what the preset's source uses; groups start from them */
  double momentum;          /* mu */
  double grad_weight;       /* B = mu B + grad_weight G: 1 - mu for an average, 1 for a sum */
  double nesterov_weight;   /* nesterov direction: nesterov_weight G + mu B */
  int32_t nesterov;         /* 0: the direction is B */
  mfsdp_muon_scale scale;
  mfsdp_newton_schulz_desc newton_schulz;
} mfsdp_muon_desc;

/* The choices of a public implementation under one name. Both presets average the gradient and use
 * nesterov; their eps rule is SCALE_SAFE (set newton_schulz.norm_rule for the source's own). An
 * unknown preset gives a description that mfsdp_muon_check refuses. */
MFSDP_API mfsdp_muon_desc mfsdp_muon_desc_preset(mfsdp_muon_preset preset) {
  mfsdp_muon_desc desc;
  memset(&desc, 0, sizeof(desc));
  if (preset != MFSDP_MUON_TORCH && preset != MFSDP_MUON_JORDAN) return desc;
  desc.struct_nbytes = sizeof(desc);
  desc.momentum = 0.95;
  desc.grad_weight = 1.0 - 0.95;
  desc.nesterov_weight = 1.0 - 0.95;
  desc.nesterov = 1;
  desc.scale = MFSDP_MUON_SCALE_ORIGINAL;
  desc.newton_schulz = mfsdp_newton_schulz_desc_default();
  desc.default_lr = preset == MFSDP_MUON_TORCH ? 1e-3 : 0.02;
  desc.default_weight_decay = preset == MFSDP_MUON_TORCH ? 0.1 : 0.0;
  return desc;
}

/* E_ARGUMENT with the field, its value and what it needs. */
MFSDP_API mfsdp_status mfsdp_muon_check(mfsdp_context *context, const mfsdp_muon_desc *desc) {
  if (desc == NULL || desc->struct_nbytes != sizeof(*desc))
    return MFSDP_FAIL(
        context, MFSDP_E_ARGUMENT,
        "muon: desc is NULL, of an unknown preset, or its struct_nbytes is not %zu (use "
        "mfsdp_muon_desc_preset)",
        sizeof(*desc));
  if (!(desc->momentum >= 0.0 && desc->momentum < 1.0))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "muon: momentum is %g, needs to be in [0, 1)",
                      desc->momentum);
  if (!(desc->grad_weight > 0.0))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "muon: grad_weight is %g, needs to be positive",
                      desc->grad_weight);
  if (desc->nesterov && !(desc->nesterov_weight > 0.0))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "muon: nesterov_weight is %g, needs to be positive", desc->nesterov_weight);
  if (desc->scale != MFSDP_MUON_SCALE_ORIGINAL && desc->scale != MFSDP_MUON_SCALE_MATCH_RMS_ADAMW)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "muon: scale is %d, needs %d or %d",
                      (int)desc->scale, (int)MFSDP_MUON_SCALE_ORIGINAL,
                      (int)MFSDP_MUON_SCALE_MATCH_RMS_ADAMW);
  return mfsdp_newton_schulz_check(context, &desc->newton_schulz);
}

/* s for a rows x cols matrix: always the planned matrix, never the shape of its tensor. */
MFSDP_API double mfsdp_muon_scale_of(const mfsdp_muon_desc *desc, int64_t rows, int64_t cols) {
  const double m = (double)rows, n = (double)cols;
  if (rows == 0 || cols == 0) return 1.0;
  if (desc->scale == MFSDP_MUON_SCALE_MATCH_RMS_ADAMW) return 0.2 * sqrt(m > n ? m : n);
  return m > n ? sqrt(m / n) : 1.0;
}

/* One matrix, all pointers DEVICE, fp32, row-major, contiguous: master and momentum are updated,
 * grad is read, direction is scratch between prepare and commit. */
MFSDP_API mfsdp_fused_item mfsdp_muon_item(const mfsdp_muon_desc *desc, int64_t rows, int64_t cols,
                                           float *master, const float *grad, float *momentum,
                                           float *direction) {
  mfsdp_fused_item item;
  memset(&item, 0, sizeof(item));
  item.master = master;
  item.grad = grad;
  item.state[0] = momentum;
  item.direction = direction;
  item.count = rows * cols;
  item.scale = mfsdp_muon_scale_of(desc, rows, cols);
  item.param_dtype = MFSDP_F32;
  return item;
}

MFSDP_API mfsdp_fused_args mfsdp__muon_pass(const mfsdp_muon_desc *desc, mfsdp_fused_op op,
                                            const mfsdp_fused_item *item, int64_t count,
                                            int32_t clipped, const mfsdp_step_scalars *scalars,
                                            const uint32_t *present) {
  mfsdp_fused_args args;
  memset(&args, 0, sizeof(args));
  args.struct_nbytes = sizeof(args);
  args.op = op;
  args.items = item;
  args.item_count = 1;
  args.max_count = count;
  args.total_count = count;
  args.scalars = scalars;
  args.present = present;
  args.clipped = clipped;
  args.nesterov = desc->nesterov;
  args.momentum = desc->momentum;
  args.grad_weight = desc->grad_weight;
  args.nesterov_weight = desc->nesterov_weight;
  return args;
}

/*
 * Writes the orthogonalized direction of one rows x cols matrix; `item` (DEVICE, one entry) names
 * its arrays and `direction` repeats item->direction, which the host cannot read on a device. State
 * and parameter are only read. ENQUEUED. E_ARGUMENT as mfsdp_muon_check and mfsdp_newton_schulz,
 * before anything is enqueued. A matrix without elements is legal and does nothing.
 */
MFSDP_API mfsdp_status mfsdp_muon_prepare(mfsdp_context *context, const mfsdp_backend *backend,
                                          mfsdp_queue *queue, const mfsdp_muon_desc *desc,
                                          int64_t rows, int64_t cols, float *direction,
                                          const mfsdp_fused_item *item, int32_t clipped,
                                          const mfsdp_step_scalars *scalars,
                                          const uint32_t *present, void *workspace,
                                          size_t workspace_nbytes) {
  mfsdp__ns_layout layout;
  mfsdp_fused_args args;
  MFSDP_TRY(mfsdp_muon_check(context, desc));
  /* Newton-Schulz would check the same, but only after the first pass has been enqueued. */
  MFSDP_TRY(mfsdp__ns_layout_of(context, &desc->newton_schulz, rows, cols, 1, &layout));
  if (rows == 0 || cols == 0) return MFSDP_OK;
  MFSDP_TRY(mfsdp__ns_arguments(context, rows * cols, 1, direction, 0, direction, 0, workspace,
                                workspace_nbytes, layout.nbytes));
  args = mfsdp__muon_pass(desc, MFSDP_FUSED_MUON_PREPARE, item, rows * cols, clipped, scalars,
                          present);
  MFSDP_TRY(backend->ops->fused(backend->self, queue, &args));
  return mfsdp_newton_schulz(context, backend, queue, &desc->newton_schulz, rows, cols, direction,
                             direction, workspace, workspace_nbytes);
}

/* One predicated pass: momentum, master and parameter of one matrix from what prepare left in its
 * direction. ENQUEUED. */
MFSDP_API mfsdp_status mfsdp_muon_commit(mfsdp_context *context, const mfsdp_backend *backend,
                                         mfsdp_queue *queue, const mfsdp_muon_desc *desc,
                                         int64_t rows, int64_t cols, const mfsdp_fused_item *item,
                                         int32_t clipped, const mfsdp_step_scalars *scalars,
                                         const uint32_t *present) {
  mfsdp__ns_layout layout;
  mfsdp_fused_args args;
  MFSDP_TRY(mfsdp_muon_check(context, desc));
  MFSDP_TRY(mfsdp__ns_layout_of(context, &desc->newton_schulz, rows, cols, 1,
                                &layout)); /* a shape that makes sense */
  if (rows == 0 || cols == 0) return MFSDP_OK;
  args =
      mfsdp__muon_pass(desc, MFSDP_FUSED_MUON_COMMIT, item, rows * cols, clipped, scalars, present);
  return backend->ops->fused(backend->self, queue, &args);
}

/* prepare, then commit. ENQUEUED. */
MFSDP_API mfsdp_status mfsdp_muon_step(mfsdp_context *context, const mfsdp_backend *backend,
                                       mfsdp_queue *queue, const mfsdp_muon_desc *desc,
                                       int64_t rows, int64_t cols, float *direction,
                                       const mfsdp_fused_item *item, int32_t clipped,
                                       const mfsdp_step_scalars *scalars, const uint32_t *present,
                                       void *workspace, size_t workspace_nbytes) {
  MFSDP_TRY(mfsdp_muon_prepare(context, backend, queue, desc, rows, cols, direction, item, clipped,
                               scalars, present, workspace, workspace_nbytes));
  return mfsdp_muon_commit(context, backend, queue, desc, rows, cols, item, clipped, scalars,
                           present);
}

#endif /* MFSDP_MUON_H */
