/* SPDX-License-Identifier: MIT */
/*
 * soap.h - SOAP on one whole matrix: Adam in the eigenbases of Shampoo's Gram matrices, on a backend.
 *
 *   mfsdp_soap_desc soap = mfsdp_soap_desc_default();
 *   mfsdp_precondition_job job = mfsdp_precondition_job_default();
 *   MFSDP_TRY(mfsdp_soap_workspace_nbytes(context, backend, &soap, rows, cols, &nbytes));
 *   job.rows = rows; job.cols = cols; job.workspace_nbytes = nbytes;
 *   job.workspace = workspace;                          // DEVICE, aligned to MFSDP_ALIGN_NBYTES
 *   job.item = mfsdp_precondition_item(rows, cols, master, grad);        // DEVICE memory
 *   for (i = 0; mfsdp_soap_state(&soap, rows, cols, i, &array); ++i)
 *     job.item.state[i] = ...;                          // array.rows * array.cols zeros, DEVICE
 *   job.scalars = &scalars;                             // DEVICE
 *   MFSDP_TRY(mfsdp_soap_step(context, backend, queue, &soap, &job));        // ENQUEUED
 *   ++job.attempted_step;
 *
 * The first gradient of a matrix updates no weights:
 *   L = (1 - bs) G G^T, R = (1 - bs) G^T G;  Q_L, Q_R = their eigenvectors, descending
 * Each later one, its t-th update:
 *   G' = Q_L^T G Q_R;  M' = b1 M' + (1 - b1) G';  V = b2 V + (1 - b2) G'^2
 *   W = W - lr sqrt(1 - b2^t) / (1 - b1^t) Q_L [M' / (sqrt(V) + eps)] Q_R^T,  then W = (1 - lr wd) W
 *   L = bs L + (1 - bs) G G^T, R = bs R + (1 - bs) G^T G
 * In attempted steps f + 1, 2 f + 1, ... then the bases: columns sorted by diag(Q^T L Q), descending,
 * V along with them; Q = qr(L Q); M' is rotated into the new bases, V is not.
 *
 * The host does not know whether a step was skipped, so the first basis is made where the matrix has
 * none yet: in attempted steps 1 to f, and wherever bases are renewed. A matrix whose first gradient
 * comes later than f gathers L and R, and waits for that.
 * A side longer than size_limit keeps the identity as its basis.
 * Source: nikhilvyas/SOAP (Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam", 2024).
 *
 * A step is prepare (candidates of everything into the workspace; the state is only read) and commit
 * (one predicated pass). It needs the backend's eigh and qr (E_UNSUPPORTED else, with what to install).
 * Does not: know ranks, allocate or wait; precondition vectors: they are AdamW's; merge dimensions.
 * Link flags: -lm; on the host backend -llapacke, on the CUDA backend -lcusolver.
 */
#ifndef MFSDP_SOAP_H
#define MFSDP_SOAP_H

#include "precondition.h"

typedef struct mfsdp_soap_desc {
  size_t struct_nbytes;
  double default_lr, default_weight_decay; /* groups start from them */
  double beta1, beta2;                     /* of the moments */
  double shampoo_beta;                     /* of the Gram matrices: bs */
  double eps;                              /* stands before the bias correction, unlike AdamW's */
  int32_t update_every;                    /* f: steps from one pair of bases to the next */
  int64_t size_limit;                      /* longer sides keep the identity */
} mfsdp_soap_desc;

/* nikhilvyas/SOAP: lr 3e-3, decay 0.01, betas 0.95, eps 1e-8, f = 10, sides up to 10,000. */
MFSDP_API mfsdp_soap_desc mfsdp_soap_desc_default(void) {
  mfsdp_soap_desc desc;
  memset(&desc, 0, sizeof(desc));
  desc.struct_nbytes = sizeof(desc);
  desc.default_lr = 3e-3;
  desc.default_weight_decay = 0.01;
  desc.beta1 = desc.beta2 = desc.shampoo_beta = 0.95;
  desc.eps = 1e-8;
  desc.update_every = 10;
  desc.size_limit = 10000;
  return desc;
}

/* E_ARGUMENT with the field, its value and what it needs. */
MFSDP_API mfsdp_status mfsdp_soap_check(mfsdp_context *context, const mfsdp_soap_desc *desc) {
  if (desc == NULL || desc->struct_nbytes != sizeof(*desc))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "soap: desc is NULL or its struct_nbytes is not %zu (use "
                      "mfsdp_soap_desc_default)",
                      sizeof(*desc));
  if (!(desc->beta1 >= 0.0 && desc->beta1 < 1.0) || !(desc->beta2 >= 0.0 && desc->beta2 < 1.0) ||
      !(desc->shampoo_beta >= 0.0 && desc->shampoo_beta < 1.0))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "soap: betas are %g and %g, shampoo_beta is %g, need to be in [0, 1)",
                      desc->beta1, desc->beta2, desc->shampoo_beta);
  if (!(desc->eps >= 1e-30 && desc->eps <= 1e30))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "soap: eps is %g, needs to be positive, and 1e-30 to 1e30", desc->eps);
  if (desc->update_every < 1)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "soap: update_every is %d, needs at least 1",
                      (int)desc->update_every);
  if (desc->size_limit < 0 || desc->size_limit > MFSDP_PRECONDITION_MAX_SIDE)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "soap: size_limit is %lld, needs 0 to %d",
                      (long long)desc->size_limit, MFSDP_PRECONDITION_MAX_SIDE);
  return MFSDP_OK;
}

