/* SPDX-License-Identifier: MIT */
/*
 * plan/balance.h - the planner BALANCED: the smallest largest load under caps, then level bytes.
 *
 *   1. Start: the matrices by (larger cost, then order), each to the least loaded rank that its
 * caps allow. With caps.max_owners unit after unit, the costliest first, each on that many of the
 *      least loaded ranks. Ties go to ranks of different nodes in turn, so that matrices that are
 *      neighbours in order lie on different nodes.
 *   2. If bytes pass caps.max_resident_nbytes: local search on bytes.
 *   3. Local search on cost (plan/search.h) down to a proven bound (plan/bound.h).
 *   4. Few matrices on few ranks: all placements (plan/exact.h).
 *   5. Local search on bytes while no rank passes the largest cost reached: down to the level that
 *      the tails fill up to.
 *   6. If the fullest rank stays more than 1/MFSDP__BALANCE_GAIN of the level above it: the same
 * while no rank passes the proven bound on cost by more than 1/MFSDP__BALANCE_SLACK; undone unless
 *      the fullest rank loses at least such a part by it. Little time for much memory.
 *   7. Equal matrices of two units change places where that spreads a unit over more nodes
 *      (plan/nodes.h).
 * Integers only; the work is limited by a count of steps, never by time.
 * Private to the plan.
 * Does not: place tails (plan/place.h does).
 * Link flags: none.
 */
#ifndef MFSDP_PLAN_BALANCE_H
#define MFSDP_PLAN_BALANCE_H

#include "bound.h"
#include "exact.h"
#include "nodes.h"

/* List entries that one search may visit: about half a second. */
#define MFSDP__BALANCE_WORK (INT64_C(1) << 26)

#define MFSDP__BALANCE_SLACK 128
#define MFSDP__BALANCE_GAIN 64

typedef struct mfsdp__balance {
  mfsdp__search search;
  int32_t *rank_of;     /* world: ranks in the order in which ties take them */
  int32_t *sorted;      /* matrices, the costliest first */
  int64_t *prefix;      /* matrices + 1 */
  mfsdp__keyed *units;  /* unit_count */
  int64_t bound, level; /* of cost; of bytes: all tensors over all ranks */
} mfsdp__balance;

/* ---- tables ---- */

MFSDP_API mfsdp_status mfsdp__balance_alloc(mfsdp__balance *balance, mfsdp__build *build) {
  mfsdp_context *context = build->context;
  mfsdp__search *search = &balance->search;
  const int32_t n = build->matrix_count, world = build->plan->world, units = build->unit_count;
  search->build = build;
  search->key[MFSDP__BY_COST] = build->cost;
  MFSDP__PLAN_ALLOC(context, search->key[MFSDP__BY_NBYTES], n, "plan: bytes of matrices");
  MFSDP__PLAN_ALLOC(context, search->load[0], world, "plan: loads");
  MFSDP__PLAN_ALLOC(context, search->load[1], world, "plan: loads");
  MFSDP__PLAN_ALLOC(context, search->unit, n, "plan: units of matrices");
  MFSDP__PLAN_ALLOC(context, search->elements, n, "plan: sizes of matrices");
  MFSDP__PLAN_ALLOC(context, search->next, n, "plan: matrices of ranks");
  MFSDP__PLAN_ALLOC(context, search->head, world, "plan: matrices of ranks");
  MFSDP__PLAN_ALLOC(context, search->unit_ranks, units, "plan: owners of units");
  MFSDP__PLAN_ALLOC(context, search->order, world, "plan: ranks by load");
  MFSDP__PLAN_ALLOC(context, search->place, world, "plan: ranks by load");
  MFSDP__PLAN_ALLOC(context, search->pool[0], n, "plan: candidates");
  MFSDP__PLAN_ALLOC(context, search->pool[1], n, "plan: candidates");
  MFSDP__PLAN_ALLOC(context, balance->rank_of, world, "plan: ranks by node");
  MFSDP__PLAN_ALLOC(context, balance->sorted, n, "plan: matrices by cost");
  MFSDP__PLAN_ALLOC(context, balance->prefix, (int64_t)n + 1, "plan: sums of costs");
  MFSDP__PLAN_ALLOC(context, balance->units, units, "plan: units by cost");
  return MFSDP_OK;
}

