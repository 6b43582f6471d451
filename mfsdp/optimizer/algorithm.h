/* SPDX-License-Identifier: MIT */
/*
 * algorithm.h - the optimizers as entries of one table: check, state arrays, workspace, step. Nothing
 * else in optimizer.h tells one algorithm from another.
 *
 *   const mfsdp__algorithm *algorithm = mfsdp__algorithm_of(group->algorithm);
 *   MFSDP_TRY(algorithm->check(context, group));
 *
 * A new algorithm is a kind in types.h, a description in the hyperparameter group and an entry here.
 * Part of optimizer.h. Link flags: -lm.
 */
#ifndef MFSDP_OPTIMIZER_ALGORITHM_H
#define MFSDP_OPTIMIZER_ALGORITHM_H

#include "types.h"

/* A state array before it has a place; item.state is in the order of their indices. */
typedef struct mfsdp__state_shape {
  const char *name;
  int64_t rows, cols; /* their product fits int64: implied by the tensor's own count, or checked */
} mfsdp__state_shape;

typedef struct mfsdp__algorithm {
  mfsdp_algorithm_kind kind;
  const char *name;
  int32_t needs_matrix; /* 1: role MATRIX only, and a job has matrices of one shape */
  int32_t alone;        /* 1: a job has one tensor, and its scratch holds what directions need */
  /* Whether the backend can do it; NULL: every backend can. */
  mfsdp_status (*supported)(mfsdp_context *context, const mfsdp_backend *backend);
  /* The group's own description. */
  mfsdp_status (*check)(mfsdp_context *context, const mfsdp_hyper_group *group);
  /* State array `index` of a tensor; 0 if there is none. At most MFSDP_FUSED_STATE_COUNT. */
  int (*state)(const mfsdp_hyper_group *group, const mfsdp_optimizer_tensor *tensor, int32_t index,
               mfsdp__state_shape *out);
  /* Bytes of scratch, besides directions, for item_count tensors like this one in one job; NULL:
   * neither scratch nor direction. n tensors need at most n times what one needs. */
  mfsdp_status (*scratch)(mfsdp_context *context, const mfsdp_backend *backend,
                          const mfsdp_hyper_group *group, const mfsdp_optimizer_tensor *tensor,
                          int64_t item_count, size_t *nbytes);
  /* mfsdp_fused_item.scale; NULL: 1. */
  double (*scale)(const mfsdp_hyper_group *group, const mfsdp_optimizer_tensor *tensor);
  /* Enqueues the update of one job's items. */
  mfsdp_status (*run)(mfsdp_context *context, const mfsdp_optimizer *optimizer, mfsdp_queue *queue,
                      const mfsdp__optimizer_job *job, const mfsdp_step_scalars *scalars,
                      const uint32_t *present);
  /* Hyperparameter `index`, "soap.beta1", with its value; 0 if there is none. At most 10, of names of
   * at most 24 characters. NULL: whoever compares or saves groups knows them itself. */
  int (*field)(const mfsdp_hyper_group *group, int32_t index, const char **name, double *value);
  /* How tensors are staged; NULL: they cannot be. */
  const struct mfsdp__algorithm_stages *stages;
} mfsdp__algorithm;

/* The three parts of an update whose middle works on whole matrices alone. */
typedef struct mfsdp__algorithm_stages {
  /* E_UNSUPPORTED: a band of a matrix, not the whole, cannot be staged. */
  mfsdp_status (*check)(mfsdp_context *context, const mfsdp_hyper_group *group,
                        const mfsdp_optimizer_tensor *tensor);
  mfsdp_status (*prepare)(mfsdp_context *context, const mfsdp_optimizer *optimizer,
                          mfsdp_queue *queue, const mfsdp__optimizer_stage *stage,
                          const mfsdp_step_scalars *scalars, const uint32_t *present);
  mfsdp_status (*whole_nbytes)(mfsdp_context *context, const mfsdp_hyper_group *group, int64_t rows,
                               int64_t cols, int64_t count, size_t *nbytes);
  mfsdp_status (*whole)(mfsdp_context *context, const mfsdp_backend *backend, mfsdp_queue *queue,
                        const mfsdp_hyper_group *group, int64_t rows, int64_t cols, int64_t count,
                        float *direction, int64_t stride, void *workspace, size_t workspace_nbytes);
  mfsdp_status (*commit)(mfsdp_context *context, const mfsdp_optimizer *optimizer,
                         mfsdp_queue *queue, const mfsdp__optimizer_job *job,
                         const mfsdp_step_scalars *scalars, const uint32_t *present);
} mfsdp__algorithm_stages;

