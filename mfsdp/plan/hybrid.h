/* SPDX-License-Identifier: MIT */
/*
 * plan/hybrid.h - allow_banded: which OWNED matrices become BANDED once all have their owners.
 *
 * Prediction of a step, in units of cost:
 *   the largest cost of a rank
 *   + banded_wire_cost * (over all units, (world - 1) * (materialize_count * G + reduce_count * R)
 *                         + 2 * E)
 * G: bytes (compute dtype) of the largest segment of the unit, which is what the busiest link of a
 *    DIRECT gather carries to or from each peer; R: the same of gradients in the wire dtype. A unit's
 *    ELEMENTWISE and FROZEN tensors count as level over all ranks, since they are placed later.
 * E: bytes (f32) of bands that the busiest link carries on their way to the homes, the sum over all
 *    matrices in bands; they come back the same way.
 *
 *   1. caps.max_resident_nbytes: a matrix that alone passes it is in bands before the planner starts
 *      (plan/place.h). Where the planner leaves a rank above it, the matrices of such ranks, by (larger
 *      size, then order), become BANDED until none is left or a pass over all changes nothing.
 *   2. The units are taken by (larger largest matrix, then unit). Of a unit's OWNED matrices by (larger
 *      size, then order) the first k become BANDED for the k with the smallest prediction (ties: fewer).
 *      So matrices that only help together are found together.
 * Homes are the owners that the planner chose, so costs do not change. Integers only; the work is
 * limited by a count of steps, never by time.
 * Private to the plan.
 * Does not: move homes, or look at how equal the bytes of ranks are.
 * Link flags: none.
 */
#ifndef MFSDP_PLAN_HYBRID_H
#define MFSDP_PLAN_HYBRID_H

#include "caps.h"

/* Ranks that may be looked at: about half a second. Units that are left keep their matrices whole. */
#define MFSDP__HYBRID_WORK (INT64_C(1) << 26)
#define MFSDP__HYBRID_PASSES 16 /* over all matrices under a cap on bytes */

typedef struct mfsdp__hybrid {
  mfsdp__build *build;
  int64_t *rows, *cols; /* by matrix */
  int32_t *param;       /* by matrix */
  int64_t *held;        /* by rank: elements of the matrices of the unit at hand */
  int64_t *out, *in;    /* by rank: elements of bands to homes elsewhere, from elsewhere */
  int32_t *touched;     /* by position: ranks with an entry in held */
  int32_t *seen;        /* by rank: 1 if it is touched */
  mfsdp__keyed *units;  /* by largest matrix */
  int32_t touched_count;
  int64_t exchange; /* the largest entry of out and in */
  int64_t wire;     /* bytes of all units on the busiest links */
  int64_t work;
} mfsdp__hybrid;

MFSDP_API mfsdp_status mfsdp__hybrid_alloc(mfsdp__hybrid *hybrid, mfsdp__build *build) {
  mfsdp_context *context = build->context;
  const int32_t n = build->matrix_count, world = build->plan->world;
  hybrid->build = build;
  hybrid->work = MFSDP__HYBRID_WORK;
  MFSDP__PLAN_ALLOC(context, hybrid->rows, n, "plan: rows of matrices");
  MFSDP__PLAN_ALLOC(context, hybrid->cols, n, "plan: columns of matrices");
  MFSDP__PLAN_ALLOC(context, hybrid->param, n, "plan: tensors of matrices");
  MFSDP__PLAN_ALLOC(context, hybrid->held, world, "plan: elements of ranks");
  MFSDP__PLAN_ALLOC(context, hybrid->out, world, "plan: bands sent");
  MFSDP__PLAN_ALLOC(context, hybrid->in, world, "plan: bands received");
  MFSDP__PLAN_ALLOC(context, hybrid->touched, world, "plan: ranks of a unit");
  MFSDP__PLAN_ALLOC(context, hybrid->seen, world, "plan: ranks of a unit");
  MFSDP__PLAN_ALLOC(context, hybrid->units, build->unit_count, "plan: units by size");
  return MFSDP_OK;
}

