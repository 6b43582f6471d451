/* SPDX-License-Identifier: MIT */
/*
 * runtime/api.h - everything public of runtime.h but the functions: descriptions and their rules. Include
 * runtime.h, not this.
 * Link flags: none.
 */
#ifndef MFSDP_RUNTIME_API_H
#define MFSDP_RUNTIME_API_H

#include "../collective.h"
#include "../optimizer.h"

typedef struct mfsdp_runtime mfsdp_runtime;

/* What a unit is acquired for. Steers prefetch only. */
typedef enum mfsdp_use { MFSDP_USE_FORWARD = 1, MFSDP_USE_BACKWARD, MFSDP_USE_EVALUATE } mfsdp_use;

/* What happens to a parameter for which no rank had a gradient in a step. */
typedef enum mfsdp_missing {
  MFSDP_MISSING_SKIP = 1, /* no update and no decay, as torch does for grad None */
  MFSDP_MISSING_ZEROS     /* an update with a zero gradient */
} mfsdp_missing;

/* One plan with the ranks that share it. Group 0 spans all ranks. */
typedef struct mfsdp_group {
  size_t struct_nbytes;
  const mfsdp_plan *plan;
  const mfsdp_transport *transport;
  const mfsdp_transport *replica; /* HSDP: owners of the same piece; NULL: none (only NULL so far) */
  const mfsdp_control *control;
} mfsdp_group;

MFSDP_API mfsdp_group mfsdp_group_default(void)
{
  mfsdp_group group;
  memset(&group, 0, sizeof(group));
  group.struct_nbytes = sizeof(group);
  return group;
}

/* All objects a description names must outlive the runtime. Options must be equal on all ranks. */
typedef struct mfsdp_runtime_desc {
  size_t struct_nbytes;
  const mfsdp_backend *backend;
  const mfsdp_group *groups; /* stride groups[0].struct_nbytes; one group so far */
  int32_t group_count;
  const mfsdp_optimizer_desc *optimizer; /* copied */
  mfsdp_queue *compute_queue; /* NULL: the caller computes on its own thread, and acquire and grads are
                               * COMPLETE on return; otherwise work on this queue sees their results */
  int32_t active_units;       /* units the caller holds acquired at once, tied owners not counted */
  int32_t active_grads;       /* units whose gradients are open at once, tied owners not counted */
  int32_t max_micro_batches;  /* upper bound of mfsdp_step_desc.micro_batch_count */
  double clip_norm;           /* > 0: global-norm clipping; 0: off */
  mfsdp_missing missing;
  mfsdp_algorithm gather_algorithm, reduce_algorithm;
  size_t chunk_nbytes;        /* of reduce: bounds the staging memory */
  /* E_UNSUPPORTED so far unless left at their defaults: */
  int32_t prefetch_depth;          /* 0 */
  int32_t reshard_after_forward;   /* 1 */
  int32_t local_accumulation;      /* 0 */
  int32_t step_in_backward;        /* 0 */
  int32_t verdict_lag;             /* 0 */
} mfsdp_runtime_desc;

/* One active unit, one open gradient, up to 64 micro-batches, no clipping, SKIP, DIRECT. */
MFSDP_API mfsdp_runtime_desc mfsdp_runtime_desc_default(void)
{
  mfsdp_runtime_desc desc;
  memset(&desc, 0, sizeof(desc));
  desc.struct_nbytes = sizeof(desc);
  desc.active_units = 1;
  desc.active_grads = 1;
  desc.max_micro_batches = 64;
  desc.missing = MFSDP_MISSING_SKIP;
  desc.gather_algorithm = MFSDP_DIRECT;
  desc.reduce_algorithm = MFSDP_DIRECT;
  desc.chunk_nbytes = mfsdp_coll_desc_default().chunk_nbytes;
  desc.reshard_after_forward = 1;
  return desc;
}

/* One step. */
typedef struct mfsdp_step_desc {
  size_t struct_nbytes;
  int32_t micro_batch_count; /* of each rank in this step, 1 to max_micro_batches */
  double grad_weight; /* what the summed gradient is multiplied with: 1 / (ranks * micro-batches) for a
                       * mean over equal sample blocks */
  double lr_factor;   /* the schedule: multiplies each group's own lr */
} mfsdp_step_desc;

/* One micro-batch, weights of 1. */
MFSDP_API mfsdp_step_desc mfsdp_step_desc_default(void)
{
  mfsdp_step_desc desc;
  memset(&desc, 0, sizeof(desc));
  desc.struct_nbytes = sizeof(desc);
  desc.micro_batch_count = 1;
  desc.grad_weight = 1.0;
  desc.lr_factor = 1.0;
  return desc;
}

/* What all ranks know of a step; the same bits on every rank and for every world size with the same
 * sample blocks. */
typedef struct mfsdp_verdict {
  size_t struct_nbytes;
  int64_t step;          /* attempted steps before this one */
  int64_t applied_steps; /* steps that updated, this one included */
  double grad_norm;      /* L2 norm of the scaled gradient over all trainable parameters, unclipped */
  double clip_scale;     /* what clipped groups' gradients were multiplied with */
  double value_mean;     /* mean of mfsdp_step_value over all sample blocks; NaN if some are missing */
  int32_t skipped;       /* 1: the gradient was not finite, nothing was updated */
  int32_t stop;          /* 1: some rank asked to stop */
} mfsdp_verdict;

MFSDP_API mfsdp_verdict mfsdp_verdict_default(void)
{
  mfsdp_verdict verdict;
  memset(&verdict, 0, sizeof(verdict));
  verdict.struct_nbytes = sizeof(verdict);
  return verdict;
}

/* Gives the initial values of elements first .. first + count - 1 of a parameter, in fp32. Called on the
 * rank that owns them, so it must be a function of its arguments alone (random.h). */
typedef void (*mfsdp_init_fn)(void *user, int32_t param, int64_t first, int64_t count, float *dst);

#endif /* MFSDP_RUNTIME_API_H */
