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

typedef enum mfsdp_algorithm_kind {
  MFSDP_ALGORITHM_MUON = 1, /* needs whole matrices: role MATRIX only */
  MFSDP_ALGORITHM_ADAMW     /* any trainable role */
} mfsdp_algorithm_kind;

/* The algorithm in lower case, as "muon"; "invalid" for none; never NULL. */
MFSDP_API const char *mfsdp_algorithm_kind_name(mfsdp_algorithm_kind kind) {
  switch (kind) {
  case MFSDP_ALGORITHM_MUON: return "muon";
  case MFSDP_ALGORITHM_ADAMW: return "adamw";
  }
  return "invalid";
}

/* A hyperparameter group: parameters name it by its index in the description. */
typedef struct mfsdp_hyper_group {
  size_t struct_nbytes;
  mfsdp_algorithm_kind algorithm;
  double lr, weight_decay; /* lr may be 0; the schedule multiplies it */
  int32_t clipped;         /* 1: the global-norm clip scales this group's gradients */
  mfsdp_muon_desc muon;    /* read by MUON */
  mfsdp_adamw_desc adamw;  /* read by ADAMW */
} mfsdp_hyper_group;

/* A Muon group at the preset's lr and decay; clipping does not touch its scale-free input. */
MFSDP_API mfsdp_hyper_group mfsdp_hyper_group_muon(mfsdp_muon_preset preset) {
  mfsdp_hyper_group group;
  memset(&group, 0, sizeof(group));
  group.struct_nbytes = sizeof(group);
  group.algorithm = MFSDP_ALGORITHM_MUON;
  group.muon = mfsdp_muon_desc_preset(preset);
  group.adamw = mfsdp_adamw_desc_default();
  group.lr = group.muon.default_lr;
  group.weight_decay = group.muon.default_weight_decay;
  return group;
}

/* An AdamW group with torch's betas and eps; clipped. */
MFSDP_API mfsdp_hyper_group mfsdp_hyper_group_adamw(double lr, double weight_decay) {
  mfsdp_hyper_group group = mfsdp_hyper_group_muon(MFSDP_MUON_TORCH);
  group.algorithm = MFSDP_ALGORITHM_ADAMW;
  group.lr = lr;
  group.weight_decay = weight_decay;
  group.clipped = 1;
  return group;
}

typedef struct mfsdp_optimizer_desc {
  size_t struct_nbytes;
  const mfsdp_hyper_group *groups; /* group_count, made by mfsdp_hyper_group_...; copied */
  int32_t group_count;
  mfsdp_space
      state_space; /* of masters and state. Not DEVICE: offload, each step brings one tensor after
                            * the other to the device and back */
} mfsdp_optimizer_desc;

/* No groups (at least one must be set), masters and state on the device. */
MFSDP_API mfsdp_optimizer_desc mfsdp_optimizer_desc_default(void) {
  mfsdp_optimizer_desc desc;
  memset(&desc, 0, sizeof(desc));
  desc.struct_nbytes = sizeof(desc);
  desc.state_space = MFSDP_SPACE_DEVICE;
  return desc;
}

/* A local piece: a whole matrix, or a run of elements. All arrays DEVICE, fp32 unless said. */
typedef struct mfsdp_optimizer_tensor {
  const char *name; /* for messages and state tables; must outlive the optimizer */
  mfsdp_role role;  /* MATRIX or ELEMENTWISE */
  int32_t hyper_group;
  int32_t param;      /* index into `present`, 0 or more; several pieces may share it */
  int64_t rows, cols; /* of a MATRIX; rows * cols == count */
  int64_t count;      /* elements; 0 is legal and gets no update */
  float *master;      /* in the description's state_space; updated */
  void *param_data; /* compute-dtype copy written with the master; NULL: none (not with offload) */
  mfsdp_dtype param_dtype;
  const float *grad; /* the accumulator; read */
} mfsdp_optimizer_tensor;

