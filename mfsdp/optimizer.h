/* SPDX-License-Identifier: MIT */
/*
 * optimizer.h - routes each local tensor piece to an algorithm and a hyperparameter group, holds
 * the optimizer state in a described table, and runs the step from lists.
 *
 *   mfsdp_hyper_group groups[2] = {mfsdp_hyper_group_muon(MFSDP_MUON_JORDAN),
 *                                  mfsdp_hyper_group_adamw(3e-4, 0.01)};
 *   mfsdp_optimizer_desc desc = mfsdp_optimizer_desc_default();
 *   desc.groups = groups; desc.group_count = 2;
 *   MFSDP_TRY(mfsdp_optimizer_create(context, backend, &desc, tensors, tensor_count, &optimizer));
 *   ...
 *   MFSDP_TRY(mfsdp_optimizer_step(context, optimizer, queue, scalars, present));    // ENQUEUED
 *
 * What it is given is local and whole: the matrices and element runs that this rank owns. runtime.h
 * makes that list from a plan; a program without ranks makes it by hand.
 * Does not: communicate, know worlds or owners, or decide a tensor's role from its shape.
 * Link flags: -lm.
 */
#ifndef MFSDP_OPTIMIZER_H
#define MFSDP_OPTIMIZER_H

#include "adamw.h"
#include "muon.h"
#include "optimizer/algorithm.h"
#include "optimizer/types.h"
#include "shampoo.h"
#include "soap.h"

/* ---- validation ---- */

MFSDP_API mfsdp_status mfsdp__hyper_group_check(mfsdp_context *context, int32_t index,
                                                const mfsdp_hyper_group *group) {
  char clipped[40];
  const mfsdp__algorithm *algorithm = mfsdp__algorithm_of(group->algorithm);
  if (group->struct_nbytes != sizeof(*group))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "optimizer: groups[%d].struct_nbytes is %zu, needs %zu (use "
                      "mfsdp_hyper_group_muon, _adamw, _shampoo or _soap)",
                      (int)index, group->struct_nbytes, sizeof(*group));
  if (!(group->lr >= 0.0) || !(group->lr <= 1e30))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "optimizer: groups[%d].lr is %g, needs 0 or more, at most 1e30", (int)index,
                      group->lr);
  if (!(group->weight_decay >= 0.0) || !(group->weight_decay <= 1e30))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "optimizer: groups[%d].weight_decay is %g, needs 0 or more, at most 1e30",
                      (int)index, group->weight_decay);
  (void)snprintf(clipped, sizeof(clipped), "groups[%d].clipped", (int)index);
  MFSDP_TRY(mfsdp__flag_check(context, "optimizer", clipped, group->clipped));
  if (algorithm == NULL)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "optimizer: groups[%d].algorithm %d is unknown, needs %d (muon), %d (adamw), "
                      "%d (shampoo) or "
                      "%d (soap)",
                      (int)index, (int)group->algorithm, (int)MFSDP_ALGORITHM_MUON,
                      (int)MFSDP_ALGORITHM_ADAMW, (int)MFSDP_ALGORITHM_SHAMPOO,
                      (int)MFSDP_ALGORITHM_SOAP);
  return algorithm->check(context, group);
}

/* E_ARGUMENT with the field, its value and what it needs. */
MFSDP_API mfsdp_status mfsdp_optimizer_desc_check(mfsdp_context *context,
                                                  const mfsdp_optimizer_desc *desc) {
  int32_t i;
  if (desc == NULL || desc->struct_nbytes != sizeof(*desc))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "optimizer: desc is NULL or its struct_nbytes is not %zu (use "
                      "mfsdp_optimizer_desc_default)",
                      sizeof(*desc));
  if (desc->groups == NULL || desc->group_count < 1)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "optimizer: needs at least one hyperparameter group, has %d",
                      (int)desc->group_count);
  if (desc->state_space < MFSDP_SPACE_DEVICE || desc->state_space > MFSDP_SPACE_HOST)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "optimizer: state_space is %d, needs an mfsdp_space, 1 to %d",
                      (int)desc->state_space, (int)MFSDP_SPACE_HOST);
  for (i = 0; i < desc->group_count; ++i)
    MFSDP_TRY(mfsdp__hyper_group_check(context, i, &desc->groups[i]));
  return MFSDP_OK;
}

/* E_UNSUPPORTED, with what to install or set, if the backend lacks what a group's algorithm calls. The
 * description has been checked. */
MFSDP_API mfsdp_status mfsdp_optimizer_backend_check(mfsdp_context *context,
                                                     const mfsdp_backend *backend,
                                                     const mfsdp_optimizer_desc *desc) {
  int32_t i;
  for (i = 0; i < desc->group_count; ++i) {
    const mfsdp__algorithm *algorithm = mfsdp__algorithm_of(desc->groups[i].algorithm);
    if (algorithm->supported != NULL) MFSDP_TRY(algorithm->supported(context, backend));
  }
  return MFSDP_OK;
}

/*
 * Whether a parameter of this role may be in this group; `name` for the message. A matrix optimizer
 * on a tensor that may be cut is E_ARGUMENT: it would orthogonalize fragments.
 */
MFSDP_API mfsdp_status mfsdp_optimizer_route_check(mfsdp_context *context,
                                                   const mfsdp_optimizer_desc *desc,
                                                   const char *name, mfsdp_role role,
                                                   int32_t hyper_group) {
  const mfsdp__algorithm *algorithm;
  if (hyper_group < 0 || hyper_group >= desc->group_count)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "%s: hyper_group is %d, needs 0 to %d", name,
                      (int)hyper_group, (int)desc->group_count - 1);
  if (role != MFSDP_ROLE_MATRIX && role != MFSDP_ROLE_ELEMENTWISE)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "%s: role %s is not updated by an optimizer", name,
                      mfsdp_role_name(role));
  algorithm = mfsdp__algorithm_of(desc->groups[hyper_group].algorithm);
  if (role != MFSDP_ROLE_MATRIX && algorithm->needs_matrix)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "%s: group %d is %s, which needs role matrix, but the role is %s", name,
                      (int)hyper_group, algorithm->name, mfsdp_role_name(role));
  return MFSDP_OK;
}

