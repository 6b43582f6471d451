/* SPDX-License-Identifier: MIT */
/*
 * runtime/check.h - validation of a runtime's description: everything that can be seen without the
 * other ranks. Part of runtime.h.
 * Link flags: none.
 */
#ifndef MFSDP_RUNTIME_CHECK_H
#define MFSDP_RUNTIME_CHECK_H

#include "tables.h"

MFSDP_API mfsdp_status mfsdp__runtime_check_unsupported(mfsdp_context *context,
                                                        const mfsdp_runtime_desc *desc) {
  if (desc->verdict_lag == 0) return MFSDP_OK;
  return MFSDP_FAIL(context, MFSDP_E_UNSUPPORTED,
                    "runtime: verdict_lag above 0 is not in this version");
}

/* What scales a gradient must be known before the last one has come. */
MFSDP_API mfsdp_status mfsdp__runtime_check_stages(mfsdp_context *context,
                                                   const mfsdp_runtime_desc *desc) {
  int32_t i;
  if (!desc->step_in_backward) return MFSDP_OK;
  if (desc->weighted)
    return MFSDP_FAIL(context, MFSDP_E_UNSUPPORTED,
                      "runtime: step_in_backward and weighted: the weights' sum, which scales the "
                      "gradients, is known after backward only; set one of them to 0");
  if (desc->state_space != MFSDP_SPACE_DEVICE)
    return MFSDP_FAIL(context, MFSDP_E_UNSUPPORTED,
                      "runtime: step_in_backward needs masters and states on the device "
                      "(state_space is %d); set it to 0, or state_space to MFSDP_SPACE_DEVICE",
                      (int)desc->state_space);
  for (i = 0; i < desc->group_count; ++i)
    if (desc->groups[i].replica != NULL)
      return MFSDP_FAIL(context, MFSDP_E_UNSUPPORTED,
                        "runtime: step_in_backward: groups[%d] has replicas, whose sums are "
                        "complete after backward only; set it to 0, or make one group of all ranks",
                        (int)i);
  for (i = 0; i < desc->optimizer->group_count; ++i) {
    const mfsdp_hyper_group *group = &desc->optimizer->groups[i];
    if (desc->clip_norm > 0.0 && group->clipped &&
        mfsdp__algorithm_of(group->algorithm)->stages != NULL)
      return MFSDP_FAIL(context, MFSDP_E_UNSUPPORTED,
                        "runtime: step_in_backward: optimizer group %d (%s) is clipped, and the "
                        "clip factor is known after backward only; set its clipped to 0",
                        (int)i, mfsdp_algorithm_kind_name(group->algorithm));
  }
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__runtime_check_algorithm(mfsdp_context *context,
                                                      const mfsdp_runtime_desc *desc,
                                                      const char *field,
                                                      mfsdp_algorithm algorithm) {
  if (algorithm >= MFSDP_DIRECT && algorithm <= MFSDP_NATIVE) return MFSDP_OK;
  if (algorithm == MFSDP_ALGORITHM_AUTO && mfsdp_wire_cost_valid(&desc->wire)) return MFSDP_OK;
  if (algorithm == MFSDP_ALGORITHM_AUTO)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "runtime: %s auto needs desc.wire (mfsdp_wire_cost)", field);
  return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "runtime: %s is %d, needs an mfsdp_algorithm", field,
                    (int)algorithm);
}