MFSDP_API void mfsdp__hybrid_free(mfsdp__hybrid *hybrid, mfsdp__build *build) {
  mfsdp_context *context = build->context;
  const int32_t n = build->matrix_count, world = build->plan->world;
  MFSDP__PLAN_FREE(context, hybrid->rows, n);
  MFSDP__PLAN_FREE(context, hybrid->cols, n);
  MFSDP__PLAN_FREE(context, hybrid->param, n);
  MFSDP__PLAN_FREE(context, hybrid->held, world);
  MFSDP__PLAN_FREE(context, hybrid->out, world);
  MFSDP__PLAN_FREE(context, hybrid->in, world);
  MFSDP__PLAN_FREE(context, hybrid->touched, world);
  MFSDP__PLAN_FREE(context, hybrid->seen, world);
  MFSDP__PLAN_FREE(context, hybrid->units, build->unit_count);
}

/* Shapes of all matrices in order; units by their largest. */
MFSDP_API void mfsdp__hybrid_fill(mfsdp__hybrid *hybrid) {
  const mfsdp_plan *plan = hybrid->build->plan;
  int32_t u, j, matrix = 0;
  for (u = 0; u < plan->unit_count; ++u) {
    hybrid->units[u].id = u;
    hybrid->units[u].key = 0;
    for (j = 0; j < plan->units[u].param_count; ++j) {
      const int32_t i = plan->unit_params[plan->units[u].param_first + j];
      mfsdp__view_cursor cursor = mfsdp__view_begin();
      if (plan->params[i].alias_of != NULL || plan->params[i].role != MFSDP_ROLE_MATRIX) continue;
      for (; mfsdp__view_next(&plan->params[i], plan->infos[i].numel, &cursor); ++matrix) {
        hybrid->param[matrix] = i;
        hybrid->rows[matrix] = cursor.rows;
        hybrid->cols[matrix] = cursor.cols;
        if (-cursor.rows * cursor.cols < hybrid->units[u].key)
          hybrid->units[u].key = -cursor.rows * cursor.cols;
      }
    }
  }
  mfsdp__keyed_sort(hybrid->units, plan->unit_count);
}

/* Matrices first .. last - 1 that are OWNED, by (larger size, then order), into build->items. */
MFSDP_API int32_t mfsdp__hybrid_sort(mfsdp__hybrid *hybrid, int32_t first, int32_t last) {
  mfsdp__build *build = hybrid->build;
  int32_t i, count = 0;
  for (i = first; i < last; ++i) {
    if (build->banded[i]) continue;
    build->items[count].key = -hybrid->rows[i] * hybrid->cols[i];
    build->items[count++].id = i;
  }
  mfsdp__keyed_sort(build->items, count);
  return count;
}

/* ---- the cap on bytes ---- */

MFSDP_API int64_t mfsdp__hybrid_nbytes(const mfsdp__hybrid *hybrid, int32_t matrix, int64_t rows) {
  return mfsdp__padded_nbytes(&hybrid->build->plan->params[hybrid->param[matrix]],
                              rows * hybrid->cols[matrix]);
}