/* Whether a tensor can be staged, its direction apart: E_UNSUPPORTED with the algorithm, or E_ARGUMENT.
 * The description and the tensor's route have been checked. */
MFSDP_API mfsdp_status mfsdp_optimizer_stage_check(mfsdp_context *context,
                                                   const mfsdp_optimizer_desc *desc,
                                                   const mfsdp_optimizer_tensor *tensor) {
  const mfsdp_hyper_group *group = &desc->groups[tensor->hyper_group];
  const mfsdp__algorithm *algorithm = mfsdp__algorithm_of(group->algorithm);
  if (algorithm->stages == NULL)
    return MFSDP_FAIL(context, MFSDP_E_UNSUPPORTED,
                      "%s: %s cannot be split into prepare, whole matrices and commit; muon can",
                      tensor->name, algorithm->name);
  if (desc->state_space != MFSDP_SPACE_DEVICE)
    return MFSDP_FAIL(context, MFSDP_E_UNSUPPORTED,
                      "%s: a staged tensor needs its master and state on the device (no offload)",
                      tensor->name);
  if (tensor->stage < 0 || tensor->whole_rows < 0 ||
      (tensor->whole_rows > 0 && tensor->whole_rows < tensor->rows))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "%s: stage is %d and whole_rows %lld; need 0 or more, and 0 or at least its "
                      "own rows (%lld)",
                      tensor->name, (int)tensor->stage, (long long)tensor->whole_rows,
                      (long long)tensor->rows);
  return algorithm->stages->check(context, group, tensor);
}

MFSDP_API mfsdp_status mfsdp__optimizer_staged_check(mfsdp_context *context,
                                                     const mfsdp_optimizer_desc *desc,
                                                     const mfsdp_optimizer_tensor *tensor) {
  if (tensor->count > 0 && tensor->direction == NULL)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "%s: staged, but direction is NULL", tensor->name);
  return mfsdp_optimizer_stage_check(context, desc, tensor);
}

MFSDP_API mfsdp_status mfsdp__optimizer_tensor_check(mfsdp_context *context,
                                                     const mfsdp_optimizer_desc *desc,
                                                     const mfsdp_optimizer_tensor *tensor) {
  int64_t product;
  if (tensor->name == NULL)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "optimizer: a tensor has no name");
  MFSDP_TRY(
      mfsdp_optimizer_route_check(context, desc, tensor->name, tensor->role, tensor->hyper_group));
  if (tensor->count < 0)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "%s: count is %lld, needs 0 or more", tensor->name,
                      (long long)tensor->count);
  if (tensor->role == MFSDP_ROLE_MATRIX &&
      (tensor->rows < 0 || tensor->cols < 0 ||
       !mfsdp_i64_mul(tensor->rows, tensor->cols, &product) || product != tensor->count))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "%s: %lld x %lld does not make %lld elements",
                      tensor->name, (long long)tensor->rows, (long long)tensor->cols,
                      (long long)tensor->count);
  if (tensor->count > 0 && (tensor->master == NULL || tensor->grad == NULL))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "%s: %s is NULL", tensor->name,
                      tensor->master == NULL ? "master" : "grad");
  if (tensor->count > 0 && tensor->param_data == NULL && desc->state_space != MFSDP_SPACE_DEVICE)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "%s: its master is not on the device, so it needs param_data", tensor->name);
  if (tensor->param < 0)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "%s: param is %d, needs 0 or more", tensor->name,
                      (int)tensor->param);
  if (tensor->param_data != NULL && mfsdp_dtype_nbytes(tensor->param_dtype) == 0)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "%s: param_dtype is %d, which is none",
                      tensor->name, (int)tensor->param_dtype);
  MFSDP_TRY(mfsdp__flag_check(context, tensor->name, "staged", tensor->staged));
  return tensor->staged ? mfsdp__optimizer_staged_check(context, desc, tensor) : MFSDP_OK;
}

/* E_ARGUMENT: an array is not aligned to its elements, or two of a tensor's share memory. E_OVERFLOW. */
MFSDP_API mfsdp_status mfsdp__optimizer_arrays_check(mfsdp_context *context,
                                                     const mfsdp_optimizer_tensor *tensor) {
  static const char *const names[] = {"master", "grad", "direction", "param_data"};
  const void *const data[] = {tensor->master, tensor->grad,
                              tensor->staged ? tensor->direction : NULL, tensor->param_data};
  const mfsdp_dtype dtypes[] = {MFSDP_F32, MFSDP_F32, MFSDP_F32, tensor->param_dtype};
  size_t nbytes[4] = {0, 0, 0, 0};
  int i, k;
  for (i = 0; i < 4; ++i) {
    if (data[i] == NULL) continue;
    if ((uintptr_t)data[i] % mfsdp_dtype_nbytes(dtypes[i]) != 0)
      return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "%s: %s is not aligned to its elements",
                        tensor->name, names[i]);
    if (!mfsdp_elements_nbytes(tensor->count, dtypes[i], &nbytes[i]))
      return MFSDP_FAIL(context, MFSDP_E_OVERFLOW, "%s: too large", tensor->name);
    for (k = 0; k < i; ++k)
      if (!mfsdp_ranges_apart(data[k], nbytes[k], data[i], nbytes[i]))
        return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "%s: %s and %s overlap", tensor->name,
                          names[k], names[i]);
  }
  return MFSDP_OK;
}

