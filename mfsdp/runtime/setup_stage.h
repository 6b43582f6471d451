/* SPDX-License-Identifier: MIT */
/*
 * runtime/setup_stage.h - tables and memory of the step in backward: which of this rank's matrices
 * are staged, where their directions lie, and what is worked on together. Part of runtime.h.
 *
 * Matrices of a unit that have one shape and one hyperparameter group share a Newton-Schulz call, as
 * many at a time as fit into the workspace that the largest matrix of the rank needs alone.
 * Link flags: none.
 */
#ifndef MFSDP_RUNTIME_SETUP_STAGE_H
#define MFSDP_RUNTIME_SETUP_STAGE_H

#include "setup_units.h"
#include "stage.h"

/* Matrices like tensor `first`, itself included, that are staged with it. */
MFSDP_API int mfsdp__stage_alike(const mfsdp_optimizer_tensor *a, const mfsdp_optimizer_tensor *b) {
  return b->staged && b->count > 0 && b->stage == a->stage && b->hyper_group == a->hyper_group &&
         b->rows == a->rows && b->cols == a->cols;
}

/* How many matrices like this one share a call. */
MFSDP_API mfsdp_status mfsdp__stage_limit(mfsdp_runtime *rt, const mfsdp_optimizer_tensor *tensor,
                                          int32_t *limit) {
  size_t nbytes;
  MFSDP_TRY(mfsdp_optimizer_orthogonalize_nbytes(rt->context,
                                                 &rt->desc->optimizer->groups[tensor->hyper_group],
                                                 tensor->rows, tensor->cols, 1, &nbytes));
  *limit = nbytes == 0 || rt->stages.workspace.nbytes / nbytes > INT32_MAX
               ? INT32_MAX
               : (int32_t)(rt->stages.workspace.nbytes / nbytes);
  return MFSDP_OK;
}

/* Gives directions, from `place` on, to tensor `first` and those like it behind it, and makes their
 * jobs. */
MFSDP_API mfsdp_status mfsdp__stage_emit_jobs(mfsdp_runtime *rt, mfsdp_optimizer_tensor *tensors,
                                              int32_t count, int32_t first, float **place) {
  const mfsdp_optimizer_tensor *like = &tensors[first];
  mfsdp__stages *s = &rt->stages;
  mfsdp__stage_job *job = NULL;
  int64_t stride = like->count;
  int32_t limit = 1, i;
  MFSDP_TRY(mfsdp__stage_limit(rt, like, &limit));
  (void)mfsdp_i64_align(like->count, &stride); /* the plan bounds it */
  for (i = first; i < count; ++i) {
    if (!mfsdp__stage_alike(like, &tensors[i])) continue;
    if (job == NULL || job->count == limit) {
      job = &s->jobs[s->job_count++];
      job->hyper_group = like->hyper_group;
      job->rows = like->rows;
      job->cols = like->cols;
      job->stride = stride;
      job->direction = *place;
      ++rt->units[like->stage].stage_count;
    }
    tensors[i].direction = *place;
    *place += stride;
    ++job->count;
  }
  return MFSDP_OK;
}

/* Sets the directions of the staged tensors in the list, unit by unit. */
MFSDP_API mfsdp_status mfsdp__stage_emit(mfsdp_runtime *rt, mfsdp_optimizer_tensor *tensors,
                                         int32_t count) {
  float *place = (float *)rt->stages.directions.data;
  int32_t u, i;
  for (u = 0; u < rt->unit_count; ++u) {
    rt->units[u].stage_first = rt->stages.job_count;
    for (i = 0; i < count; ++i)
      if (tensors[i].staged && tensors[i].stage == u && tensors[i].count > 0 &&
          tensors[i].direction == NULL)
        MFSDP_TRY(mfsdp__stage_emit_jobs(rt, tensors, count, i, &place));
  }
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__stage_alloc(mfsdp_runtime *rt, const mfsdp__sizes *sizes) {
  const size_t nbytes = (size_t)rt->hyper_count * sizeof(mfsdp_step_scalars);
  const mfsdp_backend_ops *ops = rt->backend->ops;
  void *self = rt->backend->self;
  mfsdp__stages *s = &rt->stages;
  void *memory;
  MFSDP_TRY(mfsdp_table_alloc(rt->context, (size_t)sizes->stage_tensor_count, sizeof(*s->jobs),
                              "runtime stages", &memory));
  s->jobs = (mfsdp__stage_job *)memory;
  s->job_capacity = sizes->stage_tensor_count;
  MFSDP_TRY(mfsdp__setup_buffer(rt, sizes->direction_nbytes, MFSDP_SPACE_DEVICE,
                                MFSDP_MEMORY_STAGING, &s->directions));
  MFSDP_TRY(mfsdp__setup_buffer(rt, sizes->stage_workspace_nbytes, MFSDP_SPACE_DEVICE,
                                MFSDP_MEMORY_WORKSPACE, &s->workspace));
  MFSDP_TRY(mfsdp__setup_buffer(rt, nbytes, MFSDP_SPACE_DEVICE, MFSDP_MEMORY_TABLE, &s->scalars));
  MFSDP_TRY(
      mfsdp__setup_buffer(rt, nbytes, MFSDP_SPACE_PINNED, MFSDP_MEMORY_TABLE, &s->host_scalars));
  MFSDP_TRY(ops->event_create(self, rt->context, &s->landed));
  MFSDP_TRY(ops->event_create(self, rt->context, &s->copied));
  MFSDP_TRY(ops->event_create(self, rt->context, &s->done));
  s->begin = mfsdp_trace_mark_make(rt->context, 1, "stage", "stage");
  s->end = mfsdp_trace_mark_make(rt->context, 0, "stage", "stage");
  return ops->queue_create(self, rt->context, "stage", &s->queue);
}

/* The list has been made, the directions apart. Nothing is held where nothing is staged. */
MFSDP_API mfsdp_status mfsdp__setup_stages(mfsdp_runtime *rt, const mfsdp__sizes *sizes,
                                           mfsdp_optimizer_tensor *tensors, int32_t count) {
  if (sizes->stage_tensor_count == 0) return MFSDP_OK;
  MFSDP_TRY(mfsdp__stage_alloc(rt, sizes));
  return mfsdp__stage_emit(rt, tensors, count);
}

MFSDP_API void mfsdp__teardown_stages(mfsdp_runtime *rt) {
  const mfsdp_backend_ops *ops = rt->backend->ops;
  void *self = rt->backend->self;
  mfsdp__stages *s = &rt->stages;
  if (s->queue != NULL) ops->queue_destroy(self, rt->context, s->queue);
  if (s->done != NULL) ops->event_destroy(self, rt->context, s->done);
  if (s->copied != NULL) ops->event_destroy(self, rt->context, s->copied);
  if (s->landed != NULL) ops->event_destroy(self, rt->context, s->landed);
  mfsdp_buffer_free(rt->context, rt->backend, &s->host_scalars);
  mfsdp_buffer_free(rt->context, rt->backend, &s->scalars);
  mfsdp_buffer_free(rt->context, rt->backend, &s->workspace);
  mfsdp_buffer_free(rt->context, rt->backend, &s->directions);
  mfsdp_table_free(rt->context, s->jobs, (size_t)s->job_capacity, sizeof(*s->jobs));
}

#endif /* MFSDP_RUNTIME_SETUP_STAGE_H */