/* One array of optimizer state: what checkpoints and offload read instead of switching on
 * algorithms. */
typedef struct mfsdp_optimizer_state {
  const char *name; /* "momentum", "exp_avg", "exp_avg_sq" */
  int32_t tensor;   /* index in the list given to create */
  mfsdp_dtype dtype;
  mfsdp_space space;
  int64_t count; /* same shape and order as the piece */
  void *data;
} mfsdp_optimizer_state;

/* A run of items that one fused call serves; one item for MUON, and for everything with offload. */
typedef struct mfsdp__optimizer_job {
  int32_t hyper_group, first_item, item_count;
  int64_t rows, cols, max_count, total_count;
  float
      *offloaded[1 +
                 MFSDP_FUSED_STATE_COUNT]; /* master and states to bring to the device; NULL ends */
} mfsdp__optimizer_job;

typedef struct mfsdp_optimizer {
  const mfsdp_backend *backend;
  mfsdp_hyper_group *groups;
  int32_t group_count, item_count, job_count, state_count;
  mfsdp__optimizer_job *jobs; /* in execution order: groups in order, tensors in order */
  mfsdp_optimizer_state *states;
  mfsdp_buffer items; /* DEVICE table of mfsdp_fused_item, in job order */
  mfsdp_space state_space;
  mfsdp_buffer state;     /* state_space: all state arrays, each aligned */
  mfsdp_buffer staging;   /* DEVICE: master and states of one job, with offload */
  mfsdp_buffer workspace; /* DEVICE: one direction, then Newton-Schulz scratch */
  size_t direction_nbytes;
} mfsdp_optimizer;

/* ---- validation ---- */

MFSDP_API mfsdp_status mfsdp__hyper_group_check(mfsdp_context *context, int32_t index,
                                                const mfsdp_hyper_group *group) {
  if (group->struct_nbytes != sizeof(*group))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "optimizer: groups[%d].struct_nbytes is %zu, needs %zu (use "
                      "mfsdp_hyper_group_muon or _adamw)",
                      (int)index, group->struct_nbytes, sizeof(*group));
  if (!(group->lr >= 0.0) || !(group->lr <= 1e30))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "optimizer: groups[%d].lr is %g, needs 0 or more",
                      (int)index, group->lr);
  if (!(group->weight_decay >= 0.0) || !(group->weight_decay <= 1e30))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "optimizer: groups[%d].weight_decay is %g, needs 0 or more", (int)index,
                      group->weight_decay);
  switch (group->algorithm) {
  case MFSDP_ALGORITHM_MUON: return mfsdp_muon_check(context, &group->muon);
  case MFSDP_ALGORITHM_ADAMW: return mfsdp_adamw_check(context, &group->adamw);
  }
  return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                    "optimizer: groups[%d].algorithm %d is unknown, needs %d (muon) or %d (adamw)",
                    (int)index, (int)group->algorithm, (int)MFSDP_ALGORITHM_MUON,
                    (int)MFSDP_ALGORITHM_ADAMW);
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

/*
 * Whether a parameter of this role may be in this group; `name` for the message. A matrix optimizer
 * on a tensor that may be cut is E_ARGUMENT: it would orthogonalize fragments.
 */
MFSDP_API mfsdp_status mfsdp_optimizer_route_check(mfsdp_context *context,
                                                   const mfsdp_optimizer_desc *desc,
                                                   const char *name, mfsdp_role role,
                                                   int32_t hyper_group) {
  if (hyper_group < 0 || hyper_group >= desc->group_count)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "%s: hyper_group is %d, needs 0 to %d", name,
                      (int)hyper_group, (int)desc->group_count - 1);
  if (role != MFSDP_ROLE_MATRIX && role != MFSDP_ROLE_ELEMENTWISE)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "%s: role %s is not updated by an optimizer", name,
                      mfsdp_role_name(role));
  if (role != MFSDP_ROLE_MATRIX && desc->groups[hyper_group].algorithm == MFSDP_ALGORITHM_MUON)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "%s: group %d is muon, which needs role matrix, but the role is %s", name,
                      (int)hyper_group, mfsdp_role_name(role));
  return MFSDP_OK;
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
  return MFSDP_OK;
}