/* ---- muon ---- */

MFSDP_API mfsdp_status mfsdp__muon_group_check(mfsdp_context *context,
                                               const mfsdp_hyper_group *group) {
  return mfsdp_muon_check(context, &group->muon);
}

MFSDP_API int mfsdp__muon_state(const mfsdp_hyper_group *group,
                                const mfsdp_optimizer_tensor *tensor, int32_t index,
                                mfsdp__state_shape *out) {
  if (index > (group->muon.normalize_rows ? 1 : 0)) return 0;
  out->name = index == 0 ? "momentum" : "row_moment";
  out->rows = tensor->rows;
  out->cols = index == 0 ? tensor->cols : 1;
  return 1;
}

MFSDP_API mfsdp_status mfsdp__muon_scratch(mfsdp_context *context, const mfsdp_backend *backend,
                                           const mfsdp_hyper_group *group,
                                           const mfsdp_optimizer_tensor *tensor, int64_t item_count,
                                           size_t *nbytes) {
  (void)backend;
  return mfsdp_newton_schulz_batch_workspace_nbytes(context, &group->muon.newton_schulz,
                                                    tensor->rows, tensor->cols, item_count, nbytes);
}

/* A band's step is scaled as its whole matrix's. */
MFSDP_API double mfsdp__muon_scale(const mfsdp_hyper_group *group,
                                   const mfsdp_optimizer_tensor *tensor) {
  return mfsdp_muon_scale_of(
      &group->muon, tensor->whole_rows > 0 ? tensor->whole_rows : tensor->rows, tensor->cols);
}

MFSDP_API mfsdp_status mfsdp__muon_run(mfsdp_context *context, const mfsdp_optimizer *optimizer,
                                       mfsdp_queue *queue, const mfsdp__optimizer_job *job,
                                       const mfsdp_step_scalars *scalars, const uint32_t *present) {
  const mfsdp_hyper_group *group = &optimizer->groups[job->hyper_group];
  unsigned char *workspace = (unsigned char *)optimizer->workspace.data;
  return mfsdp_muon_batch_step(
      context, optimizer->backend, queue, &group->muon, job->rows, job->cols, job->item_count,
      (float *)(void *)workspace, job->direction_stride,
      (const mfsdp_fused_item *)optimizer->items.data + job->first_item, group->clipped,
      scalars + job->hyper_group, present, workspace + optimizer->direction_nbytes,
      optimizer->workspace.nbytes - optimizer->direction_nbytes);
}

MFSDP_API mfsdp_status mfsdp__muon_stage_check(mfsdp_context *context,
                                               const mfsdp_hyper_group *group,
                                               const mfsdp_optimizer_tensor *tensor) {
  if (!group->muon.normalize_rows || tensor->whole_rows == 0) return MFSDP_OK;
  return MFSDP_FAIL(context, MFSDP_E_UNSUPPORTED,
                    "%s: muon with normalize_rows brings all rows back to one norm, so the rows of "
                    "a matrix cannot be spread over ranks; keep it owned (without allow_banded)",
                    tensor->name);
}

MFSDP_API mfsdp_status mfsdp__muon_stage_prepare(mfsdp_context *context,
                                                 const mfsdp_optimizer *optimizer,
                                                 mfsdp_queue *queue,
                                                 const mfsdp__optimizer_stage *stage,
                                                 const mfsdp_step_scalars *scalars,
                                                 const uint32_t *present) {
  const mfsdp_hyper_group *group = &optimizer->groups[stage->hyper_group];
  return mfsdp_muon_items_prepare(
      context, optimizer->backend, queue, &group->muon,
      (const mfsdp_fused_item *)optimizer->items.data + stage->first_item, stage->item_count,
      stage->max_count, stage->total_count, group->clipped, scalars + stage->hyper_group, present);
}

