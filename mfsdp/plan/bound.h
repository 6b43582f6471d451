/* SPDX-License-Identifier: MIT */
/*
 * plan/bound.h - what no plan can beat: lower bounds on the largest load.
 *
 *   bound = mfsdp__bound_prove(items, prefix, count, base_load, bases, world);
 *   // bound.value, bound.kind
 *
 * Four arguments, each valid for every assignment of whole items to ranks that start from base
 * loads:
 *   VOLUME        All costs poured like water over the base loads reach level T; some rank ends at
 *                 or above T, and no rank ends below its own base load.
 *   LARGEST       The costliest item lies somewhere, on a base load at least the smallest.
 *   PIGEONHOLE    Of the k*world + 1 costliest items some rank has k + 1, which cost at least the
 *                 k + 1 cheapest of these.
 *   DIVISIBILITY  Items are whole. For a level T and a size s: an item above T - s leaves no room
 *                 for one of size s or more, so it has its rank to itself among these; the other
 *                 ranks hold the items of s to T - s, and no rank more of their weight than the
 *                 heaviest set of them that costs at most T, whatever weights they are given. Where
 *                 that is too little, T is proven too low. (The first half is the bound L2 of
 *                 Martello and Toth for bin packing, 1990; the second a dual feasible function.)
 * Private to the plan.
 * Does not: allocate, or place anything.
 * Link flags: none.
 */
#ifndef MFSDP_PLAN_BOUND_H
#define MFSDP_PLAN_BOUND_H

#include "desc.h"
#include "heap.h"

/* Sizes that DIVISIBILITY tries per level, distinct costs and steps it spends on one set.
 * Fewer only weaken the bound. */
#define MFSDP__BOUND_SIZES 512
#define MFSDP__BOUND_CLASSES 24
#define MFSDP__BOUND_STEPS 4096

typedef struct mfsdp__bound {
  const mfsdp__keyed *sorted;  /* count entries, ascending: key is -cost, so the costliest first */
  const int64_t *prefix;       /* count + 1: sums of the first costs */
  int64_t count, world, least; /* least: the smallest base load */
  int64_t value;
  mfsdp_plan_bound kind;
} mfsdp__bound;

MFSDP_API void mfsdp__bound_raise(mfsdp__bound *bound, int64_t value, mfsdp_plan_bound kind) {
  if (bound->kind != 0 && value <= bound->value) return;
  bound->value = value;
  bound->kind = kind;
}

