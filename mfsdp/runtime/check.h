/* SPDX-License-Identifier: MIT */
/*
 * runtime/check.h - validation of a runtime's description and agreement of all ranks on plan and
 * options, before anything else happens. Part of runtime.h.
 * Link flags: none.
 */
#ifndef MFSDP_RUNTIME_CHECK_H
#define MFSDP_RUNTIME_CHECK_H

#include "tables.h"

MFSDP_API mfsdp_status mfsdp__runtime_check_unsupported(mfsdp_context *context,
                                                        const mfsdp_runtime_desc *desc)
{
  const char *what = desc->step_in_backward != 0              ? "step_in_backward"
                     : desc->verdict_lag != 0                 ? "verdict_lag above 0"
                     : desc->gather_algorithm != MFSDP_DIRECT ? "a gather_algorithm but DIRECT"
                     : desc->reduce_algorithm != MFSDP_DIRECT ? "a reduce_algorithm but DIRECT"
                                                              : NULL;
  if (what == NULL) return MFSDP_OK;
  return MFSDP_FAIL(context, MFSDP_E_UNSUPPORTED, "runtime: %s is not in this version", what);
}

MFSDP_API mfsdp_status mfsdp__runtime_check_loss_scale(mfsdp_context *context,
                                                       const mfsdp_loss_scale *scale)
{
  if (scale->initial == 0.0) return MFSDP_OK;
  if (!(scale->initial > 0.0) || !(scale->largest >= scale->initial) || !(scale->largest <= 1e30))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "runtime: loss_scale.initial is %g and largest %g; need 0 (off), or positive and "
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

MFSDP_API mfsdp_status mfsdp__runtime_check_counts(mfsdp_context *context,
                                                   const mfsdp_runtime_desc *desc)
{
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
  if (desc->chunk_nbytes < MFSDP_ALIGN_ELEMENTS * 8)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "runtime: chunk_nbytes is %zu, needs at least %d",
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
  return mfsdp__runtime_check_loss_scale(context, &desc->loss_scale);
}

MFSDP_API mfsdp_status mfsdp__runtime_check_options(mfsdp_context *context,
                                                    const mfsdp_runtime_desc *desc)
{
  if (desc == NULL || desc->struct_nbytes != sizeof(*desc))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "runtime: desc is NULL or its struct_nbytes is not %zu (use "
                      "mfsdp_runtime_desc_default)",
                      sizeof(*desc));
  if (desc->groups == NULL || desc->group_count < 1 || desc->group_count > 1024 ||
      desc->groups[0].struct_nbytes != sizeof(desc->groups[0]))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "runtime: needs a group made by mfsdp_group_default, up to 1024, has %d groups",
                      (int)desc->group_count);
  MFSDP_TRY(mfsdp__runtime_check_counts(context, desc));
  MFSDP_TRY(mfsdp__runtime_check_unsupported(context, desc));
  MFSDP_TRY(mfsdp_backend_check(context, desc->backend));
  return mfsdp_optimizer_desc_check(context, desc->optimizer);
}

/* A transport and its control plane: the same ranks, and this backend's queues. */
MFSDP_API mfsdp_status mfsdp__runtime_check_link(mfsdp_context *context, const mfsdp_backend *backend,
                                                 int32_t group, const char *what,
                                                 const mfsdp_transport *transport,
                                                 const mfsdp_control *control)
{
  MFSDP_TRY(mfsdp_transport_check(context, transport));
  MFSDP_TRY(mfsdp_control_check(context, control));
  if (control->rank != transport->rank || control->world != transport->world)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "runtime: groups[%d]: control is rank %d of %d, the %s rank %d of %d", (int)group,
                      (int)control->rank, (int)control->world, what, (int)transport->rank,
                      (int)transport->world);
  if (transport->backend != backend)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "runtime: groups[%d]: the %s was made for another backend", (int)group, what);
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__runtime_check_params(mfsdp_context *context,
                                                   const mfsdp_runtime_desc *desc,
                                                   const mfsdp_plan *plan)
{
  int32_t i;
  for (i = 0; i < mfsdp_plan_param_count(plan); ++i) {
    const mfsdp_param *param = mfsdp_plan_param(plan, i);
    const int narrow = param->wire == MFSDP_BF16 || param->wire == MFSDP_F16;
    if (param->compute == MFSDP_F64 || param->master != MFSDP_F32 || param->grad == MFSDP_F64 ||
        (param->wire != param->grad && !(narrow && param->grad == MFSDP_F32)))
      return MFSDP_FAIL(context, MFSDP_E_UNSUPPORTED,
                        "runtime: %s asks for compute %s, master %s, grad %s, wire %s; this version "
                        "has f32 masters, compute and grad of f32, bf16 or f16, and a wire like grad, "
                        "or a 16-bit one for f32",
                        param->name, mfsdp_dtype_name(param->compute), mfsdp_dtype_name(param->master),
                        mfsdp_dtype_name(param->grad), mfsdp_dtype_name(param->wire));
    if (param->role == MFSDP_ROLE_FROZEN || mfsdp_plan_param_owner(plan, i) != i) continue;
    MFSDP_TRY(mfsdp_optimizer_route_check(context, desc->optimizer, param->name, param->role,
                                          param->hyper_group));
  }
  return MFSDP_OK;
}

