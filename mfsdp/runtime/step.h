/* SPDX-License-Identifier: MIT */
/*
 * runtime/step.h - begin of a step, its values, its end: norm, verdict, optimizer. Part of
 * runtime.h.
 * Link flags: none.
 */
#ifndef MFSDP_RUNTIME_STEP_H
#define MFSDP_RUNTIME_STEP_H

#include "banded.h"
#include "grads.h"

/* Backs off after a skip, grows after enough applied steps in a row: the same on every rank. */
MFSDP_API void mfsdp__step_adapt_loss_scale(mfsdp_runtime *rt, int32_t skipped) {
  const mfsdp_loss_scale *rule = &rt->scaling;
  if (rule->initial == 0.0) return;
  if (skipped) {
    const double smaller = rt->loss_scale * rule->backoff;
    if (smaller >= MFSDP__SMALLEST_LOSS_SCALE) rt->loss_scale = smaller;
    rt->steps_since_skip = 0;
    return;
  }
  if (++rt->steps_since_skip < rule->growth_interval) return;
  rt->steps_since_skip = 0;
  rt->loss_scale =
      rt->loss_scale * rule->growth > rule->largest ? rule->largest : rt->loss_scale * rule->growth;
}

/* Takes in the record of the last step, if that has not been done: waits for its verdict. */
MFSDP_API mfsdp_status mfsdp__step_harvest(mfsdp_runtime *rt) {
  const mfsdp_verdict_record *record = (const mfsdp_verdict_record *)rt->verdict.record.data;
  mfsdp_verdict *v = &rt->last_verdict;
  if (!rt->verdict_pending) return MFSDP_OK;
  MFSDP__RUNTIME_TRY(rt, rt->backend->ops->event_wait(rt->backend->self, rt->context,
                                                      rt->verdict_ready, rt->deadline_us));
  *v = mfsdp_verdict_default();
  v->step = rt->step_index - 1;
  v->applied_steps = record->applied_steps;
  v->grad_norm = record->grad_norm;
  v->clip_scale = record->clip_scale;
  v->value_mean = record->value_mean;
  v->weight_sum = record->weight_sum;
  v->loss_scale = rt->loss_scale;
  v->lr_factor = rt->lr_factor;
  v->skipped = record->skip != 0;
  v->stop = record->stop != 0;
  rt->skipped_steps += v->skipped;
  rt->verdict_pending = 0;
  if (record->differs >= 0)
    return MFSDP_FAIL_PEER(rt->context, MFSDP_E_MISMATCH, (int32_t)record->differs,
                           "step %lld: rank %d began it with another mfsdp_step_desc than rank 0, "
                           "or after other steps; it was skipped on all ranks",
                           (long long)v->step, (int)record->differs);
  if (rt->verdict.weight_word == 0 ||
      v->weight_sum > 0.0) /* a step without tokens says nothing about overflow */
    mfsdp__step_adapt_loss_scale(rt, v->skipped);
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__step_check(mfsdp_runtime *rt, const mfsdp_step_desc *desc) {
  mfsdp_context *context = rt->context;
  if (desc == NULL || desc->struct_nbytes != sizeof(*desc))
    return MFSDP_FAIL(
        context, MFSDP_E_ARGUMENT,
        "step: desc is NULL or its struct_nbytes is not %zu (use mfsdp_step_desc_default)",
        sizeof(*desc));
  if (desc->micro_batch_count < 1 || desc->micro_batch_count > rt->verdict.value_capacity)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "step: micro_batch_count is %d, needs 1 to max_micro_batches (%d)",
                      (int)desc->micro_batch_count, (int)rt->verdict.value_capacity);
  if (!(desc->grad_weight > 0.0) || !(desc->grad_weight <= 1e30))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "step: grad_weight is %g, needs to be positive",
                      desc->grad_weight);
  if (!(desc->lr_factor >= 0.0) || !(desc->lr_factor <= 1e30))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "step: lr_factor is %g, needs 0 or more",
                      desc->lr_factor);
  if (rt->in_step)
    return MFSDP_FAIL(context, MFSDP_E_STATE,
                      "step: the one before was not ended (mfsdp_step_end)");
  return MFSDP_OK;
}

/*
 * Begins a step; `desc` is equal on all ranks. Waits for the verdict of the step before.
 * E_ARGUMENT; E_STATE: a step is open. E_MISMATCH, once and on every rank: the step before was
 * begun differently on some ranks, and so skipped; this one has not begun.
 */
