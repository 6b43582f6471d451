/* SPDX-License-Identifier: MIT */
/*
 * plan/search.h - local search: lowers the largest load of any rank by moves and exchanges of
 * matrices that keep all caps.
 *
 *   mfsdp__search_link(&search, MFSDP__BY_COST);          // sorts what each rank holds
 *   mfsdp__search_level(&search, MFSDP__BY_COST, bound);  // until no step helps, or at the bound
 *
 * A step takes the rank r with the largest load and one with less, s: a matrix of r goes to s, and
 * a smaller one or none comes back, so that the larger of the two loads falls as far as it can. All
 * pairs of r with the MFSDP__SEARCH_NEAR least loaded ranks compete; where none helps, the first
 * of all other ranks that does is taken; where none is left, the search is over. Work is counted in
 * list entries and limited, so the result depends on the description alone.
 * Private to the plan.
 * Does not: allocate, or use floating point.
 * Link flags: none.
 */
#ifndef MFSDP_PLAN_SEARCH_H
#define MFSDP_PLAN_SEARCH_H

#include "caps.h"

/* What a load counts. */
#define MFSDP__BY_COST 0
#define MFSDP__BY_NBYTES 1

#define MFSDP__SEARCH_NEAR 16  /* ranks that compete in a step */
#define MFSDP__SEARCH_WINDOW 6 /* unlike partners tried on each side of the ideal one */

typedef struct mfsdp__search {
  mfsdp__build *build;
  int64_t *key[2];     /* by matrix: cost, resident bytes (of a BANDED one none: it has no owner) */
  int64_t *load[2];    /* by rank */
  int64_t cap[2];      /* of a load */
  int32_t *unit;       /* by matrix */
  int64_t *elements;   /* by matrix */
  int32_t *next;       /* by matrix: the next of its rank, smaller keys later; -1 */
  int32_t *head;       /* by rank: its first matrix, -1 */
  int32_t *unit_ranks; /* by unit: ranks that own a matrix of it */
  mfsdp__keyed *order; /* ranks by rising load */
  int32_t *place;      /* by rank: where it stands in order */
  int32_t *pool[2];    /* matrices: unlike ones of the two ranks of a step */
  int32_t pool_count[2];
  int64_t work; /* list entries that may still be visited */
} mfsdp__search;

/* Matrix x goes from rank r to s, y (or none: -1) from s to r; the larger load is then peak. */
typedef struct mfsdp__step {
  int32_t r, s, x, y;
  int64_t peak;
} mfsdp__step;

/* ---- what a rank holds ---- */

/* Larger key first, then larger other key: like matrices stand together, whatever their numbers. */
MFSDP_API int mfsdp__search_before(const mfsdp__search *search, int by, int32_t a, int32_t b) {
  const int64_t *key = search->key[by], *other = search->key[1 - by];
  if (key[a] != key[b]) return key[a] > key[b];
  if (other[a] != other[b]) return other[a] > other[b];
  return a < b;
}

MFSDP_API void mfsdp__search_insert(mfsdp__search *search, int by, int32_t matrix, int32_t rank) {
  int32_t *link = &search->head[rank];
  while (*link >= 0 && mfsdp__search_before(search, by, *link, matrix)) {
    link = &search->next[*link];
    --search->work;
  }
  search->next[matrix] = *link;
  *link = matrix;
  search->build->owner[matrix] = rank;
  search->load[0][rank] += search->key[0][matrix];
  search->load[1][rank] += search->key[1][matrix];
}

MFSDP_API void mfsdp__search_remove(mfsdp__search *search, int32_t matrix) {
  const int32_t rank = search->build->owner[matrix];
  int32_t *link = &search->head[rank];
  while (*link != matrix) {
    link = &search->next[*link];
    --search->work;
  }
  *link = search->next[matrix];
  search->load[0][rank] -= search->key[0][matrix];
  search->load[1][rank] -= search->key[1][matrix];
}

