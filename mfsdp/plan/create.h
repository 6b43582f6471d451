/* SPDX-License-Identifier: MIT */
/*
 * plan/create.h - makes and destroys plans: check, copy, place, lay out, hash, in this order.
 *
 *   mfsdp_plan_desc desc = mfsdp_plan_desc_default();
 *   desc.params = params; desc.param_count = count; desc.world = 8;
 *   mfsdp_status s = mfsdp_plan_create(&context, &desc, &plan);
 *
 * Does not: communicate.
 * Link flags: none.
 */
#ifndef MFSDP_PLAN_CREATE_H
#define MFSDP_PLAN_CREATE_H

#include "layout.h"
#include "place.h"
#include "serialize.h"

/* Gives a plan back; the context is the one it was made with. NULL is allowed. */
MFSDP_API void mfsdp_plan_destroy(mfsdp_context *context, mfsdp_plan *plan) {
  if (plan == NULL) return;
  MFSDP__PLAN_FREE(context, plan->params, plan->param_count);
  MFSDP__PLAN_FREE(context, plan->infos, plan->param_count);
  MFSDP__PLAN_FREE(context, plan->units, plan->unit_count);
  MFSDP__PLAN_FREE(context, plan->unit_params, plan->param_count);
  MFSDP__PLAN_FREE(context, plan->pieces, plan->piece_count);
  MFSDP__PLAN_FREE(context, plan->costs, plan->piece_count);
  MFSDP__PLAN_FREE(context, plan->segments, plan->segment_count);
  MFSDP__PLAN_FREE(context, plan->base_load, plan->base_load_count);
  MFSDP__PLAN_FREE(context, plan->node_of_rank, plan->node_count);
  MFSDP__PLAN_FREE(context, plan->part_rows, plan->part_row_count);
  MFSDP__PLAN_FREE(context, plan->names, plan->name_nbytes);
  MFSDP__PLAN_FREE(context, plan->name_slots, plan->name_slot_count);
  MFSDP__PLAN_FREE(context, plan, 1);
}

MFSDP_API void mfsdp__build_free(mfsdp__build *build) {
  mfsdp_context *context = build->context;
  const int32_t world = build->desc->world;
  MFSDP__PLAN_FREE(context, build->slots, build->slot_count);
  MFSDP__PLAN_FREE(context, build->owner_of, build->desc->param_count);
  MFSDP__PLAN_FREE(context, build->lead, 2 * (int64_t)build->unit_count);
  MFSDP__PLAN_FREE(context, build->cost, build->matrix_count);
  MFSDP__PLAN_FREE(context, build->owner, build->matrix_count);
  MFSDP__PLAN_FREE(context, build->banded, build->matrix_count);
  MFSDP__PLAN_FREE(context, build->band_nbytes, world);
  MFSDP__PLAN_FREE(context, build->unit_first, build->unit_count + 1);
  MFSDP__PLAN_FREE(context, build->items, build->item_count);
  MFSDP__PLAN_FREE(context, build->heap, world);
  MFSDP__PLAN_FREE(context, build->picked, world);
  MFSDP__PLAN_FREE(context, build->resident, world);
  MFSDP__PLAN_FREE(context, build->mark, world);
  MFSDP__PLAN_FREE(context, build->runs, build->run_capacity);
  MFSDP__PLAN_FREE(context, build->run_first, build->unit_count + 1);
  MFSDP__PLAN_FREE(context, build->run_count, build->unit_count);
  MFSDP__PLAN_FREE(context, build->limit, build->unit_count);
  MFSDP__PLAN_FREE(context, build->owned, world);
}

/* All rules. Scratch only: no result exists yet. */
MFSDP_API mfsdp_status mfsdp__build_check(mfsdp__build *build) {
  int64_t base_sum;
  size_t slot_count = 1;
  MFSDP_TRY(mfsdp__check_desc(build->context, build->desc));
  MFSDP_TRY(mfsdp__check_base_load(build->context, build->desc, &base_sum));
  MFSDP_TRY(mfsdp__check_params(build));
  MFSDP_TRY(mfsdp__check_placements(build));
  while (slot_count < 2 * (size_t)build->desc->param_count)
    slot_count *= 2;
  build->slot_count = build->desc->param_count > 0 ? slot_count : 0;
  MFSDP__PLAN_ALLOC(build->context, build->slots, build->slot_count, "plan: name table");
  MFSDP_TRY(mfsdp__check_names(build));
  MFSDP__PLAN_ALLOC(build->context, build->owner_of, build->desc->param_count, "plan: aliases");
  MFSDP_TRY(mfsdp__check_aliases(build));
  MFSDP__PLAN_ALLOC(build->context, build->lead, 2 * (int64_t)build->unit_count,
                    "plan: dtypes of units");
  return mfsdp__check_dtypes(build);
}