/* Sample blocks of a step are numbered with 32 bits. */
MFSDP_API mfsdp_status mfsdp__runtime_check_blocks(mfsdp_context *context,
                                                   const mfsdp_runtime_desc *desc,
                                                   const mfsdp_group *group)
{
  const int64_t replicas = group->replica ? group->replica->world : 1;
  const int64_t ranks = replicas * group->transport->world;
  if (ranks <= INT32_MAX && desc->max_micro_batches <= INT32_MAX / ranks) return MFSDP_OK;
  return MFSDP_FAIL(context, MFSDP_E_OVERFLOW,
                    "runtime: max_micro_batches %d on %lld ranks are more than 2^31 - 1 sample blocks",
                    (int)desc->max_micro_batches, (long long)ranks);
}

MFSDP_API mfsdp_status mfsdp__runtime_check_group(mfsdp_context *context,
                                                  const mfsdp_runtime_desc *desc, int32_t index)
{
  const mfsdp_group *group = &desc->groups[index];
  if (group->plan == NULL)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "runtime: groups[%d].plan is NULL", (int)index);
  MFSDP_TRY(mfsdp_transport_check(context, group->transport));
  if (group->replica != NULL) MFSDP_TRY(mfsdp_transport_check(context, group->replica));
  MFSDP_TRY(mfsdp__runtime_check_blocks(context, desc, group));
  if (mfsdp_plan_world(group->plan) != group->transport->world)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "runtime: groups[%d]: the plan is for world %d, the transport has %d", (int)index,
                      (int)mfsdp_plan_world(group->plan), (int)group->transport->world);
  MFSDP_TRY(mfsdp__runtime_check_link(context, desc->backend, index, "transport", group->transport,
                                      group->control));
  if (group->replica != NULL)
    MFSDP_TRY(mfsdp__runtime_check_link(context, desc->backend, index, "replica", group->replica,
                                        group->replica_control));
  return mfsdp__runtime_check_params(context, desc, group->plan);
}

/* Each unit belongs to one group of this rank. */
MFSDP_API mfsdp_status mfsdp__runtime_check_units(mfsdp_context *context,
                                                  const mfsdp_runtime_desc *desc)
{
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
                            "runtime: unit %d is in groups %d and %d; unit numbers are unique", (int)u,
                            (int)h, (int)g);
      }
    }
  return MFSDP_OK;
}

/* Everything that can be seen without the other ranks. */
MFSDP_API mfsdp_status mfsdp__runtime_check(mfsdp_context *context, const mfsdp_runtime_desc *desc)
{
  int32_t g;
  MFSDP_TRY(mfsdp__runtime_check_options(context, desc));
  for (g = 0; g < desc->group_count; ++g) MFSDP_TRY(mfsdp__runtime_check_group(context, desc, g));
  return mfsdp__runtime_check_units(context, desc);
}

/* ---- agreement ---- */

MFSDP_API uint64_t mfsdp__hash_f64(uint64_t hash, double value)
{
  uint64_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return mfsdp_hash_u64(hash, bits);
}

MFSDP_API uint64_t mfsdp__hash_hyper_group(uint64_t hash, const mfsdp_hyper_group *group)
{
  const mfsdp_newton_schulz_desc *ns = &group->muon.newton_schulz;
  int32_t i, k;
  hash = mfsdp_hash_u64(hash, (uint64_t)group->algorithm);
  hash = mfsdp_hash_u64(hash, (uint64_t)group->clipped);
  hash = mfsdp__hash_f64(hash, group->lr);
  hash = mfsdp__hash_f64(hash, group->weight_decay);
  if (group->algorithm == MFSDP_ALGORITHM_ADAMW) {
    hash = mfsdp__hash_f64(hash, group->adamw.beta1);
    hash = mfsdp__hash_f64(hash, group->adamw.beta2);
    return mfsdp__hash_f64(hash, group->adamw.eps);
  }
  hash = mfsdp__hash_f64(hash, group->muon.momentum);
  hash = mfsdp__hash_f64(hash, group->muon.grad_weight);
  hash = mfsdp__hash_f64(hash, group->muon.nesterov_weight);
  hash = mfsdp_hash_u64(hash, (uint64_t)group->muon.nesterov);
  hash = mfsdp_hash_u64(hash, (uint64_t)group->muon.scale);
  hash = mfsdp_hash_u64(hash, (uint64_t)ns->step_count);
  hash = mfsdp_hash_u64(hash, (uint64_t)ns->form);
  hash = mfsdp_hash_u64(hash, (uint64_t)ns->norm_rule);
  hash = mfsdp__hash_f64(hash, ns->eps);
  for (i = 0; i < ns->coefficient_count; ++i)
    for (k = 0; k < 3; ++k) hash = mfsdp__hash_f64(hash, ns->coefficients[i][k]);
  return hash;
}

