/* SPDX-License-Identifier: MIT */
/*
 * plan/check.h - the state of a plan in the making, and the rules between descriptions: the plan
 * description itself, unique names, aliases, dtypes that a unit must share.
 *
 * Everything here runs before any result is allocated; its scratch is given back by create.h.
 * Private to the plan.
 * Does not: place anything.
 * Link flags: none.
 */
#ifndef MFSDP_PLAN_CHECK_H
#define MFSDP_PLAN_CHECK_H

#include "heap.h"
#include "table.h"

/* Allocates `count` entries for a typed pointer; the sizes are repeated where they are freed. */
#define MFSDP__PLAN_ALLOC(context, pointer, count, what)                                \
  do {                                                                                  \
    void *mfsdp__memory;                                                                \
    MFSDP_TRY(mfsdp_table_alloc((context), (size_t)(count), sizeof(*(pointer)), (what), \
                                &mfsdp__memory));                                       \
    memcpy(&(pointer), &mfsdp__memory, sizeof(mfsdp__memory));                          \
  } while (0)
#define MFSDP__PLAN_FREE(context, pointer, count) \
  mfsdp_table_free((context), (pointer), (size_t)(count), sizeof(*(pointer)))

/* A run of canonical blocks in the making. */
typedef struct mfsdp__run {
  int64_t first, count;
  int32_t param, owner;
} mfsdp__run;

/* Sizes are fixed before the scratch is allocated, since freeing repeats them. */
typedef struct mfsdp__build {
  mfsdp_context *context;
  const mfsdp_plan_desc *desc;
  mfsdp_plan *plan; /* NULL until all checks have passed */
  int32_t unit_count, matrix_count;
  int64_t run_capacity, element_count;
  int64_t tail_wishes; /* sum of mfsdp__tail_wish over the units */
  size_t name_nbytes, part_row_count, slot_count, item_count;
  int32_t *slots;              /* slot_count: the name table; the plan takes it over */
  int32_t *owner_of;           /* param_count: alias resolution */
  int32_t *lead;               /* 2 * unit_count: see mfsdp__plan_unit.lead */
  int64_t *cost;               /* matrix_count: by non-empty matrix in order */
  int32_t *owner;              /* matrix_count; the home of one in bands */
  unsigned char *banded;       /* matrix_count: 1 if it is cut into bands */
  int64_t *band_nbytes;        /* world: what the bands keep resident */
  int32_t *unit_first;         /* unit_count + 1: first non-empty matrix of a unit */
  mfsdp__keyed *items;         /* item_count */
  mfsdp__keyed *heap, *picked; /* world */
  int64_t *resident;           /* world */
  int32_t *mark;               /* world: last unit a rank was seen in, + 1 */
  mfsdp__run *runs;            /* run_capacity */
  int64_t *run_first;          /* unit_count + 1: room of each unit in runs */
  int32_t *run_count;          /* unit_count */
  int64_t *limit; /* unit_count, or NULL without caps on units: elements a rank may own of it */
  int64_t *owned; /* world; with limit: elements that the matrices of the unit at hand give it */
} mfsdp__build;

/* Each cap by itself, whether the planner keeps it, and the node map. */
MFSDP_API mfsdp_status mfsdp__check_caps(mfsdp_context *context, const mfsdp_plan_desc *desc) {
  static const char *const names[3] = {"max_resident_nbytes", "max_gamma_permille", "max_owners"};
  static const int64_t lowest[3] = {0, 1000, 1};
  const int64_t caps[3] = {desc->caps.max_resident_nbytes, desc->caps.max_gamma_permille,
                           desc->caps.max_owners};
  int32_t i;
  for (i = 0; i < 3; ++i) {
    if (caps[i] < lowest[i])
      return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                        "plan: caps.%s is %lld, needs at least %lld (MFSDP_PLAN_NO_CAP: none)",
                        names[i], (long long)caps[i], (long long)lowest[i]);
    if (caps[i] == MFSDP_PLAN_NO_CAP || desc->planner == MFSDP_PLANNER_BALANCED) continue;
    if (i == 1 && desc->planner == MFSDP_PLANNER_COST_AWARE) continue;
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "plan: caps.%s is %lld, but planner %s does not keep it, needs balanced",
                      names[i], (long long)caps[i], mfsdp_planner_name(desc->planner));
  }
  for (i = 0; desc->node_of_rank != NULL && i < desc->world; ++i)
    if (desc->node_of_rank[i] < 0 || desc->node_of_rank[i] >= desc->world)
      return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                        "plan: node_of_rank[%d] is %d, needs 0 to world - 1 = %d", (int)i,
                        (int)desc->node_of_rank[i], (int)desc->world - 1);
  return MFSDP_OK;
}

