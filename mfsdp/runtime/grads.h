/* SPDX-License-Identifier: MIT */
/*
 * runtime/grads.h - opening, marking and reducing a unit's gradients. Part of runtime.h.
 *
 * A unit's gradients are CLOSED, BORROWED (open for a tied tensor that another unit uses), OPEN,
 * or, with local accumulation, HELD between micro-batches.
 * Link flags: none.
 */
#ifndef MFSDP_RUNTIME_GRADS_H
#define MFSDP_RUNTIME_GRADS_H

#include "stage.h"
#include "units.h"

/* Takes a gradient slot for the unit and clears it; the caller has made sure that one is free. */
MFSDP_API mfsdp_status mfsdp__unit_open_grads(mfsdp_runtime *rt, int32_t index) {
  const mfsdp_backend_ops *ops = rt->backend->ops;
  mfsdp__unit *unit = &rt->units[index];
  mfsdp__slot *slot;
  if (unit->grad_count == 0 || unit->grad_state == MFSDP__GRAD_HELD) return MFSDP_OK;
  unit->grad_slot = mfsdp__ring_claim(&rt->grad_ring, index);
  slot = &rt->grad_ring.slots[unit->grad_slot];
  MFSDP_TRY(ops->queue_wait(rt->backend->self, rt->compute, slot->idle));
  return ops->fill_bytes(rt->backend->self, rt->compute, slot->data, 0,
                         (size_t)unit->grad_count * mfsdp_dtype_nbytes(unit->grad));
}

MFSDP_API void mfsdp__unit_close_grads(mfsdp_runtime *rt, mfsdp__unit *unit) {
  if (unit->grad_slot >= 0) rt->grad_ring.slots[unit->grad_slot].unit = -1;
  unit->grad_slot = -1;
  unit->grad_state = MFSDP__GRAD_CLOSED;
}

/* Slots that opening this unit takes: its own and those of owners of its tied tensors. */
MFSDP_API int32_t mfsdp__unit_grads_needed(const mfsdp_runtime *rt, const mfsdp__unit *unit) {
  int32_t i, needed = unit->grad_slot < 0 && unit->grad_count > 0;
  for (i = 0; i < unit->owner_count; ++i) {
    const mfsdp__unit *owner = &rt->units[unit->owners[i]];
    needed += owner->grad_slot < 0 && owner->grad_count > 0;
  }
  return needed;
}