/* E_ARGUMENT: what two tensors write, or one reads and writes, shares memory. Sizes have been measured. */
MFSDP_API mfsdp_status mfsdp__optimizer_memory_check(mfsdp_context *context,
                                                     const mfsdp_optimizer_tensor *tensors,
                                                     int32_t tensor_count) {
  int32_t i, k;
  for (i = 0; i < tensor_count; ++i) {
    const mfsdp_optimizer_tensor *tensor = &tensors[i];
    if (tensor->count == 0) continue;
    MFSDP_TRY(mfsdp__optimizer_arrays_check(context, tensor));
    for (k = 0; k < i; ++k)
      if (tensors[k].count > 0 &&
          !mfsdp_ranges_apart(tensor->master, (size_t)tensor->count * sizeof(float),
                              tensors[k].master, (size_t)tensors[k].count * sizeof(float)))
        return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "%s: its master overlaps that of %s",
                          tensor->name, tensors[k].name);
  }
  return MFSDP_OK;
}

/* ---- set-up ---- */

/* Bytes of an array of `count` floats, padded to the alignment. */
MFSDP_API mfsdp_status mfsdp__optimizer_array_nbytes(mfsdp_context *context, const char *name,
                                                     int64_t count, size_t *nbytes) {
  int64_t padded = 0;
  if (!mfsdp_i64_align(count, &padded) || !mfsdp_elements_nbytes(padded, MFSDP_F32, nbytes))
    return MFSDP_FAIL(context, MFSDP_E_OVERFLOW, "%s: too large", name);
  return MFSDP_OK;
}

/* What one tensor's job would need alone. */
MFSDP_API mfsdp_status mfsdp__optimizer_work_nbytes(
    mfsdp_context *context, const mfsdp_backend *backend, const mfsdp_hyper_group *group,
    const mfsdp_optimizer_tensor *tensor, size_t *direction_nbytes, size_t *scratch_nbytes) {
  const mfsdp__algorithm *algorithm = mfsdp__algorithm_of(group->algorithm);
  *direction_nbytes = *scratch_nbytes = 0;
  if (algorithm->scratch == NULL || tensor->staged) return MFSDP_OK;
  if (!algorithm->alone)
    MFSDP_TRY(
        mfsdp__optimizer_array_nbytes(context, tensor->name, tensor->count, direction_nbytes));
  return algorithm->scratch(context, backend, group, tensor, 1, scratch_nbytes);
}

/* Adds one tensor's needs, but for job_count, which depends on its neighbours. The description has
 * been checked; the tensor's arrays are not looked at. */
MFSDP_API mfsdp_status mfsdp_optimizer_measure_tensor(mfsdp_context *context,
                                                      const mfsdp_backend *backend,
                                                      const mfsdp_optimizer_desc *desc,
                                                      const mfsdp_optimizer_tensor *tensor,
                                                      mfsdp_optimizer_sizes *sizes) {
  const mfsdp_hyper_group *group = &desc->groups[tensor->hyper_group];
  const mfsdp__algorithm *algorithm = mfsdp__algorithm_of(group->algorithm);
  mfsdp__state_shape shape;
  size_t nbytes = 0, all_nbytes = 0, direction_nbytes, scratch_nbytes;
  int32_t k;
  if (tensor->count == 0) return MFSDP_OK;
  MFSDP_TRY(mfsdp__optimizer_array_nbytes(context, tensor->name, tensor->count, &all_nbytes));
  ++sizes->item_count;
  sizes->staged_count += tensor->staged != 0;
  for (k = 0; algorithm->state(group, tensor, k, &shape); ++k) {
    MFSDP_TRY(
        mfsdp__optimizer_array_nbytes(context, tensor->name, shape.rows * shape.cols, &nbytes));
    ++sizes->state_count;
    if (!mfsdp_size_add(sizes->state_nbytes, nbytes, &sizes->state_nbytes) ||
        !mfsdp_size_add(all_nbytes, nbytes, &all_nbytes))
      return MFSDP_FAIL(context, MFSDP_E_OVERFLOW, "optimizer: the state overflows size_t");
  }
  if (desc->state_space != MFSDP_SPACE_DEVICE && all_nbytes > sizes->staging_nbytes)
    sizes->staging_nbytes = all_nbytes;
  MFSDP_TRY(mfsdp__optimizer_work_nbytes(context, backend, group, tensor, &direction_nbytes,
                                         &scratch_nbytes));
  if (direction_nbytes > sizes->direction_nbytes) sizes->direction_nbytes = direction_nbytes;
  if (scratch_nbytes > sizes->scratch_nbytes) sizes->scratch_nbytes = scratch_nbytes;
  return MFSDP_OK;
}

/* ---- which tensors share a job ---- */

/* The most items of the jobs that this tensor's kind is in: no more matrices than fit into the
 * workspace that the largest one needs anyway, so that batches cost no memory. */
MFSDP_API int64_t mfsdp__optimizer_job_limit(mfsdp_context *context, const mfsdp_backend *backend,
                                             const mfsdp_hyper_group *group, mfsdp_space space,
                                             const mfsdp_optimizer_tensor *tensor,
                                             const mfsdp_optimizer_sizes *sizes) {
  size_t direction_nbytes, scratch_nbytes, limit = INT32_MAX;
  if (space != MFSDP_SPACE_DEVICE || mfsdp__algorithm_of(group->algorithm)->alone) return 1;
  /* Cannot fail: measured before. */
  (void)mfsdp__optimizer_work_nbytes(context, backend, group, tensor, &direction_nbytes,
                                     &scratch_nbytes);
  if (direction_nbytes > 0 && sizes->direction_nbytes / direction_nbytes < limit)
    limit = sizes->direction_nbytes / direction_nbytes;
  if (scratch_nbytes > 0 && sizes->scratch_nbytes / scratch_nbytes < limit)
    limit = sizes->scratch_nbytes / scratch_nbytes;
  return (int64_t)limit;
}

