/* SPDX-License-Identifier: MIT */
/*
 * runtime/units.h - acquire, prefetch and release of units' parameters. Part of runtime.h.
 *
 * A unit is SHARDED (no slot) or has a slot: acquired (acquires > 0), or gathered ahead or kept
 * (acquires 0), and then the slot may be taken from it when another unit needs one. A RESIDENT unit
 * never has a slot (resident.h). Everything here is decided by the sequence of calls and the tables
 * alone, so all ranks gather in the same order.
 * Link flags: none.
 */
#ifndef MFSDP_RUNTIME_UNITS_H
#define MFSDP_RUNTIME_UNITS_H

#include "resident.h"

/* ---- slots ---- */

/* Whether an acquire has to find a slot for it. */
MFSDP_API int mfsdp__unit_wants_slot(const mfsdp__unit *unit) {
  return unit->param_slot < 0 && unit->param_count > 0 && !unit->resident;
}

/* Makes a unit SHARDED again: its slot is free for the next. Gathers into it are in queue order. */
MFSDP_API void mfsdp__unit_drop(mfsdp_runtime *rt, mfsdp__unit *unit) {
  rt->param_ring.slots[unit->param_slot].unit = -1;
  unit->param_slot = -1;
  unit->wanted = 0;
}

/* Slots that are free, or held by units that nobody has acquired. */
MFSDP_API int32_t mfsdp__unit_slots_available(const mfsdp_runtime *rt) {
  int32_t i, count = 0;
  for (i = 0; i < rt->param_ring.count; ++i) {
    const int32_t holder = rt->param_ring.slots[i].unit;
    count += holder < 0 || rt->units[holder].acquires == 0;
  }
  return count;
}

/* Takes the slot of the unit that was gathered ahead and has waited longest in ring order; units of
 * `spared` (the ones being acquired) keep theirs. */
MFSDP_API void mfsdp__unit_evict_one(mfsdp_runtime *rt, const mfsdp__unit *spared,
                                     int32_t spared_index) {
  int32_t tried, i;
  for (tried = 0; tried < rt->param_ring.count; ++tried) {
    const int32_t holder =
        rt->param_ring.slots[(rt->param_ring.next + tried) % rt->param_ring.count].unit;
    int32_t keep = holder == spared_index;
    for (i = 0; i < spared->owner_count; ++i)
      keep = keep || holder == spared->owners[i];
    if (holder < 0 || rt->units[holder].acquires > 0 || keep) continue;
    mfsdp__unit_drop(rt, &rt->units[holder]);
    return;
  }
}

/* Enqueues the gather of a unit into a free slot. */
MFSDP_API mfsdp_status mfsdp__unit_gather(mfsdp_runtime *rt, int32_t index) {
  const mfsdp_backend_ops *ops = rt->backend->ops;
  mfsdp__unit *unit = &rt->units[index];
  const mfsdp__slot *slot;
  unit->param_slot = mfsdp__ring_claim(&rt->param_ring, index);
  if (unit->gather == NULL) return MFSDP_OK;
  slot = &rt->param_ring.slots[unit->param_slot];
  /* The slot's last reader and the last update of the masters come first. */
  MFSDP_TRY(ops->queue_wait(rt->backend->self, rt->communication, slot->idle));
  MFSDP_TRY(ops->queue_wait(rt->backend->self, rt->communication, rt->step_done));
  MFSDP_TRY(mfsdp_gather(rt->context, unit->gather, rt->communication,
                         mfsdp__unit_segment(rt, unit), slot->data));
  return ops->event_record(rt->backend->self, rt->communication, unit->gathered);
}

/* ---- acquire ---- */

/* Gathers a unit that is used soon, if a slot is free; if it has one, it keeps it. */
MFSDP_API mfsdp_status mfsdp__unit_gather_ahead(mfsdp_runtime *rt, int32_t index) {
  mfsdp__unit *unit = &rt->units[index];
  if (unit->resident) return unit->stale ? mfsdp__unit_freshen(rt, unit, unit->gather) : MFSDP_OK;
  if (unit->param_slot >= 0) {
    unit->wanted = 1;
    return MFSDP_OK;
  }
  if (mfsdp__ring_free_count(&rt->param_ring) == 0) return MFSDP_OK;
  return mfsdp__unit_gather(rt, index);
}