/* State array `index` (MFSDP_STATE_...) of a rows x cols matrix; 0 if there is none. */
MFSDP_API int mfsdp_soap_state(const mfsdp_soap_desc *desc, int64_t rows, int64_t cols,
                               int32_t index, mfsdp_precondition_array *out) {
  static const char *const names[] = {"exp_avg",     "gram_left",  "gram_right", "basis_left",
                                      "basis_right", "exp_avg_sq", "updates"};
  if (index < 0 || index > MFSDP_STATE_UPDATES) return 0;
  *out = mfsdp__pre_array(names, desc->size_limit, rows, cols, index);
  return 1;
}

/* Bytes of DEVICE workspace for one matrix, aligned to MFSDP_ALIGN_NBYTES. E_ARGUMENT, E_OVERFLOW,
 * E_UNSUPPORTED; *out is 0 then. */
MFSDP_API mfsdp_status mfsdp_soap_workspace_nbytes(mfsdp_context *context,
                                                   const mfsdp_backend *backend,
                                                   const mfsdp_soap_desc *desc, int64_t rows,
                                                   int64_t cols, size_t *out) {
  mfsdp__pre_layout layout;
  if (out == NULL) return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "soap: out is NULL");
  *out = 0;
  MFSDP_TRY(mfsdp_soap_check(context, desc));
  MFSDP_TRY(
      mfsdp__pre_layout_of(context, backend, "soap", 1, desc->size_limit, rows, cols, &layout));
  *out = layout.nbytes;
  return MFSDP_OK;
}

/* Checks everything, and fills in what the passes are told. */
MFSDP_API mfsdp_status mfsdp__soap_run(mfsdp_context *context, const mfsdp_backend *backend,
                                       mfsdp_queue *queue, const mfsdp_soap_desc *desc,
                                       const mfsdp_precondition_job *job, mfsdp__pre_run *run) {
  mfsdp_precondition_array arrays[MFSDP_FUSED_STATE_COUNT];
  mfsdp__pre_layout layout;
  int32_t state_count = 0;
  MFSDP_TRY(mfsdp_soap_check(context, desc));
  MFSDP_TRY(mfsdp__pre_job_check(context, "soap", job));
  MFSDP_TRY(mfsdp__pre_layout_of(context, backend, "soap", 1, desc->size_limit, job->rows,
                                 job->cols, &layout));
  memset(run, 0, sizeof(*run));
  if (job->rows == 0 || job->cols == 0) return MFSDP_OK;
  while (mfsdp_soap_state(desc, job->rows, job->cols, state_count, &arrays[state_count]))
    ++state_count;
  MFSDP_TRY(
      mfsdp__pre_run_make(context, backend, queue, "soap", job, &layout, arrays, state_count, run));
  run->args.refresh =
      job->attempted_step > 1 && (job->attempted_step - 1) % desc->update_every == 0;
  run->args.start = run->args.refresh || job->attempted_step <= desc->update_every;
  run->args.beta1 = desc->beta1;
  run->args.beta2 = desc->beta2;
  run->args.gram_beta = desc->shampoo_beta;
  run->args.eps = desc->eps;
  return MFSDP_OK;
}

/* Where the second moments lie after a side has been sorted. */
MFSDP_API void mfsdp__soap_swap(mfsdp__pre_run *run) {
  float *sorted = run->args.other;
  run->args.other = run->args.next_exp_avg_sq;
  run->args.next_exp_avg_sq = sorted;
}

/* next_side = qr(next_gram Q), its vectors in descending order first; the second moments with them. */
MFSDP_API mfsdp_status mfsdp__soap_renew(mfsdp__pre_run *run, int32_t side) {
  const int64_t n = mfsdp__pre_length(run, side);
  const float *basis = run->args.item.state[MFSDP_STATE_SIDE_LEFT + side];
  mfsdp_qr_args args;
  MFSDP_TRY(mfsdp__pre_multiply(run, mfsdp__pre_mat(basis, n, n), 0,
                                mfsdp__pre_mat(run->args.next_gram[side], n, n), 0,
                                mfsdp__pre_mat(run->args.square, n, n)));
  MFSDP_TRY(mfsdp__pre_pass(run, MFSDP_SOAP_SORT, side));
  mfsdp__soap_swap(run);
  memset(&args, 0, sizeof(args));
  args.struct_nbytes = sizeof(args);
  args.a = args.q = mfsdp__pre_mat(run->args.next_side[side], n, n);
  args.when.word = run->args.item.state[MFSDP_STATE_UPDATES];
  args.workspace = run->library;
  args.workspace_nbytes = run->library_nbytes;
  return run->backend->ops->qr(run->backend->self, run->queue, &args);
}