MFSDP_API mfsdp_status mfsdp_step_begin(mfsdp_runtime *rt, const mfsdp_step_desc *desc) {
  uint64_t nan_bits;
  const double not_reported = (double)NAN;
  uint64_t *header = (uint64_t *)rt->verdict.header.data;
  int32_t i;
  MFSDP_TRY(mfsdp__runtime_usable(rt));
  MFSDP_TRY(mfsdp__step_check(rt, desc));
  MFSDP_TRY(mfsdp__step_harvest(rt));
  MFSDP_TRY(mfsdp_schedule_factor(rt->context, &rt->schedule, rt->step_index, &rt->lr_factor));
  rt->lr_factor *= desc->lr_factor;
  rt->step = *desc;
  rt->micro_batch_count = desc->micro_batch_count;
  rt->value_count = rt->weight_count = 0;
  MFSDP__RUNTIME_TRY(rt, mfsdp__stage_begin(rt));
  rt->in_step = 1;
  memset(header, 0, rt->verdict.header.nbytes);
  memcpy(&nan_bits, &not_reported, sizeof(nan_bits));
  for (i = 0; i < rt->verdict.value_capacity; ++i)
    header[1 + i] = nan_bits; /* weights stay 0 */
  for (i = 0; i < rt->unit_count; ++i)
    rt->units[i].reduces = 0;
  return MFSDP_OK;
}

/*
 * Reports a value (the loss) of the next micro-batch; the verdict holds the mean over all sample
 * blocks. E_STATE: no step is open, or more values than micro-batches.
 */
MFSDP_API mfsdp_status mfsdp_step_value(mfsdp_runtime *rt, double value) {
  MFSDP_TRY(mfsdp__runtime_usable(rt));
  if (!rt->in_step || rt->value_count >= rt->micro_batch_count)
    return MFSDP_FAIL(rt->context, MFSDP_E_STATE, "step value: %s",
                      rt->in_step ? "more values than micro-batches" : "no step is open");
  memcpy((uint64_t *)rt->verdict.header.data + 1 + rt->value_count, &value, sizeof(value));
  ++rt->value_count;
  return MFSDP_OK;
}

/*
 * Reports the weight (tokens) of the next micro-batch; only with desc.weighted, and then for each
 * one. The gradient that backward adds is that of the sum over tokens; the step divides by all
 * weights. E_STATE: not weighted, no step is open, or more weights than micro-batches. E_ARGUMENT:
 * negative or
 * not finite.
 */
MFSDP_API mfsdp_status mfsdp_step_weight(mfsdp_runtime *rt, double weight) {
  MFSDP_TRY(mfsdp__runtime_usable(rt));
  if (rt->verdict.weight_word == 0 || !rt->in_step || rt->weight_count >= rt->micro_batch_count)
    return MFSDP_FAIL(rt->context, MFSDP_E_STATE, "step weight: %s",
                      rt->verdict.weight_word == 0 ? "the runtime was not made with weighted"
                      : rt->in_step                ? "more weights than micro-batches"
                                                   : "no step is open");
  if (!(weight >= 0.0) || !(weight <= 1e300))
    return MFSDP_FAIL(rt->context, MFSDP_E_ARGUMENT, "step weight: %g, needs 0 or more", weight);
  memcpy((uint64_t *)rt->verdict.header.data + rt->verdict.weight_word + rt->weight_count, &weight,
         sizeof(weight));
  ++rt->weight_count;
  return MFSDP_OK;
}

/* What the trainer multiplies its loss gradient with in this step; 1 without loss scaling. */
MFSDP_API double mfsdp_runtime_loss_scale(const mfsdp_runtime *rt) {
  return rt->loss_scale;
}

/* The schedule that steps follow. */
MFSDP_API const mfsdp_schedule *mfsdp_runtime_schedule(const mfsdp_runtime *rt) {
  return &rt->schedule;
}

MFSDP_API mfsdp_status mfsdp__step_may_end(mfsdp_runtime *rt) {
  int32_t i;
  if (!rt->in_step)
    return MFSDP_FAIL(rt->context, MFSDP_E_STATE, "step end: no step is open (mfsdp_step_begin)");
  if (rt->verdict.weight_word > 0 && rt->weight_count != rt->micro_batch_count)
    return MFSDP_FAIL(rt->context, MFSDP_E_STATE,
                      "step end: %d of %d micro-batches have a weight (mfsdp_step_weight)",
                      (int)rt->weight_count, (int)rt->micro_batch_count);
  for (i = 0; i < rt->unit_count; ++i) {
    const mfsdp__unit *unit = &rt->units[i];
    if (unit->acquires > 0)
      return MFSDP_FAIL(rt->context, MFSDP_E_STATE,
                        "step end: unit %d is still acquired (%d times); release it first", (int)i,
                        (int)unit->acquires);
    if (unit->grad_state != MFSDP__GRAD_CLOSED)
      return MFSDP_FAIL(rt->context, MFSDP_E_STATE,
                        "step end: unit %d has %s gradients that were not reduced", (int)i,
                        unit->grad_state == MFSDP__GRAD_OPEN   ? "open"
                        : unit->grad_state == MFSDP__GRAD_HELD ? "accumulated"
                                                               : "a tied tensor's");
  }
  return MFSDP_OK;
}