/* ---- set-up ---- */

/* Names of an algorithm's state arrays, in the order of mfsdp_fused_item.state; NULL ends. */
MFSDP_API const char *mfsdp__optimizer_state_name(mfsdp_algorithm_kind kind, int32_t index) {
  switch (kind) {
  case MFSDP_ALGORITHM_MUON: return index == 0 ? "momentum" : NULL;
  case MFSDP_ALGORITHM_ADAMW: return index == 0 ? "exp_avg" : index == 1 ? "exp_avg_sq" : NULL;
  }
  return NULL;
}

/* What a list of tensors needs. */
typedef struct mfsdp_optimizer_sizes {
  size_t state_nbytes, staging_nbytes;
  size_t direction_nbytes, scratch_nbytes; /* the workspace is both, one after the other */
  size_t workspace_nbytes;                 /* set by mfsdp_optimizer_measure */
  int32_t item_count, job_count, state_count;
} mfsdp_optimizer_sizes;

MFSDP_API mfsdp_status mfsdp__optimizer_measure_muon(mfsdp_context *context,
                                                     const mfsdp_hyper_group *group,
                                                     const mfsdp_optimizer_tensor *tensor,
                                                     size_t nbytes, mfsdp_optimizer_sizes *sizes) {
  size_t scratch_nbytes = 0;
  if (nbytes > sizes->direction_nbytes) sizes->direction_nbytes = nbytes;
  MFSDP_TRY(mfsdp_newton_schulz_workspace_nbytes(context, &group->muon.newton_schulz, tensor->rows,
                                                 tensor->cols, &scratch_nbytes));
  if (scratch_nbytes > sizes->scratch_nbytes) sizes->scratch_nbytes = scratch_nbytes;
  return MFSDP_OK;
}

/* Adds one tensor's needs, but for job_count, which depends on its neighbours. The description has
 * been checked; the tensor's arrays are not looked at. */
MFSDP_API mfsdp_status mfsdp_optimizer_measure_tensor(mfsdp_context *context,
                                                      const mfsdp_optimizer_desc *desc,
                                                      const mfsdp_optimizer_tensor *tensor,
                                                      mfsdp_optimizer_sizes *sizes) {
  const mfsdp_hyper_group *group = &desc->groups[tensor->hyper_group];
  int64_t padded = 0;
  size_t nbytes = 0, all_nbytes;
  int32_t k;
  if (tensor->count == 0) return MFSDP_OK;
  if (!mfsdp_i64_align(tensor->count, &padded) ||
      !mfsdp_elements_nbytes(padded, MFSDP_F32, &nbytes))
    return MFSDP_FAIL(context, MFSDP_E_OVERFLOW, "%s: too large", tensor->name);
  ++sizes->item_count;
  all_nbytes = nbytes;
  for (k = 0; mfsdp__optimizer_state_name(group->algorithm, k) != NULL; ++k) {
    ++sizes->state_count;
    if (!mfsdp_size_add(sizes->state_nbytes, nbytes, &sizes->state_nbytes) ||
        !mfsdp_size_add(all_nbytes, nbytes, &all_nbytes))
      return MFSDP_FAIL(context, MFSDP_E_OVERFLOW, "optimizer: the state overflows size_t");
  }
  if (desc->state_space != MFSDP_SPACE_DEVICE && all_nbytes > sizes->staging_nbytes)
    sizes->staging_nbytes = all_nbytes;
  if (group->algorithm == MFSDP_ALGORITHM_MUON)
    return mfsdp__optimizer_measure_muon(context, group, tensor, nbytes, sizes);
  return MFSDP_OK;
}