MFSDP_API void mfsdp__balance_free(mfsdp__balance *balance, mfsdp__build *build) {
  mfsdp_context *context = build->context;
  mfsdp__search *search = &balance->search;
  const int32_t n = build->matrix_count, world = build->plan->world, units = build->unit_count;
  MFSDP__PLAN_FREE(context, search->key[MFSDP__BY_NBYTES], n);
  MFSDP__PLAN_FREE(context, search->load[0], world);
  MFSDP__PLAN_FREE(context, search->load[1], world);
  MFSDP__PLAN_FREE(context, search->unit, n);
  MFSDP__PLAN_FREE(context, search->elements, n);
  MFSDP__PLAN_FREE(context, search->next, n);
  MFSDP__PLAN_FREE(context, search->head, world);
  MFSDP__PLAN_FREE(context, search->unit_ranks, units);
  MFSDP__PLAN_FREE(context, search->order, world);
  MFSDP__PLAN_FREE(context, search->place, world);
  MFSDP__PLAN_FREE(context, search->pool[0], n);
  MFSDP__PLAN_FREE(context, search->pool[1], n);
  MFSDP__PLAN_FREE(context, balance->rank_of, world);
  MFSDP__PLAN_FREE(context, balance->sorted, n);
  MFSDP__PLAN_FREE(context, balance->prefix, (int64_t)n + 1);
  MFSDP__PLAN_FREE(context, balance->units, units);
}

/* Unit, size and bytes of every non-empty matrix in order, and the level of all bytes. */
MFSDP_API void mfsdp__balance_matrices(mfsdp__balance *balance) {
  mfsdp__search *search = &balance->search;
  const mfsdp_plan *plan = search->build->plan;
  int64_t nbytes = 0;
  int32_t u, j, r, matrix = 0;
  for (r = 0; r < plan->world; ++r)
    nbytes += search->build->band_nbytes[r];
  for (u = 0; u < plan->unit_count; ++u)
    for (j = 0; j < plan->units[u].param_count; ++j) {
      const int32_t i = plan->unit_params[plan->units[u].param_first + j];
      const mfsdp_param *param = &plan->params[i];
      mfsdp__view_cursor cursor = mfsdp__view_begin();
      if (param->alias_of != NULL) continue;
      if (param->role != MFSDP_ROLE_MATRIX) {
        nbytes += mfsdp__padded_nbytes(param, plan->infos[i].numel);
        continue;
      }
      while (mfsdp__view_next(param, plan->infos[i].numel, &cursor)) {
        search->unit[matrix] = u;
        search->elements[matrix] = cursor.rows * cursor.cols;
        search->key[MFSDP__BY_NBYTES][matrix] =
            search->build->banded[matrix] ? 0
                                          : mfsdp__padded_nbytes(param, search->elements[matrix]);
        nbytes += search->key[MFSDP__BY_NBYTES][matrix++];
      }
    }
  balance->level = nbytes / plan->world + (nbytes % plan->world > 0);
}

/* The k-th ranks of all nodes before the k + 1st of any. */
MFSDP_API void mfsdp__balance_ranks(mfsdp__balance *balance) {
  mfsdp__search *search = &balance->search;
  const mfsdp__build *build = search->build;
  const int32_t world = build->plan->world;
  int32_t r;
  for (r = 0; r < world; ++r) {
    const int32_t node = build->desc->node_of_rank ? build->desc->node_of_rank[r] : r;
    build->heap[r].key = ((int64_t)search->place[node]++ << 32) + node; /* place: ranks so far */
    build->heap[r].id = r;
  }
  mfsdp__keyed_sort(build->heap, world);
  for (r = 0; r < world; ++r)
    balance->rank_of[r] = build->heap[r].id;
}

/* Sorts the matrices and proves a bound. */
MFSDP_API void mfsdp__balance_bound(mfsdp__balance *balance) {
  mfsdp__build *build = balance->search.build;
  const mfsdp_plan *plan = build->plan;
  int32_t i;
  for (i = 0; i < build->matrix_count; ++i) {
    build->items[i].key = -build->cost[i];
    build->items[i].id = i;
  }
  balance->bound = mfsdp__bound_prove(build->items, balance->prefix, build->matrix_count,
                                      plan->base_load, build->heap, plan->world)
                       .value;
  for (i = 0; i < build->matrix_count; ++i)
    balance->sorted[i] = build->items[i].id;
}