/* Accumulators of units that no micro-batch reduced still hold the step before. */
MFSDP_API mfsdp_status mfsdp__step_clear_unused(mfsdp_runtime *rt) {
  int32_t i;
  for (i = 0; i < rt->unit_count; ++i) {
    const mfsdp__unit *unit = &rt->units[i];
    if (unit->reduces > 0 || unit->accumulator_count == 0) continue;
    MFSDP_TRY(rt->backend->ops->fill_bytes(rt->backend->self, rt->compute,
                                           (float *)rt->accumulator.data + unit->accumulator_first,
                                           0, (size_t)unit->accumulator_count * sizeof(float)));
  }
  return MFSDP_OK;
}

/* HSDP: the owners of the same pieces add up their sums, in replica order. */
MFSDP_API mfsdp_status mfsdp__step_sum_replicas(mfsdp_runtime *rt) {
  int32_t g;
  for (g = 0; g < rt->group_count; ++g) {
    const mfsdp__group_entry *group = &rt->groups[g];
    float *sums = (float *)group->replica_sum.data, *accumulator;
    if (group->replica_reduce == NULL) continue;
    accumulator = (float *)rt->accumulator.data + group->accumulator_first;
    MFSDP_TRY(mfsdp__runtime_order(rt, rt->compute, rt->compute_done, rt->communication));
    MFSDP_TRY(mfsdp_reduce(rt->context, group->replica_reduce, rt->communication, accumulator, sums,
                           1, rt->staging.data));
    MFSDP_TRY(
        mfsdp_gather(rt->context, group->replica_gather, rt->communication, sums, accumulator));
    MFSDP_TRY(mfsdp__runtime_order(rt, rt->communication, rt->reduced, rt->compute));
  }
  return MFSDP_OK;
}

/* This rank's message: the host's header, then the sums of squares of its own blocks; then the
 * gather, inside the group and over its replicas. */
MFSDP_API mfsdp_status mfsdp__step_message(mfsdp_runtime *rt) {
  const mfsdp_backend_ops *ops = rt->backend->ops;
  void *self = rt->backend->self;
  const mfsdp__verdict_tables *t = &rt->verdict;
  uint64_t *messages = (uint64_t *)t->messages.data;
  uint64_t *own = messages + t->own_word, *replica = messages + t->replica_word;
  MFSDP_TRY(ops->copy(self, rt->compute, own, MFSDP_SPACE_DEVICE, t->header.data,
                      MFSDP_SPACE_PINNED, t->header.nbytes));
  MFSDP_TRY(ops->sumsq(self, rt->compute, (double *)(void *)(own + t->header_words),
                       (const float *)rt->accumulator.data, (const mfsdp_block *)t->blocks.data,
                       t->own_block_count));
  MFSDP_TRY(mfsdp__runtime_order(rt, rt->compute, rt->compute_done, rt->communication));
  MFSDP_TRY(mfsdp_gather(rt->context, t->gather, rt->communication, own, replica));
  if (t->replica_gather != NULL)
    MFSDP_TRY(mfsdp_gather(rt->context, t->replica_gather, rt->communication, replica, messages));
  return mfsdp__runtime_order(rt, rt->communication, rt->reduced, rt->compute);
}

MFSDP_API mfsdp_status mfsdp__step_fold(mfsdp_runtime *rt) {
  mfsdp_verdict_args args = rt->verdict.fold;
  args.value_count = rt->micro_batch_count * rt->verdict.ranks;
  args.lr_factor = rt->lr_factor;
  args.grad_scale = rt->step.grad_weight;
  args.loss_scale = rt->loss_scale;
  MFSDP_TRY(rt->backend->ops->verdict_fold(rt->backend->self, rt->compute, &args));
  return rt->backend->ops->event_record(rt->backend->self, rt->compute, rt->verdict_ready);
}

MFSDP_API mfsdp_status mfsdp__step_update(mfsdp_runtime *rt) {
  MFSDP_TRY(mfsdp_trace_mark_enqueue(rt->backend, rt->compute, &rt->optimizer_begin));
  MFSDP_TRY(mfsdp_optimizer_step(rt->context, rt->optimizer, rt->compute,
                                 (const mfsdp_step_scalars *)rt->verdict.scalars.data,
                                 (const uint32_t *)rt->verdict.present.data));
  MFSDP_TRY(mfsdp_trace_mark_enqueue(rt->backend, rt->compute, &rt->optimizer_end));
  return rt->backend->ops->event_record(rt->backend->self, rt->compute, rt->step_done);
}