MFSDP_API mfsdp_status mfsdp__runtime_check_loss_scale(mfsdp_context *context,
                                                       const mfsdp_loss_scale *scale) {
  if (scale->initial == 0.0) return MFSDP_OK;
  if (!(scale->initial >= MFSDP__SMALLEST_LOSS_SCALE) || !(scale->largest >= scale->initial) ||
      !(scale->largest <= 1e30))
    return MFSDP_FAIL(
        context, MFSDP_E_ARGUMENT,
        "runtime: loss_scale.initial is %g and largest %g; need 0 (off), or 2^-126 or more and "
        "at most largest",
        scale->initial, scale->largest);
  if (!(scale->growth >= 1.0) || !(scale->backoff > 0.0 && scale->backoff < 1.0) ||
      scale->growth_interval < 1)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "runtime: loss_scale needs growth of 1 or more (%g), backoff in (0, 1) (%g), "
                      "growth_interval of 1 or more (%d)",
                      scale->growth, scale->backoff, (int)scale->growth_interval);
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__runtime_check_flags(mfsdp_context *context,
                                                  const mfsdp_runtime_desc *desc) {
  const char *what = "runtime";
  MFSDP_TRY(mfsdp__flag_check(context, what, "reshard_after_forward", desc->reshard_after_forward));
  MFSDP_TRY(mfsdp__flag_check(context, what, "local_accumulation", desc->local_accumulation));
  MFSDP_TRY(mfsdp__flag_check(context, what, "weighted", desc->weighted));
  MFSDP_TRY(mfsdp__flag_check(context, what, "narrow_sums", desc->narrow_sums));
  return mfsdp__flag_check(context, what, "step_in_backward", desc->step_in_backward);
}

MFSDP_API mfsdp_status mfsdp__runtime_check_counts(mfsdp_context *context,
                                                   const mfsdp_runtime_desc *desc) {
  if (desc->active_units < 1 || desc->active_grads < 1)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "runtime: active_units is %d and active_grads %d, need at least 1",
                      (int)desc->active_units, (int)desc->active_grads);
  if (desc->prefetch_depth < 0 || desc->prefetch_depth > 1024 || desc->reduce_depth < 0 ||
      desc->reduce_depth > 1024)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "runtime: prefetch_depth is %d and reduce_depth %d, need 0 to 1024",
                      (int)desc->prefetch_depth, (int)desc->reduce_depth);
  if (desc->max_micro_batches < 1 || desc->max_micro_batches > 1 << 20)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "runtime: max_micro_batches is %d, needs 1 to 1048576",
                      (int)desc->max_micro_batches);
  if (desc->chunk_nbytes > 0 && desc->chunk_nbytes < (size_t)MFSDP_ALIGN_ELEMENTS * 8)
    return MFSDP_FAIL(
        context, MFSDP_E_ARGUMENT,
        "runtime: chunk_nbytes is %zu, needs at least %d, or 0 (the library's choice)",
        desc->chunk_nbytes, MFSDP_ALIGN_ELEMENTS * 8);
  if (!(desc->clip_norm >= 0.0) || !(desc->clip_norm <= 1e30))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "runtime: clip_norm is %g, needs 0 (off) or more",
                      desc->clip_norm);
  if (desc->missing != MFSDP_MISSING_SKIP && desc->missing != MFSDP_MISSING_ZEROS)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "runtime: unknown missing policy %d",
                      (int)desc->missing);
  if (desc->state_space < MFSDP_SPACE_DEVICE || desc->state_space > MFSDP_SPACE_HOST)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "runtime: unknown state_space %d",
                      (int)desc->state_space);
  if (desc->banded_update != MFSDP_BANDED_HOME && desc->banded_update != MFSDP_BANDED_EVERYWHERE)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "runtime: unknown banded_update %d",
                      (int)desc->banded_update);
  MFSDP_TRY(
      mfsdp__runtime_check_algorithm(context, desc, "gather_algorithm", desc->gather_algorithm));
  MFSDP_TRY(
      mfsdp__runtime_check_algorithm(context, desc, "reduce_algorithm", desc->reduce_algorithm));
  return mfsdp__runtime_check_loss_scale(context, &desc->loss_scale);
}

