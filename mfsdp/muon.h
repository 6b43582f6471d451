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
 * Several matrices of one shape: mfsdp_muon_batch_step, the same bits in fewer calls.
 * Sources: KellerJordan/Muon; torch.optim.Muon; MoonshotAI/Moonlight; microsoft/dion.
 * Does not: know ranks, allocate or wait.
 * Link flags: -lm.
 */
#ifndef MFSDP_MUON_H
#define MFSDP_MUON_H

#include "dtype.h"
#include "newton_schulz.h"

#include <math.h>

/* The factor s of the step for an m x n matrix (rows = outputs). */
typedef enum mfsdp_muon_scale {
  MFSDP_MUON_SCALE_ORIGINAL = 1,    /* sqrt(max(1, m / n)) */
  MFSDP_MUON_SCALE_MATCH_RMS_ADAMW, /* 0.2 sqrt(max(m, n)) */
  MFSDP_MUON_SCALE_SPECTRAL,        /* sqrt(m / n) */
  MFSDP_MUON_SCALE_NONE             /* 1 */
} mfsdp_muon_scale;

/* X(NAME, "name"): public implementations whose choices a preset bundles. */
#define MFSDP_MUON_PRESETS(X)                                                             \
  X(TORCH, "torch")         /* torch.optim.Muon: lr 1e-3, decay 0.1 */                    \
  X(JORDAN, "jordan")       /* KellerJordan/Muon: lr 0.02, no decay */                    \
  X(MOONLIGHT, "moonlight") /* MoonshotAI/Moonlight: momentum is a sum, RMS as AdamW's */ \
  X(DION, "dion")           /* microsoft/dion's Muon: no nesterov, Polar Express, sqrt(m / n) */

typedef enum mfsdp_muon_preset {
  MFSDP_MUON_NONE = 0,
#define MFSDP__MUON_ENUM(NAME, name) MFSDP_MUON_##NAME,
  MFSDP_MUON_PRESETS(MFSDP__MUON_ENUM)
#undef MFSDP__MUON_ENUM
      MFSDP_MUON_END
} mfsdp_muon_preset;

/* In lower case, as "torch"; "invalid" for none; never NULL. */
MFSDP_API const char *mfsdp_muon_preset_name(mfsdp_muon_preset preset) {
  switch (preset) {
#define MFSDP__MUON_CASE(NAME, name) \
  case MFSDP_MUON_##NAME: return name;
    MFSDP_MUON_PRESETS(MFSDP__MUON_CASE)
#undef MFSDP__MUON_CASE
  case MFSDP_MUON_NONE:
  case MFSDP_MUON_END: break;
  }
  return "invalid";
}

/* The preset of that name, or MFSDP_MUON_NONE. NULL is allowed. */
MFSDP_API mfsdp_muon_preset mfsdp_muon_preset_by_name(const char *text) {
#define MFSDP__MUON_CASE(NAME, name) \
  if (text != NULL && strcmp(text, name) == 0) return MFSDP_MUON_##NAME;
  MFSDP_MUON_PRESETS(MFSDP__MUON_CASE)
#undef MFSDP__MUON_CASE
  return MFSDP_MUON_NONE;
}

typedef struct mfsdp_muon_desc {
  size_t struct_nbytes;
  double default_lr,
      default_weight_decay; /* what the preset's source uses; groups start from them */
  double momentum;          /* mu */
  double grad_weight;       /* B = mu B + grad_weight G: 1 - mu for an average, 1 for a sum */
  double nesterov_weight;   /* nesterov direction: nesterov_weight G + mu B */
  int32_t nesterov;         /* 0 or 1; 0: the direction is B */
  mfsdp_muon_scale scale;
  /* 1: NorMuon (Li et al., "NorMuon", 2025): after Newton-Schulz each row is divided by the root of
   * its second moment, an average over steps, and all together are brought back to the old norm.
   * One more state array, a number per row; the next two are read only then. */
  int32_t normalize_rows;
  double row_beta2, row_eps;
  mfsdp_newton_schulz_desc newton_schulz;
} mfsdp_muon_desc;