/* ---- start ---- */

/* How far a matrix on a rank would pass its caps: 0 if it keeps them. */
MFSDP_API int64_t mfsdp__balance_excess(mfsdp__search *search, int32_t matrix, int32_t rank) {
  const mfsdp__build *build = search->build;
  int64_t excess = search->load[MFSDP__BY_NBYTES][rank] + search->key[MFSDP__BY_NBYTES][matrix] -
                   search->cap[MFSDP__BY_NBYTES];
  if (excess < 0) excess = 0;
  if (build->limit != NULL && !mfsdp__search_admits(search, matrix, -1, rank, -1)) {
    int64_t elements;
    (void)mfsdp__search_holds(search, search->unit[matrix], rank, -1, &elements);
    excess += 1 + elements;
  }
  return excess;
}

MFSDP_API void mfsdp__balance_put(mfsdp__search *search, int32_t matrix, int32_t rank) {
  int64_t elements;
  if (search->build->limit != NULL &&
      mfsdp__search_holds(search, search->unit[matrix], rank, -1, &elements) == 0)
    ++search->unit_ranks[search->unit[matrix]];
  search->next[matrix] = search->head[rank];
  search->head[rank] = matrix;
  search->build->owner[matrix] = rank;
  search->load[0][rank] += search->key[0][matrix];
  search->load[1][rank] += search->key[1][matrix];
}

/* Puts a matrix on the least loaded rank of a heap of (load, place in rank_of) that keeps the caps;
 * if none does, on the one that passes them least. */
MFSDP_API void mfsdp__balance_place(mfsdp__balance *balance, int32_t matrix, mfsdp__keyed *heap,
                                    int32_t count) {
  mfsdp__search *search = &balance->search;
  int32_t live = count, chosen = count;
  int64_t least = INT64_MAX;
  while (live > 0 && least > 0) { /* what is taken out gathers behind the live part */
    const mfsdp__keyed top = mfsdp__heap_pop(heap, live);
    const int64_t excess = mfsdp__balance_excess(search, matrix, balance->rank_of[top.id]);
    heap[--live] = top;
    if (excess >= least) continue;
    least = excess;
    chosen = live;
  }
  heap[chosen].key += search->key[0][matrix];
  mfsdp__balance_put(search, matrix, balance->rank_of[heap[chosen].id]);
  for (; live < count; ++live) {
    const mfsdp__keyed entry = heap[live];
    mfsdp__heap_push(heap, live, entry);
  }
}

/* Unit after unit, the costliest first, each on the max_owners least loaded ranks. */
MFSDP_API void mfsdp__balance_by_unit(mfsdp__balance *balance) {
  mfsdp__build *build = balance->search.build;
  const int32_t world = build->plan->world;
  int32_t n, u, i, k;
  for (u = 0; u < build->unit_count; ++u) {
    balance->units[u].id = u;
    balance->units[u].key = 0;
    for (i = build->unit_first[u]; i < build->unit_first[u + 1]; ++i)
      balance->units[u].key -= build->cost[i];
  }
  mfsdp__keyed_sort(balance->units, build->unit_count);
  for (n = 0; n < build->unit_count; ++n) {
    const int32_t first = build->unit_first[balance->units[n].id];
    const int32_t count = build->unit_first[balance->units[n].id + 1] - first;
    const int32_t owners =
        build->desc->caps.max_owners < world ? (int32_t)build->desc->caps.max_owners : world;
    for (i = 0; i < count; ++i) {
      build->items[i].key = -build->cost[first + i];
      build->items[i].id = first + i;
    }
    mfsdp__keyed_sort(build->items, count);
    for (k = 0; k < owners; ++k)
      build->picked[k] = mfsdp__heap_pop(build->heap, world - k);
    for (i = 0; i < count; ++i)
      mfsdp__balance_place(balance, build->items[i].id, build->picked, owners);
    for (k = 0; k < owners; ++k)
      mfsdp__heap_push(build->heap, world - owners + k, build->picked[k]);
  }
}

