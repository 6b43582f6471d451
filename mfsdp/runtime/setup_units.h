/* SPDX-License-Identifier: MIT */
/*
 * runtime/setup_units.h - tables of groups, parameters and units with their collectives, memory and
 * slots. Part of runtime.h.
 * Link flags: none.
 */
#ifndef MFSDP_RUNTIME_SETUP_UNITS_H
#define MFSDP_RUNTIME_SETUP_UNITS_H

#include "measure.h"

#include <stdio.h>

/* ---- groups and parameters ---- */

/* A transport whose time is up may take a second to find out who does not answer: the runtime's own
 * waits are longer by more than that, so that its words come out and not "the queue is late". */
#define MFSDP__DEADLINE_MARGIN_US 1500000

MFSDP_API mfsdp_status mfsdp__setup_groups(mfsdp_runtime *rt) {
  void *memory;
  int32_t g;
  MFSDP_TRY(mfsdp_table_alloc(rt->context, (size_t)rt->desc->group_count, sizeof(*rt->groups),
                              "runtime groups", &memory));
  rt->groups = (mfsdp__group_entry *)memory;
  rt->group_count = rt->desc->group_count;
  rt->deadline_us = INT64_MAX;
  for (g = 0; g < rt->group_count; ++g) {
    const mfsdp_group *from = &rt->desc->groups[g];
    mfsdp__group_entry *to = &rt->groups[g];
    to->plan = from->plan;
    to->transport = from->transport;
    to->control = from->control;
    to->replica = from->replica;
    to->replica_control = from->replica_control;
    to->rank = from->transport->rank;
    to->world = from->transport->world;
    to->replica_rank = from->replica ? from->replica->rank : 0;
    to->replica_world = from->replica ? from->replica->world : 1;
    to->replicated = mfsdp__plan_is_replicated(from->plan);
    to->param_first = rt->param_count;
    rt->param_count += mfsdp_plan_param_count(from->plan);
    if (mfsdp_plan_unit_count(from->plan) > rt->unit_count)
      rt->unit_count = mfsdp_plan_unit_count(from->plan);
    if (to->transport->deadline_us < rt->deadline_us) rt->deadline_us = to->transport->deadline_us;
    if (to->replica != NULL && to->replica->deadline_us < rt->deadline_us)
      rt->deadline_us = to->replica->deadline_us;
    if (to->world > rt->export_xfer_count) rt->export_xfer_count = to->world;
  }
  rt->deadline_us = rt->deadline_us > INT64_MAX - MFSDP__DEADLINE_MARGIN_US
                        ? INT64_MAX
                        : rt->deadline_us + MFSDP__DEADLINE_MARGIN_US;
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__setup_params(mfsdp_runtime *rt) {
  void *memory;
  int32_t g, i;
  MFSDP_TRY(mfsdp_table_alloc(rt->context, (size_t)rt->param_count, sizeof(*rt->params),
                              "runtime parameters", &memory));
  rt->params = (mfsdp__param_entry *)memory;
  for (g = 0; g < rt->group_count; ++g) {
    const mfsdp__group_entry *group = &rt->groups[g];
    const mfsdp_plan *plan = group->plan;
    for (i = 0; i < mfsdp_plan_param_count(plan); ++i) {
      mfsdp__param_entry *entry = &rt->params[group->param_first + i];
      const int32_t owner = mfsdp_plan_param_owner(plan, i);
      entry->group = g;
      entry->index = i;
      entry->owner = group->param_first + owner;
      entry->use_unit = mfsdp_plan_param(plan, i)->unit;
      entry->unit = mfsdp_plan_param(plan, owner)->unit;
      entry->offset = mfsdp_plan_param_offset(plan, i, MFSDP_LAYOUT_GATHER);
      entry->grad_offset = mfsdp_plan_param_offset(plan, i, MFSDP_LAYOUT_REDUCE);
      entry->presence = entry->grad_offset < 0 ? -1 : owner; /* presence_first is added later */
    }
  }
  return MFSDP_OK;
}

/* Lists, for each unit, the other units that own its tied tensors, each once. */
MFSDP_API mfsdp_status mfsdp__setup_owners(mfsdp_runtime *rt) {
  void *memory;
  int32_t i, k, u, used = 0;
  for (i = 0; i < rt->param_count; ++i)
    rt->owner_unit_count += rt->params[i].unit != rt->params[i].use_unit;
  MFSDP_TRY(mfsdp_table_alloc(rt->context, (size_t)rt->owner_unit_count, sizeof(*rt->owner_units),
                              "runtime tied units", &memory));
  rt->owner_units = (int32_t *)memory;
  for (u = 0; u < rt->unit_count; ++u) {
    mfsdp__unit *unit = &rt->units[u];
    unit->owners = rt->owner_units + used;
    for (i = 0; i < unit->param_count; ++i) {
      const int32_t owner_unit = rt->params[unit->param_first + unit->params[i]].unit;
      for (k = 0; k < unit->owner_count && unit->owners[k] != owner_unit; ++k)
        continue;
      if (owner_unit == u || k < unit->owner_count) continue;
      unit->owners[unit->owner_count++] = owner_unit;
      ++used;
    }
  }
  return MFSDP_OK;
}

/* ---- units ---- */

/* One collective of a unit: what it moves, how it counts, what it is called. */
typedef struct mfsdp__unit_coll {
  mfsdp_layout_kind layout;
  mfsdp_coll_kind kind;
  mfsdp_dtype dtype;
  mfsdp_traffic traffic;
  const char *label;
} mfsdp__unit_coll;

/* The unit's extents, with this rank's segment in the full buffer itself where that is so. */
MFSDP_API mfsdp_status mfsdp__setup_unit_extents(mfsdp_runtime *rt, int32_t index,
                                                 mfsdp_layout_kind kind, mfsdp_extent *extents,
                                                 int32_t capacity, int32_t *count) {
  const mfsdp__unit *unit = &rt->units[index];
  int32_t i;
  MFSDP_TRY(mfsdp_plan_extents(rt->context, rt->groups[unit->group].plan, index, kind, extents,
                               capacity, count));
  for (i = 0; i < capacity && unit->in_place && kind == MFSDP_LAYOUT_GATHER; ++i)
    extents[i].shard_offset = extents[i].unit_offset;
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__setup_unit_coll(mfsdp_runtime *rt, int32_t index,
                                              const mfsdp__unit_coll *what, mfsdp_coll **out) {
  const int gather = what->kind == MFSDP_COLL_GATHER;
  mfsdp__unit *unit = &rt->units[index];
  const mfsdp__group_entry *group = &rt->groups[unit->group];
  mfsdp_coll_desc desc = mfsdp_coll_desc_default();
  mfsdp_layout layout;
  mfsdp_status status;
  void *extents = NULL;
  int32_t capacity = 0;
  MFSDP_TRY(mfsdp__setup_unit_extents(rt, index, what->layout, NULL, 0, &capacity));
  MFSDP_TRY(
      mfsdp_table_alloc(rt->context, (size_t)capacity, sizeof(mfsdp_extent), "extents", &extents));
  memset(&layout, 0, sizeof(layout));
  layout.struct_nbytes = sizeof(layout);
  layout.extents = (const mfsdp_extent *)extents;
  layout.world = group->world;
  layout.dtype = what->dtype;
  layout.full_count = what->layout == MFSDP_LAYOUT_GATHER ? unit->full_count : unit->grad_count;
  desc.kind = what->kind;
  desc.algorithm = gather ? rt->desc->gather_algorithm : rt->desc->reduce_algorithm;
  desc.wire = rt->desc->wire;
  desc.narrow_sums = rt->desc->narrow_sums;
  desc.traffic = what->traffic;
  desc.layout = &layout;
  desc.transport = group->transport;
  desc.chunk_nbytes = rt->desc->chunk_nbytes;
  desc.label = what->label;
  status = mfsdp__setup_unit_extents(rt, index, what->layout, (mfsdp_extent *)extents, capacity,
                                     &layout.extent_count);
  if (status == MFSDP_OK) status = mfsdp_coll_create(rt->context, &desc, out);
  mfsdp_table_free(rt->context, extents, (size_t)capacity, sizeof(mfsdp_extent));
  return status;
}

/* All collectives of a unit. A RESIDENT one has its gather twice, since bytes after an update count
 * as the optimizer's; a replicated one has none. */
MFSDP_API mfsdp_status mfsdp__setup_unit_colls(mfsdp_runtime *rt, int32_t index) {
  mfsdp__unit *unit = &rt->units[index];
  const mfsdp__unit_coll gather = {MFSDP_LAYOUT_GATHER, MFSDP_COLL_GATHER, unit->compute,
                                   MFSDP_TRAFFIC_MATERIALIZE, unit->gather_label};
  const mfsdp__unit_coll refresh = {MFSDP_LAYOUT_GATHER, MFSDP_COLL_GATHER, unit->compute,
                                    MFSDP_TRAFFIC_OPTIMIZER_MATRIX, unit->refresh_label};
  const mfsdp__unit_coll reduce = {MFSDP_LAYOUT_REDUCE, MFSDP_COLL_REDUCE, unit->wire,
                                   MFSDP_TRAFFIC_REDUCE, unit->reduce_label};
  const mfsdp__unit_coll sums = {MFSDP_LAYOUT_REDUCE, MFSDP_COLL_GATHER, MFSDP_F32,
                                 MFSDP_TRAFFIC_REDUCE, unit->sums_label};
  if (unit->full_count > 0 && !unit->replicated)
    MFSDP_TRY(mfsdp__setup_unit_coll(rt, index, &gather, &unit->gather));
  if (unit->full_count > 0 && unit->resident && !unit->replicated)
    MFSDP_TRY(mfsdp__setup_unit_coll(rt, index, &refresh, &unit->refresh));
  if (unit->grad_count > 0) MFSDP_TRY(mfsdp__setup_unit_coll(rt, index, &reduce, &unit->reduce));
  if (unit->grad_count > 0 && unit->replicated)
    MFSDP_TRY(mfsdp__setup_unit_coll(rt, index, &sums, &unit->sums_gather));
  return MFSDP_OK;
}

/* What a RESIDENT unit has beyond the others; `used` as far as the tables go. */
MFSDP_API void mfsdp__setup_unit_resident(mfsdp_runtime *rt, mfsdp__unit *unit,
                                          const mfsdp__unit_sizes *s, mfsdp__sizes *used) {
  unit->resident = s->resident;
  unit->replicated = s->replicated;
  unit->in_place = s->in_place;
  unit->ready = s->replicated ? rt->step_done : unit->gathered;
  unit->full_first_nbytes = used->resident_nbytes;
  unit->sums_first = used->sums_count;
  if (s->resident) used->resident_nbytes += (size_t)s->full_count * mfsdp_dtype_nbytes(s->compute);
  used->sums_count += s->sums_count;
  if (s->separate && (s->replicated ? s->full_count : s->shard_count) > 0) rt->has_copies = 1;
}

MFSDP_API mfsdp_status mfsdp__setup_unit(mfsdp_runtime *rt, int32_t g, int32_t index,
                                         mfsdp__sizes *used) {
  const mfsdp__group_entry *group = &rt->groups[g];
  const mfsdp__unit_sizes s = mfsdp__unit_sizes_of(rt->desc, group->plan, group->rank, index);
  mfsdp__unit *unit = &rt->units[index];
  int32_t count = 0;
  const int32_t *params = mfsdp_plan_unit_params(group->plan, index, &count);
  if (count == 0) return MFSDP_OK;
  (void)snprintf(unit->gather_label, sizeof(unit->gather_label), "gather unit %d", (int)index);
  (void)snprintf(unit->reduce_label, sizeof(unit->reduce_label), "reduce unit %d", (int)index);
  (void)snprintf(unit->wait_label, sizeof(unit->wait_label), "wait unit %d", (int)index);
  (void)snprintf(unit->refresh_label, sizeof(unit->refresh_label), "refresh unit %d", (int)index);
  (void)snprintf(unit->sums_label, sizeof(unit->sums_label), "gather sums of unit %d", (int)index);
  unit->group = g;
  unit->params = params;
  unit->param_count = count;
  unit->param_first = group->param_first;
  unit->compute = s.compute;
  unit->grad = s.grad;
  unit->wire = s.wire;
  unit->full_count = s.full_count;
  unit->grad_count = s.grad_count;
  unit->shard_count = s.shard_count;
  unit->master_in_gather_layout = !s.separate;
  unit->master_first = used->master_count;
  unit->master_count = s.master_count;
  unit->copy_first_nbytes = used->copy_nbytes;
  unit->accumulator_first = used->accumulator_count;
  unit->accumulator_count = s.accumulator_count;
  unit->keeps[MFSDP_USE_FORWARD] = rt->desc->reshard_after_forward == 0;
  used->master_count += s.master_count;
  used->accumulator_count += s.accumulator_count;
  used->copy_nbytes += (size_t)s.copy_count * mfsdp_dtype_nbytes(s.compute);
  MFSDP_TRY(rt->backend->ops->event_create(rt->backend->self, rt->context, &unit->gathered));
  mfsdp__setup_unit_resident(rt, unit, &s, used);
  return mfsdp__setup_unit_colls(rt, index);
}

MFSDP_API mfsdp_status mfsdp__setup_units(mfsdp_runtime *rt) {
  mfsdp__sizes used; /* as far as the tables go: offsets of the next unit */
  void *memory;
  int32_t g, u;
  memset(&used, 0, sizeof(used));
  MFSDP_TRY(mfsdp_table_alloc(rt->context, (size_t)rt->unit_count, sizeof(*rt->units),
                              "runtime units", &memory));
  rt->units = (mfsdp__unit *)memory;
  for (u = 0; u < rt->unit_count; ++u)
    rt->units[u].group = rt->units[u].param_slot = rt->units[u].grad_slot = -1;
  for (g = 0; g < rt->group_count; ++g) {
    rt->groups[g].accumulator_first = used.accumulator_count;
    for (u = 0; u < mfsdp_plan_unit_count(rt->groups[g].plan); ++u)
      MFSDP_TRY(mfsdp__setup_unit(rt, g, u, &used));
    rt->groups[g].accumulator_count = used.accumulator_count - rt->groups[g].accumulator_first;
  }
  return MFSDP_OK;
}

/* ---- what comes next ---- */

/* The next unit of this rank after `unit` in direction `step`; -1 at the end. */
MFSDP_API int32_t mfsdp__unit_neighbour(const mfsdp_runtime *rt, int32_t unit, int32_t step) {
  for (unit += step; unit >= 0 && unit < rt->unit_count; unit += step)
    if (rt->units[unit].group >= 0) return unit;
  return -1;
}

/*
 * The prefetch_depth units that are acquired after `index` for `use`. Forward goes up and, past the
 * last unit, turns around into the backward order, which starts with the last unit itself.
 */
MFSDP_API int32_t mfsdp__prefetch_list(const mfsdp_runtime *rt, int32_t index, mfsdp_use use,
                                       int32_t *out) {
  int32_t count = 0, unit = index, step = use == MFSDP_USE_BACKWARD ? -1 : 1;
  while (count < rt->desc->prefetch_depth) {
    const int32_t next = mfsdp__unit_neighbour(rt, unit, step);
    if (next < 0 && (use != MFSDP_USE_FORWARD || step < 0)) break;
    if (next < 0)
      step = -1; /* `unit` is the last one: it is used again */
    else
      unit = next;
    if (out != NULL) out[count] = unit;
    ++count;
  }
  return count;
}

MFSDP_API mfsdp_status mfsdp__setup_prefetch(mfsdp_runtime *rt) {
  void *memory;
  int32_t u, use, used = 0;
  if (rt->desc->prefetch_depth == 0) return MFSDP_OK;
  for (u = 0; u < rt->unit_count; ++u)
    for (use = MFSDP_USE_FORWARD; use <= MFSDP_USE_EVALUATE && rt->units[u].group >= 0; ++use)
      rt->prefetch_unit_count += mfsdp__prefetch_list(rt, u, (mfsdp_use)use, NULL);
  MFSDP_TRY(mfsdp_table_alloc(rt->context, (size_t)rt->prefetch_unit_count,
                              sizeof(*rt->prefetch_units), "runtime prefetch lists", &memory));
  rt->prefetch_units = (int32_t *)memory;
  for (u = 0; u < rt->unit_count; ++u)
    for (use = MFSDP_USE_FORWARD; use <= MFSDP_USE_EVALUATE && rt->units[u].group >= 0; ++use) {
      rt->units[u].prefetch[use] = rt->prefetch_units + used;
      rt->units[u].prefetch_count[use] =
          mfsdp__prefetch_list(rt, u, (mfsdp_use)use, rt->prefetch_units + used);
      used += rt->units[u].prefetch_count[use];
    }
  return MFSDP_OK;
}

/* ---- memory ---- */

/* A cleared buffer; PINNED and HOST memory is cleared by the host. */
MFSDP_API mfsdp_status mfsdp__setup_buffer(mfsdp_runtime *rt, size_t nbytes, mfsdp_space space,
                                           mfsdp_memory_class memory_class, mfsdp_buffer *out) {
  MFSDP_TRY(mfsdp_buffer_alloc(rt->context, rt->backend, nbytes, space, memory_class, out));
  if (space == MFSDP_SPACE_DEVICE)
    return rt->backend->ops->fill_bytes(rt->backend->self, rt->compute, out->data, 0, nbytes);
  if (nbytes > 0) memset(out->data, 0, nbytes);
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__setup_ring(mfsdp_runtime *rt, int32_t count, size_t slot_nbytes,
                                         mfsdp__ring *ring) {
  void *memory;
  int32_t i;
  MFSDP_TRY(mfsdp_table_alloc(rt->context, (size_t)count, sizeof(*ring->slots), "runtime slots",
                              &memory));
  ring->slots = (mfsdp__slot *)memory;
  ring->count = count;
  ring->slot_nbytes = slot_nbytes;
  MFSDP_TRY(mfsdp__setup_buffer(rt, (size_t)count * slot_nbytes, MFSDP_SPACE_DEVICE,
                                MFSDP_MEMORY_SLOT, &ring->buffer));
  for (i = 0; i < count; ++i) {
    ring->slots[i].unit = -1;
    ring->slots[i].data = (unsigned char *)ring->buffer.data + (size_t)i * slot_nbytes;
    MFSDP_TRY(rt->backend->ops->event_create(rt->backend->self, rt->context, &ring->slots[i].idle));
  }
  return MFSDP_OK;
}

/* The storage of what stays whole, and where each unit's is. */
MFSDP_API mfsdp_status mfsdp__setup_resident(mfsdp_runtime *rt, const mfsdp__sizes *sizes) {
  int32_t u;
  MFSDP_TRY(mfsdp__setup_buffer(rt, sizes->resident_nbytes, MFSDP_SPACE_DEVICE, MFSDP_MEMORY_SHARD,
                                &rt->resident));
  MFSDP_TRY(mfsdp__setup_buffer(rt, (size_t)sizes->sums_count * sizeof(float), MFSDP_SPACE_DEVICE,
                                MFSDP_MEMORY_GRAD, &rt->sums));
  for (u = 0; u < rt->unit_count; ++u)
    if (rt->units[u].resident)
      rt->units[u].full = (unsigned char *)rt->resident.data + rt->units[u].full_first_nbytes;
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__setup_memory(mfsdp_runtime *rt, const mfsdp__sizes *sizes) {
  MFSDP_TRY(mfsdp__setup_resident(rt, sizes));
  MFSDP_TRY(mfsdp__setup_buffer(rt, (size_t)sizes->master_count * sizeof(float),
                                rt->desc->state_space, MFSDP_MEMORY_SHARD, &rt->master));
  MFSDP_TRY(mfsdp__setup_buffer(rt, sizes->copy_nbytes, MFSDP_SPACE_DEVICE, MFSDP_MEMORY_SHARD,
                                &rt->copy));
  MFSDP_TRY(mfsdp__setup_buffer(rt, (size_t)sizes->accumulator_count * sizeof(float),
                                MFSDP_SPACE_DEVICE, MFSDP_MEMORY_GRAD, &rt->accumulator));
  MFSDP_TRY(mfsdp__setup_buffer(rt, sizes->staging_nbytes, MFSDP_SPACE_DEVICE, MFSDP_MEMORY_STAGING,
                                &rt->staging));
  MFSDP_TRY(mfsdp__setup_buffer(rt, sizes->wire_nbytes, MFSDP_SPACE_DEVICE, MFSDP_MEMORY_STAGING,
                                &rt->wire));
  MFSDP_TRY(
      mfsdp__setup_ring(rt, sizes->param_slot_count, sizes->param_slot_nbytes, &rt->param_ring));
  return mfsdp__setup_ring(rt, sizes->grad_slot_count, sizes->grad_slot_nbytes, &rt->grad_ring);
}

/* ---- replicas ---- */

/* Sums a group's accumulators over its replicas: each replica adds up one part, then all gather. */
MFSDP_API mfsdp_status mfsdp__setup_replica(mfsdp_runtime *rt, mfsdp__group_entry *group) {
  const int32_t replicas = group->replica_world;
  mfsdp_coll_desc desc = mfsdp_coll_desc_default();
  mfsdp_extent *parts;
  mfsdp_layout layout;
  mfsdp_status status;
  void *memory;
  int32_t k;
  if (group->replica == NULL || group->accumulator_count == 0) return MFSDP_OK;
  MFSDP_TRY(mfsdp_table_alloc(rt->context, (size_t)replicas, sizeof(mfsdp_extent), "replica parts",
                              &memory));
  parts = (mfsdp_extent *)memory;
  for (k = 0; k < replicas; ++k)
    parts[k] = mfsdp__replica_part(group->accumulator_count, replicas, k);
  memset(&layout, 0, sizeof(layout));
  layout.struct_nbytes = sizeof(layout);
  layout.extents = parts;
  layout.extent_count = replicas;
  layout.world = replicas;
  layout.dtype = MFSDP_F32;
  layout.full_count = group->accumulator_count;
  desc.layout = &layout;
  desc.transport = group->replica;
  desc.traffic = MFSDP_TRAFFIC_REDUCE;
  desc.chunk_nbytes = rt->desc->chunk_nbytes;
  desc.kind = MFSDP_COLL_REDUCE;
  desc.label = "reduce replicas";
  status = mfsdp__setup_buffer(rt, (size_t)parts[group->replica_rank].count * sizeof(float),
                               MFSDP_SPACE_DEVICE, MFSDP_MEMORY_STAGING, &group->replica_sum);
  if (status == MFSDP_OK) status = mfsdp_coll_create(rt->context, &desc, &group->replica_reduce);
  desc.kind = MFSDP_COLL_GATHER;
  desc.label = "gather replicas";
  if (status == MFSDP_OK) status = mfsdp_coll_create(rt->context, &desc, &group->replica_gather);
  mfsdp_table_free(rt->context, memory, (size_t)replicas, sizeof(mfsdp_extent));
  return status;
}

#endif /* MFSDP_RUNTIME_SETUP_UNITS_H */