/* Step 1. held: bytes of ranks; zero again on return. */
MFSDP_API void mfsdp__hybrid_fit(mfsdp__hybrid *hybrid) {
  mfsdp__build *build = hybrid->build;
  const int64_t cap = build->desc->caps.max_resident_nbytes;
  const int32_t world = build->plan->world;
  int32_t i, count, pass, changed = 1;
  if (cap == MFSDP_PLAN_NO_CAP) return;
  count = mfsdp__hybrid_sort(hybrid, 0, build->matrix_count);
  for (i = 0; i < world; ++i)
    hybrid->held[i] = build->band_nbytes[i];
  for (i = 0; i < count; ++i) {
    const int32_t matrix = build->items[i].id;
    hybrid->held[build->owner[matrix]] +=
        mfsdp__hybrid_nbytes(hybrid, matrix, hybrid->rows[matrix]);
  }
  for (pass = 0; pass < MFSDP__HYBRID_PASSES && changed; ++pass) {
    changed = 0;
    for (i = 0; i < count; ++i) {
      const int32_t matrix = build->items[i].id, owner = build->owner[matrix];
      mfsdp__band_cursor band = mfsdp__band_begin(hybrid->rows[matrix], world);
      if (build->banded[matrix] || hybrid->held[owner] <= cap) continue;
      build->banded[matrix] = 1;
      changed = 1;
      hybrid->held[owner] -= mfsdp__hybrid_nbytes(hybrid, matrix, hybrid->rows[matrix]);
      while (mfsdp__band_next(&band))
        hybrid->held[band.rank] += mfsdp__hybrid_nbytes(hybrid, matrix, band.count);
    }
  }
  memset(hybrid->held, 0, (size_t)world * sizeof(*hybrid->held));
}

/* ---- prediction ---- */

MFSDP_API void mfsdp__hybrid_hold(mfsdp__hybrid *hybrid, int32_t rank, int64_t elements) {
  --hybrid->work;
  hybrid->held[rank] += elements;
  if (hybrid->seen[rank]) return;
  hybrid->seen[rank] = 1;
  hybrid->touched[hybrid->touched_count++] = rank;
}

/* Adds (sign 1) or takes (-1) the bands of a matrix on their way home. */
MFSDP_API void mfsdp__hybrid_send(mfsdp__hybrid *hybrid, int32_t matrix, int32_t sign) {
  const int32_t home = hybrid->build->owner[matrix];
  mfsdp__band_cursor band = mfsdp__band_begin(hybrid->rows[matrix], hybrid->build->plan->world);
  while (mfsdp__band_next(&band)) {
    const int64_t elements = sign * band.count * hybrid->cols[matrix];
    --hybrid->work;
    if (band.rank == home) continue;
    hybrid->out[band.rank] += elements;
    hybrid->in[home] += elements;
    if (hybrid->out[band.rank] > hybrid->exchange) hybrid->exchange = hybrid->out[band.rank];
  }
  if (hybrid->in[home] > hybrid->exchange) hybrid->exchange = hybrid->in[home];
}

/* What a matrix gives the ranks that hold it. */
MFSDP_API void mfsdp__hybrid_give(mfsdp__hybrid *hybrid, int32_t matrix, int banded, int32_t sign) {
  const int64_t cols = hybrid->cols[matrix];
  mfsdp__band_cursor band = mfsdp__band_begin(hybrid->rows[matrix], hybrid->build->plan->world);
  if (!banded)
    mfsdp__hybrid_hold(hybrid, hybrid->build->owner[matrix], sign * hybrid->rows[matrix] * cols);
  while (banded && mfsdp__band_next(&band))
    mfsdp__hybrid_hold(hybrid, band.rank, sign * band.count * cols);
}

/* Bytes on the busiest link for gathers and reduces of a unit of which `held` tells the matrices;
 * 0 if it passes 64 bits. payload: elements without and with FROZEN tensors. */
MFSDP_API int mfsdp__hybrid_unit_wire(mfsdp__hybrid *hybrid, int32_t unit, const int64_t *payload,
                                      int64_t *out) {
  const mfsdp_plan *plan = hybrid->build->plan;
  const int64_t world = plan->world;
  const int64_t counts[2] = {plan->materialize_count, plan->reduce_count};
  const int64_t nbytes[2] = {
      (int64_t)mfsdp_dtype_nbytes(mfsdp_plan_unit_dtype(plan, unit, MFSDP_LAYOUT_GATHER)),
      (int64_t)mfsdp_dtype_nbytes(mfsdp_plan_unit_wire(plan, unit))};
  int64_t largest = 0;
  int32_t i;
  for (i = 0; i < hybrid->touched_count; ++i)
    if (hybrid->held[hybrid->touched[i]] > largest) largest = hybrid->held[hybrid->touched[i]];
  hybrid->work -= hybrid->touched_count;
  *out = 0;
  for (i = 0; i < 2; ++i) {
    const int64_t level = payload[i] / world + (payload[i] % world != 0);
    int64_t part = largest > level ? largest : level;
    if (!mfsdp_i64_mul(part, nbytes[i], &part) || !mfsdp_i64_mul(part, counts[i], &part) ||
        !mfsdp_i64_mul(part, world - 1, &part) || !mfsdp_i64_add(*out, part, out))
      return 0;
  }
  return 1;
}

