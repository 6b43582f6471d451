/* SPDX-License-Identifier: MIT */
/*
 * runtime/units.h - acquire and release of a unit's parameters; opening, marking and reducing its
 * gradients. Part of runtime.h.
 *
 * Parameters are SHARDED or FULL with counted acquires. Gradients are CLOSED, BORROWED (open for a tied
 * tensor that another unit uses) or OPEN.
 * Link flags: none.
 */
#ifndef MFSDP_RUNTIME_UNITS_H
#define MFSDP_RUNTIME_UNITS_H

#include "tables.h"

/* ---- parameters ---- */

MFSDP_API mfsdp_status mfsdp__unit_gather(mfsdp_runtime *rt, mfsdp__unit *unit, int32_t slot)
{
  const mfsdp_backend_ops *ops = rt->backend->ops;
  const float *shard = (const float *)rt->master.data;
  if (unit->gather == NULL) return MFSDP_OK;
  /* The slot's last reader and the last update of the masters come first. */
  MFSDP_TRY(ops->queue_wait(rt->backend->self, rt->communication, rt->param_ring.slots[slot].idle));
  MFSDP_TRY(ops->queue_wait(rt->backend->self, rt->communication, rt->step_done));
  MFSDP_TRY(mfsdp_gather(rt->context, unit->gather, rt->communication,
                         unit->shard_count > 0 ? shard + unit->shard_first : NULL,
                         rt->param_ring.slots[slot].data));
  MFSDP_TRY(ops->event_record(rt->backend->self, rt->communication, unit->gathered));
  return mfsdp__runtime_settle(rt, unit->gathered);
}

