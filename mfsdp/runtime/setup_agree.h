/* SPDX-License-Identifier: MIT */
/*
 * runtime/setup_agree.h - agreement of all ranks on version, options, groups and plans, before
 * anything else happens. Part of runtime.h.
 *
 * First all ranks say whether they can use their own description: one that cannot says so to all,
 * and nobody waits for it. Then ranks compare inside each group and over its replicas; what one of
 * them finds, all are told, so that all return at the same point and may try again.
 * Link flags: none.
 */
#ifndef MFSDP_RUNTIME_SETUP_AGREE_H
#define MFSDP_RUNTIME_SETUP_AGREE_H

#include "measure.h"

#include <stdio.h>

/* ---- comparisons ---- */

MFSDP_API uint64_t mfsdp__hash_hyper_group(uint64_t hash, const mfsdp_hyper_group *group) {
  const mfsdp_newton_schulz_desc *ns = &group->muon.newton_schulz;
  const mfsdp__algorithm *algorithm = mfsdp__algorithm_of(group->algorithm);
  const char *name;
  double value;
  int32_t i, k;
  hash = mfsdp_hash_u64(hash, (uint64_t)group->algorithm);
  hash = mfsdp_hash_u64(hash, (uint64_t)group->clipped);
  hash = mfsdp__hash_f64(hash, group->lr);
  hash = mfsdp__hash_f64(hash, group->weight_decay);
  if (algorithm->field != NULL) {
    for (i = 0; algorithm->field(group, i, &name, &value); ++i)
      hash = mfsdp__hash_f64(hash, value);
    return hash;
  }
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
  hash = mfsdp_hash_u64(hash, (uint64_t)group->muon.normalize_rows);
  hash = mfsdp__hash_f64(hash, group->muon.row_beta2);
  hash = mfsdp__hash_f64(hash, group->muon.row_eps);
  hash = mfsdp_hash_u64(hash, (uint64_t)ns->step_count);
  hash = mfsdp_hash_u64(hash, (uint64_t)ns->form);
  hash = mfsdp_hash_u64(hash, (uint64_t)ns->norm_rule);
  hash = mfsdp__hash_f64(hash, ns->eps);
  hash = mfsdp__hash_f64(hash, ns->norm_factor);
  hash = mfsdp_hash_u64(hash, (uint64_t)ns->dtype);
  hash = mfsdp_hash_u64(hash, ns->restarts);
  for (i = 0; i < ns->coefficient_count; ++i)
    for (k = 0; k < 3; ++k)
      hash = mfsdp__hash_f64(hash, ns->coefficients[i][k]);
  return hash;
}

MFSDP_API uint64_t mfsdp__hash_schedule(uint64_t hash, const mfsdp_schedule *schedule) {
  hash = mfsdp_hash_u64(hash, (uint64_t)schedule->kind);
  hash = mfsdp_hash_u64(hash, (uint64_t)schedule->warmup_steps);
  hash = mfsdp_hash_u64(hash, (uint64_t)schedule->total_steps);
  hash = mfsdp_hash_u64(hash, (uint64_t)schedule->decay_steps);
  return mfsdp__hash_f64(hash, schedule->final_factor);
}

