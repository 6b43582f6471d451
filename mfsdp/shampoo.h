/* SPDX-License-Identifier: MIT */
/*
 * shampoo.h - Shampoo on one whole matrix: inverse 4th roots of two Gram matrices, on a backend.
 *
 *   mfsdp_shampoo_desc shampoo = mfsdp_shampoo_desc_default();
 *   mfsdp_precondition_job job = mfsdp_precondition_job_default();
 *   MFSDP_TRY(mfsdp_shampoo_workspace_nbytes(context, backend, &shampoo, rows, cols, &nbytes));
 *   job.rows = rows; job.cols = cols; job.workspace_nbytes = nbytes;
 *   job.workspace = workspace;                          // DEVICE, aligned to MFSDP_ALIGN_NBYTES
 *   job.item = mfsdp_precondition_item(rows, cols, master, grad);        // DEVICE memory
 *   for (i = 0; mfsdp_shampoo_state(&shampoo, rows, cols, i, &array); ++i)
 *     job.item.state[i] = ...;                          // array.rows * array.cols zeros, DEVICE
 *   job.scalars = &scalars;                             // DEVICE; applied_steps 1, 2, ...
 *   MFSDP_TRY(mfsdp_shampoo_step(context, backend, queue, &shampoo, &job));  // ENQUEUED
 *   ++job.attempted_step;
 *
 *   L = b2 L + w G G^T, R = b2 R + w G^T G      w = 1 if b2 = 1, else 1 - b2; both start as 0
 *   M = b1 M + (1 - b1) G
 *   W = (1 - lr wd) W - lr s L^{-1/4} M R^{-1/4}
 *
 * The roots are those of L / (1 - b2^t) + eps I (b2 = 1: of L + eps I), negative eigenvalues first
 * shifted to 0. They start as I and are renewed in attempted steps f, 2 f, ...; a skipped one is not
 * made up for. s is the norm of the grafted method's direction over that of ours (grafting: Agarwal et
 * al., "Disentangling Adaptive Gradient Methods from Learning Rates", 2020), without grafting the
 * correction 1 / (1 - b1^t). A side longer than size_limit is left alone; the other one keeps its
 * exponent -1/4.
 * Sources: Gupta, Koren, Singer, "Shampoo", 2018; Shi et al., "A Distributed Data-Parallel PyTorch
 * Implementation of the Distributed Shampoo Optimizer", 2023 (without its blocks and its Nesterov).
 *
 * A step is prepare (candidates of everything into the workspace; the state is only read) and commit
 * (one predicated pass). It needs the backend's eigh (E_UNSUPPORTED else, with what to install).
 * Does not: know ranks, allocate or wait; precondition vectors: they are AdamW's.
 * Link flags: -lm; on the host backend -llapacke, on the CUDA backend -lcusolver.
 */
#ifndef MFSDP_SHAMPOO_H
#define MFSDP_SHAMPOO_H

#include "dtype.h"
#include "precondition.h"

typedef struct mfsdp_shampoo_desc {
  size_t struct_nbytes;
  double default_lr, default_weight_decay; /* groups start from them */
  double beta1;                            /* of the first moment; 0: the gradient itself */
  double beta2;                            /* of the Gram matrices, and of the grafted AdamW */
  double eps;                              /* added to eigenvalues; positive */
  int32_t update_every;                    /* f: steps from one pair of roots to the next */
  int64_t size_limit;                      /* longer sides are not preconditioned */
  mfsdp_graft graft;
  double graft_eps; /* of AdamW */
} mfsdp_shampoo_desc;

/* Averages with beta 0.9 and 0.999, AdamW grafting, roots every 10 steps; lr and decay as AdamW's. */
MFSDP_API mfsdp_shampoo_desc mfsdp_shampoo_desc_default(void) {
  mfsdp_shampoo_desc desc;
  memset(&desc, 0, sizeof(desc));
  desc.struct_nbytes = sizeof(desc);
  desc.default_lr = 1e-3;
  desc.default_weight_decay = 0.01;
  desc.beta1 = 0.9;
  desc.beta2 = 0.999;
  desc.eps = 1e-12;
  desc.update_every = 10;
  desc.size_limit = 10000;
  desc.graft = MFSDP_GRAFT_ADAMW;
  desc.graft_eps = 1e-8;
  return desc;
}

/* Gupta et al. 2018: sums (eps I and all gradients since), no first moment, no grafting, new roots in
 * every step. `eps` as the paper's, which says nothing of its size. */