/* Bytes and counts that `create` will need for these tensors. Checks what create checks of them;
 * allocates nothing. E_ARGUMENT, E_OVERFLOW. */
MFSDP_API mfsdp_status mfsdp_optimizer_measure(mfsdp_context *context,
                                               const mfsdp_optimizer_desc *desc,
                                               const mfsdp_optimizer_tensor *tensors,
                                               int32_t tensor_count, mfsdp_optimizer_sizes *out) {
  int32_t g, i;
  memset(out, 0, sizeof(*out));
  MFSDP_TRY(mfsdp_optimizer_desc_check(context, desc));
  if (tensor_count < 0 || (tensor_count > 0 && tensors == NULL))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "optimizer: %d tensors at NULL",
                      (int)tensor_count);
  for (i = 0; i < tensor_count; ++i)
    MFSDP_TRY(mfsdp__optimizer_tensor_check(context, desc, &tensors[i]));
  for (g = 0; g < desc->group_count; ++g) {
    const int one_each = desc->groups[g].algorithm == MFSDP_ALGORITHM_MUON ||
                         desc->state_space != MFSDP_SPACE_DEVICE;
    const int32_t before = out->item_count;
    for (i = 0; i < tensor_count; ++i)
      if (tensors[i].hyper_group == g)
        MFSDP_TRY(mfsdp_optimizer_measure_tensor(context, desc, &tensors[i], out));
    out->job_count += one_each ? out->item_count - before : out->item_count > before;
  }
  if (!mfsdp_size_add(out->direction_nbytes, out->scratch_nbytes, &out->workspace_nbytes))
    return MFSDP_FAIL(context, MFSDP_E_OVERFLOW, "optimizer: the workspace overflows size_t");
  return MFSDP_OK;
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
  mfsdp_table_free(context, optimizer->jobs, (size_t)optimizer->job_count,
                   sizeof(*optimizer->jobs));
  mfsdp_table_free(context, optimizer->groups, (size_t)optimizer->group_count,
                   sizeof(*optimizer->groups));
  mfsdp_table_free(context, optimizer, 1, sizeof(*optimizer));
}

/* Writes the state entries of one tensor: its place in the state buffer, which *offset walks
 * through. */
MFSDP_API void mfsdp__optimizer_fill_states(mfsdp_optimizer *optimizer, mfsdp_algorithm_kind kind,
                                            int32_t tensor_index, int64_t count, int64_t padded,
                                            size_t *offset, int32_t *index,
                                            mfsdp_fused_item *item) {
  int32_t k;
  for (k = 0; mfsdp__optimizer_state_name(kind, k) != NULL; ++k) {
    mfsdp_optimizer_state *state = &optimizer->states[(*index)++];
    state->name = mfsdp__optimizer_state_name(kind, k);
    state->tensor = tensor_index;
    state->dtype = MFSDP_F32;
    state->space = optimizer->state_space;
    state->count = count;
    state->data = (unsigned char *)optimizer->state.data + *offset;
    item->state[k] = (float *)state->data;
    *offset += (size_t)padded * sizeof(float);
  }
}

/* With offload the kernels see the staging area; the job keeps where its arrays really are. */
MFSDP_API void mfsdp__optimizer_offload_item(mfsdp_optimizer *optimizer, int64_t padded,
                                             mfsdp_fused_item *item, mfsdp__optimizer_job *job) {
  float *staging = (float *)optimizer->staging.data;
  int32_t k;
  job->offloaded[0] = item->master;
  item->master = staging;
  for (k = 0; k < MFSDP_FUSED_STATE_COUNT && item->state[k] != NULL; ++k) {
    job->offloaded[1 + k] = item->state[k];
    item->state[k] = staging + (1 + k) * padded;
  }
}