/* Whether two tensors may share a job of this group. */
MFSDP_API int mfsdp__optimizer_alike(const mfsdp_hyper_group *group,
                                     const mfsdp_optimizer_tensor *a,
                                     const mfsdp_optimizer_tensor *b) {
  if (a->hyper_group != b->hyper_group || a->count == 0 || b->count == 0) return 0;
  if (a->staged || b->staged) return a->staged && b->staged; /* of any shape */
  return !mfsdp__algorithm_of(group->algorithm)->needs_matrix ||
         (a->rows == b->rows && a->cols == b->cols);
}

/* 1 if a tensor is the first of its job: jobs take tensors that are alike in the order of the list,
 * `limit` at a time. */
MFSDP_API int mfsdp__optimizer_opens_job(const mfsdp_hyper_group *group,
                                         const mfsdp_optimizer_tensor *tensors, int32_t index,
                                         int64_t limit) {
  int64_t before = 0;
  int32_t i;
  for (i = 0; i < index; ++i)
    before += mfsdp__optimizer_alike(group, &tensors[i], &tensors[index]);
  return before % limit == 0;
}

/* Bytes and counts that `create` will need for these tensors. Checks what create checks of them;
 * allocates nothing. E_ARGUMENT, E_OVERFLOW; E_UNSUPPORTED: the backend cannot do an algorithm. */
MFSDP_API mfsdp_status mfsdp_optimizer_measure(mfsdp_context *context, const mfsdp_backend *backend,
                                               const mfsdp_optimizer_desc *desc,
                                               const mfsdp_optimizer_tensor *tensors,
                                               int32_t tensor_count, mfsdp_optimizer_sizes *out) {
  int32_t g, i;
  memset(out, 0, sizeof(*out));
  MFSDP_TRY(mfsdp_optimizer_desc_check(context, desc));
  MFSDP_TRY(mfsdp_optimizer_backend_check(context, backend, desc));
  if (tensor_count < 0 || (tensor_count > 0 && tensors == NULL))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "optimizer: %d tensors at NULL",
                      (int)tensor_count);
  for (i = 0; i < tensor_count; ++i)
    MFSDP_TRY(mfsdp__optimizer_tensor_check(context, desc, &tensors[i]));
  for (g = 0; g < desc->group_count; ++g)
    for (i = 0; i < tensor_count; ++i)
      if (tensors[i].hyper_group == g)
        MFSDP_TRY(mfsdp_optimizer_measure_tensor(context, backend, desc, &tensors[i], out));
  for (i = 0; i < tensor_count; ++i) {
    const mfsdp_hyper_group *group = &desc->groups[tensors[i].hyper_group];
    if (tensors[i].count == 0) continue;
    out->job_count += mfsdp__optimizer_opens_job(
        group, tensors, i,
        mfsdp__optimizer_job_limit(context, backend, group, desc->state_space, &tensors[i], out));
  }
  if (!mfsdp_size_add(out->direction_nbytes, out->scratch_nbytes, &out->workspace_nbytes))
    return MFSDP_FAIL(context, MFSDP_E_OVERFLOW, "optimizer: the workspace overflows size_t");
  return mfsdp__optimizer_memory_check(context, tensors, tensor_count);
}

/* Gives everything back. The queue that ran its steps must be idle. NULL is allowed. */
MFSDP_API void mfsdp_optimizer_destroy(mfsdp_context *context, mfsdp_optimizer *optimizer) {
  if (optimizer == NULL) return;
  mfsdp_buffer_free(context, optimizer->backend, &optimizer->workspace);
  mfsdp_buffer_free(context, optimizer->backend, &optimizer->staging);
  mfsdp_buffer_free(context, optimizer->backend, &optimizer->state);
  mfsdp_buffer_free(context, optimizer->backend, &optimizer->items);
  mfsdp_table_free(context, optimizer->states, (size_t)optimizer->state_count,
                   sizeof(*optimizer->states));
  mfsdp_table_free(context, optimizer->stages, (size_t)optimizer->stage_capacity,
                   sizeof(*optimizer->stages));
  mfsdp_table_free(context, optimizer->jobs, (size_t)optimizer->job_count,
                   sizeof(*optimizer->jobs));
  mfsdp_table_free(context, optimizer->groups, (size_t)optimizer->group_count,
                   sizeof(*optimizer->groups));
  mfsdp_table_free(context, optimizer, 1, sizeof(*optimizer));
}

/* Writes the state entries of one tensor: its place in the state buffer, which *offset walks
 * through. */
MFSDP_API void mfsdp__optimizer_fill_states(mfsdp_optimizer *optimizer,
                                            const mfsdp_optimizer_tensor *tensors,
                                            int32_t tensor_index, size_t *offset, int32_t *index,
                                            mfsdp_fused_item *item) {
  const mfsdp_optimizer_tensor *tensor = &tensors[tensor_index];
  const mfsdp_hyper_group *group = &optimizer->groups[tensor->hyper_group];
  const mfsdp__algorithm *algorithm = mfsdp__algorithm_of(group->algorithm);
  mfsdp__state_shape shape;
  int32_t k;
  for (k = 0; algorithm->state(group, tensor, k, &shape); ++k) {
    mfsdp_optimizer_state *state = &optimizer->states[(*index)++];
    int64_t padded = 0;
    state->name = shape.name;
    state->tensor = tensor_index;
    state->dtype = MFSDP_F32;
    state->space = optimizer->state_space;
    state->rows = shape.rows;
    state->cols = shape.cols;
    state->count = shape.rows * shape.cols;
    state->data = (unsigned char *)optimizer->state.data + *offset;
    item->state[k] = (float *)state->data;
    (void)mfsdp_i64_align(state->count, &padded); /* cannot fail: measured before */
    *offset += (size_t)padded * sizeof(float);
  }
}