MFSDP_API mfsdp_shampoo_desc mfsdp_shampoo_desc_gupta(double eps) {
  mfsdp_shampoo_desc desc = mfsdp_shampoo_desc_default();
  desc.default_weight_decay = 0.0;
  desc.beta1 = 0.0;
  desc.beta2 = 1.0;
  desc.eps = eps;
  desc.update_every = 1;
  desc.graft = MFSDP_GRAFT_NONE;
  return desc;
}

/* E_ARGUMENT with the field, its value and what it needs. */
MFSDP_API mfsdp_status mfsdp_shampoo_check(mfsdp_context *context, const mfsdp_shampoo_desc *desc) {
  if (desc == NULL || desc->struct_nbytes != sizeof(*desc))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "shampoo: desc is NULL or its struct_nbytes is not %zu (use "
                      "mfsdp_shampoo_desc_default)",
                      sizeof(*desc));
  if (!(desc->beta1 >= 0.0 && desc->beta1 < 1.0))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "shampoo: beta1 is %g, needs to be in [0, 1)",
                      desc->beta1);
  if (!(desc->beta2 >= 0.0 && desc->beta2 <= 1.0))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "shampoo: beta2 is %g, needs to be in [0, 1]",
                      desc->beta2);
  if (!(desc->eps >= 1e-30 && desc->eps <= 1e30))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "shampoo: eps is %g, needs to be positive, and 1e-30 to 1e30", desc->eps);
  if (desc->update_every < 1)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "shampoo: update_every is %d, needs at least 1",
                      (int)desc->update_every);
  if (desc->size_limit < 0 || desc->size_limit > MFSDP_PRECONDITION_MAX_SIDE)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "shampoo: size_limit is %lld, needs 0 to %d",
                      (long long)desc->size_limit, MFSDP_PRECONDITION_MAX_SIDE);
  if (desc->graft < MFSDP_GRAFT_ADAMW || desc->graft > MFSDP_GRAFT_NONE)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "shampoo: graft is %d, needs %d to %d",
                      (int)desc->graft, (int)MFSDP_GRAFT_ADAMW, (int)MFSDP_GRAFT_NONE);
  if (desc->graft == MFSDP_GRAFT_ADAMW && !(desc->beta2 < 1.0))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "shampoo: beta2 is 1, and AdamW's average, to be grafted, needs less than 1");
  if (desc->graft == MFSDP_GRAFT_ADAMW && !mfsdp_f32_is_positive(desc->graft_eps))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "shampoo: graft_eps is %g, needs to be positive, and 1.2e-38 to 3.4e38",
                      desc->graft_eps);
  return MFSDP_OK;
}

/* State array `index` (MFSDP_STATE_...) of a rows x cols matrix; 0 if there is none. exp_avg_sq is
 * there for AdamW grafting alone. */
MFSDP_API int mfsdp_shampoo_state(const mfsdp_shampoo_desc *desc, int64_t rows, int64_t cols,
                                  int32_t index, mfsdp_precondition_array *out) {
  static const char *const names[] = {"exp_avg",   "gram_left",  "gram_right",
                                      "root_left", "root_right", "exp_avg_sq"};
  const int32_t count = desc->graft == MFSDP_GRAFT_ADAMW ? 6 : 5;
  if (index < 0 || index >= count) return 0;
  *out = mfsdp__pre_array(names, desc->size_limit, rows, cols, index);
  return 1;
}

/* Bytes of DEVICE workspace for one matrix, aligned to MFSDP_ALIGN_NBYTES. E_ARGUMENT, E_OVERFLOW,
 * E_UNSUPPORTED; *out is 0 then. */
MFSDP_API mfsdp_status mfsdp_shampoo_workspace_nbytes(mfsdp_context *context,
                                                      const mfsdp_backend *backend,
                                                      const mfsdp_shampoo_desc *desc, int64_t rows,
                                                      int64_t cols, size_t *out) {
  mfsdp__pre_layout layout;
  if (out == NULL) return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "shampoo: out is NULL");
  *out = 0;
  MFSDP_TRY(mfsdp_shampoo_check(context, desc));
  MFSDP_TRY(
      mfsdp__pre_layout_of(context, backend, "shampoo", 0, desc->size_limit, rows, cols, &layout));
  *out = layout.nbytes;
  return MFSDP_OK;
}