/* The plan's tables whose sizes the descriptions fix. */
MFSDP_API mfsdp_status mfsdp__build_alloc_plan(mfsdp__build *build) {
  mfsdp_context *context = build->context;
  const mfsdp_plan_desc *desc = build->desc;
  mfsdp_plan *plan;
  MFSDP__PLAN_ALLOC(context, build->plan, 1, "plan");
  plan = build->plan;
  plan->planner = desc->planner;
  plan->residency = desc->residency;
  plan->world = desc->world;
  plan->allow_banded = desc->allow_banded != 0;
  if (plan->allow_banded) { /* else they mean nothing */
    plan->materialize_count = desc->materialize_count;
    plan->reduce_count = desc->reduce_count;
    plan->banded_wire_cost = desc->banded_wire_cost;
    plan->banded_message_nbytes = desc->banded_message_nbytes;
  }
  plan->param_count = desc->param_count;
  plan->unit_count = build->unit_count;
  plan->name_nbytes = build->name_nbytes;
  plan->part_row_count = build->part_row_count;
  plan->caps = desc->caps;
  plan->base_load_count = desc->base_load ? (size_t)desc->world : 0;
  plan->node_count = desc->node_of_rank ? (size_t)desc->world : 0;
  MFSDP__PLAN_ALLOC(context, plan->params, plan->param_count, "plan: parameters");
  MFSDP__PLAN_ALLOC(context, plan->infos, plan->param_count, "plan: parameters");
  MFSDP__PLAN_ALLOC(context, plan->units, plan->unit_count, "plan: units");
  MFSDP__PLAN_ALLOC(context, plan->unit_params, plan->param_count, "plan: units");
  MFSDP__PLAN_ALLOC(context, plan->base_load, plan->base_load_count, "plan: base loads");
  MFSDP__PLAN_ALLOC(context, plan->node_of_rank, plan->node_count, "plan: nodes");
  MFSDP__PLAN_ALLOC(context, plan->part_rows, plan->part_row_count, "plan: row parts");
  MFSDP__PLAN_ALLOC(context, plan->names, plan->name_nbytes, "plan: names");
  plan->name_slots = build->slots;
  plan->name_slot_count = build->slot_count;
  build->slots = NULL;
  return MFSDP_OK;
}

/* Copies descriptions into the plan; what role, view and ndim leave unused is cleared, so that
 * equal plans have equal bytes. */
MFSDP_API void mfsdp__build_copy(mfsdp__build *build) {
  mfsdp_plan *plan = build->plan;
  char *names = plan->names;
  int64_t *rows = plan->part_rows;
  int32_t i, d;
  for (i = 0; i < plan->param_count; ++i) {
    const mfsdp_param *source = &build->desc->params[i];
    mfsdp_param *copy = &plan->params[i];
    const size_t name_nbytes = strlen(source->name) + 1;
    const int is_owner_matrix = source->role == MFSDP_ROLE_MATRIX && source->alias_of == NULL;
    *copy = *source;
    memcpy(names, source->name, name_nbytes);
    copy->name = names;
    names += name_nbytes;
    for (d = copy->ndim; d < MFSDP_MAX_NDIM; ++d)
      copy->shape[d] = 0;
    copy->is_slice = source->is_slice != 0;
    copy->local_matrix_ok = source->local_matrix_ok != 0;
    copy->part_rows = NULL;
    copy->part_count = 0;
    if (is_owner_matrix && mfsdp__view_has_parts(source)) {
      memcpy(rows, source->part_rows, (size_t)source->part_count * sizeof(*rows));
      copy->part_rows = rows;
      copy->part_count = source->part_count;
      rows += source->part_count;
    }
    if (!is_owner_matrix || source->view != MFSDP_VIEW_HEADS) copy->head_count = 0;
  }
  if (plan->base_load_count > 0)
    memcpy(plan->base_load, build->desc->base_load,
           plan->base_load_count * sizeof(*plan->base_load));
  if (plan->node_count > 0)
    memcpy(plan->node_of_rank, build->desc->node_of_rank,
           plan->node_count * sizeof(*plan->node_of_rank));
}