MFSDP_API mfsdp_status mfsdp__muon_whole_nbytes(mfsdp_context *context,
                                                const mfsdp_hyper_group *group, int64_t rows,
                                                int64_t cols, int64_t count, size_t *nbytes) {
  return mfsdp_newton_schulz_batch_workspace_nbytes(context, &group->muon.newton_schulz, rows, cols,
                                                    count, nbytes);
}

MFSDP_API mfsdp_status mfsdp__muon_whole(mfsdp_context *context, const mfsdp_backend *backend,
                                         mfsdp_queue *queue, const mfsdp_hyper_group *group,
                                         int64_t rows, int64_t cols, int64_t count,
                                         float *direction, int64_t stride, void *workspace,
                                         size_t workspace_nbytes) {
  return mfsdp_newton_schulz_batch(context, backend, queue, &group->muon.newton_schulz, rows, cols,
                                   count, direction, stride, direction, stride, workspace,
                                   workspace_nbytes);
}

MFSDP_API mfsdp_status mfsdp__muon_stage_commit(mfsdp_context *context,
                                                const mfsdp_optimizer *optimizer,
                                                mfsdp_queue *queue, const mfsdp__optimizer_job *job,
                                                const mfsdp_step_scalars *scalars,
                                                const uint32_t *present) {
  const mfsdp_hyper_group *group = &optimizer->groups[job->hyper_group];
  return mfsdp_muon_items_commit(context, optimizer->backend, queue, &group->muon,
                                 (const mfsdp_fused_item *)optimizer->items.data + job->first_item,
                                 job->item_count, job->max_count, job->total_count, group->clipped,
                                 scalars + job->hyper_group, present);
}

/* ---- adamw ---- */

MFSDP_API mfsdp_status mfsdp__adamw_group_check(mfsdp_context *context,
                                                const mfsdp_hyper_group *group) {
  return mfsdp_adamw_check(context, &group->adamw);
}

MFSDP_API int mfsdp__adamw_state(const mfsdp_hyper_group *group,
                                 const mfsdp_optimizer_tensor *tensor, int32_t index,
                                 mfsdp__state_shape *out) {
  const int matrix = tensor->role == MFSDP_ROLE_MATRIX;
  (void)group;
  if (index > 1) return 0;
  out->name = index == 0 ? "exp_avg" : "exp_avg_sq";
  out->rows = matrix ? tensor->rows : 1;
  out->cols = matrix ? tensor->cols : tensor->count;
  return 1;
}

MFSDP_API mfsdp_status mfsdp__adamw_run(mfsdp_context *context, const mfsdp_optimizer *optimizer,
                                        mfsdp_queue *queue, const mfsdp__optimizer_job *job,
                                        const mfsdp_step_scalars *scalars,
                                        const uint32_t *present) {
  const mfsdp_hyper_group *group = &optimizer->groups[job->hyper_group];
  return mfsdp_adamw_commit(context, optimizer->backend, queue, &group->adamw,
                            (const mfsdp_fused_item *)optimizer->items.data + job->first_item,
                            job->item_count, job->max_count, job->total_count, group->clipped,
                            scalars + job->hyper_group, present);
}

/* ---- shampoo and soap ---- */

/* What both are told of a job. */
MFSDP_API mfsdp_precondition_job mfsdp__precondition_job(const mfsdp_optimizer *optimizer,
                                                         const mfsdp__optimizer_job *job,
                                                         const mfsdp_step_scalars *scalars,
                                                         const uint32_t *present) {
  mfsdp_precondition_job out = mfsdp_precondition_job_default();
  out.rows = job->rows;
  out.cols = job->cols;
  out.item = job->only;
  out.attempted_step = optimizer->attempted_steps + 1;
  out.clipped = optimizer->groups[job->hyper_group].clipped;
  out.scalars = scalars + job->hyper_group;
  out.present = present;
  out.workspace = (unsigned char *)optimizer->workspace.data + optimizer->direction_nbytes;
  out.workspace_nbytes = optimizer->workspace.nbytes - optimizer->direction_nbytes;
  return out;
}

