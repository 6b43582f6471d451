/* SPDX-License-Identifier: MIT */
/*
 * runtime/resident.h - units whose full parameters stay (ZeRO-1), and those of which every rank
 * holds everything (plain data parallel). Part of runtime.h.
 *
 * RESIDENT: the full parameters are gathered once after initial values or a load, by the first
 * acquire of each unit, and then again by every step, all units in order behind its update. An
 * acquire waits for its own unit alone, so the rest of this refresh runs beside the next forward
 * pass. It is the same for a skipped step: that nothing was updated is known on the device only.
 * REPLICATED: masters, states and the sums of gradients are on every rank. Sums are reduced to
 * their owners as ever, which keeps the order of additions, and then gathered by all; every rank
 * updates everything, and parameters are never sent.
 * Link flags: none.
 */
#ifndef MFSDP_RUNTIME_RESIDENT_H
#define MFSDP_RUNTIME_RESIDENT_H

#include "tables.h"

/* ---- where a piece is ---- */

/* Whether this rank has masters and states of a piece: its owner, or everyone. */
MFSDP_API int mfsdp__holds(const mfsdp__group_entry *group, const mfsdp_piece *piece) {
  return group->replicated || piece->owner == group->rank;
}

/* A held piece's place in the masters; NULL where it has none (FROZEN beside compute copies). */
MFSDP_API float *mfsdp__piece_master(const mfsdp_runtime *rt, const mfsdp_piece *piece) {
  const mfsdp__unit *unit = &rt->units[piece->unit];
  int64_t offset;
  if (unit->master_in_gather_layout && unit->in_place)
    return (float *)(void *)unit->full + piece->unit_offset;
  if (unit->master_in_gather_layout)
    offset = piece->shard_offset;
  else
    offset = unit->replicated ? piece->grad_unit_offset : piece->grad_shard_offset;
  return offset < 0 ? NULL : (float *)rt->master.data + unit->master_first + offset;
}

/* A held piece's place in the compute copies; NULL where the master is what is gathered. */
MFSDP_API unsigned char *mfsdp__piece_copy(const mfsdp_runtime *rt, const mfsdp_piece *piece) {
  const mfsdp__unit *unit = &rt->units[piece->unit];
  const size_t element = mfsdp_dtype_nbytes(unit->compute);
  if (unit->master_in_gather_layout) return NULL;
  if (unit->in_place) return unit->full + (size_t)piece->unit_offset * element;
  return (unsigned char *)rt->copy.data + unit->copy_first_nbytes +
         (size_t)piece->shard_offset * element;
}

/* Where the summed gradient of a held piece is for the optimizer; not for FROZEN ones. */
MFSDP_API const float *mfsdp__piece_sums(const mfsdp_runtime *rt, const mfsdp_piece *piece) {
  const mfsdp__unit *unit = &rt->units[piece->unit];
  if (unit->replicated)
    return (const float *)rt->sums.data + unit->sums_first + piece->grad_unit_offset;
  return (const float *)rt->accumulator.data + unit->accumulator_first + piece->grad_shard_offset;
}

/* What this rank gives to a gather: its masters or compute copies, packed or in the full buffer. */
MFSDP_API const void *mfsdp__unit_segment(const mfsdp_runtime *rt, const mfsdp__unit *unit) {
  if (unit->shard_count == 0) return NULL;
  if (unit->in_place) return unit->full;
  if (unit->master_in_gather_layout) return (const float *)rt->master.data + unit->master_first;
  return (const unsigned char *)rt->copy.data + unit->copy_first_nbytes;
}

/* ---- parameters ---- */

/* Gathers the full parameters that stay, into where they stay, if others changed their parts.
 * Nobody has the unit, and who had it is before the last change of the masters in its queue. */
MFSDP_API mfsdp_status mfsdp__unit_freshen(mfsdp_runtime *rt, mfsdp__unit *unit, mfsdp_coll *coll) {
  const mfsdp_backend_ops *ops = rt->backend->ops;
  unit->stale = 0;
  if (coll == NULL) return MFSDP_OK;
  MFSDP_TRY(ops->queue_wait(rt->backend->self, rt->communication, rt->step_done));
  MFSDP_TRY(mfsdp_gather(rt->context, coll, rt->communication, mfsdp__unit_segment(rt, unit),
                         unit->full));
  return ops->event_record(rt->backend->self, rt->communication, unit->gathered);
}

/* Behind the update of a step: what stays is made new, in unit order on all ranks. */
MFSDP_API mfsdp_status mfsdp__step_refresh(mfsdp_runtime *rt) {
  int32_t u;
  for (u = 0; u < rt->unit_count; ++u)
    if (rt->units[u].resident)
      MFSDP_TRY(mfsdp__unit_freshen(rt, &rt->units[u], rt->units[u].refresh));
  return MFSDP_OK;
}

/* ---- sums of gradients ---- */

/* From the owners' accumulators to all, behind the reductions that fill them. */
MFSDP_API mfsdp_status mfsdp__unit_gather_sums(mfsdp_runtime *rt, const mfsdp__unit *unit) {
  const float *accumulator = (const float *)rt->accumulator.data + unit->accumulator_first;
  if (unit->sums_gather == NULL) return MFSDP_OK;
  return mfsdp_gather(rt->context, unit->sums_gather, rt->communication,
                      unit->accumulator_count > 0 ? accumulator : NULL,
                      (float *)rt->sums.data + unit->sums_first);
}

/* After a reduce: the last one of the step makes the sums complete. */
MFSDP_API mfsdp_status mfsdp__unit_sums_landed(mfsdp_runtime *rt, const mfsdp__unit *unit) {
  return unit->reduces == rt->micro_batch_count ? mfsdp__unit_gather_sums(rt, unit) : MFSDP_OK;
}

/* At the end of a step: units that were reduced in some of its micro-batches. */
MFSDP_API mfsdp_status mfsdp__step_gather_sums(mfsdp_runtime *rt) {
  int32_t u;
  for (u = 0; u < rt->unit_count; ++u)
    if (rt->units[u].reduces > 0 && rt->units[u].reduces < rt->micro_batch_count)
      MFSDP_TRY(mfsdp__unit_gather_sums(rt, &rt->units[u]));
  return MFSDP_OK;
}

/* Sums of units that no micro-batch reduced still hold the step before. */
MFSDP_API mfsdp_status mfsdp__step_clear_sums(mfsdp_runtime *rt) {
  int32_t u;
  for (u = 0; u < rt->unit_count; ++u) {
    const mfsdp__unit *unit = &rt->units[u];
    if (unit->reduces > 0 || unit->sums_gather == NULL) continue;
    MFSDP_TRY(rt->backend->ops->fill_bytes(rt->backend->self, rt->compute,
                                           (float *)rt->sums.data + unit->sums_first, 0,
                                           (size_t)unit->grad_count * sizeof(float)));
  }
  return MFSDP_OK;
}

#endif /* MFSDP_RUNTIME_RESIDENT_H */