/* Lists, loads and counts from build->owner; items is scratch. */
MFSDP_API void mfsdp__search_link(mfsdp__search *search, int by) {
  mfsdp__build *build = search->build;
  const mfsdp_plan *plan = build->plan;
  const int32_t last = build->matrix_count - 1;
  int32_t i, u;
  for (i = 0; i < plan->world; ++i) {
    search->head[i] = -1;
    search->load[0][i] = plan->base_load ? plan->base_load[i] : 0;
    search->load[1][i] = build->band_nbytes[i];
    search->place[i] = 0;
  }
  for (i = 0; i <= last; ++i) { /* the last of a list first, so that each is put at the front */
    build->items[i].key = search->key[by][last - i];
    build->items[i].id = i;
  }
  mfsdp__keyed_sort(build->items, build->matrix_count);
  for (i = 0; i <= last; ++i)
    mfsdp__search_insert(search, by, last - build->items[i].id,
                         build->owner[last - build->items[i].id]);
  for (u = 0; u < plan->unit_count; ++u) { /* place: the last unit seen on a rank, + 1 */
    search->unit_ranks[u] = 0;
    for (i = build->unit_first[u]; i < build->unit_first[u + 1]; ++i) {
      if (search->place[build->owner[i]] == u + 1) continue;
      search->place[build->owner[i]] = u + 1;
      ++search->unit_ranks[u];
    }
  }
  for (i = 0; i < plan->world; ++i) {
    search->order[i].key = search->load[by][i];
    search->order[i].id = i;
  }
  mfsdp__keyed_sort(search->order, plan->world);
  for (i = 0; i < plan->world; ++i)
    search->place[search->order[i].id] = i;
}

/* Brings a rank whose load has changed to its place in the order. */
MFSDP_API void mfsdp__search_reorder(mfsdp__search *search, int by, int32_t rank) {
  const int32_t world = search->build->plan->world;
  int32_t at = search->place[rank];
  mfsdp__keyed moved;
  moved.id = rank;
  moved.key = search->load[by][rank];
  for (; at > 0 && mfsdp__keyed_less(moved, search->order[at - 1]); --at) {
    search->order[at] = search->order[at - 1];
    search->place[search->order[at].id] = at;
    --search->work;
  }
  for (; at + 1 < world && mfsdp__keyed_less(search->order[at + 1], moved); ++at) {
    search->order[at] = search->order[at + 1];
    search->place[search->order[at].id] = at;
    --search->work;
  }
  search->order[at] = moved;
  search->place[rank] = at;
}

/* ---- caps ---- */

/* Matrices of `unit` on `rank`, `without` (or -1) left out, and their elements. */
MFSDP_API int32_t mfsdp__search_holds(mfsdp__search *search, int32_t unit, int32_t rank,
                                      int32_t without, int64_t *elements) {
  int32_t i, count = 0;
  *elements = 0;
  for (i = search->head[rank]; i >= 0; i = search->next[i]) {
    --search->work;
    if (search->unit[i] != unit || i == without) continue;
    *elements += search->elements[i];
    ++count;
  }
  return count;
}

/* May `matrix` come from rank `from` (-1: it has no owner yet) to rank `to` while `back` (or -1)
 * goes the other way, as far as the caps on its unit say? */
MFSDP_API int mfsdp__search_admits(mfsdp__search *search, int32_t matrix, int32_t from, int32_t to,
                                   int32_t back) {
  const int32_t unit = search->unit[matrix];
  int64_t elements, rest;
  int32_t ranks = search->unit_ranks[unit];
  if (search->build->limit == NULL) return 1;
  if (mfsdp__search_holds(search, unit, to, back, &elements) == 0) {
    ++ranks;
    if (back >= 0 && search->unit[back] == unit) --ranks; /* `to` had only this one */
    if (from >= 0 && (back < 0 || search->unit[back] != unit) &&
        mfsdp__search_holds(search, unit, from, matrix, &rest) == 0)
      --ranks;
    if (ranks > search->build->desc->caps.max_owners) return 0;
  }
  return elements + search->elements[matrix] <= search->build->limit[unit];
}

/* May the step be taken? The load that is being lowered falls in any case; the other one stays
 * under its cap, or does not rise. */
MFSDP_API int mfsdp__search_allows(mfsdp__search *search, int by, const mfsdp__step *step) {
  const int64_t *key = search->key[1 - by], *load = search->load[1 - by];
  const int64_t moved = key[step->x] - (step->y >= 0 ? key[step->y] : 0);
  const int64_t cap = search->cap[1 - by];
  if (moved > 0 && load[step->s] + moved > cap) return 0;
  if (moved < 0 && load[step->r] - moved > cap) return 0;
  if (!mfsdp__search_admits(search, step->x, step->r, step->s, step->y)) return 0;
  return step->y < 0 || mfsdp__search_admits(search, step->y, step->s, step->r, step->x);
}

/* Adds or takes (sign) the two ranks to or from the counts of the units of a step. */
MFSDP_API void mfsdp__search_count(mfsdp__search *search, const mfsdp__step *step, int32_t sign) {
  int64_t elements;
  int32_t i;
  for (i = 0; i < 2; ++i) {
    const int32_t matrix = i ? step->y : step->x;
    if (matrix < 0 || (i && search->unit[matrix] == search->unit[step->x])) continue;
    if (mfsdp__search_holds(search, search->unit[matrix], step->r, -1, &elements) > 0)
      search->unit_ranks[search->unit[matrix]] += sign;
    if (mfsdp__search_holds(search, search->unit[matrix], step->s, -1, &elements) > 0)
      search->unit_ranks[search->unit[matrix]] += sign;
  }
}