/* A cap that is set and does not go with a placement. */
MFSDP_API const char *mfsdp__cap_against(const mfsdp_plan_caps *caps, mfsdp_placement placement) {
  if (placement == MFSDP_PLACEMENT_REPLICATED)
    return caps->max_resident_nbytes != MFSDP_PLAN_NO_CAP ? "max_resident_nbytes" : NULL;
  if (placement != MFSDP_PLACEMENT_BANDED) return NULL;
  if (caps->max_gamma_permille != MFSDP_PLAN_NO_CAP) return "max_gamma_permille";
  return caps->max_owners != MFSDP_PLAN_NO_CAP ? "max_owners" : NULL;
}

/* Whether matrices may become BANDED. */
MFSDP_API mfsdp_status mfsdp__check_banded(mfsdp_context *context, const mfsdp_plan_desc *desc) {
  const char *cap = mfsdp__cap_against(&desc->caps, MFSDP_PLACEMENT_BANDED);
  MFSDP_TRY(mfsdp__flag_check(context, "plan", "allow_banded", desc->allow_banded));
  if (!desc->allow_banded) return MFSDP_OK;
  if (desc->banded_wire_cost < 1)
    return MFSDP_FAIL(
        context, MFSDP_E_ARGUMENT,
        "plan: allow_banded needs a banded_wire_cost of at least 1 (units of cost that a "
        "byte takes), has %lld",
        (long long)desc->banded_wire_cost);
  if (desc->banded_message_nbytes < 0 ||
      desc->banded_message_nbytes > MFSDP_PLAN_MAX_MESSAGE_NBYTES)
    return MFSDP_FAIL(
        context, MFSDP_E_ARGUMENT, "plan: banded_message_nbytes is %lld, needs 0 to %lld",
        (long long)desc->banded_message_nbytes, (long long)MFSDP_PLAN_MAX_MESSAGE_NBYTES);
  if (desc->materialize_count < 0 || desc->reduce_count < 0)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "plan: materialize_count is %d and reduce_count is %d, each needs at least 0",
                      (int)desc->materialize_count, (int)desc->reduce_count);
  if (cap != NULL)
    return MFSDP_FAIL(context, MFSDP_E_UNSUPPORTED,
                      "plan: allow_banded does not go with caps.%s: set it to MFSDP_PLAN_NO_CAP",
                      cap);
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__check_desc(mfsdp_context *context, const mfsdp_plan_desc *desc) {
  if (desc->struct_nbytes != sizeof(*desc))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "plan: desc.struct_nbytes is %zu, needs %zu (use mfsdp_plan_desc_default)",
                      desc->struct_nbytes, sizeof(*desc));
  if (desc->world < 1 || desc->world > MFSDP_PLAN_MAX_WORLD)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "plan: world is %d, needs 1 to %d",
                      (int)desc->world, MFSDP_PLAN_MAX_WORLD);
  if (desc->param_count < 0)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "plan: param_count is %d, needs at least 0",
                      (int)desc->param_count);
  if (desc->param_count > 0 && desc->params == NULL)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "plan: params is NULL, needs %d descriptions",
                      (int)desc->param_count);
  if (strcmp(mfsdp_planner_name(desc->planner), "invalid") == 0)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "plan: planner is %d, needs an mfsdp_planner",
                      (int)desc->planner);
  if (strcmp(mfsdp_residency_name(desc->residency), "invalid") == 0)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "plan: residency is %d, needs an mfsdp_residency",
                      (int)desc->residency);
  MFSDP_TRY(mfsdp__check_banded(context, desc));
  return mfsdp__check_caps(context, desc);
}

/* Loads and costs are summed in 64 bits: *sum receives the largest load any rank may start from. */
MFSDP_API mfsdp_status mfsdp__check_base_load(mfsdp_context *context, const mfsdp_plan_desc *desc,
                                              int64_t *sum) {
  int32_t r;
  *sum = 0;
  for (r = 0; desc->base_load != NULL && r < desc->world; ++r) {
    if (desc->base_load[r] < 0)
      return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "plan: base_load[%d] is %lld, needs at least 0",
                        (int)r, (long long)desc->base_load[r]);
    if (!mfsdp_i64_add(*sum, desc->base_load[r], sum))
      return MFSDP_FAIL(context, MFSDP_E_OVERFLOW,
                        "plan: base_load sums past 64 bits at rank %d (%lld)", (int)r,
                        (long long)desc->base_load[r]);
  }
  return MFSDP_OK;
}