MFSDP_API mfsdp_fused_item mfsdp__optimizer_item(const mfsdp_optimizer *optimizer,
                                                 const mfsdp_hyper_group *group,
                                                 const mfsdp_optimizer_tensor *tensor) {
  mfsdp_fused_item item;
  memset(&item, 0, sizeof(item));
  item.master = tensor->master;
  item.param = tensor->param_data;
  item.param_dtype = tensor->param_data ? (int32_t)tensor->param_dtype : (int32_t)MFSDP_F32;
  item.grad = tensor->grad;
  item.count = tensor->count;
  item.present_index = tensor->param;
  item.scale = 1.0;
  if (group->algorithm == MFSDP_ALGORITHM_MUON) {
    item.scale = mfsdp_muon_scale_of(&group->muon, tensor->rows, tensor->cols);
    item.direction = (float *)optimizer->workspace.data;
  }
  return item;
}

/* Emits jobs and items: groups in order, tensors in order, so the list depends on nothing else. */
MFSDP_API void mfsdp__optimizer_emit(mfsdp_optimizer *optimizer,
                                     const mfsdp_optimizer_tensor *tensors, int32_t tensor_count,
                                     mfsdp_fused_item *items) {
  const int offload = optimizer->state_space != MFSDP_SPACE_DEVICE;
  size_t state_offset = 0;
  int32_t g, i, item_index = 0, state_index = 0, job_index = 0;
  for (g = 0; g < optimizer->group_count; ++g) {
    const mfsdp_hyper_group *group = &optimizer->groups[g];
    mfsdp__optimizer_job *job = NULL;
    for (i = 0; i < tensor_count; ++i) {
      const mfsdp_optimizer_tensor *tensor = &tensors[i];
      int64_t padded = 0;
      if (tensor->hyper_group != g || tensor->count == 0) continue;
      (void)mfsdp_i64_align(tensor->count, &padded); /* cannot fail: measured before */
      items[item_index] = mfsdp__optimizer_item(optimizer, group, tensor);
      mfsdp__optimizer_fill_states(optimizer, group->algorithm, i, tensor->count, padded,
                                   &state_offset, &state_index, &items[item_index]);
      if (job == NULL || group->algorithm == MFSDP_ALGORITHM_MUON || offload) {
        job = &optimizer->jobs[job_index++];
        job->hyper_group = g;
        job->first_item = item_index;
        job->rows = tensor->rows;
        job->cols = tensor->cols;
      }
      if (offload) mfsdp__optimizer_offload_item(optimizer, padded, &items[item_index], job);
      ++job->item_count;
      job->total_count += tensor->count;
      if (tensor->count > job->max_count) job->max_count = tensor->count;
      ++item_index;
    }
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
                                             int32_t tensor_count) {
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
    mfsdp__optimizer_emit(optimizer, tensors, tensor_count, (mfsdp_fused_item *)items);
    status = mfsdp__optimizer_upload(context, optimizer, queue, event, (mfsdp_fused_item *)items);
  }
  if (event != NULL) backend->ops->event_destroy(backend->self, context, event);
  if (queue != NULL) backend->ops->queue_destroy(backend->self, context, queue);
  mfsdp_table_free(context, items, (size_t)optimizer->item_count, sizeof(mfsdp_fused_item));
  return status;
}

/*
 * Makes the optimizer of a list of local tensors, with zeroed state. The tensors' arrays must
 * outlive it; the list itself need not, names must. COMPLETE. E_ARGUMENT before anything is
 * allocated; E_MEMORY and backend errors leave nothing behind; *out is NULL then.
 */