MFSDP_API mfsdp_status mfsdp__step_run(mfsdp_runtime *rt) {
  MFSDP_TRY(mfsdp__step_gather_sums(rt));
  /* The last reductions come before the norm, and all gathers before the masters change. */
  MFSDP_TRY(mfsdp__runtime_order(rt, rt->communication, rt->reduced, rt->compute));
  MFSDP_TRY(mfsdp__step_clear_unused(rt));
  MFSDP_TRY(mfsdp__step_clear_sums(rt));
  MFSDP_TRY(mfsdp__stage_rest(rt));
  MFSDP_TRY(mfsdp__step_sum_replicas(rt));
  MFSDP_TRY(mfsdp__step_message(rt));
  MFSDP_TRY(mfsdp__step_fold(rt));
  MFSDP_TRY(mfsdp__stage_end(rt));
  MFSDP_TRY(mfsdp__banded_step(rt));
  MFSDP_TRY(mfsdp__step_update(rt));
  return mfsdp__step_refresh(rt);
}

/* What all ranks must have in common in this step: its description and all counts before it. Bit 0
 * is free. */
MFSDP_API uint64_t mfsdp__step_hash(const mfsdp_runtime *rt) {
  uint64_t hash = mfsdp_hash_u64(MFSDP_HASH_SEED, (uint64_t)rt->step.micro_batch_count);
  hash = mfsdp__hash_f64(hash, rt->step.grad_weight);
  hash = mfsdp__hash_f64(hash, rt->step.lr_factor);
  hash = mfsdp__hash_f64(hash, rt->loss_scale);
  hash = mfsdp_hash_u64(hash, (uint64_t)rt->step_index);
  hash = mfsdp_hash_u64(hash, (uint64_t)rt->skipped_steps);
  hash = mfsdp_hash_u64(hash, (uint64_t)rt->steps_since_skip);
  return hash & ~MFSDP_MESSAGE_STOP;
}

/*
 * Ends a step: global norm and verdict from one small gather, then the optimizer on this rank's own
 * pieces. stop_requested != 0 on any rank sets the verdict's stop on all. ENQUEUED;
 * mfsdp_step_verdict waits. E_STATE: no step is open, a unit is acquired, gradients are open, or a
 * weight is missing: nothing was sent.
 */
MFSDP_API mfsdp_status mfsdp_step_end(mfsdp_runtime *rt, int32_t stop_requested) {
  MFSDP_TRY(mfsdp__runtime_usable(rt));
  MFSDP_TRY(mfsdp__step_may_end(rt));
  ((uint64_t *)rt->verdict.header.data)[0] =
      mfsdp__step_hash(rt) | (stop_requested ? MFSDP_MESSAGE_STOP : 0);
  mfsdp__unit_drop_unacquired(rt);
  MFSDP__RUNTIME_TRY(rt, mfsdp__step_run(rt));
  rt->in_step = 0;
  rt->verdict_pending = 1;
  ++rt->step_index;
  return MFSDP_OK;
}

/*
 * Waits for the verdict of the step that ended last and gives it; the same on every rank. COMPLETE;
 * the update itself may still run. E_STATE: no step has ended. E_ARGUMENT: out is NULL or of
 * another size. E_MISMATCH, once and on every rank: ranks began it differently, so it was skipped.
 */
MFSDP_API mfsdp_status mfsdp_step_verdict(mfsdp_runtime *rt, mfsdp_verdict *out) {
  MFSDP_TRY(mfsdp__runtime_usable(rt));
  if (out == NULL || out->struct_nbytes != sizeof(*out))
    return MFSDP_FAIL(rt->context, MFSDP_E_ARGUMENT,
                      "verdict: out is NULL or its struct_nbytes is not %zu (use "
                      "mfsdp_verdict_default)",
                      sizeof(*out));
  if (!rt->verdict_pending && rt->last_verdict.struct_nbytes == 0)
    return MFSDP_FAIL(rt->context, MFSDP_E_STATE, "verdict: no step has ended yet");
  MFSDP_TRY(mfsdp__step_harvest(rt));
  *out = rt->last_verdict;
  return MFSDP_OK;
}

/* Steps skipped so far because of a non-finite gradient, as of the last verdict taken. */
MFSDP_API int64_t mfsdp_runtime_skipped_steps(const mfsdp_runtime *rt) {
  return rt->skipped_steps;
}

#endif /* MFSDP_RUNTIME_STEP_H */