/* Each description by itself, and the totals that sizes follow from. */
MFSDP_API mfsdp_status mfsdp__check_params(mfsdp__build *build) {
  const mfsdp_plan_desc *desc = build->desc;
  int64_t matrices = 0;
  int32_t i;
  for (i = 0; i < desc->param_count; ++i) {
    const mfsdp_param *param = &desc->params[i];
    int64_t numel = 0, padded = 0;
    mfsdp__view_cursor cursor = mfsdp__view_begin();
    MFSDP_TRY(mfsdp_param_validate(build->context, param, i, &numel));
    if (param->unit >= build->unit_count) build->unit_count = param->unit + 1;
    build->name_nbytes += strlen(param->name) + 1;
    if (param->alias_of != NULL) continue;
    if (!mfsdp_i64_align(numel, &padded)) return MFSDP_E_OVERFLOW;
    build->element_count += padded;
    if (build->element_count > MFSDP_PLAN_MAX_ELEMENTS)
      return MFSDP__PARAM_FAIL(build->context, MFSDP_E_OVERFLOW, i, param,
                               "with it the tensors have %lld elements, at most %lld fit",
                               (long long)build->element_count, (long long)MFSDP_PLAN_MAX_ELEMENTS);
    if (param->role != MFSDP_ROLE_MATRIX) continue;
    if (mfsdp__view_has_parts(param)) build->part_row_count += (size_t)param->part_count;
    while (mfsdp__view_next(param, numel, &cursor))
      ++matrices;
    if (matrices > MFSDP_PLAN_MAX_PIECES)
      return MFSDP__PARAM_FAIL(build->context, MFSDP_E_OVERFLOW, i, param,
                               "with it the views make %lld matrices, at most %lld fit",
                               (long long)matrices, (long long)MFSDP_PLAN_MAX_PIECES);
  }
  build->matrix_count = (int32_t)matrices;
  return MFSDP_OK;
}

/* What placements of several tensors, residency and caps need of each other. */
MFSDP_API mfsdp_status mfsdp__check_placements(mfsdp__build *build) {
  const mfsdp_plan_desc *desc = build->desc;
  int32_t i, first = -1;
  for (i = 0; i < desc->param_count; ++i) {
    const mfsdp_param *param = &desc->params[i];
    const int replicated = param->placement == MFSDP_PLACEMENT_REPLICATED;
    const char *cap = mfsdp__cap_against(&desc->caps, param->placement);
    if (param->alias_of != NULL) continue;
    if (first < 0) first = i;
    if (replicated != (desc->params[first].placement == MFSDP_PLACEMENT_REPLICATED))
      return MFSDP__PARAM_FAIL(build->context, MFSDP_E_UNSUPPORTED, i, param,
                               "placement is %s but %s for '%.100s': a plan has all of its tensors "
                               "replicated or none, give the others a plan (group) of their own",
                               mfsdp_placement_name(param->placement),
                               mfsdp_placement_name(desc->params[first].placement),
                               desc->params[first].name);
    if (replicated && desc->residency != MFSDP_RESIDENCY_RESIDENT)
      return MFSDP__PARAM_FAIL(build->context, MFSDP_E_UNSUPPORTED, i, param,
                               "placement is replicated but the plan's residency %s: set "
                               "MFSDP_RESIDENCY_RESIDENT",
                               mfsdp_residency_name(desc->residency));
    if (replicated && desc->allow_banded)
      return MFSDP__PARAM_FAIL(build->context, MFSDP_E_UNSUPPORTED, i, param,
                               "placement is replicated, but allow_banded is %d: needs 0",
                               (int)desc->allow_banded);
    if (cap != NULL)
      return MFSDP__PARAM_FAIL(build->context, MFSDP_E_UNSUPPORTED, i, param,
                               "placement is %s, which caps.%s does not go with: set it to "
                               "MFSDP_PLAN_NO_CAP",
                               mfsdp_placement_name(param->placement), cap);
  }
  return MFSDP_OK;
}

/* Fills the name table; the same name twice is an error. */
MFSDP_API mfsdp_status mfsdp__check_names(mfsdp__build *build) {
  const mfsdp_param *params = build->desc->params;
  int32_t i;
  for (i = 0; i < build->desc->param_count; ++i) {
    const size_t slot = mfsdp__name_slot(build->slots, build->slot_count, params, params[i].name);
    if (build->slots[slot] != 0)
      return MFSDP__PARAM_FAIL(build->context, MFSDP_E_ARGUMENT, i, &params[i],
                               "the name is taken by params[%d], needs one of its own",
                               (int)build->slots[slot] - 1);
    build->slots[slot] = i + 1;
  }
  return MFSDP_OK;
}