/* Every option that must be equal on all ranks. */
MFSDP_API uint64_t mfsdp__runtime_option_hash(const mfsdp_runtime_desc *desc)
{
  uint64_t hash = MFSDP_HASH_SEED;
  int32_t i;
  hash = mfsdp_hash_u64(hash, (uint64_t)desc->group_count);
  hash = mfsdp_hash_u64(hash, (uint64_t)desc->active_units);
  hash = mfsdp_hash_u64(hash, (uint64_t)desc->active_grads);
  hash = mfsdp_hash_u64(hash, (uint64_t)desc->prefetch_depth);
  hash = mfsdp_hash_u64(hash, (uint64_t)desc->reduce_depth);
  hash = mfsdp_hash_u64(hash, (uint64_t)desc->reshard_after_forward);
  hash = mfsdp_hash_u64(hash, (uint64_t)desc->local_accumulation);
  hash = mfsdp_hash_u64(hash, (uint64_t)desc->weighted);
  hash = mfsdp__hash_f64(hash, desc->loss_scale.initial);
  hash = mfsdp__hash_f64(hash, desc->loss_scale.growth);
  hash = mfsdp__hash_f64(hash, desc->loss_scale.backoff);
  hash = mfsdp__hash_f64(hash, desc->loss_scale.largest);
  hash = mfsdp_hash_u64(hash, (uint64_t)desc->loss_scale.growth_interval);
  hash = mfsdp_hash_u64(hash, (uint64_t)desc->max_micro_batches);
  hash = mfsdp__hash_f64(hash, desc->clip_norm);
  hash = mfsdp_hash_u64(hash, (uint64_t)desc->missing);
  hash = mfsdp_hash_u64(hash, (uint64_t)desc->gather_algorithm);
  hash = mfsdp_hash_u64(hash, (uint64_t)desc->reduce_algorithm);
  hash = mfsdp_hash_u64(hash, (uint64_t)desc->chunk_nbytes);
  hash = mfsdp_hash_u64(hash, (uint64_t)desc->optimizer->group_count);
  for (i = 0; i < desc->optimizer->group_count; ++i)
    hash = mfsdp__hash_hyper_group(hash, &desc->optimizer->groups[i]);
  return hash;
}

MFSDP_API mfsdp_status mfsdp__control_allgather(mfsdp_context *context, const mfsdp_control *control,
                                                const void *in, size_t nbytes, void *out)
{
  return control->ops->allgather(control->self, context, in, nbytes, out, control->deadline_us);
}

#define MFSDP__AGREE_WORDS 4
#define MFSDP__AGREE_PARAMS 32 /* parameter hashes compared per message */

/* Finds the first parameter whose hash differs from rank 0's on some rank; MFSDP_OK if there is none.
 * `all`: world x MFSDP__AGREE_PARAMS words. */
MFSDP_API mfsdp_status mfsdp__agree_on_hashes(mfsdp_context *context, const mfsdp_plan *plan,
                                              const mfsdp_control *control, int32_t count,
                                              uint64_t (*hash)(const mfsdp_plan *plan, int32_t param),
                                              const char *what, uint64_t *all)
{
  uint64_t own[MFSDP__AGREE_PARAMS];
  int32_t first, i, r;
  for (first = 0; first < count; first += MFSDP__AGREE_PARAMS) {
    memset(own, 0, sizeof(own));
    for (i = 0; i < MFSDP__AGREE_PARAMS && first + i < count; ++i) own[i] = hash(plan, first + i);
    MFSDP_TRY(mfsdp__control_allgather(context, control, own, sizeof(own), all));
    for (i = 0; i < MFSDP__AGREE_PARAMS && first + i < count; ++i)
      for (r = 1; r < control->world; ++r)
        if (all[r * MFSDP__AGREE_PARAMS + i] != all[i])
          return MFSDP_FAIL_PEER(context, MFSDP_E_MISMATCH, r,
                                 "runtime: the plans of ranks 0 and %d differ%s, first at parameter %d "
                                 "(here: %s)",
                                 (int)r, what, (int)(first + i),
                                 mfsdp_plan_param(plan, first + i)->name);
  }
  return MFSDP_OK;
}