/* Every option that must be equal on all ranks. */
MFSDP_API uint64_t mfsdp__runtime_option_hash(const mfsdp_runtime_desc *desc) {
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
  hash = mfsdp__hash_schedule(hash, &desc->schedule);
  hash = mfsdp_hash_u64(hash, (uint64_t)desc->gather_algorithm);
  hash = mfsdp_hash_u64(hash, (uint64_t)desc->reduce_algorithm);
  hash = mfsdp_hash_u64(hash, (uint64_t)desc->narrow_sums);
  hash = mfsdp_hash_u64(hash, (uint64_t)desc->wire.latency_ns);
  hash = mfsdp_hash_u64(hash, (uint64_t)desc->wire.ns_per_mib);
  hash = mfsdp_hash_u64(hash, (uint64_t)desc->wire.between_latency_ns);
  hash = mfsdp_hash_u64(hash, (uint64_t)desc->wire.between_ns_per_mib);
  hash = mfsdp_hash_u64(hash, (uint64_t)desc->chunk_nbytes);
  hash = mfsdp_hash_u64(hash, (uint64_t)desc->step_in_backward);
  hash = mfsdp_hash_u64(hash, (uint64_t)desc->banded_update);
  hash = mfsdp_hash_u64(hash, (uint64_t)desc->optimizer->group_count);
  for (i = 0; i < desc->optimizer->group_count; ++i)
    hash = mfsdp__hash_hyper_group(hash, &desc->optimizer->groups[i]);
  return hash;
}

MFSDP_API mfsdp_status mfsdp__control_allgather(mfsdp_context *context,
                                                const mfsdp_control *control, const void *in,
                                                size_t nbytes, void *out) {
  return control->ops->allgather(control->self, context, in, nbytes, out, control->deadline_us);
}

#define MFSDP__AGREE_WORDS 6
#define MFSDP__AGREE_PARAMS 32 /* parameter hashes compared per message */

/* Finds the first parameter whose hash differs from rank 0's on some rank; MFSDP_OK if there is
 * none. `all`: world x MFSDP__AGREE_PARAMS words. */
MFSDP_API mfsdp_status mfsdp__agree_on_hashes(
    mfsdp_context *context, const mfsdp_plan *plan, const mfsdp_control *control, int32_t count,
    uint64_t (*hash)(const mfsdp_plan *plan, int32_t param), const char *what, uint64_t *all) {
  uint64_t own[MFSDP__AGREE_PARAMS];
  int32_t first, i, r;
  for (first = 0; first < count; first += MFSDP__AGREE_PARAMS) {
    memset(own, 0, sizeof(own));
    for (i = 0; i < MFSDP__AGREE_PARAMS && first + i < count; ++i)
      own[i] = hash(plan, first + i);
    MFSDP_TRY(mfsdp__control_allgather(context, control, own, sizeof(own), all));
    for (i = 0; i < MFSDP__AGREE_PARAMS && first + i < count; ++i)
      for (r = 1; r < control->world; ++r)
        if (all[r * MFSDP__AGREE_PARAMS + i] != all[i])
          return MFSDP_FAIL_PEER(
              context, MFSDP_E_MISMATCH, r,
              "runtime: the plans of ranks 0 and %d differ%s, first at parameter %d "
              "(here: %s)",
              (int)r, what, (int)(first + i), mfsdp_plan_param(plan, first + i)->name);
  }
  return MFSDP_OK;
}

/* Finds the first setting of the plans (planner, caps, nodes) in which a rank differs from rank 0;
 * MFSDP_OK if there is none. */
MFSDP_API mfsdp_status mfsdp__agree_on_settings(mfsdp_context *context, const mfsdp_plan *plan,
                                                const mfsdp_control *control, uint64_t *all) {
  uint64_t own[MFSDP__AGREE_PARAMS];
  int32_t i, r;
  memset(own, 0, sizeof(own));
  for (i = 0; i < MFSDP__AGREE_PARAMS; ++i)
    own[i] = mfsdp_plan_setting_hash(plan, i);
  MFSDP_TRY(mfsdp__control_allgather(context, control, own, sizeof(own), all));
  for (i = 0; mfsdp_plan_setting_name(i) != NULL; ++i)
    for (r = 1; r < control->world; ++r)
      if (all[r * MFSDP__AGREE_PARAMS + i] != all[i])
        return MFSDP_FAIL_PEER(context, MFSDP_E_MISMATCH, r,
                               "runtime: the plans of ranks 0 and %d differ in %s", (int)r,
                               mfsdp_plan_setting_name(i));
  return MFSDP_OK;
}