MFSDP_API void mfsdp__precondition_shape(const mfsdp_precondition_array *array,
                                         mfsdp__state_shape *out) {
  out->name = array->name;
  out->rows = array->rows;
  out->cols = array->cols;
}

MFSDP_API mfsdp_status mfsdp__shampoo_group_check(mfsdp_context *context,
                                                  const mfsdp_hyper_group *group) {
  return mfsdp_shampoo_check(context, &group->shampoo);
}

MFSDP_API mfsdp_status mfsdp__shampoo_supported(mfsdp_context *context,
                                                const mfsdp_backend *backend) {
  return mfsdp_precondition_backend_check(context, backend, "shampoo", 0);
}

MFSDP_API int mfsdp__shampoo_group_state(const mfsdp_hyper_group *group,
                                         const mfsdp_optimizer_tensor *tensor, int32_t index,
                                         mfsdp__state_shape *out) {
  mfsdp_precondition_array array;
  if (!mfsdp_shampoo_state(&group->shampoo, tensor->rows, tensor->cols, index, &array)) return 0;
  mfsdp__precondition_shape(&array, out);
  return 1;
}

MFSDP_API mfsdp_status mfsdp__shampoo_scratch(mfsdp_context *context, const mfsdp_backend *backend,
                                              const mfsdp_hyper_group *group,
                                              const mfsdp_optimizer_tensor *tensor,
                                              int64_t item_count, size_t *nbytes) {
  (void)item_count;
  return mfsdp_shampoo_workspace_nbytes(context, backend, &group->shampoo, tensor->rows,
                                        tensor->cols, nbytes);
}

MFSDP_API mfsdp_status mfsdp__shampoo_group_run(mfsdp_context *context,
                                                const mfsdp_optimizer *optimizer,
                                                mfsdp_queue *queue, const mfsdp__optimizer_job *job,
                                                const mfsdp_step_scalars *scalars,
                                                const uint32_t *present) {
  const mfsdp_precondition_job one = mfsdp__precondition_job(optimizer, job, scalars, present);
  return mfsdp_shampoo_step(context, optimizer->backend, queue,
                            &optimizer->groups[job->hyper_group].shampoo, &one);
}

MFSDP_API int mfsdp__shampoo_field(const mfsdp_hyper_group *group, int32_t index, const char **name,
                                   double *value) {
  static const char *const names[] = {"shampoo.beta1",    "shampoo.beta2", "shampoo.eps",
                                      "shampoo.every",    "shampoo.limit", "shampoo.graft",
                                      "shampoo.graft_eps"};
  const mfsdp_shampoo_desc *desc = &group->shampoo;
  const double values[] = {desc->beta1,
                           desc->beta2,
                           desc->eps,
                           (double)desc->update_every,
                           (double)desc->size_limit,
                           (double)desc->graft,
                           desc->graft_eps};
  if (index >= 7) return 0;
  *name = names[index];
  *value = values[index];
  return 1;
}

MFSDP_API mfsdp_status mfsdp__soap_group_check(mfsdp_context *context,
                                               const mfsdp_hyper_group *group) {
  return mfsdp_soap_check(context, &group->soap);
}

MFSDP_API mfsdp_status mfsdp__soap_supported(mfsdp_context *context, const mfsdp_backend *backend) {
  return mfsdp_precondition_backend_check(context, backend, "soap", 1);
}

MFSDP_API int mfsdp__soap_group_state(const mfsdp_hyper_group *group,
                                      const mfsdp_optimizer_tensor *tensor, int32_t index,
                                      mfsdp__state_shape *out) {
  mfsdp_precondition_array array;
  if (!mfsdp_soap_state(&group->soap, tensor->rows, tensor->cols, index, &array)) return 0;
  mfsdp__precondition_shape(&array, out);
  return 1;
}