MFSDP_API void mfsdp__balance_start(mfsdp__balance *balance) {
  mfsdp__build *build = balance->search.build;
  const mfsdp_plan *plan = build->plan;
  int32_t i;
  for (i = 0; i < plan->world; ++i) {
    balance->search.head[i] = -1;
    balance->search.load[0][i] = plan->base_load ? plan->base_load[i] : 0;
    balance->search.load[1][i] = build->band_nbytes[i];
  }
  for (i = 0; i < plan->world; ++i) {
    build->heap[i].key = balance->search.load[0][balance->rank_of[i]];
    build->heap[i].id = i;
  }
  mfsdp__heap_build(build->heap, plan->world);
  if (build->desc->caps.max_owners != MFSDP_PLAN_NO_CAP) {
    mfsdp__balance_by_unit(balance);
    return;
  }
  for (i = 0; i < build->matrix_count; ++i)
    mfsdp__balance_place(balance, balance->sorted[i], build->heap, plan->world);
}

/* ---- all of it ---- */

MFSDP_API int64_t mfsdp__balance_most(const mfsdp__search *search, int by) {
  int64_t most = 0;
  int32_t r;
  for (r = 0; r < search->build->plan->world; ++r)
    if (search->load[by][r] > most) most = search->load[by][r];
  return most;
}

MFSDP_API void mfsdp__balance_level(mfsdp__search *search, int by, int64_t target) {
  search->work = MFSDP__BALANCE_WORK;
  mfsdp__search_level(search, by, target);
}

/* Step 6, with the lists linked by bytes: kept if the fullest rank loses enough by it. */
MFSDP_API void mfsdp__balance_trade(mfsdp__balance *balance) {
  mfsdp__search *search = &balance->search;
  mfsdp__build *build = search->build;
  const int32_t last = build->plan->world - 1;
  const int64_t before = search->order[last].key, near = balance->level / MFSDP__BALANCE_GAIN;
  const int64_t more = balance->bound / MFSDP__BALANCE_SLACK; /* a bound near 2^63 stays in range */
  const int64_t slack = balance->bound > INT64_MAX - more ? INT64_MAX : balance->bound + more;
  int32_t *saved = balance->sorted; /* no longer needed */
  int32_t i;
  if (slack <= search->cap[MFSDP__BY_COST] || before <= balance->level + near) return;
  for (i = 0; i < build->matrix_count; ++i)
    saved[i] = build->owner[i];
  search->cap[MFSDP__BY_COST] = slack;
  mfsdp__balance_level(search, MFSDP__BY_NBYTES, balance->level + near);
  if (search->order[last].key < before - near) return;
  for (i = 0; i < build->matrix_count; ++i)
    build->owner[i] = saved[i];
}

MFSDP_API void mfsdp__balance_run(mfsdp__balance *balance) {
  mfsdp__search *search = &balance->search;
  const int64_t cap = search->build->desc->caps.max_resident_nbytes;
  search->cap[MFSDP__BY_COST] = INT64_MAX;
  search->cap[MFSDP__BY_NBYTES] = cap;
  mfsdp__balance_matrices(balance);
  mfsdp__balance_ranks(balance);
  mfsdp__balance_bound(balance);
  mfsdp__balance_start(balance);
  if (mfsdp__balance_most(search, MFSDP__BY_NBYTES) > cap) {
    mfsdp__search_link(search, MFSDP__BY_NBYTES);
    mfsdp__balance_level(search, MFSDP__BY_NBYTES, cap);
  }
  mfsdp__search_link(search, MFSDP__BY_COST);
  mfsdp__balance_level(search, MFSDP__BY_COST, balance->bound);
  mfsdp__exact_run(search, balance->sorted, balance->bound);
  mfsdp__search_link(search, MFSDP__BY_NBYTES);
  search->cap[MFSDP__BY_COST] = mfsdp__balance_most(search, MFSDP__BY_COST);
  mfsdp__balance_level(search, MFSDP__BY_NBYTES, balance->level);
  if (search->order[search->build->plan->world - 1].key > balance->level)
    mfsdp__balance_trade(balance);
  search->work = MFSDP__BALANCE_WORK;
  mfsdp__nodes_run(search, search->build->items);
}

/* Fills build->owner. */
MFSDP_API mfsdp_status mfsdp__place_balanced(mfsdp__build *build) {
  mfsdp__balance balance;
  mfsdp_status status;
  memset(&balance, 0, sizeof(balance));
  status = mfsdp__balance_alloc(&balance, build);
  if (status == MFSDP_OK) mfsdp__balance_run(&balance);
  mfsdp__balance_free(&balance, build);
  return status;
}

#endif /* MFSDP_PLAN_BALANCE_H */