/* With offload the kernels see the staging area, one array after the other; the job keeps where the
 * arrays really are and how long they are. */
MFSDP_API void mfsdp__optimizer_offload_item(mfsdp_optimizer *optimizer,
                                             const mfsdp_optimizer_state *states,
                                             mfsdp_fused_item *item, mfsdp__optimizer_job *job) {
  float *staging = (float *)optimizer->staging.data;
  int64_t padded = 0;
  int32_t k;
  job->offloaded[0] = item->master;
  job->offloaded_count[0] = item->count;
  item->master = staging;
  for (k = 0; k < MFSDP_FUSED_STATE_COUNT && item->state[k] != NULL; ++k) {
    (void)mfsdp_i64_align(job->offloaded_count[k], &padded);
    staging += padded;
    job->offloaded[1 + k] = item->state[k];
    job->offloaded_count[1 + k] = states[k].count;
    item->state[k] = staging;
  }
}

MFSDP_API mfsdp_fused_item mfsdp__optimizer_item(const mfsdp_optimizer *optimizer,
                                                 const mfsdp_hyper_group *group,
                                                 const mfsdp_optimizer_tensor *tensor) {
  const mfsdp__algorithm *algorithm = mfsdp__algorithm_of(group->algorithm);
  mfsdp_fused_item item;
  memset(&item, 0, sizeof(item));
  item.master = tensor->master;
  item.param = tensor->param_data;
  item.param_dtype = tensor->param_data ? (int32_t)tensor->param_dtype : (int32_t)MFSDP_F32;
  item.grad = tensor->grad;
  item.count = tensor->count;
  item.present_index = tensor->param;
  item.rows = tensor->role == MFSDP_ROLE_MATRIX ? tensor->rows : 1;
  item.scale = algorithm->scale != NULL ? algorithm->scale(group, tensor) : 1.0;
  if (tensor->staged)
    item.direction = tensor->direction;
  else if (algorithm->scratch != NULL && !algorithm->alone)
    item.direction = (float *)optimizer->workspace.data;
  return item;
}

/* Where emission stands. */
typedef struct mfsdp__optimizer_cursor {
  size_t state_offset;
  int32_t item, state, job;
} mfsdp__optimizer_cursor;

/* Puts one tensor behind the others of a job. */
MFSDP_API void mfsdp__optimizer_emit_item(mfsdp_optimizer *optimizer, mfsdp__optimizer_job *job,
                                          const mfsdp_optimizer_tensor *tensors, int32_t index,
                                          mfsdp_fused_item *items, mfsdp__optimizer_cursor *at) {
  const mfsdp_optimizer_tensor *tensor = &tensors[index];
  mfsdp_fused_item *item = &items[at->item];
  const mfsdp_optimizer_state *states = &optimizer->states[at->state];
  *item = mfsdp__optimizer_item(optimizer, &optimizer->groups[tensor->hyper_group], tensor);
  if (item->direction != NULL && !tensor->staged)
    item->direction += job->item_count * job->direction_stride;
  mfsdp__optimizer_fill_states(optimizer, tensors, index, &at->state_offset, &at->state, item);
  if (optimizer->state_space != MFSDP_SPACE_DEVICE)
    mfsdp__optimizer_offload_item(optimizer, states, item, job);
  ++job->item_count;
  ++at->item;
  job->only = *item;
  job->total_count += tensor->count;
  if (tensor->count > job->max_count) job->max_count = tensor->count;
}

/* The lowest stage above `after` of a group's staged tensors; -1: none. */
MFSDP_API int32_t mfsdp__optimizer_next_stage(const mfsdp_optimizer_tensor *tensors,
                                              int32_t tensor_count, int32_t hyper_group,
                                              int32_t after) {
  int32_t i, next = -1;
  for (i = 0; i < tensor_count; ++i)
    if (tensors[i].staged && tensors[i].count > 0 && tensors[i].hyper_group == hyper_group &&
        tensors[i].stage > after && (next < 0 || tensors[i].stage < next))
      next = tensors[i].stage;
  return next;
}

/* The items of a staged job: stage by stage, so that each is a run of them. */
MFSDP_API void mfsdp__optimizer_emit_stages(mfsdp_optimizer *optimizer, mfsdp__optimizer_job *job,
                                            const mfsdp_optimizer_tensor *tensors,
                                            int32_t tensor_count, mfsdp_fused_item *items,
                                            mfsdp__optimizer_cursor *at) {
  int32_t number = -1, i;
  while ((number = mfsdp__optimizer_next_stage(tensors, tensor_count, job->hyper_group, number)) >=
         0) {
    mfsdp__optimizer_stage *stage = &optimizer->stages[optimizer->stage_count++];
    stage->stage = number;
    stage->hyper_group = job->hyper_group;
    stage->first_item = at->item;
    for (i = 0; i < tensor_count; ++i) {
      if (!tensors[i].staged || tensors[i].count == 0 || tensors[i].stage != number ||
          tensors[i].hyper_group != job->hyper_group)
        continue;
      mfsdp__optimizer_emit_item(optimizer, job, tensors, i, items, at);
      ++stage->item_count;
      stage->total_count += tensors[i].count;
      if (tensors[i].count > stage->max_count) stage->max_count = tensors[i].count;
    }
  }
}

/* The job that tensor `first` opens: it and the next ones that are alike, up to `limit`; of staged
 * ones, all. */