/* How many items cost more than `cost`. */
MFSDP_API int64_t mfsdp__bound_above(const mfsdp__bound *bound, int64_t cost) {
  int64_t low = 0, high = bound->count;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (-bound->sorted[middle].key > cost)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

MFSDP_API int64_t mfsdp__gcd(int64_t a, int64_t b) {
  while (b != 0) {
    const int64_t rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}

/* Distinct costs of a range of items, the largest first, and a weight for each. */
typedef struct mfsdp__classes {
  int64_t cost[MFSDP__BOUND_CLASSES], many[MFSDP__BOUND_CLASSES], weight[MFSDP__BOUND_CLASSES];
  int32_t count;
} mfsdp__classes;

/* 0 if there are too many. */
MFSDP_API int mfsdp__classes_of(const mfsdp__bound *bound, int64_t first, int64_t end,
                                mfsdp__classes *classes) {
  classes->count = 0;
  while (first < end) {
    const int64_t cost = -bound->sorted[first].key;
    const int64_t next = mfsdp__bound_above(bound, cost - 1);
    if (classes->count == MFSDP__BOUND_CLASSES) return 0;
    classes->cost[classes->count] = cost;
    classes->weight[classes->count] = cost;
    classes->many[classes->count++] = (next < end ? next : end) - first;
    first = next;
  }
  return 1;
}

/*
 * Can one rank hold items that cost at most `level` and weigh at least `enough`? 1, 0, or -1 where
 * the search is too long. Depth first, the largest cost first, as many as fit and then fewer.
 */
MFSDP_API int mfsdp__classes_reach(const mfsdp__classes *classes, int64_t level, int64_t enough) {
  int64_t cost[MFSDP__BOUND_CLASSES + 1], weight[MFSDP__BOUND_CLASSES + 1];
  int64_t taken[MFSDP__BOUND_CLASSES + 1]; /* of a class; -1: not tried yet */
  int32_t depth = 0, steps;
  cost[0] = weight[0] = 0;
  taken[0] = -1;
  for (steps = 0; steps < MFSDP__BOUND_STEPS; ++steps) {
    if (weight[depth] >= enough) return 1;
    if (depth == classes->count || taken[depth] == 0) {
      if (depth-- == 0) return 0;
      continue;
    }
    if (taken[depth] < 0) {
      const int64_t fit = (level - cost[depth]) / classes->cost[depth];
      taken[depth] = fit < classes->many[depth] ? fit : classes->many[depth];
    } else {
      --taken[depth];
    }
    cost[depth + 1] = cost[depth] + taken[depth] * classes->cost[depth];
    weight[depth + 1] = weight[depth] + taken[depth] * classes->weight[depth];
    taken[++depth] = -1;
  }
  return -1;
}

/* 1 if `ranks` ranks of this level do not hold all items of the classes: they weigh more than any
 * rank can take times the ranks. Weights: the costs, and then the share of a rank that one item
 * takes where a rank holds nothing else. */
MFSDP_API int mfsdp__classes_exclude(mfsdp__classes *classes, int64_t level, int64_t ranks) {
  int64_t total = 0, divisor = 0, enough;
  int32_t i;
  int reach;
  for (i = 0; i < classes->count; ++i) {
    total += classes->many[i] * classes->cost[i];
    divisor = mfsdp__gcd(divisor, classes->cost[i]);
  }
  enough = total / ranks + (total % ranks > 0);
  reach = mfsdp__classes_reach(classes, level, enough);
  if (reach == 0 || (reach < 0 && level - level % divisor < enough)) return 1;
  total = 0;
  for (i = 0; i < classes->count; ++i) {
    classes->weight[i] = (INT64_C(1) << 24) / (level / classes->cost[i]);
    total += classes->many[i] * classes->weight[i];
  }
  enough = total / ranks + (total % ranks > 0);
  return mfsdp__classes_reach(classes, level, enough) == 0;
}

/* 1 if the argument DIVISIBILITY shows that no plan keeps all ranks at or below level + least. */
MFSDP_API int mfsdp__bound_excludes(const mfsdp__bound *bound, int64_t level) {
  int64_t tried = 0, end = bound->count;
  for (; end > 0 && tried < MFSDP__BOUND_SIZES; ++tried) {
    const int64_t size = -bound->sorted[end - 1].key; /* items 0..end-1 cost at least this */
    const int64_t large = mfsdp__bound_above(bound, level - size);
    const int64_t ranks = bound->world - large, sum = bound->prefix[end] - bound->prefix[large];
    mfsdp__classes classes;
    /* Above half the level each item has a rank to itself, and later there are fewer of them. */
    if (size > level / 2) return end > bound->world;
    if (ranks < 0 || (ranks == 0 && sum > 0)) return 1;
    if (sum > 0 && sum / ranks + (sum % ranks > 0) > level) return 1;
    if (size > 0 && sum > 0 && mfsdp__classes_of(bound, large, end, &classes) &&
        mfsdp__classes_exclude(&classes, level, ranks))
      return 1;
    end = mfsdp__bound_above(bound, size);
  }
  return 0;
}

MFSDP_API void mfsdp__bound_divisibility(mfsdp__bound *bound) {
  const int64_t all = bound->prefix[bound->count];
  int64_t low = bound->value - bound->least, high = low, largest;
  if (bound->count == 0 || low <= 0) return;
  /* Greedy placement keeps a rank below the mean plus one item, and one rank can hold all: no level
   * above is excluded. (The sum of all fits into 64 bits, low plus an item may not.) */
  largest = -bound->sorted[0].key;
  if (low < all) high = all - low > largest ? low + largest : all;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (mfsdp__bound_excludes(bound, middle))
      low = middle + 1;
    else
      high = middle;
  }
  mfsdp__bound_raise(bound, low + bound->least, MFSDP_BOUND_DIVISIBILITY);
}

/* All arguments; the first that reaches the largest value is named. `bases` are the base loads,
 * ascending. */
MFSDP_API void mfsdp__bound_run(mfsdp__bound *bound, const mfsdp__keyed *bases) {
  const int64_t world = bound->world, *prefix = bound->prefix;
  int64_t level = mfsdp__water_level(bases, (int32_t)world, prefix[bound->count]), k;
  bound->least = bases[0].key;
  bound->kind = (mfsdp_plan_bound)0;
  if (bases[world - 1].key > level) level = bases[world - 1].key;
  mfsdp__bound_raise(bound, level, MFSDP_BOUND_VOLUME);
  if (bound->count > 0) mfsdp__bound_raise(bound, bound->least + prefix[1], MFSDP_BOUND_LARGEST);
  for (k = 1; k * world + 1 <= bound->count; ++k)
    mfsdp__bound_raise(bound, bound->least + prefix[k * world + 1] - prefix[k * world - k],
                       MFSDP_BOUND_PIGEONHOLE);
  mfsdp__bound_divisibility(bound);
}

/*
 * Sorts `items` (count; key: -cost), fills prefix (count + 1, the first entry 0 already) and `bases`
 * (world) from base_load (NULL: none), and proves. The bound points to items and prefix.
 */
MFSDP_API mfsdp__bound mfsdp__bound_prove(mfsdp__keyed *items, int64_t *prefix, int32_t count,
                                          const int64_t *base_load, mfsdp__keyed *bases,
                                          int32_t world) {
  mfsdp__bound bound;
  int32_t i;
  mfsdp__keyed_sort(items, count);
  for (i = 0; i < count; ++i)
    prefix[i + 1] = prefix[i] - items[i].key;
  for (i = 0; i < world; ++i) {
    bases[i].key = base_load ? base_load[i] : 0;
    bases[i].id = i;
  }
  mfsdp__keyed_sort(bases, world);
  memset(&bound, 0, sizeof(bound));
  bound.sorted = items;
  bound.prefix = prefix;
  bound.count = count;
  bound.world = world;
  mfsdp__bound_run(&bound, bases);
  return bound;
}

#endif /* MFSDP_PLAN_BOUND_H */