MFSDP_API mfsdp_status mfsdp__runtime_check_options(mfsdp_context *context,
                                                    const mfsdp_runtime_desc *desc) {
  if (desc == NULL || desc->struct_nbytes != sizeof(*desc))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "runtime: desc is NULL or its struct_nbytes is not %zu (use "
                      "mfsdp_runtime_desc_default)",
                      sizeof(*desc));
  if (desc->groups == NULL || desc->group_count < 1 || desc->group_count > 1024 ||
      desc->groups[0].struct_nbytes != sizeof(desc->groups[0]))
    return MFSDP_FAIL(
        context, MFSDP_E_ARGUMENT,
        "runtime: needs a group made by mfsdp_group_default, up to 1024, has %d groups",
        (int)desc->group_count);
  MFSDP_TRY(mfsdp__runtime_check_flags(context, desc));
  MFSDP_TRY(mfsdp__runtime_check_counts(context, desc));
  MFSDP_TRY(mfsdp_schedule_check(context, &desc->schedule));
  MFSDP_TRY(mfsdp__runtime_check_unsupported(context, desc));
  MFSDP_TRY(mfsdp_backend_check(context, desc->backend));
  MFSDP_TRY(mfsdp_optimizer_desc_check(context, desc->optimizer));
  MFSDP_TRY(mfsdp__runtime_check_stages(context, desc));
  return mfsdp_optimizer_backend_check(context, desc->backend, desc->optimizer);
}

/* A transport and its control plane: the same ranks, and this backend's queues. */
MFSDP_API mfsdp_status mfsdp__runtime_check_link(mfsdp_context *context,
                                                 const mfsdp_backend *backend, int32_t group,
                                                 const char *what, const mfsdp_transport *transport,
                                                 const mfsdp_control *control) {
  MFSDP_TRY(mfsdp_transport_check(context, transport));
  MFSDP_TRY(mfsdp_control_check(context, control));
  if (control->rank != transport->rank || control->world != transport->world)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "runtime: groups[%d]: control is rank %d of %d, the %s rank %d of %d",
                      (int)group, (int)control->rank, (int)control->world, what,
                      (int)transport->rank, (int)transport->world);
  if (transport->backend != backend)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "runtime: groups[%d]: the %s was made for another backend", (int)group, what);
  return MFSDP_OK;
}

/* What adds up in a gradient buffer adds up in f32: the uses of a tied tensor, and, with local
 * accumulation, micro-batches. The wire may be narrower, since a sum is rounded to it once. */