/* The first moment out of the old bases and into the new ones. */
MFSDP_API mfsdp_status mfsdp__soap_rotate(const mfsdp__pre_run *run) {
  const mfsdp_precondition_args *a = &run->args;
  const float *left = a->next_side[0] != NULL ? a->item.state[MFSDP_STATE_SIDE_LEFT] : NULL;
  const float *right = a->next_side[1] != NULL ? a->item.state[MFSDP_STATE_SIDE_RIGHT] : NULL;
  MFSDP_TRY(mfsdp__pre_sandwich(run, left, 1, a->next_exp_avg, right, 0, a->projected, a->other));
  return mfsdp__pre_sandwich(run, a->next_side[0], 0, a->projected, a->next_side[1], 1,
                             a->next_exp_avg, a->other);
}

/* Eigenvectors as the basis of a matrix that has none. */
MFSDP_API mfsdp_status mfsdp__soap_first(const mfsdp__pre_run *run, int32_t side) {
  mfsdp_when first;
  first.word = run->args.item.state[MFSDP_STATE_UPDATES];
  first.when_zero = 1;
  MFSDP_TRY(mfsdp__pre_eigh(run, side, first));
  return mfsdp__pre_pass(run, MFSDP_SOAP_START, side);
}

/* Writes the candidates of state and direction to the workspace; state and parameter are only read.
 * ENQUEUED. E_ARGUMENT and E_UNSUPPORTED before anything is enqueued. A matrix without elements is
 * legal and nothing is done. */
MFSDP_API mfsdp_status mfsdp_soap_prepare(mfsdp_context *context, const mfsdp_backend *backend,
                                          mfsdp_queue *queue, const mfsdp_soap_desc *desc,
                                          const mfsdp_precondition_job *job) {
  const float *basis[2] = {NULL, NULL};
  mfsdp_precondition_args *a;
  mfsdp__pre_run run;
  int32_t side;
  MFSDP_TRY(mfsdp__soap_run(context, backend, queue, desc, job, &run));
  if (run.backend == NULL) return MFSDP_OK;
  a = &run.args;
  for (side = 0; side < 2; ++side)
    if (a->next_side[side] != NULL) basis[side] = a->item.state[MFSDP_STATE_SIDE_LEFT + side];
  MFSDP_TRY(mfsdp__pre_pass(&run, MFSDP_SOAP_PREPARE, 0));
  MFSDP_TRY(mfsdp__pre_sandwich(&run, basis[0], 0, a->grad, basis[1], 1, a->projected, a->other));
  MFSDP_TRY(mfsdp__pre_pass(&run, MFSDP_SOAP_MOMENTS, 0));
  MFSDP_TRY(
      mfsdp__pre_sandwich(&run, basis[0], 1, a->projected, basis[1], 0, a->direction, a->other));
  MFSDP_TRY(mfsdp__pre_grams(&run, desc->shampoo_beta, 1.0 - desc->shampoo_beta));
  for (side = 0; side < 2; ++side)
    if (a->refresh && basis[side] != NULL) MFSDP_TRY(mfsdp__soap_renew(&run, side));
  if (a->refresh) MFSDP_TRY(mfsdp__soap_rotate(&run));
  for (side = 0; side < 2; ++side)
    if (a->start && basis[side] != NULL) MFSDP_TRY(mfsdp__soap_first(&run, side));
  return MFSDP_OK;
}

/* One predicated pass: state, master and parameter from what prepare, called with the same job, left in
 * the workspace. ENQUEUED. */
MFSDP_API mfsdp_status mfsdp_soap_commit(mfsdp_context *context, const mfsdp_backend *backend,
                                         mfsdp_queue *queue, const mfsdp_soap_desc *desc,
                                         const mfsdp_precondition_job *job) {
  mfsdp__pre_run run;
  int32_t side;
  MFSDP_TRY(mfsdp__soap_run(context, backend, queue, desc, job, &run));
  if (run.backend == NULL) return MFSDP_OK;
  for (side = 0; side < 2; ++side)
    if (run.args.refresh && run.args.next_side[side] != NULL) mfsdp__soap_swap(&run);
  return mfsdp__pre_pass(&run, MFSDP_SOAP_COMMIT, 0);
}

/* prepare, then commit. ENQUEUED. */
MFSDP_API mfsdp_status mfsdp_soap_step(mfsdp_context *context, const mfsdp_backend *backend,
                                       mfsdp_queue *queue, const mfsdp_soap_desc *desc,
                                       const mfsdp_precondition_job *job) {
  MFSDP_TRY(mfsdp_soap_prepare(context, backend, queue, desc, job));
  return mfsdp_soap_commit(context, backend, queue, desc, job);
}

#endif /* MFSDP_SOAP_H */