MFSDP_API void mfsdp__optimizer_emit_job(mfsdp_optimizer *optimizer,
                                         const mfsdp_optimizer_tensor *tensors,
                                         int32_t tensor_count, int32_t first, int64_t limit,
                                         mfsdp_fused_item *items, mfsdp__optimizer_cursor *at) {
  const mfsdp_hyper_group *group = &optimizer->groups[tensors[first].hyper_group];
  mfsdp__optimizer_job *job = &optimizer->jobs[at->job++];
  int32_t i;
  job->hyper_group = tensors[first].hyper_group;
  job->first_item = at->item;
  job->rows = tensors[first].rows;
  job->cols = tensors[first].cols;
  job->staged = tensors[first].staged;
  (void)mfsdp_i64_align(tensors[first].count, &job->direction_stride); /* measured before */
  if (job->staged) {
    mfsdp__optimizer_emit_stages(optimizer, job, tensors, tensor_count, items, at);
    return;
  }
  for (i = first; i < tensor_count && job->item_count < limit; ++i)
    if (mfsdp__optimizer_alike(group, &tensors[first], &tensors[i]))
      mfsdp__optimizer_emit_item(optimizer, job, tensors, i, items, at);
}

/* Emits jobs and items: groups in order, jobs in the order of their first tensors, tensors in order,
 * so the list depends on nothing else. */
MFSDP_API void mfsdp__optimizer_emit(mfsdp_context *context, mfsdp_optimizer *optimizer,
                                     const mfsdp_optimizer_tensor *tensors, int32_t tensor_count,
                                     const mfsdp_optimizer_sizes *sizes, mfsdp_fused_item *items) {
  mfsdp__optimizer_cursor at;
  int32_t g, i;
  memset(&at, 0, sizeof(at));
  for (g = 0; g < optimizer->group_count; ++g)
    for (i = 0; i < tensor_count; ++i) {
      const mfsdp_hyper_group *group = &optimizer->groups[g];
      int64_t limit;
      if (tensors[i].hyper_group != g || tensors[i].count == 0) continue;
      limit = mfsdp__optimizer_job_limit(context, optimizer->backend, group, optimizer->state_space,
                                         &tensors[i], sizes);
      if (mfsdp__optimizer_opens_job(group, tensors, i, limit))
        mfsdp__optimizer_emit_job(optimizer, tensors, tensor_count, i, limit, items, &at);
    }
}

MFSDP_API mfsdp_status mfsdp__optimizer_alloc(mfsdp_context *context, mfsdp_optimizer *optimizer,
                                              const mfsdp_optimizer_desc *desc,
                                              const mfsdp_optimizer_sizes *sizes) {
  const mfsdp_backend *backend = optimizer->backend;
  void *memory;
  MFSDP_TRY(mfsdp_table_alloc(context, (size_t)desc->group_count, sizeof(*optimizer->groups),
                              "optimizer groups", &memory));
  optimizer->groups = (mfsdp_hyper_group *)memory;
  optimizer->group_count = desc->group_count;
  memcpy(optimizer->groups, desc->groups, (size_t)desc->group_count * sizeof(*desc->groups));
  MFSDP_TRY(mfsdp_table_alloc(context, (size_t)sizes->job_count, sizeof(*optimizer->jobs),
                              "optimizer jobs", &memory));
  optimizer->jobs = (mfsdp__optimizer_job *)memory;
  optimizer->job_count = sizes->job_count;
  MFSDP_TRY(mfsdp_table_alloc(context, (size_t)sizes->staged_count, sizeof(*optimizer->stages),
                              "optimizer stages", &memory));
  optimizer->stages = (mfsdp__optimizer_stage *)memory;
  optimizer->stage_capacity = sizes->staged_count; /* at most one tensor each */
  MFSDP_TRY(mfsdp_table_alloc(context, (size_t)sizes->state_count, sizeof(*optimizer->states),
                              "optimizer state table", &memory));
  optimizer->states = (mfsdp_optimizer_state *)memory;
  optimizer->state_count = sizes->state_count;
  optimizer->item_count = sizes->item_count;
  optimizer->direction_nbytes = sizes->direction_nbytes;
  optimizer->state_space = desc->state_space;
  MFSDP_TRY(mfsdp_buffer_alloc(context, backend,
                               (size_t)sizes->item_count * sizeof(mfsdp_fused_item),
                               MFSDP_SPACE_DEVICE, MFSDP_MEMORY_TABLE, &optimizer->items));
  MFSDP_TRY(mfsdp_buffer_alloc(context, backend, sizes->state_nbytes, desc->state_space,
                               MFSDP_MEMORY_STATE, &optimizer->state));
  MFSDP_TRY(mfsdp_buffer_alloc(context, backend, sizes->staging_nbytes, MFSDP_SPACE_DEVICE,
                               MFSDP_MEMORY_STAGING, &optimizer->staging));
  return mfsdp_buffer_alloc(context, backend, sizes->direction_nbytes + sizes->scratch_nbytes,
                            MFSDP_SPACE_DEVICE, MFSDP_MEMORY_WORKSPACE, &optimizer->workspace);
}

/* The item table is built on the host and copied once; state and workspace start as zeros. */
MFSDP_API mfsdp_status mfsdp__optimizer_upload(mfsdp_context *context, mfsdp_optimizer *optimizer,
                                               mfsdp_queue *queue, mfsdp_event *event,
                                               const mfsdp_fused_item *items) {
  const mfsdp_backend_ops *ops = optimizer->backend->ops;
  void *self = optimizer->backend->self;
  MFSDP_TRY(ops->copy(self, queue, optimizer->items.data, MFSDP_SPACE_DEVICE, items,
                      MFSDP_SPACE_HOST, optimizer->items.nbytes));
  if (optimizer->state_space == MFSDP_SPACE_DEVICE)
    MFSDP_TRY(ops->fill_bytes(self, queue, optimizer->state.data, 0, optimizer->state.nbytes));
  else if (optimizer->state.nbytes > 0) /* PINNED and HOST are the host's to write */
    memset(optimizer->state.data, 0, optimizer->state.nbytes);
  MFSDP_TRY(
      ops->fill_bytes(self, queue, optimizer->workspace.data, 0, optimizer->workspace.nbytes));
  MFSDP_TRY(ops->event_record(self, queue, event));
  return ops->event_wait(self, context, event, INT64_MAX);
}

