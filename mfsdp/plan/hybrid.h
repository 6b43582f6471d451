/* SPDX-License-Identifier: MIT */
/*
 * plan/hybrid.h - allow_banded: which OWNED matrices become BANDED once all have their owners.
 *
 * Prediction of a step, in units of cost:
 *   the largest cost of a rank
 *   + banded_wire_cost * (over all units, materialize_count * G + reduce_count * R, + 2 * E)
 * G, R and E are times of the slowest rank on one level of links, in bytes that a link carries in that
 * time; a message costs L = banded_message_nbytes beside its bytes. They are the DIRECT of
 * simulate/wire.h, in integers, for a cluster of one node; a test holds the two together.
 * G: a rank with e of the unit's x extents and s of its p elements (b bytes each, compute dtype) sends
 *    both to world - 1 peers and receives what is not its own:
 *      max over ranks of L * max((world - 1) * e, x - e) + b * max((world - 1) * s, p - s)
 *    Without L that is b * (world - 1) times the largest segment.
 * R: the same of gradients in the wire dtype. A unit's ELEMENTWISE and FROZEN tensors fill the ranks up
 *    to level in both and have no extents, since they are placed later.
 * E: bands (f32) on their way to the homes, all that a rank has for one home in one message:
 *      max over ranks of L * max(messages sent, received) + 4 * max(elements sent, received)
 *    They come back the same way. The runtime needs more messages where it goes by rounds.
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
  int64_t *place;       /* by matrix: where it starts in its unit's full parameters */
  unsigned char *opens; /* by matrix in bands: 1 if its home had none of as many blocks before */
  int64_t *held;        /* by rank: elements of the matrices of the unit at hand */
  int32_t *extents;     /* by rank: extents of these */
  int64_t *out, *in;    /* by rank: elements of bands to homes elsewhere, from elsewhere */
  int32_t *out_count, *in_count; /* by rank: messages that carry them */
  uint64_t *blocks;              /* by home: bit n - 1: a matrix of n blocks in bands */
  int32_t *touched;              /* by position: ranks with an entry in held */
  int32_t *seen;                 /* by rank: 1 if it is touched */
  mfsdp__keyed *units;           /* by largest matrix */
  int32_t touched_count;
  int64_t extent_count; /* of the matrices of the unit at hand */
  int64_t exchange;     /* E */
  int64_t wire;         /* of all units */
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
  MFSDP__PLAN_ALLOC(context, hybrid->place, n, "plan: places of matrices");
  MFSDP__PLAN_ALLOC(context, hybrid->opens, n, "plan: first matrices of homes");
  MFSDP__PLAN_ALLOC(context, hybrid->held, world, "plan: elements of ranks");
  MFSDP__PLAN_ALLOC(context, hybrid->extents, world, "plan: extents of ranks");
  MFSDP__PLAN_ALLOC(context, hybrid->out_count, world, "plan: messages sent");
  MFSDP__PLAN_ALLOC(context, hybrid->in_count, world, "plan: messages received");
  MFSDP__PLAN_ALLOC(context, hybrid->blocks, world, "plan: blocks of homes");
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
  MFSDP__PLAN_FREE(context, hybrid->place, n);
  MFSDP__PLAN_FREE(context, hybrid->opens, n);
  MFSDP__PLAN_FREE(context, hybrid->held, world);
  MFSDP__PLAN_FREE(context, hybrid->extents, world);
  MFSDP__PLAN_FREE(context, hybrid->out_count, world);
  MFSDP__PLAN_FREE(context, hybrid->in_count, world);
  MFSDP__PLAN_FREE(context, hybrid->blocks, world);
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
    int64_t start = 0, next = 0;
    hybrid->units[u].id = u;
    hybrid->units[u].key = 0;
    for (j = 0; j < plan->units[u].param_count; ++j, start = next) {
      const int32_t i = plan->unit_params[plan->units[u].param_first + j];
      mfsdp__view_cursor cursor = mfsdp__view_begin();
      if (plan->params[i].alias_of != NULL) continue;
      (void)mfsdp_i64_align(start + plan->infos[i].numel, &next); /* the validator bounds it */
      if (plan->params[i].role != MFSDP_ROLE_MATRIX) continue;
      for (; mfsdp__view_next(&plan->params[i], plan->infos[i].numel, &cursor); ++matrix) {
        hybrid->param[matrix] = i;
        hybrid->place[matrix] = start + cursor.first;
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

/* ---- the exchange ---- */

/* Band blocks of a matrix: 1 to 64. */
MFSDP_API int64_t mfsdp__hybrid_blocks(int64_t rows) {
  return mfsdp__band_count(rows, MFSDP_PLAN_BANDS);
}

/* Whether a rank has a band of any matrix with a number of blocks in the mask. */
MFSDP_API int mfsdp__hybrid_covers(const mfsdp__hybrid *hybrid, uint64_t mask, int32_t rank) {
  const int64_t world = hybrid->build->plan->world;
  for (; mask != 0; mask &= mask - 1) {
    const int64_t n = __builtin_ctzll(mask) + 1;
    if (n * (rank + 1) / world > n * rank / world) return 1;
  }
  return 0;
}

MFSDP_API void mfsdp__hybrid_exchanged(mfsdp__hybrid *hybrid, int32_t rank) {
  const int32_t count = hybrid->out_count[rank] > hybrid->in_count[rank] ? hybrid->out_count[rank]
                                                                         : hybrid->in_count[rank];
  const int64_t elements =
      hybrid->out[rank] > hybrid->in[rank] ? hybrid->out[rank] : hybrid->in[rank];
  const int64_t nbytes = hybrid->build->plan->banded_message_nbytes * count +
                         elements * (int64_t)sizeof(float); /* below 2^60 + 2^48 */
  if (nbytes > hybrid->exchange) hybrid->exchange = nbytes;
}

/* Adds (sign 1) or takes (-1) the bands of a matrix on their way home. The last that was added is the
 * first to be taken. */
MFSDP_API void mfsdp__hybrid_send(mfsdp__hybrid *hybrid, int32_t matrix, int32_t sign) {
  const int32_t home = hybrid->build->owner[matrix];
  const uint64_t bit = (uint64_t)1 << (mfsdp__hybrid_blocks(hybrid->rows[matrix]) - 1);
  mfsdp__band_cursor band = mfsdp__band_begin(hybrid->rows[matrix], hybrid->build->plan->world);
  if (sign > 0) hybrid->opens[matrix] = (hybrid->blocks[home] & bit) == 0;
  if (hybrid->opens[matrix]) hybrid->blocks[home] &= ~bit;
  while (mfsdp__band_next(&band)) {
    const int64_t elements = sign * band.count * hybrid->cols[matrix];
    --hybrid->work;
    if (band.rank == home) continue;
    if (hybrid->opens[matrix] && !mfsdp__hybrid_covers(hybrid, hybrid->blocks[home], band.rank)) {
      hybrid->out_count[band.rank] += sign;
      hybrid->in_count[home] += sign;
    }
    hybrid->out[band.rank] += elements;
    hybrid->in[home] += elements;
    if (sign > 0) mfsdp__hybrid_exchanged(hybrid, band.rank);
  }
  if (sign > 0 && hybrid->opens[matrix]) hybrid->blocks[home] |= bit;
  if (sign > 0) mfsdp__hybrid_exchanged(hybrid, home);
}

/* ---- a unit ---- */

MFSDP_API void mfsdp__hybrid_hold(mfsdp__hybrid *hybrid, int32_t rank, int32_t extents,
                                  int64_t elements) {
  --hybrid->work;
  hybrid->held[rank] += elements;
  hybrid->extents[rank] += extents;
  hybrid->extent_count += extents;
  if (hybrid->seen[rank]) return;
  hybrid->seen[rank] = 1;
  hybrid->touched[hybrid->touched_count++] = rank;
}

/* What a matrix gives the ranks that hold it, each piece an extent. */
MFSDP_API void mfsdp__hybrid_give(mfsdp__hybrid *hybrid, int32_t matrix, int32_t sign) {
  const int64_t cols = hybrid->cols[matrix];
  const int banded = hybrid->build->banded[matrix];
  mfsdp__band_cursor band = mfsdp__band_begin(hybrid->rows[matrix], hybrid->build->plan->world);
  if (!banded)
    mfsdp__hybrid_hold(hybrid, hybrid->build->owner[matrix], sign,
                       sign * hybrid->rows[matrix] * cols);
  while (banded && mfsdp__band_next(&band))
    mfsdp__hybrid_hold(hybrid, band.rank, sign, sign * band.count * cols);
}

/* Takes (sign 1) one extent where the last piece of a matrix and the first of the next one are one: the
 * same rank holds them, and they lie as in its segment, where pieces are aligned. */
MFSDP_API void mfsdp__hybrid_join(mfsdp__hybrid *hybrid, int32_t matrix, int32_t sign) {
  const mfsdp__build *build = hybrid->build;
  const int32_t world = build->plan->world, next = matrix + 1;
  int32_t last = build->owner[matrix], first = build->owner[next];
  int64_t from = 0, rows = hybrid->rows[matrix], length = 0;
  mfsdp__band_cursor band = mfsdp__band_begin(hybrid->rows[next], world);
  if (build->banded[matrix]) { /* the last rank always has a band */
    last = world - 1;
    mfsdp_plan_band(hybrid->rows[matrix], world, last, &from, &rows);
  }
  if (build->banded[next] && mfsdp__band_next(&band)) first = band.rank;
  (void)mfsdp_i64_align(rows * hybrid->cols[matrix], &length); /* the validator bounds it */
  if (last != first ||
      hybrid->place[next] - hybrid->place[matrix] != from * hybrid->cols[matrix] + length)
    return;
  hybrid->extents[last] -= sign;
  hybrid->extent_count -= sign;
}

/* A matrix of a unit becomes BANDED. */
MFSDP_API void mfsdp__hybrid_cut(mfsdp__hybrid *hybrid, int32_t unit, int32_t matrix) {
  mfsdp__build *build = hybrid->build;
  const int has_before = matrix > build->unit_first[unit];
  const int has_next = matrix + 1 < build->unit_first[unit + 1];
  int32_t sign;
  for (sign = -1; sign <= 1; sign += 2) {
    if (has_before) mfsdp__hybrid_join(hybrid, matrix - 1, sign);
    if (has_next) mfsdp__hybrid_join(hybrid, matrix, sign);
    mfsdp__hybrid_give(hybrid, matrix, sign);
    build->banded[matrix] = 1;
  }
}

/* ---- prediction ---- */

/* What gathers or reduces of one kind are made of. */
typedef struct mfsdp__hybrid_kind {
  int64_t payload, tail; /* elements of the unit; of its tensors that are no matrices */
  int64_t level;         /* payload over the ranks, rounded up */
  int64_t nbytes, count; /* of an element; times in a step */
} mfsdp__hybrid_kind;

/* The time of a rank that holds `extents` and `elements` of the unit's matrices. The caller has seen
 * that it fits. */
MFSDP_API int64_t mfsdp__hybrid_rank_wire(const mfsdp__hybrid *hybrid,
                                          const mfsdp__hybrid_kind *kind, int64_t extents,
                                          int64_t elements) {
  const mfsdp_plan *plan = hybrid->build->plan;
  const int64_t peers = plan->world - 1;
  int64_t messages = peers * extents, filled = elements + kind->tail, most;
  if (hybrid->extent_count - extents > messages) messages = hybrid->extent_count - extents;
  if (filled > kind->level) filled = kind->level;
  if (filled < elements) filled = elements;
  most = peers * filled;
  if (kind->payload - filled > most) most = kind->payload - filled;
  return plan->banded_message_nbytes * messages + kind->nbytes * most;
}

/* The slowest rank of the unit of which `held` tells the matrices; 0 if it passes 64 bits. No rank is
 * slower than one that has the most extents and the most elements would be: what it receives is at most
 * that from each peer. */
MFSDP_API int mfsdp__hybrid_kind_wire(const mfsdp__hybrid *hybrid, const mfsdp__hybrid_kind *kind,
                                      int64_t *out) {
  const mfsdp_plan *plan = hybrid->build->plan;
  int64_t elements = kind->level, extents = 0, messages;
  int32_t i;
  for (i = 0; i < hybrid->touched_count; ++i) {
    const int32_t rank = hybrid->touched[i];
    if (hybrid->held[rank] > elements) elements = hybrid->held[rank];
    if (hybrid->extents[rank] > extents) extents = hybrid->extents[rank];
  }
  if (!mfsdp_i64_mul(elements, kind->nbytes, out) ||
      !mfsdp_i64_mul(extents, plan->banded_message_nbytes, &messages) ||
      !mfsdp_i64_add(*out, messages, out) || !mfsdp_i64_mul(*out, plan->world - 1, out))
    return 0;
  if (plan->banded_message_nbytes > 0) {
    *out = hybrid->touched_count < plan->world ? mfsdp__hybrid_rank_wire(hybrid, kind, 0, 0) : 0;
    for (i = 0; i < hybrid->touched_count; ++i) {
      const int32_t rank = hybrid->touched[i];
      const int64_t one =
          mfsdp__hybrid_rank_wire(hybrid, kind, hybrid->extents[rank], hybrid->held[rank]);
      if (one > *out) *out = one;
    }
  }
  return mfsdp_i64_mul(*out, kind->count, out);
}

/* Gathers and reduces of the unit at hand; 0 if they pass 64 bits. */
MFSDP_API int mfsdp__hybrid_unit_wire(mfsdp__hybrid *hybrid, const mfsdp__hybrid_kind *kinds,
                                      int64_t *out) {
  int64_t gathers, reduces;
  hybrid->work -= hybrid->touched_count;
  return mfsdp__hybrid_kind_wire(hybrid, &kinds[0], &gathers) &&
         mfsdp__hybrid_kind_wire(hybrid, &kinds[1], &reduces) &&
         mfsdp_i64_add(gathers, reduces, out);
}

/* *out = units plus the exchange, both ways; 0 if they pass 64 bits. */
MFSDP_API int mfsdp__hybrid_total(int64_t units, int64_t exchange, int64_t *out) {
  return mfsdp_i64_mul(exchange, 2, out) && mfsdp_i64_add(*out, units, out);
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

/* Gathers, then reduces, of a unit. */
MFSDP_API void mfsdp__hybrid_kinds(const mfsdp__hybrid *hybrid, int32_t unit,
                                   mfsdp__hybrid_kind *kinds) {
  const mfsdp__build *build = hybrid->build;
  const mfsdp_plan *plan = build->plan;
  int64_t matrices = 0;
  int32_t i, j;
  memset(kinds, 0, 2 * sizeof(*kinds));
  for (j = 0; j < plan->units[unit].param_count; ++j) {
    i = plan->unit_params[plan->units[unit].param_first + j];
    if (plan->params[i].alias_of != NULL) continue;
    kinds[0].payload += plan->infos[i].numel;
    if (plan->params[i].role != MFSDP_ROLE_FROZEN) kinds[1].payload += plan->infos[i].numel;
  }
  for (i = build->unit_first[unit]; i < build->unit_first[unit + 1]; ++i)
    matrices += hybrid->rows[i] * hybrid->cols[i];
  for (i = 0; i < 2; ++i) {
    kinds[i].tail = kinds[i].payload - matrices;
    kinds[i].level = kinds[i].payload / plan->world + (kinds[i].payload % plan->world != 0);
  }
  kinds[0].count = plan->materialize_count;
  kinds[1].count = plan->reduce_count;
  kinds[0].nbytes =
      (int64_t)mfsdp_dtype_nbytes(mfsdp_plan_unit_dtype(plan, unit, MFSDP_LAYOUT_GATHER));
  kinds[1].nbytes = (int64_t)mfsdp_dtype_nbytes(mfsdp_plan_unit_wire(plan, unit));
}

/* Fills or clears (sign -1) `held` and `extents` by the matrices of a unit as they are. Whatever has been touched
 * since a unit was entered is zero again when it is left. */
MFSDP_API void mfsdp__hybrid_enter(mfsdp__hybrid *hybrid, int32_t unit, int32_t sign) {
  const mfsdp__build *build = hybrid->build;
  int32_t i;
  for (i = build->unit_first[unit]; i < build->unit_first[unit + 1]; ++i) {
    mfsdp__hybrid_give(hybrid, i, sign);
    if (i + 1 < build->unit_first[unit + 1]) mfsdp__hybrid_join(hybrid, i, sign);
  }
}

MFSDP_API void mfsdp__hybrid_leave(mfsdp__hybrid *hybrid, int32_t unit) {
  mfsdp__hybrid_enter(hybrid, unit, -1);
  while (hybrid->touched_count > 0)
    hybrid->seen[hybrid->touched[--hybrid->touched_count]] = 0;
}

/* All units as they are, and the bands that are there already. */
MFSDP_API int mfsdp__hybrid_start(mfsdp__hybrid *hybrid) {
  const mfsdp__build *build = hybrid->build;
  int32_t u, i;
  hybrid->wire = 0;
  for (u = 0; u < build->unit_count; ++u) {
    mfsdp__hybrid_kind kinds[2];
    int64_t wire = 0;
    int ok;
    mfsdp__hybrid_kinds(hybrid, u, kinds);
    mfsdp__hybrid_enter(hybrid, u, 1);
    ok = mfsdp__hybrid_unit_wire(hybrid, kinds, &wire);
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
  mfsdp__hybrid_kind kinds[2];
  int64_t before, best, best_wire, best_exchange = hybrid->exchange;
  int32_t k, chosen = 0;
  if (count == 0) return;
  mfsdp__hybrid_kinds(hybrid, unit, kinds);
  mfsdp__hybrid_enter(hybrid, unit, 1);
  if (!mfsdp__hybrid_unit_wire(hybrid, kinds, &before)) before = 0;
  best_wire = before;
  if (!mfsdp__hybrid_total(before, hybrid->exchange, &best)) best = INT64_MAX;
  for (k = 0; k < count && hybrid->work > 0; ++k) {
    const int32_t matrix = build->items[k].id;
    int64_t wire, total;
    mfsdp__hybrid_cut(hybrid, unit, matrix);
    mfsdp__hybrid_send(hybrid, matrix, 1);
    if (!mfsdp__hybrid_unit_wire(hybrid, kinds, &wire) ||
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
