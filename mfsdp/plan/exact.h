/* SPDX-License-Identifier: MIT */
/*
 * plan/exact.h - few matrices on few ranks: the best placement by trying all, with limits.
 *
 * Depth first, the costliest matrix first, each on every rank in turn; a branch ends where a load
 * reaches the best known, where a cap is passed, or where the rank is as empty as one tried before
 * it. The number of trials is limited, so a search that is not finished keeps the best so far.
 * Private to the plan.
 * Does not: allocate.
 * Link flags: none.
 */
#ifndef MFSDP_PLAN_EXACT_H
#define MFSDP_PLAN_EXACT_H

#include "search.h"

#define MFSDP__EXACT_MATRICES 24
#define MFSDP__EXACT_RANKS 64
#define MFSDP__EXACT_TRIALS 400000

typedef struct mfsdp__exact {
  mfsdp__search *search;
  int32_t count;
  int32_t item[MFSDP__EXACT_MATRICES], rank[MFSDP__EXACT_MATRICES],
      best_rank[MFSDP__EXACT_MATRICES];
  int64_t load[2][MFSDP__EXACT_RANKS];
  int32_t held[MFSDP__EXACT_RANKS]; /* matrices on a rank */
  int64_t best;
  int found; /* best_rank is set */
} mfsdp__exact;

/* Would item `depth` on `rank` keep the caps, with the items before it where they are? */
MFSDP_API int mfsdp__exact_admits(const mfsdp__exact *exact, int32_t depth, int32_t rank) {
  const mfsdp__search *search = exact->search;
  const mfsdp__build *build = search->build;
  const int32_t matrix = exact->item[depth], unit = search->unit[matrix];
  int64_t elements = search->elements[matrix], owners = 1;
  int32_t i, j;
  if (exact->load[MFSDP__BY_NBYTES][rank] + search->key[MFSDP__BY_NBYTES][matrix] >
      search->cap[MFSDP__BY_NBYTES])
    return 0;
  if (build->limit == NULL) return 1;
  for (i = 0; i < depth; ++i) {
    if (search->unit[exact->item[i]] != unit) continue;
    if (exact->rank[i] == rank) {
      elements += search->elements[exact->item[i]];
      continue;
    }
    for (j = 0; j < i; ++j)
      if (search->unit[exact->item[j]] == unit && exact->rank[j] == exact->rank[i]) break;
    owners += j == i;
  }
  return elements <= build->limit[unit] && owners <= build->desc->caps.max_owners;
}

/* A rank without matrices is tried once per base load and bytes of bands. */
MFSDP_API int mfsdp__exact_repeats(const mfsdp__exact *exact, int32_t rank) {
  int32_t r;
  if (exact->held[rank] > 0) return 0;
  for (r = 0; r < rank; ++r)
    if (exact->held[r] == 0 && exact->load[0][r] == exact->load[0][rank] &&
        exact->load[1][r] == exact->load[1][rank])
      return 1;
  return 0;
}

MFSDP_API void mfsdp__exact_put(mfsdp__exact *exact, int32_t depth, int32_t sign) {
  const int32_t matrix = exact->item[depth], rank = exact->rank[depth];
  exact->load[0][rank] += sign * exact->search->key[0][matrix];
  exact->load[1][rank] += sign * exact->search->key[1][matrix];
  exact->held[rank] += sign;
}

MFSDP_API void mfsdp__exact_keep(mfsdp__exact *exact, int32_t world) {
  int32_t r;
  exact->best = 0;
  for (r = 0; r < world; ++r)
    if (exact->load[0][r] > exact->best) exact->best = exact->load[0][r];
  memcpy(exact->best_rank, exact->rank, sizeof(exact->rank));
  exact->found = 1;
}

MFSDP_API void mfsdp__exact_search(mfsdp__exact *exact, int32_t world, int64_t bound) {
  int32_t depth = 0, trials;
  exact->rank[0] = -1;
  for (trials = 0; trials < MFSDP__EXACT_TRIALS; ++trials) {
    int32_t r;
    if (depth == exact->count) {
      mfsdp__exact_keep(exact, world);
      if (exact->best <= bound) return;
      --depth;
    }
    r = exact->rank[depth];
    if (r >= 0) mfsdp__exact_put(exact, depth, -1);
    for (++r; r < world; ++r)
      if (exact->load[0][r] + exact->search->key[0][exact->item[depth]] < exact->best &&
          !mfsdp__exact_repeats(exact, r) && mfsdp__exact_admits(exact, depth, r))
        break;
    if (r == world) {
      if (depth-- == 0) return;
      continue;
    }
    exact->rank[depth] = r;
    mfsdp__exact_put(exact, depth, 1);
    if (++depth < exact->count) exact->rank[depth] = -1;
  }
}

/* 1 if the owners as they are keep all caps. */
MFSDP_API int mfsdp__exact_holds(mfsdp__exact *exact) {
  int32_t i;
  int ok = 1;
  for (i = 0; i < exact->count && ok; ++i) {
    ok = mfsdp__exact_admits(exact, i, exact->search->build->owner[exact->item[i]]);
    exact->rank[i] = exact->search->build->owner[exact->item[i]];
    mfsdp__exact_put(exact, i, 1);
  }
  while (i-- > 0)
    mfsdp__exact_put(exact, i, -1);
  return ok;
}

/* Replaces build->owner where something better exists. `sorted` lists the matrices, the costliest
 * first; loads are linked by cost, and have to be linked again afterwards. */
MFSDP_API void mfsdp__exact_run(mfsdp__search *search, const int32_t *sorted, int64_t bound) {
  const mfsdp__build *build = search->build;
  const int32_t world = build->plan->world;
  mfsdp__exact exact;
  int32_t i;
  if (build->matrix_count == 0 || build->matrix_count > MFSDP__EXACT_MATRICES ||
      world > MFSDP__EXACT_RANKS)
    return;
  memset(&exact, 0, sizeof(exact));
  exact.search = search;
  exact.count = build->matrix_count;
  for (i = 0; i < world; ++i) {
    exact.load[0][i] = build->plan->base_load ? build->plan->base_load[i] : 0;
    exact.load[1][i] = build->band_nbytes[i];
  }
  for (i = 0; i < exact.count; ++i)
    exact.item[i] = sorted[i];
  exact.best = INT64_MAX;
  if (mfsdp__exact_holds(&exact)) exact.best = search->order[world - 1].key;
  if (exact.best <= bound) return;
  mfsdp__exact_search(&exact, world, bound);
  for (i = 0; i < exact.count && exact.found; ++i)
    build->owner[exact.item[i]] = exact.best_rank[i];
}

#endif /* MFSDP_PLAN_EXACT_H */