/*
 * The choices of a public implementation under one name. In every preset the eps rule is SCALE_SAFE
 * (set newton_schulz.norm_rule for the source's own), and rows are not normalized. Moonlight and dion
 * sum the gradient instead of averaging it. dion: the norm and the coefficients both carry Polar
 * Express's safety factor 1.01; its lr and decay here are torch's. An unknown preset gives a
 * description that mfsdp_muon_check refuses.
 */
MFSDP_API mfsdp_muon_desc mfsdp_muon_desc_preset(mfsdp_muon_preset preset) {
  mfsdp_muon_desc desc;
  memset(&desc, 0, sizeof(desc));
  if (preset <= MFSDP_MUON_NONE || preset >= MFSDP_MUON_END) return desc;
  desc.struct_nbytes = sizeof(desc);
  desc.momentum = 0.95;
  desc.grad_weight = 1.0 - 0.95;
  desc.nesterov_weight = 1.0 - 0.95;
  desc.nesterov = 1;
  desc.scale = MFSDP_MUON_SCALE_ORIGINAL;
  desc.row_beta2 = 0.95;
  desc.row_eps = 1e-10;
  desc.newton_schulz = mfsdp_newton_schulz_desc_default();
  desc.default_lr = preset == MFSDP_MUON_JORDAN ? 0.02 : 1e-3;
  desc.default_weight_decay = preset == MFSDP_MUON_JORDAN ? 0.0 : 0.1;
  if (preset == MFSDP_MUON_MOONLIGHT || preset == MFSDP_MUON_DION)
    desc.grad_weight = desc.nesterov_weight = 1.0;
  if (preset == MFSDP_MUON_MOONLIGHT) desc.scale = MFSDP_MUON_SCALE_MATCH_RMS_ADAMW;
  if (preset == MFSDP_MUON_DION) {
    desc.nesterov = 0;
    desc.scale = MFSDP_MUON_SCALE_SPECTRAL;
    desc.newton_schulz = mfsdp_newton_schulz_desc_of(MFSDP_NS_SET_POLAR_EXPRESS);
    desc.newton_schulz.norm_factor = 1.01;
  }
  return desc;
}

MFSDP_API mfsdp_status mfsdp__muon_check_rows(mfsdp_context *context, const mfsdp_muon_desc *desc) {
  MFSDP_TRY(mfsdp__flag_check(context, "muon", "normalize_rows", desc->normalize_rows));
  if (!desc->normalize_rows) return MFSDP_OK;
  if (!(desc->row_beta2 >= 0.0 && desc->row_beta2 < 1.0))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "muon: row_beta2 is %g, needs to be in [0, 1)",
                      desc->row_beta2);
  if (!mfsdp_f32_is_positive(desc->row_eps))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "muon: row_eps is %g, needs to be positive, and 1.2e-38 to 3.4e38",
                      desc->row_eps);
  return MFSDP_OK;
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
  if (!mfsdp_f32_is_positive(desc->grad_weight))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "muon: grad_weight is %g, needs to be positive, and 1.2e-38 to 3.4e38",
                      desc->grad_weight);
  MFSDP_TRY(mfsdp__flag_check(context, "muon", "nesterov", desc->nesterov));
  if (desc->nesterov && !mfsdp_f32_is_positive(desc->nesterov_weight))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "muon: nesterov_weight is %g, needs to be positive, and 1.2e-38 to 3.4e38",
                      desc->nesterov_weight);
  if (desc->scale < MFSDP_MUON_SCALE_ORIGINAL || desc->scale > MFSDP_MUON_SCALE_NONE)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "muon: scale is %d, needs %d to %d",
                      (int)desc->scale, (int)MFSDP_MUON_SCALE_ORIGINAL, (int)MFSDP_MUON_SCALE_NONE);
  MFSDP_TRY(mfsdp__muon_check_rows(context, desc));
  return mfsdp_newton_schulz_check(context, &desc->newton_schulz);
}