/* ---- steps ---- */

MFSDP_API void mfsdp__search_take(mfsdp__search *search, int by, const mfsdp__step *step) {
  if (search->build->limit != NULL) mfsdp__search_count(search, step, -1);
  mfsdp__search_remove(search, step->x);
  if (step->y >= 0) mfsdp__search_remove(search, step->y);
  mfsdp__search_insert(search, by, step->x, step->s);
  if (step->y >= 0) mfsdp__search_insert(search, by, step->y, step->r);
  if (search->build->limit != NULL) mfsdp__search_count(search, step, 1);
  mfsdp__search_reorder(search, by, step->r);
  mfsdp__search_reorder(search, by, step->s);
}

/* The unlike matrices of a rank, the largest first, into pool[which]. */
MFSDP_API void mfsdp__search_pool(mfsdp__search *search, int which, int32_t rank) {
  int32_t *pool = search->pool[which];
  int32_t count = 0, i;
  for (i = search->head[rank]; i >= 0; i = search->next[i]) {
    --search->work;
    if (count > 0 && search->key[0][pool[count - 1]] == search->key[0][i] &&
        search->key[1][pool[count - 1]] == search->key[1][i] &&
        (search->build->limit == NULL || search->unit[pool[count - 1]] == search->unit[i]))
      continue;
    pool[count++] = i;
  }
  search->pool_count[which] = count;
}

/* Tries partners for step->x in pool[1] from position `at` on, away from the ideal one. */
MFSDP_API void mfsdp__search_side(mfsdp__search *search, int by, mfsdp__step *step, int32_t at,
                                  int32_t direction, mfsdp__step *best) {
  const int64_t *key = search->key[by];
  const int64_t high = search->load[by][step->r], low = search->load[by][step->s];
  int32_t tries;
  for (tries = 0; tries < MFSDP__SEARCH_WINDOW; ++tries, at += direction) {
    int64_t moved;
    if (at < 0 || at > search->pool_count[1]) return;
    step->y = at < search->pool_count[1] ? search->pool[1][at] : -1;
    moved = key[step->x] - (step->y >= 0 ? key[step->y] : 0);
    step->peak = high - moved > low + moved ? high - moved : low + moved;
    --search->work;
    if (moved <= 0 || step->peak >= best->peak) return;
    if (!mfsdp__search_allows(search, by, step)) continue;
    *best = *step;
    return;
  }
}

/* Looks for a better step than *best between r, whose pool is filled, and s. */
MFSDP_API void mfsdp__search_pair(mfsdp__search *search, int by, int32_t r, int32_t s,
                                  mfsdp__step *best) {
  const int64_t *key = search->key[by];
  const int64_t gap = search->load[by][r] - search->load[by][s];
  mfsdp__step step;
  int32_t i, at = 0;
  if (gap <= 1) return;
  mfsdp__search_pool(search, 1, s);
  step.r = r;
  step.s = s;
  for (i = 0; i < search->pool_count[0]; ++i) {
    step.x = search->pool[0][i];
    while (at < search->pool_count[1] && key[search->pool[1][at]] > key[step.x] - gap / 2)
      ++at;
    --search->work;
    mfsdp__search_side(search, by, &step, at, 1, best);
    mfsdp__search_side(search, by, &step, at - 1, -1, best);
  }
}

/* One step at the rank with the largest load: 1, or 0 if there is none. */
MFSDP_API int mfsdp__search_improve(mfsdp__search *search, int by) {
  const int32_t world = search->build->plan->world;
  const int32_t r = search->order[world - 1].id;
  mfsdp__step best;
  int32_t i;
  memset(&best, 0, sizeof(best));
  best.x = -1;
  best.peak = search->order[world - 1].key;
  mfsdp__search_pool(search, 0, r);
  for (i = 0; i + 1 < world && search->work > 0; ++i) {
    if (i >= MFSDP__SEARCH_NEAR && best.x >= 0) break;
    mfsdp__search_pair(search, by, r, search->order[i].id, &best);
  }
  if (best.x < 0) return 0;
  mfsdp__search_take(search, by, &best);
  return 1;
}

/* Lowers the largest load to `target`, or as far as steps do. */
MFSDP_API void mfsdp__search_level(mfsdp__search *search, int by, int64_t target) {
  const int32_t world = search->build->plan->world;
  while (search->order[world - 1].key > target && search->work > 0)
    if (!mfsdp__search_improve(search, by)) return;
}

#endif /* MFSDP_PLAN_SEARCH_H */
