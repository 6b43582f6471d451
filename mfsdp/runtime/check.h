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
  const char *what = desc->group_count > 1                 ? "group_count above 1"
                     : desc->groups[0].replica != NULL     ? "a replica transport"
                     : desc->prefetch_depth != 0           ? "prefetch_depth above 0"
                     : desc->reshard_after_forward != 1    ? "reshard_after_forward 0"
                     : desc->local_accumulation != 0       ? "local_accumulation"
                     : desc->step_in_backward != 0         ? "step_in_backward"
                     : desc->verdict_lag != 0              ? "verdict_lag above 0"
                     : desc->gather_algorithm != MFSDP_DIRECT ? "a gather_algorithm but DIRECT"
                     : desc->reduce_algorithm != MFSDP_DIRECT ? "a reduce_algorithm but DIRECT"
                                                              : NULL;
  if (what == NULL) return MFSDP_OK;
  return MFSDP_FAIL(context, MFSDP_E_UNSUPPORTED, "runtime: %s is not in this version", what);
}

MFSDP_API mfsdp_status mfsdp__runtime_check_options(mfsdp_context *context,
                                                    const mfsdp_runtime_desc *desc)
{
  if (desc == NULL || desc->struct_nbytes != sizeof(*desc))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "runtime: desc is NULL or its struct_nbytes is not %zu (use "
                      "mfsdp_runtime_desc_default)",
                      sizeof(*desc));
  if (desc->groups == NULL || desc->group_count < 1 ||
      desc->groups[0].struct_nbytes != sizeof(desc->groups[0]))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "runtime: needs a group made by mfsdp_group_default, has %d groups",
                      (int)desc->group_count);
  if (desc->active_units < 1 || desc->active_grads < 1)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "runtime: active_units is %d and active_grads %d, need at least 1",
                      (int)desc->active_units, (int)desc->active_grads);
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
  MFSDP_TRY(mfsdp__runtime_check_unsupported(context, desc));
  MFSDP_TRY(mfsdp_backend_check(context, desc->backend));
  return mfsdp_optimizer_desc_check(context, desc->optimizer);
}