/* s for a rows x cols matrix: always the planned matrix, never the shape of its tensor. */
MFSDP_API double mfsdp_muon_scale_of(const mfsdp_muon_desc *desc, int64_t rows, int64_t cols) {
  const double m = (double)rows, n = (double)cols;
  if (rows == 0 || cols == 0 || desc->scale == MFSDP_MUON_SCALE_NONE) return 1.0;
  if (desc->scale == MFSDP_MUON_SCALE_MATCH_RMS_ADAMW) return 0.2 * sqrt(m > n ? m : n);
  if (desc->scale == MFSDP_MUON_SCALE_SPECTRAL) return sqrt(m / n);
  return m > n ? sqrt(m / n) : 1.0;
}

/* One matrix, all pointers DEVICE, fp32, row-major, contiguous: master and momentum are updated,
 * grad is read, direction is scratch between prepare and commit. A shape that overflows gives a count
 * of -1, which no pass takes. With normalize_rows the caller sets
 * item.state[1] too: `rows` floats, zeros at first. */
MFSDP_API mfsdp_fused_item mfsdp_muon_item(const mfsdp_muon_desc *desc, int64_t rows, int64_t cols,
                                           float *master, const float *grad, float *momentum,
                                           float *direction) {
  mfsdp_fused_item item;
  memset(&item, 0, sizeof(item));
  item.master = master;
  item.grad = grad;
  item.state[0] = momentum;
  item.direction = direction;
  if (!mfsdp_i64_mul(rows, cols, &item.count)) item.count = -1;
  item.rows = rows;
  item.scale = mfsdp_muon_scale_of(desc, rows, cols);
  item.param_dtype = MFSDP_F32;
  return item;
}

MFSDP_API mfsdp_fused_args mfsdp__muon_pass(const mfsdp_muon_desc *desc, mfsdp_fused_op op,
                                            const mfsdp_fused_item *items, int32_t item_count,
                                            int64_t max_count, int64_t total_count, int32_t clipped,
                                            const mfsdp_step_scalars *scalars,
                                            const uint32_t *present) {
  mfsdp_fused_args args;
  memset(&args, 0, sizeof(args));
  args.struct_nbytes = sizeof(args);
  args.op = op;
  args.items = items;
  args.item_count = item_count;
  args.max_count = max_count;
  args.total_count = total_count;
  args.scalars = scalars;
  args.present = present;
  args.clipped = clipped;
  args.nesterov = desc->nesterov;
  args.momentum = desc->momentum;
  args.grad_weight = desc->grad_weight;
  args.nesterov_weight = desc->nesterov_weight;
  args.beta2 = desc->row_beta2;
  args.eps = desc->row_eps;
  return args;
}

/*
 * The momentum pass alone: each item's direction from its gradient and momentum, which are only read.
 * Items may have any counts: matrices of several shapes, or bands of matrices that a caller brings
 * together for mfsdp_newton_schulz. max_count and total_count: of their counts. clipped 1: clip_scale
 * multiplies the gradient. ENQUEUED. E_ARGUMENT as mfsdp_muon_check, and where clipped is neither 0
 * nor 1.
 */
MFSDP_API mfsdp_status mfsdp_muon_items_prepare(mfsdp_context *context,
                                                const mfsdp_backend *backend, mfsdp_queue *queue,
                                                const mfsdp_muon_desc *desc,
                                                const mfsdp_fused_item *items, int32_t item_count,
                                                int64_t max_count, int64_t total_count,
                                                int32_t clipped, const mfsdp_step_scalars *scalars,
                                                const uint32_t *present) {
  mfsdp_fused_args args;
  MFSDP_TRY(mfsdp_muon_check(context, desc));
  MFSDP_TRY(mfsdp__flag_check(context, "muon", "clipped", clipped));
  if (item_count == 0) return MFSDP_OK;
  args = mfsdp__muon_pass(desc, MFSDP_FUSED_MUON_PREPARE, items, item_count, max_count, total_count,
                          clipped, scalars, present);
  return backend->ops->fused(backend->self, queue, &args);
}