MFSDP_API mfsdp_status mfsdp__optimizer_fill(mfsdp_context *context, mfsdp_optimizer *optimizer,
                                             const mfsdp_optimizer_tensor *tensors,
                                             int32_t tensor_count,
                                             const mfsdp_optimizer_sizes *sizes) {
  const mfsdp_backend *backend = optimizer->backend;
  mfsdp_queue *queue = NULL;
  mfsdp_event *event = NULL;
  void *items = NULL;
  mfsdp_status status = mfsdp_table_alloc(context, (size_t)optimizer->item_count,
                                          sizeof(mfsdp_fused_item), "optimizer items", &items);
  if (status == MFSDP_OK)
    status = backend->ops->queue_create(backend->self, context, "optimizer set-up", &queue);
  if (status == MFSDP_OK) status = backend->ops->event_create(backend->self, context, &event);
  if (status == MFSDP_OK) {
    mfsdp__optimizer_emit(context, optimizer, tensors, tensor_count, sizes,
                          (mfsdp_fused_item *)items);
    status = mfsdp__optimizer_upload(context, optimizer, queue, event, (mfsdp_fused_item *)items);
  }
  if (event != NULL) backend->ops->event_destroy(backend->self, context, event);
  if (queue != NULL) backend->ops->queue_destroy(backend->self, context, queue);
  mfsdp_table_free(context, items, (size_t)optimizer->item_count, sizeof(mfsdp_fused_item));
  return status;
}

/*
 * Makes the optimizer of a list of local tensors, with zeroed state. The tensors' arrays must outlive
 * it (the list itself need not, names must); a tensor's arrays share no memory, nor do two masters.
 * COMPLETE. E_ARGUMENT and E_UNSUPPORTED (a backend without eigh, for Shampoo and SOAP) before anything
 * is allocated; E_MEMORY and backend errors leave nothing behind; *out is NULL then.
 */
MFSDP_API mfsdp_status mfsdp_optimizer_create(mfsdp_context *context, const mfsdp_backend *backend,
                                              const mfsdp_optimizer_desc *desc,
                                              const mfsdp_optimizer_tensor *tensors,
                                              int32_t tensor_count, mfsdp_optimizer **out) {
  mfsdp_optimizer_sizes sizes;
  mfsdp_optimizer *optimizer;
  mfsdp_status status;
  void *memory;
  if (out == NULL) return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "optimizer: out is NULL");
  *out = NULL;
  MFSDP_TRY(mfsdp_backend_check(context, backend));
  MFSDP_TRY(mfsdp_optimizer_measure(context, backend, desc, tensors, tensor_count, &sizes));
  MFSDP_TRY(mfsdp_table_alloc(context, 1, sizeof(*optimizer), "optimizer", &memory));
  optimizer = (mfsdp_optimizer *)memory;
  optimizer->backend = backend;
  status = mfsdp__optimizer_alloc(context, optimizer, desc, &sizes);
  if (status == MFSDP_OK)
    status = mfsdp__optimizer_fill(context, optimizer, tensors, tensor_count, &sizes);
  if (status != MFSDP_OK) {
    mfsdp_optimizer_destroy(context, optimizer);
    return status;
  }
  *out = optimizer;
  return MFSDP_OK;
}

/* ---- state and step ---- */

/* The table of all state arrays, *count entries; valid until destroy. Zeroed by create. */
MFSDP_API const mfsdp_optimizer_state *mfsdp_optimizer_states(const mfsdp_optimizer *optimizer,
                                                              int32_t *count) {
  *count = optimizer->state_count;
  return optimizer->states;
}

/* Brings a job's master and states to the staging area (back 0) or back to where they live. */
MFSDP_API mfsdp_status mfsdp__optimizer_transfer(mfsdp_optimizer *optimizer, mfsdp_queue *queue,
                                                 const mfsdp__optimizer_job *job, int back) {
  const mfsdp_backend *b = optimizer->backend;
  float *staged = (float *)optimizer->staging.data;
  int32_t k;
  for (k = 0; k < 1 + MFSDP_FUSED_STATE_COUNT && job->offloaded[k] != NULL; ++k) {
    const size_t nbytes = (size_t)job->offloaded_count[k] * sizeof(float);
    int64_t padded = 0;
    if (back)
      MFSDP_TRY(b->ops->copy(b->self, queue, job->offloaded[k], optimizer->state_space, staged,
                             MFSDP_SPACE_DEVICE, nbytes));
    else
      MFSDP_TRY(b->ops->copy(b->self, queue, staged, MFSDP_SPACE_DEVICE, job->offloaded[k],
                             optimizer->state_space, nbytes));
    (void)mfsdp_i64_align(job->offloaded_count[k], &padded);
    staged += padded;
  }
  return MFSDP_OK;
}

/* Goes on from another run's count of attempted steps, skipped ones among them: the phase of Shampoo's
 * and SOAP's intervals. The states are the caller's to bring. E_ARGUMENT: negative. */
MFSDP_API mfsdp_status mfsdp_optimizer_resume(mfsdp_context *context, mfsdp_optimizer *optimizer,
                                              int64_t attempted_steps) {
  if (attempted_steps < 0)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "optimizer: attempted_steps is %lld, needs 0 or more",
                      (long long)attempted_steps);
  optimizer->attempted_steps = attempted_steps;
  return MFSDP_OK;
}

/* ---- staged tensors: the update in three parts ---- */