MFSDP_API mfsdp_status mfsdp__runtime_check_sums(mfsdp_context *context,
                                                 const mfsdp_runtime_desc *desc,
                                                 const mfsdp_plan *plan, int32_t index) {
  const mfsdp_param *param = mfsdp_plan_param(plan, index);
  const int32_t owner = mfsdp_plan_param_owner(plan, index);
  const char *dtype = mfsdp_dtype_name(param->grad);
  if (param->grad == MFSDP_F32 || param->role == MFSDP_ROLE_FROZEN) return MFSDP_OK;
  if (owner != index)
    return MFSDP_FAIL(context, MFSDP_E_UNSUPPORTED,
                      "runtime: %.80s is tied to %.80s and has gradients of %s; its uses add up in "
                      "that buffer: give it grad f32 (wire %s sends as few bytes)",
                      param->name, mfsdp_plan_param(plan, owner)->name, dtype, dtype);
  if (desc->local_accumulation)
    return MFSDP_FAIL(
        context, MFSDP_E_UNSUPPORTED,
        "runtime: %.80s has gradients of %s, in which micro-batches would add up with "
        "local_accumulation: give it grad f32 (wire %s sends as few bytes)",
        param->name, dtype, dtype);
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__runtime_check_params(mfsdp_context *context,
                                                   const mfsdp_runtime_desc *desc,
                                                   const mfsdp_plan *plan) {
  int32_t i;
  for (i = 0; i < mfsdp_plan_param_count(plan); ++i) {
    const mfsdp_param *param = mfsdp_plan_param(plan, i);
    const int narrow = param->wire == MFSDP_BF16 || param->wire == MFSDP_F16;
    if (param->compute == MFSDP_F64 || param->master != MFSDP_F32 || param->grad == MFSDP_F64 ||
        (param->wire != param->grad && !(narrow && param->grad == MFSDP_F32)))
      return MFSDP_FAIL(
          context, MFSDP_E_UNSUPPORTED,
          "runtime: %s asks for compute %s, master %s, grad %s, wire %s; this version "
          "has f32 masters, compute and grad of f32, bf16 or f16, and a wire like grad, "
          "or a 16-bit one for f32",
          param->name, mfsdp_dtype_name(param->compute), mfsdp_dtype_name(param->master),
          mfsdp_dtype_name(param->grad), mfsdp_dtype_name(param->wire));
    if ((desc->reduce_algorithm == MFSDP_RING || desc->reduce_algorithm == MFSDP_HIERARCHICAL) &&
        param->wire != MFSDP_F32 && param->role != MFSDP_ROLE_FROZEN)
      return MFSDP_FAIL(context, MFSDP_E_UNSUPPORTED,
                        "runtime: reduce_algorithm %s sends sums on, which need wire f32; %.80s "
                        "has %s (direct takes it)",
                        mfsdp_algorithm_name(desc->reduce_algorithm), param->name,
                        mfsdp_dtype_name(param->wire));
    if (desc->reduce_algorithm == MFSDP_NATIVE && param->wire != MFSDP_F32 &&
        param->role != MFSDP_ROLE_FROZEN && !desc->narrow_sums)
      return MFSDP_FAIL(context, MFSDP_E_UNSUPPORTED,
                        "runtime: reduce_algorithm native adds in the wire dtype, which is %s of "
                        "%.80s: sums would be rounded (set narrow_sums to allow it; direct adds in "
                        "fp32)",
                        mfsdp_dtype_name(param->wire), param->name);
    MFSDP_TRY(mfsdp__runtime_check_sums(context, desc, plan, i));
    if (param->role == MFSDP_ROLE_FROZEN || mfsdp_plan_param_owner(plan, i) != i) continue;
    MFSDP_TRY(mfsdp_optimizer_route_check(context, desc->optimizer, param->name, param->role,
                                          param->hyper_group));
  }
  return MFSDP_OK;
}

/* BANDED matrices are assembled for the step: the optimizer's update must have a part that can be done
 * on whole matrices, and others on bands. */
MFSDP_API mfsdp_status mfsdp__runtime_check_banded(mfsdp_context *context,
                                                   const mfsdp_runtime_desc *desc,
                                                   const mfsdp_plan *plan) {
  mfsdp_optimizer_desc optimizer = *desc->optimizer;
  int32_t count = 0, i;
  const mfsdp_piece *pieces = mfsdp_plan_pieces(plan, -1, &count);
  optimizer.state_space = desc->state_space;
  for (i = 0; i < count; ++i) {
    const mfsdp_param *param = mfsdp_plan_param(plan, pieces[i].param);
    const mfsdp__algorithm *algorithm;
    mfsdp_optimizer_tensor tensor;
    if (pieces[i].placement != MFSDP_PLACEMENT_BANDED) continue;
    algorithm = mfsdp__algorithm_of(desc->optimizer->groups[param->hyper_group].algorithm);
    if (!algorithm->needs_matrix) continue; /* bands are elements like any others */
    if (algorithm->stages == NULL)
      return MFSDP_FAIL(context, MFSDP_E_UNSUPPORTED,
                        "runtime: %.80s is banded, and %s needs whole matrices from beginning to "
                        "end; plan it owned (without allow_banded), or use muon or adamw",
                        param->name, algorithm->name);
    if (desc->state_space != MFSDP_SPACE_DEVICE)
      return MFSDP_FAIL(context, MFSDP_E_UNSUPPORTED,
                        "runtime: %.80s is banded, which needs masters and states on the device "
                        "(state_space is %d); plan it owned (without allow_banded), or use "
                        "MFSDP_SPACE_DEVICE",
                        param->name, (int)desc->state_space);
    memset(&tensor, 0, sizeof(tensor));
    tensor.name = param->name;
    tensor.hyper_group = param->hyper_group;
    tensor.rows = pieces[i].rows;
    tensor.whole_rows = pieces[i].matrix_rows;
    MFSDP_TRY(mfsdp_optimizer_stage_check(context, &optimizer, &tensor));
  }
  return MFSDP_OK;
}

/* Whether every rank holds everything: the plan has it so for all of its tensors or for none. */
MFSDP_API int32_t mfsdp__plan_is_replicated(const mfsdp_plan *plan) {
  return mfsdp_plan_param_count(plan) > 0 &&
         mfsdp_plan_param(plan, 0)->placement == MFSDP_PLACEMENT_REPLICATED;
}

/* Where every rank holds everything, copies of the group have nothing to add. */
MFSDP_API mfsdp_status mfsdp__runtime_check_replica(mfsdp_context *context, const mfsdp_plan *plan,
                                                    int32_t index) {
  if (!mfsdp__plan_is_replicated(plan)) return MFSDP_OK;
  return MFSDP_FAIL(context, MFSDP_E_UNSUPPORTED,
                    "runtime: groups[%d] has replicas and its plan is replicated; make one group "
                    "of all its ranks, without replica, or a plan that is not",
                    (int)index);
}

/* Sample blocks of a step are numbered with 32 bits. */
MFSDP_API mfsdp_status mfsdp__runtime_check_blocks(mfsdp_context *context,
                                                   const mfsdp_runtime_desc *desc,
                                                   const mfsdp_group *group) {
  const int64_t replicas = group->replica ? group->replica->world : 1;
  const int64_t ranks = replicas * group->transport->world;
  if (ranks <= INT32_MAX && desc->max_micro_batches <= INT32_MAX / ranks) return MFSDP_OK;
  return MFSDP_FAIL(
      context, MFSDP_E_OVERFLOW,
      "runtime: max_micro_batches %d on %lld ranks are more than 2^31 - 1 sample blocks",
      (int)desc->max_micro_batches, (long long)ranks);
}

MFSDP_API mfsdp_status mfsdp__runtime_check_group(mfsdp_context *context,
                                                  const mfsdp_runtime_desc *desc, int32_t index) {
  const mfsdp_group *group = &desc->groups[index];
  if (group->plan == NULL)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "runtime: groups[%d].plan is NULL", (int)index);
  if (group->replica == NULL && group->replica_control != NULL)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "runtime: groups[%d] has a replica_control but no replica", (int)index);
  MFSDP_TRY(mfsdp_transport_check(context, group->transport));
  if ((desc->gather_algorithm == MFSDP_NATIVE || desc->reduce_algorithm == MFSDP_NATIVE) &&
      !MFSDP_HAS(group->transport->ops, native))
    return MFSDP_FAIL(context, MFSDP_E_UNSUPPORTED,
                      "runtime: %s_algorithm native: the transport of groups[%d] has no native "
                      "collectives",
                      desc->gather_algorithm == MFSDP_NATIVE ? "gather" : "reduce", (int)index);
  if (group->replica != NULL) MFSDP_TRY(mfsdp_transport_check(context, group->replica));
  if (group->replica != NULL) MFSDP_TRY(mfsdp__runtime_check_replica(context, group->plan, index));
  MFSDP_TRY(mfsdp__runtime_check_blocks(context, desc, group));
  if (mfsdp_plan_world(group->plan) != group->transport->world)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "runtime: groups[%d]: the plan is for world %d, the transport has %d",
                      (int)index, (int)mfsdp_plan_world(group->plan), (int)group->transport->world);
  MFSDP_TRY(mfsdp__runtime_check_link(context, desc->backend, index, "transport", group->transport,
                                      group->control));
  if (group->replica != NULL)
    MFSDP_TRY(mfsdp__runtime_check_link(context, desc->backend, index, "replica", group->replica,
                                        group->replica_control));
  MFSDP_TRY(mfsdp__runtime_check_params(context, desc, group->plan));
  return mfsdp__runtime_check_banded(context, desc, group->plan);
}

