/* SPDX-License-Identifier: MIT */
/*
 * types.h - what an optimizer is told and what it holds: groups, tensors, state arrays, jobs.
 *
 *   mfsdp_hyper_group group = mfsdp_hyper_group_muon(MFSDP_MUON_MOONLIGHT);
 *
 * Part of optimizer.h. Link flags: none.
 */
#ifndef MFSDP_OPTIMIZER_TYPES_H
#define MFSDP_OPTIMIZER_TYPES_H

#include "../adamw.h"
#include "../muon.h"
#include "../shampoo.h"
#include "../soap.h"

typedef enum mfsdp_algorithm_kind {
  MFSDP_ALGORITHM_MUON = 1, /* needs whole matrices: role MATRIX only */
  MFSDP_ALGORITHM_ADAMW,    /* any trainable role */
  MFSDP_ALGORITHM_SHAMPOO,  /* as MUON, and a backend with eigh */
  MFSDP_ALGORITHM_SOAP      /* as MUON, and a backend with eigh and qr */
} mfsdp_algorithm_kind;

/* A hyperparameter group: parameters name it by its index in the description. */
typedef struct mfsdp_hyper_group {
  size_t struct_nbytes;
  mfsdp_algorithm_kind algorithm;
  double lr, weight_decay;    /* lr may be 0; the schedule multiplies it */
  int32_t clipped;            /* 1: the global-norm clip scales this group's gradients */
  mfsdp_muon_desc muon;       /* read by MUON */
  mfsdp_adamw_desc adamw;     /* read by ADAMW */
  mfsdp_shampoo_desc shampoo; /* read by SHAMPOO */
  mfsdp_soap_desc soap;       /* read by SOAP */
} mfsdp_hyper_group;

/* A Muon group at the preset's lr and decay; clipping does not touch its scale-free input. */
MFSDP_API mfsdp_hyper_group mfsdp_hyper_group_muon(mfsdp_muon_preset preset) {
  mfsdp_hyper_group group;
  memset(&group, 0, sizeof(group));
  group.struct_nbytes = sizeof(group);
  group.algorithm = MFSDP_ALGORITHM_MUON;
  group.muon = mfsdp_muon_desc_preset(preset);
  group.adamw = mfsdp_adamw_desc_default();
  group.shampoo = mfsdp_shampoo_desc_default();
  group.soap = mfsdp_soap_desc_default();
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

/* A Shampoo group at its default lr and decay; clipped. */
MFSDP_API mfsdp_hyper_group mfsdp_hyper_group_shampoo(void) {
  mfsdp_hyper_group group = mfsdp_hyper_group_adamw(0.0, 0.0);
  group.algorithm = MFSDP_ALGORITHM_SHAMPOO;
  group.lr = group.shampoo.default_lr;
  group.weight_decay = group.shampoo.default_weight_decay;
  return group;
}

/* A SOAP group at its default lr and decay; clipped. */
MFSDP_API mfsdp_hyper_group mfsdp_hyper_group_soap(void) {
  mfsdp_hyper_group group = mfsdp_hyper_group_adamw(0.0, 0.0);
  group.algorithm = MFSDP_ALGORITHM_SOAP;
  group.lr = group.soap.default_lr;
  group.weight_decay = group.soap.default_weight_decay;
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
  /* A staged tensor: mfsdp_optimizer_prepare writes its direction, all those of one stage number at a
   * time; the caller has whole matrices orthogonalized (mfsdp_optimizer_orthogonalize), wherever their
   * parts come from; mfsdp_optimizer_step only commits. For algorithms that can (Muon), DEVICE only. */
  int32_t staged, stage; /* staged: 0 or 1 */
  float *direction;      /* staged: `count` floats, the caller's, untouched from prepare to step */
  int64_t whole_rows;    /* staged band of a matrix: the rows of all of it; 0: it is whole */
} mfsdp_optimizer_tensor;

/* One array of optimizer state: what checkpoints and offload read instead of switching on
 * algorithms. */
typedef struct mfsdp_optimizer_state {
  const char *name; /* "momentum", "row_moment", "exp_avg", "exp_avg_sq", "gram_left", ... */
  int32_t tensor;   /* index in the list given to create */
  mfsdp_dtype dtype;
  mfsdp_space space;
  int64_t rows, cols; /* of the array itself; a run of elements is 1 x count */
  int64_t count;      /* rows * cols */
  void *data;
} mfsdp_optimizer_state;

/* A run of items that one call serves: elementwise ones of any size, or matrices of one shape, as many
 * as fit into the workspace that the largest matrix needs anyway. One item with offload. */
typedef struct mfsdp__optimizer_job {
  int32_t hyper_group, first_item, item_count;
  int64_t rows, cols, max_count, total_count;
  int64_t direction_stride; /* elements from one item's direction to the next one's */
  int32_t staged;           /* 1: of tensors of any shape, which the step only commits */
  mfsdp_fused_item only;    /* of a job that has but one: what the host cannot read on a device */
  float
      *offloaded[1 +
                 MFSDP_FUSED_STATE_COUNT]; /* master and states to bring to the device; NULL ends */
  int64_t offloaded_count[1 + MFSDP_FUSED_STATE_COUNT];
} mfsdp__optimizer_job;

/* The staged items of one hyperparameter group and one stage number. */
typedef struct mfsdp__optimizer_stage {
  int32_t stage, hyper_group, first_item, item_count;
  int64_t max_count, total_count;
} mfsdp__optimizer_stage;

typedef struct mfsdp_optimizer {
  const mfsdp_backend *backend;
  mfsdp_hyper_group *groups;
  int32_t group_count, item_count, job_count, state_count;
  int64_t attempted_steps; /* steps so far, skipped ones too: intervals of refreshes count them */
  mfsdp__optimizer_job *jobs;     /* in execution order: groups in order, tensors in order */
  mfsdp__optimizer_stage *stages; /* groups in order, stages by rising number */
  int32_t stage_count, stage_capacity;
  mfsdp_optimizer_state *states;
  mfsdp_buffer items; /* DEVICE table of mfsdp_fused_item, in job order */
  mfsdp_space state_space;
  mfsdp_buffer state;     /* state_space: all state arrays, each aligned */
  mfsdp_buffer staging;   /* DEVICE: master and states of one job, with offload */
  mfsdp_buffer workspace; /* DEVICE: one direction, then Newton-Schulz scratch */
  size_t direction_nbytes;
} mfsdp_optimizer;

/* What a list of tensors needs. */
typedef struct mfsdp_optimizer_sizes {
  size_t state_nbytes, staging_nbytes;
  size_t direction_nbytes, scratch_nbytes; /* the workspace is both, one after the other */
  size_t workspace_nbytes;                 /* set by mfsdp_optimizer_measure */
  int32_t item_count, job_count, state_count, staged_count;
} mfsdp_optimizer_sizes;

#endif /* MFSDP_OPTIMIZER_TYPES_H */
