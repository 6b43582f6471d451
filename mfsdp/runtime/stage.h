/* SPDX-License-Identifier: MIT */
/*
 * runtime/stage.h - the step in backward: an owner works on a unit's matrices as soon as their sums
 * have landed, on a queue of its own, while backward goes on. Part of runtime.h.
 *
 *   desc.step_in_backward = 1;
 *
 * After the unit's last reduction of the step: momentum and Newton-Schulz into directions that stay,
 * with nothing written that the verdict could still forbid. After the verdict one pass commits them
 * all. So the bits are those of the ordinary step, and a gradient that is not finite anywhere still
 * skips the step everywhere. The price is memory: a direction for each owned matrix.
 *
 * What scales the gradient must be known when the step begins: no clipping of such groups and no
 * weights (runtime/check.h).
 * Link flags: none.
 */
#ifndef MFSDP_RUNTIME_STAGE_H
#define MFSDP_RUNTIME_STAGE_H

#include "tables.h"

/* Tells the queue of stages what scales this step's gradients; the division is the verdict's own. It
 * comes after the commit of the step before, which reads the same directions and momenta. */
MFSDP_API mfsdp_status mfsdp__stage_begin(mfsdp_runtime *rt) {
  const mfsdp_backend_ops *ops = rt->backend->ops;
  mfsdp__stages *s = &rt->stages;
  mfsdp_step_scalars *scalars = (mfsdp_step_scalars *)s->host_scalars.data;
  int32_t g;
  if (s->queue == NULL) return MFSDP_OK;
  MFSDP_TRY(ops->event_wait(rt->backend->self, rt->context, s->copied, rt->deadline_us));
  for (g = 0; g < rt->hyper_count; ++g) {
    scalars[g] = mfsdp_step_scalars_default(0.0, 0.0);
    scalars[g].grad_scale = rt->step.grad_weight / rt->loss_scale;
  }
  MFSDP_TRY(ops->queue_wait(rt->backend->self, s->queue, rt->step_done));
  MFSDP_TRY(ops->copy(rt->backend->self, s->queue, s->scalars.data, MFSDP_SPACE_DEVICE, scalars,
                      MFSDP_SPACE_PINNED, s->scalars.nbytes));
  return ops->event_record(rt->backend->self, s->queue, s->copied);
}

/* One unit's directions, once `queue` has come as far as it has now. */
MFSDP_API mfsdp_status mfsdp__stage_unit(mfsdp_runtime *rt, int32_t index, mfsdp_queue *queue) {
  mfsdp__unit *unit = &rt->units[index];
  mfsdp__stages *s = &rt->stages;
  int32_t i;
  if (unit->stage_count == 0) return MFSDP_OK;
  unit->staged = 1;
  MFSDP_TRY(mfsdp__runtime_order(rt, queue, s->landed, s->queue));
  MFSDP_TRY(mfsdp_trace_mark_enqueue(rt->backend, s->queue, &s->begin));
  MFSDP_TRY(mfsdp_optimizer_prepare(rt->context, rt->optimizer, s->queue, index,
                                    (const mfsdp_step_scalars *)s->scalars.data, NULL));
  for (i = unit->stage_first; i < unit->stage_first + unit->stage_count; ++i) {
    const mfsdp__stage_job *job = &s->jobs[i];
    MFSDP_TRY(mfsdp_optimizer_orthogonalize(rt->context, rt->optimizer, s->queue, job->hyper_group,
                                            job->rows, job->cols, job->count, job->direction,
                                            job->stride, s->workspace.data, s->workspace.nbytes));
  }
  return mfsdp_trace_mark_enqueue(rt->backend, s->queue, &s->end);
}

/* A unit's sums have landed for the last time in this step. */
MFSDP_API mfsdp_status mfsdp__stage_landed(mfsdp_runtime *rt, int32_t index) {
  if (rt->units[index].reduces < rt->micro_batch_count) return MFSDP_OK;
  return mfsdp__stage_unit(rt, index, rt->communication);
}

/* Units that fewer micro-batches have used than were announced are worked on now. */
MFSDP_API mfsdp_status mfsdp__stage_rest(mfsdp_runtime *rt) {
  int32_t u;
  for (u = 0; u < rt->unit_count; ++u)
    if (!rt->units[u].staged) MFSDP_TRY(mfsdp__stage_unit(rt, u, rt->compute));
  return MFSDP_OK;
}

/* The commit comes after all directions. */
MFSDP_API mfsdp_status mfsdp__stage_end(mfsdp_runtime *rt) {
  int32_t u;
  for (u = 0; u < rt->unit_count; ++u)
    rt->units[u].staged = 0;
  if (rt->stages.queue == NULL) return MFSDP_OK;
  return mfsdp__runtime_order(rt, rt->stages.queue, rt->stages.done, rt->compute);
}

#endif /* MFSDP_RUNTIME_STAGE_H */