/* Group 0 spans all ranks: another one cannot be larger. */
MFSDP_API mfsdp_status mfsdp__runtime_check_span(mfsdp_context *context,
                                                 const mfsdp_runtime_desc *desc) {
  int64_t all = 0;
  int32_t g;
  for (g = 0; g < desc->group_count; ++g) {
    const mfsdp_group *group = &desc->groups[g];
    const int64_t ranks =
        (int64_t)group->transport->world * (group->replica ? group->replica->world : 1);
    if (g == 0) all = ranks;
    if (ranks > all)
      return MFSDP_FAIL(
          context, MFSDP_E_ARGUMENT,
          "runtime: groups[%d] has %lld ranks with its replicas, groups[0], which spans all, "
          "has %lld",
          (int)g, (long long)ranks, (long long)all);
  }
  return MFSDP_OK;
}

/* Each unit belongs to one group of this rank. */
MFSDP_API mfsdp_status mfsdp__runtime_check_units(mfsdp_context *context,
                                                  const mfsdp_runtime_desc *desc) {
  int32_t g, h, u;
  for (g = 1; g < desc->group_count; ++g)
    for (u = 0; u < mfsdp_plan_unit_count(desc->groups[g].plan); ++u) {
      int32_t count = 0;
      (void)mfsdp_plan_unit_params(desc->groups[g].plan, u, &count);
      if (count == 0) continue;
      for (h = 0; h < g; ++h) {
        (void)mfsdp_plan_unit_params(desc->groups[h].plan, u, &count);
        if (count > 0)
          return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                            "runtime: unit %d is in groups %d and %d; unit numbers are unique",
                            (int)u, (int)h, (int)g);
      }
    }
  return MFSDP_OK;
}