/* What follows from the copies alone: owners of aliases, sizes, the parameters of each unit. */
MFSDP_API void mfsdp__build_index(mfsdp__build *build) {
  mfsdp_plan *plan = build->plan;
  int32_t i, d, u, first = 0;
  for (i = 0; i < plan->param_count; ++i) {
    mfsdp_param *param = &plan->params[i];
    mfsdp__plan_param *info = &plan->infos[i];
    info->owner_param = build->owner_of[i];
    if (param->alias_of != NULL) param->alias_of = plan->params[info->owner_param].name;
    info->numel = 1;
    for (d = 0; d < param->ndim; ++d)
      if (param->shape[d] == 0) info->numel = 0;
    for (d = 0; d < param->ndim; ++d)
      if (info->numel > 0) info->numel *= param->shape[d];
    if (param->role == MFSDP_ROLE_MATRIX && param->alias_of == NULL)
      info->matrix_count = (int32_t)mfsdp__view_count(param);
    ++plan->units[param->unit].param_count;
  }
  for (u = 0; u < plan->unit_count; ++u) {
    plan->units[u].param_first = first;
    first += plan->units[u].param_count;
    plan->units[u].param_count = 0;
    plan->units[u].lead[0] = build->lead[2 * (size_t)u];
    plan->units[u].lead[1] = build->lead[2 * u + 1];
  }
  for (i = 0; i < plan->param_count; ++i) {
    mfsdp__plan_unit *unit = &plan->units[plan->params[i].unit];
    plan->unit_params[unit->param_first + unit->param_count++] = i;
  }
}

/* Room for the runs of each unit: a run per tensor and one more per further rank. */
MFSDP_API void mfsdp__build_runs(mfsdp__build *build) {
  const mfsdp_plan *plan = build->plan;
  int64_t room = 0, elements, nbytes;
  int32_t u;
  for (u = 0; u < build->unit_count; ++u) {
    mfsdp__tail_size(plan, u, &elements, &nbytes);
    build->tail_wishes += mfsdp__tail_wish(elements, plan->world);
  }
  for (u = 0; u < build->unit_count; ++u) {
    build->run_first[u] = room;
    mfsdp__tail_size(plan, u, &elements, &nbytes);
    if (elements > 0)
      room += plan->units[u].param_count + (int64_t)mfsdp__tail_width(build, elements);
  }
  build->run_first[build->unit_count] = room;
  build->run_capacity = room;
}

