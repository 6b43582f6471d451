/* SPDX-License-Identifier: MIT */
/*
 * runtime/api.h - everything public of runtime.h but the functions: descriptions and their rules.
 * Include runtime.h, not this.
 * Link flags: none.
 */
#ifndef MFSDP_RUNTIME_API_H
#define MFSDP_RUNTIME_API_H

#include "../collective.h"
#include "../optimizer.h"
#include "../schedule.h"

typedef struct mfsdp_runtime mfsdp_runtime;

/* What a unit is acquired for. Steers prefetch and keeping, never results. */
typedef enum mfsdp_use { MFSDP_USE_FORWARD = 1, MFSDP_USE_BACKWARD, MFSDP_USE_EVALUATE } mfsdp_use;

/* What happens to a parameter for which no rank had a gradient in a step. */
typedef enum mfsdp_missing {
  MFSDP_MISSING_SKIP = 1, /* no update and no decay, as torch does for grad None */
  MFSDP_MISSING_ZEROS     /* an update with a zero gradient */
} mfsdp_missing;

/* Where BANDED matrices are orthogonalized (Muon; AdamW updates bands where they lie). */
typedef enum mfsdp_banded_update {
  MFSDP_BANDED_HOME = 1,  /* on the rank that the planner chose; bands go there and back */
  MFSDP_BANDED_EVERYWHERE /* on every rank, which all do the same work; bands go to all */
} mfsdp_banded_update;

/*
 * One plan with the ranks that share it. Units have numbers of their own over all groups of a rank;
 * parameters are numbered group after group: those of groups[0] first, in declared order.
 *
 * Group 0 spans all ranks, or, with a replica transport, all ranks of one replica. Another group
 * spans some of them: the ranks that hold the same parameters (experts, say). Its plan may differ
 * between its instances (the ranks {0, 2} may share other experts than {1, 3}); with prefetch_depth
 * they use the same unit numbers. Every rank lists the groups in the same order; where it has
 * nothing of one, an empty plan. Names are unique over the groups of a rank.
 *
 * Replicas (HSDP): the ranks of the same number in different copies of the group. Gradients are
 * summed over the group first, then over the replicas in their order. Sample block i * ranks + k is
 * micro-batch i of rank k, where k = replica rank * group world + group rank in group 0.
 */
typedef struct mfsdp_group {
  size_t struct_nbytes;
  const mfsdp_plan *plan;
  const mfsdp_transport *transport;
  const mfsdp_control *control;
  const mfsdp_transport *replica;       /* NULL: one copy */
  const mfsdp_control *replica_control; /* with replica */
} mfsdp_group;

MFSDP_API mfsdp_group mfsdp_group_default(void) {
  mfsdp_group group;
  memset(&group, 0, sizeof(group));
  group.struct_nbytes = sizeof(group);
  return group;
}

/*
 * Dynamic loss scaling, for 16-bit gradients: the trainer multiplies its loss gradient by
 * mfsdp_runtime_loss_scale, the step divides by it. A non-finite gradient skips the step and
 * multiplies the scale by `backoff`; after `growth_interval` applied steps in a row it is
 * multiplied by `growth`. A step that is skipped for want of weights leaves the scale and the count
 * of steps alone. A back-off that would leave the normal floats (below 2^-126) is not made.
 * Equal on all ranks, since the verdict is. torch.amp.GradScaler's rule and defaults.
 */
typedef struct mfsdp_loss_scale {
  double initial; /* 2^-126 or more; 0: off, the scale is 1 */
  double growth, backoff, largest;
  int32_t growth_interval;
} mfsdp_loss_scale;

/* All objects a description names must outlive the runtime. Options must be equal on all ranks, but
 * for those of a rank alone: compute_queue, state_space and max_slot_nbytes. */