/* Parameters are found by name (checkpoints), so a name is unique over the groups of a rank. */
MFSDP_API mfsdp_status mfsdp__runtime_check_names(mfsdp_context *context,
                                                  const mfsdp_runtime_desc *desc) {
  int32_t g, h, i;
  for (g = 1; g < desc->group_count; ++g)
    for (i = 0; i < mfsdp_plan_param_count(desc->groups[g].plan); ++i) {
      const char *name = mfsdp_plan_param(desc->groups[g].plan, i)->name;
      for (h = 0; h < g; ++h) {
        const int32_t other = mfsdp_plan_param_find(desc->groups[h].plan, name);
        if (other >= 0)
          return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                            "runtime: the name '%.200s' is that of parameter %d of groups[%d] and "
                            "of parameter %d of groups[%d]; names are unique",
                            name, (int)other, (int)h, (int)i, (int)g);
      }
    }
  return MFSDP_OK;
}

/* Everything that can be seen without the other ranks. */
MFSDP_API mfsdp_status mfsdp__runtime_check(mfsdp_context *context,
                                            const mfsdp_runtime_desc *desc) {
  int32_t g;
  MFSDP_TRY(mfsdp__runtime_check_options(context, desc));
  for (g = 0; g < desc->group_count; ++g)
    MFSDP_TRY(mfsdp__runtime_check_group(context, desc, g));
  MFSDP_TRY(mfsdp__runtime_check_span(context, desc));
  MFSDP_TRY(mfsdp__runtime_check_units(context, desc));
  return mfsdp__runtime_check_names(context, desc);
}

#endif /* MFSDP_RUNTIME_CHECK_H */