/* The ranks and the plan belong together, and the transport takes this backend's queues. */
MFSDP_API mfsdp_status mfsdp__runtime_check_group(mfsdp_context *context,
                                                  const mfsdp_runtime_desc *desc)
{
  const mfsdp_group *group = &desc->groups[0];
  MFSDP_TRY(mfsdp_transport_check(context, group->transport));
  MFSDP_TRY(mfsdp_control_check(context, group->control));
  if (group->plan == NULL)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "runtime: groups[0].plan is NULL");
  if (desc->max_micro_batches > INT32_MAX / group->transport->world)
    return MFSDP_FAIL(context, MFSDP_E_OVERFLOW,
                      "runtime: max_micro_batches %d on %d ranks are more than 2^31 - 1 sample blocks",
                      (int)desc->max_micro_batches, (int)group->transport->world);
  if (mfsdp_plan_world(group->plan) != group->transport->world)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "runtime: the plan is for world %d, the transport has %d",
                      (int)mfsdp_plan_world(group->plan), (int)group->transport->world);
  if (group->control->rank != group->transport->rank ||
      group->control->world != group->transport->world)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "runtime: control is rank %d of %d, the transport rank %d of %d",
                      (int)group->control->rank, (int)group->control->world,
                      (int)group->transport->rank, (int)group->transport->world);
  if (group->transport->backend != desc->backend)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "runtime: the transport was made for another backend");
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__runtime_check_params(mfsdp_context *context,
                                                   const mfsdp_runtime_desc *desc)
{
  const mfsdp_plan *plan = desc->groups[0].plan;
  int32_t i;
  for (i = 0; i < mfsdp_plan_param_count(plan); ++i) {
    const mfsdp_param *param = mfsdp_plan_param(plan, i);
    if (param->compute != MFSDP_F32 || param->master != MFSDP_F32 || param->grad != MFSDP_F32 ||
        param->wire != MFSDP_F32)
      return MFSDP_FAIL(context, MFSDP_E_UNSUPPORTED,
                        "runtime: %s asks for compute %s, master %s, grad %s, wire %s; this version "
                        "has f32 only",
                        param->name, mfsdp_dtype_name(param->compute), mfsdp_dtype_name(param->master),
                        mfsdp_dtype_name(param->grad), mfsdp_dtype_name(param->wire));
    if (param->role == MFSDP_ROLE_FROZEN || mfsdp_plan_param_owner(plan, i) != i) continue;
    MFSDP_TRY(mfsdp_optimizer_route_check(context, desc->optimizer, param->name, param->role,
                                          param->hyper_group));
  }
  return MFSDP_OK;
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
  hash = mfsdp_hash_u64(hash, (uint64_t)desc->active_units);
  hash = mfsdp_hash_u64(hash, (uint64_t)desc->active_grads);
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

/* Finds the first parameter whose hash differs from rank 0's on some rank. Every rank runs it, with the
 * smallest parameter count of all. `all`: world x MFSDP__AGREE_PARAMS words. */
MFSDP_API mfsdp_status mfsdp__agree_on_params(mfsdp_context *context, const mfsdp_group *group,
                                              int32_t smallest_count, uint64_t *all)
{
  uint64_t own[MFSDP__AGREE_PARAMS];
  const int32_t world = group->control->world;
  int32_t first, i, r;
  for (first = 0; first < smallest_count; first += MFSDP__AGREE_PARAMS) {
    memset(own, 0, sizeof(own));
    for (i = 0; i < MFSDP__AGREE_PARAMS && first + i < smallest_count; ++i)
      own[i] = mfsdp_plan_param_hash(group->plan, first + i);
    MFSDP_TRY(mfsdp__control_allgather(context, group->control, own, sizeof(own), all));
    for (i = 0; i < MFSDP__AGREE_PARAMS && first + i < smallest_count; ++i)
      for (r = 1; r < world; ++r)
        if (all[r * MFSDP__AGREE_PARAMS + i] != all[i])
          return MFSDP_FAIL_PEER(
            context, MFSDP_E_MISMATCH, r,
            "runtime: the plans of ranks 0 and %d differ, first at parameter %d (here: %s)", (int)r,
            (int)(first + i), mfsdp_plan_param(group->plan, first + i)->name);
  }
  return MFSDP_FAIL(context, MFSDP_E_MISMATCH,
                    "runtime: the plans differ between ranks though their first %d parameters agree",
                    (int)smallest_count);
}

MFSDP_API mfsdp_status mfsdp__agree(mfsdp_context *context, const mfsdp_runtime_desc *desc,
                                    uint64_t *all)
{
  static const char *const what[MFSDP__AGREE_WORDS] = {"library version", "option hash", NULL, NULL};
  const mfsdp_group *group = &desc->groups[0];
  uint64_t own[MFSDP__AGREE_WORDS];
  uint64_t smallest;
  int32_t r, w, plans_differ = 0;
  own[0] = MFSDP_VERSION;
  own[1] = mfsdp__runtime_option_hash(desc);
  own[2] = (uint64_t)mfsdp_plan_param_count(group->plan);
  own[3] = mfsdp_plan_hash(group->plan);
  MFSDP_TRY(mfsdp__control_allgather(context, group->control, own, sizeof(own), all));
  smallest = all[2];
  for (r = 1; r < group->control->world; ++r) {
    const uint64_t *theirs = &all[r * MFSDP__AGREE_WORDS];
    for (w = 0; w < 2; ++w)
      if (theirs[w] != all[w])
        return MFSDP_FAIL_PEER(context, MFSDP_E_MISMATCH, r,
                               "runtime: the %s of rank %d is %llx, of rank 0 %llx", what[w], (int)r,
                               (unsigned long long)theirs[w], (unsigned long long)all[w]);
    plans_differ = plans_differ || theirs[2] != all[2] || theirs[3] != all[3];
    if (theirs[2] < smallest) smallest = theirs[2];
  }
  if (!plans_differ) return MFSDP_OK;
  return mfsdp__agree_on_params(context, group, (int32_t)smallest, all);
}

/* E_MISMATCH, the same on every rank, unless version, options and plan are equal everywhere. */
MFSDP_API mfsdp_status mfsdp__runtime_agree(mfsdp_context *context, const mfsdp_runtime_desc *desc)
{
  const size_t count = (size_t)desc->groups[0].control->world * MFSDP__AGREE_PARAMS;
  mfsdp_status status;
  void *all;
  MFSDP_TRY(mfsdp_table_alloc(context, count, sizeof(uint64_t), "runtime agreement", &all));
  status = mfsdp__agree(context, desc, (uint64_t *)all);
  mfsdp_table_free(context, all, count, sizeof(uint64_t));
  return status;
}

#endif /* MFSDP_RUNTIME_CHECK_H */