/* The last pass alone (normalize_rows: the last two, which need whole matrices): momentum, master and
 * parameter of items of any counts from their directions, which hold orthogonalized values now.
 * ENQUEUED. E_ARGUMENT as mfsdp_muon_items_prepare. */
MFSDP_API mfsdp_status mfsdp_muon_items_commit(mfsdp_context *context, const mfsdp_backend *backend,
                                               mfsdp_queue *queue, const mfsdp_muon_desc *desc,
                                               const mfsdp_fused_item *items, int32_t item_count,
                                               int64_t max_count, int64_t total_count,
                                               int32_t clipped, const mfsdp_step_scalars *scalars,
                                               const uint32_t *present) {
  mfsdp_fused_args args;
  MFSDP_TRY(mfsdp_muon_check(context, desc));
  MFSDP_TRY(mfsdp__flag_check(context, "muon", "clipped", clipped));
  if (item_count == 0) return MFSDP_OK;
  args = mfsdp__muon_pass(desc, MFSDP_FUSED_MUON_ROWS, items, item_count, max_count, total_count,
                          clipped, scalars, present);
  if (desc->normalize_rows) MFSDP_TRY(backend->ops->fused(backend->self, queue, &args));
  args.op = MFSDP_FUSED_MUON_COMMIT;
  return backend->ops->fused(backend->self, queue, &args);
}

/*
 * Writes the orthogonalized directions of item_count rows x cols matrices; `items` (DEVICE) names
 * their arrays, and item i's direction lies i * direction_stride elements behind `direction`, which
 * repeats what the host cannot read on a device. Each gets the bits it would get alone. State and
 * parameter are only read. `workspace`: mfsdp_newton_schulz_batch_workspace_nbytes, aligned to
 * MFSDP_ALIGN_NBYTES. ENQUEUED.
 * E_ARGUMENT as mfsdp_muon_items_prepare and mfsdp_newton_schulz_batch, before anything is enqueued.
 * Matrices without elements are legal and nothing is done.
 */
MFSDP_API mfsdp_status mfsdp_muon_batch_prepare(
    mfsdp_context *context, const mfsdp_backend *backend, mfsdp_queue *queue,
    const mfsdp_muon_desc *desc, int64_t rows, int64_t cols, int32_t item_count, float *direction,
    int64_t direction_stride, const mfsdp_fused_item *items, int32_t clipped,
    const mfsdp_step_scalars *scalars, const uint32_t *present, void *workspace,
    size_t workspace_nbytes) {
  mfsdp__ns_layout layout;
  MFSDP_TRY(mfsdp_muon_check(context, desc));
  /* Newton-Schulz would check the same, but only after the first pass has been enqueued. */
  MFSDP_TRY(
      mfsdp__ns_layout_of(context, &desc->newton_schulz, rows, cols, (int64_t)item_count, &layout));
  if (rows == 0 || cols == 0 || item_count == 0) return MFSDP_OK;
  MFSDP_TRY(mfsdp__ns_arguments(context, rows * cols, item_count, direction, direction_stride,
                                direction, direction_stride, workspace, workspace_nbytes,
                                layout.nbytes));
  MFSDP_TRY(mfsdp_muon_items_prepare(context, backend, queue, desc, items, item_count, rows * cols,
                                     rows * cols * item_count, clipped, scalars, present));
  return mfsdp_newton_schulz_batch(context, backend, queue, &desc->newton_schulz, rows, cols,
                                   item_count, direction, direction_stride, direction,
                                   direction_stride, workspace, workspace_nbytes);
}

/* One predicated pass (normalize_rows: one more before it): momentum, master and parameter of
 * item_count matrices from what prepare left in their directions. ENQUEUED. */