/*
 * Writes the directions of all staged tensors of this stage number (none is fine), from gradients and
 * momenta, which are only read; so it may run before the verdict, on any queue. Of `scalars` (DEVICE, one
 * per hyperparameter group) only what scales the gradient counts; where they say that a step writes
 * nothing, or `present` that there is no gradient, directions may stay as they were. Whole matrices are
 * then orthogonalized, and mfsdp_optimizer_step, on a queue that comes after all of it, commits.
 * ENQUEUED; allocates nothing. E_ARGUMENT: a NULL that is needed.
 */
MFSDP_API mfsdp_status mfsdp_optimizer_prepare(mfsdp_context *context,
                                               const mfsdp_optimizer *optimizer, mfsdp_queue *queue,
                                               int32_t stage, const mfsdp_step_scalars *scalars,
                                               const uint32_t *present) {
  int32_t i;
  if (optimizer == NULL || scalars == NULL)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "optimizer prepare: %s is NULL",
                      optimizer == NULL ? "optimizer" : "scalars");
  for (i = 0; i < optimizer->stage_count; ++i) {
    const mfsdp__optimizer_stage *at = &optimizer->stages[i];
    const mfsdp__algorithm *algorithm =
        mfsdp__algorithm_of(optimizer->groups[at->hyper_group].algorithm);
    if (at->stage == stage)
      MFSDP_TRY(algorithm->stages->prepare(context, optimizer, queue, at, scalars, present));
  }
  return MFSDP_OK;
}

/* Bytes of workspace of mfsdp_optimizer_orthogonalize. E_ARGUMENT; E_UNSUPPORTED: the group's algorithm
 * cannot be staged; E_OVERFLOW. */
MFSDP_API mfsdp_status mfsdp_optimizer_orthogonalize_nbytes(mfsdp_context *context,
                                                            const mfsdp_hyper_group *group,
                                                            int64_t rows, int64_t cols,
                                                            int64_t count, size_t *nbytes) {
  const mfsdp__algorithm *algorithm;
  if (group == NULL)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "optimizer orthogonalize: group is NULL");
  algorithm = mfsdp__algorithm_of(group->algorithm);
  if (algorithm == NULL || algorithm->stages == NULL)
    return MFSDP_FAIL(context, MFSDP_E_UNSUPPORTED, "optimizer: %s has no part for whole matrices",
                      algorithm == NULL ? "an unknown algorithm" : algorithm->name);
  return algorithm->stages->whole_nbytes(context, group, rows, cols, count, nbytes);
}

/*
 * Orthogonalizes `count` prepared directions in place: rows x cols matrices, fp32, DEVICE, each `stride`
 * elements behind the one before. Each gets the bits it would get alone. `workspace`: DEVICE, aligned to
 * MFSDP_ALIGN_NBYTES, not shared with work in flight. ENQUEUED. E_ARGUMENT, E_UNSUPPORTED, E_OVERFLOW.
 */
MFSDP_API mfsdp_status mfsdp_optimizer_orthogonalize(mfsdp_context *context,
                                                     const mfsdp_optimizer *optimizer,
                                                     mfsdp_queue *queue, int32_t hyper_group,
                                                     int64_t rows, int64_t cols, int64_t count,
                                                     float *direction, int64_t stride,
                                                     void *workspace, size_t workspace_nbytes) {
  const mfsdp_hyper_group *group;
  const mfsdp__algorithm *algorithm;
  if (optimizer == NULL || hyper_group < 0 || hyper_group >= optimizer->group_count)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "optimizer orthogonalize: needs an optimizer with group %d",
                      (int)hyper_group);
  group = &optimizer->groups[hyper_group];
  algorithm = mfsdp__algorithm_of(group->algorithm);
  if (algorithm->stages == NULL)
    return MFSDP_FAIL(context, MFSDP_E_UNSUPPORTED, "optimizer: %s has no part for whole matrices",
                      algorithm->name);
  return algorithm->stages->whole(context, optimizer->backend, queue, group, rows, cols, count,
                                  direction, stride, workspace, workspace_nbytes);
}

/* ---- the step ---- */

/*
 * Updates every tensor (staged ones from their directions): replays the jobs, and counts the step as attempted. `scalars`: one per
 * hyperparameter group, DEVICE; `present`: one word per parameter, DEVICE, or NULL when every
 * parameter has a gradient. ENQUEUED;
 * results are complete when an event recorded on `queue` later has passed. Allocates nothing.
 * Deterministic. A step whose lr or other factor is no finite number touches nothing. AdamW and Muon do
 * not look into gradients: set scalars.skip for a step where some are not finite, as the runtime's
 * verdict does.
 */
MFSDP_API mfsdp_status mfsdp_optimizer_step(mfsdp_context *context, mfsdp_optimizer *optimizer,
                                            mfsdp_queue *queue, const mfsdp_step_scalars *scalars,
                                            const uint32_t *present) {
  int32_t j;
  if (optimizer == NULL)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "optimizer: it is NULL, needs a created one");
  if (scalars == NULL && optimizer->job_count > 0)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "optimizer: scalars is NULL, needs %d of them",
                      (int)optimizer->group_count);
  for (j = 0; j < optimizer->job_count; ++j) {
    const mfsdp__optimizer_job *job = &optimizer->jobs[j];
    const mfsdp__algorithm *algorithm =
        mfsdp__algorithm_of(optimizer->groups[job->hyper_group].algorithm);
    MFSDP_TRY(mfsdp__optimizer_transfer(optimizer, queue, job, 0));
    MFSDP_TRY((job->staged ? algorithm->stages->commit : algorithm->run)(context, optimizer, queue,
                                                                         job, scalars, present));
    MFSDP_TRY(mfsdp__optimizer_transfer(optimizer, queue, job, 1));
  }
  ++optimizer->attempted_steps;
  return MFSDP_OK;
}

#endif /* MFSDP_OPTIMIZER_H */
