/* SPDX-License-Identifier: MIT */
/*
 * runtime/progress.h - what a checkpoint takes and gives back beside the optimizer's states: step
 * counts, the loss scale, and this rank's part of the masters. Part of runtime.h.
 *
 *   mfsdp_runtime_progress(rt, &progress);               // between two steps
 *   mfsdp_owned owned = mfsdp_owned_default();
 *   while (mfsdp_owned_next(rt, &owned)) save(owned.name, owned.first, owned.count, owned.data);
 *
 * and in a new runtime, on any number of ranks
 *
 *   mfsdp_runtime_init(rt, read_values, file);           // masters, and compute copies from them
 *   ... the states of mfsdp_optimizer_states ...
 *   mfsdp_runtime_resume(rt, &progress);
 *
 * Link flags: none.
 */
#ifndef MFSDP_RUNTIME_PROGRESS_H
#define MFSDP_RUNTIME_PROGRESS_H

#include "params.h"

/*
 * Gives the counts after the last step that ended, and waits for its update: masters and states may
 * be read until the next step. COMPLETE. E_STATE: a step is open. E_ARGUMENT: out is NULL or of
 * another size. E_TIMEOUT, E_PEER, E_BACKEND.
 */
MFSDP_API mfsdp_status mfsdp_runtime_progress(mfsdp_runtime *rt, mfsdp_progress *out) {
  MFSDP_TRY(mfsdp__runtime_usable(rt));
  if (out == NULL || out->struct_nbytes != sizeof(*out))
    return MFSDP_FAIL(rt->context, MFSDP_E_ARGUMENT,
                      "progress: out is NULL or its struct_nbytes is not %zu (use "
                      "mfsdp_progress_default)",
                      sizeof(*out));
  if (rt->in_step) return MFSDP_FAIL(rt->context, MFSDP_E_STATE, "progress: a step is open");
  MFSDP_TRY(mfsdp__step_harvest(rt));
  MFSDP__RUNTIME_TRY(rt, rt->backend->ops->event_wait(rt->backend->self, rt->context, rt->step_done,
                                                      rt->deadline_us));
  out->step = rt->step_index;
  out->applied_steps = rt->step_index - rt->skipped_steps;
  out->skipped_steps = rt->skipped_steps;
  out->loss_scale = rt->loss_scale;
  out->steps_since_skip = rt->steps_since_skip;
  return MFSDP_OK;
}

/* So that no count overflows in the steps that follow. */
#define MFSDP__MOST_STEPS (INT64_C(1) << 53)

MFSDP_API mfsdp_status mfsdp__resume_check(mfsdp_runtime *rt, const mfsdp_progress *p) {
  const double largest = rt->scaling.initial > 0.0 ? rt->scaling.largest : 1.0;
  const double smallest = rt->scaling.initial > 0.0 ? MFSDP__SMALLEST_LOSS_SCALE : 1.0;
  if (p == NULL || p->struct_nbytes != sizeof(*p))
    return MFSDP_FAIL(rt->context, MFSDP_E_ARGUMENT,
                      "resume: progress is NULL or its struct_nbytes is not %zu (use "
                      "mfsdp_progress_default)",
                      sizeof(*p));
  if (rt->in_step) return MFSDP_FAIL(rt->context, MFSDP_E_STATE, "resume: a step is open");
  if (p->applied_steps < 0 || p->skipped_steps < 0 || p->steps_since_skip < 0 ||
      p->steps_since_skip > p->applied_steps || p->step < p->applied_steps ||
      p->step > MFSDP__MOST_STEPS || p->step - p->applied_steps != p->skipped_steps)
    return MFSDP_FAIL(
        rt->context, MFSDP_E_ARGUMENT,
        "resume: %lld steps, %lld applied, %lld skipped, %lld since a skip; the first needs to be "
        "the sum of the next two and at most 2^53, the last at most the applied ones, none "
        "negative",
        (long long)p->step, (long long)p->applied_steps, (long long)p->skipped_steps,
        (long long)p->steps_since_skip);
  if (!(p->loss_scale >= smallest) || !(p->loss_scale <= largest))
    return MFSDP_FAIL(rt->context, MFSDP_E_ARGUMENT, "resume: loss_scale is %g, needs %g to %g%s",
                      p->loss_scale, smallest, largest,
                      rt->scaling.initial > 0.0 ? "" : " (loss scaling is off)");
  return MFSDP_OK;
}

/* The count that the verdict's fold goes on from, on the device. A failed queue marks the runtime
 * failed; with `broken` it says so there, and the caller does it, after a last word with the peers. */