/* The first thing in which an alias does not repeat its owner; NULL if it does. */
MFSDP_API const char *mfsdp__alias_difference(const mfsdp_param *alias, const mfsdp_param *owner) {
  int32_t i;
  if (alias->ndim != owner->ndim) return "ndim";
  for (i = 0; i < owner->ndim; ++i)
    if (alias->shape[i] != owner->shape[i]) return "shape";
  if (alias->compute != owner->compute || alias->master != owner->master ||
      alias->grad != owner->grad || alias->wire != owner->wire)
    return "dtype";
  if (alias->role != owner->role) return "role";
  if (alias->role == MFSDP_ROLE_MATRIX) {
    if (alias->view != owner->view) return "view";
    if (alias->view == MFSDP_VIEW_HEADS && alias->head_count != owner->head_count)
      return "head_count";
    if (mfsdp__view_has_parts(alias) != mfsdp__view_has_parts(owner)) return "part_rows";
    if (mfsdp__view_has_parts(alias)) {
      if (alias->part_count != owner->part_count) return "part_count";
      for (i = 0; i < owner->part_count; ++i)
        if (alias->part_rows[i] != owner->part_rows[i]) return "part_rows";
    }
  }
  if (alias->placement != owner->placement) return "placement";
  return alias->hyper_group != owner->hyper_group ? "hyper_group" : NULL;
}

/* Sets owner_of: the parameter itself, or the owner of an alias. */
MFSDP_API mfsdp_status mfsdp__check_aliases(mfsdp__build *build) {
  const mfsdp_param *params = build->desc->params;
  int32_t i;
  for (i = 0; i < build->desc->param_count; ++i) {
    const mfsdp_param *param = &params[i];
    const mfsdp_param *owner;
    const char *difference;
    int32_t target;
    build->owner_of[i] = i;
    if (param->alias_of == NULL) continue;
    target =
        build->slots[mfsdp__name_slot(build->slots, build->slot_count, params, param->alias_of)] -
        1;
    if (target < 0)
      return MFSDP__PARAM_FAIL(build->context, MFSDP_E_ARGUMENT, i, param,
                               "alias_of '%.100s' names no parameter of this plan",
                               param->alias_of);
    owner = &params[target];
    if (target == i)
      return MFSDP__PARAM_FAIL(build->context, MFSDP_E_ARGUMENT, i, param,
                               "alias_of '%.100s' is its own name", param->alias_of);
    if (owner->alias_of != NULL)
      return MFSDP__PARAM_FAIL(build->context, MFSDP_E_ARGUMENT, i, param,
                               "alias_of '%.100s' is an alias itself, needs the owner '%.100s'",
                               param->alias_of, owner->alias_of);
    if (owner->unit > param->unit || (owner->unit == param->unit && target > i))
      return MFSDP__PARAM_FAIL(build->context, MFSDP_E_ARGUMENT, i, param,
                               "alias_of '%.100s' comes later (unit %d) than this alias (unit %d): "
                               "the first one owns",
                               param->alias_of, (int)owner->unit, (int)param->unit);
    difference = mfsdp__alias_difference(param, owner);
    if (difference != NULL)
      return MFSDP__PARAM_FAIL(build->context, MFSDP_E_ARGUMENT, i, param,
                               "%s differs from that of its owner '%.100s', needs the same",
                               difference, param->alias_of);
    build->owner_of[i] = target;
  }
  return MFSDP_OK;
}

/* Offsets count elements, so what shares a buffer shares a dtype. Fills lead. */
MFSDP_API mfsdp_status mfsdp__check_dtypes(mfsdp__build *build) {
  static const char *const names[4] = {"compute", "master", "grad", "wire"};
  const mfsdp_param *params = build->desc->params;
  int32_t i, j, u;
  for (u = 0; u < 2 * build->unit_count; ++u)
    build->lead[u] = -1;
  for (i = 0; i < build->desc->param_count; ++i) {
    const mfsdp_param *param = &params[i];
    const mfsdp_dtype mine[4] = {param->compute, param->master, param->grad, param->wire};
    int32_t *lead = &build->lead[2 * (size_t)param->unit];
    if (param->alias_of != NULL) continue;
    if (lead[0] < 0) lead[0] = i;
    if (lead[1] < 0 && param->role != MFSDP_ROLE_FROZEN) lead[1] = i;
    for (j = 0; j < (param->role == MFSDP_ROLE_FROZEN ? 1 : 4); ++j) {
      const mfsdp_param *first = &params[lead[j > 0]];
      const mfsdp_dtype theirs[4] = {first->compute, first->master, first->grad, first->wire};
      if (mine[j] != theirs[j])
        return MFSDP__PARAM_FAIL(
            build->context, MFSDP_E_UNSUPPORTED, i, param,
            "dtype %s is %s but %s for '%.100s' of the same unit %d: tensors of "
            "different dtypes need units of their own",
            names[j], mfsdp_dtype_name(mine[j]), mfsdp_dtype_name(theirs[j]), first->name,
            (int)param->unit);
    }
  }
  return MFSDP_OK;
}

#endif /* MFSDP_PLAN_CHECK_H */