MFSDP_API mfsdp_status mfsdp__build_place(mfsdp__build *build) {
  mfsdp_context *context = build->context;
  const mfsdp_plan *plan = build->plan;
  const int balanced = plan->planner == MFSDP_PLANNER_BALANCED;
  const int32_t units = build->unit_count;
  build->item_count = (size_t)(build->matrix_count > units ? build->matrix_count : units);
  if (balanced && mfsdp__caps_on_units(&plan->caps)) {
    MFSDP__PLAN_ALLOC(context, build->limit, units, "plan: limits of units");
    mfsdp__caps_limits(build);
  }
  if (balanced) MFSDP_TRY(mfsdp__caps_check_possible(build));
  MFSDP__PLAN_ALLOC(context, build->owned, plan->world, "plan: ranks");
  MFSDP__PLAN_ALLOC(context, build->cost, build->matrix_count, "plan: costs");
  MFSDP__PLAN_ALLOC(context, build->owner, build->matrix_count, "plan: owners");
  MFSDP__PLAN_ALLOC(context, build->banded, build->matrix_count, "plan: bands");
  MFSDP__PLAN_ALLOC(context, build->band_nbytes, plan->world, "plan: bytes of bands");
  MFSDP__PLAN_ALLOC(context, build->unit_first, units + 1, "plan: matrices of units");
  MFSDP__PLAN_ALLOC(context, build->items, build->item_count, "plan: items to place");
  MFSDP__PLAN_ALLOC(context, build->heap, plan->world, "plan: ranks");
  MFSDP__PLAN_ALLOC(context, build->picked, plan->world, "plan: ranks");
  MFSDP__PLAN_ALLOC(context, build->resident, plan->world, "plan: loads");
  MFSDP__PLAN_ALLOC(context, build->mark, plan->world, "plan: ranks");
  MFSDP__PLAN_ALLOC(context, build->run_first, units + 1, "plan: runs of units");
  MFSDP__PLAN_ALLOC(context, build->run_count, units, "plan: runs of units");
  mfsdp__build_runs(build);
  MFSDP__PLAN_ALLOC(context, build->runs, build->run_capacity, "plan: element runs");
  MFSDP_TRY(mfsdp__place_costs(build));
  mfsdp__place_bands(build);
  MFSDP_TRY(mfsdp__place_matrices(build));
  if (plan->allow_banded) {
    MFSDP_TRY(mfsdp__place_hybrid(build));
    mfsdp__place_bands(build);
  }
  mfsdp__place_tails(build);
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__build_layout(mfsdp__build *build) {
  mfsdp_context *context = build->context;
  mfsdp_plan *plan = build->plan;
  int64_t pieces = mfsdp__layout_count_matrix_pieces(build), blocks;
  mfsdp__sink sink;
  int32_t u;
  for (u = 0; u < plan->unit_count; ++u)
    pieces += build->run_count[u];
  if (pieces > MFSDP_PLAN_MAX_PIECES)
    return MFSDP_FAIL(context, MFSDP_E_OVERFLOW, "plan: %lld pieces, at most %lld fit",
                      (long long)pieces, (long long)MFSDP_PLAN_MAX_PIECES);
  plan->piece_count = (int32_t)pieces;
  MFSDP__PLAN_ALLOC(context, plan->pieces, plan->piece_count, "plan: pieces");
  MFSDP__PLAN_ALLOC(context, plan->costs, plan->piece_count, "plan: costs of pieces");
  mfsdp__layout_pieces(build);
  if (plan->planner == MFSDP_PLANNER_BALANCED) MFSDP_TRY(mfsdp__caps_check_plan(build));
  plan->segment_count = (int32_t)mfsdp__layout_count_segments(build);
  MFSDP__PLAN_ALLOC(context, plan->segments, plan->segment_count, "plan: segments");
  mfsdp__layout_segments(build);
  blocks = mfsdp__layout_count_blocks(plan);
  if (blocks > MFSDP_PLAN_MAX_PIECES)
    return MFSDP_FAIL(context, MFSDP_E_OVERFLOW, "plan: %lld canonical blocks, at most %lld fit",
                      (long long)blocks, (long long)MFSDP_PLAN_MAX_PIECES);
  plan->block_count = (int32_t)blocks;
  memset(&sink, 0, sizeof(sink));
  mfsdp__sink_plan(&sink, plan);
  plan->hash = sink.hash;
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__build_run(mfsdp__build *build) {
  MFSDP_TRY(mfsdp__build_check(build));
  MFSDP_TRY(mfsdp__build_alloc_plan(build));
  mfsdp__build_copy(build);
  mfsdp__build_index(build);
  MFSDP_TRY(mfsdp__build_place(build));
  return mfsdp__build_layout(build);
}

/*
 * Makes a plan; *out is to be given to mfsdp_plan_destroy with the same context. All rules are
 * checked before any result is allocated (the answers of desc->cost when it is asked, caps before
 * the search and after it):
 * E_ARGUMENT or E_UNSUPPORTED names the parameter, the value it has and what is needed; E_OVERFLOW
 * names the limit; E_MEMORY. On failure *out is NULL and nothing is held. Everything that desc
 * points to is copied. Complete on return; the same bytes on every rank.
 * Time O(n log n + world log world) for n parameters, matrices and runs, and no table of
 * parameters x world. A unit whose tail is larger than 4096 * world elements touches all ranks, unless
 * there are so many that MFSDP__TAIL_PARTS limits them.
 * allow_banded adds MFSDP__HYBRID_WORK steps, about half a second, and a pass over the bands.
 * BALANCED adds up to five searches of MFSDP__BALANCE_WORK steps, half a second each; its caps may
 * make it try all ranks for each matrix.
 */
MFSDP_API MFSDP_CHECKED mfsdp_status mfsdp_plan_create(mfsdp_context *context,
                                                       const mfsdp_plan_desc *desc,
                                                       mfsdp_plan **out) {
  mfsdp__build build;
  mfsdp_status status;
  if (context == NULL) return MFSDP_E_ARGUMENT;
  if (out == NULL) return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "plan: out is NULL");
  *out = NULL;
  if (desc == NULL) return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "plan: desc is NULL");
  memset(&build, 0, sizeof(build));
  build.context = context;
  build.desc = desc;
  status = mfsdp__build_run(&build);
  mfsdp__build_free(&build);
  if (status == MFSDP_OK)
    *out = build.plan;
  else
    mfsdp_plan_destroy(context, build.plan);
  return status;
}

#endif /* MFSDP_PLAN_CREATE_H */