MFSDP_API mfsdp_status mfsdp__soap_scratch(mfsdp_context *context, const mfsdp_backend *backend,
                                           const mfsdp_hyper_group *group,
                                           const mfsdp_optimizer_tensor *tensor, int64_t item_count,
                                           size_t *nbytes) {
  (void)item_count;
  return mfsdp_soap_workspace_nbytes(context, backend, &group->soap, tensor->rows, tensor->cols,
                                     nbytes);
}

MFSDP_API mfsdp_status mfsdp__soap_group_run(mfsdp_context *context,
                                             const mfsdp_optimizer *optimizer, mfsdp_queue *queue,
                                             const mfsdp__optimizer_job *job,
                                             const mfsdp_step_scalars *scalars,
                                             const uint32_t *present) {
  const mfsdp_precondition_job one = mfsdp__precondition_job(optimizer, job, scalars, present);
  return mfsdp_soap_step(context, optimizer->backend, queue,
                         &optimizer->groups[job->hyper_group].soap, &one);
}

MFSDP_API int mfsdp__soap_field(const mfsdp_hyper_group *group, int32_t index, const char **name,
                                double *value) {
  static const char *const names[] = {"soap.beta1", "soap.beta2", "soap.shampoo_beta",
                                      "soap.eps",   "soap.every", "soap.limit"};
  const mfsdp_soap_desc *desc = &group->soap;
  const double values[] = {desc->beta1,
                           desc->beta2,
                           desc->shampoo_beta,
                           desc->eps,
                           (double)desc->update_every,
                           (double)desc->size_limit};
  if (index >= 6) return 0;
  *name = names[index];
  *value = values[index];
  return 1;
}

/* ---- the table ---- */

/* The entry of a kind; NULL for none. */
MFSDP_API const mfsdp__algorithm *mfsdp__algorithm_of(mfsdp_algorithm_kind kind) {
  static const mfsdp__algorithm_stages muon_stages = {
      mfsdp__muon_stage_check, mfsdp__muon_stage_prepare, mfsdp__muon_whole_nbytes,
      mfsdp__muon_whole, mfsdp__muon_stage_commit};
  static const mfsdp__algorithm table[] = {
      {MFSDP_ALGORITHM_MUON, "muon", 1, 0, NULL, mfsdp__muon_group_check, mfsdp__muon_state,
       mfsdp__muon_scratch, mfsdp__muon_scale, mfsdp__muon_run, NULL, &muon_stages},
      {MFSDP_ALGORITHM_ADAMW, "adamw", 0, 0, NULL, mfsdp__adamw_group_check, mfsdp__adamw_state,
       NULL, NULL, mfsdp__adamw_run, NULL, NULL},
      {MFSDP_ALGORITHM_SHAMPOO, "shampoo", 1, 1, mfsdp__shampoo_supported,
       mfsdp__shampoo_group_check, mfsdp__shampoo_group_state, mfsdp__shampoo_scratch, NULL,
       mfsdp__shampoo_group_run, mfsdp__shampoo_field, NULL},
      {MFSDP_ALGORITHM_SOAP, "soap", 1, 1, mfsdp__soap_supported, mfsdp__soap_group_check,
       mfsdp__soap_group_state, mfsdp__soap_scratch, NULL, mfsdp__soap_group_run, mfsdp__soap_field,
       NULL},
  };
  size_t i;
  for (i = 0; i < sizeof(table) / sizeof(table[0]); ++i)
    if (table[i].kind == kind) return &table[i];
  return NULL;
}

/* The algorithm in lower case, as "muon"; "invalid" for none; never NULL. */
MFSDP_API const char *mfsdp_algorithm_kind_name(mfsdp_algorithm_kind kind) {
  const mfsdp__algorithm *algorithm = mfsdp__algorithm_of(kind);
  return algorithm != NULL ? algorithm->name : "invalid";
}

#endif /* MFSDP_OPTIMIZER_ALGORITHM_H */