typedef struct mfsdp_runtime_desc {
  size_t struct_nbytes;
  const mfsdp_backend *backend;
  const mfsdp_group *groups; /* stride groups[0].struct_nbytes; copied */
  int32_t group_count;
  const mfsdp_optimizer_desc *optimizer; /* copied */
  mfsdp_queue
      *compute_queue;     /* NULL: the caller computes on its own thread, and acquire and grads are
                               * COMPLETE on return; otherwise work on this queue sees their results */
  int32_t active_units;   /* units the caller holds acquired at once, tied owners not counted */
  int32_t active_grads;   /* units whose gradients are open at once, tied owners not counted */
  int32_t prefetch_depth; /* units gathered ahead of the one acquired, in forward or backward order;
                               * one more slot each. Hides something only if the backend's queues
                               * run beside the caller. 0: off */
  int32_t reduce_depth;   /* reductions that may be in flight while gradients are open; one more
                               * gradient slot each. 0: opening the next waits for the last reduce */
  int32_t
      reshard_after_forward;  /* 0: parameters stay from forward to the end of the unit's backward:
                                  * half the gathers, and a slot for every unit */
  int32_t local_accumulation; /* 1: micro-batches add up on each rank and are reduced once, with the
                               * last: less traffic, a gradient slot for every unit, and no equality
                               * between worlds. They add up in the gradient dtype, which must be
                               * f32 (E_UNSUPPORTED); the wire may be a 16-bit one */
  int32_t max_micro_batches;  /* upper bound of mfsdp_step_desc.micro_batch_count */
  int32_t weighted;           /* 1: the mean is over weights (mfsdp_step_weight) */
  double clip_norm;           /* > 0: global-norm clipping; 0: off */
  mfsdp_missing missing;
  mfsdp_schedule schedule; /* multiplies every group's own lr, by the number of attempted steps */
  mfsdp_loss_scale loss_scale;
  mfsdp_space
      state_space; /* of masters and optimizer state: DEVICE, or PINNED or HOST (offload): then
                               * the step brings them to the device one tensor at a time */
  size_t max_slot_nbytes; /* > 0: E_ARGUMENT if a unit's parameters or gradients need more */
  /* An algorithm of collective.h. Gathers have the same bits by all of them;
   * sums are in rank order, and so independent of the world, by DIRECT alone. */
  mfsdp_algorithm gather_algorithm, reduce_algorithm;
  int32_t narrow_sums; /* 1: NATIVE may reduce on a 16-bit wire, where sums are rounded */
  /* Read by AUTO, which chooses for each unit, and by a chunk_nbytes of 0. */
  mfsdp_wire_cost wire;
  size_t chunk_nbytes; /* see mfsdp_coll_desc: bounds the staging memory. 0: chosen for each unit */
  /* 1: an owner works on its matrices in backward, as soon as a unit's sums have landed, beside it on
   * a queue of its own; the step then only commits. The same bits as without, and a direction's
   * memory for each owned matrix. For the groups whose update can be split (Muon), which must not be
   * clipped; no `weighted`, no replicas, state_space DEVICE (E_UNSUPPORTED). */
  int32_t step_in_backward;
  int32_t verdict_lag;               /* E_UNSUPPORTED so far unless 0 */
  mfsdp_banded_update banded_update; /* of plans with BANDED matrices */
} mfsdp_runtime_desc;

/* One active unit, one open gradient, nothing ahead or behind, resharding, up to 64 micro-batches,
 * no clipping, SKIP, a constant rate, no loss scaling, everything on the device, DIRECT, chunks as
 * the library chooses them, BANDED at home. */
MFSDP_API mfsdp_runtime_desc mfsdp_runtime_desc_default(void) {
  mfsdp_runtime_desc desc;
  memset(&desc, 0, sizeof(desc));
  desc.struct_nbytes = sizeof(desc);
  desc.active_units = 1;
  desc.active_grads = 1;
  desc.reshard_after_forward = 1;
  desc.max_micro_batches = 64;
  desc.missing = MFSDP_MISSING_SKIP;
  desc.schedule = mfsdp_schedule_default();
  desc.loss_scale.growth = 2.0;
  desc.loss_scale.backoff = 0.5;
  desc.loss_scale.largest = 4294967296.0; /* 2^32 */
  desc.loss_scale.growth_interval = 2000;
  desc.state_space = MFSDP_SPACE_DEVICE;
  desc.gather_algorithm = MFSDP_DIRECT;
  desc.reduce_algorithm = MFSDP_DIRECT;
  desc.banded_update = MFSDP_BANDED_HOME;
  return desc;
}

/* Bytes that a runtime will hold from create to destroy, by class; its tables (lists, names,
 * messages) are left out. */
typedef struct mfsdp_memory {
  size_t struct_nbytes;
  size_t shard_nbytes;     /* masters, compute copies where they differ, and what is RESIDENT */
  size_t state_nbytes;     /* optimizer state */
  size_t grad_nbytes;      /* gradient accumulators; REPLICATED: the sums of all as well */
  size_t slot_nbytes;      /* full parameters and gradients */
  size_t staging_nbytes;   /* of collectives, casts, offload and exchanges of BANDED matrices */
  size_t workspace_nbytes; /* of the optimizer */
} mfsdp_memory;