MFSDP_API mfsdp_status mfsdp_muon_batch_commit(mfsdp_context *context, const mfsdp_backend *backend,
                                               mfsdp_queue *queue, const mfsdp_muon_desc *desc,
                                               int64_t rows, int64_t cols, int32_t item_count,
                                               const mfsdp_fused_item *items, int32_t clipped,
                                               const mfsdp_step_scalars *scalars,
                                               const uint32_t *present) {
  mfsdp__ns_layout layout;
  MFSDP_TRY(mfsdp_muon_check(context, desc));
  /* A shape that makes sense. */
  MFSDP_TRY(
      mfsdp__ns_layout_of(context, &desc->newton_schulz, rows, cols, (int64_t)item_count, &layout));
  if (rows == 0 || cols == 0 || item_count == 0) return MFSDP_OK;
  return mfsdp_muon_items_commit(context, backend, queue, desc, items, item_count, rows * cols,
                                 rows * cols * item_count, clipped, scalars, present);
}

/* prepare, then commit. ENQUEUED. */
MFSDP_API mfsdp_status mfsdp_muon_batch_step(mfsdp_context *context, const mfsdp_backend *backend,
                                             mfsdp_queue *queue, const mfsdp_muon_desc *desc,
                                             int64_t rows, int64_t cols, int32_t item_count,
                                             float *direction, int64_t direction_stride,
                                             const mfsdp_fused_item *items, int32_t clipped,
                                             const mfsdp_step_scalars *scalars,
                                             const uint32_t *present, void *workspace,
                                             size_t workspace_nbytes) {
  MFSDP_TRY(mfsdp_muon_batch_prepare(context, backend, queue, desc, rows, cols, item_count,
                                     direction, direction_stride, items, clipped, scalars, present,
                                     workspace, workspace_nbytes));
  return mfsdp_muon_batch_commit(context, backend, queue, desc, rows, cols, item_count, items,
                                 clipped, scalars, present);
}

/* One matrix: mfsdp_muon_batch_prepare with one item. */
MFSDP_API mfsdp_status mfsdp_muon_prepare(mfsdp_context *context, const mfsdp_backend *backend,
                                          mfsdp_queue *queue, const mfsdp_muon_desc *desc,
                                          int64_t rows, int64_t cols, float *direction,
                                          const mfsdp_fused_item *item, int32_t clipped,
                                          const mfsdp_step_scalars *scalars,
                                          const uint32_t *present, void *workspace,
                                          size_t workspace_nbytes) {
  return mfsdp_muon_batch_prepare(context, backend, queue, desc, rows, cols, 1, direction, 0, item,
                                  clipped, scalars, present, workspace, workspace_nbytes);
}

/* One matrix: mfsdp_muon_batch_commit with one item. */
MFSDP_API mfsdp_status mfsdp_muon_commit(mfsdp_context *context, const mfsdp_backend *backend,
                                         mfsdp_queue *queue, const mfsdp_muon_desc *desc,
                                         int64_t rows, int64_t cols, const mfsdp_fused_item *item,
                                         int32_t clipped, const mfsdp_step_scalars *scalars,
                                         const uint32_t *present) {
  return mfsdp_muon_batch_commit(context, backend, queue, desc, rows, cols, 1, item, clipped,
                                 scalars, present);
}

/* One matrix: mfsdp_muon_batch_step with one item. */
MFSDP_API mfsdp_status mfsdp_muon_step(mfsdp_context *context, const mfsdp_backend *backend,
                                       mfsdp_queue *queue, const mfsdp_muon_desc *desc,
                                       int64_t rows, int64_t cols, float *direction,
                                       const mfsdp_fused_item *item, int32_t clipped,
                                       const mfsdp_step_scalars *scalars, const uint32_t *present,
                                       void *workspace, size_t workspace_nbytes) {
  return mfsdp_muon_batch_step(context, backend, queue, desc, rows, cols, 1, direction, 0, item,
                               clipped, scalars, present, workspace, workspace_nbytes);
}

#endif /* MFSDP_MUON_H */