MFSDP_API mfsdp_status mfsdp__unit_may_open(mfsdp_runtime *rt, int32_t index,
                                            const mfsdp__unit *unit) {
  int32_t i;
  if (!rt->in_step)
    return MFSDP_FAIL(rt->context, MFSDP_E_STATE,
                      "gradients of unit %d: no step is open (mfsdp_step_begin)", (int)index);
  if (unit->grad_state == MFSDP__GRAD_OPEN)
    return MFSDP_FAIL(rt->context, MFSDP_E_STATE, "gradients of unit %d: already open", (int)index);
  if (unit->reduces >= rt->micro_batch_count)
    return MFSDP_FAIL(
        rt->context, MFSDP_E_STATE,
        "gradients of unit %d: all %d micro-batches announced in mfsdp_step_begin are "
        "reduced",
        (int)index, (int)rt->micro_batch_count);
  for (i = 0; i < unit->owner_count; ++i) /* its buffer could never be reduced again */
    if (rt->units[unit->owners[i]].reduces >= rt->micro_batch_count)
      return MFSDP_FAIL(rt->context, MFSDP_E_STATE,
                        "gradients of unit %d: unit %d, which owns a tensor tied to it, is reduced "
                        "already; owners are reduced last",
                        (int)index, (int)unit->owners[i]);
  if (mfsdp__unit_grads_needed(rt, unit) > mfsdp__ring_free_count(&rt->grad_ring))
    return MFSDP_FAIL(
        rt->context, MFSDP_E_STATE,
        "gradients of unit %d: need %d gradient slots, %d of %d are free; reduce a unit or "
        "raise active_grads",
        (int)index, (int)mfsdp__unit_grads_needed(rt, unit),
        (int)mfsdp__ring_free_count(&rt->grad_ring), (int)rt->grad_ring.count);
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__unit_open_all(mfsdp_runtime *rt, int32_t index) {
  mfsdp__unit *unit = &rt->units[index];
  int32_t i;
  for (i = 0; i < unit->owner_count; ++i) {
    mfsdp__unit *owner = &rt->units[unit->owners[i]];
    if (owner->grad_state == MFSDP__GRAD_OPEN || owner->grad_state == MFSDP__GRAD_BORROWED)
      continue;
    MFSDP_TRY(mfsdp__unit_open_grads(rt, unit->owners[i]));
    owner->grad_state = MFSDP__GRAD_BORROWED;
  }
  if (unit->grad_state != MFSDP__GRAD_BORROWED) MFSDP_TRY(mfsdp__unit_open_grads(rt, index));
  unit->grad_state = MFSDP__GRAD_OPEN;
  for (i = 0; i < unit->param_count; ++i)
    rt->params[unit->param_first + unit->params[i]].absent = 0;
  if (!rt->owns_compute) return MFSDP_OK;
  MFSDP_TRY(rt->backend->ops->event_record(rt->backend->self, rt->compute, rt->compute_done));
  return mfsdp__runtime_settle(rt, rt->compute_done, "wait gradients");
}

/*
 * Opens a gradient buffer for the unit (mfsdp_unit_grad): zeroed, or, with local accumulation, with
 * the sums of the micro-batches before. Backward ADDS into it, in the gradient dtype. Tensors tied
 * to another unit's accumulate in that unit's buffer, which stays open until its own reduce (and
 * is of f32, or create refuses: several uses add up there).
 * COMPLETE without a compute queue, otherwise ordered before later work on it.
 * E_STATE: outside a step, already open, more micro-batches than announced, no slot is free, or the
 * owner of a tied tensor has been reduced for the last time.
 */
MFSDP_API mfsdp_status mfsdp_unit_grads(mfsdp_runtime *rt, int32_t unit) {
  mfsdp__unit *u = NULL;
  MFSDP_TRY(mfsdp__unit_find(rt, unit, &u));
  MFSDP_TRY(mfsdp__unit_may_open(rt, unit, u));
  MFSDP__RUNTIME_TRY(rt, mfsdp__unit_open_all(rt, unit));
  return MFSDP_OK;
}

/*
 * Where backward adds a parameter's gradient: the full tensor, contiguous, row-major, gradient
 * dtype, DEVICE. NULL unless the unit's gradients are open, for a FROZEN parameter, or an unknown
 * index.
 */
MFSDP_API void *mfsdp_unit_grad(mfsdp_runtime *rt, int32_t param) {
  const mfsdp__param_entry *entry;
  const mfsdp__unit *unit;
  if (param < 0 || param >= rt->param_count) return NULL;
  entry = &rt->params[param];
  unit = &rt->units[entry->unit];
  if (entry->grad_offset < 0 || unit->grad_slot < 0) return NULL;
  if (rt->units[entry->use_unit].grad_state != MFSDP__GRAD_OPEN) return NULL;
  return rt->grad_ring.slots[unit->grad_slot].data +
         (size_t)entry->grad_offset * mfsdp_dtype_nbytes(unit->grad);
}

/*
 * Says that this rank has no gradient for the parameter in the open micro-batch: its zeros are
 * added, and if no rank has one in the whole step, desc.missing decides. The caller must not have
 * written to it. E_STATE: the unit's gradients are not open. E_ARGUMENT: unknown or FROZEN
 * parameter.
 */
MFSDP_API mfsdp_status mfsdp_grad_absent(mfsdp_runtime *rt, int32_t param) {
  MFSDP_TRY(mfsdp__runtime_usable(rt));
  if (param < 0 || param >= rt->param_count)
    return MFSDP_FAIL(rt->context, MFSDP_E_ARGUMENT, "absent gradient: parameter %d does not exist",
                      (int)param);
  if (rt->params[param].grad_offset < 0)
    return MFSDP_FAIL(rt->context, MFSDP_E_ARGUMENT, "absent gradient: %s is frozen",
                      mfsdp__runtime_param_name(rt, param));
  if (rt->units[rt->params[param].use_unit].grad_state != MFSDP__GRAD_OPEN)
    return MFSDP_FAIL(rt->context, MFSDP_E_STATE,
                      "absent gradient: the gradients of %s are not open",
                      mfsdp__runtime_param_name(rt, param));
  rt->params[param].absent = 1;
  return MFSDP_OK;
}

/* ---- reduce ---- */

/* Presence words of this step's message, in the host's copy of its header. */
MFSDP_API uint64_t *mfsdp__presence_words(mfsdp_runtime *rt) {
  return (uint64_t *)rt->verdict.header.data + rt->verdict.presence_word;
}

MFSDP_API void mfsdp__unit_mark_present(mfsdp_runtime *rt, const mfsdp__unit *unit) {
  uint64_t *words = mfsdp__presence_words(rt);
  int32_t i;
  for (i = 0; i < unit->param_count; ++i) {
    const mfsdp__param_entry *entry = &rt->params[unit->param_first + unit->params[i]];
    if (entry->presence < 0 || entry->absent) continue;
    words[entry->presence / 64] |= UINT64_C(1) << (entry->presence % 64);
  }
}

/* Enqueues the reduction of the unit's slot, through a cast where the wire has a dtype of its
 * own. */
MFSDP_API mfsdp_status mfsdp__unit_send_grads(mfsdp_runtime *rt, mfsdp__unit *unit, int32_t first) {
  const mfsdp_backend_ops *ops = rt->backend->ops;
  mfsdp__slot *slot = &rt->grad_ring.slots[unit->grad_slot];
  float *accumulator = (float *)rt->accumulator.data;
  const void *terms = slot->data;
  MFSDP_TRY(mfsdp__runtime_order(rt, rt->compute, rt->compute_done, rt->communication));
  if (unit->wire != unit->grad) {
    terms = rt->wire.data;
    MFSDP_TRY(ops->cast(rt->backend->self, rt->communication, rt->wire.data, unit->wire, slot->data,
                        unit->grad, unit->grad_count));
  }
  MFSDP_TRY(mfsdp_reduce(rt->context, unit->reduce, rt->communication, terms,
                         unit->accumulator_count > 0 ? accumulator + unit->accumulator_first : NULL,
                         first, rt->staging.data));
  return ops->event_record(rt->backend->self, rt->communication, slot->idle);
}

/*
 * Closes the unit's gradients and adds them, rank by rank, into the owners' accumulators (with
 * local accumulation only in the step's last micro-batch). ENQUEUED; the buffer's addresses are
 * invalid now. Every rank reduces in the same order.
 * E_STATE: the gradients are not open (also: reduced twice). E_TIMEOUT, E_PEER, E_BACKEND.
 */
MFSDP_API mfsdp_status mfsdp_unit_reduce(mfsdp_runtime *rt, int32_t unit) {
  mfsdp__unit *u = NULL;
  MFSDP_TRY(mfsdp__unit_find(rt, unit, &u));
  if (u->grad_state != MFSDP__GRAD_OPEN)
    return MFSDP_FAIL(rt->context, MFSDP_E_STATE,
                      "reduce unit %d: its gradients are not open (mfsdp_unit_grads)", (int)unit);
  mfsdp__unit_mark_present(rt, u);
  ++u->reduces;
  if (rt->holds_sums && u->reduces < rt->micro_batch_count) {
    u->grad_state = MFSDP__GRAD_HELD;
    return MFSDP_OK;
  }
  if (u->reduce != NULL)
    MFSDP__RUNTIME_TRY(rt, mfsdp__unit_send_grads(rt, u, rt->holds_sums || u->reduces == 1));
  MFSDP__RUNTIME_TRY(rt, mfsdp__unit_sums_landed(rt, u));
  MFSDP__RUNTIME_TRY(rt, mfsdp__stage_landed(rt, unit));
  mfsdp__unit_close_grads(rt, u);
  return MFSDP_OK;
}

#endif /* MFSDP_RUNTIME_GRADS_H */