/* *out = bytes of units plus those of the exchange; 0 if they pass 64 bits. */
MFSDP_API int mfsdp__hybrid_total(int64_t units, int64_t exchange, int64_t *out) {
  return mfsdp_i64_mul(exchange, 2 * (int64_t)sizeof(float), out) &&
         mfsdp_i64_add(*out, units, out);
}

/* The prediction from bytes; the costs are what the planner made them. */
MFSDP_API int mfsdp__hybrid_predict(mfsdp__hybrid *hybrid, int64_t *out) {
  mfsdp__build *build = hybrid->build;
  const mfsdp_plan *plan = build->plan;
  int64_t most = 0;
  int32_t i;
  for (i = 0; i < plan->world; ++i)
    hybrid->held[i] = plan->base_load ? plan->base_load[i] : 0;
  for (i = 0; i < build->matrix_count; ++i)
    hybrid->held[build->owner[i]] += build->cost[i];
  for (i = 0; i < plan->world; ++i) {
    if (hybrid->held[i] > most) most = hybrid->held[i];
    hybrid->held[i] = 0;
  }
  return mfsdp__hybrid_total(hybrid->wire, hybrid->exchange, out) &&
         mfsdp_i64_mul(*out, plan->banded_wire_cost, out) && mfsdp_i64_add(*out, most, out);
}

/* ---- units ---- */

MFSDP_API void mfsdp__hybrid_payload(const mfsdp_plan *plan, int32_t unit, int64_t *payload) {
  int32_t j;
  payload[0] = payload[1] = 0;
  for (j = 0; j < plan->units[unit].param_count; ++j) {
    const int32_t i = plan->unit_params[plan->units[unit].param_first + j];
    if (plan->params[i].alias_of != NULL) continue;
    payload[0] += plan->infos[i].numel;
    if (plan->params[i].role != MFSDP_ROLE_FROZEN) payload[1] += plan->infos[i].numel;
  }
}

/* Fills or clears (sign -1) `held` by the matrices of a unit as they are. Whatever has been touched
 * since a unit was entered is zero again when it is left. */
MFSDP_API void mfsdp__hybrid_enter(mfsdp__hybrid *hybrid, int32_t unit, int32_t sign) {
  const mfsdp__build *build = hybrid->build;
  int32_t i;
  for (i = build->unit_first[unit]; i < build->unit_first[unit + 1]; ++i)
    mfsdp__hybrid_give(hybrid, i, build->banded[i], sign);
}

MFSDP_API void mfsdp__hybrid_leave(mfsdp__hybrid *hybrid, int32_t unit) {
  mfsdp__hybrid_enter(hybrid, unit, -1);
  while (hybrid->touched_count > 0)
    hybrid->seen[hybrid->touched[--hybrid->touched_count]] = 0;
}

/* Bytes of all units as they are, and of bands that are there already. */
MFSDP_API int mfsdp__hybrid_start(mfsdp__hybrid *hybrid) {
  const mfsdp__build *build = hybrid->build;
  int32_t u, i;
  hybrid->wire = 0;
  for (u = 0; u < build->unit_count; ++u) {
    int64_t payload[2], wire;
    int ok;
    mfsdp__hybrid_payload(build->plan, u, payload);
    mfsdp__hybrid_enter(hybrid, u, 1);
    ok = mfsdp__hybrid_unit_wire(hybrid, u, payload, &wire);
    mfsdp__hybrid_leave(hybrid, u);
    if (!ok || !mfsdp_i64_add(hybrid->wire, wire, &hybrid->wire)) return 0;
  }
  for (i = 0; i < build->matrix_count; ++i)
    if (build->banded[i]) mfsdp__hybrid_send(hybrid, i, 1);
  hybrid->work = MFSDP__HYBRID_WORK;
  return 1;
}