/* The caller has made sure that a slot is free. */
MFSDP_API mfsdp_status mfsdp__unit_acquire_one(mfsdp_runtime *rt, int32_t index)
{
  mfsdp__unit *unit = &rt->units[index];
  if (++unit->acquires > 1) return MFSDP_OK;
  unit->param_slot = mfsdp__ring_claim(&rt->param_ring, index);
  MFSDP__RUNTIME_TRY(rt, mfsdp__unit_gather(rt, unit, unit->param_slot));
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__unit_release_one(mfsdp_runtime *rt, mfsdp__unit *unit)
{
  const mfsdp_backend_ops *ops = rt->backend->ops;
  mfsdp__slot *slot = &rt->param_ring.slots[unit->param_slot];
  if (--unit->acquires > 0) return MFSDP_OK;
  unit->param_slot = -1;
  slot->unit = -1;
  if (rt->context->desc.debug_poison)
    MFSDP__RUNTIME_TRY(rt, ops->fill_bytes(rt->backend->self, rt->compute, slot->data, 0xff,
                                           rt->param_ring.slot_nbytes));
  MFSDP__RUNTIME_TRY(rt, ops->event_record(rt->backend->self, rt->compute, slot->idle));
  return MFSDP_OK;
}

/*
 * Makes a unit's full parameters available (mfsdp_unit_param), and those of the units that own its tied
 * tensors. Counted: each acquire needs its release; only the first one gathers. Every rank acquires in
 * the same order. COMPLETE without a compute queue, otherwise ordered before later work on it.
 * E_ARGUMENT: no such unit. E_STATE: no slot is free (nothing changed). E_TIMEOUT, E_PEER, E_BACKEND.
 */
MFSDP_API mfsdp_status mfsdp_unit_acquire(mfsdp_runtime *rt, int32_t unit, mfsdp_use use)
{
  mfsdp__unit *u = NULL;
  int32_t i, needed;
  MFSDP_TRY(mfsdp__unit_find(rt, unit, &u));
  if (use < MFSDP_USE_FORWARD || use > MFSDP_USE_EVALUATE)
    return MFSDP_FAIL(rt->context, MFSDP_E_ARGUMENT, "acquire unit %d: unknown use %d", (int)unit,
                      (int)use);
  needed = u->acquires == 0;
  for (i = 0; i < u->owner_count; ++i) needed += rt->units[u->owners[i]].acquires == 0;
  if (needed > mfsdp__ring_free_count(&rt->param_ring))
    return MFSDP_FAIL(rt->context, MFSDP_E_STATE,
                      "acquire unit %d: needs %d parameter slots, %d of %d are free; release a unit or "
                      "raise active_units",
                      (int)unit, (int)needed, (int)mfsdp__ring_free_count(&rt->param_ring),
                      (int)rt->param_ring.count);
  MFSDP_TRY(mfsdp__unit_acquire_one(rt, unit));
  for (i = 0; i < u->owner_count; ++i) MFSDP_TRY(mfsdp__unit_acquire_one(rt, u->owners[i]));
  return MFSDP_OK;
}

/*
 * Ends one acquire. After the last one the parameters are SHARDED again and their addresses invalid.
 * E_STATE: the unit is not acquired.
 */
MFSDP_API mfsdp_status mfsdp_unit_release(mfsdp_runtime *rt, int32_t unit)
{
  mfsdp__unit *u = NULL;
  int32_t i;
  MFSDP_TRY(mfsdp__unit_find(rt, unit, &u));
  if (u->acquires == 0)
    return MFSDP_FAIL(rt->context, MFSDP_E_STATE, "release unit %d: it is not acquired", (int)unit);
  MFSDP_TRY(mfsdp__unit_release_one(rt, u));
  for (i = 0; i < u->owner_count; ++i)
    MFSDP_TRY(mfsdp__unit_release_one(rt, &rt->units[u->owners[i]]));
  return MFSDP_OK;
}

/*
 * A parameter's full tensor, contiguous and row-major in its compute dtype, DEVICE; an alias gives its
 * owner's. Stable until the unit's matching release. NULL unless acquired, or for an unknown index.
 */
MFSDP_API const void *mfsdp_unit_param(const mfsdp_runtime *rt, int32_t param)
{
  const mfsdp__param_entry *entry;
  const mfsdp__unit *unit;
  if (param < 0 || param >= rt->param_count) return NULL;
  entry = &rt->params[param];
  unit = &rt->units[entry->unit];
  if (unit->acquires == 0) return NULL;
  return (const float *)(const void *)rt->param_ring.slots[unit->param_slot].data + entry->offset;
}

/* ---- gradients ---- */

/* Takes a gradient slot for the unit and clears it; the caller has made sure that one is free. */
MFSDP_API mfsdp_status mfsdp__unit_open_grads(mfsdp_runtime *rt, int32_t index)
{
  const mfsdp_backend_ops *ops = rt->backend->ops;
  mfsdp__unit *unit = &rt->units[index];
  mfsdp__slot *slot;
  if (unit->grad_count == 0) return MFSDP_OK;
  unit->grad_slot = mfsdp__ring_claim(&rt->grad_ring, index);
  slot = &rt->grad_ring.slots[unit->grad_slot];
  MFSDP__RUNTIME_TRY(rt, ops->queue_wait(rt->backend->self, rt->compute, slot->idle));
  MFSDP__RUNTIME_TRY(rt, ops->fill_bytes(rt->backend->self, rt->compute, slot->data, 0,
                                         (size_t)unit->grad_count * sizeof(float)));
  return MFSDP_OK;
}

MFSDP_API void mfsdp__unit_close_grads(mfsdp_runtime *rt, mfsdp__unit *unit)
{
  if (unit->grad_slot >= 0) rt->grad_ring.slots[unit->grad_slot].unit = -1;
  unit->grad_slot = -1;
  unit->grad_state = MFSDP__GRAD_CLOSED;
}

/* Slots that opening this unit takes: its own and those of owners of its tied tensors. */
MFSDP_API int32_t mfsdp__unit_grads_needed(const mfsdp_runtime *rt, const mfsdp__unit *unit)
{
  int32_t i, needed = unit->grad_state == MFSDP__GRAD_CLOSED && unit->grad_count > 0;
  for (i = 0; i < unit->owner_count; ++i) {
    const mfsdp__unit *owner = &rt->units[unit->owners[i]];
    needed += owner->grad_state == MFSDP__GRAD_CLOSED && owner->grad_count > 0;
  }
  return needed;
}

MFSDP_API mfsdp_status mfsdp__unit_may_open(mfsdp_runtime *rt, int32_t index, const mfsdp__unit *unit)
{
  int32_t i;
  if (!rt->in_step)
    return MFSDP_FAIL(rt->context, MFSDP_E_STATE, "gradients of unit %d: no step is open (mfsdp_step_begin)",
                      (int)index);
  if (unit->grad_state == MFSDP__GRAD_OPEN)
    return MFSDP_FAIL(rt->context, MFSDP_E_STATE, "gradients of unit %d: already open", (int)index);
  if (unit->reduces >= rt->micro_batch_count)
    return MFSDP_FAIL(rt->context, MFSDP_E_STATE,
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
    return MFSDP_FAIL(rt->context, MFSDP_E_STATE,
                      "gradients of unit %d: need %d gradient slots, %d of %d are free; reduce a unit or "
                      "raise active_grads",
                      (int)index, (int)mfsdp__unit_grads_needed(rt, unit),
                      (int)mfsdp__ring_free_count(&rt->grad_ring), (int)rt->grad_ring.count);
  return MFSDP_OK;
}

/*
 * Opens a zeroed gradient buffer for the unit (mfsdp_unit_grad). Backward ADDS into it. Tensors tied to
 * another unit's accumulate in that unit's buffer, which stays open until its own reduce. COMPLETE
 * without a compute queue, otherwise ordered before later work on it.
 * E_STATE: outside a step, already open, more micro-batches than announced, no slot is free, or the
 * owner of a tied tensor has been reduced for the last time.
 */
MFSDP_API mfsdp_status mfsdp_unit_grads(mfsdp_runtime *rt, int32_t unit)
{
  mfsdp__unit *u = NULL;
  const int32_t *params;
  int32_t i, count = 0;
  MFSDP_TRY(mfsdp__unit_find(rt, unit, &u));
  MFSDP_TRY(mfsdp__unit_may_open(rt, unit, u));
  for (i = 0; i < u->owner_count; ++i) {
    mfsdp__unit *owner = &rt->units[u->owners[i]];
    if (owner->grad_state != MFSDP__GRAD_CLOSED) continue;
    MFSDP_TRY(mfsdp__unit_open_grads(rt, u->owners[i]));
    owner->grad_state = MFSDP__GRAD_BORROWED;
  }
  if (u->grad_state == MFSDP__GRAD_CLOSED) MFSDP_TRY(mfsdp__unit_open_grads(rt, unit));
  u->grad_state = MFSDP__GRAD_OPEN;
  params = mfsdp_plan_unit_params(rt->plan, unit, &count);
  for (i = 0; i < count; ++i) rt->params[params[i]].absent = 0;
  if (rt->desc.compute_queue == NULL) {
    MFSDP__RUNTIME_TRY(
      rt, rt->backend->ops->event_record(rt->backend->self, rt->compute, rt->compute_done));
    MFSDP__RUNTIME_TRY(rt, mfsdp__runtime_settle(rt, rt->compute_done));
  }
  return MFSDP_OK;
}

/*
 * Where backward adds a parameter's gradient: the full tensor, contiguous, row-major, gradient dtype,
 * DEVICE. NULL unless the unit's gradients are open, for a FROZEN parameter, or an unknown index; may be
 * NULL for a tensor without elements.
 */
MFSDP_API void *mfsdp_unit_grad(mfsdp_runtime *rt, int32_t param)
{
  const mfsdp__param_entry *entry;
  const mfsdp__unit *unit;
  if (param < 0 || param >= rt->param_count) return NULL;
  entry = &rt->params[param];
  unit = &rt->units[entry->unit];
  if (entry->grad_offset < 0 || unit->grad_slot < 0) return NULL;
  if (rt->units[entry->use_unit].grad_state != MFSDP__GRAD_OPEN) return NULL;
  return (float *)(void *)rt->grad_ring.slots[unit->grad_slot].data + entry->grad_offset;
}

/*
 * Says that this rank has no gradient for the parameter in the open micro-batch: its zeros are added,
 * and if no rank has one in the whole step, desc.missing decides. The caller must not have written to
 * it. E_STATE: the unit's gradients are not open. E_ARGUMENT: unknown or FROZEN parameter.
 */
MFSDP_API mfsdp_status mfsdp_grad_absent(mfsdp_runtime *rt, int32_t param)
{
  MFSDP_TRY(mfsdp__runtime_usable(rt));
  if (param < 0 || param >= rt->param_count)
    return MFSDP_FAIL(rt->context, MFSDP_E_ARGUMENT, "absent gradient: parameter %d does not exist",
                      (int)param);
  if (rt->params[param].grad_offset < 0)
    return MFSDP_FAIL(rt->context, MFSDP_E_ARGUMENT, "absent gradient: %s is frozen",
                      mfsdp_plan_param(rt->plan, param)->name);
  if (rt->units[rt->params[param].use_unit].grad_state != MFSDP__GRAD_OPEN)
    return MFSDP_FAIL(rt->context, MFSDP_E_STATE, "absent gradient: the gradients of %s are not open",
                      mfsdp_plan_param(rt->plan, param)->name);
  rt->params[param].absent = 1;
  return MFSDP_OK;
}

/* Presence words of this step's message, in the host's copy of its header. */
MFSDP_API uint64_t *mfsdp__presence_words(mfsdp_runtime *rt)
{
  return (uint64_t *)rt->verdict.header.data + 1 + rt->desc.max_micro_batches;
}

MFSDP_API void mfsdp__unit_mark_present(mfsdp_runtime *rt, int32_t unit)
{
  uint64_t *words = mfsdp__presence_words(rt);
  int32_t i, count = 0;
  const int32_t *params = mfsdp_plan_unit_params(rt->plan, unit, &count);
  for (i = 0; i < count; ++i) {
    const mfsdp__param_entry *entry = &rt->params[params[i]];
    if (entry->grad_offset < 0 || entry->absent) continue;
    words[entry->owner / 64] |= UINT64_C(1) << (entry->owner % 64);
  }
}

/*
 * Closes the unit's gradients and adds them, rank by rank, into the owners' accumulators. ENQUEUED; the
 * buffer's addresses are invalid now. Every rank reduces in the same order.
 * E_STATE: the gradients are not open (also: reduced twice). E_TIMEOUT, E_PEER, E_BACKEND.
 */
MFSDP_API mfsdp_status mfsdp_unit_reduce(mfsdp_runtime *rt, int32_t unit)
{
  mfsdp__unit *u = NULL;
  float *accumulator = (float *)rt->accumulator.data;
  MFSDP_TRY(mfsdp__unit_find(rt, unit, &u));
  if (u->grad_state != MFSDP__GRAD_OPEN)
    return MFSDP_FAIL(rt->context, MFSDP_E_STATE,
                      "reduce unit %d: its gradients are not open (mfsdp_unit_grads)", (int)unit);
  mfsdp__unit_mark_present(rt, unit);
  if (u->reduce != NULL) {
    mfsdp__slot *slot = &rt->grad_ring.slots[u->grad_slot];
    MFSDP__RUNTIME_TRY(
      rt, mfsdp__runtime_order(rt, rt->compute, rt->compute_done, rt->communication));
    MFSDP__RUNTIME_TRY(
      rt, mfsdp_reduce(rt->context, u->reduce, rt->communication, slot->data,
                       u->accumulator_count > 0 ? accumulator + u->accumulator_first : NULL,
                       u->reduces == 0, rt->staging.data));
    MFSDP__RUNTIME_TRY(
      rt, rt->backend->ops->event_record(rt->backend->self, rt->communication, slot->idle));
  }
  ++u->reduces;
  mfsdp__unit_close_grads(rt, u);
  return MFSDP_OK;
}

#endif /* MFSDP_RUNTIME_UNITS_H */