/* Checks everything, and fills in what the passes are told. */
MFSDP_API mfsdp_status mfsdp__shampoo_run(mfsdp_context *context, const mfsdp_backend *backend,
                                          mfsdp_queue *queue, const mfsdp_shampoo_desc *desc,
                                          const mfsdp_precondition_job *job, mfsdp__pre_run *run) {
  mfsdp_precondition_array arrays[MFSDP_FUSED_STATE_COUNT];
  mfsdp__pre_layout layout;
  int32_t state_count = 0;
  MFSDP_TRY(mfsdp_shampoo_check(context, desc));
  MFSDP_TRY(mfsdp__pre_job_check(context, "shampoo", job));
  MFSDP_TRY(mfsdp__pre_layout_of(context, backend, "shampoo", 0, desc->size_limit, job->rows,
                                 job->cols, &layout));
  memset(run, 0, sizeof(*run));
  if (job->rows == 0 || job->cols == 0) return MFSDP_OK;
  while (mfsdp_shampoo_state(desc, job->rows, job->cols, state_count, &arrays[state_count]))
    ++state_count;
  MFSDP_TRY(mfsdp__pre_run_make(context, backend, queue, "shampoo", job, &layout, arrays,
                                state_count, run));
  run->args.refresh = job->attempted_step % desc->update_every == 0;
  run->args.graft = desc->graft;
  run->args.beta1 = desc->beta1;
  run->args.beta2 = run->args.gram_beta = desc->beta2;
  run->args.eps = desc->eps;
  run->args.graft_eps = desc->graft_eps;
  return MFSDP_OK;
}

/* next_side = the root of next_gram: vectors scaled by 8th roots, times themselves. */
MFSDP_API mfsdp_status mfsdp__shampoo_root(const mfsdp__pre_run *run, int32_t side) {
  const int64_t n = mfsdp__pre_length(run, side);
  const mfsdp_mat square = mfsdp__pre_mat(run->args.square, n, n);
  mfsdp_when always = {NULL, 0};
  mfsdp_gemm_args args = mfsdp_gemm_args_default();
  MFSDP_TRY(mfsdp__pre_eigh(run, side, always));
  MFSDP_TRY(mfsdp__pre_pass(run, MFSDP_SHAMPOO_SCALE, side));
  args.a = args.b = square;
  args.d = mfsdp__pre_mat(run->args.next_side[side], n, n);
  args.trans_a = 1;
  args.symmetric = 1;
  return run->backend->ops->gemm(run->backend->self, run->queue, &args);
}

/* Writes the candidates of state and direction to the workspace; state and parameter are only read.
 * ENQUEUED. E_ARGUMENT and E_UNSUPPORTED before anything is enqueued. A matrix without elements is
 * legal and nothing is done. */
MFSDP_API mfsdp_status mfsdp_shampoo_prepare(mfsdp_context *context, const mfsdp_backend *backend,
                                             mfsdp_queue *queue, const mfsdp_shampoo_desc *desc,
                                             const mfsdp_precondition_job *job) {
  mfsdp__pre_run run;
  int32_t side;
  MFSDP_TRY(mfsdp__shampoo_run(context, backend, queue, desc, job, &run));
  if (run.backend == NULL) return MFSDP_OK;
  MFSDP_TRY(mfsdp__pre_pass(&run, MFSDP_SHAMPOO_PREPARE, 0));
  MFSDP_TRY(mfsdp__pre_grams(&run, desc->beta2, desc->beta2 < 1.0 ? 1.0 - desc->beta2 : 1.0));
  for (side = 0; side < 2; ++side) {
    if (run.args.next_side[side] == NULL) continue;
    if (run.args.refresh)
      MFSDP_TRY(mfsdp__shampoo_root(&run, side));
    else
      MFSDP_TRY(mfsdp__pre_pass(&run, MFSDP_SHAMPOO_ROOTS, side));
  }
  return mfsdp__pre_sandwich(&run, run.args.next_side[0], 0, run.args.next_exp_avg,
                             run.args.next_side[1], 0, run.args.direction, run.args.other);
}

/* One predicated pass: state, master and parameter from what prepare, called with the same job, left in
 * the workspace. ENQUEUED. */
MFSDP_API mfsdp_status mfsdp_shampoo_commit(mfsdp_context *context, const mfsdp_backend *backend,
                                            mfsdp_queue *queue, const mfsdp_shampoo_desc *desc,
                                            const mfsdp_precondition_job *job) {
  mfsdp__pre_run run;
  MFSDP_TRY(mfsdp__shampoo_run(context, backend, queue, desc, job, &run));
  if (run.backend == NULL) return MFSDP_OK;
  return mfsdp__pre_pass(&run, MFSDP_SHAMPOO_COMMIT, 0);
}

/* prepare, then commit. ENQUEUED. */
MFSDP_API mfsdp_status mfsdp_shampoo_step(mfsdp_context *context, const mfsdp_backend *backend,
                                          mfsdp_queue *queue, const mfsdp_shampoo_desc *desc,
                                          const mfsdp_precondition_job *job) {
  MFSDP_TRY(mfsdp_shampoo_prepare(context, backend, queue, desc, job));
  return mfsdp_shampoo_commit(context, backend, queue, desc, job);
}

#endif /* MFSDP_SHAMPOO_H */