/* Step 2 for one unit. What it has now does not overflow (mfsdp__hybrid_start saw it); what would is
 * not chosen. */
MFSDP_API void mfsdp__hybrid_unit(mfsdp__hybrid *hybrid, int32_t unit) {
  mfsdp__build *build = hybrid->build;
  const int32_t count =
      mfsdp__hybrid_sort(hybrid, build->unit_first[unit], build->unit_first[unit + 1]);
  int64_t payload[2], before, best, best_wire, best_exchange = hybrid->exchange;
  int32_t k, chosen = 0;
  if (count == 0) return;
  mfsdp__hybrid_payload(build->plan, unit, payload);
  mfsdp__hybrid_enter(hybrid, unit, 1);
  if (!mfsdp__hybrid_unit_wire(hybrid, unit, payload, &before)) before = 0;
  best_wire = before;
  if (!mfsdp__hybrid_total(before, hybrid->exchange, &best)) best = INT64_MAX;
  for (k = 0; k < count && hybrid->work > 0; ++k) {
    const int32_t matrix = build->items[k].id;
    int64_t wire, total;
    mfsdp__hybrid_give(hybrid, matrix, 0, -1);
    mfsdp__hybrid_give(hybrid, matrix, 1, 1);
    mfsdp__hybrid_send(hybrid, matrix, 1);
    build->banded[matrix] = 1;
    if (!mfsdp__hybrid_unit_wire(hybrid, unit, payload, &wire) ||
        !mfsdp__hybrid_total(wire, hybrid->exchange, &total) || total >= best)
      continue;
    best = total;
    best_wire = wire;
    best_exchange = hybrid->exchange;
    chosen = k + 1;
  }
  mfsdp__hybrid_leave(hybrid, unit);
  while (k-- > chosen) { /* those that did not help stay whole */
    build->banded[build->items[k].id] = 0;
    mfsdp__hybrid_send(hybrid, build->items[k].id, -1);
  }
  hybrid->exchange = best_exchange;
  hybrid->wire += best_wire - before;
}

MFSDP_API mfsdp_status mfsdp__hybrid_run(mfsdp__hybrid *hybrid) {
  mfsdp__build *build = hybrid->build;
  mfsdp_plan *plan = build->plan;
  int32_t i;
  mfsdp__hybrid_fill(hybrid);
  mfsdp__hybrid_fit(hybrid);
  if (!mfsdp__hybrid_start(hybrid) || !mfsdp__hybrid_predict(hybrid, &plan->predicted_owned))
    return MFSDP_FAIL(build->context, MFSDP_E_OVERFLOW,
                      "plan: the predicted step with banded_wire_cost %lld passes 64 bits, needs a "
                      "coarser unit of cost",
                      (long long)plan->banded_wire_cost);
  for (i = 0; i < plan->unit_count && hybrid->work > 0; ++i)
    mfsdp__hybrid_unit(hybrid, hybrid->units[i].id);
  (void)mfsdp__hybrid_predict(hybrid, &plan->predicted); /* it only fell */
  return MFSDP_OK;
}

/* Sets build->banded; owners become homes. */
MFSDP_API mfsdp_status mfsdp__place_hybrid(mfsdp__build *build) {
  mfsdp__hybrid hybrid;
  mfsdp_status status;
  memset(&hybrid, 0, sizeof(hybrid));
  status = mfsdp__hybrid_alloc(&hybrid, build);
  if (status == MFSDP_OK) status = mfsdp__hybrid_run(&hybrid);
  mfsdp__hybrid_free(&hybrid, build);
  return status;
}

#endif /* MFSDP_PLAN_HYBRID_H */