MFSDP_API mfsdp_memory mfsdp_memory_default(void) {
  mfsdp_memory memory;
  memset(&memory, 0, sizeof(memory));
  memory.struct_nbytes = sizeof(memory);
  return memory;
}

/* One step. */
typedef struct mfsdp_step_desc {
  size_t struct_nbytes;
  int32_t micro_batch_count; /* of each rank in this step, 1 to max_micro_batches */
  double
      grad_weight; /* what the summed gradient is multiplied with: 1 / (ranks * micro-batches) for a
                       * mean over equal sample blocks; 1 with `weighted`, which divides by the
                       * weights */
  double lr_factor; /* multiplies each group's own lr on top of the runtime's schedule */
} mfsdp_step_desc;

/* One micro-batch, weights of 1. */
MFSDP_API mfsdp_step_desc mfsdp_step_desc_default(void) {
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
  double grad_norm;  /* L2 norm of the scaled gradient over all trainable parameters, unclipped */
  double clip_scale; /* what clipped groups' gradients were multiplied with */
  double value_mean; /* mean of mfsdp_step_value over all sample blocks; NaN if some are missing */
  double weight_sum; /* of all sample blocks; 0 unless desc.weighted */
  double loss_scale; /* that this step's gradients carried */
  double lr_factor;  /* what every group's own lr was multiplied with: schedule times lr_factor */
  int32_t
      skipped;  /* 1: the gradient, summed or scaled, was not finite in fp32, or the weights' sum is
                 * 0: nothing was updated */
  int32_t stop; /* 1: some rank asked to stop */
} mfsdp_verdict;

MFSDP_API mfsdp_verdict mfsdp_verdict_default(void) {
  mfsdp_verdict verdict;
  memset(&verdict, 0, sizeof(verdict));
  verdict.struct_nbytes = sizeof(verdict);
  return verdict;
}

/* How far training has come, equal on all ranks: with the masters and the optimizer's states, all
 * that a later run needs to go on with the same bits. */
typedef struct mfsdp_progress {
  size_t struct_nbytes;
  int64_t step;          /* ended steps: applied and skipped ones */
  int64_t applied_steps; /* AdamW's bias correction counts these */
  int64_t skipped_steps;
  double loss_scale;        /* of the next step; 1 without loss scaling */
  int64_t steps_since_skip; /* applied in a row, towards loss_scale.growth_interval */
} mfsdp_progress;

/* Before the first step, without loss scaling. */
MFSDP_API mfsdp_progress mfsdp_progress_default(void) {
  mfsdp_progress progress;
  memset(&progress, 0, sizeof(progress));
  progress.struct_nbytes = sizeof(progress);
  progress.loss_scale = 1.0;
  return progress;
}

/* What this rank owns of one parameter, contiguous in the row-major tensor (mfsdp_owned_next). */
typedef struct mfsdp_owned {
  size_t struct_nbytes;
  int32_t group, piece; /* the piece's number in that group's plan; -1: before the first */
  int32_t param;        /* the runtime's number */
  int32_t tensor;       /* mfsdp_optimizer_state.tensor of its states; -1: FROZEN, it has none */
  int32_t tensor_count; /* so far, those with states */
  int32_t saves;        /* 0: another rank has the same and is the one to save it */
  const char *name;     /* of the parameter */
  int64_t first, count; /* elements of the tensor */
  const void *data;     /* the f32 master; of a FROZEN tensor without one its compute copy */
  mfsdp_dtype dtype;
  mfsdp_space space;
} mfsdp_owned;

/* Before the first. */
MFSDP_API mfsdp_owned mfsdp_owned_default(void) {
  mfsdp_owned owned;
  memset(&owned, 0, sizeof(owned));
  owned.struct_nbytes = sizeof(owned);
  owned.piece = owned.param = owned.tensor = -1;
  return owned;
}

/* Gives the initial values of elements first .. first + count - 1 of a parameter, in fp32. Called
 * on the rank that owns them, so it must be a function of its arguments alone (random.h). */
typedef void (*mfsdp_init_fn)(void *user, int32_t param, int64_t first, int64_t count, float *dst);

#endif /* MFSDP_RUNTIME_API_H */