/* Says how plans differ: descriptions first, since one tensor more or less moves the pieces of all.
 * Every rank runs it with the smallest parameter count of all and the count that differs from it,
 * if any. */
MFSDP_API mfsdp_status mfsdp__agree_on_params(mfsdp_context *context, const mfsdp_plan *plan,
                                              const mfsdp_control *control, int32_t smallest,
                                              int32_t largest, uint64_t *all) {
  MFSDP_TRY(mfsdp__agree_on_hashes(context, plan, control, smallest, mfsdp_plan_description_hash,
                                   "", all));
  if (smallest != largest)
    return MFSDP_FAIL(
        context, MFSDP_E_MISMATCH,
        "runtime: some rank's plan has %d parameters and another's %d; the first %d agree",
        (int)smallest, (int)largest, (int)smallest);
  MFSDP_TRY(mfsdp__agree_on_settings(context, plan, control, all));
  MFSDP_TRY(mfsdp__agree_on_hashes(context, plan, control, smallest, mfsdp_plan_param_hash,
                                   " in owners or offsets", all));
  return MFSDP_FAIL(context, MFSDP_E_MISMATCH,
                    "runtime: the plans differ between ranks though their %d parameters agree",
                    (int)smallest);
}

/*
 * A rank's place in the other direction: its copy, seen by the ranks of the copy, or its rank in
 * the copy, seen by its replicas. All of them have the same one, or owners of different pieces
 * would be summed.
 */