/* The units that come next, each with the owners of its tied tensors. */
MFSDP_API mfsdp_status mfsdp__unit_prefetch(mfsdp_runtime *rt, const mfsdp__unit *unit,
                                            mfsdp_use use) {
  int32_t i, k;
  for (i = 0; i < unit->prefetch_count[use]; ++i) {
    const mfsdp__unit *next = &rt->units[unit->prefetch[use][i]];
    MFSDP_TRY(mfsdp__unit_gather_ahead(rt, unit->prefetch[use][i]));
    for (k = 0; k < next->owner_count; ++k)
      MFSDP_TRY(mfsdp__unit_gather_ahead(rt, next->owners[k]));
  }
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__unit_acquire_one(mfsdp_runtime *rt, int32_t index,
                                               const mfsdp__unit *spared, int32_t spared_index) {
  mfsdp__unit *unit = &rt->units[index];
  if (unit->stale) MFSDP_TRY(mfsdp__unit_freshen(rt, unit, unit->gather));
  if (mfsdp__unit_wants_slot(unit)) {
    if (mfsdp__ring_free_count(&rt->param_ring) == 0)
      mfsdp__unit_evict_one(rt, spared, spared_index);
    MFSDP_TRY(mfsdp__unit_gather(rt, index));
  }
  ++unit->acquires;
  unit->wanted = 0;
  return MFSDP_OK;
}

/* The unit, then the owners of its tied tensors; then what comes next; then the wait for this
 * one. */
MFSDP_API mfsdp_status mfsdp__unit_acquire_all(mfsdp_runtime *rt, int32_t index, mfsdp_use use) {
  const mfsdp__unit *unit = &rt->units[index];
  int32_t i;
  MFSDP_TRY(mfsdp__unit_acquire_one(rt, index, unit, index));
  if (unit->param_count == 0) return MFSDP_OK; /* nothing to gather, no slot */
  for (i = 0; i < unit->owner_count; ++i)
    MFSDP_TRY(mfsdp__unit_acquire_one(rt, unit->owners[i], unit, index));
  MFSDP_TRY(mfsdp__unit_prefetch(rt, unit, use));
  MFSDP_TRY(mfsdp__runtime_settle(rt, unit->ready, unit->wait_label));
  for (i = 0; i < unit->owner_count; ++i)
    MFSDP_TRY(mfsdp__runtime_settle(rt, rt->units[unit->owners[i]].ready, unit->wait_label));
  return MFSDP_OK;
}

/* Slots that an acquire still has to find, and those it may find them in. */
MFSDP_API mfsdp_status mfsdp__unit_room(mfsdp_runtime *rt, int32_t index, const mfsdp__unit *unit) {
  int32_t i, needed = mfsdp__unit_wants_slot(unit), available = mfsdp__unit_slots_available(rt);
  available -= unit->param_slot >= 0 && unit->acquires == 0; /* its own slot is not up for taking */
  for (i = 0; i < unit->owner_count; ++i) {
    const mfsdp__unit *owner = &rt->units[unit->owners[i]];
    needed += mfsdp__unit_wants_slot(owner);
    available -= owner->param_slot >= 0 && owner->acquires == 0;
  }
  if (needed <= available) return MFSDP_OK;
  return MFSDP_FAIL(
      rt->context, MFSDP_E_STATE,
      "acquire unit %d: needs %d parameter slots, %d of %d are free; release a unit or "
      "raise active_units",
      (int)index, (int)needed, (int)available, (int)rt->param_ring.count);
}

/*
 * Makes a unit's full parameters available (mfsdp_unit_param), and those of the units that own its
 * tied tensors; starts the gathers of the units that come next for this use (desc.prefetch_depth).
 * Counted: each acquire needs its release; only a unit that is not there yet is gathered, and one
 * that is RESIDENT only the first time after new values. Any order and number of acquires is fine,
 * as long as it is the same on every rank. COMPLETE without a compute queue, otherwise ordered
 * before later work on it.
 * E_ARGUMENT: no such unit. E_STATE: no slot is free (nothing changed). E_TIMEOUT, E_PEER,
 * E_BACKEND.
 */
MFSDP_API mfsdp_status mfsdp_unit_acquire(mfsdp_runtime *rt, int32_t unit, mfsdp_use use) {
  mfsdp__unit *u = NULL;
  MFSDP_TRY(mfsdp__unit_find(rt, unit, &u));
  if (use < MFSDP_USE_FORWARD || use > MFSDP_USE_EVALUATE)
    return MFSDP_FAIL(rt->context, MFSDP_E_ARGUMENT, "acquire unit %d: unknown use %d", (int)unit,
                      (int)use);
  MFSDP_TRY(mfsdp__unit_room(rt, unit, u));
  if (use != MFSDP_USE_EVALUATE) /* between forward and backward it must not move what is kept */
    u->kept = u->keeps[use];
  MFSDP__RUNTIME_TRY(rt, mfsdp__unit_acquire_all(rt, unit, use));
  ++u->own_acquires;
  return MFSDP_OK;
}

/* ---- release ---- */

MFSDP_API mfsdp_status mfsdp__unit_release_one(mfsdp_runtime *rt, mfsdp__unit *unit) {
  const mfsdp_backend_ops *ops = rt->backend->ops;
  mfsdp__slot *slot;
  if (--unit->acquires > 0 || unit->param_count == 0 || unit->resident) return MFSDP_OK;
  slot = &rt->param_ring.slots[unit->param_slot];
  if (unit->wanted || unit->kept)
    return ops->event_record(rt->backend->self, rt->compute, slot->idle);
  mfsdp__unit_drop(rt, unit);
  if (rt->context->desc.debug_poison)
    MFSDP_TRY(ops->fill_bytes(rt->backend->self, rt->compute, slot->data, 0xff,
                              rt->param_ring.slot_nbytes));
  return ops->event_record(rt->backend->self, rt->compute, slot->idle);
}

/*
 * Ends one acquire. After the last one the parameters are SHARDED again (unless they are RESIDENT,
 * kept for backward or used next) and their addresses invalid. E_STATE: the unit is not acquired,
 * or only along with one that is tied to it.
 */
MFSDP_API mfsdp_status mfsdp_unit_release(mfsdp_runtime *rt, int32_t unit) {
  mfsdp__unit *u = NULL;
  int32_t i;
  MFSDP_TRY(mfsdp__unit_find(rt, unit, &u));
  if (u->own_acquires == 0)
    return MFSDP_FAIL(rt->context, MFSDP_E_STATE, "release unit %d: it is not acquired%s",
                      (int)unit,
                      u->acquires > 0 ? " itself, only along with a unit that is tied to it" : "");
  --u->own_acquires;
  MFSDP__RUNTIME_TRY(rt, mfsdp__unit_release_one(rt, u));
  for (i = 0; i < u->owner_count; ++i)
    MFSDP__RUNTIME_TRY(rt, mfsdp__unit_release_one(rt, &rt->units[u->owners[i]]));
  return MFSDP_OK;
}

/* Before the masters change: nothing stays that nobody has acquired, and what is RESIDENT is no
 * longer what the owners have (of a replicated unit everyone is the owner). */
MFSDP_API void mfsdp__unit_drop_unacquired(mfsdp_runtime *rt) {
  int32_t u;
  for (u = 0; u < rt->unit_count; ++u) {
    rt->units[u].kept = 0;
    rt->units[u].wanted = 0;
    rt->units[u].stale = rt->units[u].resident && !rt->units[u].replicated;
    if (rt->units[u].param_slot >= 0 && rt->units[u].acquires == 0)
      mfsdp__unit_drop(rt, &rt->units[u]);
  }
}

/* For calls that need a slot: gives up what was gathered ahead. What is kept between forward and
 * backward stays, since its address was promised. */
MFSDP_API void mfsdp__unit_drop_ahead(mfsdp_runtime *rt) {
  int32_t u;
  for (u = 0; u < rt->unit_count; ++u) {
    mfsdp__unit *unit = &rt->units[u];
    if (unit->param_slot >= 0 && unit->acquires == 0 && !unit->kept) mfsdp__unit_drop(rt, unit);
  }
}

/*
 * A parameter's full tensor, contiguous and row-major in its compute dtype, DEVICE; an alias gives
 * its owner's. Stable from acquire to the unit's matching release, always the same of a RESIDENT
 * unit. NULL unless acquired, or for an unknown index.
 */
MFSDP_API const void *mfsdp_unit_param(const mfsdp_runtime *rt, int32_t param) {
  const mfsdp__param_entry *entry;
  const mfsdp__unit *unit;
  const unsigned char *full;
  if (param < 0 || param >= rt->param_count) return NULL;
  entry = &rt->params[param];
  unit = &rt->units[entry->unit];
  if (unit->acquires == 0) return NULL;
  full = unit->resident ? unit->full : rt->param_ring.slots[unit->param_slot].data;
  return full + (size_t)entry->offset * mfsdp_dtype_nbytes(unit->compute);
}

#endif /* MFSDP_RUNTIME_UNITS_H */