/* Says how plans differ: descriptions first, since one tensor more or less moves the pieces of all. Every
 * rank runs it with the smallest parameter count of all and the count that differs from it, if any. */
MFSDP_API mfsdp_status mfsdp__agree_on_params(mfsdp_context *context, const mfsdp_plan *plan,
                                              const mfsdp_control *control, int32_t smallest,
                                              int32_t largest, uint64_t *all)
{
  MFSDP_TRY(mfsdp__agree_on_hashes(context, plan, control, smallest, mfsdp_plan_description_hash, "", all));
  if (smallest != largest)
    return MFSDP_FAIL(context, MFSDP_E_MISMATCH,
                      "runtime: some rank's plan has %d parameters and another's %d; the first %d agree",
                      (int)smallest, (int)largest, (int)smallest);
  MFSDP_TRY(mfsdp__agree_on_hashes(context, plan, control, smallest, mfsdp_plan_param_hash,
                                   " in owners or offsets", all));
  return MFSDP_FAIL(context, MFSDP_E_MISMATCH,
                    "runtime: the plans differ between ranks though their %d parameters agree",
                    (int)smallest);
}

MFSDP_API mfsdp_status mfsdp__agree_on_words(mfsdp_context *context, const mfsdp_runtime_desc *desc,
                                             const mfsdp_plan *plan, const mfsdp_control *control,
                                             uint64_t *all)
{
  static const char *const what[2] = {"library version", "option hash"};
  uint64_t own[MFSDP__AGREE_WORDS];
  uint64_t smallest, largest;
  int32_t r, w, plans_differ = 0;
  own[0] = MFSDP_VERSION;
  own[1] = mfsdp__runtime_option_hash(desc);
  own[2] = (uint64_t)mfsdp_plan_param_count(plan);
  own[3] = mfsdp_plan_hash(plan);
  MFSDP_TRY(mfsdp__control_allgather(context, control, own, sizeof(own), all));
  smallest = largest = all[2];
  for (r = 1; r < control->world; ++r) {
    const uint64_t *theirs = &all[r * MFSDP__AGREE_WORDS];
    for (w = 0; w < 2; ++w)
      if (theirs[w] != all[w])
        return MFSDP_FAIL_PEER(context, MFSDP_E_MISMATCH, r,
                               "runtime: the %s of rank %d is %llx, of rank 0 %llx", what[w], (int)r,
                               (unsigned long long)theirs[w], (unsigned long long)all[w]);
    plans_differ = plans_differ || theirs[2] != all[2] || theirs[3] != all[3];
    if (theirs[2] < smallest) smallest = theirs[2];
    if (theirs[2] > largest) largest = theirs[2];
  }
  if (!plans_differ) return MFSDP_OK;
  return mfsdp__agree_on_params(context, plan, control, (int32_t)smallest, (int32_t)largest, all);
}

/* E_MISMATCH, the same on every rank, unless version, options and plan are equal over this control. */
MFSDP_API mfsdp_status mfsdp__agree(mfsdp_context *context, const mfsdp_runtime_desc *desc,
                                    const mfsdp_plan *plan, const mfsdp_control *control)
{
  const size_t count = (size_t)control->world * MFSDP__AGREE_PARAMS;
  mfsdp_status status;
  void *all;
  MFSDP_TRY(mfsdp_table_alloc(context, count, sizeof(uint64_t), "runtime agreement", &all));
  status = mfsdp__agree_on_words(context, desc, plan, control, (uint64_t *)all);
  mfsdp_table_free(context, all, count, sizeof(uint64_t));
  return status;
}

/* Inside each group, and over its replicas. */
MFSDP_API mfsdp_status mfsdp__runtime_agree(mfsdp_context *context, const mfsdp_runtime_desc *desc)
{
  int32_t g;
  for (g = 0; g < desc->group_count; ++g) {
    const mfsdp_group *group = &desc->groups[g];
    MFSDP_TRY(mfsdp__agree(context, desc, group->plan, group->control));
    if (group->replica != NULL)
      MFSDP_TRY(mfsdp__agree(context, desc, group->plan, group->replica_control));
  }
  return MFSDP_OK;
}

#endif /* MFSDP_RUNTIME_CHECK_H */