MFSDP_API mfsdp_status mfsdp__agree_on_places(mfsdp_context *context, int32_t g, int over_replicas,
                                              const uint64_t *all, int32_t world) {
  int32_t r;
  for (r = 1; r < world; ++r) {
    const uint64_t *theirs = &all[(size_t)r * MFSDP__AGREE_WORDS];
    if (theirs[4] != all[4] || theirs[5] != all[5])
      return MFSDP_FAIL_PEER(
          context, MFSDP_E_MISMATCH, r,
          "runtime: groups[%d], ranks 0 and %d of %s: one is %s %llu of %llu, the other "
          "%llu of %llu",
          (int)g, (int)r, over_replicas ? "the replicas" : "a copy",
          over_replicas ? "rank" : "replica", (unsigned long long)all[5],
          (unsigned long long)all[4], (unsigned long long)theirs[5], (unsigned long long)theirs[4]);
  }
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__agree_on_words(mfsdp_context *context, const mfsdp_runtime_desc *desc,
                                             int32_t g, int over_replicas, uint64_t *all) {
  const mfsdp_group *group = &desc->groups[g];
  const mfsdp_plan *plan = group->plan;
  const mfsdp_control *control = over_replicas ? group->replica_control : group->control;
  static const char *const what[2] = {"library version", "option hash"};
  const mfsdp_transport *other = over_replicas ? group->transport : group->replica;
  uint64_t own[MFSDP__AGREE_WORDS];
  uint64_t smallest, largest;
  int32_t r, w, plans_differ = 0;
  own[0] = MFSDP_VERSION;
  own[1] = mfsdp__runtime_option_hash(desc);
  own[2] = (uint64_t)mfsdp_plan_param_count(plan);
  own[3] = mfsdp_plan_hash(plan);
  own[4] = other ? (uint64_t)other->world : 1;
  own[5] = other ? (uint64_t)other->rank : 0;
  MFSDP_TRY(mfsdp__control_allgather(context, control, own, sizeof(own), all));
  smallest = largest = all[2];
  for (r = 1; r < control->world; ++r) {
    const uint64_t *theirs = &all[(size_t)r * MFSDP__AGREE_WORDS];
    for (w = 0; w < 2; ++w)
      if (theirs[w] != all[w])
        return MFSDP_FAIL_PEER(context, MFSDP_E_MISMATCH, r,
                               "runtime: the %s of rank %d is %llx, of rank 0 %llx", what[w],
                               (int)r, (unsigned long long)theirs[w], (unsigned long long)all[w]);
    plans_differ = plans_differ || theirs[2] != all[2] || theirs[3] != all[3];
    if (theirs[2] < smallest) smallest = theirs[2];
    if (theirs[2] > largest) largest = theirs[2];
  }
  MFSDP_TRY(mfsdp__agree_on_places(context, g, over_replicas, all, control->world));
  if (!plans_differ) return MFSDP_OK;
  return mfsdp__agree_on_params(context, plan, control, (int32_t)smallest, (int32_t)largest, all);
}

/* ---- what all are told ---- */

/* As long as a message of parameter hashes, so that one table serves both. */
typedef struct mfsdp__outcome {
  uint64_t unit_hash; /* what decides, beside the calls, which units are gathered ahead and when */
  int32_t status;
  int32_t culprit; /* over all ranks: who cannot use its own description; -1: ranks differ */
  int32_t copy, copies;
  char message[MFSDP__AGREE_PARAMS * 8 - 24];
} mfsdp__outcome;

/* 0 where there is nothing to agree on. */
MFSDP_API uint64_t mfsdp__agree_unit_hash(const mfsdp_runtime_desc *desc,
                                          const mfsdp__sizes *sizes) {
  uint64_t hash = mfsdp_hash_u64(MFSDP_HASH_SEED, (uint64_t)sizes->param_slot_count);
  int32_t g, u, i;
  if (desc->prefetch_depth == 0 || desc->group_count == 1) return 0;
  for (g = 0; g < desc->group_count; ++g)
    for (u = 0; u < mfsdp_plan_unit_count(desc->groups[g].plan); ++u) {
      const mfsdp_plan *plan = desc->groups[g].plan;
      int32_t count = 0;
      const int32_t *params = mfsdp_plan_unit_params(plan, u, &count);
      if (count == 0) continue;
      hash = mfsdp_hash_u64(mfsdp_hash_u64(hash, (uint64_t)g), (uint64_t)u);
      hash = mfsdp_hash_u64(hash, (uint64_t)mfsdp_plan_residency(plan)); /* RESIDENT: no slots */
      for (i = 0; i < count; ++i) {
        const int32_t unit = mfsdp_plan_param(plan, mfsdp_plan_param_owner(plan, params[i]))->unit;
        if (unit != u) hash = mfsdp_hash_u64(hash, (uint64_t)unit);
      }
    }
  return hash;
}

/* Tells `own` over one control plane. It becomes the first failure of all, or says that units
 * differ. */
MFSDP_API mfsdp_status mfsdp__outcome_fold(mfsdp_context *context, const mfsdp_control *control,
                                           mfsdp__outcome *own, mfsdp__outcome *all) {
  int32_t r;
  MFSDP_TRY(mfsdp__control_allgather(context, control, own, sizeof(*own), all));
  for (r = 0; r < control->world; ++r)
    if (all[r].status != MFSDP_OK) {
      *own = all[r];
      return MFSDP_OK;
    }
  for (r = 1; r < control->world && all[r].unit_hash == all[0].unit_hash; ++r)
    continue;
  *own = all[0];
  if (r == control->world) return MFSDP_OK;
  own->status = MFSDP_E_MISMATCH;
  (void)snprintf(
      own->message, sizeof(own->message),
      "runtime: with prefetch_depth above 0 all ranks need the same unit numbers, in the same "
      "groups and tied alike, or they would gather in different orders; one rank differs");
  return MFSDP_OK;
}

/* What the ranks of one copy said, in `all`: one that knows other replicas would not come to where
 * the others go on, or meet there whom it should not. */
MFSDP_API void mfsdp__outcome_compare_copies(int32_t world, const mfsdp__outcome *all,
                                             mfsdp__outcome *own) {
  int32_t r;
  for (r = 1; r < world && own->status == MFSDP_OK; ++r) {
    if (all[r].copy == all[0].copy && all[r].copies == all[0].copies) continue;
    own->status = MFSDP_E_MISMATCH;
    (void)snprintf(own->message, sizeof(own->message),
                   "runtime: groups[0], ranks 0 and %d of a copy: one is replica %d of %d, the "
                   "other %d of %d",
                   (int)r, (int)all[0].copy, (int)all[0].copies, (int)all[r].copy,
                   (int)all[r].copies);
  }
}

/* Tells `own` to all ranks that `link` reaches, and takes in what they say. */
MFSDP_API mfsdp_status mfsdp__outcome_tell(mfsdp_context *context, const mfsdp_group *link,
                                           mfsdp__outcome *own, mfsdp__outcome *all) {
  own->copy = link->replica ? link->replica->rank : 0;
  own->copies = link->replica ? link->replica->world : 1;
  MFSDP_TRY(mfsdp__outcome_fold(context, link->control, own, all));
  mfsdp__outcome_compare_copies(link->control->world, all, own);
  if (link->replica == NULL) return MFSDP_OK;
  return mfsdp__outcome_fold(context, link->replica_control, own, all);
}

MFSDP_API mfsdp__outcome mfsdp__outcome_make(uint64_t unit_hash, mfsdp_status found,
                                             const mfsdp_error *error) {
  mfsdp__outcome own;
  memset(&own, 0, sizeof(own));
  own.unit_hash = unit_hash;
  own.culprit = -1;
  own.status = (int32_t)found;
  if (found != MFSDP_OK) (void)snprintf(own.message, sizeof(own.message), "%.230s", error->message);
  return own;
}

/*
 * Tells all ranks what this one found so far (`found`, with its message in the context) and returns
 * the same on all of them: MFSDP_OK, or a failure that all know of. *told = 1 then.
 */
MFSDP_API mfsdp_status mfsdp__agree_outcome(mfsdp_context *context, const mfsdp_runtime_desc *desc,
                                            uint64_t unit_hash, mfsdp_status found, void *all,
                                            int *told) {
  const mfsdp_error error = context->error;
  mfsdp__outcome own = mfsdp__outcome_make(unit_hash, found, &error);
  MFSDP_TRY(mfsdp__outcome_tell(context, &desc->groups[0], &own, (mfsdp__outcome *)all));
  *told = 1;
  if (found != MFSDP_OK) {
    context->error = error; /* says more */
    return found;
  }
  if (own.status == MFSDP_OK) return MFSDP_OK;
  if (own.culprit < 0) return MFSDP_FAIL(context, (mfsdp_status)own.status, "%s", own.message);
  return MFSDP_FAIL_PEER(context, (mfsdp_status)own.status, own.culprit,
                         "rank %d cannot use its description: %s", (int)own.culprit, own.message);
}

/* ---- a description that a rank cannot use ---- */

/* No checks of transport.h here: those report, and what is wrong has been reported. */
MFSDP_API int mfsdp__transport_is_known(const mfsdp_transport *transport) {
  return transport != NULL && transport->struct_nbytes >= sizeof(*transport) &&
         transport->ops != NULL && MFSDP_HAS(transport->ops, poison) && transport->rank >= 0 &&
         transport->rank < transport->world;
}

/* Whether control messages reach the transport's ranks. */
MFSDP_API int mfsdp__link_is_sound(const mfsdp_transport *transport, const mfsdp_control *control) {
  return mfsdp__transport_is_known(transport) && control != NULL &&
         control->struct_nbytes >= sizeof(*control) && control->ops != NULL &&
         MFSDP_HAS(control->ops, allgather) && control->deadline_us > 0 &&
         control->rank == transport->rank && control->world == transport->world;
}

/* Ranks that a group says it reaches with its replicas; 0 if it has no transport. */
MFSDP_API int64_t mfsdp__group_span(const mfsdp_group *group) {
  if (!mfsdp__transport_is_known(group->transport)) return 0;
  if (!mfsdp__transport_is_known(group->replica)) return group->transport->world;
  return (int64_t)group->transport->world * group->replica->world;
}

/* The group over which the others listen: of most ranks, and the first of those (groups[0], if only
 * something else is wrong). NULL: nobody can be told. */
MFSDP_API const mfsdp_group *mfsdp__refusal_link(const mfsdp_runtime_desc *desc) {
  const mfsdp_group *link = &desc->groups[0];
  int64_t most = mfsdp__group_span(link);
  int32_t g;
  if (most == 0) return NULL;
  for (g = 1; g < desc->group_count; ++g) {
    const int64_t span = mfsdp__group_span(&desc->groups[g]);
    if (span <= most) continue;
    most = span;
    link = &desc->groups[g];
  }
  if (!mfsdp__link_is_sound(link->transport, link->control)) return NULL;
  if (link->replica == NULL && link->replica_control == NULL) return link;
  return mfsdp__link_is_sound(link->replica, link->replica_control) ? link : NULL;
}

/* MFSDP_OK: all ranks know. */
MFSDP_API mfsdp_status mfsdp__refusal_tell(mfsdp_context *context, const mfsdp_group *link,
                                           mfsdp__outcome *own) {
  const int32_t copies = link->replica ? link->replica->world : 1;
  const int32_t world = link->control->world > copies ? link->control->world : copies;
  mfsdp_status status;
  void *all;
  own->culprit = link->control->rank;
  if (link->replica != NULL) own->culprit += link->replica->rank * link->control->world;
  MFSDP_TRY(mfsdp_table_alloc(context, (size_t)world, sizeof(*own), "runtime refusal", &all));
  status = mfsdp__outcome_tell(context, link, own, (mfsdp__outcome *)all);
  mfsdp_table_free(context, all, (size_t)world, sizeof(*own));
  return status;
}

MFSDP_API void mfsdp__refusal_poison(const mfsdp_transport *transport, const mfsdp_error *error) {
  mfsdp_error why = *error;
  if (!mfsdp__transport_is_known(transport) || transport->world == 1) return;
  why.rank = why.culprit = transport->rank;
  (void)snprintf(why.message, sizeof(why.message), "rank %d cannot use its description: %.300s",
                 (int)transport->rank, error->message);
  transport->ops->poison(transport->self, &why);
}

/*
 * For a rank whose own description is wrong, with the error in the context: tells the others, so
 * that they return now and not at their deadline, and all may try again. If the links themselves
 * are what is wrong, it poisons what it can. Of a description without groups nothing can be told.
 */
MFSDP_API void mfsdp__runtime_refuse(mfsdp_context *context, const mfsdp_runtime_desc *desc) {
  const mfsdp_error error = context->error;
  const mfsdp_group *link;
  mfsdp__outcome own = mfsdp__outcome_make(0, error.status, &error);
  int32_t g;
  if (desc == NULL || desc->struct_nbytes != sizeof(*desc) || desc->groups == NULL ||
      desc->group_count < 1 || desc->group_count > 1024 ||
      desc->groups[0].struct_nbytes != sizeof(desc->groups[0]))
    return;
  link = mfsdp__refusal_link(desc);
  if (link == NULL ||
      (mfsdp__group_span(link) > 1 && mfsdp__refusal_tell(context, link, &own) != MFSDP_OK))
    for (g = 0; g < desc->group_count; ++g) {
      mfsdp__refusal_poison(desc->groups[g].transport, &error);
      mfsdp__refusal_poison(desc->groups[g].replica, &error);
    }
  context->error = error;
}

/* ---- all of it ---- */

/* Inside group g and over its replicas. A difference does not end it: peers take part in both. */
MFSDP_API mfsdp_status mfsdp__agree_on_group(mfsdp_context *context, const mfsdp_runtime_desc *desc,
                                             int32_t g, uint64_t *all) {
  const mfsdp_status inside = mfsdp__agree_on_words(context, desc, g, 0, all);
  const mfsdp_error error = context->error;
  mfsdp_status over = MFSDP_OK;
  if (inside != MFSDP_OK && inside != MFSDP_E_MISMATCH) return inside;
  if (desc->groups[g].replica != NULL) over = mfsdp__agree_on_words(context, desc, g, 1, all);
  if (over != MFSDP_OK && over != MFSDP_E_MISMATCH) return over;
  if (inside != MFSDP_OK) context->error = error;
  return inside != MFSDP_OK ? inside : over;
}

/* Group 0 first, alone: after that all ranks have as many groups. */
MFSDP_API mfsdp_status mfsdp__agree_on_groups(mfsdp_context *context,
                                              const mfsdp_runtime_desc *desc, uint64_t unit_hash,
                                              uint64_t *all, int *told) {
  mfsdp_status found = mfsdp__agree_on_group(context, desc, 0, all);
  mfsdp_error error;
  int32_t g;
  if (found != MFSDP_OK && found != MFSDP_E_MISMATCH) return found;
  MFSDP_TRY(mfsdp__agree_outcome(context, desc, 0, found, all, told));
  if (desc->group_count == 1) return MFSDP_OK;
  *told = 0;
  for (g = 1; g < desc->group_count; ++g) {
    const mfsdp_status status = mfsdp__agree_on_group(context, desc, g, all);
    if (status != MFSDP_OK && status != MFSDP_E_MISMATCH) return status;
    if (status == MFSDP_OK || found != MFSDP_OK) continue;
    found = status;
    error = context->error;
  }
  if (found != MFSDP_OK) context->error = error;
  return mfsdp__agree_outcome(context, desc, unit_hash, found, all, told);
}

/* For a rank that gives up where the others do not know: peers must not wait for it. */
MFSDP_API void mfsdp__groups_poison(const mfsdp_runtime_desc *desc, const mfsdp_error *why) {
  int32_t g;
  for (g = 0; g < desc->group_count; ++g) {
    const mfsdp_group *group = &desc->groups[g];
    group->transport->ops->poison(group->transport->self, why);
    if (group->replica != NULL) group->replica->ops->poison(group->replica->self, why);
  }
}

/*
 * E_MISMATCH, the same on every rank, unless version, options, places and plans agree; the status of
 * a rank that cannot use its description, on all others (mfsdp__runtime_refuse): nothing is poisoned
 * then. Any other failure poisons the transports.
 */
MFSDP_API mfsdp_status mfsdp__runtime_agree(mfsdp_context *context, const mfsdp_runtime_desc *desc,
                                            const mfsdp__sizes *sizes) {
  mfsdp_status status;
  int32_t g, world = 1;
  int told = 0;
  void *all;
  for (g = 0; g < desc->group_count; ++g) {
    const mfsdp_group *group = &desc->groups[g];
    if (group->control->world > world) world = group->control->world;
    if (group->replica != NULL && group->replica->world > world) world = group->replica->world;
  }
  status =
      mfsdp_table_alloc(context, (size_t)world, sizeof(mfsdp__outcome), "runtime agreement", &all);
  if (status == MFSDP_OK) {
    status = mfsdp__agree_outcome(context, desc, 0, MFSDP_OK, all, &told); /* all can start */
    if (status == MFSDP_OK) {
      told = 0;
      status = mfsdp__agree_on_groups(context, desc, mfsdp__agree_unit_hash(desc, sizes),
                                      (uint64_t *)all, &told);
    }
    mfsdp_table_free(context, all, (size_t)world, sizeof(mfsdp__outcome));
  }
  if (status != MFSDP_OK && !told) mfsdp__groups_poison(desc, &context->error);
  return status;
}

#endif /* MFSDP_RUNTIME_SETUP_AGREE_H */