MFSDP_API mfsdp_status mfsdp_optimizer_create(mfsdp_context *context, const mfsdp_backend *backend,
                                              const mfsdp_optimizer_desc *desc,
                                              const mfsdp_optimizer_tensor *tensors,
                                              int32_t tensor_count, mfsdp_optimizer **out) {
  mfsdp_optimizer_sizes sizes;
  mfsdp_optimizer *optimizer;
  mfsdp_status status;
  void *memory;
  *out = NULL;
  MFSDP_TRY(mfsdp_backend_check(context, backend));
  MFSDP_TRY(mfsdp_optimizer_measure(context, desc, tensors, tensor_count, &sizes));
  MFSDP_TRY(mfsdp_table_alloc(context, 1, sizeof(*optimizer), "optimizer", &memory));
  optimizer = (mfsdp_optimizer *)memory;
  optimizer->backend = backend;
  status = mfsdp__optimizer_alloc(context, optimizer, desc, &sizes);
  if (status == MFSDP_OK) status = mfsdp__optimizer_fill(context, optimizer, tensors, tensor_count);
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
  const size_t nbytes = (size_t)job->total_count * sizeof(float);
  int64_t padded = 0;
  int32_t k;
  (void)mfsdp_i64_align(job->total_count, &padded);
  for (k = 0; k < 1 + MFSDP_FUSED_STATE_COUNT && job->offloaded[k] != NULL; ++k) {
    float *staged = (float *)optimizer->staging.data + k * padded;
    if (back)
      MFSDP_TRY(b->ops->copy(b->self, queue, job->offloaded[k], optimizer->state_space, staged,
                             MFSDP_SPACE_DEVICE, nbytes));
    else
      MFSDP_TRY(b->ops->copy(b->self, queue, staged, MFSDP_SPACE_DEVICE, job->offloaded[k],
                             optimizer->state_space, nbytes));
  }
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__optimizer_run_job(mfsdp_context *context, mfsdp_optimizer *optimizer,
                                                mfsdp_queue *queue, const mfsdp__optimizer_job *job,
                                                const mfsdp_step_scalars *scalars,
                                                const uint32_t *present) {
  const mfsdp_hyper_group *group = &optimizer->groups[job->hyper_group];
  const mfsdp_fused_item *item = (const mfsdp_fused_item *)optimizer->items.data + job->first_item;
  unsigned char *workspace = (unsigned char *)optimizer->workspace.data;
  if (group->algorithm == MFSDP_ALGORITHM_ADAMW)
    return mfsdp_adamw_commit(context, optimizer->backend, queue, &group->adamw, item,
                              job->item_count, job->max_count, job->total_count, group->clipped,
                              scalars + job->hyper_group, present);
  return mfsdp_muon_step(context, optimizer->backend, queue, &group->muon, job->rows, job->cols,
                         (float *)(void *)workspace, item, group->clipped,
                         scalars + job->hyper_group, present,
                         workspace + optimizer->direction_nbytes,
                         optimizer->workspace.nbytes - optimizer->direction_nbytes);
}

/*
 * Updates every tensor: replays the jobs. `scalars`: one per hyperparameter group, DEVICE;
 * `present`: one word per parameter, DEVICE, or NULL when every parameter has a gradient. ENQUEUED;
 * results are complete when an event recorded on `queue` later has passed. Allocates nothing.
 * Deterministic.
 */
MFSDP_API mfsdp_status mfsdp_optimizer_step(mfsdp_context *context, mfsdp_optimizer *optimizer,
                                            mfsdp_queue *queue, const mfsdp_step_scalars *scalars,
                                            const uint32_t *present) {
  int32_t j;
  if (scalars == NULL && optimizer->job_count > 0)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "optimizer: scalars is NULL, needs %d of them",
                      (int)optimizer->group_count);
  for (j = 0; j < optimizer->job_count; ++j) {
    const mfsdp__optimizer_job *job = &optimizer->jobs[j];
    MFSDP_TRY(mfsdp__optimizer_transfer(optimizer, queue, job, 0));
    MFSDP_TRY(mfsdp__optimizer_run_job(context, optimizer, queue, job, scalars, present));
    MFSDP_TRY(mfsdp__optimizer_transfer(optimizer, queue, job, 1));
  }
  return MFSDP_OK;
}

#endif /* MFSDP_OPTIMIZER_H */