MFSDP_API mfsdp_status mfsdp__resume_scalars(mfsdp_runtime *rt, int64_t applied_steps,
                                             int32_t *broken) {
  const mfsdp_backend_ops *ops = rt->backend->ops;
  const size_t count = (size_t)rt->hyper_count;
  mfsdp_step_scalars *scalars;
  mfsdp_status status;
  void *memory;
  size_t i;
  MFSDP_TRY(mfsdp_table_alloc(rt->context, count, sizeof(*scalars), "step scalars", &memory));
  scalars = (mfsdp_step_scalars *)memory;
  memset(scalars, 0, count * sizeof(*scalars));
  for (i = 0; i < count; ++i)
    scalars[i].applied_steps = applied_steps;
  status = ops->copy(rt->backend->self, rt->compute, rt->verdict.scalars.data, MFSDP_SPACE_DEVICE,
                     scalars, MFSDP_SPACE_HOST, count * sizeof(*scalars));
  if (status == MFSDP_OK)
    status = ops->event_record(rt->backend->self, rt->compute, rt->compute_done);
  if (status == MFSDP_OK)
    status = ops->event_wait(rt->backend->self, rt->context, rt->compute_done, rt->deadline_us);
  if (status != MFSDP_OK) {
    if (broken != NULL)
      *broken = 1;
    else
      (void)mfsdp__runtime_failed(rt, status);
    mfsdp__runtime_drain(rt); /* the queue may still read the table */
  }
  mfsdp_table_free(rt->context, memory, count, sizeof(*scalars));
  return status;
}

/* Sets all counts. `broken`: see mfsdp__resume_scalars. */
MFSDP_API mfsdp_status mfsdp__resume_counts(mfsdp_runtime *rt, const mfsdp_progress *progress,
                                            int32_t *broken) {
  MFSDP_TRY(mfsdp__resume_scalars(rt, progress->applied_steps, broken));
  MFSDP_TRY(mfsdp_optimizer_resume(rt->context, rt->optimizer, progress->step));
  rt->step_index = progress->step;
  rt->skipped_steps = progress->skipped_steps;
  rt->loss_scale = progress->loss_scale;
  rt->steps_since_skip = progress->steps_since_skip;
  memset(&rt->last_verdict, 0, sizeof(rt->last_verdict));
  return MFSDP_OK;
}

/*
 * Goes on from the counts of another run: the next step is number progress->step. Equal on all
 * ranks, or the next verdict is E_MISMATCH; no communication. COMPLETE. There is no verdict until a
 * step ends.
 * E_STATE: a step is open. E_ARGUMENT: counts that no run can have, or a loss scale that this one
 * cannot. E_MEMORY: a small table; nothing was changed. E_TIMEOUT, E_BACKEND.
 */
MFSDP_API mfsdp_status mfsdp_runtime_resume(mfsdp_runtime *rt, const mfsdp_progress *progress) {
  MFSDP_TRY(mfsdp__runtime_usable(rt));
  MFSDP_TRY(mfsdp__resume_check(rt, progress));
  MFSDP_TRY(mfsdp__step_harvest(rt));
  return mfsdp__resume_counts(rt, progress, NULL);
}

/* The group's piece `owned->piece`, if it is this rank's. */
MFSDP_API int mfsdp__owned_fill(const mfsdp_runtime *rt, const mfsdp_piece *piece,
                                mfsdp_owned *owned) {
  const mfsdp__group_entry *group = &rt->groups[owned->group];
  const float *master;
  if (!mfsdp__holds(group, piece)) return 0;
  master = mfsdp__piece_master(rt, piece);
  owned->param = group->param_first + piece->param;
  owned->tensor = piece->grad_shard_offset < 0 ? -1 : owned->tensor_count++;
  owned->name = mfsdp__runtime_param_name(rt, owned->param);
  owned->saves = group->replica_rank == 0 && piece->owner == group->rank;
  owned->first = piece->first;
  owned->count = piece->count;
  owned->data = master;
  owned->dtype = MFSDP_F32;
  owned->space = rt->state_space;
  if (master != NULL) return 1;
  owned->data = mfsdp__piece_copy(rt, piece);
  owned->dtype = rt->units[piece->unit].compute;
  owned->space = MFSDP_SPACE_DEVICE;
  return 1;
}

/*
 * Steps to the next thing that this rank owns: 1, or 0 past the last one. Start from
 * mfsdp_owned_default; group after group, in the order of the plan's pieces. Replicas own the same,
 * and of a REPLICATED plan every rank owns everything; `saves` is 1 on one of those that do. Its
 * data may be read after mfsdp_runtime_progress; it lives as long as the runtime.
 */
MFSDP_API int mfsdp_owned_next(const mfsdp_runtime *rt, mfsdp_owned *owned) {
  for (; owned->group < rt->group_count; ++owned->group, owned->piece = -1) {
    int32_t count = 0;
    const mfsdp_piece *pieces = mfsdp_plan_pieces(rt->groups[owned->group].plan, -1, &count);
    while (++owned->piece < count)
      if (mfsdp__owned_fill(rt, &pieces[owned->piece], owned)) return 1;
  }
  return 0;
}

#endif /* MFSDP_RUNTIME_PROGRESS_H */
